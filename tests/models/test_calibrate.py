"""A temperature that is known is found again, and a calibration error is what it was made to be."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raypipe.models.calibrate import HIGHEST, LOWEST, calibration, fit_temperature, tempered
from raypipe.models.labels import Kind
from raypipe.models.tasks import scores


def overconfident(kind: Kind, factor: float, images: int = 20_000) -> tuple[np.ndarray, np.ndarray]:
    """(scores_NC, targets_NC): labels are drawn from the true logits, scores have `factor` times
    these logits."""
    rng = np.random.default_rng(3)
    classes = 1 if kind == "probability" else 4
    logits = torch.from_numpy(rng.normal(0, 1.5, (images, classes)))
    true_NC = scores(kind, logits).numpy()
    if kind == "single_label":
        drawn = [rng.choice(classes, p=p) for p in true_NC]
        targets_NC = np.eye(classes)[drawn]
    else:
        targets_NC = (rng.random(true_NC.shape) < true_NC).astype(np.float64)
    return scores(kind, logits * factor).numpy().astype(np.float32), targets_NC


KINDS: list[Kind] = ["single_label", "multi_label", "probability"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_the_temperature_that_the_scores_were_made_with_is_found(kind: Kind, factor: float) -> None:
    scores_NC, targets_NC = overconfident(kind, factor)
    found = fit_temperature(kind, scores_NC, targets_NC)
    assert found == pytest.approx(factor, rel=0.04)
    before = calibration(kind, scores_NC, targets_NC)
    mended_NC = tempered(kind, torch.from_numpy(scores_NC), found).numpy()
    after = calibration(kind, mended_NC, targets_NC)
    assert after.error < 0.015
    assert factor == 1.0 or before.error > 0.05
    # No prediction changes.
    if kind == "single_label":
        assert (mended_NC.argmax(1) == scores_NC.argmax(1)).all()
    else:
        assert ((mended_NC >= 0.5) == (scores_NC >= 0.5)).all()


def test_the_error_of_known_bins() -> None:
    """A hundred images at 0.9, eighty of them right; a hundred at 0.6, all right."""
    scores_NC = np.repeat([[0.9, 0.1], [0.6, 0.4]], 100, axis=0).astype(np.float32)
    right = np.array([True] * 80 + [False] * 20 + [True] * 100)
    targets_NC = np.where(right[:, None], [[1, 0]], [[0, 1]])
    found = calibration("single_label", scores_NC, targets_NC)
    assert found.error == pytest.approx(0.5 * 0.1 + 0.5 * 0.4)
    assert [(round(b.confidence, 3), b.right, b.count) for b in found.bins] == [
        (0.6, 1.0, 100),
        (0.9, 0.8, 100),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_sure_scores_give_finite_scores_and_a_temperature_within_its_bounds(kind: Kind) -> None:
    scores_NC = np.array([[1.0, 0.0], [0.0, 1.0]] * 5, np.float32)[:, : 1 + (kind != "probability")]
    right_NC, wrong_NC = scores_NC.astype(np.float64), 1.0 - scores_NC
    assert LOWEST <= fit_temperature(kind, scores_NC, right_NC) <= HIGHEST
    coldest = fit_temperature(kind, scores_NC, wrong_NC)
    assert coldest == pytest.approx(HIGHEST, rel=0.01)
    mended = tempered(kind, torch.from_numpy(scores_NC), coldest)
    assert mended.isfinite().all() and (mended > 0).all() and (mended < 1).all()


def test_numbers_and_nothing_are_refused() -> None:
    one = np.ones((1, 1))
    with pytest.raises(ValueError, match="not probabilities"):
        fit_temperature("regression", one, one)
    with pytest.raises(ValueError, match="there are none"):
        fit_temperature("probability", one[:0], one[:0])
    with pytest.raises(ValueError, match="there are none"):
        calibration("probability", one[:0], one[:0])
