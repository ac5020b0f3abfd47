"""search(job) -> leaderboard: Ray Tune with ASHA over any config field; the best trial's model is kept.

ASHA (Li et al. 2020) stops a trial at a rung when it is not among the best 1/`reduction` of those that came that far. The
search's folder is named by what determines it: after a kill the same command restores finished trials and runs the rest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace as with_
from pathlib import Path
from typing import Any

import ray
from ray import tune

from raypipe.config import key_of, replace, save
from raypipe.errors import ConfigError, RaypipeError
from raypipe.feed.dataset import pin
from raypipe.search import leaderboard, pbt
from raypipe.search import space as spaces
from raypipe.search.group import GroupTrial
from raypipe.search.leaderboard import SearchResult, Trial
from raypipe.search.monitor import Monitor, Stop
from raypipe.search.schedulers import scheduler
from raypipe.search.searchers import searcher
from raypipe.search.settings import SearchJob
from raypipe.search.slots import slots
from raypipe.search.trial import data_key, run_trial
from raypipe.train import finders
from raypipe.train.job import TrainJob
from raypipe.train.launch import check_workers
from raypipe.train.trainer import prepare

log = logging.getLogger("raypipe")


def check(job: SearchJob) -> dict[str, Any]:
    """Ray Tune's parameter space, when the search can run. Raises ConfigError or ClusterError before anything is written."""
    for name in ("train.batch_size", "train.lr"):
        if "auto" in spaces.values(job.search.space, name):
            raise ConfigError(
                f"A search cannot draw {name}=auto", rule="auto is found once, before the search", fix="Draw numbers"
            )
    check_workers(job.train, ray.cluster_resources())
    slots(job, ray.cluster_resources(), job.search.samples * spaces.grid_size(job.search.space))
    parsed = spaces.parse(job.search.space, job)
    if job.search.populated:
        pbt.check(job)
    return parsed


def search(job: SearchJob, progress: Callable[[int, int, float], None] = lambda done, total, best: None) -> SearchResult:
    """Search, or pick up where an interrupted search stopped. `progress(trials done, trials in all, best metric)`."""
    cfg, parsed = job.search, check(job)
    pinned = pin(job.table, job.feed, kind=job.model.task)
    job = finders.settle(job, pinned, lambda: prepare(job, pinned), drawn=tuple(cfg.space))
    key = key_of(job.training_key(pinned.version), cfg)
    folder = job.run.path / "search" / key
    finished = folder / "result.json"
    started = time.perf_counter()
    if not finished.exists():
        save(job, folder / "config.yaml")
        trials, stopped = _run(job, parsed, _data(job, pinned), folder, progress)
        pbt.write(folder / "schedule.yaml", trials[0].schedule)
        leaderboard.write(finished, trials, stopped)
    ranked, stopped = leaderboard.read(finished)
    best = ranked[0]
    tuned = replace(
        TrainJob.model_validate({k: v for k, v in job.model_dump().items() if k in TrainJob.model_fields}), best.changes
    )
    return SearchResult(
        key,
        tuned,
        leaderboard.as_training(key, pinned.version, pinned.classes, best),
        ranked,
        job.train.stopping.metric,
        time.perf_counter() - started,
        stopped,
    )


def _data(job: SearchJob, pinned: Any) -> dict[str, Any]:
    """The arrays of every backbone and resolution the space can draw, each read once."""
    data = {}
    names = spaces.values(job.search.space, "model.name") or [job.model.name]
    sides = spaces.values(job.search.space, "model.side_px") or [job.model.side_px]
    modes = spaces.values(job.search.space, "model.mode") or [job.model.mode]
    for variant in [{"model.name": n, "model.side_px": s, "model.mode": m} for n in names for s in sides for m in modes]:
        one = replace(job, {**variant, "feed.carrier": "cache"})  # a stream per trial would decode the table once per trial
        data[data_key(one)] = prepare(one, pinned)
    return data


def _run(
    job: SearchJob, parsed: dict[str, Any], data: dict[str, Any], folder: Path, progress: Callable[[int, int, float], None]
) -> tuple[list[Trial], str | None]:
    cfg, rule = job.search, job.train.stopping
    total = cfg.samples * spaces.grid_size(cfg.space)
    decoding = any(d.train.carrier in ("cache", "offload") for d in data.values())
    room = slots(job, ray.cluster_resources(), total, decoding)
    given = {
        "job": job.model_dump(mode="json", include=set(TrainJob.model_fields)),
        "data": data,
        "trials": str(folder / "trials"),
        "recent": cfg.pbt.every + 1 if cfg.populated else 1,  # a donor's lie until its next turn
    }
    if room.worker is None:
        trainable = tune.with_parameters(run_trial, **given)
    else:
        trainable = tune.with_parameters(GroupTrial, **given, worker=room.worker)
    trainable = tune.with_resources(trainable, room.trial)
    Monitor.listener, Monitor.current = staticmethod(progress), None
    watch = Monitor(total, rule.metric, rule.mode, cfg.stopping, room.trial.get("GPU", float(job.train.most_workers)))
    run_config = tune.RunConfig(
        name="tune",
        storage_path=str(folder),
        callbacks=[watch],
        stop=Stop(),
        checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1 if room.worker else 0),  # pointers: all are kept
        failure_config=tune.FailureConfig(max_failures=1),
        verbose=0,
    )
    tuner = _restored(folder / "tune", trainable, parsed) or tune.Tuner(
        trainable,
        param_space=parsed,
        tune_config=tune.TuneConfig(
            metric=rule.metric,
            mode=rule.mode,
            num_samples=cfg.samples,
            scheduler=scheduler(job, folder),
            search_alg=searcher(job, room.concurrent),
            reuse_actors=True,
        ),
        run_config=run_config,
    )
    trials = [_line(result, job, folder) for result in _begun(tuner.fit())]
    stopped = Monitor.current.stopped if Monitor.current else None
    if stopped and not trials:
        raise RaypipeError("The search stopped before its first result", got=stopped, fix="Raise the limit in search.stopping")
    if all(t.checkpoint is None for t in trials):
        raise RaypipeError(
            f"Every one of {len(trials)} trials failed or diverged",
            got=str(folder),
            fix="The trials' error.txt files there say why; without one, lower train.lr",
        )
    ranked = leaderboard.ranked(trials, rule.mode)
    progress(total, total, ranked[0].metric)  # Tune tells of a trial's end before it counts as ended
    return ranked, stopped


def _line(result: Any, job: SearchJob, folder: Path) -> Trial:
    rule, trials = job.train.stopping, folder / "trials"
    failed = Monitor.current.failures if Monitor.current else {}
    known = {*failed, *(p.name for p in trials.glob("*"))}
    trial = next(
        (one for one in known if one in Path(result.path).name), ""
    )  # Tune's folders have the trial's id in their names
    line = leaderboard.trial_of(result, rule.metric, rule.mode, job.train, trials, trial)
    return with_(line, failures=failed.get(trial, 0), schedule=pbt.schedules(folder).get(trial, ()))


def _begun(results: Any) -> Iterator[Any]:
    """The results of trials that trained: of one that was still to start when the search stopped, Tune knows no folder."""
    for i in range(len(results)):
        try:
            result = results[i]
        except ValueError:
            continue
        if result.checkpoint is not None or result.error is not None:
            yield result


def _restored(folder: Path, trainable: Any, parsed: dict[str, Any]) -> Any | None:
    """The interrupted search in `folder`, or None. A search killed while Tune wrote its state cannot be restored: it is put
    aside, and the trials run again."""
    if not tune.Tuner.can_restore(str(folder)):
        return None
    try:
        tuner = tune.Tuner.restore(str(folder), trainable, resume_unfinished=True, resume_errored=True, param_space=parsed)
    except Exception as e:
        aside = folder.with_name(f"{folder.name}-torn-{int(time.time())}")
        folder.rename(aside)
        log.warning("The interrupted search cannot be restored (%s); it is kept in %s", type(e).__name__, aside)
        return None
    log.info("Going on with the interrupted search in %s", folder)
    return tuner
