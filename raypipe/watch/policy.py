"""Do the checks call for a retrain? Pure functions: no cluster, no clock, no registry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Literal

from pydantic import Field, model_validator

from raypipe.config import Section
from raypipe.watch.decide import Decision
from raypipe.watch.severity import NOT_ASKED, Severity

FREE_FAILURES = 3  # tried again at once so often
ROUNDED = 1e-9  # 0.98 - 0.93 is 0.04999…: five points are five points


class WatchHorizon(Section):
    """How often false alarms may come, over many checks. `watch.horizon`."""

    checks: int = Field(default=365, ge=1, le=100_000)
    """Number of checks in a row for which `false_alarm` holds. 365: a year of nights."""
    false_alarm: float = Field(default=0.03, gt=0, lt=0.5)
    """The highest probability of any false alarm in `checks` checks in a row."""
    spans: tuple[Annotated[int, Field(ge=2, le=100)], ...] = ()
    """`[7, 28]`: also test the images of the last 7 and of the last 28 checks together. This finds
    a small drift that lasts.

    Images of different checks must be independent draws. If the same things are photographed again,
    name them in `watch.group`; otherwise they look like drift. Only with window=since_last.
    """


class PolicyConfig(Section):
    """When checks call for a retrain."""

    k: int = Field(default=1, ge=1)
    """A retrain begins if at least this number of the champion's last `of` checks count. By default
    a check counts if it found drift."""

    of: int = Field(default=1, ge=1)
    """The number of last checks, see `k`."""

    severity: float | None = Field(default=None, gt=0, lt=1)
    """Drift counts only if its estimated loss of accuracy is at least this: 0.05 is five points.
    Drift without an estimate counts, too. null: all drift counts."""

    counts: Literal["both", "loss"] = "both"
    """With `severity`: which checks count. both: those with drift and such a loss. loss: those with
    such a loss whose whole interval is a loss, with or without drift."""

    min_images: int = Field(default=20, ge=1)
    """Least number of labelled training images that the champion was not trained on. With fewer,
    raypipe asks for labels."""

    cooldown: int = Field(default=0, ge=0)
    """Checks that must follow a retrain. The last of them may begin another one."""

    daily_cap: int = Field(default=2, ge=1)
    """Most retrains within 24 hours."""

    budget_h: float | None = Field(default=None, gt=0)
    """Most device hours of retrains within 30 days. When they are used up, a search ends, and what
    has begun is finished."""

    @model_validator(mode="after")
    def _k_of(self) -> PolicyConfig:
        if self.k > self.of:
            raise ValueError(f"k={self.k} of {self.of} checks: k is at most `of`")
        return self

    @model_validator(mode="after")
    def _has_a_severity(self) -> PolicyConfig:
        if self.counts == "loss" and self.severity is None:
            raise ValueError("counts=loss needs policy.severity, the loss that counts: 0.05")
        return self


@dataclass(frozen=True)
class Checked:
    """What a drift check found: drift by its p-values, and the estimate of what it costs.

    by_labels: labels that came have measured it.
    """

    is_drift: bool
    severity: Severity = NOT_ASKED
    by_labels: bool = False


@dataclass(frozen=True)
class Tried:
    """An earlier retrain. checks: of the model, since then. device_h: hours of devices it took."""

    at: datetime
    checks: int
    device_h: float = 0.0


def retrain(
    checks: Sequence[Checked],
    labels: Mapping[str, int],
    tried: Sequence[Tried],
    now: datetime,
    policy: PolicyConfig,
    force: bool = False,
) -> Decision:
    """Retrain when the policy's share of the last checks count, and there are new labels.

    checks: those of the champion, oldest first. labels: labelled training images that the
    champion's training did not have, by source. tried: retrains of this model, whatever came of
    them.
    """
    if force:
        return Decision(True, "Retraining was asked for")
    last = list(checks)[-policy.of :]
    counting = [one for one in last if counts(one, policy)]
    if not counting:
        return Decision(False, _calm(last, policy))
    if len(counting) < policy.k:
        what = "Drift"
        if policy.severity is not None:
            what = f"{_asked(policy).capitalize()}, or drift of unknown cost,"
        text = f"{what} in {len(counting)} of the last {len(last)} checks: the policy asks for "
        return Decision(False, f"{text}{policy.k} of {policy.of}")

    # The newest one that counts is what is told.
    found = _found(counting[-1], policy)
    obstacle = _too_often(tried, now, policy)
    if obstacle:
        return Decision(False, f"{found}, but {obstacle}")

    total = sum(labels.values())
    if total < policy.min_images:
        have = "no labelled images" if not total else f"{total} labelled images"
        text = f"{found}, but {have} that the champion has not seen: waiting for labels"
        return Decision(False, f"{text} ({policy.min_images} are asked for)" if total else text)
    by_source = ", ".join(f"{labels[source]} images of {source}" for source in sorted(labels))
    return Decision(True, f"{found}, and labels: {by_source}")


def counts(checked: Checked, policy: PolicyConfig) -> bool:
    """Does a check speak for a retrain?

    Without an estimate, drift alone decides: windows far from all that is known have none, and
    those cost most. Where drift is shown already, the estimate itself is compared, else chance must
    be ruled out too: the interval has to be a loss as a whole.
    """
    loss = checked.severity.loss
    if policy.severity is None or loss is None:
        return checked.is_drift
    is_large = loss[0] >= policy.severity - ROUNDED
    return is_large and (checked.is_drift if policy.counts == "both" else loss[1] > 0)


def _calm(last: Sequence[Checked], policy: PolicyConfig) -> str:
    """Why no check counts."""
    if not last or (not last[-1].is_drift and policy.counts == "both"):
        return "No drift: the champion stays"
    newest = last[-1]
    loss = newest.severity.loss
    what = "Drift" if newest.is_drift else "No drift"
    if loss is None:
        return f"{what}, and {newest.severity}: the champion stays"
    join = "but" if newest.is_drift else "and"
    return f"{what}, {join} {_points(loss, newest.by_labels)}: the policy asks for {_asked(policy)}"


def _asked(policy: PolicyConfig) -> str:
    beyond = " beyond chance" if policy.counts == "loss" else ""
    return f"a loss of {100 * (policy.severity or 0):g} points{beyond}"


def _found(checked: Checked, policy: PolicyConfig) -> str:
    """What counts in a check."""
    if policy.severity is None:
        return "Drift"
    loss = checked.severity.loss
    if loss is None:
        return f"Drift of unknown cost ({checked.severity})"
    points = _points(loss, checked.by_labels)
    return f"Drift with {points}" if checked.is_drift else points.capitalize()


def _points(loss: tuple[float, float, float], by_labels: bool) -> str:
    points, low, high = (100 * one for one in loss)
    how = "a measured" if by_labels else "an estimated"
    return f"{how} loss of {points:.1f} points of accuracy ({low:.1f} to {high:.1f})"


def _too_often(tried: Sequence[Tried], now: datetime, policy: PolicyConfig) -> str:
    """Why there were enough retrains for now; empty if there were not."""
    if tried and min(one.checks for one in tried) < policy.cooldown:
        since = min(one.checks for one in tried)
        checks = "1 check" if since == 1 else f"{since} checks"
        return f"{checks} since the last retrain: the policy waits for {policy.cooldown}"
    # A clock that went back a little does not make a retrain forgotten.
    today = [one for one in tried if abs(now - one.at) < timedelta(days=1)]
    if len(today) >= policy.daily_cap:
        return f"{len(today)} retrains within a day: the policy allows {policy.daily_cap}"
    if policy.budget_h is not None:
        spent = spent_h(tried, now)
        if spent >= policy.budget_h:
            took = f"{spent:.2g} device hours went into retrains within 30 days"
            return f"{took}: the budget is {policy.budget_h:g}"
    return ""


def spent_h(tried: Sequence[Tried], now: datetime) -> float:
    """Device hours that went into retrains within 30 days."""
    return sum(one.device_h for one in tried if abs(now - one.at) < timedelta(days=30))


def backed_off(failures: Sequence[datetime], now: datetime) -> str:
    """Why a retrain that failed is not tried again yet; empty if it may be.

    failures: when it broke, oldest first. From the third on the pauses double: 1, 2, … 24 hours. A
    scheduler that starts a broken job again and again must not use up a cluster.
    """
    if len(failures) < FREE_FAILURES:
        return ""
    pause_h = min(24, 2 ** min(10, len(failures) - FREE_FAILURES))
    # Of a clock that went back nobody knows how long ago it was: it is tried.
    if not timedelta() <= now - failures[-1] < timedelta(hours=pause_h):
        return ""
    hours = "1 hour" if pause_h == 1 else f"{pause_h} hours"
    return (
        f"The retrain failed {len(failures)} times, the last time at {failures[-1]:%H:%M} UTC: it "
        f"is tried again {hours} later, or now with watch.force=true"
    )
