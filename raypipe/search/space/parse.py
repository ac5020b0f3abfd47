"""Read a search space: dotted config fields -> how to draw them, with all checks before a trial.

    search.space:
      train.lr: "loguniform(1e-4, 1e-1)"
      model.frozen_blocks: "randint(0, 6) if model.mode == 'finetune'"

Checked are, in this order:

1. Names, samplers (samplers.py) and conditions (conditions.py).
2. Each value alone against its field.
3. Each value, together with draws of the other fields, against the whole job. A value that no draw
   of the other fields makes possible is refused; it would never be drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace as replaced
from functools import partial
from graphlib import CycleError, TopologicalSorter
from operator import attrgetter
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from raypipe.config import changes_nothing, field_names, replace
from raypipe.errors import ConfigError, nearest
from raypipe.search.space.conditions import Condition
from raypipe.search.space.samplers import Branch, Choice, Sampler, read
from raypipe.search.space.space import DATA, TRIES, Field, Space, at_random, is_grid
from raypipe.train.job import TrainJob

MOST_ARRAYS = 16  # values of a field in DATA

_SHARED = "Trials of one search share table, run folder and data"
_METRIC = "Trials of one search are ranked by one metric"
_FEATURES = "Trials of one search share features"

# Fields, and sections, that a search cannot draw -> why not.
_FIXED = {
    "table": _SHARED,
    "run": _SHARED,
    "cluster": _SHARED,
    "registry": _SHARED,
    "feed": _SHARED,
    "model.task": _METRIC,
    "train.stopping.metric": _METRIC,
    "model.options": _FEATURES,
    "model.mean": _FEATURES,
    "model.std": _FEATURES,
    "model.views": "Trials are validated with one view",
    "model.calibrate": "It changes what is registered after the search, and no trial",
    "train.workers": "Trials of one search are of one size",
    "train.launcher": "Trials of one search run on Ray",
    "by_epoch": "Population based training (search.scheduler=pbt) finds values by epoch",
}


def parse(texts: Mapping[str, str], job: TrainJob) -> Space:
    """The space around `job`.

    Raises ConfigError for an unknown field, an unknown sampler, conditions that go in a circle, and
    values that no trial could have.
    """
    for name in texts:
        _check_name(name)
    # Read all fields first: a condition may name a later one.
    fields = {name: _typed(Field(name, read(name, text)), job) for name, text in texts.items()}
    for field in fields.values():
        for branch in field.branches:
            _check_values(field.name, branch.sampler, job)
            if branch.condition:
                _check_condition(field, branch.condition, fields, job)
    # From here on trials can be drawn: check values together.
    space = Space(tuple(fields[name] for name in _order(fields)), job)
    for field in space.fields:
        for branch in field.branches:
            for value in branch.sampler.ends:
                _check_together(space, field, branch, value)
    return space


def _typed(field: Field, job: TrainJob) -> Field:
    """The field with chosen values as the job has them. A sampler reads `true` as a text, and a
    condition on it would compare with that. Of 1 and 1.0, two trials would train the same."""
    branches = []
    for branch in field.branches:
        sampler = branch.sampler
        if isinstance(sampler, Choice):
            values = tuple(_as_job_has(field.name, value, job) for value in sampler.values)
            branch = replaced(branch, sampler=replaced(sampler, values=values))
        branches.append(branch)
    return Field(field.name, tuple(branches))


def check_start(where: str, start: Mapping[str, Any], job: TrainJob) -> None:
    """Raise ConfigError for a field that there is not, and for a value that it refuses.

    where: search.start, or which of search.starts. Else a slip would be left out without a word.
    """
    for name, value in start.items():
        _check_known(where, name)
        refused = _own_refusal(name, value, job)
        if refused is not None:
            raise ConfigError(
                f"{where} has a value that {name} refuses",
                got=value,
                rule=refused.rule or str(refused),
            )


def typed(start: Mapping[str, Any], job: TrainJob) -> dict[str, Any]:
    """The start with values as the job has them: YAML and the command line read 1e-3 as a text."""
    found = dict(start)
    for name, value in start.items():
        # The start is a part of the search's key: numbers stay as they are written.
        if isinstance(value, str):
            found[name] = _as_job_has(name, value, job)
    return found


def _as_job_has(name: str, value: Any, job: TrainJob) -> Any:
    try:
        return attrgetter(name)(replace(job, {name: value}))
    except ConfigError:
        # Other fields refuse it: as the field alone has it.
        return _of_field(name, value)


def _of_field(name: str, value: Any) -> Any:
    """The value as this field reads it; as it is if it does not."""
    kind: Any = TrainJob
    try:
        for part in name.split("."):
            field = kind.model_fields[part]
            kind = field.annotation
        rules = field.metadata
        return TypeAdapter(Annotated[(kind, *rules)] if rules else kind).validate_python(value)
    except (ValidationError, AttributeError, KeyError):
        return value


def left_out(start: Mapping[str, Any], space: Space) -> list[str]:
    """What of a start no trial of this space can have, as NAME=VALUE."""
    by_name = {field.name: field for field in space.fields}
    found = []
    for name, value in start.items():
        if name not in by_name:
            # Every trial has what the job sets.
            is_had = changes_nothing(space.job, {name: value})
        else:
            branches = by_name[name].branches
            is_had = any(branch.sampler.code(value) is not None for branch in branches)
        if not is_had:
            found.append(f"{name}={value}")
    return found


def _check_known(where: str, name: str) -> None:
    known = field_names(TrainJob)
    if name not in known:
        raise ConfigError(f"{where} names an unknown field {name}", fix=nearest(name, known))


def _check_name(name: str) -> None:
    _check_known("search.space", name)
    for fixed, rule in _FIXED.items():
        if name == fixed or name.startswith(f"{fixed}."):
            raise ConfigError(f"search.space cannot vary {name}", rule=rule)


def _check_values(name: str, sampler: Sampler, job: TrainJob) -> None:
    """Check each value alone: both ends of a range, or every member of a choice."""
    for value in sampler.ends:
        refused = _own_refusal(name, value, job)
        if refused is not None:
            raise ConfigError(
                f"search.space.{name} draws a value the field refuses",
                got=value,
                rule=refused.rule or str(refused),
            )
    if name in DATA and (sampler.finite is None or len(sampler.finite) > MOST_ARRAYS):
        raise ConfigError(
            f"search.space.{name} draws too many values",
            rule="For each of them, every image is decoded or embedded before the search",
            fix=f"Use choice(…) of a few, {MOST_ARRAYS} at most",
        )


def _own_refusal(name: str, value: Any, job: TrainJob) -> ConfigError | None:
    """Why the field itself refuses a value.

    None if it accepts the value, or if only other fields together with it are the reason.
    """
    try:
        replace(job, {name: value})
    except ConfigError as e:
        return e if e.what.startswith(f"Config key {name} is wrong") else None
    return None


def _check_condition(
    field: Field, condition: Condition, fields: Mapping[str, Field], job: TrainJob
) -> None:
    known = field_names(TrainJob)
    for name in condition.names:
        if name not in known:
            quotes = "Words are quoted, as in model.mode == 'finetune'"
            raise ConfigError(
                f"search.space.{field.name} has a condition on an unknown field {name}",
                got=condition.text,
                rule=nearest(name, known),
                fix=quotes,
            )
        needed = fields[name].branches if name in fields else ()
        if field.grid and not all(is_grid(branch.sampler) for branch in needed):
            raise ConfigError(
                f"The grid search.space.{field.name} depends on {name}, which is drawn",
                rule="Grids are crossed before anything is drawn",
                fix=f"Make {name} a grid too, or {field.name} a choice",
            )
    for name, value in condition.equated:
        refused = _own_refusal(name, value, job)
        if refused is not None:
            raise ConfigError(
                f"search.space.{field.name} has a condition that cannot hold: {name} is never that",
                got=value,
                rule=refused.rule,
            )
        if isinstance(value, str) and typed({name: value}, job)[name] != value:
            raise ConfigError(
                f"search.space.{field.name} has a condition that cannot hold: {name} is no text",
                got=repr(value),
                fix="Write it without quotes",
            )


def _order(fields: Mapping[str, Field]) -> list[str]:
    """The fields in dependency order: each after those of the space that its conditions name."""
    graph = {}
    for name, field in fields.items():
        graph[name] = [needed for needed in field.needs if needed in fields]
    try:
        return list(TopologicalSorter(graph).static_order())
    except CycleError as e:
        circle = " -> ".join(reversed(e.args[1]))
        raise ConfigError(
            "Conditions in search.space go in a circle", got=circle, fix="Leave one of them out"
        ) from None


def _check_together(space: Space, field: Field, branch: Branch, value: Any) -> None:
    """Check that the job accepts the value together with some draw of the other fields.

    A branch whose condition is false in all of these draws is not refused.
    """
    refused: ConfigError | None = None
    for i in range(TRIES):
        # The value is fixed, and the other fields are drawn.
        changes = space.draw(partial(at_random, (0, i, 0), {branch.key: value}))
        drawn = field.branch(space.known(changes))
        if drawn is not branch:
            continue
        refused = space.refusal(changes)
        if refused is None:
            return
    if refused is not None:
        raise ConfigError(
            f"search.space.{field.name} draws a value the job refuses",
            got=value,
            rule=refused.rule or str(refused),
            fix=refused.fix or "Leave it out, or draw what it needs too",
        )
