"""What earlier searches on the same table found, for a search that starts from there (`search.warm_start`).

Read are finished searches in the run's folder whose table and metric are the same, at any version of the table: a value is a
hint and not a result. Of a trial, only fields of the present space count, where their value lies inside it; a field that the
earlier search did not draw counts as that search's job had it. Read once and kept beside the search, so that a killed search
goes on from the same hints although others have finished since.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from raypipe.config import to_json
from raypipe.errors import DataError
from raypipe.search import leaderboard
from raypipe.search.settings import SearchJob
from raypipe.search.space.space import Changes, Space
from raypipe.tables.table import resolve

KEPT = "warm_start.json"


@dataclass(frozen=True)
class Earlier:
    """A finished trial of another search: its values in the present space, by branch, and the best of its metric."""

    keyed: Changes
    metric: float


def earlier(job: SearchJob, space: Space, folder: Path) -> list[Earlier]:
    """From best to worst; empty unless the search wants a warm start."""
    if not job.search.warm_start:
        return []
    kept = folder / KEPT
    if not kept.exists():
        others = sorted(p.parent for p in folder.parent.glob("*/result.json") if p.parent != folder)
        found = [trial for other in others for trial in _of(other, job, space)]
        sign = -1 if job.train.stopping.mode == "max" else 1
        found.sort(key=lambda trial: sign * trial.metric)
        partial = kept.with_suffix(".partial")
        partial.write_text(to_json([asdict(trial) for trial in found]))
        partial.replace(kept)
    return [Earlier(**trial) for trial in json.loads(kept.read_text())]


def _of(other: Path, job: SearchJob, space: Space) -> Iterator[Earlier]:
    try:
        before = yaml.safe_load((other / "config.yaml").read_text(encoding="utf-8"))
        same = (
            resolve(before["table"]["uri"]) == resolve(job.table.uri)
            and before["model"]["task"] == job.model.task
            and before["train"]["stopping"]["metric"] == job.train.stopping.metric
        )
        trials, _, _ = leaderboard.read(other / "result.json")
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        DataError,
        yaml.YAMLError,
    ):  # another version's, or half removed: no hint
        return
    for trial in trials if same else ():
        if trial.checkpoint is not None and math.isfinite(trial.metric):
            values = {field.name: _at(before, field.name) for field in space.fields} | trial.changes
            yield Earlier(space.keyed(values), trial.metric)


def _at(tree: Any, name: str) -> Any:
    for part in name.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree
