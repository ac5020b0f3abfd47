"""Metrics by class agree with scikit-learn's, and say nothing where there is nothing to say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from raypipe.models.metrics import by_class, confusion, overall
from raypipe.models.tasks import Task
from raypipe.train.objective import judge

RNG = np.random.default_rng(5)


@pytest.mark.parametrize("kind", ["single_label", "multi_label"])
def test_they_agree_with_scikit_learn(kind: str) -> None:
    task = Task(kind, ("a", "b", "c", "d"))  # type: ignore[arg-type]
    scores_NC = RNG.random((300, 4))
    targets_NC = np.eye(4)[RNG.integers(0, 4, 300)]
    if kind == "multi_label":
        targets_NC = (RNG.random((300, 4)) < 0.3).astype(float)
        predicted, true = scores_NC >= 0.5, targets_NC
    else:
        predicted, true = scores_NC.argmax(1), targets_NC.argmax(1)
        assert (confusion(scores_NC, targets_NC) == confusion_matrix(true, predicted)).all()
    expected = precision_recall_fscore_support(true, predicted, average=None)
    found = by_class(task, scores_NC, targets_NC)
    assert [m.name for m in found] == ["a", "b", "c", "d"]
    for metrics, *theirs in zip(found, *expected, strict=True):
        ours = (metrics.precision, metrics.recall, metrics.f1, metrics.images)
        np.testing.assert_allclose(ours, theirs)


def test_a_class_that_never_occurs_has_no_recall_and_one_never_predicted_no_precision() -> None:
    task = Task("single_label", ("a", "b", "c"))
    scores_NC = np.array([[0.9, 0.1, 0.0], [0.8, 0.2, 0.0]])
    targets_NC = np.array([[1, 0, 0], [0, 1, 0]])
    a, b, c = by_class(task, scores_NC, targets_NC)
    assert (a.precision, a.recall, b.precision, b.recall, b.f1) == (0.5, 1.0, None, 0.0, 0.0)
    assert (c.images, c.precision, c.recall, c.f1) == (0, None, None, None)
    assert by_class(Task("regression", ("value",)), scores_NC[:, :1], targets_NC[:, :1]) == ()


def test_overall_metrics_are_those_of_a_training() -> None:
    """The training sums over steps and workers; this has all images at once."""
    for kind, classes in (
        ("single_label", ("a", "b", "c")),
        ("multi_label", ("a", "b", "c")),
        ("probability", ("value",)),
        ("regression", ("value",)),
    ):
        task = Task(kind, classes)  # type: ignore[arg-type]
        scores_NC = RNG.random((200, len(classes))).astype(np.float32)
        if kind == "single_label":
            labels_N = RNG.integers(0, 3, 200)
        elif kind == "multi_label":
            labels_N = (RNG.random((200, 3)) < 0.4).astype(np.float32)
        else:
            labels_N = RNG.random((200, 1)).astype(np.float32)
        targets_NC = task.targets(torch.tensor(labels_N)).numpy()
        theirs = judge(task, torch.from_numpy(scores_NC), torch.tensor(labels_N))
        ours = overall(task, scores_NC, targets_NC)
        assert {f"val_{name}" for name in ours} == theirs.keys(), kind
        for name, value in ours.items():
            assert value == pytest.approx(theirs[f"val_{name}"], rel=1e-4), (kind, name)
    with pytest.raises(ValueError, match="there are none"):
        overall(task, scores_NC[:0], targets_NC[:0])


def test_a_label_that_is_no_class_is_wrong_and_nobodys_row() -> None:
    """It stood in the row of the first class."""
    task = Task("single_label", ("a", "b"))
    scores_NC = np.array([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7]], np.float32)
    targets_NC = np.array([[1, 0], [0, 1], [0, 0]], np.float32)
    assert confusion(scores_NC, targets_NC).tolist() == [[1, 0], [0, 1]]
    assert overall(task, scores_NC, targets_NC) == pytest.approx(
        {"accuracy": 2 / 3, "balanced_accuracy": 1.0}
    )
    assert by_class(task, scores_NC, targets_NC)[1].precision == 0.5
