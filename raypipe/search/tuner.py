"""search(job) -> leaderboard: Ray Tune with ASHA over any config field; the best trial's model is kept.

The search's folder is named by what determines it: after a kill the same command restores finished trials and runs the rest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace as with_
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import tune

from raypipe.config import key_of, replace, save
from raypipe.errors import ConfigError, RaypipeError
from raypipe.feed.dataset import pin
from raypipe.feed.feed import Source, await_decoded
from raypipe.search import leaderboard, refit, soup
from raypipe.search.leaderboard import SearchResult, Trial
from raypipe.search.schedulers import mutations, pbt
from raypipe.search.schedulers.tune_schedulers import drawn_ahead, memory, scheduler
from raypipe.search.searchers import optuna_search
from raypipe.search.searchers.tune_searchers import candidates, plan, searcher
from raypipe.search.settings import SearchJob
from raypipe.search.space import defaults
from raypipe.search.space import parse as spaces
from raypipe.search.space.space import Changes, Space
from raypipe.search.trials import tune_patches
from raypipe.search.trials.monitor import Listener, Monitor, Stop
from raypipe.search.trials.multi_worker_trial import GroupTrial
from raypipe.search.trials.trial import data_key, folder_name, run_trial
from raypipe.search.trials.trial_resources import gpu_share, plan_resources
from raypipe.search.warm_start import earlier
from raypipe.train.auto import finders
from raypipe.train.job import TrainJob
from raypipe.train.launch import check_workers, wants_gpu
from raypipe.train.trainer import check_start, prepare
from raypipe.train.worker import Data, validate

log = logging.getLogger("raypipe")


def check(job: SearchJob, counts: Mapping[str, int] | None = None) -> tuple[SearchJob, Space]:
    """The job with its space, parsed, when the search can run. Raises ConfigError or ClusterError before anything is written.
    A default space depends on `counts`, the labelled images of each split."""
    check_workers(job.train, ray.cluster_resources())
    if job.search.searcher != "random":
        optuna_search.require()
    if job.by_epoch:
        raise ConfigError(
            "A search draws its trials' values, and by_epoch would set them again",
            got=f"by_epoch={job.by_epoch}",
            fix="Set by_epoch={}; search.scheduler=pbt finds values by epoch",
        )
    job = defaults.settle(job, counts or {}, wants_gpu(job.train, ray.cluster_resources()))
    space = spaces.parse(job.search.space or {}, job)
    for name in ("train.batch_size", "train.lr"):
        if "auto" in space.values(name):
            raise ConfigError(
                f"A search cannot draw {name}=auto",
                rule="auto is found once, before the search",
                fix="Draw numbers",
            )
    if job.search.populated:
        pbt.check(job, space)
    refit.check(job)
    check_start(job)
    plan_resources(job, ray.cluster_resources(), job.search.samples * len(space.cells))
    return job, space


def search(
    job: SearchJob, progress: Listener = lambda done, total, standings: None
) -> SearchResult:
    """Search, or pick up where an interrupted search stopped. `progress` hears how the trials stand, whenever one reports."""
    pinned = pin(job.table, job.feed, kind=job.model.task)
    job, space = check(job, pinned.counts)
    job = finders.settle(job, pinned, lambda: prepare(job, pinned), space.always, gpu_share(job))
    space = space.of(job)
    key = key_of(
        job.training_key(pinned.version), job.search.model_copy(update={"refit": None})
    )  # it comes after the search
    folder = job.run.path / "search" / key
    finished = folder / "result.json"
    started = time.perf_counter()
    if not finished.exists():
        save(job, folder / "config.yaml")
        hints = earlier(job, space, folder)
        planned = plan(job, space, hints)
        data = _data(job, pinned, candidates(job, space, planned))
        draws = partial(searcher, job, space, planned, hints, folder)
        chosen = (
            pbt.population(job, space, folder)
            if job.search.populated
            else scheduler(job, len(planned))
        )
        trials, stopped = _run(job, draws, chosen, len(planned), data, folder, progress)
        mutations.write_schedule(folder / "schedule.yaml", trials[0].schedule)
        _cook(job, trials, data, folder)
        leaderboard.write(finished, trials, stopped, _decoded(data))
    ranked, stopped, decoded = leaderboard.read(finished)
    best, mixed = ranked[0], soup.read(folder)
    if best.checkpoint is None:  # as an older version may have kept it
        raise _nothing_usable(len(ranked), folder)
    trained = leaderboard.as_training(key, pinned.version, pinned.classes, best)
    if mixed is not None:
        trained = with_(trained, metrics=mixed.metrics, checkpoint=mixed.checkpoint)
    return SearchResult(
        key,
        mutations.job_of(space.job, best.changes, best.schedule),
        trained,
        ranked,
        job.train.stopping.metric,
        time.perf_counter() - started,
        stopped,
        decoded,
        job.train.epochs * len(ranked),
        mixed.members if mixed else (),
    )


def _data(job: TrainJob, pinned: Any, trials: Iterable[Changes]) -> dict[str, Data]:
    """The arrays of every backbone and resolution that a trial may draw, each read once."""
    data: dict[str, Data] = {}
    here = _alone()
    for changes in trials:
        one = replace(
            job, {**changes, "feed.carrier": "cache"}
        )  # a stream per trial would decode the table once per trial
        if data_key(one) not in data:
            data[data_key(one)] = prepare(
                one, pinned, here
            )  # processes that wait for work are left to the trials
    await_decoded(_sources(data))
    return data


def _alone() -> bool:
    """Is this the cluster's only node?"""
    return len([node for node in ray.nodes() if node["Alive"]]) == 1


def _sources(data: dict[str, Data]) -> list[Source]:
    """Each once: a split may be both training and validation."""
    return list({id(s): s for d in data.values() for s in (d.train, d.val)}.values())


def _cook(job: SearchJob, trials: list[Trial], data: dict[str, Data], folder: Path) -> None:
    """The soup of the best trials that train on the best one's arrays, if the search wants one."""
    if job.search.soup == 1:
        return
    first = replace(job, trials[0].changes)
    alike = [t for t in trials if data_key(replace(job, t.changes)) == data_key(first)][
        : job.search.soup
    ]
    rule = job.train.stopping
    soup.cook(
        alike,
        lambda weights: validate(first, data[data_key(first)], weights),
        rule.metric,
        rule.mode,
        folder,
    )


def _decoded(data: dict[str, Data]) -> int:
    """Images decoded for all trials together."""
    return sum(source.decoded for source in _sources(data))


def _run(
    job: SearchJob,
    draws: Callable[[int], Any],
    chosen: Any,
    total: int,
    data: dict[str, Any],
    folder: Path,
    progress: Listener,
) -> tuple[list[Trial], str | None]:
    cfg, rule = job.search, job.train.stopping
    room = plan_resources(job, ray.cluster_resources(), total)
    given = {
        "job": job.model_dump(mode="json", include=set(TrainJob.model_fields)),
        "data": data,
        "trials": str(folder / "trials"),
    }
    if room.worker is None:
        trainable = tune.with_parameters(run_trial, **given)
    else:
        trainable = tune.with_parameters(GroupTrial, **given, worker=room.worker)
    trainable = tune.with_resources(trainable, room.trial)
    Monitor.listener, Monitor.current = staticmethod(progress), None
    watch = Monitor(
        total,
        rule.metric,
        rule.mode,
        cfg.stopping,
        room.trial.get("GPU", float(job.train.most_workers)),
    )
    run_config = tune.RunConfig(
        name="tune",
        storage_path=str(folder),
        callbacks=[watch, *memory(chosen)],
        stop=Stop(),
        checkpoint_config=tune.CheckpointConfig(
            checkpoint_frequency=1 if room.worker else 0
        ),  # pointers: all are kept
        failure_config=tune.FailureConfig(max_failures=1),
        verbose=0,
    )
    tuner = _restored(folder / "tune", trainable) or tune.Tuner(
        trainable,
        tune_config=tune.TuneConfig(
            metric=rule.metric,
            mode=rule.mode,
            num_samples=total,
            scheduler=chosen,
            search_alg=draws(drawn_ahead(job, total, room.concurrent)),
            trial_dirname_creator=folder_name,
            reuse_actors=True,
        ),
        run_config=run_config,
    )
    with tune_patches.applied(multi_worker=room.worker is not None):
        results = tuner.fit()
    trials = [_line(result, job, folder) for result in _begun(results)]
    stopped = Monitor.current.stopped if Monitor.current else None
    if stopped and not trials:
        raise RaypipeError(
            "The search stopped before its first result",
            got=stopped,
            fix="Raise the limit in search.stopping",
        )
    if all(t.checkpoint is None for t in trials):  # none has a usable epoch
        raise _nothing_usable(len(trials), folder)
    ranked = leaderboard.ranked(trials, rule.metric, rule.mode)
    standings = leaderboard.standings(ranked, rule.metric, rule.mode)
    progress(total, total, standings)  # Tune tells of a trial's end before it counts as ended
    return ranked, stopped


def _nothing_usable(trials: int, folder: Path) -> RaypipeError:
    return RaypipeError(
        f"Every one of {trials} trials failed or diverged",
        got=str(folder),
        fix="The trials' error.txt files there say why; without one, lower train.lr",
    )


def _line(result: Any, job: SearchJob, folder: Path) -> Trial:
    line = leaderboard.trial_of(
        result, job.train.stopping.metric, job.train.stopping.mode, job.train, folder / "trials"
    )
    failed = Monitor.current.failures.get(line.name, 0) if Monitor.current else 0
    schedule = line.schedule or mutations.schedules(folder).get(line.name, ())
    return with_(line, failures=failed, schedule=schedule)


def _begun(results: Any) -> Iterator[Any]:
    """The results of trials that trained: of one that was still to start when the search stopped, Tune knows no folder."""
    for i in range(len(results)):
        try:
            result = results[i]
        except ValueError:
            continue
        if result.checkpoint is not None or result.error is not None:
            yield result


def _restored(folder: Path, trainable: Any) -> Any | None:
    """The interrupted search in `folder`, or None. A search killed while Tune wrote its state cannot be restored: it is put
    aside, and the trials run again."""
    if not tune.Tuner.can_restore(str(folder)):
        return None
    try:
        tuner = tune.Tuner.restore(
            str(folder), trainable, resume_unfinished=True, resume_errored=True
        )
    except Exception as e:
        aside = folder.with_name(f"{folder.name}-torn-{int(time.time())}")
        folder.rename(aside)
        log.warning(
            "The interrupted search cannot be restored (%s); it is kept in %s",
            type(e).__name__,
            aside,
        )
        return None
    log.info("Going on with the interrupted search in %s", folder)
    return tuner
