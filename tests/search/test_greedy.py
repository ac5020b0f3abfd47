"""The greedy ensemble: better than its members, never worse than the best, the same every time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from raypipe.models.tasks import Task
from raypipe.search import greedy
from raypipe.search.greedy import (
    Aim,
    Bar,
    Judge,
    Quality,
    _gain_on_others,
    _Models,
    by_loss,
    by_metric,
    choose,
    judge_by,
)

CLASSES = Task("single_label", ("a", "b", "c"))
ACCURACY = judge_by(CLASSES, "val_accuracy", "max")


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(e / e.sum(1, keepdims=True))


def models(count: int, noise: float, images: int = 300, seed: int = 0) -> tuple[list, np.ndarray]:
    """Scores of models that see the truth, each with noise of its own."""
    rng = np.random.default_rng(seed)
    labels_N = rng.integers(0, 3, images)
    truth = np.eye(3)[labels_N]
    return [softmax(truth + noise * rng.normal(size=truth.shape)) for _ in range(count)], labels_N


def accuracy(scores_NC: np.ndarray, labels_N: np.ndarray) -> float:
    return float((scores_NC.argmax(1) == labels_N).mean())


def mean(scores: list, weights: tuple[float, ...]) -> np.ndarray:
    return np.asarray(sum(w * s for w, s in zip(weights, scores, strict=True)))


def test_models_with_noise_of_their_own_are_better_together() -> None:
    scores, labels_N = models(6, noise=1.0)
    found = choose(scores, labels_N, ACCURACY)
    assert found is not None and len(found.members) > 2 and found.gain > 0.02
    assert sum(found.weights_K) == pytest.approx(1)
    best = max(accuracy(one, labels_N) for one in scores)
    assert accuracy(mean(scores, found.weights_K), labels_N) == found.quality[0] > best + 0.03


def test_the_weights_hold_on_images_that_they_were_not_chosen_on() -> None:
    """The same models on 300 further images."""
    scores, labels_N = models(6, noise=1.0, images=600)
    found = choose([one[:300] for one in scores], labels_N[:300], ACCURACY)
    assert found is not None
    held = [one[300:] for one in scores]
    single = max(range(6), key=lambda k: accuracy(scores[k][:300], labels_N[:300]))
    ours = accuracy(mean(held, found.weights_K), labels_N[300:])
    assert ours > accuracy(held[single], labels_N[300:]) + 0.03


@pytest.mark.parametrize("seed", range(12))
def test_never_worse_than_the_best_model_on_validation(seed: int) -> None:
    """Of random models, too, and of few images; by the loss, less than 1.5 standard errors."""
    scores, labels_N = models(5, noise=30.0, images=6 + 9 * seed, seed=seed)
    found = choose(scores, labels_N, ACCURACY, seed=seed)
    assert found is not None
    best = max(ACCURACY(one, labels_N) for one in scores)
    assert ACCURACY(mean(scores, found.weights_K), labels_N) == found.quality
    assert found.bar.is_passed(found.quality) or len(found.members) == 1
    error = (best[0] * (1 - best[0]) / len(labels_N)) ** 0.5
    assert found.quality[0] >= best[0] - (1.5 * error if found.bar.aim is by_loss else 1e-12)


def test_the_aim_counts_that_gains_more_on_images_it_was_not_chosen_on() -> None:
    """Models that are too certain, with a fault in common; some are lucky on 60 images."""
    aims = set()
    for seed in range(2):
        rng = np.random.default_rng(seed)
        labels_N = rng.integers(0, 3, 60)
        truth, fault = np.eye(3)[labels_N], 0.8 * rng.normal(size=(60, 3))
        noise = 0.3 * rng.normal(size=(25, *truth.shape))
        scores = [softmax(6 * (truth + fault + one)) for one in noise]
        found = choose(scores, labels_N, ACCURACY)
        assert found is not None
        models = _Models(scores, labels_N, ACCURACY, np.zeros(25), np.inf, 25)
        gains = [_gain_on_others(models, aim, 0) for aim in (by_metric, by_loss)]
        assert found.gain == max(gains)
        if len(found.members) > 1:
            aims.add(found.bar.aim)
            assert found.bar.aim is (by_metric, by_loss)[int(np.argmax(gains))]
            losses = [ACCURACY(one, labels_N)[1] for one in scores]
            assert found.bar.aim is by_metric or found.quality[1] > max(losses)
    assert by_loss in aims


def test_where_one_aim_does_not_pass_the_other_may(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, labels_N = models(6, noise=1.0)
    monkeypatch.setattr(greedy, "_gain_on_others", lambda models, aim, seed: 0.1 + (aim is by_loss))
    assert choose(scores, labels_N, ACCURACY).bar.aim is by_loss  # type: ignore[union-attr]
    real = greedy._bar

    def strict(models: _Models, aim: Aim, seed: int) -> Bar:
        bar = real(models, aim, seed)
        return replace(bar, least=2.0) if aim is by_loss else bar

    monkeypatch.setattr(greedy, "_bar", strict)
    found = choose(scores, labels_N, ACCURACY)
    assert found is not None and found.bar.aim is by_metric and found.gain == 0.1
    assert len(found.members) > 1


def test_of_many_images_a_part_chooses_and_all_say_what_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scores, labels_N = models(6, noise=1.0, images=600)
    monkeypatch.setattr(greedy, "MOST_SCORES", 300)
    seen = []

    def judged(scores_NC: np.ndarray, labels_N: np.ndarray) -> Quality:
        seen.append(len(labels_N))
        return ACCURACY(scores_NC, labels_N)

    found = choose(scores, labels_N, judged)
    assert found is not None and len(found.members) > 2
    assert found.quality == ACCURACY(mean(scores, found.weights_K), labels_N)
    # 100 images and their halves chose. All of them: each model, its error's halves, the result.
    assert {*seen} <= {50, 100, 300, 600} and seen.count(600) < 20 < seen.count(100)


def test_where_an_ensemble_only_fits_noise_the_best_model_stays_alone() -> None:
    """One model knows the truth, and forty guess."""
    scores, labels_N = models(1, noise=0.3, images=60)
    rng = np.random.default_rng(5)
    guesses = [softmax(3 * rng.normal(size=(60, 3))) for _ in range(40)]
    found = choose([*guesses, *scores], labels_N, ACCURACY)
    assert found is not None and found.members == (40,) and found.gain <= 0


def test_models_that_are_not_finite_never_join() -> None:
    scores, labels_N = models(3, noise=1.0)
    broken = scores[1].copy()
    broken[7, 2] = np.nan
    infinite = np.full_like(broken, np.inf)
    found = choose([broken, *scores, infinite], labels_N, ACCURACY)
    assert found is not None and found.weights_K[0] == found.weights_K[-1] == 0
    assert choose([broken, infinite], labels_N, ACCURACY) is None
    assert choose([], labels_N, ACCURACY) is None
    assert choose([np.empty((0, 3))], np.empty(0, np.int64), ACCURACY) is None


def test_equal_models_and_a_second_call_give_the_same_weights() -> None:
    scores, labels_N = models(2, noise=1.0)
    twins = [scores[0], scores[0], scores[0]]
    assert choose(twins, labels_N, ACCURACY).weights_K == (1, 0, 0)  # type: ignore[union-attr]
    again = [choose(scores * 2, labels_N, ACCURACY, seed=3) for _ in range(2)]
    assert again[0] == again[1]


def test_members_together_stay_within_the_limit() -> None:
    scores, labels_N = models(6, noise=1.0)
    latency = [3.0, 3.0, 3.0, 3.0, 1.0, 9.0]
    for limit in (1.0, 3.5, 4.0, 7.0):
        found = choose(scores, labels_N, ACCURACY, latency, limit)
        assert found is not None and 0 < sum(latency[k] for k in found.members) <= limit
    assert choose(scores, labels_N, ACCURACY, latency, 0.5) is None


@pytest.mark.parametrize(
    ("task", "metric", "mode"),
    [
        (Task("regression", ("value",)), "val_rmse", "min"),
        (Task("regression", ("value",)), "val_r2", "max"),
        (Task("probability", ("value",)), "val_loss", "min"),
        (Task("multi_label", ("x", "y")), "val_f1", "max"),
    ],
)
def test_numbers_and_tags(task: Task, metric: str, mode: str) -> None:
    rng = np.random.default_rng(1)
    truth = rng.random((200, len(task.classes))).astype(np.float32)
    labels = (truth > 0.5).astype(np.float32) if task.kind == "multi_label" else truth
    scores = [np.clip(truth + 0.3 * rng.normal(size=truth.shape), 0.01, 0.99) for _ in range(4)]
    quality: Judge = judge_by(task, metric, mode)  # type: ignore[arg-type]
    found = choose(scores, labels, quality)
    assert found is not None and len(found.members) > 1
    assert found.quality > max(quality(one, labels) for one in scores)
