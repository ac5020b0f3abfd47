"""Labels become targets and scores become labels again; what cannot be a label of the task is
named.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from raypipe.errors import DataError
from raypipe.models.tasks import Kind, Task, tags

LABELS: dict[Kind, list[Any]] = {
    "single_label": ["b", "a", 1, "b"],
    "multi_label": ["b|a", ["c"], "", ("a", "c")],
    "probability": [0, 1 / 3, "0.5", 1.0],
    "regression": [-3, "1e3", 12.5, 0],
}


@pytest.mark.parametrize("kind", LABELS)
def test_a_perfect_prediction_reads_as_its_label(kind: Kind) -> None:
    task = Task.of(kind, LABELS[kind])
    encoded = task.encode(LABELS[kind])
    targets = task.targets(torch.from_numpy(encoded))
    assert targets.shape == (4, len(task.classes)) and targets.dtype == torch.float32
    said = task.predictions(targets.numpy())
    if kind in ("single_label", "multi_label"):
        assert said == [task.text(label) for label in LABELS[kind]]
    else:
        assert [float(s) for s in said] == pytest.approx(
            [float(label) for label in LABELS[kind]], rel=1e-5
        )


def test_classes_are_sorted_and_the_numeric_tasks_have_one_output() -> None:
    assert Task.of("single_label", LABELS["single_label"]).classes == ("1", "a", "b")
    assert Task.of("multi_label", LABELS["multi_label"]).classes == ("a", "b", "c")
    assert Task.of("probability", [0.1]).classes == Task.of("regression", [7]).classes == ("value",)


@pytest.mark.parametrize("label", [" a | b ", ["a", "b"], np.array(["a", "b"]), "a||b"])
def test_tags_come_as_a_list_or_between_bars(label: Any) -> None:
    assert tags(label) == ["a", "b"]


def test_scores_are_what_the_task_says() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.0]])
    single, multi = (
        Task(kind, ("a", "b", "c")).scores(logits) for kind in ("single_label", "multi_label")
    )
    assert float(single.sum()) == pytest.approx(1) and torch.equal(multi, logits.sigmoid())
    assert torch.equal(Task("regression", ("value",)).scores(logits[:, :1]), logits[:, :1])


@pytest.mark.parametrize(
    ("kind", "label", "says"),
    [
        ("single_label", "z", r"does not know.*'z'.*Classes: a, b"),
        ("multi_label", "a|z", r"does not know.*'z'.*Classes: a, b"),
        (
            "multi_label",
            3.5,
            r"list of tags or a text like a\|b.*got 3\.5.*model\.task=single_label",
        ),
        ("probability", "high", r"needs numbers.*got 'high'.*model\.task=single_label"),
        ("probability", 1.5, r"got \[1\.5\].*from 0 to 1.*model\.task=regression"),
        ("regression", float("nan"), r"got \[nan\].*finite"),
    ],
)
def test_a_label_of_another_task_is_named(kind: Kind, label: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        Task(kind, ("a", "b")).encode([label])
