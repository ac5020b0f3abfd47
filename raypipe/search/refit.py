"""The best trial's job, trained once more for the model that is registered: on validation images too, larger, longer.

A search needs validation to choose; what it chose needs it no more. So a refit trains on both, to its last epoch, and nothing
is chosen by it: how good the model is, only the test split says. Trials may be small (96 px, a few epochs) and the model large.
"""

from __future__ import annotations

import math
from dataclasses import replace as with_
from pathlib import Path
from typing import Any

from raypipe.config import replace
from raypipe.errors import ConfigError, DataError
from raypipe.models import finite
from raypipe.search.leaderboard import SearchResult
from raypipe.search.settings import SearchJob
from raypipe.train import checkpoint, trainer
from raypipe.train.job import TrainJob
from raypipe.train.loop import Report
from raypipe.train.measure.meter import Tell


def check(job: SearchJob) -> None:
    """Raise ConfigError, before a search starts, for a refit that its job refuses."""
    if job.search.refit is not None:
        _changed(job, _changes(job))


def job_of(job: SearchJob, found: SearchResult) -> TrainJob:
    """What to train once more, on the table as it was searched on, from the best trial's weights: what a trial learned at 96 px
    need not be learned again at 224. A head on frozen features starts anew, for it is fitted to what features are like."""
    _require_usable(found)
    changes = {"table.version": found.best.version.version} | _changes(job)
    if (
        found.job.model.mode == "finetune"
        and not {"model.name", "model.mode", "model.options"} & changes.keys()
    ):
        changes = {"train.start_from": found.best.checkpoint} | changes
    return _changed(found.job, _at_the_end(found, changes) | changes)


def _at_the_end(found: SearchResult, changes: dict[str, Any]) -> dict[str, Any]:
    """Of a trial with values by epoch: its last ones where its weights go on, else the part of them that the refit comes to."""
    if changes.get("train.start_from") is not None:
        return found.trials[0].changes | {"by_epoch": {}}
    epochs = int(changes.get("train.epochs", found.job.train.epochs))
    return {"by_epoch": {at: values for at, values in found.job.by_epoch.items() if at < epochs}}


def _require_usable(found: SearchResult) -> None:
    """Raise DataError for a best trial whose weights are lost: a refit would go on from them, or repeat what lost them."""
    metric = found.trials[0].metric
    if not math.isfinite(metric):
        raise DataError(
            "The search's best trial has no usable epoch",
            got=f"{found.metric} {metric}",
            rule="A refit trains settings again that trained once",
            fix="Lower train.lr in search.space, and search again",
        )
    weights = checkpoint.read(Path(found.best.checkpoint)).weights
    finite.require_weights(
        weights, found.best.checkpoint, "Lower train.lr in search.space, and search again"
    )


def refit(job: TrainJob, found: SearchResult, progress: Report, steps: Tell) -> SearchResult:
    """`found` with the model of `job`, which comes from job_of. Trained before, it is read again; interrupted, it goes on. The
    search's key stays, and the model has its training's: another refit of the same search is another model.
    """
    trained = trainer.run(job, found.best.classes, progress, steps)
    history = tuple(
        {name: value for name, value in line.items() if not name.startswith("val_")}
        for line in trained.history
    )
    best = with_(trained, metrics=history[trained.best_epoch], history=history)
    return with_(found, job=job, best=best, members=(), refitted=True)


def told(found: SearchResult) -> dict[str, str]:
    """What to say of a refit; nothing where there was none."""
    job = found.job
    how = f"on {job.feed.train}, {len(found.best.history)} epochs at {job.model.pixels} px"
    return {"trained again": how} if found.refitted else {}


def _changed(job: TrainJob, changes: dict[str, Any]) -> TrainJob:
    try:
        return replace(job, changes)
    except ConfigError as e:  # the best trial may refuse what the job did not: nothing is lost, the search is not repeated
        raise ConfigError(f"search.refit: {e.what}", got=e.got, rule=e.rule, fix=e.fix) from None


def _changes(job: SearchJob) -> dict[str, Any]:
    train, val = job.feed.train, job.feed.val
    both = train if val == train or train.endswith(f"+{val}") else f"{train}+{val}"
    return {"feed.train": both, "train.result": "last", "train.stopping.patience": None} | (
        job.search.refit or {}
    )
