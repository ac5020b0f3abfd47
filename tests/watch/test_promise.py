"""What a check may spend of a year's false alarms, and whether its tests can show so little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raypipe.config import RunConfig, validate
from raypipe.tables.table import append
from raypipe.watch import evidence_row, promise
from raypipe.watch.detect import DriftConfig, DriftReport, detect
from raypipe.watch.settings import WatchConfig

WATCH = validate(WatchConfig, {"horizon": {"checks": 10, "false_alarm": 0.03}})


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
