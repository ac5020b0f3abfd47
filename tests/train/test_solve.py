"""Heads that are fitted at once: what scikit-learn finds, and what left-out images say."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import LogisticRegression
from sklearn.linear_model import Ridge as TheirRidge
from torch import Tensor
from torch.nn.functional import cross_entropy

from raypipe.errors import DataError
from raypipe.models import heads
from raypipe.models.heads import Head, KernelHead
from raypipe.models.tasks import Kind, Task
from raypipe.train import worker
from raypipe.train.job import TrainJob
from raypipe.train.objective import Objective
from raypipe.train.settings import SolverName
from raypipe.train.solve import descent, nystrom, ridge
from raypipe.train.solve.fit import Examples, fit

WAYS: list[tuple[heads.HeadKind, SolverName]] = list(
    itertools.product(("linear", "kernel"), ("closed", "lbfgs"))  # type: ignore[arg-type]
)


def rows(images: int, features: int = 12, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(images, features)).astype(np.float32)


def rings(images: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two classes that no line divides: inside and outside of a circle."""
    x_ND = rows(images, 2, seed)
    return x_ND, (np.square(x_ND).sum(1) > 1.4).astype(np.int64)


def fitted(
    kind: heads.HeadKind,
    solver: SolverName,
    x_ND: np.ndarray,
    labels_N: np.ndarray,
    task: Task | None = None,
    landmarks: int = 64,
    weight_N: np.ndarray | None = None,
    **objective: Any,
) -> Head:
    """A head as train_rank fits it."""
    if task is None:
        task = Task("single_label", tuple(map(str, range(int(labels_N.max()) + 1))))
    scaled = task.kind == "regression"
    made = Objective.of(task, labels_N, **objective)
    count = min(landmarks, len(x_ND))
    head = heads.build(kind, x_ND.shape[1], len(task.classes), 0.2, scaled, count)
    prepared = head.prepared(torch.from_numpy(x_ND))
    head.standardise_by(prepared.mean(0), prepared.std(0, correction=0))
    if scaled:
        head.scale_by(made.mean, made.spread)
    fit(head, Examples(x_ND, labels_N, weight_N), made, solver, seed=0)
    assert all(torch.isfinite(value).all() for value in head.state_dict().values())
    return head.eval()


@torch.no_grad()
def logits(head: Head, x_ND: np.ndarray) -> Tensor:
    found: Tensor = head(torch.from_numpy(x_ND))
    assert torch.isfinite(found).all()
    return found


def share_right(head: Head, x_ND: np.ndarray, labels_N: np.ndarray) -> float:
    return float((logits(head, x_ND).argmax(1).numpy() == labels_N).mean())


@pytest.mark.parametrize(("images", "features"), [(60, 8), (20, 50)])
def test_ridge_is_scikit_learns(images: int, features: int) -> None:
    """With weights, and with more features than images, too."""
    x_ND = rows(images, features).astype(np.float64)
    y_NC = rows(images, 3, seed=1).astype(np.float64)
    weight_N = np.random.default_rng(2).uniform(0.1, 3, images)
    found = ridge.fit(x_ND, y_NC, weight_N)
    alpha = found.strength * ridge.spectrum(x_ND, weight_N).energy_R.mean()
    theirs = TheirRidge(alpha=alpha).fit(x_ND, y_NC, sample_weight=weight_N)
    ours_NC = x_ND @ found.weight_DC + found.bias_C
    np.testing.assert_allclose(ours_NC, theirs.predict(x_ND), atol=1e-8)


def test_a_left_out_score_is_that_of_a_fit_without_the_image_and_its_equals() -> None:
    x_ND = rows(30, 5).astype(np.float64)
    x_ND[7] = x_ND[3] = x_ND[12]
    y_NC = rows(30, 2, seed=1).astype(np.float64)
    weight_N = np.random.default_rng(2).uniform(0.5, 2, 30)
    found = ridge.fit(x_ND, y_NC, weight_N)
    alpha = found.strength * ridge.spectrum(x_ND, weight_N).energy_R.mean()
    for n in (0, 3, 29):
        rest = (x_ND != x_ND[n]).any(1)
        theirs = TheirRidge(alpha=alpha).fit(x_ND[rest], y_NC[rest], weight_N[rest])
        np.testing.assert_allclose(found.left_out_KC[n], theirs.predict(x_ND[[n]])[0], atol=1e-8)


def test_the_least_loss_is_scikit_learns() -> None:
    x_ND, labels_N = rows(80), np.random.default_rng(1).integers(0, 3, 80)
    x_ND[np.arange(80), labels_N] += 1.5
    weight_N = np.random.default_rng(2).uniform(0.2, 2, 80)
    known = ridge.spectrum(x_ND.astype(np.float64), weight_N)
    z_NR = known.coordinates(x_ND.astype(np.float64))
    targets_NC = torch.eye(3, dtype=torch.float64)[labels_N]
    examples = descent.Examples(
        torch.from_numpy(z_NR), targets_NC, torch.from_numpy(weight_N), known.energy_R
    )
    losses = Objective.of(Task("single_label", ("a", "b", "c")), labels_N).losses
    start = np.zeros((z_NR.shape[1], 3)), np.zeros(3)
    found = descent.minimise(examples, losses, 0.03, start)
    theirs = LogisticRegression(C=1 / (0.03 * weight_N.sum()), tol=1e-8, max_iter=1000)
    theirs.fit(z_NR, labels_N, weight_N)
    ours_NC = torch.from_numpy(z_NR @ found.weight_RC + found.bias_C).softmax(1)
    np.testing.assert_allclose(ours_NC, theirs.predict_proba(z_NR), atol=2e-4)


def test_with_all_images_as_landmarks_it_is_kernel_ridge_regression() -> None:
    x_ND = rows(40, 3).astype(np.float64)
    y_NC = rows(40, 1, seed=1).astype(np.float64)
    y_NC -= y_NC.mean()
    kernel = nystrom.of(x_ND, 0.3)
    phi_ND = kernel.features(x_ND)
    np.testing.assert_allclose(phi_ND @ phi_ND.T, nystrom.similarities(x_ND, x_ND, 0.3), atol=1e-6)
    ours = TheirRidge(alpha=0.1, fit_intercept=False).fit(phi_ND, y_NC)
    theirs = KernelRidge(alpha=0.1, kernel="rbf", gamma=0.3).fit(x_ND, y_NC)
    new = rows(9, 3, seed=5).astype(np.float64)
    np.testing.assert_allclose(
        ours.predict(kernel.features(new)).ravel(), theirs.predict(new).ravel(), atol=1e-5
    )


def test_a_broken_image_has_the_label_of_the_one_that_replaces_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has its features; with its own label, each of them would be fitted as both classes."""

    class Rows:
        """Of a split of four images."""

        def __len__(self) -> int:
            return 4

        def labels(self, samples: np.ndarray) -> np.ndarray:
            return np.array([0, 1, 0, 1])[samples]

        def weights(self, cfg: Any) -> None:
            return None

    broken = {1: (0, "broken"), 3: (2, "broken")}
    inputs_ND = np.zeros((4, 2), np.float32)
    train = SimpleNamespace(rows=Rows(), inputs=inputs_ND, cfg=None, broken=broken)
    given: list[Examples] = []
    monkeypatch.setattr(worker.solving, "fit", lambda head, found, *more: given.append(found))
    job = SimpleNamespace(train=SimpleNamespace(solver="closed"), run=SimpleNamespace(seed=0))
    head: Any = heads.build("linear", 2, 2, 0.0, False, 2)
    data: Any = SimpleNamespace(train=train)
    worker._solve(head, data, cast(Objective, None), cast(TrainJob, job))
    assert given[0].labels_N.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("solver", ["closed", "lbfgs"])
def test_a_kernel_divides_what_no_line_does(solver: SolverName) -> None:
    x_ND, labels_N = rings(300)
    new_ND, truth_N = rings(300, seed=1)
    assert share_right(fitted("kernel", solver, x_ND, labels_N), new_ND, truth_N) > 0.93
    assert share_right(fitted("linear", solver, x_ND, labels_N), new_ND, truth_N) < 0.7


@pytest.mark.parametrize(("kind", "solver"), WAYS)
def test_scores_are_probabilities(kind: heads.HeadKind, solver: SolverName) -> None:
    """On labels with noise: as sure as it is right, within what 1,000 new images can tell."""
    rng = np.random.default_rng(3)
    x_ND = rows(1400)
    clean = logistic(2 * x_ND[:, 0])
    labels_N = (rng.random(1400) < clean).astype(np.int64)
    head = fitted(kind, solver, x_ND[:400], labels_N[:400])
    found = logits(head, x_ND[400:])
    best = float(np.mean(-np.log(np.where(labels_N[400:], clean[400:], 1 - clean[400:]))))
    assert float(cross_entropy(found, torch.from_numpy(labels_N[400:]))) < best + 0.08
    p_N = found.softmax(1)[:, 1].numpy()
    assert abs(p_N.mean() - labels_N[400:].mean()) < 0.05
    sure = p_N > 0.8
    assert abs(p_N[sure].mean() - labels_N[400:][sure].mean()) < 0.08


def logistic(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)))


@pytest.mark.parametrize(("kind", "solver"), WAYS)
def test_a_weighted_image_counts_as_so_many(kind: heads.HeadKind, solver: SolverName) -> None:
    """Every third label is wrong, and one head hears of these alone, the other of the rest."""
    x_ND = rows(90, 3)
    labels_N = (x_ND[:, 0] > 0).astype(np.int64)
    wrong_N = labels_N.copy()
    wrong_N[::3] = 1 - wrong_N[::3]
    weight_N = np.where(np.arange(90) % 3 == 0, 0.0, 1.0)
    head = fitted(kind, solver, x_ND, wrong_N, weight_N=weight_N)
    heavy = fitted(kind, solver, x_ND, wrong_N, weight_N=1 - weight_N)
    others = slice(1, None, 3)
    right = share_right(head, x_ND[others], labels_N[others])
    assert right > share_right(heavy, x_ND[others], labels_N[others]) + 0.5


@pytest.mark.parametrize(("kind", "solver"), WAYS)
def test_class_weights_and_smoothing_are_honoured(kind: heads.HeadKind, solver: SolverName) -> None:
    rng = np.random.default_rng(0)
    labels_N = (rng.random(400) < 0.1).astype(np.int64)
    x_ND = rows(400)
    x_ND[:, 0] += labels_N
    plain = logits(fitted(kind, solver, x_ND, labels_N), x_ND).softmax(1)
    weighted = logits(fitted(kind, solver, x_ND, labels_N, weights="balanced"), x_ND).softmax(1)
    # The mean score of the rare class is its weighted share.
    assert abs(float(plain[:, 1].mean()) - 0.1) < 0.03
    assert float(weighted[:, 1].mean()) > 0.3
    smooth = logits(fitted(kind, solver, x_ND, labels_N, smoothing=0.4), x_ND).softmax(1)
    assert float(smooth.max(1)[0].mean()) < float(plain.max(1)[0].mean()) - 0.08


TASKS: list[tuple[Kind, int]] = [("multi_label", 3), ("probability", 1), ("regression", 1)]


@pytest.mark.parametrize(("kind", "solver"), WAYS)
@pytest.mark.parametrize(("task", "outputs"), TASKS)
def test_tags_and_numbers(
    kind: heads.HeadKind, solver: SolverName, task: Kind, outputs: int
) -> None:
    x_ND = rows(500)
    truth_NC = logistic(2 * x_ND[:, :outputs] - 1).astype(np.float32)
    if task == "multi_label":
        truth_NC = (truth_NC > 0.5).astype(np.float32)
    if task == "regression":
        truth_NC = 5000 + 300 * truth_NC
    made = Task(task, tuple("abc"[:outputs]))
    head = fitted(kind, solver, x_ND[:300], truth_NC[:300], task=made, landmarks=300)
    scores_NC = made.scores(logits(head, x_ND[300:])).numpy()
    error = np.abs(scores_NC - truth_NC[300:]).mean()
    guessed = np.abs(truth_NC[:300].mean(0) - truth_NC[300:]).mean()
    assert error < 0.65 * guessed


ODD: dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]] = {
    "one class": lambda: (rows(20), np.zeros(20, np.int64)),
    "one class of two": lambda: (rows(20), np.ones(20, np.int64)),
    "five images": lambda: (rows(5, 40), np.array([0, 1, 1, 0, 1])),
    "one image": lambda: (rows(1, 40), np.array([1])),
    "constant features": lambda: (np.full((20, 6), 3.0, np.float32), np.arange(20) % 2),
    "one image many times": lambda: (np.repeat(rows(1), 20, 0), np.arange(20) % 2),
    "each image twice": lambda: (np.repeat(rows(20), 2, 0), np.repeat(np.arange(20) % 2, 2)),
    "huge features": lambda: (rows(20) * 1e15, np.arange(20) % 2),
    "a class a image": lambda: (rows(30), np.arange(30)),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize(("kind", "solver"), WAYS)
def test_odd_training_sets_give_finite_scores(
    odd: str, kind: heads.HeadKind, solver: SolverName
) -> None:
    x_ND, labels_N = ODD[odd]()
    head = fitted(kind, solver, x_ND, labels_N)
    scores = logits(head, np.concatenate([x_ND, rows(3, x_ND.shape[1], seed=9)])).softmax(1)
    if "one class" in odd:
        assert float(scores[:, int(labels_N[0])].min()) > 0.5


def test_copies_of_an_image_do_not_make_the_strength_weak() -> None:
    """Labels are noise: nothing can be learned, and a twin must not say otherwise."""
    labels_N = np.random.default_rng(1).integers(0, 2, 60)
    x_ND, twice = np.repeat(rows(60, 80), 3, 0), np.repeat(labels_N, 3)
    for kind, solver in WAYS:
        head = fitted(kind, solver, x_ND, twice, landmarks=180)
        assert float(logits(head, rows(200, 80, seed=4)).softmax(1).max()) < 0.9


def test_two_thousand_classes_with_two_images_each() -> None:
    centres = rows(2000, 64, seed=1)
    x_ND = np.concatenate([centres, centres]) + 0.1 * rows(4000, 64)
    labels_N = np.tile(np.arange(2000), 2)
    head = fitted("linear", "closed", x_ND, labels_N)
    assert share_right(head, centres, np.arange(2000)) > 0.9


@pytest.mark.parametrize("bad", [np.nan, -1.0, np.inf])
def test_weights_that_are_no_weights_are_refused(bad: float) -> None:
    x_ND, labels_N = rings(20)
    weight_N = np.ones(20)
    weight_N[3] = bad
    with pytest.raises(DataError, match=r"numbers from 0 up.*1 of 20 are not"):
        fitted("linear", "closed", x_ND, labels_N, weight_N=weight_N)
    with pytest.raises(DataError, match="not all of them are 0"):
        fitted("kernel", "lbfgs", x_ND, labels_N, weight_N=np.zeros(20))


def test_a_kernel_head_takes_its_size_from_loaded_weights() -> None:
    """A package and a checkpoint say how many landmarks there are."""
    x_ND, labels_N = rings(30)
    head = fitted("kernel", "closed", x_ND, labels_N)
    assert isinstance(head, KernelHead) and len(head.landmarks) == 30
    other = heads.build("kernel", 2, 2, 0.0, False, 1024)
    other.load_state_dict(head.state_dict())
    assert torch.equal(logits(other.eval(), x_ND), logits(head, x_ND))


def test_the_same_seed_gives_the_same_head() -> None:
    x_ND, labels_N = rings(100)
    first, again = (fitted("kernel", "lbfgs", x_ND, labels_N, landmarks=40) for _ in range(2))
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])


@pytest.mark.parametrize(("kind", "solver"), WAYS)
@pytest.mark.parametrize("unit", [1e5, 1e-5])
def test_numbers_are_fitted_alike_in_any_unit(
    kind: heads.HeadKind, solver: SolverName, unit: float
) -> None:
    """In grams the weakest penalty was so strong that the mean was predicted."""
    x_ND = rows(500)
    truth_NC = (3 + logistic(2 * x_ND[:, :1] - 1)).astype(np.float32)
    made = Task("regression", ("a",))
    one = fitted(kind, solver, x_ND[:300], truth_NC[:300], task=made, landmarks=300)
    other = fitted(kind, solver, x_ND[:300], unit * truth_NC[:300], task=made, landmarks=300)
    found_NC, scaled_NC = logits(one, x_ND[300:]).numpy(), logits(other, x_ND[300:]).numpy() / unit
    np.testing.assert_allclose(scaled_NC, found_NC, atol=5e-3)
    guessed = np.abs(truth_NC[:300].mean(0) - truth_NC[300:]).mean()
    assert np.abs(found_NC - truth_NC[300:]).mean() < 0.65 * guessed
