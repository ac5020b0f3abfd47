"""Models of several trials, a soup or an ensemble: made after the last trial, if there is time.

soup.py averages weights and together.py scores; here is what a search gives them, and its clock.
"""

from __future__ import annotations

from pathlib import Path

from raypipe.config import replace
from raypipe.feed.dataset import Pinned
from raypipe.search import soup, together
from raypipe.search.choosing import Choosing
from raypipe.search.leaderboard import Trial
from raypipe.search.ledger import Ledger, TooShort
from raypipe.search.settings import SearchConfig
from raypipe.search.trials.trial import data_key
from raypipe.train.job import TrainJob
from raypipe.train.worker import Data, validate

# Of what was tried: there may have been no time for all, and search.limits may forbid some.
_NO_BETTER = "no mean of those that were tried was better on validation than the best one alone"


def ensemble(
    folder: Path,
    job: TrainJob,
    cfg: SearchConfig,
    trials: list[Trial],
    pinned: Pinned,
    data: dict[str, Data],
    ledger: Ledger,
) -> None:
    """Make an ensemble of the trials, if one is better and there is time to find it."""
    average = soup.read(folder)
    checkpoint = None if average is None else average.checkpoint
    joining = together.candidates(job, trials, cfg, checkpoint)
    choosing = Choosing.of(ledger, {one.name: one.job.model for one in joining}, trials)
    # Its seconds were a part of the ending.
    ledger.forecast.combined = ledger.forecast.chosen = 0
    ledger.forecast.trials_ended = True
    try:
        with ledger.reading(is_answered=True, phase="ensemble"):
            made = together.make(joining, cfg, pinned, data, folder, choosing)
        if made is None:
            ledger.notes.append(f"No ensemble: {_NO_BETTER}")
    except TooShort:
        ledger.notes.append("No ensemble: there was no time to choose one")
    ledger.lap("ensemble")


def soup_of_best(
    job: TrainJob,
    most: int,
    trials: list[Trial],
    pinned: Pinned,
    data: dict[str, Data],
    folder: Path,
    ledger: Ledger,
) -> None:
    """Average the weights of up to `most` of the best trials, if there is time to judge means.

    Only trials that train on the same arrays as the best one take part.
    """
    best_job = replace(job, trials[0].changes)
    key = data_key(best_job)
    # Weights of another backbone or resolution cannot be averaged, nor those of a first answer's
    # heads. And the validation arrays below are those of the best trial.
    drawn = [trial for trial in trials if trial.kept and trial.drawn]
    # Heads of another kind or size have other weights.
    head = best_job.model.head, best_job.model.landmarks
    alike = []
    for trial in drawn:
        own = replace(job, trial.changes)
        if data_key(own) == key and (own.model.head, own.model.landmarks) == head:
            alike.append(trial)
    rule = job.train.stopping
    # Its seconds were a part of the ending.
    ledger.forecast.trials_ended = True
    ledger.forecast.combined = max(0, ledger.forecast.combined - most * pinned.counts[job.feed.val])
    try:
        with ledger.reading(is_answered=True, phase="soup"):
            made = soup.make(
                alike[:most],
                lambda weights: validate(best_job, data[key], weights),
                rule.metric,
                rule.mode,
                folder,
            )
        if made is None:
            ledger.notes.append(f"No soup: {_NO_BETTER}")
    except TooShort:
        ledger.notes.append("No soup: there was no time to judge one")
    ledger.lap("soup")
