"""A training on workers that waits for room says so, and SIGTERM ends it."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

import pytest
import ray

from raypipe.errors import RaypipeError
from raypipe.train import starting, trainer

from .conftest import Jobs

pytestmark = pytest.mark.usefixtures("ray_session")


@ray.remote(num_cpus=2)
class Other:
    """Somebody's work, which has both CPUs of the cluster."""

    def here(self) -> None:
        pass


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
