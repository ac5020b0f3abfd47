"""A search of many trials without training: real scheduler, monitor, checkpoints and files.

Trials are objects with what raypipe uses of Tune's. A trial's value follows a curve that its rate
decides, with noise. Each epoch writes a real checkpoint of two tensors of four numbers, and deletes
what a trial deletes. So a file stands for one of ViT-L: `stored_gb` counts it with the size that
it would have.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from raypipe.config import validate
from raypipe.job import Job
from raypipe.search import leaderboard, trial_files
from raypipe.search.kept import Kept, clear
from raypipe.search.schedulers.tune_schedulers import memory, scheduler
from raypipe.search.trials import trial_checkpoints
from raypipe.search.trials.monitor import Monitor, Stop
from raypipe.search.trials.standing import Standing
from raypipe.search.trials.trial import folder_name
from raypipe.train import checkpoint
from raypipe.train.checkpoint.saver import kept
from raypipe.train.loop import LoopState
from raypipe.train.parallel.snapshot import Piece, Snapshot

CONCURRENT = 8
EPOCHS = 27
SAVE_EVERY = 10  # reports. Tune saves its callbacks' state every ten seconds: oftener, for ViT-L
WATCH_EVERY = 200  # reports: to look at the disk takes long
# ViT-L/16: 304 million parameters in float32, and Adam's two moments.
FILE_GB = {"weights": 1.22, "optimizer": 2.43}
PHASES = ["step", "data", "augment", "forward", "backward", "optimizer", "other"]


@dataclass(eq=False)
class FakeTrial:
    """What raypipe uses of a Tune trial."""

    trial_id: str
    experiment_tag: str
    config: dict[str, Any]
    status: str = "PENDING"
    path: str = ""
    last_result: dict[str, Any] = field(default_factory=dict)
    checkpoint: SimpleNamespace | None = None
    state: LoopState = field(default_factory=LoopState)

    PENDING, RUNNING, PAUSED = "PENDING", "RUNNING", "PAUSED"
    ERROR, TERMINATED = "ERROR", "TERMINATED"

    def is_finished(self) -> bool:
        return self.status in (self.ERROR, self.TERMINATED)

    def set_status(self, status: str) -> None:
        self.status = status


class Search:
    """One search, from its first trial to its last."""

    def __init__(self, folder: Path, trials: int, name: str, noise: float = 0.002) -> None:
        self.folder = folder
        changes = {
            "table": {"uri": str(folder / "table")},
            "run": {"dir": str(folder)},
            "model": {"name": "small_cnn", "mode": "finetune", "pretrained": False},
            "train": {"epochs": EPOCHS, "stopping": {"metric": "val_loss"}},
            "search": {"samples": trials, "grace": 1, "scheduler": name},
        }
        self.job = validate(Job, changes)
        self.rule = scheduler(self.job.search, self.job.train, trials)
        self.keeping = Kept(self.job.training, self.job.search, folder)
        self.monitor = self._monitor(trials)
        self.callbacks = [self.monitor, *memory(self.rule)]
        self.search_alg = SimpleNamespace(
            is_finished=lambda: True, on_trial_complete=lambda *_, **__: None
        )
        rng = np.random.default_rng(0)
        self._noise = rng.normal(0, noise, (trials, EPOCHS))
        self.trials = [
            FakeTrial(f"t{n:04}", f"{n}_x", {"train.lr": float(10 ** rng.uniform(-5, -1))})
            for n in range(trials)
        ]
        for trial in self.trials:
            trial.path = str(folder / "tune" / folder_name(trial))
        self.shown: list[Standing] = []
        self.reports = 0
        self.most_gb = 0.0

    def _monitor(self, trials: int) -> Monitor:
        rule = self.job.train.stopping

        def listen(done: int, total: int, standings: list[Standing]) -> None:
            self.shown = standings[:8]

        stopping = self.job.search.stopping
        return Monitor(trials, rule.metric, rule.mode, stopping, 1.0, listen, self.keeping.ended)

    # What the scheduler asks of Tune's controller.

    def get_trials(self) -> list[FakeTrial]:
        return self.trials

    def stop_trial(self, trial: FakeTrial) -> None:
        self.rule.on_trial_remove(self, trial)
        self._end(trial)

    def _end(self, trial: FakeTrial) -> None:
        self.monitor.on_trial_complete(0, self.trials, trial)
        trial.status = "TERMINATED"

    def run(self) -> float:
        """Run all trials; the seconds that raypipe's own code took, without the checkpoints."""
        stop = Stop(self.monitor)
        running: list[FakeTrial] = []
        took = 0.0
        self.monitor.setup()
        while True:
            began = time.perf_counter()
            stop.stop_all()
            chosen = self.rule.choose_trial_to_run(self) if len(running) < CONCURRENT else None
            took += time.perf_counter() - began
            if chosen is not None:
                chosen.status = "RUNNING"
                running.append(chosen)
                continue
            if not running:
                return took
            trial = running.pop(0)
            result = self._epoch(trial)
            began = time.perf_counter()
            decision = self._handle(trial, result)
            took += time.perf_counter() - began
            if decision == "CONTINUE":
                running.append(trial)
            self._watch_disk()

    def _handle(self, trial: FakeTrial, result: dict[str, Any]) -> str:
        """One report, as Tune hands it on."""
        trial.last_result = result
        self.monitor.on_trial_result(0, self.trials, trial, result)
        decision: str = self.rule.on_trial_result(self, trial, result)
        if decision == "PAUSE":
            trial.status = "PAUSED"
        if decision == "STOP":
            self.rule.on_trial_complete(self, trial, result)
            self._end(trial)
        self.reports += 1
        if self.reports % SAVE_EVERY == 0:
            for callback in self.callbacks:
                callback.get_state()
        return decision

    def _epoch(self, trial: FakeTrial) -> dict[str, Any]:
        """Train nothing, save a checkpoint, and report."""
        state, number = trial.state, int(trial.trial_id[1:])
        distance = abs(np.log10(trial.config["train.lr"]) + 3)
        value = float(0.2 + distance + 2 / (state.epoch + 1) + self._noise[number, state.epoch])
        metrics = {"val_loss": value, "train_loss": value, "val_accuracy": 1 / (1 + value)}
        metrics |= {f"{phase}_s": 0.1 for phase in PHASES} | {"images_per_s": 100.0}
        if state.best is None or value < state.best:
            state.best, state.best_epoch = value, state.epoch
        state.history.append(metrics)
        state.epoch += 1
        self._save(trial)
        ended = state.epoch == EPOCHS
        return metrics | {
            "epoch": state.epoch,
            "ended": ended,
            "training_iteration": state.epoch,
            "time_total_s": float(state.epoch),
            "time_this_iter_s": 1.0,
        }

    def _save(self, trial: FakeTrial) -> None:
        name = trial_checkpoints.name_of(trial.path)
        trials = self.folder / "trials"
        folder = trial_checkpoints.prepare_folder(trials, name, trial.config, None)
        piece = {"w": Piece.whole(torch.zeros(4))}
        epoch = checkpoint.name(trial.state.epoch)
        checkpoint.write(folder / epoch, Snapshot(piece, piece), trial.state)
        rule = self.job.train.stopping
        best = kept(trial.state, rule, self.job.train.keep_best)
        checkpoint.keep(folder, best | {epoch})
        pointer = self.folder / "pointers" / trial.trial_id
        pointer.mkdir(parents=True, exist_ok=True)
        trial_checkpoints.write_pointer(pointer, folder / epoch, trial.state.epoch)
        trial.checkpoint = SimpleNamespace(path=str(pointer))

    def _watch_disk(self) -> None:
        if self.reports % WATCH_EVERY == 0:
            self.most_gb = max(self.most_gb, stored_gb(self.folder))

    def ranked(self) -> list[leaderboard.Trial]:
        """The trials from best to worst, as a search makes its leaderboard."""
        rule = self.job.train.stopping
        folder = self.folder / "trials"
        found = []
        for trial in self.trials:
            result = SimpleNamespace(
                path=trial.path, config=trial.config, checkpoint=trial.checkpoint, error=None
            )
            found.append(
                trial_files.trial_of(result, rule.metric, rule.mode, self.job.train, folder)
            )
        return self.keeping.result(leaderboard.ranked(found, rule.metric, rule.mode))

    def clear(self, trials: list[leaderboard.Trial]) -> None:
        """Delete what a finished search does not keep."""
        clear(self.folder, trials)


def stored_gb(folder: Path) -> float:
    """What the checkpoints of the trials would take, if they were of ViT-L."""
    return sum(
        gb * sum(1 for _ in folder.glob(f"trials/*/*/epoch-*/{kind}-*"))
        for kind, gb in FILE_GB.items()
    )
