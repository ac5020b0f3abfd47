"""Is a folder the same on every node that will write into it?

Without this question a training would find out when its first checkpoint lacks a rank's part, after
an epoch and `train.timeout_s`, and a search by trials that fail one after the other.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from raypipe.errors import ConfigError

LOOK_S = 5.0  # network file systems show a new file late
ANSWER_S = 60.0  # a busy node starts a process slowly


def require_shared(folder: Path, worker: Mapping[str, float], setting: str, fix: str) -> None:
    """Raise ConfigError if a node with room for a worker does not share the driver's `folder`.

    worker: the resources of one. setting: what names the folder, for the message. A cluster of one
    node is not asked; a node that is lost meanwhile or does not answer is left out.
    """
    others = _other_nodes(worker)
    if not others:
        return
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / f".seen-{uuid.uuid4().hex}"
    mark.touch()
    try:
        reasons = _ask(others, mark)
        for node in [node for node, reason in reasons.items() if not reason]:
            if not _appears(_reply(mark, node)):
                reasons[node] = "what it writes there does not arrive here"
    finally:
        for file in folder.glob(f"{mark.name}*"):
            file.unlink(missing_ok=True)
    apart = {others[node]: reason for node, reason in reasons.items() if reason}
    if apart:
        raise ConfigError(
            f"{', '.join(sorted(apart))} and this node do not share {setting}",
            got=str(folder),
            rule=f"Every node that works on a run writes into it; {min(apart.values())}",
            fix=fix,
        )


def _other_nodes(worker: Mapping[str, float]) -> dict[str, str]:
    """The addresses of nodes where a worker fits, by id, without the driver's."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    found: dict[str, str] = {}
    for node in ray.nodes():
        fits = all(node["Resources"].get(kind, 0) >= need for kind, need in worker.items())
        if node["Alive"] and node["NodeID"] != here and fits:
            found[node["NodeID"]] = str(node["NodeManagerAddress"])
    return found


def _ask(nodes: Iterable[str], mark: Path) -> dict[str, str]:
    """By node that answers: "", or why it cannot see the mark and write beside it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=0)(_look)
    asked: dict[Any, str] = {}
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        asked[task.options(scheduling_strategy=there).remote(mark, _reply(mark, node))] = node
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)
    reasons: dict[str, str] = {}
    for reference in answered:
        try:
            reasons[asked[reference]] = ray.get(reference)
        except ray.exceptions.RayError:
            # The node has gone: nothing will run there.
            continue
    return reasons


def _reply(mark: Path, node: str) -> Path:
    return mark.with_name(f"{mark.name}-{node}")


def _look(mark: Path, reply: Path) -> str:
    """On another node: "" once the mark was seen and the reply written, else why not."""
    if not _appears(mark):
        return "the folder there is another one, or missing"
    try:
        reply.touch()
    except OSError as e:
        return e.strerror or str(e)
    return ""


def _appears(file: Path) -> bool:
    deadline = time.monotonic() + LOOK_S
    while not file.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
