"""The plan of a search, and of a retrain, which searches around the champion."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from raypipe.config import replace as changed
from raypipe.costs import estimate
from raypipe.costs.estimate import Counts, Part
from raypipe.feed.dataset import Pinned
from raypipe.search.schedulers.halving import rungs
from raypipe.search.searchers import tune_searchers
from raypipe.search.settings import SearchConfig
from raypipe.search.space import defaults, parse
from raypipe.search.space.space import Changes, Space
from raypipe.search.trials.trial import data_key
from raypipe.search.trials.trial_resources import plan_resources
from raypipe.train.job import TrainJob
from raypipe.train.launch import wants_gpu
from raypipe.work.dry_run.at import At, data, model_facts, training_job
from raypipe.work.dry_run.predicting import champion, predictions
from raypipe.work.dry_run.training import afterwards, within
from raypipe.work.planned import Planned
from raypipe.work.result import Facts

MOST_KINDS = 3  # backbones and resolutions that are measured


def tune(at: At) -> Planned:
    job, counts, pinned = training_job(at.job)
    cfg, space = _space(at, job, at.job.search, pinned)
    planned = tune_searchers.plan(job, cfg, space, [])
    parts, facts = _search(at, job, cfg, planned, pinned, counts)
    if cfg.refit is not None:
        facts["refit"] = "the best trial's settings once more: not estimated"
    missing = "the refit" if cfg.refit is not None else ""
    return Planned("tune", facts, tuple(within(parts, cfg.stopping.seconds)), True, missing)


def _space(at: At, job: TrainJob, cfg: SearchConfig, pinned: Pinned) -> tuple[SearchConfig, Space]:
    gpu = wants_gpu(job.train, dict(at.resources))
    cfg = defaults.with_default_space(job, cfg, pinned.counts, gpu)
    return cfg, parse.parse(cfg.space or {}, job)


def _search(
    at: At,
    job: TrainJob,
    cfg: SearchConfig,
    planned: Sequence[Changes],
    pinned: Pinned,
    counts: Counts,
) -> tuple[list[Part], Facts]:
    """The parts of a search, and its facts."""
    total = len(planned)
    side_by_side = plan_resources(job, cfg, at.resources, total).concurrent
    at_once = max(1, min(side_by_side, total))
    epochs = _epochs(cfg, job.train.epochs, total)

    # Trials of one backbone and resolution take about the same.
    kinds: dict[str, list[TrainJob]] = {}
    for changes in planned:
        trial = changed(job, changes)
        kinds.setdefault(data_key(trial), []).append(trial)
    measured = list(kinds.values())[:MOST_KINDS]
    of_measured = sum(len(kind) for kind in measured)

    # A trial of one worker has one CPU, and others run beside it.
    neighbours = min(at_once, os.cpu_count() or 1) - 1 if job.train.workers == 1 else -1
    at.show.say("Measuring some images on this machine")
    trials, once = [], []
    for kind in measured:
        trial = kind[0]
        found = at.measured(trial, pinned, int(trial.train.batch_size), neighbours)
        share = epochs * len(kind) / of_measured
        frozen = trial.model.mode == "frozen"
        # What they train on is decoded before the first one starts.
        made, loop = estimate.training(counts, share, found, at.where(trial), "cache", frozen)
        once.append(made)
        trials.append(replace(loop, seconds=loop.seconds / at_once))

    # What they share comes before and after them.
    parts = [
        estimate.START.part("start", found.slowness),
        estimate.WORKER.part("trials' processes", found.slowness, at_once),
        estimate.SEARCH.part("Tune", found.slowness),
        *once,
        replace(estimate.total(trials), name="trials"),
        estimate.TRIAL.part("changes of trials", found.slowness, total),
        *afterwards(job, counts, found, at.where(job)),
    ]

    # What people see.
    facts = data(pinned) | model_facts(job, pinned) | at.facts()
    facts["trials"] = f"{total}, {at_once} at a time, {cfg.searcher} and {cfg.scheduler}"
    facts["searched"] = ", ".join(cfg.space or {})
    facts["epochs"] = (
        f"{epochs:,.0f} of {total * job.train.epochs:,}, as {cfg.scheduler} saves them"
    )
    if len(kinds) > MOST_KINDS:
        facts["measured"] = f"{MOST_KINDS} of {len(kinds)} kinds of images and backbones"
    return parts, facts


def _epochs(cfg: SearchConfig, epochs: int, trials: int) -> float:
    """Epochs of all trials together, as the scheduler leaves them."""
    if cfg.scheduler in ("asha", "pasha", "hyperband"):
        found = rungs(epochs, min(cfg.grace, epochs), cfg.reduction)
        return estimate.halving_epochs(trials, found, cfg.reduction)
    return float(epochs * trials)


def retrain(at: At) -> Planned:
    """The check, and the search for a challenger that follows if there is drift."""
    job, counts, pinned = training_job(at.job)
    facts: Facts = {}
    parts: tuple[Part, ...] = ()
    if at.job.watch.batch is not None:
        facts, parts = predictions(at, at.job.watch.batch)
        facts = {f"check: {name}": value for name, value in facts.items()}
    champion(at.job)
    trials = at.job.watch.retrain_samples
    around = SearchConfig(samples=trials, scheduler="none")
    search, found = _search(at, job, around, [{}] * trials, pinned, counts)
    facts |= found
    del facts["searched"]
    missing = "the tests in their sidecar, a refit, and the comparison of two models"
    return Planned("retrain", facts, (*parts, *search), most=True, missing=missing)
