"""The plan of a search, and of a retrain, which searches around the champion."""

from __future__ import annotations

import math
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from raypipe.config import replace as changed
from raypipe.config import validate
from raypipe.costs import estimate
from raypipe.costs.estimate import Part
from raypipe.feed.dataset import Pinned, pin
from raypipe.registry import of_task
from raypipe.search import feasible, first_answer, refit, tuner, variants
from raypipe.search.schedulers.halving import rungs
from raypipe.search.searchers import tune_searchers
from raypipe.search.settings import SearchConfig
from raypipe.search.space.space import Space
from raypipe.search.trials.trial import data_key
from raypipe.search.trials.trial_resources import at_once, gpu_share, plan_resources
from raypipe.train.auto import finders
from raypipe.train.job import TrainJob
from raypipe.watch import around, heads, labels
from raypipe.work.dry_run import predicting, training
from raypipe.work.dry_run.at import At, check_registry, data, model_facts, training_job, unfound
from raypipe.work.dry_run.training import afterwards, within
from raypipe.work.planned import Planned
from raypipe.work.result import Facts

MOST_KINDS = 3  # backbones and resolutions that are measured


def tune(at: At) -> Planned:
    check_registry(at.job)
    parts, facts, missing = _search(at, at.job.training, at.job.search)
    return Planned("tune", facts, parts, most=True, missing=", ".join(missing))


def _search(
    at: At, given: TrainJob, cfg: SearchConfig
) -> tuple[tuple[Part, ...], Facts, list[str]]:
    """The parts of a search, its facts, and what is not estimated.

    Raises ConfigError, ClusterError and DataError as the search does before its first trial.
    """
    # As the search itself decides train.workers=auto.
    given = feasible.one_worker(given)
    job, counts, pinned = training_job(given)
    cfg, space = feasible.check(given, cfg, pinned, at.resources)
    # A budget may have room for fewer epochs.
    train = job.train.model_copy(update={"epochs": space.job.train.epochs})
    job = job.model_copy(update={"train": train})
    kept = _kept(space, cfg, pinned)
    space, limited = _within_limits(space.of(job), cfg, pinned)
    if space.all_barred:
        return (), data(pinned) | at.facts() | limited | kept, ["the first answer"]
    planned = tune_searchers.plan(job, cfg, space, [])
    total = len(planned)
    resources = plan_resources(job, cfg, at.resources, total)
    # Tune starts no more trials than there are CPUs and GPUs for, whatever a search asks for.
    beside = at_once(resources, at.resources, total)
    if space.by_clock:
        planned = planned[:beside]
        total = len(planned)
    # Trials may draw how many epochs they train, or a solver that looks once at all images.
    solvers = [changes.get("train.solver", job.train.solver) for changes in planned]
    whole = 0
    for changes, solver in zip(planned, solvers, strict=True):
        epochs_of = int(changes.get("train.epochs", job.train.epochs))
        whole += epochs_of if solver == "steps" else 1
    epochs = min(_epochs(cfg, space.most_epochs, total), whole)

    # Trials of one backbone and resolution take about the same.
    kinds: dict[str, list[TrainJob]] = {}
    for changes in planned:
        trial = changed(job, changes)
        kinds.setdefault(data_key(trial), []).append(trial)
    measured = list(kinds.values())[:MOST_KINDS]
    of_measured = sum(len(kind) for kind in measured)

    # A trial of one worker has one CPU, and others run beside it.
    neighbours = min(beside, os.cpu_count() or 1) - 1 if job.train.workers == 1 else -1
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
        # Trials of several workers share the CPUs: together they are as fast as these.
        least_s = 0.0 if at.where(trial).gpu else loop.cpu_s / at.where(trial).cpus
        trials.append(replace(loop, seconds=max(least_s, loop.seconds / beside)))

    # What they share comes before and after them.
    parts = [
        estimate.START.part("start", found.slowness),
        estimate.WORKER.part("trials' processes", found.slowness, beside),
        estimate.SEARCH.part("Tune", found.slowness),
        *once,
        replace(estimate.total(trials), name="trials"),
        estimate.TRIAL.part("changes of trials", found.slowness, _begun(cfg, total)),
        *afterwards(job, counts, found, at.where(job)),
    ]

    # What people see.
    facts = data(pinned) | model_facts(job, pinned) | at.facts() | limited
    # A trial's own, where trials draw them.
    models = [kind[0].model for kind in kinds.values()]
    facts["model"] = "; ".join(f"{m.name}, {m.mode}, {m.pixels} px" for m in models)
    many = f"{total}" if cfg.budget_s is None else f"as many as there is time for, {total} at most"
    if space.by_clock:
        many = f"{total}, each as long as there is time for"
    facts["trials"] = f"{many}, {beside} at a time, {cfg.searcher} and {cfg.scheduler}"
    facts |= _drawn(cfg, space, epochs, whole) | kept
    if "steps" not in solvers:
        facts["epochs"] = f"none: train.solver={', '.join(sorted(set(solvers)))}"
    if len(kinds) > MOST_KINDS:
        facts["measured"] = f"{MOST_KINDS} of {len(kinds)} kinds of images and backbones"
    auto = unfound(given, pinned, space.always)
    if "train.batch_size" in auto:
        facts["batch"] = f"{job.train.batch_size} assumed: train.batch_size=auto is not found yet"
    missing = [f"finding {name}" for name in auto]
    if cfg.first_answer:
        missing.append("the first answer, a minute at most")
    if cfg.soup > 1 or cfg.ensemble > 1:
        missing.append("the choice of a soup or an ensemble")
    if cfg.refit is not None:
        of = "the ensemble's members" if cfg.ensemble > 1 else "the best trial's settings"
        why = refit.never(given, cfg, pinned)
        if not cfg.trains_again:
            of = "heads on frozen features"
        facts["refit"] = f"none: {why}" if why else f"{of} once more: not estimated"
        missing += [] if why else ["the refit"]
    # As the search's monitor counts them.
    workers = beside * resources.trial.get("GPU", float(job.train.most_workers))
    stopping = cfg.stopping
    if cfg.limits.money is not None:
        money = min(cfg.limits.money, stopping.money or math.inf)
        stopping = stopping.model_copy(update={"money": money})
    if cfg.budget_s is not None:
        facts["budget"] = f"{cfg.budget_s:,.0f} s for all of it (search.budget_s)"
        # As many trials as the other parts leave time for.
        others_s = sum(part.seconds for part in parts if part.name != "trials")
        left_s = max(1.0, cfg.budget_s - others_s)
        limit_s = min(left_s, stopping.seconds or left_s)
        stopping = stopping.model_copy(update={"seconds": limit_s})
    return tuple(within(parts, stopping, workers)), facts, missing


def _drawn(cfg: SearchConfig, space: Space, epochs: float, whole: int) -> Facts:
    """What trials draw, and how long they train.

    epochs: of all trials together, expected; whole: if none of them ended early.
    """
    drawn = {field.name for field in space.fields}
    facts: Facts = {"searched": ", ".join(cfg.space or {})}
    if "train.batch_size" in drawn:
        facts["batch"] = "each trial draws its own"
    facts["epochs"] = f"{epochs:,.0f} of {whole:,}, as {cfg.scheduler} saves them"
    if cfg.budget_s is not None:
        most = f"{'up to ' * ('train.epochs' in drawn)}{space.most_epochs:,}"
        ends = "the time" if cfg.scheduler == "none" else cfg.scheduler
        facts["epochs"] = f"{most} of a trial, unless {ends} ends it earlier"
    if cfg.stopping.epochs is not None:
        facts["epochs"] += f", at most {cfg.stopping.epochs:,} (search.stopping.epochs)"
    return facts


def _kept(space: Space, cfg: SearchConfig, pinned: Pinned) -> Facts:
    """Whether an earlier run has the trials, or some of them. cfg, space: as `feasible.check` has
    filled them in."""
    share = gpu_share(space.job, cfg)
    job = finders.found(space.job, pinned, space.always, share)
    folder = job.run.path / "search" / tuner.name_of(job, cfg, space, pinned.version)
    if (folder / "result.json").exists():
        return {"kept": f"the trials of this search have ended, in {folder}: it takes their result"}
    if (folder / "config.yaml").exists():
        return {"kept": f"an interrupted search goes on, in {folder}"}
    return {}


def _within_limits(space: Space, cfg: SearchConfig, pinned: Pinned) -> tuple[Space, Facts]:
    """The space without what breaks search.limits, and what is said of it.

    The models are measured here as the search measures them before its first trial; another
    machine has other times. Raises ConfigError as the search does.
    """
    if not cfg.limits.of_models:
        return space, {}
    heads = first_answer.models(space.job, pinned) if cfg.first_answer else []
    with tempfile.TemporaryDirectory() as folder:
        space = variants.limited(space, cfg, pinned, Path(folder), heads)
        found = variants.read(Path(folder))
    broken = sorted(filter(None, (one.breaks(cfg.limits) for one in found.values())))
    said = f"{len(broken)} of {len(found)} models break search.limits and are left out"
    said = ": ".join([said, "; ".join(broken)]) if broken else f"all {len(found)} models keep them"
    if space.all_barred:
        said += ". No trial may begin: the first answer is the model"
    return space, {"limits": said}


def _begun(cfg: SearchConfig, total: int) -> int:
    """Trials that begin, at most: one that is worth its process takes more than a second."""
    return total if cfg.budget_s is None else min(total, int(cfg.budget_s) + 1)


def _epochs(cfg: SearchConfig, epochs: int, trials: int) -> float:
    """Epochs of all trials together, as the scheduler leaves them."""
    most = float(epochs * trials)
    if cfg.scheduler in ("asha", "pasha", "hyperband"):
        found = rungs(epochs, min(cfg.grace, epochs), cfg.reduction)
        most = estimate.halving_epochs(trials, found, cfg.reduction)
    return min(most, float(cfg.stopping.epochs or most))


def retrain(at: At) -> Planned:
    """The check, and the challenger that follows if there is drift."""
    job = at.job
    pinned = pin(job.table, job.feed, kind=job.model.task)
    check = Planned("drift", {})
    if job.watch.batch is not None or not job.watch.force:
        check = predicting.drift(at)
    facts = {f"check: {name}": value for name, value in check.what.items()}

    # A challenger starts from the champion's settings, not from the job's.
    package = predicting.champion(job)
    name = job.registry.model or job.run.name
    of_task.require_same("The challenger", job.model.task, f"of {name}", package.task.kind)
    theirs = validate(TrainJob, package.info["config"])
    labelled = labels.labelled_by_source(job.training, pinned)
    version = pinned.version.version
    first = around.challenger(
        job.training, job.watch, job.search.refit_changes, theirs, version, labelled
    )
    members = heads.of_champion(package, first, job.watch)
    if members:
        opened = pin(first.table, first.feed, kind=first.model.task, opened=pinned)
        of_first, *others = heads.jobs(members, first, refit.wanted(first, job.search, opened))
        trained, found, missing = training.parts_of(at, of_first)
        found["challenger"] = f"the champion's {len(members)} heads, fitted again"
        missing = [*missing, *(["what the other heads read"] if others else [])]
    elif around.is_search(job.watch, job.search, first.model.mode == "frozen"):
        base, cfg = around.searched(job.search, job.watch, first)
        trained, found, missing = _search(at, base, cfg)
    else:
        trained, found, missing = training.parts_of(at, first)
    missing = [*filter(None, [check.missing]), *missing, "the comparison of two models"]
    return Planned("retrain", facts | found, (*check.parts, *trained), True, ", ".join(missing))
