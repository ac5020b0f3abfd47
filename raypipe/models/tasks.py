"""What the numbers of a model mean: labels of a table -> targets to train on, logits -> scores -> predictions.

single_label   one of several classes                    softmax            "cat"
multi_label    any of several tags; a list, or "a|b"     one sigmoid a tag  "scratch|dent", "" where there is none
probability    one number from 0 to 1, as experts give   sigmoid            0.33
regression     any number, in the unit of its label      the logit itself   12.5

A task is its kind and its classes, both in the package's JSON. The two numeric kinds have one output, named "value". Graded
labels (solar cells: 0, 1/3, 2/3, 1) are probabilities: cross-entropy with soft targets is least at their mean, and the
prediction cannot leave 0 to 1, as it could with regression.

Shapes: labels_N int64 (single_label) or labels_NC float32; targets, logits and scores _BC or _NC float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.functional import one_hot

from raypipe.errors import DataError
from raypipe.models import labels as meaning
from raypipe.models.labels import BAR, NUMERIC, Kind

__all__ = ["NUMERIC", "VALUE", "Kind", "Task", "scores", "tags"]
VALUE = "value"


@dataclass(frozen=True)
class Task:
    """`classes` are in the order of the logits."""

    kind: Kind
    classes: tuple[str, ...]

    @classmethod
    def of(cls, kind: Kind, labels: Sequence[Any]) -> Task:
        """The task that these labels (none of them null) pose: its classes are what occurs, sorted."""
        if kind in NUMERIC:
            return cls(kind, (VALUE,))
        if kind == "multi_label":
            return cls(kind, tuple(sorted({tag for label in labels for tag in tags(label)})))
        classes = {str(label): label for label in labels}
        for label in classes.values():
            _require_class(label)
        return cls(kind, tuple(sorted(classes)))

    def encode(self, labels: Sequence[Any]) -> np.ndarray:
        """labels_N int64 or labels_NC float32. A class is what its text says, so 1 is class "1".

        Raises DataError for a label outside `classes`, and for one that is not a number, or not from 0 to 1, where it must be.
        """
        if self.kind in NUMERIC:
            return _numbers(labels, self.kind)
        if self.kind == "single_label":
            return self._indices([str(label) for label in labels])
        rows = [tags(label) for label in labels]
        labels_NC = np.zeros((len(rows), len(self.classes)), np.float32)
        at = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        labels_NC[at, self._indices([tag for row in rows for tag in row])] = 1
        return labels_NC

    def targets(self, labels_B: Tensor) -> Tensor:
        """targets_BC of encoded labels: shares of classes, tags that are set, or the number."""
        return (
            one_hot(labels_B, len(self.classes)).float()
            if self.kind == "single_label"
            else labels_B
        )

    def scores(self, logits_BC: Tensor) -> Tensor:
        return scores(self.kind, logits_BC)

    def predictions(self, scores_NC: np.ndarray) -> list[str]:
        """What the scores say, as text: the likeliest class, the tags from 0.5 up joined by |, or the number."""
        if self.kind in NUMERIC:
            return [f"{value:.6g}" for value in scores_NC[:, 0].tolist()]
        if self.kind == "single_label":
            return [self.classes[i] for i in scores_NC.argmax(1)]
        return [
            "|".join(tag for tag, on in zip(self.classes, row, strict=True) if on)
            for row in scores_NC >= 0.5
        ]

    def text(self, label: Any) -> str:
        """What a prediction reads that is right about this label."""
        return "|".join(sorted(set(tags(label)))) if self.kind == "multi_label" else str(label)

    def _indices(self, names: Sequence[str]) -> np.ndarray:
        index = {name: i for i, name in enumerate(self.classes)}
        if unknown := sorted(set(names) - index.keys()):
            raise DataError(
                "Labels that the model does not know",
                got=unknown[:5],
                rule=f"Classes: {', '.join(self.classes)}",
            )
        return np.array([index[name] for name in names], dtype=np.int64)


def scores(kind: Kind, logits_BC: Tensor) -> Tensor:
    """Probabilities (they sum to 1 for single_label only), or the predicted number."""
    if kind == "regression":
        return logits_BC
    return logits_BC.softmax(1) if kind == "single_label" else logits_BC.sigmoid()


def tags(label: Any) -> list[str]:
    """The tags of one multi-label: a list's items, or what stands between the bars of a text. None of them is a valid label."""
    if not isinstance(label, str | list | tuple | set | np.ndarray):
        raise DataError(
            "A multi-label is a list of tags or a text like a|b",
            got=label,
            fix="Set model.task=single_label",
        )
    read = meaning.read("multi_label", label)
    if read.why:
        raise DataError(
            f"A label cannot be read as tags: {read.why}", rule="A tag is one name", fix=_MEND
        )
    if isinstance(label, str):  # a table's own text: as it stands there
        return [tag for tag in (part.strip() for part in label.split(BAR)) if tag]
    return read.text.split(BAR) if read.text else []


_MEND = "Mend the label column, or leave the rows out with table.where"


def _require_class(label: Any) -> None:
    """Raise DataError for what ingest would not take as a class either: NaN, a list, nothing at all."""
    read = meaning.read("single_label", label)
    if read.text is None:
        raise DataError(
            f"A label is no class: {read.why or 'it is blank'}",
            got=label,
            rule="A class is one name; rows without a label hold null",
            fix=_MEND,
        )


def _numbers(labels: Sequence[Any], kind: Kind) -> np.ndarray:
    try:
        values_N = np.array([float(label) for label in labels], dtype=np.float64)
    except (TypeError, ValueError):
        wrong = next(label for label in labels if not _is_number(label))
        raise DataError(
            f"model.task={kind} needs numbers as labels",
            got=wrong,
            fix="Set model.task=single_label",
        ) from None
    bad_N = ~(
        np.abs(values_N) <= np.finfo(np.float32).max
    )  # targets are float32: a larger number would be infinite there
    if kind == "probability":
        bad_N |= (values_N < 0) | (values_N > 1)
    if bad_N.any():
        rule = (
            "A probability is from 0 to 1"
            if kind == "probability"
            else "A label is a finite number"
        )
        fix = "Set model.task=regression for other numbers" if kind == "probability" else ""
        raise DataError(
            "Labels that nothing can be learned from",
            got=values_N[bad_N][:5].tolist(),
            rule=rule,
            fix=fix,
        )
    return values_N.astype(np.float32)[:, None]


def _is_number(label: Any) -> bool:
    try:
        float(label)
    except (TypeError, ValueError):
        return False
    return True
