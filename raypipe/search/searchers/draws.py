"""What a model-based searcher drew, trial by trial: `draws.jsonl` in the search's folder.

A suggestion depends on every result before it. A kill makes Tune forget the newest trials, and to
ask again for trials that were drawn before. Then other results may be known: the answer would be
another trial, and what was trained of the first one would be lost. So a draw is written down before
Tune gets it, and is given again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raypipe.files import write_atomic

FILE = "draws.jsonl"


class Draws:
    """The draws of one search, by the trial's number: `changes`, and what the searcher adds."""

    def __init__(self, folder: Path) -> None:
        """folder: of the search."""
        self._file = folder / FILE
        self._known: dict[int, dict[str, Any]] | None = None

    def get(self, i: int) -> dict[str, Any] | None:
        """The draw of trial i, if there was one."""
        return self._read().get(i)

    def add(self, i: int, draw: dict[str, Any]) -> None:
        """Write a draw down. Written anew, not appended to: a kill leaves no half line."""
        known = self._read()
        known[i] = draw
        lines = [json.dumps({"trial": number, **known[number]}) for number in sorted(known)]
        write_atomic(self._file, "\n".join(lines) + "\n")

    def all(self) -> list[dict[str, Any]]:
        return list(self._read().values())

    def _read(self) -> dict[int, dict[str, Any]]:
        if self._known is None:
            self._known = {}
            if self._file.exists():
                for line in self._file.read_text(encoding="utf-8").splitlines():
                    draw = json.loads(line)
                    self._known[draw.pop("trial")] = draw
        return self._known
