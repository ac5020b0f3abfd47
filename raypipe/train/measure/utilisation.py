"""How busy the nodes of a run were, and what limited it: a line of the summary.

`limit` is pure. It says only what was measured: CPUs and GPUs as the nodes' samples have them
(cluster/usage.py), and where a step's time went (meter.py). Where they show no single limit, or
there are too few samples, it says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raypipe.cluster.node_reader import CPU, MEMORY, SECONDS
from raypipe.cluster.usage import Node, Nodes

FEWEST_SAMPLES = 3
SHORTEST_S = 10.0
# A share of a step's time that is worth a word, and how busy is full.
MUCH = 0.3
FULL = 0.85
# A node on which nothing ran for a smaller share of the time is not spoken of.
UNUSED = 0.2
_GPU = re.compile(r"gpu_\d+_utilization_percentage")

Epochs = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class NodeUse:
    """One node. Busy and unused are shares from 0 to 1; None: not measured. Sizes in MB."""

    name: str
    cpus: float
    cpu_busy: float | None
    gpus: int
    gpu_busy: float | None
    memory_mb: float | None
    """The most that was used at once."""
    memory_limit_mb: float
    in_container: bool
    """Are CPUs or memory those of a container, rather than the host's?"""
    unused: float
    samples: int
    seconds: float = 0.0
    """That it was read for."""


@dataclass(frozen=True)
class Utilisation:
    """All nodes of a run, and its steps' time by phase: shares of a step from 0 to 1."""

    nodes: tuple[NodeUse, ...]
    phases: Mapping[str, float]
    limit: str | None
    """What limited the run, in words."""

    def text(self) -> str:
        """CPU 93 % of 4 busy, GPU 41 % idle, memory at most 3.1 of 24.0 GB; decoding limits: …"""
        read = [node for node in self.nodes if node.cpu_busy is not None]
        many = f"{len(self.nodes)} nodes: " if len(self.nodes) > 1 else ""
        cpus, busy = _together([(node.cpu_busy, node.cpus, node.seconds) for node in read])
        parts = [f"CPU {busy:.0%} of {cpus:g} busy"]
        gpus, gpu_busy = _together([(node.gpu_busy, node.gpus, node.seconds) for node in read])
        if gpus:
            parts.append(f"GPU {1 - gpu_busy:.0%} of {gpus:g} idle")
        parts += _memory(read)
        parts += [
            f"nothing ran on {node.name} for {node.unused:.0%} of the time"
            for node in self.nodes
            if node.unused >= UNUSED
        ]
        said = many + ", ".join(parts)
        return f"{said}; {self.limit}" if self.limit else said

    def summary(self) -> dict[str, Any]:
        """For --json."""
        return {
            "nodes": [vars(node) for node in self.nodes],
            "step_shares": dict(self.phases),
            "limit": self.limit,
        }


def utilisation(nodes: Nodes, history: Epochs) -> Utilisation | None:
    """What the samples and the epochs say; None with too few samples.

    history: the metrics of all epochs, in a search those of all trials.
    """
    used = [_use_of(name, node) for name, node in nodes.items() if _says_enough(node)]
    if not any(node.cpu_busy is not None for node in used):
        return None
    read = [node for node in used if node.cpu_busy is not None]
    _, cpu = _together([(node.cpu_busy, node.cpus, node.seconds) for node in read])
    gpus, gpu = _together([(node.gpu_busy, node.gpus, node.seconds) for node in read])
    shares = phases(history)
    on_gpu = any("gpu_memory_mb" in epoch for epoch in history)
    said = limit(shares, cpu, gpu if gpus else None, on_gpu)
    return Utilisation(tuple(used), shares, said)


def phases(history: Epochs) -> dict[str, float]:
    """Shares of a step's time by phase, over all epochs.

    An epoch weighs as much as it took: trials read equally many images, at their own rates.
    """
    sums: dict[str, float] = {}
    weights = 0.0
    for epoch in history:
        step_s, rate = epoch.get("step_s", 0.0), epoch.get("images_per_s", 0.0)
        if not step_s > 0 or not rate > 0:
            continue
        weights += 1 / rate
        for name, seconds in epoch.items():
            # A diverged epoch has all its times; NaN is for its losses.
            if name.endswith("_s") and name not in ("step_s", "images_per_s", "gflops_per_s"):
                phase = name.removesuffix("_s")
                sums[phase] = sums.get(phase, 0.0) + seconds / step_s / rate
    return {phase: share / weights for phase, share in sums.items()}


def limit(shares: Mapping[str, float], cpu: float, gpu: float | None, on_gpu: bool) -> str | None:
    """What limited the run; None where nothing stands out.

    shares: of a step, by phase. cpu, gpu: how busy, from 0 to 1; gpu is None without one.
    """
    waited = shares.get("data", 0.0)
    if waited >= MUCH:
        seen = f"steps waited {waited:.0%} of their time for images"
        if cpu >= FULL:
            return f"decoding limits: {seen}, and the CPUs were full"
        return f"reading limits, or feed.threads: {seen}, and the CPUs were not full"
    exchanged = shares.get("communication", 0.0)
    if exchanged >= MUCH:
        return (
            f"the exchange of gradients limits: steps waited {exchanged:.0%} of their time for it"
        )
    between = shares.get("other", 0.0)
    if between >= MUCH:
        return f"checkpoints and reports limit: {between:.0%} of a step's time is between steps"
    if on_gpu:
        return "the GPU limits" if gpu is not None and gpu >= FULL else None
    computed = sum(shares.get(phase, 0.0) for phase in ("forward", "backward", "optimizer"))
    if cpu >= FULL and computed >= 1 - MUCH:
        return f"computing limits: {computed:.0%} of a step, and the CPUs were full"
    return None


def _says_enough(node: Node) -> bool:
    seconds = sum(sample[SECONDS] for sample in node.samples)
    is_read = len(node.samples) >= FEWEST_SAMPLES and seconds >= SHORTEST_S
    return is_read or node.unused_s >= SHORTEST_S


def _use_of(name: str, node: Node) -> NodeUse:
    sampled_s = sum(sample[SECONDS] for sample in node.samples)
    gpus = {key for sample in node.samples for key in sample if _GPU.fullmatch(key)}
    gpu_means = [mean for mean in map(node.mean, gpus) if mean is not None]
    cpu = node.mean(CPU)
    return NodeUse(
        name=name,
        cpus=node.size.cpus,
        cpu_busy=None if cpu is None else cpu / 100,
        gpus=len(gpu_means),
        gpu_busy=sum(gpu_means) / len(gpu_means) / 100 if gpu_means else None,
        memory_mb=node.most(MEMORY),
        memory_limit_mb=node.size.memory_mb,
        in_container="container" in (node.size.cpu_of, node.size.memory_of),
        unused=node.unused_s / max(1e-9, sampled_s + node.unused_s),
        samples=len(node.samples),
        seconds=sampled_s,
    )


def _together(shares: Sequence[tuple[float | None, float, float]]) -> tuple[float, float]:
    """(how many in all, their mean share) of (share, how many, seconds) by node: one that was lost
    after a minute weighs a minute.
    """
    total = weight = busy = 0.0
    for share, count, seconds in shares:
        if share is None:
            continue
        total += count
        weight += count * seconds
        busy += share * count * seconds
    return total, busy / weight if weight else 0.0


def _memory(nodes: Sequence[NodeUse]) -> list[str]:
    """Memory of the fullest node."""
    having = [node for node in nodes if node.memory_mb is not None]
    if not having:
        return []
    fullest = max(having, key=lambda node: (node.memory_mb or 0) / node.memory_limit_mb)
    used, most = (fullest.memory_mb or 0) / 1000, fullest.memory_limit_mb / 1000
    said = f"memory at most {used:.1f} of {most:.1f} GB"
    notes = [f"on {fullest.name}"] if len(nodes) > 1 else []
    notes += ["limits of the container"] if fullest.in_container else []
    return [f"{said} ({', '.join(notes)})" if notes else said]
