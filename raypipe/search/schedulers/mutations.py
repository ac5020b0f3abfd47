"""The record of a population: which trial took over whose weights, and the job that repeats it.

Each exploit is a line of mutations.jsonl in the search's folder. A trial that took over weights was
not trained with one set of values but with a schedule: values by epoch. The schedule is stored
beside the weights (trial_checkpoints.py). `job_of` makes a job of it, which trains the same weights
again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from raypipe.config import replace
from raypipe.files import write_atomic
from raypipe.search.trials.trial_checkpoints import Schedule
from raypipe.train.job import TrainJob

LOG = "mutations.jsonl"


def append(folder: Path, mutation: Mapping[str, Any]) -> None:
    """Add one exploit to the record in the search's `folder`.

    A search that was killed repeats its last turn: that replaces what it recorded then.
    """
    # Written anew, not appended to: volumes of Unity Catalog refuse that. It stays small.
    file = folder / LOG
    turn = (mutation["trial"], mutation["epoch"])
    before = [line for line in read(folder) if (line["trial"], line["epoch"]) != turn]
    lines = [json.dumps(line) for line in (*before, dict(mutation))]
    write_atomic(file, "\n".join(lines) + "\n")


def read(folder: Path) -> list[dict[str, Any]]:
    """The exploits so far, in order.

    Keys: trial, donor, epoch (of the donor's weights), before (the trial's values), donor_values,
    values (the trial's, after the exploit).
    """
    file = folder / LOG
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def schedules(folder: Path) -> dict[str, Schedule]:
    """From the record: the schedule of each trial that took over weights.

    For searches of older versions, which kept no schedule beside the weights.
    """
    by_trial: dict[str, list[dict[str, Any]]] = {}
    for mutation in read(folder):
        epoch = mutation["epoch"]
        # A donor that took over no weights was trained with its own values from the start.
        from_start = [{"epoch": 0, **mutation["donor_values"]}]
        donor = by_trial.get(mutation["donor"], from_start)
        # The donor's weights at the exploit were trained with its schedule up to there.
        before = [line for line in donor if line["epoch"] < max(1, epoch)]
        by_trial[mutation["trial"]] = [*before, {"epoch": epoch, **mutation["values"]}]
    return {trial: tuple(lines) for trial, lines in by_trial.items()}


def job_of(job: TrainJob, changes: Mapping[str, Any], schedule: Schedule) -> TrainJob:
    """The job that trains a trial again.

    `changes` are its last values. A trial that took over weights also has a schedule.
    """
    if len(schedule) < 2:
        return replace(job, dict(changes))
    # The first line becomes the job's own values, the others by_epoch.
    first, *later = schedule
    by_epoch = {line["epoch"]: _values(line) for line in later}
    return replace(job, _values(first) | {"by_epoch": by_epoch})


def _values(line: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of one line of a schedule."""
    return {name: value for name, value in line.items() if name != "epoch"}


def write_schedule(file: Path, schedule: Sequence[Mapping[str, Any]]) -> None:
    """Write the best trial's schedule for the user; no file if it took over no weights."""
    if not schedule:
        return
    lines = [dict(line) for line in schedule]
    file.write_text(yaml.safe_dump(lines, sort_keys=False), encoding="utf-8")
