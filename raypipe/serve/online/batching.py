"""Predicts the images of many requests on a few threads, together where that pays.

There is one worker thread a CPU, and torch takes one thread in each: on CPUs that answers more
requests than one prediction on all cores, which waits for its slowest part. A worker takes its
share of what waits (a half of it where there are two workers), decodes and predicts it, and takes
the next share. So nothing waits for a batch to fill, and batches grow with the load by themselves.

How large a share may be is the batch plan's to say:

- off: one image.
- on: up to `batch_size`.
- auto: the sizes that were measured to pay when the replica started (`measure`). Where two images
  together take clearly longer than one after the other, that is one image.

Requests wait in a line for each role. A challenger has threads of its own, so one that hangs keeps
no request from the champion. A shadow's images are taken only when a champion's thread is free, a
few at a time, and the oldest of them are dropped when there are too many.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from asyncio import AbstractEventLoop, Future
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from raypipe.errors import DataError, one_line, traced
from raypipe.images.decode import BadImage, decode_into
from raypipe.models.labels import Kind
from raypipe.registry.package import Package
from raypipe.serve.online.models import Models, Role, Served

log = logging.getLogger("raypipe")
Line = Literal["champion", "challenger", "shadow"]
MOST_SHADOWS = 256  # images that wait for a shadow
MOST_SHADOW_BYTES = 64 * 2**20  # of these images; serve.queue_mb counts requests without an answer
CLOSE_S = 5.0  # to wait for workers at the end
SHADOW_BATCH = 4  # predicted together, because they take time from answers meanwhile
LOOK_S = 0.01  # between two looks whether a shadow may be predicted
ROUND_S = 0.15  # of measuring one batch size
ROUNDS = 2
BUDGET_S = 3.0  # of measuring all of them
# A batch takes less Python an image than single requests do. Measuring the model alone does not
# show that, and two measurements of one size differ by 10 %. So a size pays unless it is clearly
# slower.
PAYS = 0.9


@dataclass(frozen=True)
class Outcome:
    """What became of one image.

    version: the model's that answered. by: the role that answered, which is the champion's where
    a challenger failed. label, scores_C, features_D: None for an image that is bad, or a model that
    failed; then `bad` or `failed` says why.
    """

    version: str
    by: Role
    classes: tuple[str, ...]
    task: Kind = "single_label"
    batch: int = 1
    label: str | None = None
    scores_C: np.ndarray | None = None
    features_D: np.ndarray | None = None
    bad: BadImage | None = None
    failed: str = ""


Done = Callable[[Outcome], None]


@dataclass
class Item:
    """One image that waits; `done` is called on a worker thread, `gone` says that nobody waits."""

    data: bytes
    done: Done
    gone: Callable[[], bool]
    since: float


def _too_many(shadows: Sequence[Item]) -> bool:
    held = sum(len(item.data) for item in shadows)
    return len(shadows) > MOST_SHADOWS or held > MOST_SHADOW_BYTES


@dataclass(frozen=True)
class BatchPlan:
    """Which batch sizes are used.

    sizes: ascending, beginning with 1. Between the last two any number may be taken.
    wait_s: how long a batch that is not full waits. rates: images a second by size, where measured.
    """

    sizes: tuple[int, ...]
    wait_s: float = 0.0
    rates: tuple[float, ...] = ()

    def take(self, waiting: int, workers: int) -> int:
        """How many of the waiting images one worker takes."""
        share = max(1, math.ceil(waiting / workers))
        return min(share, self.sizes[-1])

    def __str__(self) -> str:
        most = self.sizes[-1]
        return f"batches of up to {most}" if most > 1 else "one by one"


def off() -> BatchPlan:
    return BatchPlan((1,))


def on(batch_size: int, wait_ms: float) -> BatchPlan:
    return BatchPlan((1, batch_size), wait_ms / 1000)


def measure(package: Package, workers: int, batch_size: int) -> BatchPlan:
    """The plan for this model on this machine: sizes are tried in turn, all workers at a time.

    Sizes double up to `batch_size`, or until the time is used up.
    """
    # 1, 2, 4 and so on, up to the most that is allowed.
    sizes = [1]
    while sizes[-1] < batch_size:
        sizes.append(min(2 * sizes[-1], batch_size))
    best = dict.fromkeys(sizes, 0.0)
    started = time.monotonic()
    _rate(package, workers, 1)  # the first predictions of a thread are slow
    # Rounds over all sizes, so that a busy moment does not fall on one size alone.
    for _ in range(ROUNDS):
        for size in sizes:
            if time.monotonic() - started < BUDGET_S:
                best[size] = max(best[size], _rate(package, workers, size))
    # The largest that is not clearly slower than the best. A batch is never waited for, so a large
    # one is only taken when so many wait.
    least = PAYS * max(best.values())
    most = max(size for size in sizes if best[size] >= least)
    within = [size for size in sizes if size <= most]
    rates = [round(best[size], 1) for size in within]
    return BatchPlan(tuple(within), rates=tuple(rates))


def _rate(package: Package, workers: int, size: int) -> float:
    """Images a second of batches of this size, on as many threads as answer requests."""
    side = package.side_px
    pixels_NHWC = np.full((size, side, side, 3), 128, np.uint8)
    counts = [0] * workers
    until = time.monotonic() + ROUND_S

    def predict(worker: int) -> None:
        # As the workers that answer requests.
        torch.set_num_threads(1)
        while time.monotonic() < until or not counts[worker]:
            # No finite answer to grey takes as long as one.
            with suppress(DataError):
                package.predict_pixels(pixels_NHWC)
            counts[worker] += size

    started = time.monotonic()
    threads = [threading.Thread(target=predict, args=(n,)) for n in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.monotonic() - started)


class Batcher:
    """The lines and their workers. `submit` and `shadow` are called from the event loop."""

    def __init__(
        self,
        models: Models,
        plan: BatchPlan,
        workers: int,
        max_pixels: int,
        challenged: bool = False,
    ) -> None:
        """workers: threads of the champion, and as many of a challenger if there may be one."""
        self.models, self.plan, self.workers = models, plan, workers
        self._max_pixels = max_pixels
        self._lines: dict[Line, deque[Item]] = {
            "champion": deque(),
            "challenger": deque(),
            "shadow": deque(),
        }
        self._change = threading.Condition()
        self._closed = False
        # By thread: when it took the batch that it is at.
        self._at_work: dict[threading.Thread, float] = {}
        self._threads = self._started("champion")
        self._others = self._started("challenger") if challenged else []

    def submit(self, role: Role, data: bytes, loop: AbstractEventLoop) -> Future[Outcome]:
        """The outcome of one image, on this event loop. Cancel it if nobody waits any more."""
        future: Future[Outcome] = loop.create_future()

        # The client may have gone by then; its future is cancelled.
        def resolve(outcome: Outcome) -> None:
            if not future.done():
                future.set_result(outcome)

        # From a worker thread to the event loop. A server that stops has closed it.
        def done(outcome: Outcome) -> None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(resolve, outcome)

        self._put(role, Item(data, done, future.done, time.monotonic()))
        return future

    def shadow(self, data: bytes, done: Done) -> int:
        """Show an image to the challenger; `done` is called on a worker thread.

        Returns how many older images were dropped for it: their `done` is never called.
        """
        return self._put("shadow", Item(data, done, lambda: False, time.monotonic()))

    def waiting(self) -> int:
        return len(self._lines["champion"]) + len(self._lines["challenger"])

    def alive(self) -> bool:
        """Do all workers live? A replica without them answers nothing."""
        return all(thread.is_alive() for thread in (*self._threads, *self._others))

    def hangs(self, seconds: float) -> bool:
        """Has every thread of the challenger been at one batch for so long?"""
        before = time.monotonic() - seconds
        began = [self._at_work.get(thread, math.inf) for thread in self._others]
        return bool(began) and max(began) < before

    def close(self) -> None:
        """End the workers when the lines are empty; those that hang are left behind."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        until = time.monotonic() + CLOSE_S
        for thread in (*self._threads, *self._others):
            thread.join(timeout=max(0.0, until - time.monotonic()))

    def _put(self, line: Line, item: Item) -> int:
        dropped = 0
        with self._change:
            waiting = self._lines[line]
            waiting.append(item)
            # Shadows that wait are bounded: the oldest of them go.
            while line == "shadow" and _too_many(waiting):
                waiting.popleft()
                dropped += 1
            # A thread of the other role may be the one that wakes up.
            self._change.notify_all() if self._others else self._change.notify()
        return dropped

    def _started(self, role: Role) -> list[threading.Thread]:
        threads = [
            threading.Thread(target=self._work, args=(role,), name=f"{role}-{n}", daemon=True)
            for n in range(self.workers)
        ]
        for thread in threads:
            thread.start()
        return threads

    def _work(self, role: Role) -> None:
        """A worker: take a share, predict it, take the next."""
        torch.set_num_threads(1)
        own = threading.current_thread()
        while True:
            taken = self._take(role)
            if taken is None:
                return
            line, items = taken
            try:
                self._answer(line, items)
            except Exception as e:
                # A worker that ended would leave its requests without an answer.
                log.error("A batch failed: %s", traced(e))
                for item in items:
                    item.done(Outcome("", "champion", (), failed=one_line(e)))
            self._at_work.pop(own, None)

    def _take(self, role: Role) -> tuple[Line, list[Item]] | None:
        """The next images of one line of this role; None when closed and empty."""
        with self._change:
            while True:
                line = self._next_line(role)
                if line is None:
                    if self._closed:
                        return None
                    # Nobody tells when a champion's thread becomes free for a shadow.
                    is_shadow = role == "challenger" and bool(self._lines["shadow"])
                    self._change.wait(LOOK_S if is_shadow else None)
                    continue
                waiting = self._lines[line]
                most = self.plan.take(len(waiting), self.workers)
                if line == "shadow":
                    most = min(most, SHADOW_BATCH)
                # A batch that may wait does so until it is full; somebody else may take it.
                left_s = waiting[0].since + self.plan.wait_s - time.monotonic()
                if left_s > 0 and len(waiting) < self.plan.sizes[-1] and not self._closed:
                    self._change.wait(left_s)
                    continue
                self._at_work[threading.current_thread()] = time.monotonic()
                return line, [waiting.popleft() for _ in range(most)]

    def _next_line(self, role: Role) -> Line | None:
        """The line that a thread of this role serves now; shadows come last."""
        if self._lines[role]:
            return role
        if role == "champion" or not self._lines["shadow"]:
            return None
        # A shadow uses what the champion leaves: the time of a thread that has nothing to do.
        busy = sum(thread in self._at_work for thread in self._threads)
        free = not self._lines["champion"] and busy < self.workers
        return "shadow" if free or self._closed else None

    def _answer(self, line: Line, items: Sequence[Item]) -> None:
        # Nobody waits for the others any more.
        items = [item for item in items if not item.gone()]
        role: Role = "champion" if line == "champion" else "challenger"
        served = self.models.of(role)
        if served is None:
            # The challenger has left since, or was never loaded.
            self._instead(line, items, "there is no challenger")
            return
        pixels_NHWC, good = self._decode(served, role, items)
        if not good:
            return
        # Each image has its own outcome, also where the batch failed as a whole.
        for item, outcome in zip(good, predict(served, role, pixels_NHWC), strict=True):
            if outcome.failed:
                # The champion's failures are logged with the request that gets a 500.
                if role == "challenger":
                    log.warning("%s failed on an image: %s", served.version, outcome.failed)
                self._instead(line, [item], outcome.failed, outcome)
            else:
                item.done(outcome)

    def _decode(
        self, served: Served, role: Role, items: Sequence[Item]
    ) -> tuple[np.ndarray, list[Item]]:
        """pixels_NHWC and the items of the images that decode; the others are answered."""
        side = served.package.side_px
        pixels_NHWC = np.empty((len(items), side, side, 3), np.uint8)
        good: list[Item] = []
        for item in items:
            try:
                decode_into(item.data, pixels_NHWC[len(good)], self._max_pixels)
                good.append(item)
            except BadImage as bad:
                item.done(Outcome(served.version, role, served.package.classes, bad=bad))
        return pixels_NHWC[: len(good)], good

    def _instead(
        self, line: Line, items: Sequence[Item], why: str, outcome: Outcome | None = None
    ) -> None:
        """A model failed: the champion answers for a challenger; nobody answers for a champion."""
        for item in items:
            if line == "challenger":
                self._put("champion", item)
            else:
                role: Role = "champion" if line == "champion" else "challenger"
                item.done(outcome or Outcome("", role, (), failed=why))


def predict(served: Served, role: Role, pixels_NHWC: np.ndarray) -> list[Outcome]:
    """One outcome an image. Where a batch fails, each image is tried alone: one image that makes a
    model give NaN does not cost the others their answers."""
    package = served.package
    try:
        predictions = package.predict_pixels(pixels_NHWC)
    except Exception as e:
        if len(pixels_NHWC) > 1:
            alone = [predict(served, role, pixels_NHWC[n : n + 1]) for n in range(len(pixels_NHWC))]
            return [outcomes[0] for outcomes in alone]
        return [Outcome(served.version, role, package.classes, failed=one_line(e))]
    blank = Outcome(
        served.version, role, package.classes, package.task.kind, batch=len(pixels_NHWC)
    )
    outcomes = []
    for n, label in enumerate(predictions.labels):
        scores_C, features_D = predictions.scores_NC[n], predictions.features_ND[n]
        outcomes.append(replace(blank, label=label, scores_C=scores_C, features_D=features_D))
    return outcomes
