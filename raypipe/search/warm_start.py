"""The trials of earlier searches on the same table, as hints for a new search (search.warm_start).

1. Finished searches in the run's folder are read if their table and metric are the same. The
   table's version may differ: a value is a hint and not a result.
2. From a trial, only fields of the present space count, and only if their value lies inside it. A
   field that the earlier search did not draw has the value of that search's job.
3. The hints are stored beside the search, so a killed search continues with the same hints even if
   others have finished since.
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
from raypipe.files import write_atomic
from raypipe.search import trial_files
from raypipe.search.space.space import Changes, Space
from raypipe.tables.address import resolve
from raypipe.train.job import TrainJob

HINTS = "warm_start.json"


@dataclass(frozen=True)
class Earlier:
    """A finished trial of another search."""

    keyed: Changes
    """Its values in the present space, by the key of a field's branch (samplers.Branch)."""

    metric: float
    """The best value of its metric."""


def earlier(job: TrainJob, space: Space, folder: Path) -> list[Earlier]:
    """The hints for the search in `folder`, from best to worst."""
    file = folder / HINTS
    if not file.exists():
        # First start of this search: read all others in the folder.
        hints: list[Earlier] = []
        for result in sorted(folder.parent.glob("*/result.json")):
            if result.parent != folder:
                hints.extend(_hints_of(result.parent, job, space))
        sign = -1 if job.train.stopping.mode == "max" else 1
        hints.sort(key=lambda hint: sign * hint.metric)
        write_atomic(file, to_json([asdict(hint) for hint in hints]))
    return [Earlier(**fields) for fields in json.loads(file.read_text())]


def _hints_of(other: Path, job: TrainJob, space: Space) -> Iterator[Earlier]:
    """The usable trials of the search in `other`; none if it is of another table or metric.

    A folder that another version wrote, or that is half removed, has no hints either.
    """
    try:
        config = yaml.safe_load((other / "config.yaml").read_text(encoding="utf-8"))
        same = _same_question(config, job)
        trials = trial_files.read(other / "result.json").trials
    except (OSError, ValueError, KeyError, TypeError, DataError, yaml.YAMLError):
        return
    if not same:
        return
    for trial in trials:
        if trial.checkpoint is None or not math.isfinite(trial.metric) or not trial.drawn:
            continue
        # What the trial drew comes before what its search's job had.
        values = {field.name: _value_at(config, field.name) for field in space.fields}
        yield Earlier(space.keyed(values | trial.changes), trial.metric)


def _same_question(config: dict[str, Any], job: TrainJob) -> bool:
    """Is the other search's config about the same table, labels, task and metric as the job?"""
    table = resolve(config["table"]["uri"])
    task = config["model"]["task"]
    metric = config["train"]["stopping"]["metric"]
    # Another column of labels is another question.
    label = config["table"].get("columns", {}).get("label", "label")
    return (
        table == resolve(job.table.uri)
        and label == job.table.columns.label
        and task == job.model.task
        and metric == job.train.stopping.metric
    )


def _value_at(config: Any, name: str) -> Any:
    """The value of a dotted field in a config; None if it has none."""
    for part in name.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config
