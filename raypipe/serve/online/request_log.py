"""Keeps requests, answers and feedback without slowing or failing any of them.

A request leaves its entry in a buffer and is answered. A thread writes the buffer to the Delta
tables every few seconds and when the replica stops. The buffer is bounded in rows and bytes. What
does not fit is not kept, and counted: a disk that is full costs entries, never answers.

The id of a request says by itself whether it is kept, and whether the challenger sees it: its
random digits, read as a number, are compared with the share. So any replica knows, at any time,
whether it can take feedback for an id. An answer without a prediction has another kind of id, so
no replica takes feedback for it.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from raypipe.errors import one_line
from raypipe.images.decode import BadImage, open_image
from raypipe.models.labels import Kind
from raypipe.serve.online.batching import Outcome
from raypipe.tables.request_log import RequestLog

log = logging.getLogger("raypipe")
MOST_ROWS = 10_000
MOST_BYTES = 128 * 2**20
FULL_ROWS, FULL_BYTES = 1_000, 16 * 2**20  # written at once, before its time
_ID = re.compile(r"[0-9a-f]{32}")
# The digit of an id that says its kind. UUIDs of random digits have a 4 there.
_KIND, _PREDICTION, _NO_PREDICTION = 12, "4", "0"


def new_id() -> str:
    return uuid.uuid4().hex


def is_id(text: object) -> bool:
    return isinstance(text, str) and bool(_ID.fullmatch(text))


def of_no_prediction(request_id: str) -> str:
    """The id as an answer without a prediction has it. Every replica can tell the two apart."""
    return request_id[:_KIND] + _NO_PREDICTION + request_id[_KIND + 1 :]


def has_prediction(request_id: str) -> bool:
    """May this be the id of a prediction? One that a client made up may look like it."""
    return request_id[_KIND] == _PREDICTION


def is_kept(request_id: str, share: float) -> bool:
    """Is this request one of the `share` that is kept?"""
    return int(request_id[:8], 16) < share * 2**32


def is_challenged(request_id: str, share: float) -> bool:
    """Is it one of the `share` that the challenger sees? Independent of `is_kept`."""
    return int(request_id[-8:], 16) < share * 2**32


@dataclass(frozen=True)
class Entry:
    """One prediction: of which request, of which bytes, and how long the request took."""

    request_id: str
    data: bytes
    role: str
    outcome: Outcome
    seconds: float
    time: datetime


class Keeper:
    """The buffer, and the thread that empties it. All methods may be called from any thread."""

    def __init__(
        self, tables: RequestLog, every_s: float, told: Callable[[str, int], None]
    ) -> None:
        """told: called with (answers, feedback, or dropped; how many rows)."""
        self._tables = tables
        self._every_s = every_s
        self._told = told
        self._entries: list[Entry] = []
        self._feedback: list[dict[str, Any]] = []
        self._bytes = 0
        self._change = threading.Condition()
        self._stopped = False
        self.problem = ""
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    def note(self, entry: Entry) -> None:
        """Keep a prediction. It waits for nothing but the lock."""
        with self._change:
            if not self._fits(len(entry.data)):
                return
            self._entries.append(entry)
            # A full buffer is written before its time.
            self._bytes += len(entry.data)
            if len(self._entries) >= FULL_ROWS or self._bytes >= FULL_BYTES:
                self._change.notify()

    def feedback(self, request_id: str, label: str, task: Kind) -> bool:
        """Keep a label; False if the buffer is full."""
        row = {"request_id": request_id, "label": label, "task": task, "time": now()}
        with self._change:
            if not self._fits(0):
                return False
            self._feedback.append(row)
        return True

    def close(self) -> None:
        """Write what is left, and end the thread."""
        with self._change:
            self._stopped = True
            self._change.notify()
        self._thread.join(timeout=30)
        with self._change:
            answers, labels = len(self._entries), len(self._feedback)
        if answers or labels:
            self._told("dropped", answers + labels)
            log.warning(
                "%d answers and %d labels were not written to the request log, and are lost: %s",
                answers,
                labels,
                self.problem or "it does not end",
            )

    def _fits(self, size: int) -> bool:
        rows = len(self._entries) + len(self._feedback)
        if rows < MOST_ROWS and self._bytes + size <= MOST_BYTES:
            return True
        self._told("dropped", 1)
        return False

    def _run(self) -> None:
        while not self._stopped:
            with self._change:
                if not self._stopped:
                    self._change.wait(self._every_s)
            self._write()
        self._write()

    def _write(self) -> None:
        """Write the buffer to the tables. What cannot be written stays for the next time."""
        # Taken out under the lock, written without it: requests go on meanwhile.
        with self._change:
            entries, self._entries = self._entries, []
            feedback, self._feedback = self._feedback, []
        try:
            self._write_entries(entries)
            entries = []
            if feedback:
                self._tables.add_feedback(feedback)
                self._told("feedback", len(feedback))
            feedback = []
            self.problem = ""
        except Exception as e:
            if not self.problem:
                log.warning("The request log cannot be written: %s", one_line(e))
            self.problem = one_line(e)
        # What was not written comes first again, in its order.
        with self._change:
            self._entries[:0] = entries
            self._feedback[:0] = feedback
            self._bytes = sum(len(entry.data) for entry in self._entries)

    def _write_entries(self, entries: list[Entry]) -> None:
        if not entries:
            return
        # The same bytes are one image, however often they were sent.
        images: dict[str, dict[str, Any]] = {}
        answers = []
        for entry in entries:
            sha256 = hashlib.sha256(entry.data).hexdigest()
            if sha256 not in images:
                images[sha256] = _image(entry)
            answers.append(_answer(entry, sha256))
        self._tables.add(images, answers)
        self._told("answers", len(answers))


def now() -> datetime:
    return datetime.now(timezone.utc)


def _image(entry: Entry) -> dict[str, Any]:
    """The columns of an image that its header tells."""
    row: dict[str, Any] = {"image": entry.data, "time": entry.time}
    try:
        image = open_image(entry.data)
    except BadImage:
        # It was decoded, so this is a limit that this server sets higher.
        return row
    return row | {"format": image.format, "width": image.width, "height": image.height}


def _answer(entry: Entry, sha256: str) -> dict[str, Any]:
    outcome = entry.outcome
    return {
        "request_id": entry.request_id,
        "time": entry.time,
        "image_id": sha256,
        "model": outcome.version,
        "role": entry.role,
        "label": outcome.label,
        "scores": outcome.scores_C,
        "classes": list(outcome.classes),
        "embedding": outcome.features_D,
        "seconds": entry.seconds,
    }
