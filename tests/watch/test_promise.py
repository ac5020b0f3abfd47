"""What a check may spend of a year's false alarms, and whether its tests can show so little."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

from raypipe.config import RunConfig, validate
from raypipe.errors import DataError
from raypipe.job import Job
from raypipe.tables.table import append
from raypipe.watch import evidence_row, promise
from raypipe.watch.detect import DriftConfig, DriftReport, detect
from raypipe.watch.error_tests import Found
from raypipe.watch.settings import WatchConfig
from raypipe.watch.sides import Seen
from raypipe.work.dry_run import predicting
from raypipe.work.dry_run.at import At
from raypipe.work.show import Show

HORIZON = {"horizon": {"checks": 10, "false_alarm": 0.03}}
WATCH = validate(WatchConfig, HORIZON)


def spent(run: RunConfig, *checks: tuple[int, str, float, bool]) -> None:
    """Evidence of (window, model, alpha, whether it was promised)."""
    rows = [
        dict.fromkeys(evidence_row.ROW.names)
        | {
            "name": "batch",
            "about": f"w{window}",
            "window": window,
            "model": model,
            "alpha": alpha,
            "promised": promised,
        }
        | {"checked_at": "2026-11-25"}
        for window, model, alpha, promised in checks
    ]
    append(WATCH.place(run, "drift"), pa.Table.from_pylist(rows, evidence_row.ROW), "checks")


def test_a_check_spends_its_share_and_no_more_than_is_left(tmp_path: Path) -> None:
    run = RunConfig(name="a", dir=str(tmp_path))
    assert promise.level(run, WatchConfig(), "w1", "m/1") is None
    assert promise.level(run, WATCH, "w1", "m/1") == pytest.approx(0.003)
    spent(run, *[(n, "m/1", 0.003, True) for n in range(1, 9)], (9, "m/1", 0.01, False))
    assert promise.level(run, WATCH, "w10", "m/1") == pytest.approx(0.003), "of another regime"
    spent(run, (10, "m/1", 0.005, True))
    left = 0.03 - 8 * 0.003 - 0.005
    assert promise.level(run, WATCH, "w11", "m/1") == pytest.approx(left)
    assert promise.level(run, WATCH, "w10", "m/1") == pytest.approx(0.003), "the same check again"
    spent(run, (11, "m/1", 0.001, True))
    assert promise.level(run, WATCH, "w12", "m/1") == pytest.approx(0.003), "the first is forgotten"
    spent(run, (12, "m/1", 0.02, True))
    assert promise.level(run, WATCH, "w13", "m/1") == promise.NOTHING_LEFT


def test_a_check_below_its_share_says_so() -> None:
    for watch, alpha in ((WATCH, 0.003), (WatchConfig(), None)):
        assert promise.too_little(watch, alpha) == []
    [few] = promise.too_little(WATCH, 0.001)
    assert "false_alarm=0.03: the alpha of this check is 0.001 instead of 0.003. Raise" in few
    [nothing] = promise.too_little(WATCH, promise.NOTHING_LEFT)
    assert "1e-12 instead of 0.003, and it cannot alarm" in nothing and "last 10 checks" in nothing


def test_a_plan_of_a_check_that_cannot_alarm_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said alpha 1e-12, and nothing else."""
    tree = {"table": {"uri": "none"}, "run": {"name": "a", "dir": str(tmp_path)}}
    job = validate(Job, tree | {"watch": HORIZON})
    monkeypatch.setattr(predicting, "_window", lambda at: ({"model": "m/2"}, ()))
    at = At(job, cast(Show, None), {}, 1, "here", [])
    assert "caution" not in predicting.drift(at).what
    spent(job.run, (1, "m/1", 0.03, True))
    assert "and it cannot alarm" in predicting.drift(at).what["caution"]


def test_a_window_of_another_table_is_another_check(tmp_path: Path) -> None:
    """Both are window 1, under the same name: what the first one spent is gone for the second."""
    run = RunConfig(name="a", dir=str(tmp_path))
    spent(run, (1, "m/1", 0.02, True))
    assert promise.level(run, WATCH, "window 1 of another", "m/1") == pytest.approx(0.003)
    spent(run, (1, "m/1", 0.02, True), (None, "m/1", 0.0295, True))
    left = promise.level(run, WATCH, "a whole version", "m/1")
    assert left == promise.NOTHING_LEFT, "whole versions have no number, and are checks, too"


def sides(shift: float) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    reference, batch = rng.normal(size=(150, 12)), rng.normal(size=(100, 12)) + shift
    scores = [rng.dirichlet([2, 2, 2], n) for n in (150, 100)]
    return dict(
        zip(
            ("ref_embedding", "batch_embedding", "ref_scores", "batch_scores"),
            (reference, batch, *scores),
            strict=True,
        )
    )


@pytest.mark.parametrize(
    ("shift", "calls", "alarms"), [(0.0, 1, False), (0.35, 2, True), (3.0, 1, True)]
)
def test_all_permutations_are_drawn_only_in_doubt(shift: float, calls: int, alarms: bool) -> None:
    asked: list[DriftConfig] = []
    drift = DriftConfig(detectors=("mmd",)) if shift < 1 else DriftConfig()

    def found(cfg: DriftConfig) -> DriftReport:
        asked.append(cfg)
        return detect(**sides(shift), cfg=cfg, seed=1)

    report = promise.kept(drift, 8.2e-5, found)
    assert len(asked) == calls and report.is_drift is alarms and report.alpha == 8.2e-5
    if calls == 2:
        assert asked[1].permutations > 1 / 8.2e-5
        assert report.p_value < 8.2e-5 < 1 / drift.permutations
    assert promise.kept(drift, None, found).alpha == drift.alpha


def of_labels(*p_values: float) -> list[Found]:
    return [Found(f"test {n}", 0.1, p_value, "") for n, p_value in enumerate(p_values)]


@pytest.mark.parametrize("alpha", [None, 8.2e-5, promise.NOTHING_LEFT])
@pytest.mark.parametrize("times", [0.99, 1.01])
def test_labels_alarm_at_their_half_of_alpha_and_the_p_value_says_so(
    alpha: float | None, times: float
) -> None:
    drift = DriftConfig(detectors=("mmd",))
    level = drift.alpha if alpha is None else alpha
    labels = of_labels(1.0, times * level / 4)
    report = promise.over_spans(
        drift, alpha, lambda cfg: detect(**sides(0.0), cfg=cfg, seed=1), {}, labels
    )
    assert report.alpha == pytest.approx(level)
    assert report.is_drift is (times < 1)
    assert (report.p_value <= report.alpha) is report.is_drift
    assert [e.is_drift for e in report.evidence] == [False, False, times < 1]


def test_groups_that_need_all_of_alpha_keep_it_when_labels_come() -> None:
    """Of 4 against 5 groups no p-value is below 1/126: half of 0.01 is out of reach."""
    seen = {
        "ref_seen": Seen(groups=[f"r{n % 5}" for n in range(150)]),
        "batch_seen": Seen(groups=[f"b{n % 4}" for n in range(100)]),
    }
    drift = DriftConfig(detectors=("mmd",))

    def found(cfg: DriftConfig) -> DriftReport:
        return detect(**sides(0.0), cfg=cfg, seed=1, **seen)

    with pytest.raises(DataError, match="No detector"):
        found(drift.model_copy(update={"alpha": drift.alpha / 2}))
    report = promise.over_spans(drift, None, found, {}, of_labels(1e-9))
    assert [e.detector for e in report.evidence] == ["mmd"] and report.alpha == drift.alpha
    assert report.notes[-1] == promise.NO_SHARE
