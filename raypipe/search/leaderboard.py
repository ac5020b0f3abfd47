"""What a search leaves: its trials from best to worst, and the best one's model.

A trial is worth its best usable epoch, because that epoch's weights are the model it offers. An
epoch is unusable if a loss, the metric or a weight is not finite. A trial without a usable epoch
failed and ranks last.

A scheduler or a budget ends some trials early, and more epochs alone make a trial better. So the
order says whose model is better, and not whose settings are. `compared` tells that: each trial's
best after as many epochs as all had. `ahead` names the trials that were better than the first one
after as many epochs as they got. Both are shown wherever the order is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from dataclasses import replace as with_
from pathlib import Path
from typing import Any

from raypipe.config import metrics_of, require_format, to_json
from raypipe.models import finite
from raypipe.search.trials import trial_checkpoints
from raypipe.search.trials.epoch_result import metric_of
from raypipe.tables.table import TableVersion
from raypipe.train import checkpoint
from raypipe.train.job import TrainJob, TrainResult
from raypipe.train.settings import TrainConfig
from raypipe.train.stopping import Mode, improved, unusable

FORMAT = 2  # of result.json; format 1 (ba74455 and before) has fewer fields, which count as empty


@dataclass(frozen=True)
class Trial:
    """One finished trial. `metric` is its best usable epoch's; NaN when it failed. `stopped_early` is
    the scheduler's doing, or the end of the search's; `stopped` is why its own rule (train.stopping)
    ended it. `seconds` it spent in the training loop.
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
    """A trial as it stands: its best so far; running, waiting, full (it ran all its epochs), stopped or failed. `compared`:
    (N, its best of the first N epochs), where trials ended after different numbers of epochs."""

    name: str
    changes: dict[str, Any]
    best: float
    epochs: int
    state: str
    compared: tuple[int, float] | None = None


@dataclass(frozen=True)
class Ahead:
    """A trial that was better than the first one after as many epochs as it got: its best, and the first one's by then."""

    trial: str
    epochs: int
    metric: float
    first: float


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

    @property
    def mode(self) -> Mode:
        return self.job.train.stopping.mode

    @property
    def standings(self) -> list[Standing]:
        return standings(self.trials, self.metric, self.mode)

    @property
    def ahead(self) -> list[Ahead]:
        return ahead(self.trials, self.metric, self.mode)


def standings(trials: Sequence[Trial], metric: str, mode: Mode) -> list[Standing]:
    """Of finished trials, in their order."""
    ends, found = {True: "stopped", False: "full"}, compared(trials, metric, mode)
    return [
        Standing(
            t.name,
            t.changes,
            t.metric,
            t.epochs,
            ends[t.stopped_early] if t.checkpoint else "failed",
            found.get(t.name),
        )
        for t in trials
    ]


def best_within(trial: Trial, epochs: int, metric: str, mode: Mode) -> float:
    """The best of the trial's first `epochs` epochs; NaN if none of them is usable."""
    values = [metric_of(line, metric) for line in trial.history[:epochs]]
    return (max if mode == "max" else min)(
        (v for v in values if not math.isnan(v)), default=math.nan
    )


def compared(trials: Sequence[Trial], metric: str, mode: Mode) -> dict[str, tuple[int, float]]:
    """By trial: (N, its best of the first N epochs), N being what every usable trial had; {} where all had equally many. A
    trial that its own rule ended would have had no more, and sets no N."""
    usable = [t for t in trials if t.checkpoint is not None and t.history]
    even = min((t.epochs for t in usable if t.stopped is None), default=0)
    if not even or all(t.epochs == even for t in usable):
        return {}
    return {t.name: (even, best_within(t, even, metric, mode)) for t in usable}


def ahead(trials: Sequence[Trial], metric: str, mode: Mode) -> list[Ahead]:
    """The trials that had fewer epochs than the first one and were better than it by then."""
    first, found = trials[0], []
    for t in trials[1:]:
        if t.checkpoint is None or t.stopped is not None or t.epochs >= first.epochs:
            continue
        then = best_within(first, t.epochs, metric, mode)
        if improved(t.metric, None if math.isnan(then) else then, mode):
            found.append(Ahead(t.name, t.epochs, t.metric, then))
    return found


def ranked(trials: Iterable[Trial], metric: str, mode: Mode) -> list[Trial]:
    """From best to worst; those without a usable epoch come last. Accuracies on few images are often
    equal: then the lower loss wins, for a rate that is too high shows there first."""
    sign = -1 if mode == "max" else 1

    def place(t: Trial) -> tuple[bool, float, float, str]:
        if t.checkpoint is None or not math.isfinite(t.metric) or not _usable(t):
            return True, 0.0, 0.0, t.name
        losses = [line["val_loss"] for line in t.history if metric_of(line, metric) == t.metric]
        return False, sign * t.metric, losses[0] if losses else math.inf, t.name

    return sorted(trials, key=place)


def write(file: Path, trials: Iterable[Trial], stopped: str | None, decoded: int) -> None:
    """All or nothing."""
    partial = file.with_suffix(".partial")
    found = {
        "format": FORMAT,
        "trials": [asdict(t) for t in trials],
        "stopped": stopped,
        "decoded": decoded,
    }
    partial.write_text(to_json(found))
    partial.replace(file)


def read(file: Path) -> tuple[tuple[Trial, ...], str | None, int]:
    """(trials, why the search ended before its last, images decoded)."""
    outcome = json.loads(file.read_text())
    require_format(outcome, FORMAT, file)
    trials = [_read_trial(t) for t in outcome["trials"]]
    trials.sort(
        key=lambda t: t.checkpoint is None
    )  # only trials that an older version ranked by NaN move
    return tuple(trials), outcome["stopped"], outcome.get("decoded", 0)


def _read_trial(read: dict[str, Any]) -> Trial:
    """One of a search's trials. Older versions ranked a trial by the accuracy of an epoch of NaN: it counts as failed."""
    history = tuple(metrics_of(line) for line in read["history"])
    metric = math.nan if read["metric"] is None else read["metric"]
    trial = Trial(
        **read | {"metric": metric, "history": history, "schedule": tuple(read.get("schedule", ()))}
    )
    return trial if _usable(trial) else with_(trial, metric=math.nan, checkpoint=None)


def _usable(trial: Trial) -> bool:
    """Has a usable epoch the value that the trial is ranked by?"""
    history = trial.history
    return not history or any(
        trial.metric in line.values() and unusable(line) is None for line in history
    )


def trial_of(result: Any, metric: str, mode: str, train: TrainConfig, trials: Path) -> Trial:
    """The line of one of Tune's results, with the checkpoint of its best epoch. `trials`: where their checkpoints lie."""
    name, pointed = (
        trial_checkpoints.name_of(result.path),
        trial_checkpoints.pointed_checkpoint(result.checkpoint.path if result.checkpoint else None),
    )
    sign = -1 if mode == "max" else 1
    # A trial keeps its best checkpoints and the last; the last one's state holds the history of all epochs.
    values = dict(result.config or {})
    home = trial_checkpoints.folder_of(trials, name, values, pointed)
    kept, schedule = (
        trial_checkpoints.epoch_checkpoints(home),
        trial_checkpoints.read_schedule(home),
    )
    schedule = schedule if len(schedule) > 1 else ()  # the trial trained with its own values alone
    history = kept[max(kept)][0].history if kept else []
    usable = {epoch: metric_of(history[epoch - 1], metric) for epoch in kept}
    ranked = sorted(
        (e for e in usable if not math.isnan(usable[e])), key=lambda e: (sign * usable[e], e)
    )
    epoch = next((e for e in ranked if _finite(kept[e][1])), None)
    if result.error is not None or epoch is None:
        return Trial(name, values, math.nan, len(history), False, tuple(history), None)
    last = kept[max(kept)][0]
    cut = len(history) < train.epochs and last.stopped is None
    return Trial(
        name=name,
        changes=values,
        metric=usable[epoch],
        epochs=len(history),
        stopped_early=cut,
        history=tuple(history),
        checkpoint=str(kept[epoch][1]),
        stopped=last.stopped,
        seconds=last.seconds,
        schedule=schedule,
    )


def _finite(folder: Path) -> bool:
    return finite.first_bad(checkpoint.read(folder, verified=True).weights) is None


def as_training(
    key: str, version: TableVersion, classes: tuple[str, ...], trial: Trial
) -> TrainResult:
    """What a training with the trial's job would have returned."""
    state = checkpoint.read(Path(str(trial.checkpoint))).state
    last = state.epoch - 1  # the checkpoint kept is of the trial's best epoch
    where = str(trial.checkpoint)
    return TrainResult(
        key, version, classes, trial.history[last], trial.history, last, where, 0.0, trial.stopped
    )
