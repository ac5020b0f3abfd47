"""When to stop, and why: pure rules over a small record of what happened so far, inside a trial and across a search.

A rule takes a Progress and returns None or a reason in words, which the user reads. `any_of` and `all_of` make a rule of
several. Rules look at whole epochs (in a search: at whole trials), so a run ends where an epoch ends. On several ranks all of
them must be given the same Progress, else one would leave and the others wait for it.
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
LOWER_IS_BETTER = ("val_loss", "val_mae", "val_rmse")
SMOOTHED: dict[str, Callable[[Iterable[float]], float]] = {"mean": fmean, "median": median}


class BudgetConfig(Section):
    """What may be spent: whichever limit is met first stops. `price_per_hour` is one worker's, in any currency.

    A worker is one GPU where there are GPUs; without them `gpu_hours` counts the workers' hours all the same.
    """

    seconds: float | None = Field(default=None, gt=0)
    gpu_hours: float | None = Field(default=None, gt=0)
    money: float | None = Field(default=None, gt=0)
    price_per_hour: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _priced(self) -> BudgetConfig:
        if self.money is not None and self.price_per_hour is None:
            raise ValueError(
                "a budget in money needs to know what a worker costs: set price_per_hour too"
            )
        return self


class StoppingConfig(BudgetConfig):
    """Stop a training after `patience` epochs without an improvement of at least `min_delta`; `patience: null` never stops.

    plateau: the mean (or median) of so many epochs is not better than that of as many before. target: the metric is as good
    as this. `when: all` waits until those of the three that are set agree. Budgets and guards stop alone: `nan_guard` when
    an epoch is unusable (a loss, a logit or a weight is not finite; without the guard the training goes on, and such an epoch
    is never the best), `divergence` when the training loss is above so many times its lowest.
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
    patience: int | None = Field(default=5, ge=1)
    min_delta: float = Field(default=0.0, ge=0)
    plateau: int | None = Field(default=None, ge=1)
    plateau_by: Literal["mean", "median"] = "mean"
    target: float | None = None
    when: Literal["any", "all"] = "any"
    nan_guard: bool = True
    divergence: float | None = Field(default=None, gt=1)

    @property
    def mode(self) -> Mode:
        """Which way the metric is better."""
        return "min" if self.metric in LOWER_IS_BETTER else "max"


class SearchStoppingConfig(BudgetConfig):
    """Stop a search after `patience` trials that did not improve the best by at least `min_delta`, when a trial reaches
    `target`, after so many epochs of all trials together, or when a budget is spent. The metric is that of train.stopping."""

    patience: int | None = Field(default=None, ge=1)
    min_delta: float = Field(default=0.0, ge=0)
    target: float | None = None
    epochs: int | None = Field(default=None, ge=1)


@dataclass(frozen=True)
class Progress:
    """What happened so far. `values` of `metric` and train `losses` are per epoch; in a search, per ended trial its best.

    `running` are the best values of trials that have not ended: one of them may reach the target, and none is given up while
    it leads. `worker_s` is seconds times workers. `ahead_s` and `ahead_worker_s` are what the next step will take.
    """

    metric: str
    mode: Mode
    values: Sequence[float]
    losses: Sequence[float] = ()
    seconds: float = 0.0
    worker_s: float = 0.0
    ahead_s: float = 0.0
    ahead_worker_s: float = 0.0
    unit: str = "epoch"
    running: Sequence[float] = ()
    epochs: int = 0


Rule = Callable[[Progress], str | None]


def unusable(metrics: Mapping[str, float]) -> str | None:
    """What of an epoch's metrics says that its weights are lost: a loss that is NaN or infinite. None: the epoch is usable.

    The metric that is compared says nothing here. argmax of NaN is class 0, so accuracy stays a number. The loop sets all
    validation metrics of an unusable epoch to NaN; this function also recognises epochs that older versions recorded.
    """
    lost = [n for n in ("train_loss", "val_loss") if n in metrics and not math.isfinite(metrics[n])]
    return ", ".join(f"{name} is {metrics[name]}" for name in lost) or None


def best_of(history: Sequence[Mapping[str, float]], cfg: StoppingConfig, last: bool = False) -> int:
    """The best usable epoch, counted from 0; -1 if there is none. `last`: the last usable one, whatever its metric."""
    best, found = None, -1
    for epoch, metrics in enumerate(history):
        if unusable(metrics) is None and (
            last or improved(metrics[cfg.metric], best, cfg.mode, cfg.min_delta)
        ):
            best, found = metrics[cfg.metric], epoch
    return found


def improved(value: float, best: float | None, mode: Mode, min_delta: float = 0.0) -> bool:
    """Is `value` better than `best` by more than min_delta? NaN and infinities never are."""
    if not math.isfinite(value):
        return False
    gain = value - best if best is not None else float("inf")
    return (gain if mode == "max" or best is None else -gain) > min_delta


def patience(wait: int, min_delta: float = 0.0) -> Rule:
    """`wait` steps in a row that did not improve the best by more than min_delta; crumbs add up against that best."""

    def rule(p: Progress) -> str | None:
        best: float | None = None
        found = -1
        for i, value in enumerate(p.values):
            if improved(value, best, p.mode, min_delta):
                best, found = value, i
        waited = len(p.values) - 1 - found
        if waited < wait or any(improved(value, best, p.mode, min_delta) for value in p.running):
            return None
        shown = (
            f"best {best:.4g} in {p.unit} {found + 1}"
            if best is not None
            else "it was never a number"
        )
        return f"no improvement of {p.metric} for {_count(waited, p.unit)} ({shown})"

    return rule


def plateau(window: int, by: str = "mean", min_delta: float = 0.0) -> Rule:
    """The smoothed last `window` values are no better than as many before them, by more than min_delta.

    A metric that jumps from epoch to epoch beats its best by luck, so patience waits too long; smoothing sees the trend.
    """

    def rule(p: Progress) -> str | None:
        if len(p.values) < 2 * window:
            return None
        before, last = (
            [v for v in part if v == v]
            for part in (p.values[-2 * window : -window], p.values[-window:])
        )
        if not before:
            return None
        if not last:
            return f"{p.metric} was no number for {_count(window, p.unit)}"
        was, now = SMOOTHED[by](before), SMOOTHED[by](last)
        if improved(now, was, p.mode, min_delta):
            return None
        return f"{p.metric} is on a plateau: {by} {now:.4g} over {_count(window, p.unit)}, {was:.4g} over those before"

    return rule


def target(goal: float) -> Rule:
    """Some value was as good as `goal`, of a running trial too."""

    def rule(p: Progress) -> str | None:
        hits = [v for v in (*p.values, *p.running) if (v >= goal if p.mode == "max" else v <= goal)]
        return f"{p.metric} {hits[0]:.4g} reached the target {goal:.4g}" if hits else None

    return rule


def nan_guard(p: Progress) -> str | None:
    """The newest training loss is not a number: the weights are lost, and no later epoch will mend them."""
    if not p.losses or math.isfinite(p.losses[-1]):
        return None
    return f"train_loss was {p.losses[-1]} in {p.unit} {len(p.losses)}"


def divergence(factor: float) -> Rule:
    """The newest training loss is above `factor` times its lowest."""

    def rule(p: Progress) -> str | None:
        numbers = [loss for loss in p.losses if loss == loss]
        if not numbers or not p.losses[-1] > factor * min(numbers):
            return None
        return f"train_loss {p.losses[-1]:.4g} is above {factor:g} times its lowest ({min(numbers):.4g})"

    return rule


def budget(limit: float, of: str, cost: Callable[[float, float], float]) -> Rule:
    """`cost(seconds, worker_s)` has met the limit, or would pass it with the next step."""

    def rule(p: Progress) -> str | None:
        spent, ahead = cost(p.seconds, p.worker_s), cost(p.ahead_s, p.ahead_worker_s)
        if spent >= limit:
            return f"the budget of {_amount(limit)} {of} is spent ({_amount(spent)})"
        if ahead and spent + ahead > limit:
            return f"one more {p.unit} would pass the budget of {_amount(limit)} {of} ({_amount(spent)} spent)"
        return None

    return rule


def epochs(limit: int) -> Rule:
    return lambda p: (
        f"the budget of {_count(limit, 'epoch')} is spent" if p.epochs >= limit else None
    )


def any_of(*rules: Rule) -> Rule:
    """Stops when a rule does, for the first one's reason. Of no rules it never stops."""
    return lambda p: next((why for rule in rules if (why := rule(p)) is not None), None)


def all_of(*rules: Rule) -> Rule:
    """Stops when every rule does, for all their reasons. Of no rules it never stops."""

    def rule(p: Progress) -> str | None:
        reasons = [one(p) for one in rules]
        return "; ".join(r for r in reasons if r) if rules and None not in reasons else None

    return rule


def budgets(cfg: BudgetConfig) -> Rule:
    price = (cfg.price_per_hour or 0.0) / 3600
    limits = [
        budget(cfg.seconds, "s", lambda s, worker_s: s) if cfg.seconds else None,
        budget(cfg.gpu_hours, "GPU-hours", lambda s, worker_s: worker_s / 3600)
        if cfg.gpu_hours
        else None,
        budget(cfg.money, "in money", lambda s, worker_s: worker_s * price) if cfg.money else None,
    ]
    return any_of(*(rule for rule in limits if rule))


def of_training(cfg: StoppingConfig) -> Rule:
    """The rule that a `train.stopping` section says."""
    chosen = [
        target(cfg.target) if cfg.target is not None else None,
        patience(cfg.patience, cfg.min_delta) if cfg.patience else None,
        plateau(cfg.plateau, cfg.plateau_by, cfg.min_delta) if cfg.plateau else None,
    ]
    quality = (all_of if cfg.when == "all" else any_of)(*(rule for rule in chosen if rule))
    guards = [
        nan_guard if cfg.nan_guard else None,
        divergence(cfg.divergence) if cfg.divergence else None,
    ]
    return any_of(*(rule for rule in guards if rule), quality, budgets(cfg))


def of_search(cfg: SearchStoppingConfig) -> Rule:
    """The rule that a `search.stopping` section says."""
    chosen = [
        target(cfg.target) if cfg.target is not None else None,
        patience(cfg.patience, cfg.min_delta) if cfg.patience else None,
        epochs(cfg.epochs) if cfg.epochs else None,
    ]
    return any_of(*(rule for rule in chosen if rule), budgets(cfg))


def why_stop(
    cfg: StoppingConfig,
    history: Sequence[dict[str, float]],
    seconds: float = 0.0,
    worker_s: float = 0.0,
) -> str | None:
    """The reason to stop a training after these epochs, or None. An epoch to come is taken to cost their mean."""
    done = max(1, len(history))
    progress = Progress(
        cfg.metric,
        cfg.mode,
        [metrics[cfg.metric] for metrics in history],
        [metrics["train_loss"] for metrics in history if "train_loss" in metrics],
        seconds,
        worker_s,
        seconds / done,
        worker_s / done,
        epochs=len(history),
    )
    return of_training(cfg)(progress)


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'s' * (number != 1)}"


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
