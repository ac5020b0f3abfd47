"""What comes to POST /feedback: the right label of an earlier request.

A label is read as ingest reads one (models/labels.py), so what is taken here becomes a row there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from pydantic import BaseModel, ValidationError

from raypipe.errors import nearest
from raypipe.models import labels
from raypipe.models.labels import Kind
from raypipe.serve.online import body
from raypipe.serve.online.limits import Refused
from raypipe.serve.online.request_log import is_id

LONGEST_LABEL = 1_000  # characters
MOST_BYTES = 64 * 2**10  # of a body


class Feedback(BaseModel):
    """The right label of an earlier request. Its type decides: true is no 1, and 1 is no "a"."""

    request_id: str
    label: Any


async def read(request: Request, timeout_s: float) -> Feedback:
    """The feedback in a body. Raises Refused: 415 for another type, 413, 408, 422."""
    # Only JSON: a page of another site cannot send it without asking first.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(415, "Feedback is JSON", got=kind, fix="Content-Type: application/json")
    data = await body.read(request, MOST_BYTES, timeout_s)
    try:
        given = Feedback.model_validate_json(data)
    except ValidationError as e:
        first = e.errors(include_input=False, include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        rule = '{"request_id": "…", "label": "…"}'
        got = f"{where}: {first['msg']}" if where else first["msg"]
        raise Refused(422, "This is no feedback", got=got[:300], rule=rule) from None
    if not is_id(given.request_id):
        raise Refused(
            422,
            "This is no request id",
            got=given.request_id[:100],
            rule="It is the request_id of an answer: 32 hexadecimal digits",
        )
    return given


def label_of(given: Feedback, task: Kind, known: Sequence[str] | None) -> str:
    """The label, as a table keeps it. Raises Refused (422) for what is none of this task.

    known: the classes that it may name; None: any.
    """
    label = labels.read(task, given.label)
    why = label.why
    if label.text is None:
        why = why or "it is blank"
    elif len(label.text) > LONGEST_LABEL:
        why = f"it has more than {LONGEST_LABEL:,} characters"
    if why or label.text is None:
        raise Refused(
            422,
            f"This is no label: {why}",
            got=json.dumps(given.label, ensure_ascii=False)[:100],
            rule=f"A label of model.task={task}",
        )
    if known is not None and task not in labels.NUMERIC:
        _require_known(label.text, task, known)
    return label.text


def _require_known(label: str, task: Kind, classes: Sequence[str]) -> None:
    given = label.split(labels.BAR) if task == "multi_label" else [label]
    unknown = [name for name in given if name and name not in classes]
    if unknown:
        raise Refused(
            422,
            "The model has no such class",
            got=unknown[0][:100],
            rule=nearest(unknown[0], list(classes))[:300],
            fix="serve.new_labels=true takes new classes, too",
        )
