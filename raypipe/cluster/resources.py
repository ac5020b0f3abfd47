"""What each node of the cluster has, and what fits on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def resources_by_node() -> list[dict[str, float]]:
    """The resources of each living node by name; none where no cluster is joined."""
    import ray

    if not ray.is_initialized():
        return []
    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def cluster_cpus() -> float:
    """The CPUs of all nodes together; 1 where no cluster is joined."""
    import ray

    if not ray.is_initialized():
        return 1.0
    return max(1.0, float(ray.cluster_resources().get("CPU", 1.0)))


def room_for(nodes: Sequence[Mapping[str, float]], gpus: float) -> tuple[int, int]:
    """How many workers with so many GPUs fit, and how many CPUs each of them can have.

    nodes: the resources of each. What fits on no node would be waited for without an end. Ray takes
    parts of one GPU, and whole ones.
    """
    if gpus > 1 and gpus != int(gpus):
        return 0, 0
    workers, cpus = 0, []
    for node in nodes:
        gpu, cpu = int(node.get("GPU", 0)), int(node.get("CPU", 0))
        # None has parts of two. 1e-9: three times a third is one.
        fit = gpu // int(gpus) if gpus >= 1 else gpu * int(1 / gpus + 1e-9)
        fit = min(fit, cpu)
        if fit:
            workers += fit
            cpus.append(cpu // fit)
    return workers, min(cpus, default=0)
