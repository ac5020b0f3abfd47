"""Tells the driver that workers have failed: Ray Train starts the group again, or waits for room.

Ray Train calls this in a process of its own, which may not wait for the driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray.train import UserCallback

if TYPE_CHECKING:
    from ray.util.queue import Queue


class TellLost(UserCallback):
    """Puts `message` into the queue of the group (worker_group.py) when any worker has failed."""

    def __init__(self, queue: Queue, message: bytes) -> None:
        self._queue = queue
        self._message = message

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        # Not `Queue.put`, which waits while the queue is full.
        self._queue.actor.put.remote(self._message)
