"""Readers on the other nodes of the cluster: one actor a node, which ends with the driver.

An actor takes no CPU and no GPU. Nobody waits for it: an answer that is late counts at the next
turn, and an actor whose node has left is forgotten.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from raypipe.cluster import ray_private, usage
from raypipe.cluster.node_reader import NodeReader, Size
from raypipe.cluster.usage import Node, Nodes, Sample

# Between two trials a node is free for a moment.
IDLE_TURNS = 3
# How long the end of a run waits for readings under way.
PATIENCE_S = 2.0


@dataclass
class _Seat:
    """An actor on a node, and the answer that is under way. asked_at: unix seconds."""

    name: str
    actor: Any
    answer: Any
    asked_at: float
    has_size: bool = False
    idle_turns: int = 0


class OtherNodes:
    """The nodes of the cluster beside the driver's; their actors end with `close`."""

    def __init__(self) -> None:
        self._seats: dict[str, _Seat] = {}  # by Ray's id of the node
        self._names: dict[str, str] = {}  # of the nodes that live, by the same id

    def turn(self, nodes: Nodes, here: str, seconds: float, last: bool) -> None:
        """Take the answers that are there, and ask again; last: wait for them a moment."""
        import ray

        if not ray.is_initialized():
            return
        self._collect(nodes)
        if last:
            asked = [seat.answer for seat in self._seats.values()]
            if asked:
                ray.wait(asked, num_returns=len(asked), timeout=PATIENCE_S)
            self._collect(nodes)
            return
        own_id = ray.get_runtime_context().get_node_id()
        # A head without CPUs, on which nothing can run, is no idle node.
        alive = {n["NodeID"]: n for n in ray.nodes() if n["Alive"] and _can_run(n["Resources"])}
        alive.pop(own_id, None)
        self._names = {id: name for id, name in self._names.items() if id in alive}
        for node_id in set(self._seats) - set(alive):
            self._leave(node_id)
        free = ray_private.free_resources() if alive else {}
        for node_id, node in alive.items():
            self._names.setdefault(node_id, self._new_name(node_id, node, here))
            used = _is_used(node["Resources"], free.get(node_id, {}))
            self._attend(node_id, node, used, nodes, seconds)

    def close(self) -> None:
        for node_id in list(self._seats):
            self._leave(node_id)

    def _attend(
        self, node_id: str, node: Mapping[str, Any], used: bool, nodes: Nodes, seconds: float
    ) -> None:
        """Give one node an actor when it is used, and take it away when it is not."""
        name = self._names[node_id]
        seat = self._seats.get(node_id)
        if seat is None and used:
            self._seats[node_id] = _seated(node_id, name)
        elif seat is None:
            nodes.setdefault(name, Node(_size_told_by_ray(node))).unused_s += seconds
        else:
            seat.idle_turns = 0 if used else seat.idle_turns + 1
            if seat.idle_turns >= IDLE_TURNS:
                self._leave(node_id)

    def _collect(self, nodes: Nodes) -> None:
        """Take each answer that has come, and ask that actor again."""
        import ray

        for node_id, seat in list(self._seats.items()):
            ready, _ = ray.wait([seat.answer], timeout=0)
            if not ready:
                continue
            try:
                answer = ray.get(ready[0])
            except Exception:
                # The node has left, or has no room for a process. The next turn tries again.
                self._leave(node_id)
                continue
            if not seat.has_size:
                seat.has_size = True
                size = Size(**answer)
                nodes.setdefault(seat.name, Node(size)).size = size
            else:
                usage.add(nodes[seat.name], seat.asked_at, answer)
            seat.answer, seat.asked_at = seat.actor.read.remote(), time.time()

    def _new_name(self, node_id: str, node: Mapping[str, Any], here: str) -> str:
        """The node's host name; with a number if another node that lives has that name."""
        host = str(node.get("NodeManagerHostname") or node_id[:8])
        taken = {here, *self._names.values()}
        name, number = host, 1
        while name in taken:
            number += 1
            name = f"{host}-{number}"
        return name

    def _leave(self, node_id: str) -> None:
        import ray

        seat = self._seats.pop(node_id)
        # Its node or the whole cluster may be gone.
        with suppress(Exception):
            ray.kill(seat.actor)


def _seated(node_id: str, name: str) -> _Seat:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    kind = ray.remote(num_cpus=0, max_restarts=0, scheduling_strategy=there)(NodeUsage)
    actor = kind.remote()
    return _Seat(name, actor, actor.size.remote(), time.time())


class NodeUsage:
    """A NodeReader in a process of Ray's. Its dashboard shows this class's name."""

    def __init__(self) -> None:
        self._reader = NodeReader()

    def size(self) -> dict[str, Any]:
        return asdict(self._reader.size())

    def read(self) -> Sample:
        return self._reader.read()


def _can_run(has: Mapping[str, float]) -> bool:
    return any(has.get(name, 0.0) > 0 for name in ("CPU", "GPU"))


def _is_used(has: Mapping[str, float], free: Mapping[str, float]) -> bool:
    """Has anything a CPU or a GPU of this node?"""
    return any(free.get(name, 0.0) < has.get(name, 0.0) - 1e-6 for name in ("CPU", "GPU"))


def _size_told_by_ray(node: Mapping[str, Any]) -> Size:
    """Of a node that was never read."""
    has = node["Resources"]
    return Size(has.get("CPU", 0.0), "ray", has.get("memory", 0.0) / 1e6, "ray")
