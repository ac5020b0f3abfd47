"""Give Ray Tune the values of its next trial.

The trials of a random search or a grid are known before it starts: space.py draws them from the
seed, and planned.py hands them out. tpe, gp (optuna_search.py) and bohb (bohb.py) choose values
from the results of earlier trials instead. They begin with the same starts. Where the job refuses
their suggestions, they use the trial of the random search.
"""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from ray.tune.search import ConcurrencyLimiter

from raypipe.config import key_of
from raypipe.errors import ConfigError
from raypipe.search.searchers.bohb import Bohb
from raypipe.search.searchers.optuna_search import Suggested
from raypipe.search.searchers.planned import Planned
from raypipe.search.settings import SearchConfig
from raypipe.search.space.portfolio import most
from raypipe.search.space.space import DATA, MOST_TRIES, TRIES, Changes, Space, field_of
from raypipe.search.warm_start import Earlier
from raypipe.train.job import TrainJob

log = logging.getLogger("raypipe")
# Fields of a start that decide how long its model takes.
_SHAPING = ("model.name", "model.side_px")
EARLIER = -1  # the place of a start that no setting names


def plan(job: TrainJob, cfg: SearchConfig, space: Space, earlier: list[Earlier]) -> list[Changes]:
    """Every trial of a random search, in order.

    The whole grid is run `search.samples` times. The first trial starts from the best earlier
    trial, or else from `search.start`; those after it from `search.starts`. All trials have one
    seed, so equal values would train equal weights: of what has few combinations, no trial repeats
    another one, and there may be fewer.

    Raises ConfigError if the job refuses whatever the space draws.
    """
    seed = job.run.seed
    cells = space.cells_within_limits
    if barred := len(space.cells) - len(cells):
        log.warning(
            "%d of %d combinations of the grid are left out: their models break search.limits",
            barred,
            len(space.cells),
        )
    turns = _turns(cfg, space)
    trials = []
    for turn in turns:
        try:
            trials.append((turn.cell, space.trial(seed, turn.number, cells[turn.cell])))
        except ConfigError:
            # A grid whose cells have each had a trial, or a space that has had one, is none that
            # refuses everything.
            if len(trials) < len(cells):
                raise
    if missing := len(turns) - len(trials):
        log.warning("%d trials are left out: the job refuses nearly all draws", missing)
    begin = [start.trial for start in begun(job, cfg, space, earlier, len(trials))]
    for at, changes in enumerate(begin):
        trials[at] = turns[at].cell, changes
    if cfg.populated:
        planned = [changes for _, changes in trials]
    else:
        planned = _distinct(seed, space, trials, cfg.samples)
    all_turns = cfg.samples * len(cells)
    if copies := all_turns - (len(turns) - len(trials)) - len(planned):
        log.warning(
            "%d of %d trials are left out: search.space has few combinations, and they would "
            "repeat the other %d",
            copies,
            copies + len(planned),
            len(planned),
        )
    return planned


class _Turn(NamedTuple):
    """A trial to be planned: the number that its draws depend on, and the number of its cell."""

    number: int
    cell: int


def _turns(cfg: SearchConfig, space: Space) -> list[_Turn]:
    """The whole grid `search.samples` times. A cell that leaves nothing to draw has one trial: the
    others would be copies, whatever the searcher. Members of a population change their values.
    """
    cells = space.cells_within_limits
    again = [cfg.populated or space.every(cell, most=1) is None for cell in cells]
    turns = []
    for number in range(cfg.samples * len(cells)):
        cell = number % len(cells)
        if number < len(cells) or again[cell]:
            turns.append(_Turn(number, cell))
    return turns


def _distinct(
    seed: int, space: Space, planned: list[tuple[int, Changes]], rounds: int
) -> list[Changes]:
    """As many different trials of each cell as were planned, or as it has.

    planned: (the number of the cell, the trial). rounds: how often the grid has been drawn: trials
    in the place of copies have the next numbers.
    """
    cells = space.cells_within_limits
    found: dict[str, Changes] = {}
    lacking: Counter[int] = Counter()  # by cell: trials in the place of copies
    for cell, changes in planned:
        key = key_of(changes)
        if key in found:
            lacking[cell] += 1
        found.setdefault(key, changes)
    copies: Counter[int] = Counter()  # by cell: draws in a row
    for i in range(rounds, rounds + MOST_TRIES):
        for cell in [one for one in +lacking if copies[one] < TRIES]:
            try:
                changes = space.trial(seed, i * len(cells) + cell, cells[cell])
            except ConfigError:
                copies[cell] = TRIES  # it took as many tries as one may
                continue
            if key_of(changes) in found:
                copies[cell] += 1
                continue
            found[key_of(changes)] = changes
            lacking[cell] -= 1
            copies[cell] = 0
    # Chance alone misses the last few of a hundred.
    for cell in +lacking:
        for changes in space.every(cells[cell], MOST_TRIES) or ():
            if key_of(changes) not in found and space.refusal(changes) is None:
                found[key_of(changes)] = changes
                lacking[cell] -= 1
            if not lacking[cell]:
                break
    return list(found.values())


class Start(NamedTuple):
    """A start that a trial begins with.

    place: 0 is search.start, and search.starts follow; EARLIER is the best trial of an earlier
    search. keyed: its values by branch key. trial: all values of its trial.
    """

    place: int
    keyed: Changes
    trial: Changes


def begun(
    job: TrainJob, cfg: SearchConfig, space: Space, earlier: list[Earlier], total: int
) -> list[Start]:
    """The first of `total` trials: values that are known to be good, where the space has them."""
    seed = job.run.seed
    cells, turns = space.cells_within_limits, _turns(cfg, space)
    known = {EARLIER: earlier[0].keyed} if earlier else {}
    for place, start in enumerate((cfg.start or {}, *(cfg.starts or ()))):
        known[place] = space.keyed(start)
    taken: list[Start] = []
    for place, keyed in known.items():
        at = len(taken)
        if not keyed or any(keyed == one.keyed for one in taken) or at == most(total):
            continue
        # This job may refuse what another job's trial was, or what a portfolio has.
        with suppress(ConfigError):
            cell = cells[turns[at].cell]
            whole = keyed | cell if at else _first(seed, space, keyed, cell)
            trial = space.trial(seed, turns[at].number, whole, TRIES)
            taken.append(Start(place, keyed, trial))
    return taken


def turn(cfg: SearchConfig, space: Space, at: int) -> tuple[int, Changes]:
    """Of a planned trial: the number that its draws depend on, and the grid's values, by key."""
    number, cell = _turns(cfg, space)[at]
    return number, space.cells_within_limits[cell]


def number_of(cfg: SearchConfig, space: Space) -> int:
    """How many trials the search has, at most. Raises ConfigError if search.limits bar all of its
    grid."""
    return len(_turns(cfg, space))


def _first(seed: int, space: Space, start: Changes, cell: Changes) -> Changes:
    """The first trial's values; those of its model's shape are drawn if they break a limit."""
    whole = start | cell
    if space.barred is None:
        return whole
    with suppress(ConfigError):
        space.trial(seed, 0, whole, TRIES)
        return whole
    return {key: value for key, value in start.items() if field_of(key) not in _SHAPING} | cell


def candidates(cfg: SearchConfig, space: Space, trials: list[Changes]) -> list[Changes]:
    """Trials that together need every array that the search may need."""
    if cfg.searcher == "random":
        return trials
    # A model-based searcher may choose other arrays than the planned trials.
    return [*trials, *space.variants(DATA)]


def searcher(
    job: TrainJob,
    cfg: SearchConfig,
    space: Space,
    trials: list[Changes],
    earlier: list[Earlier],
    folder: Path,
    concurrent: int,
    spare: int = 0,
) -> Any:
    """Tune's searcher; `concurrent` trials may be drawn before the first of them ends.

    spare: see `Planned`; only of a random search.

    Tune asks a ConcurrencyLimiter how many trials may wait. `Planned` itself does the limiting.
    """
    if cfg.searcher == "random":
        return ConcurrencyLimiter(Planned(job, trials, spare), concurrent)
    kind = Bohb if cfg.searcher == "bohb" else Suggested
    begin = {key_of(one.trial) for one in begun(job, cfg, space, earlier, number_of(cfg, space))}
    starts = len([*takewhile(lambda trial: key_of(trial) in begin, trials)])
    return ConcurrencyLimiter(kind(job, cfg, trials, space, earlier, folder, starts), concurrent)
