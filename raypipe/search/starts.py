"""The starts that the user has set (search.start, search.starts): what they say, and what of them
no trial begins with.

A default space brings starts of its own (space/portfolio.py). Of these nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raypipe.errors import ConfigError, one_line
from raypipe.search.searchers import tune_searchers
from raypipe.search.searchers.tune_searchers import Start
from raypipe.search.settings import SearchConfig
from raypipe.search.space import parse
from raypipe.search.space.portfolio import most
from raypipe.search.space.space import TRIES, Changes, Space, field_of
from raypipe.search.warm_start import Earlier
from raypipe.train.job import TrainJob

Named = tuple[str, Mapping[str, Any]]
"""A start with its name: search.start, or search.starts.1."""


def of(cfg: SearchConfig) -> list[Named]:
    """The starts of the search, in their order."""
    starts: list[Named] = [("search.start", cfg.start or {})]
    for number, start in enumerate(cfg.starts or ()):
        starts.append((f"search.starts.{number}", start))
    return starts


def checked(cfg: SearchConfig, job: TrainJob) -> SearchConfig:
    """The search, whose starts have numbers where the job has numbers.

    Raises ConfigError for a field that there is not, and for a value that it refuses.
    """
    for where, one in of(cfg):
        parse.check_start(where, one, job)
    start = None if cfg.start is None else parse.typed(cfg.start, job)
    starts = None if cfg.starts is None else tuple(parse.typed(one, job) for one in cfg.starts)
    return cfg.model_copy(update={"start": start, "starts": starts})


def unused(
    cfg: SearchConfig, space: Space, own: Sequence[Named], earlier: Sequence[Earlier] = ()
) -> list[str]:
    """Why no trial begins with all that these starts say, a line for each reason.

    own: as they were set, in the order of `cfg`. earlier: hints of earlier searches; the best one
    comes before all starts.
    """
    lines = []
    # Where search.limits leave no trial at all, that is the reason for each of them.
    total = cfg.samples
    taken: list[Start] = []
    if not space.all_barred:
        total = tune_searchers.number_of(cfg, space)
        taken = tune_searchers.begun(space.job, cfg, space, [*earlier], total)
    room = most(total)
    # A default space fills the first one up.
    filled = dict(enumerate((cfg.start or {}, *(cfg.starts or ()))))
    for place, (where, as_set) in enumerate(own):
        if not as_set:
            continue
        start = parse.typed(as_set, space.job)
        for value in parse.left_out(start, space):
            lines.append(f"{where}: no trial of this space has {value}, so it is left out")
        keyed = space.keyed({**filled.get(place, {}), **start})
        by_itself = set(_undrawn(start, space, space.keyed(start)))
        for name in _undrawn(start, space, keyed):
            beside = "its other values" if name in by_itself else "the portfolio's values beside it"
            lines.append(f"{where}: no trial with {beside} has {name}, so it is left out")
        # Its trial comes after those of the starts before it, as far as they have one.
        before = [one.keyed for one in taken if one.place < place]
        if not keyed or keyed in before:
            continue
        if len(before) >= room:
            lines.append(f"{where} is left out: of {total} trials {room} are starts")
        else:
            reasons = _refusals(cfg, space, start, keyed, len(before))
            lines += [f"{where}: {why}" for why in reasons]
    return lines


def _undrawn(start: Mapping[str, Any], space: Space, keyed: Mapping[str, Any]) -> Iterator[str]:
    """The fields of a start that conditions leave out beside its other values."""
    kept = {field_of(key) for key in keyed}
    for field in space.fields:
        if field.name not in start or field.name in kept:
            continue
        if any(branch.sampler.code(start[field.name]) is not None for branch in field.branches):
            yield field.name


def _refusals(
    cfg: SearchConfig, space: Space, start: Mapping[str, Any], keyed: Changes, at: int
) -> list[str]:
    """keyed: the start by branch key (Space.keyed). at: the trial that begins with it."""
    seed = space.job.run.seed
    grids = {field.name for field in space.fields if field.grid}
    why = []
    for name in sorted(grids & start.keys()):
        why.append(f"{name} is a grid, whose values are tried in their order")
    try:
        trial = space.trial(seed, at, keyed, TRIES)
    except ConfigError as e:
        return [*why, f"no trial begins with all of it: {one_line(e.rule)}"]
    # The same with the grid's values, which its trial has whatever the start says.
    turn, cell = tune_searchers.turn(cfg, space, at)
    crossed = ", ".join(f"{field_of(key)}={value}" for key, value in cell.items())
    try:
        begins = space.trial(seed, turn, keyed | cell, TRIES)
    except ConfigError as e:
        refused = f"beside {crossed} of the grid: {one_line(e.rule)}"
        return [*why, f"no trial begins with all of it {refused}"]
    wanted: dict[str, list[Any]] = {}
    for key, value in keyed.items():
        wanted.setdefault(field_of(key), []).append(value)

    def has(drawn: Changes, name: str) -> bool:
        return name in drawn and drawn[name] in wanted[name]

    for name in sorted(wanted.keys() & start.keys() - grids):
        if has(begins, name):
            continue
        # Its condition asks for what the grid has elsewhere, or for what chance draws.
        because = f"none of {TRIES} draws of its other fields allows it"
        if has(trial, name):
            because = f"its trial has {crossed} of the grid"
        why.append(f"{name} is left out: {because}")
    return why
