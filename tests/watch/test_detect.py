"""Drift is found where it is, and a check stays quiet at its stated rate where it is not."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from raypipe.config import validate
from raypipe.errors import ConfigError, DataError
from raypipe.watch.detect import DriftConfig, DriftReport, Name, detect
from raypipe.watch.detectors import DETECTORS
from raypipe.watch.settings import LEAST_ROWS
from raypipe.watch.sides import Seen

WIDTH, CLASSES = 96, 3
QUICK = DriftConfig(permutations=400, max_rows=200)


def sample(
    seed: int, rows: int, shift: float = 0.0, lean: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Correlated, skewed features like those of a network behind a ReLU, and softmax scores that
    lean to class 0.
    """
    rng = np.random.default_rng(seed)
    mix = np.random.default_rng(0).normal(size=(12, WIDTH))
    features = np.maximum(
        (rng.normal(size=(rows, 12)) + shift) @ mix + rng.normal(size=(rows, WIDTH)), 0
    ).astype(np.float32)
    logits = rng.normal(size=(rows, CLASSES)) + np.array([lean, 0, 0])
    scores = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return features, scores.astype(np.float32)


def check(
    ref: tuple[np.ndarray, np.ndarray],
    batch: tuple[np.ndarray, np.ndarray],
    cfg: DriftConfig = QUICK,
) -> DriftReport:
    return detect(*interleaved(ref, batch), cfg, seed=3)


def interleaved(
    ref: tuple[np.ndarray, np.ndarray], batch: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return ref[0], batch[0], ref[1], batch[1]


def pieces(report: DriftReport) -> dict[tuple[str, str], float]:
    return {(e.detector, e.on): e.p_value for e in report.evidence}


def test_a_shifted_embedding_is_found_by_both_detectors() -> None:
    report = check(sample(1, 130), sample(2, 160, shift=0.8))
    assert report.is_drift and report.p_value < report.alpha
    assert pieces(report)["mmd", "embedding"] == pytest.approx(1 / 401)
    assert pieces(report)["ks", "embedding"] < 1e-4
    assert pieces(report)["ks", "scores"] > 0.01  # the scores did not move, and the report says so
    assert (report.reference_images, report.batch_images) == (130, 160)


def test_scores_that_lean_are_found_when_the_embedding_is_the_same() -> None:
    report = check(sample(1, 150), sample(2, 150, lean=1.5))
    assert [(e.detector, e.on) for e in report.evidence if e.is_drift] == [("ks", "scores")]
    assert report.is_drift


@pytest.mark.parametrize(("ref_rows", "batch_rows"), [(130, 130), (130, 900)])
def test_no_alarm_where_nothing_moved(ref_rows: int, batch_rows: int) -> None:
    """10 draws at alpha 0.01 give an alarm in 1 run of 10 at most; two in one run would have odds
    of 1 to 230.
    """
    reports = [check(sample(100 + i, ref_rows), sample(200 + i, batch_rows)) for i in range(10)]
    assert sum(report.is_drift for report in reports) <= 1
    for key in pieces(reports[0]):
        assert 0.15 < np.mean([pieces(report)[key] for report in reports]) <= 1, (
            f"{key} is not calibrated"
        )


def test_equal_input_gives_an_equal_report_and_another_seed_another_p() -> None:
    cfg = DriftConfig(permutations=400, max_rows=100)
    ref, batch = sample(1, 130), sample(5, 150, shift=0.1)
    assert check(ref, batch, cfg) == check(ref, batch, cfg)
    assert check(ref, batch, cfg) != detect(ref[0], batch[0], ref[1], batch[1], cfg, seed=4)


def test_evidence_adds_up_to_the_verdict() -> None:
    """Holm: the smallest p is judged at alpha / m, the next at alpha / (m - 1)."""
    cfg = DriftConfig(detectors=("mmd", "cvm", "ks"), permutations=1000)
    drifts = []
    for shift, lean in ((0.0, 0.0), (0.25, 0.0), (0.6, 0.9), (0.0, 0.35)):
        report = check(sample(1, 100), sample(2, 100, shift, lean), cfg)
        assert [e.detector for e in report.evidence] == ["mmd", "cvm", "cvm", "ks", "ks"]
        by_size = sorted(report.evidence, key=lambda e: e.p_value)
        found = [e.is_drift for e in by_size]
        drifts.append(sum(found))
        assert found == sorted(found, reverse=True)
        assert found == [e.p_value <= e.threshold for e in by_size]
        levels = [report.alpha / (5 - min(rank, sum(found))) for rank in range(5)]
        assert [e.threshold for e in by_size] == levels
        assert report.p_value == min(1.0, 5 * by_size[0].p_value)
        assert report.is_drift == any(found) == (report.p_value <= report.alpha)
    assert drifts[0] == 0 and drifts[2] == 5 and set(drifts) - {0, 5}, drifts


def test_the_strangest_images_are_named() -> None:
    features, scores = sample(2, 80)
    features[[7, 41]] += 30
    report = check(sample(1, 130), (features, scores))
    assert {row for row, _ in report.unusual[:2]} == {7, 41}
    distances = [distance for _, distance in report.unusual]
    assert len(distances) == QUICK.unusual and distances == sorted(distances, reverse=True)
    assert 0.5 < distances[-1] < 3 < distances[1]


def test_dead_features_and_two_classes_are_no_trouble() -> None:
    ref, batch = sample(1, 50), sample(2, 50)
    for features in (ref[0], batch[0]):
        features[:, :40] = 0
    report = check((ref[0], ref[1][:, :2]), (batch[0], batch[1][:, :2]))
    assert np.isfinite([e.statistic for e in report.evidence]).all()
    assert not report.is_drift


def test_the_largest_numbers_are_no_trouble() -> None:
    ref, batch = sample(1, 50), sample(2, 50)
    ref[0][3, 50:60], batch[0][7, 50:60] = 3e38, -3e38
    report = check(ref, batch)
    assert np.isfinite([e.statistic for e in report.evidence]).all() and not report.is_drift
    assert report.unusual[0][0] == 7 and np.isfinite(report.unusual[0][1])


def test_what_cannot_be_compared_is_refused() -> None:
    ref, batch = sample(1, 50), sample(2, 50)
    with pytest.raises(
        DataError, match=f"batch has too few images.*got 19.*At least {LEAST_ROWS}.*several batches"
    ):
        check(ref, (batch[0][:19], batch[1][:19]))
    with pytest.raises(
        DataError, match=r"batch's embedding is 90 wide and the reference's 96.*same model version"
    ):
        check(ref, (batch[0][:, :90], batch[1]))
    with pytest.raises(DataError, match=r"batch_embedding has 50 rows and batch_scores 49"):
        check(ref, (batch[0], batch[1][:49]))
    with pytest.raises(DataError, match=r"ref_scores is not a table.*\(50,\)"):
        check((ref[0], ref[1][:, 0]), batch)
    batch[0][3, 5] = np.nan
    with pytest.raises(
        DataError, match=r"batch_embedding holds numbers that are not finite in 1 of 50 rows"
    ):
        check(ref, batch)


def test_a_check_that_could_never_alarm_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"permutations must be at least 3000 at alpha 0.001"):
        validate(DriftConfig, {"alpha": 0.001, "permutations": 1000})
    assert DriftConfig(alpha=0.001, detectors=("ks",)).pieces == 2
    with pytest.raises(ConfigError, match=r"each detector once"):
        validate(DriftConfig, {"detectors": ["ks", "ks"]})
    with pytest.raises(ConfigError, match=r"detectors"):
        validate(DriftConfig, {"detectors": ["mmf"]})
    with pytest.raises(ConfigError, match=r"engine exact has no lsdd"):
        validate(DriftConfig, {"detectors": ["mmd", "lsdd"], "engine": "exact"})
    assert set(get_args(Name)) == set(DETECTORS), "the settings know all detectors"


def seen(labels: list[str], looks: np.ndarray | None = None) -> Seen:
    return Seen(labels, looks)


def photographs(seed: int, rows: int, darker: float = 0.0) -> np.ndarray:
    """Looks of images of one size."""
    rng = np.random.default_rng(seed)
    looks = rng.normal([0.5, 0.2, 0.1], 0.05, size=(rows, 3))
    looks[:, 0] -= darker
    return np.column_stack([looks, np.full((rows, 2), 300.0)]).astype(np.float32)


def test_classes_and_looks_are_compared_and_the_report_says_what_moved() -> None:
    ref, batch = sample(1, 200), sample(2, 200)
    cfg = DriftConfig(detectors=("ks", "chi2", "looks"))
    before = seen(["good"] * 180 + ["crack"] * 20, photographs(3, 200))
    before.looks_NK[:170] = np.nan  # 30 images were looked at
    after = seen(["good"] * 100 + ["crack"] * 100, photographs(4, 200, darker=0.1))
    report = detect(*interleaved(ref, batch), cfg, 0, before, after)
    by_name = {(e.detector, e.on): e for e in report.evidence}
    assert by_name["chi2", "classes"].is_drift and by_name["looks", "looks"].is_drift
    assert "'crack': 10 % to 50 %" in by_name["chi2", "classes"].detail
    assert by_name["looks", "looks"].detail.startswith("brightness: median 0.5")
    assert not by_name["ks", "embedding"].is_drift
    assert report.engine == "exact" and len(report.notes) == 1

    quiet = detect(*interleaved(ref, batch), cfg, 0, before, seen(["good"] * 180 + ["crack"] * 20))
    assert not quiet.is_drift and len(quiet.evidence) == 3
    assert "looks left out: the batch does not say what its images look like" in quiet.notes[1]


def test_a_detector_without_what_it_looks_at_is_left_out_and_the_report_says_so() -> None:
    ref, batch = sample(1, 60), sample(2, 60)
    cfg = DriftConfig(detectors=("ks", "chi2", "looks"))
    report = detect(*interleaved(ref, batch), cfg, 0)
    assert [e.on for e in report.evidence] == ["embedding", "scores"]
    assert min(e.threshold for e in report.evidence) == cfg.alpha / 2, "of what was tested"
    assert "chi2 left out: the model predicts no classes" in report.notes
    assert any(note.startswith("looks left out: the champion's package") for note in report.notes)
    with pytest.raises(DataError, match=r"No detector has the input that it needs.*looks left out"):
        detect(*interleaved(ref, batch), DriftConfig(detectors=("looks",)), 0)
    few = photographs(1, 60)
    few[10:] = np.nan
    report = detect(*interleaved(ref, batch), cfg, 0, Seen(None, few), Seen(None, few))
    assert any("only 10 images of the champion's package" in note for note in report.notes)
    same = np.ones((60, 5), np.float32)
    report = detect(*interleaved(ref, batch), cfg, 0, Seen(None, same), Seen(None, same))
    assert "looks left out: all images look the same" in report.notes
    with pytest.raises(DataError, match=r"ref_embedding has 60 rows and ref_labels 3"):
        detect(*interleaved(ref, batch), cfg, 0, seen(["a", "b", "c"]))
    with pytest.raises(DataError, match=r"batch_looks has the shape \(60, 2\)"):
        detect(*interleaved(ref, batch), cfg, 0, Seen(), Seen(None, np.ones((60, 2))))
