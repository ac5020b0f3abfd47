"""Versions of one registered model answer one question: their tasks are compared here.

A model's name is the run's unless somebody sets `registry.model`, so two tables may share one. A
version of another task, as numbers instead of classes, never takes the champion's place: those who
use it rely on the form of its answers. Other classes may be right, as a table grows, so they are
told and not refused. Each version has its task and its classes as tags; an older raypipe wrote none
of its classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from raypipe.errors import DataError
from raypipe.models.tasks import NUMERIC, Task

KIND = "raypipe.task"
CLASSES = "raypipe.classes"
_MOST = 250  # characters of a tag: Unity Catalog takes 256
_APART = "Set registry.model to a name of its own for this table"


def tags(task: Task) -> dict[str, str]:
    """The tags of a version of this task: its kind; a hash of its classes, and their names."""
    if task.kind in NUMERIC:
        return {KIND: task.kind}
    hashed = hashlib.sha256("\0".join(task.classes).encode()).hexdigest()[:12]
    named = f"{hashed} {len(task.classes)} {_what(task.kind)}: {', '.join(task.classes)}"
    return {KIND: task.kind, CLASSES: named[:_MOST].strip()}


def warning(champion: str, of: Mapping[str, str], task: Task) -> str:
    """What to say before a version of this task is registered beside a champion; "" if nothing.

    champion: its name. of: its tags.
    """
    mine, kind = tags(task), of.get(KIND)
    if kind not in (None, task.kind):
        return (
            f"The champion {champion} has model.task={kind}, and this run has model.task="
            f"{task.kind}: its version will not be promoted. {_APART}"
        )
    theirs, ours = of.get(CLASSES), mine.get(CLASSES)
    if theirs is None or ours is None or theirs.split(" ")[0] == ours.split(" ")[0]:
        return ""
    return (
        f"The champion {champion} has {theirs.partition(' ')[2]}; this table has "
        f"{ours.partition(' ')[2]}. {_APART}, unless it is the same question"
    )


def require_same(whose: str, task: str | None, champion: str, theirs: str | None) -> None:
    """Raise DataError if the champion is of another task.

    task: model.task of `whose`. theirs: of the champion. None: an older raypipe did not say.
    """
    if theirs is None or task is None or theirs == task:
        return
    raise DataError(
        f"{whose} is of another task than the champion {champion}",
        got=f"model.task={task}",
        rule=f"The champion has model.task={theirs}, and who uses it relies on the form of its "
        "answers",
        fix=f"{_APART}, and train there",
    )


def _what(kind: str) -> str:
    return "tags" if kind == "multi_label" else "classes"
