"""Train the best trial's job once more: on validation images too, and larger or longer if wanted.

A search needs validation images to choose between trials. Once it has chosen, they may be trained
on. So a refit trains on both splits to its last epoch, and nothing is chosen by it: only the test
split says how good the model is. So trials can be small (96 px, a few epochs) and the model large.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace as with_
from pathlib import Path
from typing import Any

from raypipe.config import changes_nothing, replace
from raypipe.errors import ConfigError, DataError, RaypipeError
from raypipe.feed.dataset import Pinned, pin
from raypipe.models import finite
from raypipe.search import contenders
from raypipe.search.result import SearchResult
from raypipe.search.settings import SearchConfig
from raypipe.train import checkpoint, trainer
from raypipe.train.job import TrainJob, TrainResult
from raypipe.train.loop import LoopState, Report
from raypipe.train.measure.meter import ReportPosition
from raypipe.train.pace import ANNEALED
from raypipe.train.spark_place import refuse

_JUDGES = ("patience", "target", "plateau")  # rules of train.stopping that ask validation
_ENDS = (*_JUDGES, "seconds", "gpu_hours", "money")
_OF_SEARCH = ("table", "run", "cluster", "registry")  # sections: the search is there already
_ITS_OWN = ("run.seed",)  # of these sections: a training may begin from other numbers
_FIXED = {
    "feed.val": "It trains on the search's validation images",
    "feed.test": "The search's test images are to judge its model",
    "model.task": "It is the search's",
    "train.result": "Its last epoch is the result: images that it learns choose no epoch",
    "train.stopping.metric": "It has chosen among the trials, and a refit has no validation",
}
FEWEST_TESTS = 100
"""Test images that a model needs which has learned from validation, if validation has as many. With
fewer, drift checks estimate no accuracy (train/shifted.py)."""
_SHAPE = {"model.name", "model.mode"}  # and model.options: with others, weights do not fit


def check(job: TrainJob, cfg: SearchConfig) -> None:
    """Raise ConfigError, before a search starts, for a refit that its job refuses, or a head of
    its first answer, which may be the best."""
    if cfg.refit is None or (job.model.calibrate and not cfg.trains_again):
        return  # heads stay as they are then (`never`)
    changes = _changes(job, cfg.refit_changes or {})
    if cfg.trains_again:
        _check_training(job, cfg, changes)
    if cfg.first_answer:
        for head in _heads(job):
            _refitted(head, changes, "search.first_answer=false")


def _check_training(job: TrainJob, cfg: SearchConfig, changes: dict[str, Any]) -> None:
    """Raise ConfigError for a refit of a whole training that the job refuses."""
    wanted = cfg.refit_changes or {}
    _require_own(wanted, job)
    for name in (f"train.stopping.{rule}" for rule in _ENDS):
        if wanted.get(name) is not None:
            raise ConfigError(
                f"search.refit.{name} would end the refit before its learning rate has fallen",
                got=wanted[name],
                rule="A refit must train to its last epoch",
                fix="Set it to null, or limit search.refit.train.epochs or search.budget_s",
            )
    # A preset may have set the refit, and the first answer.
    refuse(_refitted(job, changes, "search.refit=null"), "search.refit")


def _require_own(wanted: dict[str, Any], job: TrainJob) -> None:
    """Raise ConfigError for what is not a refit's to change, unless it has that value anyway."""
    for name, value in wanted.items():
        section = name.partition(".")[0]
        is_fixed = name in _FIXED or (section in _OF_SEARCH and name not in _ITS_OWN)
        if is_fixed and not _has(job, name, value):
            raise ConfigError(
                f"search.refit cannot change {name}",
                got=value,
                rule=_FIXED.get(name, f"The model of a refit has the search's {section}"),
                fix=f"Leave it out, or set {name} of the whole job",
            )


def _has(job: TrainJob, name: str, value: Any) -> bool:
    """Has every refit of the job this value anyway?"""
    if name == "train.result":
        return bool(value == "last")  # whatever the job's is
    if name == "table.version" and value is None:
        return True  # whichever was searched on
    return changes_nothing(job, {name: value})


def check_splits(job: TrainJob, cfg: SearchConfig, pinned: Pinned) -> None:
    """Raise ConfigError if a refit would train on a split that has no rows, or on test images,
    which are to judge its model. Of heads alone: they stay as they are then (`never`)."""
    if not cfg.trains_again:
        return
    changes = _changes(job, cfg.refit_changes or {})
    of_feed = {name: changes[name] for name in changes if name.startswith("feed.")}
    feed = replaced(job, of_feed).feed
    unknown = sorted(set(pinned.parts(feed.train)) - pinned.splits)
    if unknown:
        raise ConfigError(
            f"search.refit would train on split {unknown[0]!r}, which the table does not have",
            got=feed.train,
            rule=f"It has {', '.join(sorted(pinned.splits))}",
            fix="Leave search.refit.feed.train out",
        )
    both = pinned.common(feed.train, feed.test)
    if both:
        raise ConfigError(
            f"search.refit would train on split {both[0]!r}, which is to test its model",
            got=f"feed.val={job.feed.val}, feed.test={feed.test}",
            rule="It trains on training and validation images",
            fix="Give the table three splits (raypipe ingest makes them), or set search.refit=null",
        )


def wanted(job: TrainJob, cfg: SearchConfig, pinned: Pinned) -> dict[str, Any] | None:
    """What a refit changes beside the images; None: there is none, or heads stay as they are."""
    return None if never(job, cfg, pinned) else cfg.refit_changes


def never(job: TrainJob, cfg: SearchConfig, pinned: Pinned) -> str:
    """Why search.refit=heads fits no head again, however much time there is; "": it may.

    Validation has something else to do, or too few other images would say how good the model is:
    for its card, for the reference of drift checks, and for their estimate of accuracy.
    """
    if cfg.refit is None or cfg.trains_again:
        return ""
    test = job.feed.test
    if job.model.calibrate:
        return "model.calibrate fits a temperature on validation images"
    if pinned.common(str(splits(job)["feed.train"]), test):
        return f"feed.test={test} has images that it would learn"
    images = pinned.counts[test]
    least = min(FEWEST_TESTS, pinned.counts[job.feed.val])
    if images < least:
        return f"feed.test={test} has {images:,} labelled images, and {least} are needed to test it"
    return ""


def _refitted(job: TrainJob, changes: dict[str, Any], without: str) -> TrainJob:
    """`replaced`, whose error names one more way out. Raises ConfigError, too, if not each worker
    would have an image of a batch, and in the job each has."""
    try:
        new = replaced(job, changes)
        if why := new.train.newly_too_few(job.train):
            raise ConfigError("The refit would have too few images", rule=why)
        return new
    except ConfigError as e:
        fix = f"{e.fix}, or {without}" if e.fix else f"Or set {without}"
        raise ConfigError(e.what, got=e.got, rule=e.rule, fix=fix) from None


def _heads(job: TrainJob) -> Iterator[TrainJob]:
    """The job with each head of a first answer."""
    for reading in contenders.readings(job.model):
        for changes in contenders.heads(reading, job.model, job.train):
            with suppress(ConfigError):  # one that the job refuses is not fitted
                yield replace(job, changes)


def job_of(job: TrainJob, wanted: dict[str, Any], result: SearchResult) -> TrainJob:
    """The refit's job, on the version of the table that was searched on.

    job: the search's, whose splits are joined. wanted: search.refit.

    A fine-tuned model starts from the best trial's weights: what a trial learned at 96 px need not
    be learned again at 224 px. A head on frozen features starts anew, because it is fitted to the
    features of one resolution.

    Raises DataError if the best trial's weights are not finite, ConfigError if its job refuses the
    changes.
    """
    _require_usable(result)
    # The version comes last: `wanted` may repeat the job's, where null is the newest one.
    changes = _changes(job, wanted) | {"table.version": result.best.version.version}
    reshapes = any(name in _SHAPE or name.startswith("model.options") for name in changes)
    if result.job.model.mode == "finetune" and not reshapes:
        # A start_from of the user's own wins.
        changes = {"train.start_from": result.best.checkpoint} | changes
    elif reshapes:
        # Weights that the search itself started from do not fit either.
        changes = {"train.start_from": None} | changes
    return _refitted(result.job, _last_values(result, changes) | changes, "search.refit=null")


def _last_values(result: SearchResult, changes: dict[str, Any]) -> dict[str, Any]:
    """Changes for a best trial whose values differ by epoch (PBT).

    A refit from its weights takes its last values. A refit from the beginning repeats its schedule,
    as far as it trains.
    """
    # Its weights have the whole schedule behind them.
    if changes.get("train.start_from") is not None:
        return result.trials[0].changes | {"by_epoch": {}}
    # Lines beyond the last epoch would be refused by the job.
    epochs = int(changes.get("train.epochs", result.job.train.epochs))
    schedule = result.job.by_epoch
    return {"by_epoch": {epoch: schedule[epoch] for epoch in schedule if epoch < epochs}}


def _require_usable(result: SearchResult) -> None:
    """Raise DataError if the best trial's metric or weights are not finite.

    A refit would start from these weights, or repeat the training that lost them.
    """
    metric = result.trials[0].metric
    if not math.isfinite(metric):
        raise DataError(
            "The search's best trial has no usable epoch",
            got=f"{result.metric} {metric}",
            rule="A refit trains settings again that trained once",
            fix="Lower train.lr in search.space, and search again",
        )
    path = result.best.checkpoint
    weights = checkpoint.read_model(Path(path)).weights
    finite.require_weights(weights, path, "Lower train.lr in search.space, and search again")


def planned(job: TrainJob, result: SearchResult) -> trainer.Plan:
    """The training of `job` (from `job_of`), whose key is that of the model."""
    pinned = pin(job.table, job.feed, result.best.classes, job.model.task, result.pinned)
    return trainer.plan(job, pinned)


def refit(
    planned: trainer.Plan,
    result: SearchResult,
    progress: Report,
    report_position: ReportPosition,
    until: float | None = None,
) -> SearchResult:
    """`result` with the model that `planned` trains.

    A finished refit is read again, and an interrupted one continues. The search's key stays; the
    model has the key of its training, so another refit of the same search is another model. until:
    see trainer.run.
    """

    def told(metrics: dict[str, float], state: LoopState) -> None:
        # Nobody should read what it says of images that it has learned.
        progress(_without_validation(metrics), state)

    trained = trainer.run(planned, told, report_position, until)
    return with_(
        result,
        job=planned.job,
        # Validation images were trained on, so their metrics say nothing any more.
        best=without_validation(trained),
        members=(),
        refitted=True,
        again=(result.trials[0].name,),
        pinned=planned.pinned,
    )


def unfinished(done: SearchResult) -> str | None:
    """Why a refit is no model; None: it came to the end of its schedule.

    A rule of train.stopping, the clock or a loss of NaN may have ended it before.
    """
    # A head that is fitted at once has no schedule.
    if done.job.train.solver != "steps":
        return None
    # Its weights are those of the last epoch that was no NaN.
    last = done.best.best_epoch + 1 if done.job.train.result == "last" else len(done.best.history)
    share = last / done.job.train.epochs
    if done.job.train.anneal_s is not None:
        state = checkpoint.read_model(Path(done.best.checkpoint), hashes=False).state
        share = state.progress or 0.0
    return None if share >= ANNEALED else f"it came to {share:.0%} of its schedule"


def why_diverged(error: RaypipeError) -> str:
    """What to say of a refit without a usable epoch: it costs itself alone. Any other error is
    raised again."""
    if error.what != trainer.DIVERGED:
        raise error
    at = "" if error.got is None else f" ({error.got})"
    return (
        f"it diverged{at}, and what validation chose stays. Set a lower "
        "search.refit.train.lr, or search.refit.train.clip_norm"
    )


def without_validation(trained: TrainResult) -> TrainResult:
    """The result without its metrics on validation images."""
    history = tuple(map(_without_validation, trained.history))
    return with_(trained, metrics=history[trained.best_epoch], history=history)


def _without_validation(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("val_")}


def summary(result: SearchResult) -> dict[str, str]:
    """A line about the refit for the user; {} if there was none."""
    if not result.refitted:
        return {}
    job = result.job
    count = len(result.best.history)
    epochs = f"{count} epoch{'s' * (count != 1)} at {job.model.pixels} px"
    if job.train.solver != "steps":
        epochs = f"fitted at once at {job.model.pixels} px"
    again = len(result.again)
    if result.stay:
        # The first member may be one of the others.
        epochs = f"{again} of {len(result.members)} members: {', '.join(result.again)}"
    elif again > 1:
        epochs = f"all {again} members; {result.again[0]}: {epochs}"
    return {"trained again": f"on {job.feed.train}, {epochs}"}


def replaced(job: TrainJob, changes: dict[str, Any]) -> TrainJob:
    """The job with these changes. Raises ConfigError that names search.refit.

    After the search the best trial may refuse what the job did not. Then nothing is lost: the next
    run reads the finished search.
    """
    try:
        return replace(job, changes)
    except ConfigError as e:
        raise ConfigError(f"search.refit: {e.what}", got=e.got, rule=e.rule, fix=e.fix) from None


def _changes(job: TrainJob, wanted: dict[str, Any]) -> dict[str, Any]:
    """What every refit changes, and then what the user wants changed."""
    return splits(job) | wanted


def side_of(job: TrainJob, wanted: Mapping[str, Any]) -> int:
    """The side of the refit's images in px. null in search.refit is the backbone's own."""
    model = {name: value for name, value in wanted.items() if name.startswith("model.")}
    return replaced(job, model).model.pixels if "model.side_px" in model else job.model.pixels


def learned(job: TrainJob, wanted: dict[str, Any]) -> str:
    """The split, or splits, that a refit trains on. wanted: search.refit."""
    return str(_changes(job, wanted)["feed.train"])


def splits(job: TrainJob) -> dict[str, Any]:
    """The changes with which a job trains on validation images too, to its last epoch."""
    train, val = job.feed.train, job.feed.val
    # The splits are written as names joined by +; validation may be part of training already.
    included = val == train or train.endswith(f"+{val}")
    both = train if included else f"{train}+{val}"
    # Rules that judge by validation would judge by what was trained on.
    blind = {f"train.stopping.{rule}": None for rule in _JUDGES}
    return {"feed.train": both, "train.result": "last", **blind}
