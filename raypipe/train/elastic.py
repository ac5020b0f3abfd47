"""How many workers an elastic training gets (`train.workers=[fewest, most]`).

raypipe counts the places that are free. Ray Train's own elastic groups count what the nodes have:
where another job holds part of a node, they ask for places that do not exist. They also stop the
workers without notice when they resize, which costs the steps since the newest checkpoint. Here the
workers leave as they do on a preempted node: they save the step they are in, and the next group
takes the next step.

A restart of the group costs RESTART_S without training. So a group grows only after GROW_AFTER_S of
work, and only if the rest of the training gets shorter by more than a restart.

The protocol while a group trains:

1. `Growth.watched(file)` starts a thread, which waits until the group has started. Before that, the
   group's own places may still look free, and the group would restart again and again to take them.
2. launch.py calls `started()` with the first message of rank 0, and `epoch_ended()` after each
   epoch. The time of the last epoch gives the time that is left.
3. Every LOOK_S the thread counts the free places. Room counts when two looks in a row see it.
4. When growth pays, the thread makes the file and ends. The workers see the file, save and leave.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from raypipe.cluster.ray_private import free_resources

log = logging.getLogger("raypipe")
Resources = Mapping[str, float]

LOOK_S = 5.0  # between two looks at the cluster
GROW_AFTER_S = 60.0
RESTART_S = 30.0  # 18 to 26 s were measured on two cores (processes, imports, process group)
STEADY_S = 10.0  # a group that ended gives its places back within a second or two


def room(free: Mapping[str, Resources], worker: Resources, decoding: bool = False) -> int:
    """How many workers fit into the resources that are free on each node.

    decoding: one CPU of one node stays free for decode tasks.
    """
    places = {node: _fits(resources, worker) for node, resources in free.items()}
    if not decoding:
        return sum(places.values())
    # Keep the CPU free on the node where that costs the fewest places.
    costs = []
    for node, resources in free.items():
        cpus = resources.get("CPU", 0)
        if cpus >= 1:
            without_cpu = {**resources, "CPU": cpus - 1}
            costs.append(places[node] - _fits(without_cpu, worker))
    return sum(places.values()) - min(costs) if costs else 0


def _fits(free: Resources, worker: Resources) -> int:
    """Workers that fit on one node. 1e-6: Ray's arithmetic of fractions is inexact."""
    fits = []
    for kind, need in worker.items():
        if need > 0:
            fits.append(int(free.get(kind, 0) / need + 1e-6))
    return min(fits)


def cpus_of_each(
    nodes: Sequence[Resources], workers: int, more: Resources, decoding: bool
) -> float:
    """The most CPUs that each worker can have, up to one; 0 if not all of them fit.

    nodes: what each has in all. more: what a worker needs beside CPUs. decoding: see `room`. The
    sum of all CPUs is not enough: what is free on two nodes is of no use to a task of one CPU.
    """
    shares = {1.0}
    for node in nodes:
        # A node gives all its CPUs to workers, or all but the one for decode tasks.
        for cpus in (node.get("CPU", 0), node.get("CPU", 0) - 1):
            shares |= {cpus / count for count in range(1, workers + 1) if 0 < cpus < count}
    named = {str(n): node for n, node in enumerate(nodes)}
    for share in sorted(shares, reverse=True):
        # Ray counts in ten-thousandths.
        cpus = math.floor(share * 10_000 + 1e-6) / 10_000
        if cpus > 0 and room(named, {"CPU": cpus, **more}, decoding) >= workers:
            return cpus
    return 0.0


def steady_room(worker: Resources, decoding: bool, wanted: int) -> int:
    """`room`, as soon as it is `wanted` or no longer changes; after STEADY_S in any case."""
    deadline = time.monotonic() + STEADY_S
    before = -1
    while True:
        now = room(free_resources(), worker, decoding)
        # 0 may only mean that the last group has not given its places back yet.
        steady = now == before and now > 0
        if now >= wanted or steady or time.monotonic() >= deadline:
            return now
        before = now
        time.sleep(1.0)


def pays(left_s: float | None, workers: int, most: int) -> bool:
    """Is a restart with `most` workers worth its cost?

    left_s: the time that `workers` workers still need. None means unknown, and counts as long.
    """
    if most <= workers:
        return False
    return left_s is None or left_s * (1 - workers / most) > RESTART_S


class Growth:
    """Looks for room for more workers while one group trains; the protocol is at the top.

    workers: size of the group. most: size it may reach. after_s: of work, before it may grow.
    """

    def __init__(
        self,
        workers: int,
        most: int,
        worker: Resources,
        decoding: bool,
        epochs: int,
        after_s: float,
    ) -> None:
        self._workers = workers
        self._most = most
        self._worker = worker
        self._decoding = decoding
        self._epochs = epochs
        self._after_s = after_s
        self._running = threading.Event()
        self._ended = threading.Event()
        self._last_report = 0.0
        self._left_s: float | None = None

    def started(self) -> None:
        """The group runs."""
        self._last_report = time.monotonic()
        self._running.set()

    def epoch_ended(self, epoch: int) -> None:
        """`epoch` epochs are finished. The time of the last one gives the time that is left."""
        now = time.monotonic()
        epoch_s = now - self._last_report
        self._left_s = (self._epochs - epoch) * epoch_s
        self._last_report = now

    @contextmanager
    def watched(self, file: Path) -> Iterator[None]:
        """While the block runs: make `file` as soon as a restart with more workers pays."""
        if self._workers >= self._most:
            yield
            return
        thread = threading.Thread(
            target=self._look, args=(file,), name="raypipe-growth", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            # Wake the thread if the group never started.
            self._running.set()
            thread.join(timeout=10)

    def _look(self, file: Path) -> None:
        self._running.wait()
        started = time.monotonic()
        room_before = 0
        while not self._ended.wait(LOOK_S):
            try:
                room_now = room(free_resources(), self._worker, self._decoding)
            except Exception as e:
                # A look that fails must not end a training.
                log.debug("Could not look for room: %s", e)
                continue
            # Room counts only if two looks in a row see it.
            seen_twice = min(room_now, room_before)
            room_before = room_now
            reached = min(self._most, self._workers + seen_twice)
            worked_s = time.monotonic() - started
            if worked_s >= self._after_s and pays(self._left_s, self._workers, reached):
                file.touch()
                return
