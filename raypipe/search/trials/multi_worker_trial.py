"""A trial of several workers: a process that waits, and a Ray Train group that trains as `raypipe train` would.

Ray Train and Tune know nothing of each other any more: a callback that reports a trainer's metrics to Tune brings no checkpoint
with it, and whatever moves weights between trials then moves none. So the group tells its epochs to this process, which hands
Tune one at a time with a pointer to the checkpoint that the group's Saver published (lineage.py). The group is at most AHEAD
epochs ahead of Tune's verdict. Tune's class interface is used because it waits for `cleanup`: a trial that is stopped, paused
or cloned over tells its group to leave, and the group has saved and freed its places before the next one asks for them.

Starting a group costs 10 to 20 s on two cores, at each start of a trial and each exploit.
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

from raypipe.search.trials import trial_checkpoints
from raypipe.search.trials.epoch_result import ENDED, EPOCH, told
from raypipe.search.trials.trial import data_key, job_of
from raypipe.train import checkpoint, launch
from raypipe.train.checkpoint.saver import newest
from raypipe.train.loop import LoopState
from raypipe.train.worker import Data

log = logging.getLogger("raypipe")
AHEAD = 2  # one epoch waits in the queue, one more is trained before its report waits for room
Told = dict[str, Any]


class GroupTrial(tune.Trainable):  # type: ignore[misc]
    """What Ray Tune makes for a trial: `step` returns one epoch's metrics."""

    def setup(
        self,
        config: dict[str, Any],
        job: dict[str, Any],
        data: dict[str, Data],
        trials: str,
        worker: dict[str, float],
    ) -> None:
        # A second cluster on this host would confuse what Ray Train asks in passing.
        os.environ.setdefault("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
        self._job, self._data, self._trials = job, data, Path(trials)
        self._share = launch.Share(worker, ahead=1, recent=1 + AHEAD)
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.cleanup()
        self._values = dict(new_config)
        self._pointed: Path | None = None
        self._heard = 0
        return True

    def load_checkpoint(self, folder: str) -> None:  # type: ignore[override]
        self._pointed, self._heard = (
            trial_checkpoints.follow(folder),
            trial_checkpoints.heard(folder),
        )

    def save_checkpoint(self, folder: str) -> None:
        trial_checkpoints.point(Path(folder), self._last, self._said)

    def step(self) -> Told:
        if self._thread is None:
            self._start()
        else:
            self._verdict.release()
        told = self._told.get()
        if isinstance(told, BaseException):
            raise told
        self._last, metrics = told
        self._said = int(metrics[EPOCH])
        return metrics | {"done": metrics[ENDED]}

    def cleanup(self) -> None:
        """Tell the group to leave, and wait until it has."""
        thread = getattr(self, "_thread", None)
        if thread is not None and thread.is_alive():
            self._left = True
            self._leave.touch()
            self._verdict.release()
            thread.join()
            self._leave.unlink(missing_ok=True)
        self._thread: threading.Thread | None = None

    def _start(self) -> None:
        self._folder = trial_checkpoints.settle(
            self._trials,
            trial_checkpoints.name_of(self._storage.trial_fs_path),
            self._values,
            self._pointed,
        )
        self._leave = self._folder.with_name(f"leave-{uuid.uuid4().hex[:8]}")
        self._left = False
        self._told: queue.Queue[tuple[Path, Told] | BaseException] = queue.Queue()
        self._verdict, self._telling = threading.Semaphore(0), threading.Lock()
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def _train(self) -> None:
        """In a thread. Its last word is the epoch that ended the trial, or an error."""
        try:
            mine = self._mine = job_of(self._job, self._values)
            found = newest(self._folder)
            state = trial_checkpoints.state_of(found) if found else LoopState()
            if state.finished(mine.train.epochs):  # Tune may have heard and forgotten it
                self._heard = state.epoch - 1
            self._tell({}, state)
            if not state.finished(mine.train.epochs) and not self._left:
                data = self._data[data_key(mine)]
                self._tell(
                    {},
                    launch.on_workers(
                        mine, data, self._folder, self._leave, self._tell, share=self._share
                    ),
                )
        except BaseException as e:
            self._told.put(e)

    def _tell(self, metrics: dict[str, float], state: LoopState) -> None:
        """Hand over the epochs that Tune has not heard of, and wait for its verdict on each."""
        with self._telling:
            for epoch, line in trial_checkpoints.untold(state, self._heard):
                if self._left:
                    return
                ended = epoch == state.epoch and state.finished(self._mine.train.epochs)
                self._heard = epoch
                rule = self._mine.train.stopping
                said = told(line, epoch, ended, rule.metric, rule.mode)
                self._told.put((self._folder / checkpoint.name(state.epoch), said))
                self._verdict.acquire()
