"""Give Ray Tune the values of its next trial.

The trials of a random search or a grid are known before it starts: space.py draws them from the
seed, and planned.py hands them out. tpe, gp (optuna_search.py) and bohb (bohb.py) choose values
from the results of earlier trials instead. They begin with the same starts. Where the job refuses
their suggestions, they use the trial of the random search.
"""

from __future__ import annotations

import logging
from contextlib import suppress
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
    trial, or else from `search.start`; those after it from `search.starts`. Of a finite space no
    trial repeats another one, so there may be fewer.

    Raises ConfigError if the job refuses whatever the space draws.
    """
    seed = job.run.seed
    cells = space.cells_within_limits
    trials = []
    for i in range(cfg.samples * len(cells)):
        try:
            trials.append(space.trial(seed, i, cells[i % len(cells)]))
        except ConfigError:
            # A grid whose cells have each had a trial, or a space that has had one, is none that
            # refuses everything.
            if len(trials) < len(cells):
                raise
    if missing := cfg.samples * len(cells) - len(trials):
        log.warning("%d trials are left out: the job refuses nearly all draws", missing)
    begin = [start.trial for start in begun(job, cfg, space, earlier, len(trials))]
    planned = [*begin, *trials[len(begin) :]]
    if not _may_repeat(cfg, space):
        return planned
    distinct = _distinct(seed, space, planned, cfg.samples)
    if missing := len(planned) - len(distinct):
        log.warning(
            "%d of %d trials are left out: search.space has few combinations, and they would "
            "repeat the other %d",
            missing,
            len(planned),
            len(distinct),
        )
    return distinct


def _may_repeat(cfg: SearchConfig, space: Space) -> bool:
    """May planned trials repeat others without somebody having asked for it?

    All trials have one seed, so equal values train equal weights. Of a grid, somebody has said how
    often it runs. Members of a population change their values. Model-based searchers take others
    than the planned ones.
    """
    is_drawn = cfg.searcher == "random" and not cfg.populated
    return is_drawn and space.is_finite and not any(field.grid for field in space.fields)


def _distinct(seed: int, space: Space, planned: list[Changes], drawn: int) -> list[Changes]:
    """As many different trials as were planned, or as a finite space seems to have.

    drawn: how many trials have been drawn: those in the place of copies have the next numbers.
    """
    found: dict[str, Changes] = {}
    for changes in planned:
        found.setdefault(key_of(changes), changes)
    copies = 0  # in a row
    for i in range(drawn, drawn + MOST_TRIES):
        if len(found) == len(planned) or copies == TRIES:
            break
        try:
            changes = space.trial(seed, i)
        except ConfigError:
            break  # it took as many tries as one may
        copies = copies + 1 if key_of(changes) in found else 0
        found.setdefault(key_of(changes), changes)
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
    cells = space.cells_within_limits
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
            cell = cells[at % len(cells)]
            whole = keyed | cell if at else _first(seed, space, keyed, cell)
            taken.append(Start(place, keyed, space.trial(seed, at, whole, TRIES)))
    return taken


def number_of(cfg: SearchConfig, space: Space) -> int:
    """How many trials the search has. Raises ConfigError if search.limits bar all of its grid."""
    return cfg.samples * len(space.cells_within_limits)


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
    starts = len(begun(job, cfg, space, earlier, len(trials)))
    return ConcurrencyLimiter(kind(job, cfg, trials, space, earlier, folder, starts), concurrent)
