"""How wrong a model was on images whose labels are known, and how sure it was: row by row.

A package keeps them of its held-out images (`outcomes.npz`). When labels of later images come,
drift checks compare the two (watch/feedback.py).

Letters in names: N images, C classes.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from zipfile import BadZipFile

import numpy as np

from raypipe.errors import DataError
from raypipe.models import metrics
from raypipe.models.labels import NUMERIC
from raypipe.models.tasks import Task, tags

_FIX = "Restore the package, or train and register again with another run.seed"


@dataclass(frozen=True)
class Outcomes:
    """Row i of all of them is one image.

    error_N: 0 or 1 (the class, or any tag, is wrong); of tasks that predict numbers the absolute
    error, in the labels' unit. sure_N: how likely the model takes itself to be right, 0 to 1; NaN
    for numbers. domains: known domain of each; empty: the table names none. groups: images of one
    name belong together; None: each stands alone. split: that they are of. chose: they chose the
    epoch or the trial, so the model looks better on them than it is.
    """

    error_N: np.ndarray
    sure_N: np.ndarray
    domains: tuple[str, ...] = ()
    groups: tuple[str, ...] | None = None
    split: str = ""
    chose: bool = False

    def __len__(self) -> int:
        return len(self.error_N)

    def only(self, rows: np.ndarray) -> Outcomes:
        """Of these rows, by their numbers."""
        places = rows.tolist()
        return replace(
            self,
            error_N=self.error_N[rows],
            sure_N=self.sure_N[rows],
            domains=tuple(self.domains[row] for row in places) if self.domains else (),
            groups=tuple(self.groups[row] for row in places) if self.groups is not None else None,
        )

    def to_bytes(self) -> bytes:
        """As the package keeps them: an .npz without pickles."""
        out = io.BytesIO()
        kept = {"error": self.error_N.astype(np.float64), "sure": self.sure_N.astype(np.float64)}
        kept |= {"domains": np.array(self.domains, np.str_), "split": np.array(self.split)}
        kept["chose"] = np.array(self.chose)
        if self.groups is not None:
            kept["groups"] = np.array(self.groups, np.str_)
        np.savez(out, **kept)  # type: ignore[arg-type]
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Outcomes:
        """Raises DataError for what raypipe cannot have written."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                error_N, sure_N = arrays["error"], arrays["sure"]
                domains = without_nan(arrays["domains"].tolist())
                groups = without_nan(arrays["groups"].tolist()) if "groups" in arrays else None
                split, chose = str(arrays["split"]), bool(arrays["chose"])
        except (ValueError, TypeError, KeyError, EOFError, OSError, BadZipFile) as e:
            raise DataError(f"The outcomes of {where} cannot be read: {e}", fix=_FIX) from None
        lengths = {len(error_N), len(sure_N), *([len(domains)] if domains else [])}
        lengths |= {len(groups)} if groups is not None else set()
        is_right = error_N.ndim == sure_N.ndim == 1 and len(lengths) == 1
        if not is_right or not np.isfinite(error_N).all() or (error_N < 0).any():
            raise DataError(
                f"The outcomes of {where} are not what raypipe writes",
                got=f"lengths {sorted(lengths)}",
                rule="An error from 0 up and a confidence for each image",
                fix=_FIX,
            )
        return cls(error_N, sure_N, domains, groups, split, chose)


def without_nan(names: Sequence[str]) -> tuple[str, ...]:
    """The names of domains or groups that a package keeps; blank for "nan" of a column of floats.

    There an older raypipe kept the text of NaN: all images without a group were one large group. A
    package does not say of which type the column was. It was of floats if each of the other names
    is the text of one; a "nan" among other texts is a name like them.
    """
    others = set(names) - {"", "nan"}
    if not all(_is_float(name) for name in others):
        return tuple(names)
    return tuple("" if name == "nan" else name for name in names)


def _is_float(name: str) -> bool:
    """Not 1: whole numbers have no NaN."""
    try:
        return str(float(name)) == name
    except ValueError:
        return False


def sure(task: Task, scores_NC: np.ndarray) -> np.ndarray:
    """sure_N: the score of the predicted class; of tags, the chance that all are right if they do
    not depend on each other; NaN for numbers.
    """
    if task.kind in NUMERIC:
        return np.full(len(scores_NC), np.nan)
    if task.kind == "multi_label":
        likelier_NC = np.maximum(scores_NC, 1 - scores_NC)
        return np.asarray(likelier_NC.astype(np.float64).prod(axis=1))
    return np.asarray(scores_NC.astype(np.float64).max(axis=1))


def errors(task: Task, scores_NC: np.ndarray, targets_NC: np.ndarray) -> np.ndarray:
    """error_N, as in Outcomes. targets_NC: as Task.targets gives them."""
    if task.kind in NUMERIC:
        return np.abs(scores_NC[:, 0].astype(np.float64) - targets_NC[:, 0].astype(np.float64))
    decided_NC = metrics.decided(task, scores_NC)
    return np.asarray((decided_NC != (targets_NC >= 0.5)).any(axis=1).astype(np.float64))


def errors_of_texts(task: Task, scores_NC: np.ndarray, labels: Sequence[str]) -> np.ndarray:
    """error_N of labels as a table has them. A class or tag that the model does not know is one
    that it gets wrong."""
    if task.kind in NUMERIC:
        return errors(task, scores_NC, task.encode(labels))
    said = task.predictions(scores_NC)
    pairs = zip(said, labels, strict=True)
    return np.array([text != task.text(label) for text, label in pairs], np.float64)


def unknown(task: Task, labels: Sequence[str]) -> list[str]:
    """Classes or tags among these labels that the model does not know, sorted."""
    if task.kind in NUMERIC:
        return []
    names = set(labels)
    if task.kind == "multi_label":
        names = {tag for label in names for tag in tags(label)}
    return sorted(names - set(task.classes))
