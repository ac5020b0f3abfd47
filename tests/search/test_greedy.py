"""The greedy ensemble: better than its members, never worse than the best, the same every time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from raypipe.models.tasks import Kind, Task
from raypipe.search import greedy
from raypipe.search.greedy import (
    Aim,
    Bar,
    _gain_on_others,
    _halves,
    _Models,
    _standard_error,
    by_loss,
    by_metric,
    choose,
)
from raypipe.search.quality import judge_by
from raypipe.train.objective import METRICS, judge

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

    def judged(scores_NC: np.ndarray, labels_N: np.ndarray) -> float:
        seen.append(len(labels_N))
        return ACCURACY.metric(scores_NC, labels_N)

    found = choose(scores, labels_N, replace(ACCURACY, metric=judged))
    assert found is not None and len(found.members) > 2
    assert found.quality == ACCURACY(mean(scores, found.weights_K), labels_N)
    # 100 images and their halves chose. All of them: each model, its error's halves, the result.
    assert {*seen} <= {50, 100, 300, 600} and seen.count(600) < 20 < seen.count(100)


def test_the_error_of_one_model_copies_no_other_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sixteen models with 2,000 classes and 50,000 images they were 6.4 GB more."""
    copied: list[int] = []
    real = _Models.on

    def on(self: _Models, rows: np.ndarray) -> _Models:
        copied.append(len(self.scores))
        return real(self, rows)

    monkeypatch.setattr(_Models, "on", on)
    scores, labels_N = models(4, noise=1.0)
    whole = _Models(scores, labels_N, ACCURACY, np.zeros(4), np.inf, 4)
    error = _standard_error(whole, 2, 0)
    assert copied == [1] * 2 * greedy.HALVES and 0.01 < error < 0.06, "sqrt(p (1 - p) / 300)"
    assert error == _standard_error(replace(whole, scores=[scores[2]]), 0, 0)


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


def test_models_of_one_network_run_it_once() -> None:
    """Heads of one backbone: no two of them were within a limit that all of them keep."""
    scores, labels_N = models(4, noise=1.0)
    latency, shared = [3.0] * 4, ["lite0", "lite0", "lite0", ""]
    alone = choose(scores, labels_N, ACCURACY, latency, 4.0)
    assert alone is not None and len(alone.members) == 1
    found = choose(scores, labels_N, ACCURACY, latency, 4.0, networks_K=shared)
    assert found is not None and len(found.members) > 1 and 3 not in found.members


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
    quality = judge_by(task, metric, mode)  # type: ignore[arg-type]
    found = choose(scores, labels, quality)
    assert found is not None and len(found.members) > 1
    assert found.quality > max(quality(one, labels) for one in scores)


KINDS = [(kind, metric) for kind, metrics in METRICS.items() for metric in metrics[1:]]


@pytest.mark.parametrize(("kind", "metric"), KINDS)
def test_metrics_are_those_of_validation(kind: Kind, metric: str) -> None:
    """They are counted here once more, because thousands of means are judged."""
    rng = np.random.default_rng(2)
    classes = ("a", "b", "c", "d") if "label" in kind else ("value",)
    scores_NC = rng.random((50, len(classes))).astype(np.float32)
    labels = rng.random(scores_NC.shape).astype(np.float32)
    if kind == "single_label":
        labels = rng.integers(0, 3, 50)  # of the last class there is no image
    elif kind == "multi_label":
        labels = np.float32(labels > 0.7) * np.float32([1, 1, 1, 0])
    task = Task(kind, classes)
    told = judge(task, torch.from_numpy(scores_NC), torch.from_numpy(labels))[metric]
    assert judge_by(task, metric, "max").metric(scores_NC, labels) == pytest.approx(told)
    assert judge_by(task, metric, "min").metric(scores_NC, labels) == pytest.approx(-told)


@pytest.mark.parametrize(
    ("kind", "metric"),
    [
        ("regression", "val_r2"),
        ("probability", "val_r2"),
        ("single_label", "val_balanced_accuracy"),
        ("multi_label", "val_f1"),
    ],
)
def test_a_half_of_one_label_says_nothing(kind: Kind, metric: str) -> None:
    """Its R2 counted as 0, and a model with .9 on the other half had a standard error of .4."""
    images = 40
    labels = np.zeros((images, 1), np.float32)
    labels[0] = 1
    scores_NC = np.clip(labels + 0.1, 0, 1)
    if kind == "single_label":
        labels, scores_NC = labels[:, 0].astype(int), np.hstack([1 - scores_NC, scores_NC])
    task = Task(kind, ("a", "b")[: scores_NC.shape[1]])
    judge_ = judge_by(task, metric, "max")
    models = _Models([scores_NC] * 2, labels, judge_, np.zeros(2), np.inf, 2)
    # One image of its own label: the half without it says nothing, however it is drawn.
    assert not list(_halves(models, 0))
    assert _standard_error(models, 0, 0) == 0 and _gain_on_others(models, by_loss, 0) == 0
    labels[images // 2 :] = 1
    told_apart = list(_halves(replace(models, labels_N=labels), 0))
    assert len(told_apart) == 2 * greedy.HALVES
    # All labels alike: no metric says that an ensemble is better, and the loss alone is no reason.
    found = choose([scores_NC, scores_NC * 0.9], np.zeros_like(labels), judge_)
    assert found is not None and len(found.members) == 1 and np.isfinite(found.quality).all()


def test_an_accuracy_counts_image_by_image_so_any_half_says_something() -> None:
    scores, labels_N = models(3, noise=1.0)
    alike = _Models(scores, np.zeros_like(labels_N), ACCURACY, np.zeros(3), np.inf, 3)
    assert len(list(_halves(alike, 0))) == 2 * greedy.HALVES


def test_a_caller_without_time_gets_a_choice_of_fewer_halves_and_bags() -> None:
    scores, labels_N = models(6, noise=1.0)
    asked = []

    def is_late() -> bool:
        asked.append(None)
        return True

    found = choose(scores, labels_N, ACCURACY, is_late=is_late)
    whole = choose(scores, labels_N, ACCURACY)
    assert found is not None and whole is not None and len(found.members) > 1
    # One half by each aim, and one bag.
    assert len(asked) == 3 and found.bar.is_passed(found.quality)
