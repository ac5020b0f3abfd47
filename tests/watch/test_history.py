"""Which checks a policy looks at, and in which order."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from raypipe.config import RunConfig, to_json
from raypipe.tables.table import append
from raypipe.watch import cycle, evidence_row, feedback, history
from raypipe.watch.policy import Checked, PolicyConfig, retrain
from raypipe.watch.settings import WatchConfig
from raypipe.watch.severity import NOT_ASKED

WATCH = WatchConfig()


def kept(
    run: RunConfig, about: str, window: int | None, drift: bool, at: str, seal: str | None = None
) -> None:
    row = dict.fromkeys(evidence_row.ROW.names) | {"key": f"{about} {at}", "name": "batch"}
    row |= {"model": "m/1", "table": "t@v1", "about": about, "window": window, "is_drift": drift}
    row |= {"checked_at": at, "seal": seal}
    append(WATCH.place(run, "drift"), pa.Table.from_pylist([row], evidence_row.ROW), "check")


def drifts(run: RunConfig) -> list[bool]:
    return [one.is_drift for one in history.checks(run, WATCH, "m/1", None)]


def test_checks_of_another_registry_do_not_count(tmp_path: Path) -> None:
    """It may have a model of the same name and number, and keep its checks in the same folder."""
    run = RunConfig(name="a", dir=str(tmp_path))
    kept(run, "an older raypipe's", 1, False, "2026-01-01")
    kept(run, "mine", 2, False, "2026-01-02", seal="mine")
    kept(run, "another's", 3, True, "2026-01-03", seal="theirs")
    found = history.checks(run, WATCH, "m/1", None, "mine")
    assert [one.is_drift for one in found] == [False, False]
    assert drifts(run) == [False, False, True]


def test_checks_are_in_the_order_of_their_commits(tmp_path: Path) -> None:
    """Of a table that was made again, the windows are numbered anew; a clock may go back; and
    whole versions have no number."""
    run = RunConfig(name="a", dir=str(tmp_path))
    for number in (1, 2, 3):
        kept(run, f"old {number}", number, True, f"2026-01-0{number}")
    for number in (1, 2):
        kept(run, f"new {number}", number, False, f"2025-12-0{number}")
    assert drifts(run) == [True, True, True, False, False]
    kept(run, "version 7", None, True, "2025-01-01")
    assert drifts(run)[-2:] == [False, True]
    kept(run, "new 2", 2, True, "2026-02-01")
    assert drifts(run) == [True, True, True, False, True, True]


NIGHT = datetime(2026, 11, 25, 3, tzinfo=UTC)


def hour(offset: float) -> datetime:
    return NIGHT + timedelta(hours=offset)


@pytest.mark.parametrize(
    ("at", "before", "after", "is_"),
    [
        (-5, [-9], [-4], -5),  # all clocks agree
        (1, [], [], 0),  # a host an hour ahead: just now, and not in the future
        (1, [-30], [-2], -2),  # it was before the check that followed
        (9999, [-50], [-26, -2], -26),  # a clock years ahead is no retrain for years
        (-9999, [-3], [-1], -3),  # a clock that went back does not make it forgotten
        (-9999, [9999, -3], [], -3),  # … whatever others wrote
        (9999, [9999], [9999], 0),
    ],
)
def test_when_a_retrain_was_by_clocks_that_differ(
    at: float, before: list[float], after: list[float], is_: float
) -> None:
    found = history.when(hour(at), list(map(hour, before)), list(map(hour, after)), NIGHT)
    assert found == hour(is_)


class Clock:
    """A host's clock, so many hours off."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.off_h, self.true_h = 0.0, 0.0
        patch.setattr(cycle, "datetime", self)

    def now(self, zone: object = None) -> datetime:
        return hour(self.true_h + self.off_h)


@pytest.mark.parametrize("off_h", [0.0, 1.0, -1.0, 24 * 365.0, -24 * 365.0])
def test_a_host_with_another_clock_neither_blocks_for_ever_nor_gives_a_second_retrain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off_h: float
) -> None:
    """One host retrains by a clock that is off; the other asks, night by night, by a right one."""
    run, clock = RunConfig(name="a", dir=str(tmp_path)), Clock(monkeypatch)
    past = cycle.Journal(WATCH.place(run, "retrains"), "m@champion", None)
    cfg = PolicyConfig(cooldown=2, daily_cap=1)
    kept(run, "1", 1, True, hour(-1).isoformat())
    # An earlier retrain, by the right clock: two days ago.
    clock.true_h = -48
    with cycle.hold(past, "early", also={"checks": 0}):
        pass
    clock.true_h, clock.off_h = 0, off_h
    with cycle.hold(past, "c", also={"checks": history.count(WATCH, run)}):
        pass
    clock.off_h = 0

    def asks(at_h: float, policy: PolicyConfig) -> str:
        past.refresh()
        tried = history.tried(past, "next", WATCH, run, hour(at_h))
        return retrain([Checked(True)], {"new": 99}, tried, hour(at_h), policy).reason

    cap = PolicyConfig(daily_cap=1)
    assert "within a day" in asks(0.5, cap)
    assert "0 checks since" in asks(0.5, cfg), "checks are counted, not timed"
    kept(run, "2", 2, True, hour(24).isoformat())
    assert "1 check since" in asks(24, cfg)
    kept(run, "3", 3, True, hour(48).isoformat())
    assert "Drift, and labels" in asks(50, cfg)


def test_leases_of_an_older_raypipe_are_counted_by_clocks(tmp_path: Path) -> None:
    run = RunConfig(name="a", dir=str(tmp_path))
    past = cycle.Journal(WATCH.place(run, "retrains"), "m@champion", None)
    with cycle.hold(past, "c"):
        pass
    kept(run, "1", 1, True, "2999-01-01T00:00:00+00:00")
    [one] = history.tried(past, "next", WATCH, run, datetime.now(UTC))
    assert one.checks == 1


def test_what_a_check_costs_is_read_with_it(tmp_path: Path) -> None:
    run = RunConfig(name="a", dir=str(tmp_path))
    kept(run, "old", None, True, "2026-01-01")
    row = dict.fromkeys(evidence_row.ROW.names) | {"key": "new", "name": "batch", "model": "m/1"}
    row |= {"table": "t@v1", "about": "new", "is_drift": True, "checked_at": "2026-01-02"}
    row |= {"accuracy": 0.8, "accuracy_low": 0.7, "accuracy_high": 0.9, "accuracy_known": 0.9}
    append(WATCH.place(run, "drift"), pa.Table.from_pylist([row], evidence_row.ROW), "check")
    old, new = history.checks(run, WATCH, "m/1", None)
    assert old.severity.loss is None and new.severity.loss == pytest.approx((0.1, 0.0, 0.2))


def of_evidence(run: RunConfig, evidence: Any, **columns: Any) -> Checked:
    row = dict.fromkeys(evidence_row.ROW.names) | {"key": "k", "name": "batch", "model": "m/1"}
    row |= {"table": "t@v1", "about": "a", "is_drift": True, "checked_at": "2026-01-02"}
    row |= {"evidence": evidence if isinstance(evidence, str) else to_json(evidence), **columns}
    append(WATCH.place(run, "drift"), pa.Table.from_pylist([row], evidence_row.ROW), "check")
    return history.checks(run, WATCH, "m/1", None)[-1]


def test_a_loss_that_labels_show_is_not_overruled_by_an_estimate(tmp_path: Path) -> None:
    """Classes that look as before and mean something else: the estimate sees nothing."""
    run = RunConfig(name="a", dir=str(tmp_path))
    labels = [{"detector": "labels", "is_drift": True}, {"detector": "mmd", "is_drift": False}]
    both = [{**one, "is_drift": True} for one in labels]
    none = [{**one, "is_drift": False} for one in labels]
    came = {"labelled": 120, "measured_as": "accuracy", "measured": 0.7, "measured_low": 0.62}
    came |= {"measured_high": 0.78, "measured_known": 0.9}
    cheap = {"accuracy": 0.89, "accuracy_low": 0.8, "accuracy_high": 0.95, "accuracy_known": 0.9}
    dear = {"accuracy": 0.5, "accuracy_low": 0.4, "accuracy_high": 0.6, "accuracy_known": 0.9}

    measured = of_evidence(run, labels, **came, **cheap)
    assert measured.by_labels and measured.severity.loss == pytest.approx((0.2, 0.12, 0.28))
    policy = PolicyConfig(severity=0.05, min_images=1)
    told = retrain([measured], {"new": 9}, [], NIGHT, policy)
    assert told.act and "a measured loss of 20.0 points" in told.reason
    # Nothing of the labels where they did not alarm, or where the estimate is worse.
    assert not of_evidence(run, none, **came, **cheap).by_labels
    assert not of_evidence(run, both, **came, **dear).by_labels
    # Images of which nobody knows the cost stay of unknown cost.
    unknown = of_evidence(run, both, **came, no_estimate="too far")
    assert not unknown.by_labels and unknown.severity.loss is None
    assert of_evidence(run, labels, **came, no_estimate="too far").by_labels
    for odd in ("", "no json", "[1]", "{}", '[{"detector": "labels"}]'):
        assert not of_evidence(run, odd, **came, **cheap).by_labels


def test_device_hours_of_a_retrain_that_broke_are_spent(tmp_path: Path) -> None:
    """Only the end of a retrain was counted: of one that broke after its training, or was taken up
    again afterwards, watch.policy.budget_h knew nothing."""
    run = RunConfig(name="a", dir=str(tmp_path))
    past = cycle.Journal(WATCH.place(run, "retrains"), "m@champion", None)
    with pytest.raises(RuntimeError), cycle.hold(past, "broke") as held:
        held.reached("trained", device_s=7200.0)  # type: ignore[union-attr]
        raise RuntimeError
    for _ in range(2):
        [one] = history.tried(past, "next", WATCH, run, datetime.now(UTC))
        assert one.device_h == 2
        with cycle.hold(past, "broke"):
            pass


def test_one_window_counts_once_though_settings_were_changed_and_changed_back(
    tmp_path: Path,
) -> None:
    """Two checks of one window began a retrain of `k: 2`."""
    run = RunConfig(name="night", dir=str(tmp_path))
    kept(run, "w1", 1, True, "2026-01-01")
    kept(run, "w1", 1, True, "2026-01-02")
    newest: Any = SimpleNamespace(
        key="w1 2026-01-01",
        report=SimpleNamespace(
            evidence=(), is_drift=True, severity=NOT_ASKED, feedback=feedback.NOTHING
        ),
    )
    assert len(history.checks(run, WATCH, "m/1", newest)) == 1
    kept(run, "w2", 2, True, "2026-01-03")
    assert len(history.checks(run, WATCH, "m/1", newest)) == 2
