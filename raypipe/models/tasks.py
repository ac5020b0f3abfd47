"""What a model's numbers mean: table labels -> training targets; logits -> scores -> predictions.

Kind           Labels                               Scores            Prediction
single_label   one of several classes               softmax           "cat"
multi_label    any of several tags; list or "a|b"   sigmoid per tag   "scratch|dent"; "" for none
probability    a number from 0 to 1, by experts     sigmoid           0.33
regression     any number, in its own unit          the logit itself  12.5

A task is its kind and its classes; both stand in the package's JSON. The two numeric kinds have one
output, named "value". Graded labels (solar cells: 0, 1/3, 2/3, 1) are probabilities: cross-entropy
with soft targets is least at their mean, and a prediction stays between 0 and 1, which a regression
does not guarantee.

Shapes: labels_N int64 (single_label) or labels_NC float32; targets, logits and scores _BC or _NC
float32.
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
_MEND = "Mend the label column, or leave the rows out with table.where"


@dataclass(frozen=True)
class Task:
    """A kind of task and its classes, in the order of the logits."""

    kind: Kind
    classes: tuple[str, ...]

    @classmethod
    def of(cls, kind: Kind, labels: Sequence[Any]) -> Task:
        """The task of these labels (none of them null): its classes are what occurs, sorted."""
        if kind in NUMERIC:
            return cls(kind, (VALUE,))
        if kind == "multi_label":
            used: set[str] = set()
            for label in labels:
                used.update(tags(label))
            return cls(kind, tuple(sorted(used)))
        by_name = {str(label): label for label in labels}
        for label in by_name.values():
            _require_class(label)
        return cls(kind, tuple(sorted(by_name)))

    def encode(self, labels: Sequence[Any]) -> np.ndarray:
        """labels_N int64 or labels_NC float32. A class is its text, so 1 is class "1".

        Raises DataError for a label outside `classes`; for the numeric kinds, for one that is no
        number or out of range.
        """
        if self.kind in NUMERIC:
            return _numbers(labels, self.kind)
        if self.kind == "single_label":
            return self._indices([str(label) for label in labels])

        # Several tags: a 1 for each tag that is set.
        labels_NC = np.zeros((len(labels), len(self.classes)), np.float32)
        rows: list[int] = []
        names: list[str] = []
        for row, label in enumerate(labels):
            for tag in tags(label):
                rows.append(row)
                names.append(tag)
        labels_NC[rows, self._indices(names)] = 1
        return labels_NC

    def targets(self, labels_B: Tensor) -> Tensor:
        """targets_BC of encoded labels: shares of classes, tags that are set, or the number."""
        if self.kind == "single_label":
            return one_hot(labels_B, len(self.classes)).float()
        return labels_B

    def scores(self, logits_BC: Tensor) -> Tensor:
        return scores(self.kind, logits_BC)

    def predictions(self, scores_NC: np.ndarray, threshold: float | None = None) -> list[str]:
        """Predictions as text: the likeliest class, the tags from 0.5 up joined by |, a number.

        threshold: the least score of a class or a tag; where no class reaches it, the text is "".
        """
        if self.kind in NUMERIC:
            return [f"{value:.6g}" for value in scores_NC[:, 0].tolist()]
        if self.kind == "single_label":
            least = 0.0 if threshold is None else threshold
            reaches_N = scores_NC.max(1, initial=0) >= least
            likeliest = zip(scores_NC.argmax(1), reaches_N, strict=True)
            return [self.classes[i] if reaches else "" for i, reaches in likeliest]
        predictions = []
        for is_set_C in scores_NC >= (0.5 if threshold is None else threshold):
            named = zip(self.classes, is_set_C, strict=True)
            predictions.append(BAR.join(tag for tag, is_set in named if is_set))
        return predictions

    def text(self, label: Any) -> str:
        """The text of a prediction that is right about this label."""
        if self.kind == "multi_label":
            return BAR.join(sorted(set(tags(label))))
        return str(label)

    def _indices(self, names: Sequence[str]) -> np.ndarray:
        """The places of some classes (int64). Raises DataError for unknown ones."""
        index = {name: i for i, name in enumerate(self.classes)}
        unknown = sorted(set(names) - index.keys())
        if unknown:
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
    """The tags of one multi-label: a list's items, or the parts of a text between bars.

    A label may have no tag. Raises DataError for any other value.
    """
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
    if isinstance(label, str):
        # The table's own text stays as it is; only blank parts go.
        parts = [part.strip() for part in label.split(BAR)]
        return [part for part in parts if part]
    return read.text.split(BAR) if read.text else []


def _require_class(label: Any) -> None:
    """Raise DataError for what ingest would refuse as a class: NaN, a list, a blank text."""
    read = meaning.read("single_label", label)
    if read.text is None:
        raise DataError(
            f"A label is no class: {read.why or 'it is blank'}",
            got=label,
            rule="A class is one name; rows without a label hold null",
            fix=_MEND,
        )


def _numbers(labels: Sequence[Any], kind: Kind) -> np.ndarray:
    """labels_NC float32 with C = 1. Raises DataError for labels that are no numbers in range."""
    try:
        values_N = np.array([float(label) for label in labels], dtype=np.float64)
    except (TypeError, ValueError):
        wrong = next(label for label in labels if not _is_number(label))
        raise DataError(
            f"model.task={kind} needs numbers as labels",
            got=wrong,
            fix="Set model.task=single_label",
        ) from None

    # Targets are float32: a larger number would be infinite there. NaN is not <= anything.
    bad_N = ~(np.abs(values_N) <= np.finfo(np.float32).max)
    rule = "A label is a finite number"
    fix = ""
    if kind == "probability":
        bad_N |= (values_N < 0) | (values_N > 1)
        rule = "A probability is from 0 to 1"
        fix = "Set model.task=regression for other numbers"
    if bad_N.any():
        raise DataError(
            "No model can learn from these labels",
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
