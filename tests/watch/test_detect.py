"""Drift is found where it is, and a check stays quiet at its stated rate where it is not."""

from __future__ import annotations

import numpy as np
import pytest

from raypipe.config import validate
from raypipe.errors import ConfigError, DataError
from raypipe.watch.detect import LEAST_ROWS, DriftConfig, DriftReport, detect

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
    return detect(ref[0], batch[0], ref[1], batch[1], cfg, seed=3)


def pieces(report: DriftReport) -> dict[tuple[str, str], float]:
    return {(e.detector, e.on): e.p_value for e in report.evidence}


@pytest.mark.usefixtures("ray_session")
def test_a_shifted_embedding_is_found_by_both_detectors() -> None:
    report = check(sample(1, 130), sample(2, 160, shift=0.8))
    assert report.is_drift and report.p_value < report.alpha
    assert pieces(report)["mmd", "embedding"] == pytest.approx(1 / 401)
    assert pieces(report)["ks", "embedding"] < 1e-4
    assert pieces(report)["ks", "scores"] > 0.01  # the scores did not move, and the report says so
    assert (report.reference_images, report.batch_images) == (130, 160)


@pytest.mark.usefixtures("ray_session")
def test_scores_that_lean_are_found_when_the_embedding_is_the_same() -> None:
    report = check(sample(1, 150), sample(2, 150, lean=1.5))
    assert [(e.detector, e.on) for e in report.evidence if e.is_drift] == [("ks", "scores")]
    assert report.is_drift


@pytest.mark.usefixtures("ray_session")
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


@pytest.mark.usefixtures("ray_session")
def test_equal_input_gives_an_equal_report_and_another_seed_another_p() -> None:
    cfg = DriftConfig(permutations=400, max_rows=100)
    ref, batch = sample(1, 130), sample(5, 150, shift=0.1)
    assert check(ref, batch, cfg) == check(ref, batch, cfg)
    assert check(ref, batch, cfg) != detect(ref[0], batch[0], ref[1], batch[1], cfg, seed=4)


@pytest.mark.usefixtures("ray_session")
def test_evidence_adds_up_to_the_verdict() -> None:
    report = check(
        sample(1, 60), sample(2, 60), DriftConfig(detectors=("mmd", "lsdd", "ks"), permutations=500)
    )
    assert [e.detector for e in report.evidence] == ["mmd", "lsdd", "ks", "ks"]
    assert {e.threshold for e in report.evidence} == {report.alpha / 4}
    assert report.p_value == min(1.0, 4 * min(e.p_value for e in report.evidence))
    assert (
        report.is_drift
        == any(e.p_value < e.threshold for e in report.evidence)
        == (report.p_value < report.alpha)
    )


@pytest.mark.usefixtures("ray_session")
def test_the_strangest_images_are_named() -> None:
    features, scores = sample(2, 80)
    features[[7, 41]] += 30
    report = check(sample(1, 130), (features, scores))
    assert {row for row, _ in report.unusual[:2]} == {7, 41}
    distances = [distance for _, distance in report.unusual]
    assert len(distances) == QUICK.unusual and distances == sorted(distances, reverse=True)
    assert 0.5 < distances[-1] < 3 < distances[1]


@pytest.mark.usefixtures("ray_session")
def test_dead_features_and_two_classes_are_no_trouble() -> None:
    ref, batch = sample(1, 50), sample(2, 50)
    for features in (ref[0], batch[0]):
        features[:, :40] = 0
    report = check((ref[0], ref[1][:, :2]), (batch[0], batch[1][:, :2]))
    assert np.isfinite([e.statistic for e in report.evidence]).all()
    assert not report.is_drift


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
