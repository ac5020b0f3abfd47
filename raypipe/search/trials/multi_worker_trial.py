"""A trial of several workers: a waiting process, and a Ray Train group that trains in its place.

Ray Train cannot report a checkpoint to Tune any more, and without one Tune moves no weights between
trials. So the trial's process stands between the two:

1. Tune calls `step` in the trial's process. The first `step` starts a thread, and the thread starts
   the group (`launch.on_workers`). That takes 10 to 20 s on two cores, at each start and exploit.
2. After an epoch the group's Saver publishes a checkpoint, and the group reports to the thread.
3. The thread puts (checkpoint, result) into the queue `_results`, then waits for the semaphore
   `_next_step`. A lock keeps two reports from being in progress at once.
4. `step` takes one epoch from the queue and returns it. Tune calls `save_checkpoint`, which writes
   a pointer to that checkpoint (trial_checkpoints.py), and decides whether the trial continues.
5. If it does, Tune calls `step` again, which releases the semaphore. So the group is at most AHEAD
   epochs ahead of Tune's decision.
6. If it does not, Tune calls `cleanup`, which creates the leave-file `_leave_file`. The group sees
   the file, saves and ends; `cleanup` joins the thread. Only then may the next trial start. A group
   that hangs is given LEAVE_S: then this process takes no other trial, and the group ends with it.
7. An error of the group ends the thread: the error goes through the queue, and `step` raises it.

Tune's class interface (`tune.Trainable`) is used because Tune waits for its `cleanup`.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import uuid
from pathlib import Path
from typing import Any

import ray
from ray import tune

from raypipe.errors import RaypipeError, without_secrets
from raypipe.search.trials import trial_checkpoints
from raypipe.search.trials.epoch_result import ENDED, EPOCH, result_of
from raypipe.search.trials.trial import data_key, job_of
from raypipe.train import checkpoint, launch, worker_group
from raypipe.train.checkpoint.saver import newest
from raypipe.train.loop import LoopState
from raypipe.train.worker import Data

log = logging.getLogger("raypipe")
# One epoch waits in the queue between the group and this process (Share.ahead), and one more is
# trained before its report has to wait.
AHEAD = 2
# For a group that was asked to leave, beside train.timeout_s: in that time it fails if one of its
# workers is silent. Tune gives a process that ends as long (TUNE_FORCE_TRIAL_CLEANUP_S), and one
# that takes another trial all the time there is.
LEAVE_S = 600.0
Result = dict[str, Any]


class GroupTrial(tune.Trainable):  # type: ignore[misc]
    """A trial as Ray Tune's class interface wants it: `step` returns the result of one epoch."""

    # `setup` is called once per process, `reset_config` for every trial that the process runs.

    _thread: threading.Thread | None
    _next_step: threading.Semaphore
    _leave_file: Path
    _leave_s: float

    def setup(
        self,
        config: dict[str, Any],
        job: dict[str, Any],
        data: dict[str, Data],
        trials: str,
        worker: dict[str, float],
    ) -> None:
        # Ray Train looks for a cluster by itself. With a second cluster on this host it could take
        # the wrong one.
        address = ray.get_runtime_context().gcs_address
        os.environ.setdefault("RAY_ADDRESS", address)
        self._job = job
        self._data = data
        self._trials = Path(trials)
        self._share = worker_group.Share(worker, ahead=1, recent=1 + AHEAD)
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Prepare for a trial with these values; the process may have run another one before.

        Raises RaypipeError if the workers of that one are still there.
        """
        if not self._has_left():
            raise RaypipeError(
                "The workers of the trial before hang",
                got=f"they were asked to leave {self._leave_s:.0f} s ago",
                rule="This trial would wait for their places without an end",
                fix="The search goes on without this trial. Ray's log of the other one may say why",
            )
        self._values = dict(new_config)
        self._pointed: Path | None = None
        self._reported = 0
        return True

    def load_checkpoint(self, folder: str) -> None:  # type: ignore[override]
        """Continue from the checkpoint that Tune's `folder` names: the trial's or a donor's."""
        self._pointed = trial_checkpoints.pointed_checkpoint(folder, self._trials)
        self._reported = trial_checkpoints.reported_epoch(folder)

    def save_checkpoint(self, folder: str) -> None:
        """Write a pointer to the checkpoint of the epoch that the last `step` returned."""
        trial_checkpoints.write_pointer(Path(folder), self._last_checkpoint, self._last_epoch)

    @without_secrets
    def step(self) -> Result:
        """The result of the next epoch; waits until it is trained. Raises the group's error."""
        if self._thread is None:
            self._start()
        else:
            self._next_step.release()
        # Wait for the thread.
        item = self._results.get()
        if isinstance(item, BaseException):
            raise item
        self._last_checkpoint, result = item
        self._last_epoch = int(result[EPOCH])
        return result | {"done": result[ENDED]}

    def cleanup(self) -> None:
        """End the group, and wait until it has saved and freed its resources."""
        if not self._has_left():
            log.warning(
                "The workers of a trial hang: they were asked to leave %.0f s ago, and end with "
                "the trial's process",
                self._leave_s,
            )

    def _has_left(self) -> bool:
        """Ask the group to leave; has it within its time? One that has not is not waited for again.

        It belongs to this process, and so it ends with it.
        """
        # Tune may clean up a trial that it never set up: then the attribute is missing.
        thread = getattr(self, "_thread", None)
        self._thread = None
        if thread is None or not thread.is_alive():
            return True
        # The thread may be in the group, or wait for a step that never comes: end both.
        self._leaving = True
        self._leave_file.touch()
        self._next_step.release()
        thread.join(timeout=self._leave_s)
        if thread.is_alive():
            # The file stays for a group that comes to.
            return False
        self._leave_file.unlink(missing_ok=True)
        return True

    def _start(self) -> None:
        """Start the thread that trains, with a new queue, semaphore and leave-file."""
        self._folder = trial_checkpoints.prepare_folder(
            self._trials,
            trial_checkpoints.name_of(self._storage.trial_fs_path),
            self._values,
            self._pointed,
        )
        name = f"leave-{uuid.uuid4().hex[:8]}"
        self._leave_file = self._folder.with_name(name)
        self._leaving = False
        self._leave_s = LEAVE_S
        self._results: queue.Queue[tuple[Path, Result] | BaseException] = queue.Queue()
        self._next_step = threading.Semaphore(0)
        self._reporting = threading.Lock()
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def _train(self) -> None:
        """Train to the end, in the thread. The last queue item is the last epoch or an error."""
        try:
            job = job_of(self._job, self._values)
            self._trial_job = job
            self._leave_s = LEAVE_S + job.train.waits_s
            resume = newest(self._folder)
            state = trial_checkpoints.state_of(resume) if resume else LoopState()
            # A clone begins with its donor's clocks.
            self._clocks = state.seconds, state.worker_s
            ended = state.finished(job.train.epochs)
            if ended:
                # `step` needs a result. Tune had this one before a kill, and may have lost it.
                self._reported = state.epoch - 1
            # Epochs that were trained before a kill and not reported.
            self._report({}, state, earlier=True)
            if ended or self._leaving:
                return
            state = launch.on_workers(
                job,
                self._data[data_key(job)],
                self._folder,
                self._leave_file,
                self._report,
                share=self._share,
            )
            self._report({}, state)
        except BaseException as e:
            self._results.put(e)

    def _report(self, _: dict[str, float], state: LoopState, earlier: bool = False) -> None:
        """Queue each epoch that Tune does not know yet; wait after each for the next `step`."""
        train = self._trial_job.train
        rule = train.stopping
        with self._reporting:
            workers = self._workers_since_last(state)
            for epoch, metrics in trial_checkpoints.unreported(state, self._reported):
                if self._leaving:
                    return
                ended = epoch == state.epoch and state.finished(train.epochs)
                result = result_of(metrics, epoch, ended, rule.metric, rule.mode, workers, earlier)
                self._reported = epoch
                self._results.put((self._folder / checkpoint.name(state.epoch), result))
                self._next_step.acquire()

    def _workers_since_last(self, state: LoopState) -> float:
        """How many workers trained since the last report: an elastic trial may start with fewer
        than its most.
        """
        seconds, worker_s = (
            now - then
            for now, then in zip((state.seconds, state.worker_s), self._clocks, strict=True)
        )
        self._clocks = state.seconds, state.worker_s
        return worker_s / seconds if seconds > 0 else float(self._trial_job.train.most_workers)
