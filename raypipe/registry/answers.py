"""Predictions as the table that the MLflow model answers with, and what a caller may ask for.

One row an image, in the order of the call:

label        text: a class, tags joined by |, a number
score        the highest of `scores`
scores       in the order of the classes, which stand in the model's metadata
error        "", or one line that says why there is no prediction of this image. Then the label is
             "" and the numbers are null
top_labels   with top_k: the likeliest classes, best first; top_scores: their scores
embedding    with embedding=true: the backbone's features

No text is null: MLflow's Spark UDF would make it the text None, in some batches and not in others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from raypipe.errors import DataError
from raypipe.models.tasks import NUMERIC, Task
from raypipe.registry.package import Attempt, Predictions


@dataclass(frozen=True)
class Ask:
    """Parameters of a call.

    top_k: number of likeliest classes to list; 0 lists none. threshold: the least score of a label;
    None is the task's own: 0.5 for tags, none for classes. A label below it is "". embedding: add
    the features. Raises DataError for values out of range.
    """

    top_k: int = 0
    threshold: float | None = None
    embedding: bool = False

    def __post_init__(self) -> None:
        if self.top_k < 0:
            raise DataError("top_k is a number of classes", got=self.top_k, rule="0 or more")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise DataError("threshold is a score", got=self.threshold, rule="From 0 to 1")

    @classmethod
    def of(cls, params: Mapping[str, Any] | None) -> Ask:
        """From the params of an MLflow call; what is not given, or null, is the default."""
        given = params or {}
        asked: dict[str, Any] = {}
        for name in cls.__dataclass_fields__:
            # MLflow gives every param of the signature, null where its default is null.
            if given.get(name) is not None:
                asked[name] = given[name]
        return cls(**asked)

    def check(self, task: Task) -> None:
        """Raise DataError for what only classes have."""
        if task.kind in NUMERIC and (self.top_k or self.threshold is not None):
            raise DataError(
                "top_k and threshold are for classes",
                got=f"model.task={task.kind}",
                rule="This model predicts a number",
            )


def table(attempt: Attempt, errors: Mapping[int, str], task: Task, ask: Ask) -> pd.DataFrame:
    """The answer to a call. errors: images that did not get as far as the attempt."""
    columns = _columns(attempt.predictions, task, ask)
    failed = attempt.errors | dict(errors)
    if not failed:
        return pd.DataFrame(columns | {"error": [""] * len(attempt.good)})

    # Objects: MLflow writes NaN of a float column into its JSON, which no other parser reads.
    count = len(attempt.good) + len(failed)
    rows: dict[str, list[Any]] = {name: [None] * count for name in columns}
    rows["label"] = [""] * count

    # The answers go to their places among the failures.
    for name, values in columns.items():
        for place, value in zip(attempt.good, values, strict=True):
            rows[name][place] = value
    rows["error"] = [failed.get(place, "") for place in range(count)]
    return pd.DataFrame({name: pd.Series(values, dtype=object) for name, values in rows.items()})


def _columns(predictions: Predictions, task: Task, ask: Ask) -> dict[str, list[Any]]:
    """The columns of the images that were predicted."""
    scores_NC = predictions.scores_NC
    columns: dict[str, list[Any]] = {
        "label": task.predictions(scores_NC, ask.threshold),
        "score": scores_NC.max(axis=1).tolist(),
        "scores": scores_NC.tolist(),
    }
    if ask.top_k:
        # Of equal scores, the first class comes first.
        best_NK = np.argsort(-scores_NC, axis=1, kind="stable")[:, : ask.top_k]
        names = np.array(task.classes, dtype=object)
        columns["top_labels"] = names[best_NK].tolist()
        columns["top_scores"] = np.take_along_axis(scores_NC, best_NK, 1).tolist()
    # Large: 1,280 numbers an image. Only who asks gets them.
    if ask.embedding:
        columns["embedding"] = predictions.features_ND.tolist()
    return columns
