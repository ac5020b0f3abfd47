"""A temperature that is known is found again, and a calibration error is what it was made to be."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raypipe.models.calibrate import (
    DRAWS,
    HIGHEST,
    LOWEST,
    calibration,
    change,
    choose_temperature,
    fit_temperature,
    tempered,
)
from raypipe.models.labels import Kind
from raypipe.models.tasks import scores


def overconfident(
    kind: Kind, factor: float, images: int = 20_000, seed: int = 3
) -> tuple[np.ndarray, np.ndarray]:
    """(scores_NC, targets_NC): labels are drawn from the true logits, scores have `factor` times
    these logits."""
    rng = np.random.default_rng(seed)
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


def test_of_a_label_that_is_no_class_nothing_is_right() -> None:
    """A target of zeros counted as the first class."""
    scores_NC = np.tile([[0.9, 0.1]], (10, 1)).astype(np.float32)
    targets_NC = np.zeros((10, 2), np.float32)
    targets_NC[:4, 0] = 1
    (only,) = calibration("single_label", scores_NC, targets_NC).bins
    assert only.count == 10 and only.right == pytest.approx(0.4)


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


@pytest.mark.parametrize("kind", KINDS)
def test_a_temperature_is_kept_only_where_it_helps_images_that_it_was_not_fitted_on(
    kind: Kind,
) -> None:
    """Of 90 images a temperature is never quite 1, and where scores are right it makes them worse.

    One number a class is little to fit on, so probabilities take more images.
    """
    images = 300 if kind == "probability" else 90
    kept = {}
    for factor in (1.0, 3.0):
        chosen = [
            choose_temperature(kind, *overconfident(kind, factor, images, s)) for s in range(30)
        ]
        kept[factor] = sum(c.kept != 1 for c in chosen)
        assert all(c.kept in (1, c.fitted) for c in chosen)
    assert kept[1.0] <= 6, "of normal noise one in six is above its standard error"
    assert kept[3.0] >= 28


def test_the_gain_is_of_images_that_were_left_out_of_the_fit() -> None:
    """On the images themselves no fit loses; on others it does, where scores are right already."""
    drawn = [overconfident("single_label", 1.0, 40, seed) for seed in range(20)]
    assert np.mean([choose_temperature("single_label", *both).gain for both in drawn]) < 0


def test_the_choice_of_very_few_images_is_to_change_nothing() -> None:
    one = np.array([[0.7, 0.3]])
    assert choose_temperature("single_label", one, np.eye(2)[:1]).kept == 1
    two = choose_temperature("single_label", one.repeat(2, 0), np.eye(2))
    assert two.kept == 1 and np.isfinite(two.gain)
    # Scores that are right, of which some few images look too sure or too unsure by chance.
    for images in (2, 5, 19):
        drawn = [overconfident("single_label", 1.0, images, seed) for seed in range(30)]
        assert {choose_temperature("single_label", *both).kept for both in drawn} == {1.0}
    # All right and all of one class.
    right = choose_temperature("single_label", one.repeat(50, 0), np.eye(2)[[0] * 50])
    assert np.isfinite(right.kept) and right.kept <= 1


def test_the_interval_of_a_change_is_of_the_same_images() -> None:
    scores_NC, targets_NC = overconfident("single_label", 3.0, 400)
    mended_NC = tempered("single_label", torch.from_numpy(scores_NC), 3.0).numpy()
    low, high = change("single_label", scores_NC, mended_NC, targets_NC)
    errors = [calibration("single_label", s, targets_NC).error for s in (scores_NC, mended_NC)]
    assert low < errors[1] - errors[0] < high < 0
    # The other way round it is the same with the other sign; nothing changed is no change.
    back = change("single_label", mended_NC, scores_NC, targets_NC)
    assert back == pytest.approx((-high, -low))
    assert change("single_label", scores_NC, scores_NC, targets_NC) == (0, 0)


def test_the_interval_of_a_change_is_that_of_drawn_images() -> None:
    before_NC, targets_NC = overconfident("multi_label", 3.0, 50)
    after_NC = tempered("multi_label", torch.from_numpy(before_NC), 3.0).numpy()
    rng = np.random.default_rng(0)
    changes = []
    for _ in range(DRAWS):
        rows = rng.integers(0, 50, 50)
        errors = [
            calibration("multi_label", scores_NC[rows], targets_NC[rows]).error
            for scores_NC in (before_NC, after_NC)
        ]
        changes.append(errors[1] - errors[0])
    expected = np.quantile(changes, [0.025, 0.975]).tolist()
    assert change("multi_label", before_NC, after_NC, targets_NC) == pytest.approx(expected)


@pytest.mark.timeout(20)
def test_the_interval_of_a_change_of_many_tags_takes_no_minutes() -> None:
    rng = np.random.default_rng(0)
    before_NC, after_NC, drawn_NC = rng.random((3, 2000, 500))
    low, high = change("multi_label", before_NC, after_NC, (drawn_NC < before_NC).astype(float))
    assert 0 < low < high
