"""How many workers a training with `train.workers=[fewest, most]` gets: at each start, and while it runs.

raypipe counts the places that are free. Ray Train's own elastic groups count what the nodes have: where somebody else holds
some of it, they ask for places that do not exist. They also stop the workers without notice when they resize, which costs
the steps since the newest checkpoint. Here the workers are told to leave, as by a preempted node: they save the step they
are in, and the next group takes the next one.

To start a group again costs RESTART_S, in which nothing is trained. So a group grows only after GROW_AFTER_S of work, and
only if what is left to train gets shorter by more than that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger("raypipe")
Resources = Mapping[str, float]
LOOK_S = 5.0  # between two looks at the cluster; room counts when two looks in a row see it
GROW_AFTER_S = 60.0
RESTART_S = 30.0  # 18 to 26 s were measured on two cores (processes, imports, process group)
SETTLE_S = 10.0  # a group that ended gives its places back within a second or two


def room(free: Mapping[str, Resources], worker: Resources, decoding: bool = False) -> int:
    """How many workers fit into what is free on each node. `decoding`: one CPU of one node stays free for decode tasks."""
    places = {node: _fits(has, worker) for node, has in free.items()}
    if not decoding:
        return sum(places.values())
    left = [
        places[node] - _fits({**has, "CPU": has["CPU"] - 1}, worker)
        for node, has in free.items()
        if has.get("CPU", 0) >= 1
    ]
    return sum(places.values()) - min(left) if left else 0


def _fits(has: Resources, worker: Resources) -> int:
    return min(
        int(has.get(kind, 0) / amount + 1e-6) for kind, amount in worker.items() if amount > 0
    )


def free() -> dict[str, Resources]:
    """What is free on each node that stays: one that is being taken away starts no workers."""
    from ray._private.state import (
        state,
    )  # the public list of nodes says what they have, not what is free

    going = state.get_draining_nodes()
    return {
        node: has for node, has in state.available_resources_per_node().items() if node not in going
    }


def settled(worker: Resources, decoding: bool, wanted: int) -> int:
    """`room`, once it is enough or no longer changes."""
    deadline, before = time.monotonic() + SETTLE_S, -1
    while (found := room(free(), worker, decoding)) < wanted and time.monotonic() < deadline:
        if found == before and found > 0:
            break
        before = found
        time.sleep(1.0)
    return found


def pays(left_s: float | None, workers: int, most: int) -> bool:
    """Does it pay to start again with `most` workers? left_s: what `workers` still need (None: not known, long)."""
    return most > workers and (left_s is None or left_s * (1 - workers / most) > RESTART_S)


class Growth:
    """Looks for room for more workers while a group trains. It is told when the group `started`: before that its own places
    may still look free, and the group would start again and again to take them. `heard` is told of finished epochs.

    after_s: of work, before the group may grow.
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
        self._workers, self._most, self._worker, self._decoding = workers, most, worker, decoding
        self._epochs, self._after_s = epochs, after_s
        self._running, self._ended = threading.Event(), threading.Event()
        self._since = 0.0
        self._left_s: float | None = None

    def started(self) -> None:
        self._since = time.monotonic()
        self._running.set()

    def heard(self, epoch: int) -> None:
        now = time.monotonic()
        self._left_s, self._since = (self._epochs - epoch) * (now - self._since), now

    @contextmanager
    def watched(self, more: Path) -> Iterator[None]:
        """While the block runs: make the file `more` as soon as it pays to start again with more workers."""
        if self._workers >= self._most:
            yield
            return
        thread = threading.Thread(
            target=self._look, args=(more,), name="raypipe-growth", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            self._running.set()
            thread.join(timeout=10)

    def _look(self, more: Path) -> None:
        self._running.wait()
        started, before = time.monotonic(), 0
        while not self._ended.wait(LOOK_S):
            try:
                extra = room(free(), self._worker, self._decoding)
            except Exception as e:  # a look that fails must not end a training
                log.debug("Could not look for room: %s", e)
                continue
            seen, before = min(extra, before), extra
            reached = min(self._most, self._workers + seen)
            if time.monotonic() - started >= self._after_s and pays(
                self._left_s, self._workers, reached
            ):
                more.touch()
                return
