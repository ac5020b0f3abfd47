"""The first trials of a default space: starts that were learned offline.

portfolio.yaml holds them, with the command that chose them and what they were learned from. A
search takes those that its space and its job allow, in the file's order. At most SHARE of a
search's trials are starts: the others explore.

Pure, but for reading the file once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from raypipe.errors import RaypipeError
from raypipe.train.job import TrainJob

FILE = Path(__file__).with_name("portfolio.yaml")
SHARE = 1 / 3  # of a search's trials; five of the default sixteen
Values = dict[str, Any]


@functools.cache
def learned(file: Path = FILE) -> tuple[Mapping[str, Any], ...]:
    """The file's starts, by dotted field, in their order.

    Raises RaypipeError for a file that is not what this module expects.
    """
    read = yaml.safe_load(file.read_text(encoding="utf-8"))
    starts = [entry.get("values") for entry in (read or {}).get("starts", [])]
    if not starts or not all(start and "model.mode" in start for start in starts):
        raise RaypipeError(
            "The portfolio of starts is damaged",
            got=str(file),
            rule="starts: a list, each with values, and in these model.mode",
            fix="Install raypipe again",
        )
    return tuple(starts)


def most(samples: int) -> int:
    """So many of a search's trials may be starts: the first one at least."""
    return max(1, int(samples * SHARE))


def allowed(job: TrainJob, drawn: Mapping[str, str], gpu: bool) -> list[Values]:
    """The starts for this job's default space: `drawn`, by field. Each differs from the others.

    A start with a transfer mode that is neither drawn nor the job's says nothing about this job. So
    one is left out; if none is left, there is no start.
    """
    found: list[Values] = []
    modes = drawn.get("model.mode", job.model.mode)
    for start in learned():
        if start["model.mode"] not in modes:
            continue
        values = {
            # What a file cannot know: it depends on the job and the machine.
            "model.name": job.model.name,
            "model.side_px": 224 if gpu else 128,
        } | dict(start)
        values = {name: value for name, value in values.items() if name in drawn}
        if values and values not in found:
            found.append(values)
    return found
