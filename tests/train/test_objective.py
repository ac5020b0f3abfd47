"""Metrics are the textbook's, however validation is cut.

The loop learns every kind of task, on two ranks as on one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as reference

from raypipe.config import validate
from raypipe.errors import ConfigError
from raypipe.models.tasks import Kind, Task
from raypipe.train.job import TrainJob
from raypipe.train.objective import METRICS, Objective, judge
from raypipe.train.worker import Data, train_rank

from ..pixels import memory
from . import ranks

KINDS: tuple[Kind, ...] = ("single_label", "multi_label", "probability", "regression")


def labels_of(kind: Kind, rows: int = 90) -> tuple[np.ndarray, np.ndarray]:
    """(inputs_ND, encoded labels) of features that say what the label is, up to noise."""
    rng = np.random.default_rng(8)
    inputs_ND = rng.normal(size=(rows, 8)).astype(np.float32)
    if kind == "single_label":
        return inputs_ND, inputs_ND[:, :3].argmax(1)
    if kind == "multi_label":
        return inputs_ND, (inputs_ND[:, :3] > 0.3).astype(np.float32)
    value_N1 = inputs_ND[:, :1] - inputs_ND[:, 1:2] + 0.1 * inputs_ND[:, 2:3]
    if kind == "probability":
        return inputs_ND, (np.round(3 / (1 + np.exp(-2 * value_N1))) / 3).astype(np.float32)
    return inputs_ND, (5000 + 700 * value_N1).astype(np.float32)


def task_of(kind: Kind) -> Task:
    return Task(kind, ("a", "b", "c") if kind in ("single_label", "multi_label") else ("value",))


def judged(kind: Kind, cut: int) -> tuple[dict[str, float], np.ndarray, np.ndarray]:
    """(metrics of made-up logits in batches of `cut`, with an empty one, scores_NC, labels)."""
    _, labels_N = labels_of(kind)
    objective = Objective.of(task_of(kind), labels_N)
    rng = np.random.default_rng(1)
    logits_NC = torch.from_numpy(
        rng.normal(size=(90, len(objective.task.classes))).astype(np.float32)
    )
    if kind == "regression":
        logits_NC = logits_NC * 500 + 5100
    batches = [slice(0, 0), *(slice(i, i + cut) for i in range(0, 90, cut))]
    totals = sum(objective.totals(logits_NC[b], torch.from_numpy(labels_N[b])) for b in batches)
    assert isinstance(totals, torch.Tensor)
    return objective.metrics(totals), objective.task.scores(logits_NC).numpy(), labels_N


@pytest.mark.parametrize("kind", KINDS)
def test_the_cut_does_not_matter(kind: Kind) -> None:
    whole, pieces = judged(kind, 90)[0], judged(kind, 7)[0]
    assert tuple(whole) == METRICS[kind] and pieces == pytest.approx(whole, rel=1e-6)


def test_they_are_what_scikit_learn_says() -> None:
    found, scores, labels = judged("single_label", 20)
    assert found["val_accuracy"] == pytest.approx(
        reference.accuracy_score(labels, scores.argmax(1))
    )
    assert found["val_balanced_accuracy"] == pytest.approx(
        reference.balanced_accuracy_score(labels, scores.argmax(1))
    )
    assert found["val_loss"] == pytest.approx(reference.log_loss(labels, scores), rel=1e-5)
    found, scores, labels = judged("multi_label", 20)
    assert found["val_accuracy"] == pytest.approx(reference.accuracy_score(labels, scores >= 0.5))
    assert found["val_f1"] == pytest.approx(
        reference.f1_score(labels, scores >= 0.5, average="macro")
    )
    for kind in ("probability", "regression"):
        found, scores, labels = judged(kind, 20)  # type: ignore[arg-type]
        assert found["val_mae"] == pytest.approx(
            reference.mean_absolute_error(labels, scores), rel=1e-5
        )
        assert found["val_rmse"] == pytest.approx(
            reference.root_mean_squared_error(labels, scores), rel=1e-5
        )
        assert found["val_r2"] == pytest.approx(reference.r2_score(labels, scores), rel=1e-4)


def job(kind: Kind, **train: Any) -> TrainJob:
    rule = {"metric": "val_loss", "patience": None}
    settings = {
        "epochs": 25,
        "batch_size": 30,
        "lr": 0.05,
        "precision": "fp32",
        "stopping": rule,
    } | train
    return validate(
        TrainJob,
        {"table": {"uri": "unused"}, "model": {"task": kind, "dropout": 0.0}, "train": settings},
    )


def trained(kind: Kind, **train: Any) -> dict[str, float]:
    inputs_ND, labels = labels_of(kind, 300)
    data = Data(
        task_of(kind).classes,
        True,
        memory(inputs_ND[:200], labels[:200]),
        memory(inputs_ND[200:], labels[200:]),
    )
    state = train_rank(
        job(kind, **train), data, None, lambda state, engine: None, lambda metrics, state: None
    )
    return state.history[-1]


@pytest.mark.parametrize(
    ("kind", "metric", "at_least"),
    [
        ("single_label", "val_accuracy", 0.85),
        ("multi_label", "val_f1", 0.85),
        ("probability", "val_r2", 0.85),  # the best fit explains 0.93
        ("regression", "val_r2", 0.95),
    ],
)
def test_the_loop_learns_every_task(kind: Kind, metric: str, at_least: float) -> None:
    assert trained(kind)[metric] >= at_least


def test_weights_and_focus_change_what_is_learned_and_not_how_it_is_judged() -> None:
    plain, other = (
        trained("single_label", epochs=1),
        trained("single_label", epochs=1, class_weights="balanced", focal_gamma=2),
    )
    assert other["train_loss"] < plain["train_loss"] and other["val_loss"] != plain["val_loss"]
    assert other["val_loss"] == pytest.approx(plain["val_loss"], rel=0.3)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks, which are started once, found of each kind of task."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks.start(_rank, (str(folder),), 2)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_judge_as_one_does(kind: Kind, two_ranks: Path) -> None:
    first, second = (
        torch.load(two_ranks / f"{kind}-{rank}.pt", weights_only=True) for rank in range(2)
    )
    same = {k: v for k, v in first.items() if k.startswith("val")}
    assert same == {k: second[k] for k in same}
    assert same == pytest.approx(
        {k: v for k, v in trained(kind, epochs=2).items() if k in same}, rel=1e-3
    )


def _rank(rank: int, out: str) -> None:
    for kind in KINDS:
        torch.save(trained(kind, epochs=2), Path(out) / f"{kind}-{rank}.pt")


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        (
            "regression",
            {"class_weights": "balanced"},
            r"train\.class_weights does not apply to model\.task=regression",
        ),
        (
            "probability",
            {"label_smoothing": 0.1},
            r"train\.label_smoothing does not apply to model\.task=probability",
        ),
        ("regression", {"focal_gamma": 2.0}, r"train\.focal_gamma does not apply"),
        (
            "regression",
            {"stopping": {"metric": "val_accuracy"}},
            r"model\.task=regression has no val_accuracy.*one of val_loss, val_mae",
        ),
    ],
)
def test_settings_of_another_task_are_refused(
    kind: Kind, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        job(kind, **settings)


@pytest.mark.parametrize("kind", KINDS)
def test_finished_predictions_are_judged_as_logits_are(kind: Kind) -> None:
    metrics, scores, labels_N = judged(kind, 20)
    found = judge(task_of(kind), torch.from_numpy(scores), torch.from_numpy(labels_N))
    assert found == pytest.approx(
        {name: value for name, value in metrics.items() if name != "val_loss"}, rel=1e-5
    )


@pytest.mark.parametrize("images", [3, 7, 10, 50, 100])
def test_labels_that_are_all_equal_have_no_r2(images: int) -> None:
    """Rounding left a variation of 1e-17, and so an R2 of -5e14."""
    objective = Objective.of(task_of("regression"), np.array([[0.1], [0.3], [0.9]]))
    labels_N1 = torch.full((images, 1), 0.7)

    def r2() -> float:
        totals = sum(objective.totals(torch.zeros(1, 1), label[None]) for label in labels_N1)
        assert isinstance(totals, torch.Tensor)
        return objective.metrics(totals)["val_r2"]

    assert np.isnan(r2())
    # A narrow band far from the training labels is told from rounding.
    labels_N1[0] += 0.001
    assert r2() == pytest.approx(reference.r2_score(labels_N1.double(), np.zeros(images)), rel=1e-3)


def test_a_probability_is_right_on_its_side_of_one_half() -> None:
    labels_N1, scores_N1 = (
        torch.tensor([0.0, 1 / 3, 0.5, 2 / 3, 1.0])[:, None],
        torch.tensor([0.4, 0.5, 0.5, 0.4, 0.9])[:, None],
    )
    assert judge(task_of("probability"), scores_N1, labels_N1)["val_accuracy"] == pytest.approx(
        3 / 5
    )


def test_the_last_epoch_can_be_the_result_whatever_validation_says() -> None:
    """Validation's labels are wrong, so that the better the model becomes, the worse it looks."""
    inputs_ND, labels = labels_of("single_label", 90)
    wrong = memory(inputs_ND[60:], 2 - labels[60:])
    data = Data(task_of("single_label").classes, True, memory(inputs_ND[:60], labels[:60]), wrong)
    for result in ("last", "best"):
        wanted = job("single_label", epochs=5, result=result)
        state = train_rank(
            wanted, data, None, lambda state, engine: None, lambda metrics, state: None
        )
        losses = [epoch["val_loss"] for epoch in state.history]
        assert losses.index(min(losses)) < 4
        assert state.best_epoch == (4 if result == "last" else losses.index(min(losses)))


def test_probabilities_are_judged_by_their_error_if_nothing_is_set() -> None:
    """val_accuracy is 1 in each epoch where all labels lie on one side of 0.5."""
    tree = {"table": {"uri": "unused"}, "model": {"task": "probability"}}
    assert validate(TrainJob, tree).train.stopping.metric == "val_mae"
    asked = tree | {"train": {"stopping": {"metric": "val_accuracy"}}}
    assert validate(TrainJob, asked).train.stopping.metric == "val_accuracy"
