"""What a search leaves: its trials from best to worst, and the best one's model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from dataclasses import replace as with_
from pathlib import Path
from typing import Any

from raypipe.config import metrics_of, to_json
from raypipe.search import lineage
from raypipe.tables.table import TableVersion
from raypipe.train import checkpoint
from raypipe.train.job import TrainJob, TrainResult
from raypipe.train.settings import TrainConfig
from raypipe.train.stopping import Mode, unusable


@dataclass(frozen=True)
class Trial:
    """One finished trial. `metric` is its best epoch's; NaN when it failed. `stopped_early` is the scheduler's doing, or the
    end of the search's; `stopped` is why its own rule (train.stopping) ended it. `seconds` it spent in the training loop.
    `failures` counts how often it failed, also where a retry went on. `schedule`, of a trial that took over another's weights:
    the values of `changes` by epoch, as {"epoch": from, field: value, …}; the history is that of the weights."""

    name: str
    changes: dict[str, Any]
    metric: float
    epochs: int
    stopped_early: bool
    history: tuple[dict[str, float], ...]
    checkpoint: str | None
    stopped: str | None = None
    seconds: float = 0.0
    failures: int = 0
    schedule: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Standing:
    """A trial as it stands: its best so far; running, waiting, full (it ran all its epochs), stopped or failed."""

    name: str
    changes: dict[str, Any]
    best: float
    epochs: int
    state: str


@dataclass(frozen=True)
class SearchResult:
    """Trials from best to worst, the best one's job and its training result. `stopped`: why it ended before its last trial.
    `decoded` images were decoded for all trials together, `full_epochs` is what all trials would have taken to their ends.
    `members`: the trials whose weights the best model is the mean of, where it is one. After a refit, `job` and `best` are the
    refit's, `refitted` says so, and of metrics there is nothing that validation said, for it was trained on."""

    key: str
    job: TrainJob
    best: TrainResult
    trials: tuple[Trial, ...]
    metric: str
    seconds: float
    stopped: str | None = None
    decoded: int = 0
    full_epochs: int = 0
    members: tuple[str, ...] = ()
    refitted: bool = False

    @property
    def folder(self) -> Path:
        return self.job.run.path / "search" / self.key

    @property
    def kept(self) -> Path:
        """Where the registered model's metrics on the test split are kept: of one search, any number of refits may be made."""
        return self.job.folder(self.best.key) if self.refitted else self.folder

    @property
    def epochs(self) -> int:
        """Run by all trials together."""
        return sum(t.epochs for t in self.trials)


def standings(trials: Iterable[Trial]) -> list[Standing]:
    """Of finished trials, in their order."""
    ends = {True: "stopped", False: "full"}
    told = ((t, ends[t.stopped_early] if t.checkpoint else "failed") for t in trials)
    return [Standing(t.name, t.changes, t.metric, t.epochs, state) for t, state in told]


def ranked(trials: Iterable[Trial], metric: str, mode: Mode) -> list[Trial]:
    """From best to worst; those that failed come last. Accuracies on few images are often equal: then the lower loss wins, for
    a rate that is too high shows there first."""
    sign = -1 if mode == "max" else 1

    def place(t: Trial) -> tuple[bool, float, float, str]:
        if t.checkpoint is None or not _usable(t):
            return True, 0.0, 0.0, t.name
        losses = [line["val_loss"] for line in t.history if line[metric] == t.metric and line["val_loss"] == line["val_loss"]]
        return False, sign * t.metric, losses[0] if losses else math.inf, t.name

    return sorted(trials, key=place)


def write(file: Path, trials: Iterable[Trial], stopped: str | None, decoded: int) -> None:
    """All or nothing."""
    partial = file.with_suffix(".partial")
    partial.write_text(to_json({"trials": [asdict(t) for t in trials], "stopped": stopped, "decoded": decoded}))
    partial.replace(file)


def read(file: Path) -> tuple[tuple[Trial, ...], str | None, int]:
    """(trials, why the search ended before its last, images decoded)."""
    outcome = json.loads(file.read_text())
    trials = [_read_trial(t) for t in outcome["trials"]]
    trials.sort(key=lambda t: t.checkpoint is None)  # stable: only trials that an older version ranked by NaN move
    return tuple(trials), outcome["stopped"], outcome.get("decoded", 0)


def _read_trial(read: dict[str, Any]) -> Trial:
    """One of a search's trials. Older versions ranked a trial by the accuracy of an epoch of NaN: it counts as failed."""
    history = tuple(metrics_of(line) for line in read["history"])
    metric = math.nan if read["metric"] is None else read["metric"]
    trial = Trial(**read | {"metric": metric, "history": history, "schedule": tuple(read.get("schedule", ()))})
    return trial if _usable(trial) else with_(trial, metric=math.nan, checkpoint=None)


def _usable(trial: Trial) -> bool:
    """Has a usable epoch the value that the trial is ranked by?"""
    history = trial.history
    return not history or any(trial.metric in line.values() and unusable(line) is None for line in history)


def trial_of(result: Any, metric: str, mode: str, train: TrainConfig, trials: Path) -> Trial:
    """The line of one of Tune's results, with the checkpoint of its best epoch. `trials`: where their checkpoints lie."""
    name, pointed = lineage.name_of(result.path), lineage.follow(result.checkpoint.path if result.checkpoint else None)
    # A trial keeps its best checkpoints and the last; the last one's state holds the history of all epochs.
    kept = lineage.whole_epochs(lineage.home(trials, name, dict(result.config or {}), pointed))
    history = kept[max(kept)][0].history if kept else []
    values = {epoch: history[epoch - 1][metric] for epoch in kept if unusable(history[epoch - 1]) is None}
    usable = [epoch for epoch, value in values.items() if math.isfinite(value)]  # the others diverged
    if result.error is not None or not usable:
        return Trial(name, dict(result.config or {}), float("nan"), len(history), False, tuple(history), None)
    pick = max if mode == "max" else min
    epoch = pick(usable, key=lambda epoch: (history[epoch - 1][metric], -epoch if mode == "max" else epoch))
    reason = kept[max(kept)][0].stopped
    cut, best = len(history) < train.epochs and reason is None, history[epoch - 1][metric]
    where, spent = str(kept[epoch][1]), kept[max(kept)][0].seconds
    return Trial(name, dict(result.config), best, len(history), cut, tuple(history), where, reason, spent)


def as_training(key: str, version: TableVersion, classes: tuple[str, ...], trial: Trial) -> TrainResult:
    """What a training with the trial's job would have returned."""
    state = checkpoint.read(Path(str(trial.checkpoint))).state
    last = state.epoch - 1  # the checkpoint kept is of the trial's best epoch
    where = str(trial.checkpoint)
    return TrainResult(key, version, classes, trial.history[last], trial.history, last, where, 0.0, trial.stopped)
