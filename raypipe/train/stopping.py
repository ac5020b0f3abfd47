"""When a training or a search stops, and why: pure rules over a record of what happened.

A rule takes a Progress and returns None, or a reason that the user reads. `any_of` and `all_of`
combine rules. Rules see whole epochs (in a search: whole trials), so a run ends where an epoch
ends. All ranks must be given the same Progress: a rank that stopped alone would leave the others
waiting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from pydantic import Field, model_validator

from raypipe.config import Section

Mode = Literal["max", "min"]
# Why a head that was fitted at once has no second epoch.
FITTED = "it was fitted at once"
# Why a training whose rate followed the clock (train.anneal_s) is at its end.
IN_TIME = "its rate fell to zero in its time"
# Words of every reason that is a budget.
OF_BUDGET = "the budget of "
LOWER_IS_BETTER = ("val_loss", "val_mae", "val_rmse")
SMOOTHED: dict[str, Callable[[Iterable[float]], float]] = {"mean": fmean, "median": median}


class BudgetConfig(Section):
    """What may be spent. The first limit that is reached stops the run."""

    seconds: float | None = Field(default=None, gt=0)
    """Time in seconds. null: unlimited."""
    gpu_hours: float | None = Field(default=None, gt=0)
    """Hours times workers. A worker without a GPU counts too. null: unlimited."""
    money: float | None = Field(default=None, gt=0)
    """Price of the workers' time, in the currency of `price_per_hour`. null: unlimited."""
    price_per_hour: float | None = Field(default=None, gt=0)
    """Price of one worker for an hour, in any currency. `money` needs it."""

    @model_validator(mode="after")
    def _priced(self) -> BudgetConfig:
        if self.money is not None and self.price_per_hour is None:
            raise ValueError(
                "a budget in money needs to know what a worker costs: set price_per_hour too"
            )
        return self


class StoppingConfig(BudgetConfig):
    """When a training stops before its last epoch.

    `when` combines `patience`, `plateau` and `target`. Budgets and guards stop alone.
    """

    metric: Literal[
        "val_accuracy",
        "val_balanced_accuracy",
        "val_f1",
        "val_r2",
        "val_loss",
        "val_mae",
        "val_rmse",
    ] = "val_accuracy"
    """The metric that decides which epoch is best. If unset, it follows from model.task: val_mae
    for `probability` and `regression`."""
    patience: int | None = Field(default=5, ge=1)
    """Stop after this number of epochs without an improvement. null: never."""
    min_delta: float = Field(default=0.0, ge=0)
    """An epoch must improve the best metric by more than this."""
    plateau: int | None = Field(default=None, ge=1)
    """Stop when the mean metric of this number of epochs is not better than that of the same number
    before. null: never."""
    plateau_by: Literal["mean", "median"] = "mean"
    """Whether `plateau` compares means or medians."""
    target: float | None = None
    """Stop when the metric is as good as this. null: never."""
    when: Literal["any", "all"] = "any"
    """any: the first of patience, plateau and target stops. all: those that are set must agree."""
    nan_guard: bool = True
    """Stop after an epoch in which a loss, a logit or a weight is not finite. false: the training
    continues, and such an epoch is never the best."""
    divergence: float | None = Field(default=None, gt=1)
    """Stop when the training loss is above this multiple of its lowest value. null: never."""

    @property
    def mode(self) -> Mode:
        """Is a higher or a lower metric better?"""
        return "min" if self.metric in LOWER_IS_BETTER else "max"


class SearchStoppingConfig(BudgetConfig):
    """When a search stops. The metric is train.stopping's."""

    patience: int | None = Field(default=None, ge=1)
    """Stop after this number of trials without an improvement of the best. null: never."""
    min_delta: float = Field(default=0.0, ge=0)
    """A trial must improve the best metric by more than this."""
    target: float | None = None
    """Stop when a trial, or a head of a first answer, is as good as this. null: never."""
    epochs: int | None = Field(default=None, ge=1)
    """Epochs of all trials together. null: unlimited."""


@dataclass(frozen=True)
class Progress:
    """What happened so far."""

    metric: str
    mode: Mode
    values: Sequence[float]
    """The metric, per epoch; in a search, the best of each ended trial."""
    losses: Sequence[float] = ()
    """Training loss, per epoch."""
    seconds: float = 0.0
    worker_s: float = 0.0
    """Seconds times workers."""
    ahead_s: float = 0.0
    """Seconds that the next step is expected to take."""
    ahead_worker_s: float = 0.0
    unit: str = "epoch"
    """What a step is: an epoch or a trial."""
    running: Sequence[float] = ()
    """Best values of running trials. While one of them leads, patience does not stop a search."""
    epochs: int = 0
    first: float | None = None
    """In a search, the best head of its first answer, which trials have to beat."""


Rule = Callable[[Progress], str | None]


def unusable(metrics: Mapping[str, float]) -> str | None:
    """Which loss of an epoch is NaN or infinite: its weights are lost. None: the epoch is usable.

    The compared metric shows nothing here: argmax of NaN is class 0, so accuracy stays a number.
    Older versions recorded such epochs; now the loop sets their validation metrics to NaN.
    """
    problems = []
    for name in ("train_loss", "val_loss"):
        if name in metrics and not math.isfinite(metrics[name]):
            problems.append(f"{name} is {metrics[name]}")
    return ", ".join(problems) or None


def best_of(history: Sequence[Mapping[str, float]], cfg: StoppingConfig, last: bool = False) -> int:
    """The best usable epoch, counted from 0; -1 if there is none.

    last: the last usable epoch, whatever its metric.
    """
    best = None
    best_epoch = -1
    for epoch, metrics in enumerate(history):
        # Its metric may be a number, but its weights are lost.
        if unusable(metrics) is not None:
            continue
        value = metrics[cfg.metric]
        if last or improved(value, best, cfg.mode, cfg.min_delta):
            best = value
            best_epoch = epoch
    return best_epoch


def improved(value: float, best: float | None, mode: Mode, min_delta: float = 0.0) -> bool:
    """Is `value` better than `best` by more than min_delta? NaN and infinities never are."""
    if not math.isfinite(value):
        return False
    if best is None:
        return True
    gain = value - best if mode == "max" else best - value
    return gain > min_delta


def patience(wait: int, min_delta: float = 0.0) -> Rule:
    """The last `wait` steps did not improve the best by more than min_delta.

    Small gains add up: each step is compared with the best that counted.
    """

    def rule(p: Progress) -> str | None:
        best = p.first
        best_step = -1
        for step, value in enumerate(p.values):
            if improved(value, best, p.mode, min_delta):
                best = value
                best_step = step
        waited = len(p.values) - 1 - best_step
        if waited < wait:
            return None
        # A search waits for a running trial that leads.
        if any(improved(value, best, p.mode, min_delta) for value in p.running):
            return None
        if best is None:
            shown = "it was never a number"
        elif best_step < 0:
            shown = f"best {best:.4g} of the first answer"
        else:
            shown = f"best {best:.4g} in {p.unit} {best_step + 1}"
            if p.unit == "trial":  # trial-002 is another one
                shown += " of those that ended"
        return f"no improvement of {p.metric} for {_count(waited, p.unit)} ({shown})"

    return rule


def plateau(window: int, by: str = "mean", min_delta: float = 0.0) -> Rule:
    """The smoothed last `window` values are not better than as many before, by more than min_delta.

    A metric that jumps from epoch to epoch beats its best by chance, so patience waits too long.
    Smoothing shows the trend.
    """

    def rule(p: Progress) -> str | None:
        if len(p.values) < 2 * window:
            return None
        before = _numbers(p.values[-2 * window : -window])
        last = _numbers(p.values[-window:])
        shown_window = _count(window, p.unit)
        if not before:
            return None
        if not last:
            return f"{p.metric} was no number for {shown_window}"
        was = SMOOTHED[by](before)
        now = SMOOTHED[by](last)
        if improved(now, was, p.mode, min_delta):
            return None
        return (
            f"{p.metric} is on a plateau: "
            f"{by} {now:.4g} over {shown_window}, {was:.4g} over those before"
        )

    return rule


def target(goal: float) -> Rule:
    """Some value is as good as `goal`; those of running trials and of a first answer count too."""

    def rule(p: Progress) -> str | None:
        first = [] if p.first is None else [p.first]
        for value in (*first, *p.values, *p.running):
            reached = value >= goal if p.mode == "max" else value <= goal
            if reached:
                return f"{p.metric} {value:.4g} reached the target {goal:.4g}"
        return None

    return rule


def nan_guard(p: Progress) -> str | None:
    """The newest training loss is not finite: the weights are lost, and stay so."""
    if not p.losses or math.isfinite(p.losses[-1]):
        return None
    return f"train_loss was {p.losses[-1]} in {p.unit} {len(p.losses)}"


def divergence(factor: float) -> Rule:
    """The newest training loss is above `factor` times its lowest."""

    def rule(p: Progress) -> str | None:
        if not (numbers := _numbers(p.losses)):
            return None
        newest, lowest = p.losses[-1], min(numbers)
        if newest > factor * lowest:
            return f"train_loss {newest:.4g} is above {factor:g} times its lowest ({lowest:.4g})"
        return None

    return rule


def budget(limit: float, of: str, cost: Callable[[float, float], float]) -> Rule:
    """`cost(seconds, worker_s)` has reached the limit, or would pass it with the next step."""

    def rule(p: Progress) -> str | None:
        spent = cost(p.seconds, p.worker_s)
        ahead = cost(p.ahead_s, p.ahead_worker_s)
        limit_of = f"{OF_BUDGET}{_amount(limit)} {of}"
        if spent >= limit:
            return f"{limit_of} is spent ({_amount(spent)})"
        # Stop before the step that would overspend, not after it.
        if ahead and spent + ahead > limit:
            return f"one more {p.unit} would pass {limit_of} ({_amount(spent)} spent)"
        return None

    return rule


def epochs(limit: int) -> Rule:
    """All epochs together have reached the limit."""

    def rule(p: Progress) -> str | None:
        return f"{OF_BUDGET}{_count(limit, 'epoch')} is spent" if p.epochs >= limit else None

    return rule


def is_budget(reason: str | None) -> bool:
    """Did a budget stop the training or the search, rather than what it had learned?"""
    return reason is not None and OF_BUDGET in reason


def any_of(*rules: Rule) -> Rule:
    """Stops when a rule does, with the first one's reason. Without rules it never stops."""

    def rule(p: Progress) -> str | None:
        for one in rules:
            if (reason := one(p)) is not None:
                return reason
        return None

    return rule


def all_of(*rules: Rule) -> Rule:
    """Stops when every rule does, with all their reasons. Without rules it never stops."""

    def rule(p: Progress) -> str | None:
        reasons = [one(p) for one in rules]
        if not rules or None in reasons:
            return None
        return "; ".join(reason for reason in reasons if reason)

    return rule


def budgets(cfg: BudgetConfig) -> Rule:
    """The rule of the limits in a budget."""
    price_per_s = (cfg.price_per_hour or 0.0) / 3600
    rules = []
    if cfg.seconds:
        rules.append(budget(cfg.seconds, "s", lambda s, worker_s: s))
    if cfg.gpu_hours:
        rules.append(budget(cfg.gpu_hours, "GPU-hours", lambda s, worker_s: worker_s / 3600))
    if cfg.money:
        rules.append(budget(cfg.money, "in money", lambda s, worker_s: worker_s * price_per_s))
    return any_of(*rules)


def of_training(cfg: StoppingConfig) -> Rule:
    """The rule of a `train.stopping` section."""
    quality = []
    if cfg.target is not None:
        quality.append(target(cfg.target))
    if cfg.patience:
        quality.append(patience(cfg.patience, cfg.min_delta))
    if cfg.plateau:
        quality.append(plateau(cfg.plateau, cfg.plateau_by, cfg.min_delta))
    guards: list[Rule] = []
    if cfg.nan_guard:
        guards.append(nan_guard)
    if cfg.divergence:
        guards.append(divergence(cfg.divergence))
    combine = all_of if cfg.when == "all" else any_of
    # The order decides which reason is shown if several rules stop.
    return any_of(*guards, combine(*quality), budgets(cfg))


def of_search(cfg: SearchStoppingConfig) -> Rule:
    """The rule of a `search.stopping` section."""
    rules = []
    if cfg.target is not None:
        rules.append(target(cfg.target))
    if cfg.patience:
        rules.append(patience(cfg.patience, cfg.min_delta))
    if cfg.epochs:
        rules.append(epochs(cfg.epochs))
    return any_of(*rules, budgets(cfg))


def why_stop(
    cfg: StoppingConfig,
    history: Sequence[dict[str, float]],
    seconds: float = 0.0,
    worker_s: float = 0.0,
) -> str | None:
    """The reason to stop a training after these epochs, or None.

    The next epoch is expected to cost the mean of those so far.
    """
    done = max(1, len(history))
    progress = Progress(
        metric=cfg.metric,
        mode=cfg.mode,
        values=[metrics[cfg.metric] for metrics in history],
        losses=[metrics["train_loss"] for metrics in history if "train_loss" in metrics],
        seconds=seconds,
        worker_s=worker_s,
        ahead_s=seconds / done,
        ahead_worker_s=worker_s / done,
        epochs=len(history),
    )
    return of_training(cfg)(progress)


def _numbers(values: Sequence[float]) -> list[float]:
    """The values that are not NaN."""
    return [value for value in values if not math.isnan(value)]


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}" if number == 1 else f"{number} {unit}s"


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
