"""Do the checks call for a retrain? Pure functions: no cluster, no clock, no registry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated

from pydantic import Field, model_validator

from raypipe.config import Section
from raypipe.watch.decide import Decision

FREE_FAILURES = 3  # tried again at once so often


class WatchHorizon(Section):
    """How often false alarms may come, over many checks. `watch.horizon`."""

    checks: int = Field(default=365, ge=1, le=100_000)
    """How many checks in a row the promise is about: a year of nights."""
    false_alarm: float = Field(default=0.03, gt=0, lt=0.5)
    """The highest probability of any false alarm in that many checks in a row."""
    spans: tuple[Annotated[int, Field(ge=2, le=100)], ...] = ()
    """`[7, 28]`: the images of the last 7 and of the last 28 checks are tested together, too. It
    finds a small drift that lasts.

    Only where images of different checks are independent draws: of other things each time, or with
    their things named in `watch.group`. The same things photographed again look like drift.
    """


class PolicyConfig(Section):
    """When checks call for a retrain."""

    k: int = Field(default=1, ge=1)
    """So many of the last `of` checks of the champion must find drift."""

    of: int = Field(default=1, ge=1)
    """The number of checks that are looked at."""

    min_images: int = Field(default=20, ge=1)
    """Labelled training images that the champion's training did not have. With fewer, raypipe asks
    for labels."""

    cooldown: int = Field(default=0, ge=0)
    """Checks after a retrain in which no other one begins."""

    daily_cap: int = Field(default=2, ge=1)
    """Retrains within 24 hours."""

    budget_h: float | None = Field(default=None, gt=0)
    """Device hours that retrains may take within 30 days. One that has begun is finished."""

    @model_validator(mode="after")
    def _k_of(self) -> PolicyConfig:
        if self.k > self.of:
            raise ValueError(f"k={self.k} of {self.of} checks: k is at most `of`")
        return self


@dataclass(frozen=True)
class Tried:
    """An earlier retrain. checks: of the model, since then. device_h: hours of devices it took."""

    at: datetime
    checks: int
    device_h: float = 0.0


def retrain(
    checks: Sequence[bool],
    labels: Mapping[str, int],
    tried: Sequence[Tried],
    now: datetime,
    policy: PolicyConfig,
    force: bool = False,
) -> Decision:
    """Retrain when the policy's share of the last checks found drift, and there are new labels.

    checks: whether each check of the champion found drift, oldest first. labels: labelled training
    images that the champion's training did not have, by source. tried: retrains of this model,
    whatever came of them.
    """
    if force:
        return Decision(True, "Retraining was asked for")
    last = list(checks)[-policy.of :]
    drifted = sum(last)
    if not drifted:
        return Decision(False, "No drift: the champion stays")
    if drifted < policy.k:
        text = f"Drift in {drifted} of the last {len(last)} checks: the policy asks for "
        return Decision(False, f"{text}{policy.k} of {policy.of}")

    obstacle = _too_often(tried, now, policy)
    if obstacle:
        return Decision(False, f"Drift, but {obstacle}")

    total = sum(labels.values())
    if total < policy.min_images:
        have = "no labelled images" if not total else f"{total} labelled images"
        text = f"Drift, but {have} that the champion has not seen: waiting for labels"
        return Decision(False, f"{text} ({policy.min_images} are asked for)" if total else text)
    counts = ", ".join(f"{labels[source]} images of {source}" for source in sorted(labels))
    return Decision(True, f"Drift, and labels: {counts}")


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
        month = [one for one in tried if abs(now - one.at) < timedelta(days=30)]
        spent = sum(one.device_h for one in month)
        if spent >= policy.budget_h:
            took = f"{spent:.2g} device hours went into retrains within 30 days"
            return f"{took}: the budget is {policy.budget_h:g}"
    return ""


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
