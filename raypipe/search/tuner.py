"""search(job) -> leaderboard: Ray Tune with ASHA over any config field; the best trial's model is kept.

ASHA (Li et al. 2020) stops a trial at a rung when it is not among the best 1/`reduction` of those that came that far. The
search's folder is named by what determines it: after a kill the same command restores finished trials and runs the rest.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import ray
from pydantic import Field
from ray import tune

from raypipe.config import Section, key_of, replace, save
from raypipe.errors import ConfigError, RaypipeError
from raypipe.feed.dataset import pin
from raypipe.search import space as spaces
from raypipe.search.trial import data_key, run_trial
from raypipe.tables.table import TableVersion
from raypipe.train import checkpoint, finders
from raypipe.train.job import TrainJob, TrainResult
from raypipe.train.launch import check_workers, wants_gpu
from raypipe.train.stopping import Mode, Progress, SearchStoppingConfig, improved, of_search
from raypipe.train.trainer import prepare

log = logging.getLogger("raypipe")


class SearchConfig(Section):
    """How many trials over which space. A grid is run `samples` times, as in Ray Tune."""

    samples: int = Field(default=16, ge=1)
    space: dict[str, str] = Field(default={"train.lr": "loguniform(1e-4, 3e-2)"})
    scheduler: Literal["asha", "none"] = "asha"
    grace: int = Field(default=3, ge=1)
    reduction: int = Field(default=3, ge=2)
    concurrent: int | None = Field(default=None, ge=1)
    gpus_per_trial: float = Field(default=1.0, gt=0)  # where the cluster has GPUs
    stopping: SearchStoppingConfig = SearchStoppingConfig()


class SearchJob(TrainJob):
    """A training job and the space around it."""

    search: SearchConfig = SearchConfig()


@dataclass(frozen=True)
class Trial:
    """One finished trial. `metric` is its best epoch's; NaN when it failed. `stopped_early` is the scheduler's doing, or the
    end of the search's; `stopped` is why its own rule (train.stopping) ended it."""

    name: str
    changes: dict[str, Any]
    metric: float
    epochs: int
    stopped_early: bool
    history: tuple[dict[str, float], ...]
    checkpoint: str | None
    stopped: str | None = None


@dataclass(frozen=True)
class SearchResult:
    """Trials from best to worst, the best one's job and its training result. `stopped`: why it ended before its last trial."""

    key: str
    job: TrainJob
    best: TrainResult
    trials: tuple[Trial, ...]
    metric: str
    seconds: float
    stopped: str | None = None


def check(job: SearchJob) -> dict[str, Any]:
    """Ray Tune's parameter space, when the search can run. Raises ConfigError or ClusterError before anything is written."""
    if job.train.workers != 1:
        raise ConfigError(
            "Trials of several workers are not offered yet", got=f"train.workers={job.train.workers}", fix="Set train.workers=1"
        )
    for name in ("train.batch_size", "train.lr"):
        if "auto" in spaces.values(job.search.space, name):
            raise ConfigError(
                f"A search cannot draw {name}=auto", rule="auto is found once, before the search", fix="Draw numbers"
            )
    check_workers(job.train, ray.cluster_resources())
    return spaces.parse(job.search.space, job)


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
        partial = finished.with_suffix(".partial")
        partial.write_text(json.dumps({"trials": [asdict(t) for t in trials], "stopped": stopped}))
        partial.replace(finished)
    outcome = json.loads(finished.read_text())
    ranked = tuple(Trial(**t | {"history": tuple(t["history"])}) for t in outcome["trials"])
    best = ranked[0]
    tuned = replace(
        TrainJob.model_validate({k: v for k, v in job.model_dump().items() if k in TrainJob.model_fields}), best.changes
    )
    return SearchResult(
        key,
        tuned,
        _as_result(key, pinned.version, pinned.classes, best),
        ranked,
        job.train.stopping.metric,
        time.perf_counter() - started,
        outcome["stopped"],
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
    resources = ray.cluster_resources()
    each = {"CPU": 1.0} | ({"GPU": cfg.gpus_per_trial} if wants_gpu(job.train, resources) else {})
    fits = max(1, int(min(resources.get(kind, 0) / amount for kind, amount in each.items())))
    trainable = tune.with_resources(
        tune.with_parameters(run_trial, job=job.model_dump(mode="json", include=set(TrainJob.model_fields)), data=data),
        each,
    )
    total = cfg.samples * spaces.grid_size(cfg.space)
    # Trials would otherwise be drawn differently after a restore: the searcher is seeded.
    searcher = tune.search.BasicVariantGenerator(max_concurrent=cfg.concurrent or fits, random_state=job.run.seed)
    asha = tune.schedulers.ASHAScheduler(
        max_t=job.train.epochs, grace_period=min(cfg.grace, job.train.epochs), reduction_factor=cfg.reduction
    )
    _Progress.listener, _Progress.current = staticmethod(progress), None
    watch = _Progress(total, rule.metric, rule.mode, cfg.stopping, each.get("GPU", 1.0))
    run_config = tune.RunConfig(
        name="tune",
        storage_path=str(folder),
        callbacks=[watch],
        stop=_Stop(),
        checkpoint_config=tune.CheckpointConfig(
            num_to_keep=2, checkpoint_score_attribute=rule.metric, checkpoint_score_order=rule.mode
        ),
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
            scheduler=asha if cfg.scheduler == "asha" else None,
            search_alg=searcher,
            reuse_actors=True,
        ),
        run_config=run_config,
    )
    trials = [_trial(result, rule.metric, rule.mode, job.train) for result in _begun(tuner.fit())]
    stopped = _Progress.current.stopped if _Progress.current else None
    if stopped and not trials:
        raise RaypipeError("The search stopped before its first result", got=stopped, fix="Raise the limit in search.stopping")
    if all(t.checkpoint is None for t in trials):
        raise RaypipeError(
            f"Every one of {len(trials)} trials failed or diverged",
            got=str(folder),
            fix="The trials' error.txt files there say why; without one, lower train.lr",
        )
    sign = -1 if rule.mode == "max" else 1
    ranked = sorted(trials, key=lambda t: (t.checkpoint is None, sign * t.metric if t.checkpoint else 0.0, t.name))
    progress(total, total, ranked[0].metric)  # Tune tells of a trial's end before it counts as ended
    return ranked, stopped


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


def _trial(result: Any, metric: str, mode: str, train: Any) -> Trial:
    name = Path(result.path).name
    kept = {}
    # Tune keeps the best checkpoints and the last; the last one's state holds the history of all epochs.
    for found in [c for c, _ in result.best_checkpoints or []] + [result.checkpoint]:
        if found is not None and checkpoint.verify(Path(found.path)) is None:
            state = json.loads((Path(found.path) / "state.json").read_text())
            kept[state["epoch"]] = (state, Path(found.path))
    history = kept[max(kept)][0]["history"] if kept else []
    usable = [epoch for epoch in kept if history[epoch - 1][metric] == history[epoch - 1][metric]]  # NaN: it diverged
    if result.error is not None or not usable:
        return Trial(name, dict(result.config or {}), float("nan"), len(history), False, tuple(history), None)
    pick = max if mode == "max" else min
    epoch = pick(usable, key=lambda epoch: (history[epoch - 1][metric], -epoch if mode == "max" else epoch))
    reason = kept[max(kept)][0]["stopped"]
    cut, best = len(history) < train.epochs and reason is None, history[epoch - 1][metric]
    return Trial(name, dict(result.config), best, len(history), cut, tuple(history), str(kept[epoch][1]), reason)


def _as_result(key: str, version: TableVersion, classes: tuple[str, ...], trial: Trial) -> TrainResult:
    state = checkpoint.read(Path(str(trial.checkpoint))).state
    last = state.epoch - 1  # the checkpoint kept is of the trial's best epoch
    where = str(trial.checkpoint)
    return TrainResult(key, version, classes, trial.history[last], trial.history, last, where, 0.0, trial.stopped)


class _Progress(tune.Callback):  # type: ignore[misc]
    """Keeps what trials reported so far, tells it to whoever listens, and knows when the search's rule says to stop.

    Tune pickles its callbacks to restore them, and their state apart. Who listens (a terminal) cannot be pickled and may be
    another one after a restore, so it is looked up by the search that runs now.
    """

    listener: Callable[[int, int, float], None] = staticmethod(lambda done, total, best: None)
    current: _Progress | None = None  # the one that Tune uses

    def __init__(self, total: int, metric: str, mode: Mode, stopping: SearchStoppingConfig, workers: float) -> None:
        self._total, self._metric, self._mode, self._stopping, self._workers = total, metric, mode, stopping, workers
        self._best: dict[str, float] = {}  # by trial, as the next two
        self._epochs: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self._ended: list[str] = []
        self._before, self._started = 0.0, time.perf_counter()
        self.stopped: str | None = None

    def setup(self, *args: Any, **info: Any) -> None:
        type(self).current, self._started = self, time.perf_counter()

    def progress(self) -> Progress:
        nan = float("nan")
        return Progress(
            self._metric,
            self._mode,
            [self._best.get(trial, nan) for trial in self._ended],
            seconds=self._before + time.perf_counter() - self._started,
            worker_s=sum(self._seconds.values()) * self._workers,
            unit="trial",
            running=[value for trial, value in self._best.items() if trial not in self._ended],
            epochs=sum(self._epochs.values()),
        )

    def stop(self) -> bool:
        self.stopped = self.stopped or of_search(self._stopping)(self.progress())
        return self.stopped is not None

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any) -> None:
        name, value = trial.trial_id, result.get(self._metric, float("nan"))
        if improved(value, self._best.get(name), self._mode):
            self._best[name] = value
        self._epochs[name], self._seconds[name] = result["training_iteration"], result["time_total_s"]
        self._tell(trials)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if trial.trial_id not in self._ended:  # one that failed may run and end again after a restore
            self._ended.append(trial.trial_id)
        self._tell(trials)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.on_trial_complete(iteration, trials, trial)

    def get_state(self) -> dict[str, Any]:
        told = {name: getattr(self, name) for name in ("_best", "_epochs", "_seconds", "_ended", "stopped")}
        return told | {"_before": self._before + time.perf_counter() - self._started}

    def set_state(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _started=time.perf_counter())

    def _tell(self, trials: list[Any]) -> None:
        best = (max if self._mode == "max" else min)(self._best.values(), default=float("nan"))
        type(self).listener(sum(t.is_finished() for t in trials), self._total, best)


class _Stop(tune.Stopper):  # type: ignore[misc]
    """Asks the search's record. Tune asks before every step of its own, so a budget of time is kept between results too."""

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return _Progress.current is not None and _Progress.current.stop()
