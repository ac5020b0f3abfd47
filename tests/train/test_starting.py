"""A training on workers that waits for room says so, and SIGTERM ends it."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from raypipe.errors import RaypipeError
from raypipe.train import starting, trainer, worker_group
from raypipe.train.loop import LoopState
from raypipe.train.lost_workers import TellLost

from .conftest import Jobs

pytestmark = pytest.mark.usefixtures("ray_session")


@ray.remote(num_cpus=2)
class Other:
    """Somebody's work, which has both CPUs of the cluster."""

    def here(self) -> None:
        pass


@pytest.mark.slow
@pytest.mark.share
def test_a_training_that_waits_for_room_says_so_and_can_be_stopped(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(starting, "PATIENCE_S", 1.0)
    # The images are decoded in the workers: a task would wait for a CPU, too.
    job = jobs(**{"train.workers": 2, "feed.carrier": "threads"})
    other = Other.remote()
    ray.get(other.here.remote())
    stop = threading.Timer(6.0, os.kill, (os.getpid(), signal.SIGTERM))
    stop.start()
    began = time.monotonic()
    try:
        with caplog.at_level(logging.INFO, "raypipe"), pytest.raises(RaypipeError) as stopped:
            trainer.run(job)
    finally:
        stop.cancel()
        ray.kill(other)
    assert "Stopped on request (got 'SIGTERM')" in str(stopped.value)
    assert time.monotonic() - began < 30, "Ray Train would wait for ever"
    assert "2 workers of 1 CPU each have not started yet. Free are 0 CPU" in caplog.text
    # What comes next has the place, and its result is there.
    assert len(trainer.run(job).history) == job.train.epochs


def _within(seconds: float, holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


def test_a_group_whose_workers_failed_has_not_started(tmp_path: Path) -> None:
    """What rank 0 had said once held for ever: no later wait was told, or ended by SIGTERM."""
    queue = worker_group._queue_beside_driver(1)
    started, free, epochs = threading.Event(), threading.Event(), list[int]()

    def epoch(metrics: dict[str, float], state: LoopState) -> None:
        epochs.append(len(epochs))
        free.wait(30)

    def none() -> None:
        pass

    def put(message: object) -> None:
        queue.put(pickle.dumps(message))

    callbacks = worker_group.Callbacks(none, epoch)
    with worker_group._relayed(queue, callbacks, started, tmp_path / "leave"):
        put(worker_group.Started())
        assert _within(30, started.is_set)
        # The consumer waits, and the queue is full: Ray Train must not wait for either.
        for _ in range(2):
            put(worker_group.EpochEnded({}, LoopState()))
        TellLost(queue, pickle.dumps(worker_group.Lost())).after_exception(None, {})
        assert started.is_set()
        free.set()
        assert _within(30, lambda: not started.is_set()) and len(epochs) == 2
        put(worker_group.Started())
        assert _within(30, started.is_set)


def test_every_wait_is_told_and_ended_by_sigterm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a failure nothing was said, and SIGTERM made a file that no worker was there to see."""
    monkeypatch.setattr(starting, "PATIENCE_S", 0.2)
    started, leave, looks = threading.Event(), tmp_path / "leave", list[int]()

    def free() -> dict[str, dict[str, float]]:
        looks.append(1)
        if len(looks) == 1:
            raise ConnectionError("the cluster's head starts again")
        return {"node": {"CPU": 1.0}}

    monkeypatch.setattr(starting, "free_resources", free)
    words = "2 workers of 1 CPU each have not started yet. Free are 1 CPU"
    started.set()
    with (
        caplog.at_level(logging.INFO, "raypipe"),
        pytest.raises(starting.StoppedBeforeStart),
        starting.watched(started, leave, 2, {"CPU": 1.0}),
    ):
        signal.raise_signal(signal.SIGTERM)
        assert leave.exists() and not _within(0.5, lambda: words in caplog.text)
        started.clear()
        assert _within(30, lambda: words in caplog.text) and len(looks) >= 2
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("the wait goes on")


def test_a_sigterm_that_workers_took_with_them_ends_the_wait_for_the_next(tmp_path: Path) -> None:
    """A node that is shut down signals all its processes: the driver's word reached nobody."""
    started, leave = threading.Event(), tmp_path / "leave"
    started.set()
    lost = threading.Timer(0.2, starting.workers_lost, (started, leave))
    with (
        pytest.raises(starting.StoppedBeforeStart),
        starting.watched(started, leave, 2, {"CPU": 1.0}),
    ):
        signal.raise_signal(signal.SIGTERM)
        assert leave.exists()
        lost.start()
        # As Ray waits: it looks for signals in between.
        assert _within(10, lambda: False), "the wait goes on"


def test_lost_workers_end_nothing_that_nobody_asked_to_stop(tmp_path: Path) -> None:
    started, leave = threading.Event(), tmp_path / "leave"
    started.set()
    with starting.watched(started, leave, 2, {"CPU": 1.0}):
        starting.workers_lost(started, leave)
    # The group is over, and whose SIGTERM ends the process is not this module's to say.
    leave.touch()
    starting.workers_lost(started, leave)
    assert not started.is_set()
