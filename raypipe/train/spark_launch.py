"""One training on the executors of a Spark application that has no Ray.

`train.launcher=torch_distributor` takes the place of launch.py: the same plan, loop, checkpoints
and folder, so that a run which began under one launcher goes on under the other.

PySpark's TorchDistributor starts the workers: one torchrun for each of so many barrier tasks. It
serves DeepSpeed too, because raypipe's own engines call deepspeed.initialize.
DeepspeedTorchDistributor would only add --deepspeed to the command, and starts torchrun without the
process that ends it with its executor (read in pyspark 4.1).

1. A thread runs the Spark job. The calling thread looks four times a second for messages of the
   workers, and passes them on (spark_messages.py).
2. A group has failed when a worker wrote an error, or when Spark counts a failed task: an executor
   was lost. Then the job is cancelled. Up to `train.max_failures` times a new group resumes from
   the newest checkpoint.
3. SIGTERM makes the file `leave`: the workers save and leave, and no new group starts.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from raypipe.cluster import pyspark_private, spark_hook, spark_session
from raypipe.errors import RaypipeError, Unreachable
from raypipe.train import checkpoint
from raypipe.train.checkpoint.saver import newest
from raypipe.train.job import TrainJob
from raypipe.train.loop import LoopState, Report
from raypipe.train.measure.meter import ReportPosition
from raypipe.train.spark_messages import Inbox
from raypipe.train.spark_place import PURPOSE, require_room, uses_gpu
from raypipe.train.spark_worker import Around, Setup, run, without_options
from raypipe.train.worker import Data

log = logging.getLogger("raypipe")
LOOK_S = 0.25
ASK_S = 1.0  # a question to Spark's Java process takes a millisecond
OTHERS_S = 2.0  # errors of other workers arrive within
FAIL_S = 15.0  # Spark tries a failed stage four times
END_S = 30.0
WAIT_S = 60.0  # workers start within 10 s on an idle machine


def on_executors(
    job: TrainJob,
    data: Data,
    checkpoints: Path,
    leave: Path,
    progress: Report,
    report_position: ReportPosition,
) -> LoopState:
    """Train until the end, through failures; the state the training ended with.

    progress: called after each epoch. report_position: called with the position in the epoch, about
    once a second. The state is unfinished when the file `leave` appeared.

    Raises RaypipeError when more workers failed than `train.max_failures`.
    """
    session = spark_session.get(PURPOSE)
    failures = 0
    while True:
        try:
            group = _Group(job, data, checkpoints, leave, session)
            state = group.run(progress, report_position)
            return state or _newest_state(checkpoints)
        except RaypipeError as e:
            failures += 1
            # Asking again would give the same answer.
            is_final = e.exit_code == 2 and not isinstance(e, Unreachable)
            if is_final or failures > job.train.max_failures or spark_session.has_ended(session):
                raise
            if leave.exists():
                return _newest_state(checkpoints)
            log.info("Going on from the newest checkpoint. %s", e)
            require_room(job)


def _newest_state(checkpoints: Path) -> LoopState:
    folder = newest(checkpoints)
    return checkpoint.read(folder, verified=True).state if folder else LoopState()


class _Group:
    """One group of workers, which are the tasks of one Spark job."""

    def __init__(
        self, job: TrainJob, data: Data, checkpoints: Path, leave: Path, session: Any
    ) -> None:
        self.context = session.sparkContext
        self._session = session
        self._leave = leave
        self._workers = job.train.most_workers
        self._gpu = uses_gpu(job.train, self.context.getConf())
        self._outcome: dict[str, Any] = {}  # of the Spark job: its `state`, or its `error`
        self.name = f"inbox-{uuid.uuid4().hex}"
        self._inbox = Inbox(checkpoints.with_name(self.name), self._workers)
        plain, options = without_options(data)
        fields = job.model_dump(mode="json")
        setup = Setup(fields, plain, checkpoints, leave, self._inbox.folder, self._gpu)
        broadcast = self.context.broadcast(pickle.dumps(setup))
        self._around = Around(spark_hook.carried(), options, broadcast, self._inbox.folder)

    def run(self, progress: Report, report_position: ReportPosition) -> LoopState | None:
        """Start the workers, and wait until they end, leave or fail; None: they never began."""
        from pyspark import InheritableThread

        self._inbox.make()
        thread = InheritableThread(target=self._spark_job, daemon=True)
        thread.start()
        try:
            for _ in self._until_it_ends(thread):
                self._inbox.relay(progress, report_position)
            self._inbox.relay(progress, report_position)
            return self._state()
        finally:
            self._end(thread)

    def _spark_job(self) -> None:
        """In a thread of its own, because a job group belongs to its thread."""
        try:
            self.context.setJobGroup(self.name, "raypipe train", interruptOnCancel=True)
            state = pyspark_private.run(run, self._workers, self._gpu, self._around)
            self._outcome["state"] = state
        except BaseException as e:
            self._outcome["error"] = e

    def _until_it_ends(self, thread: threading.Thread) -> Iterator[None]:
        """Yields four times a second while the group works."""
        began = asked_at = time.monotonic()
        failed_at = None
        waits = False
        while thread.is_alive():
            yield
            thread.join(LOOK_S)
            now = time.monotonic()
            # Has it failed? What is known then, arrives within some seconds.
            if failed_at is None and self._inbox.has_error():
                failed_at = now
            elif failed_at is None and now - asked_at > ASK_S:
                asked_at = now
                failed_at = now if self._has_failed() else None
            if failed_at is not None:
                wait_s = OTHERS_S if self._inbox.has_error() else FAIL_S
                if now - failed_at > wait_s:
                    return
            # Does it wait for other jobs of this Spark?
            if self._never_began():
                return
            if not waits and now - began > WAIT_S and not self._inbox.has_started():
                waits = True
                log.info("The training waits for free cores of the Spark executors")

    def _never_began(self) -> bool:
        return self._leave.exists() and not self._inbox.has_started()

    def _has_failed(self) -> bool:
        """Does Spark count a failed task, or has it ended?"""
        try:
            tracker = self.context.statusTracker()
            jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(self.name)]
            stages = [tracker.getStageInfo(stage) for job in jobs if job for stage in job.stageIds]
            return any(
                stage and (stage.numFailedTasks or stage.currentAttemptId) for stage in stages
            )
        except Exception:
            return True

    def _state(self) -> LoopState | None:
        """What the group ended with. Raises RaypipeError if it failed."""
        if "state" in self._outcome:
            return LoopState(**self._outcome["state"])
        if self._never_began():
            return None
        if spark_session.has_ended(self._session):
            raise RaypipeError("The Spark application has ended", fix="Run it again to go on")
        error = self._outcome.get("error")
        raise self._inbox.cause(str(error or "")) from error

    def _end(self, thread: threading.Thread) -> None:
        """Cancel what still runs; the workers end with their tasks."""
        if thread.is_alive():
            with suppress(Exception):
                self.context.cancelJobGroup(self.name)
            thread.join(END_S)
        with suppress(Exception):
            self._around.setup.destroy()
        self._inbox.remove()
