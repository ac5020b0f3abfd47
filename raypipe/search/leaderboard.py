"""The leaderboard: the trials of a search from best to worst, and what compares their settings.

The value of a trial is its best usable epoch, because that epoch's weights are the model it offers;
with train.result=last, its last one. An epoch is unusable if a loss, the metric or a weight is not
finite. A trial without a usable epoch failed and ranks last.

A scheduler or a budget ends some trials early, and more epochs alone make a trial better. So the
order says whose model is better, and not whose settings are. Two more figures compare settings, and
both are shown wherever the order is:

- `compared`: each trial's best after as many epochs as all trials had.
- `ahead`: the trials that were better than the first one after as many epochs as they got.

Everything here is computed from finished trials; trial_files.py writes and reads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from raypipe.config import key_of
from raypipe.search.trials.epoch_result import metric_of
from raypipe.search.trials.standing import Reached, Standing
from raypipe.train.stopping import FITTED, IN_TIME, Mode, improved, unusable

FIRST = "first-answer"  # the names of trials that were fitted before the search drew any


@dataclass(frozen=True)
class Trial:
    """One trial that ended."""

    name: str

    changes: dict[str, Any]
    """The values it tried, by dotted field; after an exploit, the last ones."""

    metric: float
    """The metric of the epoch that it offers; NaN if it failed."""

    epochs: int

    stopped_early: bool
    """Ended by the scheduler, or by the end of the search."""

    history: tuple[dict[str, float], ...]
    """The metrics of each epoch that its weights were trained for."""

    checkpoint: str | None
    """The path of that epoch's checkpoint; None if it failed."""

    stopped: str | None = None
    """Why its own rule (train.stopping) ended it."""

    seconds: float = 0.0
    """For how long it held devices, as the search's budgets count them. In results of older
    versions: its time in the training loop."""

    device_s: float = 0.0
    """Seconds times devices. A device is a GPU, a share of one, or without GPUs a worker on CPUs.
    0 in results of older versions: not known."""

    cut: bool = False
    """Ended by a budget, its own or the search's. The epochs that it lacks were not saved."""

    failures: int = 0
    """How often it failed, also if a retry succeeded."""

    schedule: tuple[dict[str, Any], ...] = ()
    """For a trial that took over weights: values by epoch (trial_checkpoints.Schedule)."""

    kept: bool = True
    """False: `search.keep` had the files of its checkpoint deleted."""

    @property
    def drawn(self) -> bool:
        """False: a head of the first answer, whose values are not of the space."""
        return not self.name.startswith(FIRST)

    def whole(self, epochs: int) -> int:
        """The epochs that it would have trained to its end. epochs: the job's, if it drew none."""
        if self.stopped in (FITTED, IN_TIME):
            return self.epochs
        return int(self.changes.get("train.epochs", epochs))

    @property
    def values(self) -> str:
        """Names what it was trained with. Trials with equal values are copies: all of a search have
        one seed."""
        return key_of(self.changes, self.schedule)


@dataclass(frozen=True)
class Ahead:
    """A trial that was better than the first one after as many epochs as it got."""

    trial: str

    epochs: int

    metric: float
    """The trial's best."""

    first: float
    """The first one's best after as many epochs."""


@dataclass(frozen=True)
class Spared:
    """What the scheduler, and the trials' own rules, saved by ending trials early.

    share: of the epochs that all trials would have run. device_s: what these epochs would have
    held, at each trial's own pace.
    """

    share: float = 0.0
    device_s: float = 0.0


def lacks_metric(trials: Sequence[Trial], metric: str) -> bool:
    """Were the trainings sound, and the metric never a number?"""
    lines = [line for trial in trials for line in trial.history]
    return bool(lines) and all(
        unusable(line) is None and math.isnan(metric_of(line, metric)) for line in lines
    )


def ranked(
    trials: Iterable[Trial], metric: str, mode: Mode, result: Literal["best", "last"] = "best"
) -> list[Trial]:
    """From best to worst; those without a usable epoch come last.

    Accuracies on few images are often equal. Then the lower loss wins, because a learning rate that
    is too high shows there first. result: which epoch trials offer that do not draw train.result.
    """
    sign = -1 if mode == "max" else 1

    def place(trial: Trial) -> tuple[bool, float, float, str]:
        # True sorts last.
        failed = trial.checkpoint is None or not math.isfinite(trial.metric)
        if failed or not is_usable(trial):
            return True, 0.0, 0.0, trial.name
        # The loss of the epoch whose metric counts: the first of equal ones, or the last.
        loss = math.inf
        is_last = trial.changes.get("train.result", result) == "last"
        for line in reversed(trial.history) if is_last else trial.history:
            if metric_of(line, metric) == trial.metric:
                loss = line["val_loss"]
                break
        return False, sign * trial.metric, loss, trial.name

    return sorted(trials, key=place)


def is_usable(trial: Trial) -> bool:
    """Is the value that the trial is ranked by of a usable epoch?

    An older version took the value from an epoch of NaN.
    """
    if not trial.history:
        return True
    having = [metrics for metrics in trial.history if trial.metric in metrics.values()]
    return any(unusable(metrics) is None for metrics in having)


def standings(trials: Sequence[Trial], metric: str, mode: Mode) -> list[Standing]:
    """The standings of trials that ended, in their order."""
    equal_epochs = compared(trials, metric, mode)
    rows = []
    for trial in trials:
        if trial.checkpoint is None:
            state = "failed"
        elif trial.stopped == FITTED:
            state = "fitted"
        elif trial.stopped_early or trial.stopped not in (None, IN_TIME):
            state = "stopped"
        else:
            state = "full"
        row = Standing(
            trial.name,
            trial.changes,
            trial.metric,
            trial.epochs,
            state,
            equal_epochs.get(trial.name),
            trial.seconds,
            trial.device_s,
        )
        rows.append(row)
    return rows


def best_within(trial: Trial, epochs: int, metric: str, mode: Mode) -> float:
    """The best of the trial's first `epochs` epochs; NaN if none of them is usable."""
    values = [metric_of(line, metric) for line in trial.history[:epochs]]
    usable = [value for value in values if not math.isnan(value)]
    better = max if mode == "max" else min
    return better(usable, default=math.nan)


def compared(trials: Sequence[Trial], metric: str, mode: Mode) -> dict[str, tuple[int, float]]:
    """By trial: (N, its best of the first N epochs). Every usable trial had N epochs.

    {} if all had equally many. A trial that its own rule ended may have had fewer than N: it would
    have had no more epochs in any search.
    """
    usable = [trial for trial in trials if trial.checkpoint is not None and trial.history]
    # Trials that their own rule ended do not set N.
    lengths = [trial.epochs for trial in usable if trial.stopped is None]
    common = min(lengths, default=0)
    # A head that was fitted at once has no epochs.
    if not common or all(t.epochs == common for t in usable if t.stopped != FITTED):
        return {}
    best = {}
    for trial in usable:
        best[trial.name] = (common, best_within(trial, common, metric, mode))
    return best


def ahead(trials: Sequence[Trial], metric: str, mode: Mode) -> list[Ahead]:
    """The trials that had fewer epochs than the first one and were better than it by then.

    `trials` are in the leaderboard's order.
    """
    first = trials[0]
    leading = []
    for trial in trials[1:]:
        if trial.checkpoint is None or trial.stopped is not None or trial.epochs >= first.epochs:
            continue
        # How good the first one was when this trial ended.
        then = best_within(first, trial.epochs, metric, mode)
        if improved(trial.metric, None if math.isnan(then) else then, mode):
            leading.append(Ahead(trial.name, trial.epochs, trial.metric, then))
    return leading


def spared(trials: Sequence[Trial], each: int, full_epochs: int) -> Spared:
    """What early stopping saved of the `each` epochs that a trial would have run, or of those that
    it drew.

    Epochs that a budget cut, or that a failed trial lacks, were not saved.
    """
    epochs = device_s = 0.0
    for trial in trials:
        if trial.cut or trial.checkpoint is None or not trial.epochs:
            continue
        # A head that was fitted at once has no further epochs.
        if trial.stopped == FITTED:
            continue
        missing = max(0, trial.whole(each) - trial.epochs)
        epochs += missing
        device_s += missing * trial.device_s / trial.epochs
    return Spared(epochs / full_epochs if full_epochs else 0.0, device_s)


def so_far(reached: Iterable[Reached], mode: Mode) -> list[Reached]:
    """Those that were better than all before them; `reached` is in the order of time."""
    better: list[Reached] = []
    for one in reached:
        if improved(one.value, better[-1].value if better else None, mode):
            better.append(one)
    return better
