"""The search space as it is written: any config field by dotted path -> how to draw it. All checks come before a trial starts.

search.space: {train.lr: "loguniform(1e-4, 1e-1)", model.frozen_blocks: "randint(0, 6) if model.mode == 'finetune'"}

Checked are names, samplers (samplers.py), conditions (conditions.py), each value alone against its field, and each with draws
of the other fields against the whole job. A value that no draw of the others makes possible is refused rather than never drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from graphlib import CycleError, TopologicalSorter
from typing import Any

from raypipe.config import field_names, replace
from raypipe.errors import ConfigError, nearest
from raypipe.search.space.conditions import Condition
from raypipe.search.space.samplers import Branch, Sampler, read
from raypipe.search.space.space import DATA, TRIES, Field, Space, at_random, plain
from raypipe.train.job import TrainJob

MOST_ARRAYS = 16  # values of a field in DATA
_FIXED = {
    **dict.fromkeys(
        ("table", "run", "cluster", "registry", "feed"),
        "Trials of one search share table, run folder and data",
    ),
    **dict.fromkeys(
        ("model.task", "train.stopping.metric"), "Trials of one search are ranked by one metric"
    ),
    **dict.fromkeys(
        ("model.options", "model.mean", "model.std"), "Trials of one search share features"
    ),
    "train.workers": "Trials of one search are of one size",
    "by_epoch": "Population based training (search.scheduler=pbt) finds values by epoch",
}


def parse(texts: Mapping[str, str], job: TrainJob) -> Space:
    """Raises ConfigError for an unknown field, an unknown sampler, a cycle, and values that no trial could have."""
    job = plain(job)
    for name in texts:
        _check_name(name)
    fields = {name: Field(name, read(name, text)) for name, text in texts.items()}
    for field in fields.values():
        for branch in field.branches:
            _check_values(field.name, branch.sampler, job)
            if branch.condition:
                _check_condition(field, branch.condition, fields, job)
    space = Space(tuple(fields[name] for name in _order(fields)), job)
    for field in space.fields:
        for branch in field.branches:
            for value in branch.sampler.ends:
                _check_together(space, field, branch, value)
    return space


def _check_name(name: str) -> None:
    known = field_names(TrainJob)
    if name not in known:
        raise ConfigError(f"search.space names an unknown field {name}", fix=nearest(name, known))
    for fixed, rule in _FIXED.items():
        if name == fixed or name.startswith(fixed + "."):
            raise ConfigError(f"search.space cannot vary {name}", rule=rule)


def _check_values(name: str, sampler: Sampler, job: TrainJob) -> None:
    """Both ends of a range and every member of a choice, as far as the field itself can tell."""
    for value in sampler.ends:
        if e := _own_refusal(name, value, job):
            raise ConfigError(
                f"search.space.{name} draws a value the field refuses",
                got=value,
                rule=e.rule or str(e),
            )
    if name in DATA and (sampler.finite is None or len(sampler.finite) > MOST_ARRAYS):
        raise ConfigError(
            f"search.space.{name} draws too many values",
            rule="For each of them, every image is decoded or embedded before the search",
            fix=f"Use choice(…) of a few, {MOST_ARRAYS} at most",
        )


def _own_refusal(name: str, value: Any, job: TrainJob) -> ConfigError | None:
    """Why the field refuses a value; None when it does not, or when only others together with it do."""
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
            raise ConfigError(
                f"search.space.{field.name} has a condition on an unknown field {name}",
                got=condition.text,
                fix=nearest(name, known) + " Words are quoted, as in model.mode == 'finetune'",
            )
        if field.grid and name in fields and not fields[name].grid:
            raise ConfigError(
                f"The grid search.space.{field.name} depends on {name}, which is drawn",
                rule="Grids are crossed before anything is drawn",
                fix=f"Make {name} a grid too, or {field.name} a choice",
            )
    for name, value in condition.equated:
        if e := _own_refusal(name, value, job):
            raise ConfigError(
                f"search.space.{field.name} has a condition that cannot hold: {name} is never that",
                got=value,
                rule=e.rule,
            )


def _order(fields: Mapping[str, Field]) -> list[str]:
    """Every field after those in the space that its conditions name."""
    try:
        graph = {name: [n for n in field.needs if n in fields] for name, field in fields.items()}
        return list(TopologicalSorter(graph).static_order())
    except CycleError as e:
        circle = " -> ".join(reversed(e.args[1]))
        raise ConfigError(
            "Conditions in search.space go in a circle", got=circle, fix="Leave one of them out"
        ) from None


def _check_together(space: Space, field: Field, branch: Branch, value: Any) -> None:
    """Some trial has the value; or none is ever asked for it, because its condition does not hold."""
    refused: ConfigError | None = None
    for i in range(TRIES):
        changes = space.draw(partial(at_random, (0, i, 0), {branch.key: value}))
        if field.branch(space.known(changes)) is branch:
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
