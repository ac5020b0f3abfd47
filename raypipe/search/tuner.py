"""search(job, cfg) -> SearchResult: Ray Tune over any config field; the best trial's model is kept.

A hash of everything that determines a search is the name of its folder. So after a kill the same
command finds the folder, restores the finished trials and runs the rest:

    search/KEY/config.yaml      the job and the search
    search/KEY/first_answer.json  which features the first answer reads
    search/KEY/tune/            Ray Tune's own state
    search/KEY/trials/          the trials' checkpoints (trial_checkpoints.py)
    search/KEY/usage.json       what the nodes did
    search/KEY/result.json      the ranked trials; with it the search is finished

When it is finished, `kept` deletes checkpoints that nobody reads again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from dataclasses import replace as with_
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import tune

from raypipe.cluster.recorder import recorded
from raypipe.cluster.usage import FILE as USAGE
from raypipe.config import key_of, replace, save
from raypipe.errors import ConfigError, RaypipeError
from raypipe.feed.dataset import Pinned, pin
from raypipe.files import owned
from raypipe.models.zoo import ModelConfig
from raypipe.search import first_answer, kept, leaderboard, refit, soup, together, variants
from raypipe.search.first_answer import FirstAnswer
from raypipe.search.leaderboard import SearchResult, Trial
from raypipe.search.ledger import Ledger, TooShort
from raypipe.search.limits import SearchLimits
from raypipe.search.schedulers import mutations, pbt
from raypipe.search.schedulers.thaw_scheduler import freeze_thaw
from raypipe.search.schedulers.tune_schedulers import drawn_ahead, memory, scheduler
from raypipe.search.searchers import optuna_search
from raypipe.search.searchers.tune_searchers import candidates, plan, searcher
from raypipe.search.settings import SearchConfig
from raypipe.search.space import defaults
from raypipe.search.space import parse as spaces
from raypipe.search.space.space import Space
from raypipe.search.trials import saved_state, trial_checkpoints, tune_patches
from raypipe.search.trials.monitor import Held, Listener, Monitor, Stop
from raypipe.search.trials.multi_worker_trial import GroupTrial
from raypipe.search.trials.standing import Reached
from raypipe.search.trials.trial import data_key, folder_name, run_trial
from raypipe.search.trials.trial_data import decoded_images, prepare_data
from raypipe.search.trials.trial_resources import TrialResources, gpu_share, plan_resources
from raypipe.search.warm_start import earlier
from raypipe.train.auto import finders
from raypipe.train.job import TrainJob
from raypipe.train.launch import check_workers, require_shared_folder, wants_gpu
from raypipe.train.spark_place import refuse
from raypipe.train.stopping import OF_BUDGET, Mode, is_budget
from raypipe.train.trainer import check_start, prepare
from raypipe.train.worker import Data, validate

log = logging.getLogger("raypipe")
OVER = "over"  # a file: trials end within their epochs, because search.budget_s is over


def check(
    job: TrainJob,
    cfg: SearchConfig,
    counts: Mapping[str, int] | None = None,
    resources: Mapping[str, float] | None = None,
) -> tuple[SearchConfig, Space]:
    """The search with its space filled in, and that space, parsed.

    counts: labelled images of each split; a default space depends on them. resources: of the
    cluster that will search; None: those of the joined one.

    Raises ConfigError or ClusterError if the search cannot run. Nothing is written before.
    """
    refuse(job, "A search")
    resources = dict(resources or ray.cluster_resources())
    # What the cluster and the installation must have.
    check_workers(job.train, resources)
    if cfg.searcher != "random":
        optuna_search.require()
    if job.by_epoch:
        raise ConfigError(
            "A search draws its trials' values, and by_epoch would set them again",
            got=f"by_epoch={job.by_epoch}",
            fix="Set by_epoch={}; search.scheduler=pbt finds values by epoch",
        )
    # The space. It is parsed against the whole job, so it comes after the default.
    gpu = wants_gpu(job.train, resources)
    cfg = defaults.with_default_space(job, cfg, counts or {}, gpu)
    space = spaces.parse(cfg.space or {}, job)
    for name in ("train.batch_size", "train.lr"):
        if "auto" in space.values(name):
            raise ConfigError(
                f"A search cannot draw {name}=auto",
                rule="auto is found once, before the search",
                fix="Draw numbers",
            )
    if cfg.populated:
        pbt.check(cfg, space)
    # What other parts of a search refuse; here, so that no trial is lost by it.
    refit.check(job, cfg)
    check_start(job)
    plan_resources(job, cfg, resources, cfg.samples * len(space.cells))
    return cfg, space


def one_worker(job: TrainJob) -> TrainJob:
    """`train.workers=auto` of a search: trials side by side use devices better than workers that
    wait for each other.
    """
    if job.train.workers != "auto":
        return job
    # Not config.replace: it would mark every field as set, and the default space leaves out what
    # the user set.
    return job.model_copy(update={"train": job.train.model_copy(update={"workers": 1})})


def search(
    job: TrainJob,
    cfg: SearchConfig,
    progress: Listener = lambda done, total, standings: None,
    pinned: Pinned | None = None,
    ledger: Ledger | None = None,
) -> SearchResult:
    """Run a search, continue an interrupted one, or return the result of a finished one.

    progress: called with the standings of the trials whenever one reports. pinned: the job's rows,
    if they are pinned already. ledger: the clock of search.budget_s; None: it begins now.

    Raises ConfigError or ClusterError if the search cannot run, RaypipeError if no trial is usable.
    """
    rows = pinned or pin(job.table, job.feed, kind=job.model.task)
    job = one_worker(job)
    cfg, space = check(job, cfg, rows.counts)
    # Trials share what is found: one batch size and learning rate for all, unless they draw them.
    share = gpu_share(job, cfg)
    job = finders.resolve(job, rows, lambda: prepare(job, rows), space.always, share)
    space = space.of(job)

    ledger = ledger or Ledger(cfg.budget_s)
    ledger.refits, ledger.refit_share = cfg.refit is not None, cfg.refit_share
    key = key_of(job.training_key(rows.version), _in_key(cfg))
    # A refit comes after the search and does not change it.
    asked, cfg = cfg, cfg.model_copy(update={"refit": None})
    folder = job.run.path / "search" / key
    started = time.perf_counter()
    if cfg.limits.of_models:
        # Of a finished search as well: another refit may break a limit.
        with owned(folder):
            space = variants.limited(space, asked, rows, folder)
    if not (folder / "result.json").exists():
        with owned(folder):
            # Another process may have finished the search while this one waited.
            if not (folder / "result.json").exists():
                with recorded(folder / USAGE, job.cluster.usage_every_s):
                    _search_into(folder, cfg, space, rows, progress, ledger)
    seconds = time.perf_counter() - started
    return _result(folder, key, space, rows, seconds)


def _in_key(cfg: SearchConfig) -> dict[str, Any]:
    """What of the search determines its trials."""
    # Nor does what is kept; and a preset is what it has set.
    left_out = {"keep", "refit", "preset"}
    # Without them, the key is the same as before they were there.
    if cfg.budget_s is None:
        left_out |= {"budget_s", "refit_share"}
    elif cfg.refit is None:
        left_out.add("refit_share")
    if cfg.ensemble == 1:
        left_out.add("ensemble")
    if not cfg.first_answer:
        left_out.add("first_answer")
    if cfg.limits == SearchLimits():
        left_out.add("limits")
    if not cfg.starts:
        left_out.add("starts")
    # Older searches have a refit of null in their keys.
    return {**cfg.model_dump(mode="json", exclude=left_out), "refit": None}


def _search_into(
    folder: Path,
    cfg: SearchConfig,
    space: Space,
    pinned: Pinned,
    progress: Listener,
    ledger: Ledger,
) -> None:
    """Run or continue the search, and write result.json into its folder."""
    job = space.job
    require_shared_folder(job)
    save(job, folder / "config.yaml", search=cfg)
    # What to try. After a restore all of this is the same again: hints are stored, and the
    # planned trials depend on the seed.
    hints = earlier(job, space, folder) if cfg.warm_start else []
    planned = plan(job, cfg, space, hints)
    total = len(planned)
    first = _first_answer(job, cfg, pinned, folder, progress, total, ledger)
    # Every array that a trial may need is in the object store before the first one starts.
    # This ends the caller's timer, too: from now on trials look at the clock.
    is_answered = any(trial.checkpoint is not None for trial in first.trials)
    try:
        with ledger.reading(is_answered):
            read = prepare_data(job, pinned, candidates(cfg, space, planned))
        # What a first answer embeds is no part of this time.
        embeds = any(arrays.features for arrays in read.values())
        ledger.trials_begin(decoded_images(read) if embeds else 0)
    except TooShort:
        # What trials reached before a kill is worth another start.
        if not is_answered or (folder / "tune").exists():
            raise
        _answer_alone(folder, job, cfg, first, ledger)
        return
    data = first.data | read

    # Who chooses the values, and who ends trials early.
    make_searcher = partial(searcher, job, cfg, space, planned, hints, folder)
    if cfg.populated:
        tune_scheduler = pbt.population(job, cfg, space, folder)
    elif cfg.scheduler == "freeze_thaw":
        concurrent = plan_resources(job, cfg, ray.cluster_resources(), total).concurrent
        rule = job.train.stopping
        tune_scheduler = freeze_thaw(rule, job.train.epochs, space, job.run.seed, concurrent)
    else:
        tune_scheduler = scheduler(cfg, job.train, total)
    strategy = _Strategy(total, make_searcher, tune_scheduler, first)
    keeping = kept.Kept(job, cfg, folder)
    trials, stopped = _run(job, cfg, strategy, data, folder, progress, keeping, ledger)
    ledger.lap("trials")

    # After the last trial. A kill before the last line repeats these steps.
    mutations.write_schedule(folder / "schedule.yaml", trials[0].schedule)
    if cfg.soup > 1 and trials[0].drawn:
        _average_best(job, cfg.soup, trials, data, folder)
    if cfg.ensemble > 1:
        _combine(folder, job, cfg, trials, pinned, data, ledger)
    leaderboard.write(folder / "result.json", trials, stopped, decoded_images(data))
    kept.clear(folder, trials)


def _answer_alone(
    folder: Path, job: TrainJob, cfg: SearchConfig, first: FirstAnswer, ledger: Ledger
) -> None:
    """Write the result of a search whose budget is over before its first trial."""
    rule = job.train.stopping
    ranked = leaderboard.ranked(first.trials, rule.metric, rule.mode)
    trials = kept.Kept(job, cfg, folder).result(ranked)
    stopped = f"{OF_BUDGET}{ledger.budget_s:g} s left no time for trials"
    _write_reached(folder, first, [], 0.0, rule.mode)
    leaderboard.write(folder / "result.json", trials, stopped, decoded_images(first.data))
    kept.clear(folder, trials)


def _first_answer(
    job: TrainJob,
    cfg: SearchConfig,
    pinned: Pinned,
    folder: Path,
    progress: Listener,
    total: int,
    ledger: Ledger,
) -> FirstAnswer:
    """What the search has before its first trial; nothing unless it asks for that."""
    if not cfg.first_answer:
        return FirstAnswer()
    rule = job.train.stopping
    fitted: list[Trial] = []

    def told(trial: Trial) -> None:
        fitted.append(trial)
        ranked = leaderboard.ranked(fitted, rule.metric, rule.mode)
        progress(0, total, leaderboard.standings(ranked, rule.metric, rule.mode))

    barred: dict[str, str] = {}
    first = FirstAnswer()
    seconds = first_answer.SECONDS
    left_s = ledger.left_s(1, None)
    if left_s is not None:
        # Trials want a part of the time, too.
        seconds = min(seconds, max(1.0, left_s / 2))
    try:
        # It estimates its time: where that was wrong, what is there counts.
        with ledger.reading(is_answered=True, phase="first answer"):
            if cfg.limits.of_models:
                models = first_answer.models(job, pinned)
                measured = variants.measured(models, len(pinned.classes), pinned, job, folder)
                barred = {shape: one.breaks(cfg.limits) for shape, one in measured.items()}
            first_answer.make(job, pinned, folder, seconds, told, barred, found=first)
    except TooShort:
        if not fitted:
            raise
    ledger.lap("first answer")
    if fitted:
        best = leaderboard.ranked(fitted, rule.metric, rule.mode)[0]
        log.info(
            "The first answer after %.0f s: %s %.4g (%s)",
            first.seconds,
            rule.metric,
            best.metric,
            ", ".join(str(value) for value in best.changes.values()),
        )
    return first


def _result(folder: Path, key: str, space: Space, pinned: Pinned, seconds: float) -> SearchResult:
    """The result of a finished search, read from its folder."""
    job = space.job
    trials, stopped, decoded = leaderboard.read(folder / "result.json")
    # A kill may have come right after result.json.
    kept.clear(folder, trials)
    best = trials[0]
    if best.checkpoint is None:  # an older version may have kept such a search
        raise _nothing_usable(len(trials), folder)
    # The model is that of the best trial, the average of several, or their ensemble.
    average, ensemble = soup.read(folder), together.read(folder)
    if ensemble is not None:
        # Its first member's job; a soup is of the best trial's.
        best = next((trial for trial in trials if trial.name == ensemble.members[0]), best)
    trained = leaderboard.training_result(key, pinned.version, pinned.classes, best)
    model = ensemble or average
    if model is not None:
        trained = with_(trained, metrics=model.metrics, checkpoint=model.checkpoint)
    reached, ran_s = leaderboard.read_reached(folder)
    return SearchResult(
        key=key,
        job=mutations.job_of(job, best.changes, best.schedule),
        best=trained,
        trials=trials,
        metric=job.train.stopping.metric,
        seconds=seconds,
        stopped=stopped,
        decoded=decoded,
        full_epochs=job.train.epochs * sum(trial.drawn for trial in trials),
        members=model.members if model else (),
        shares=ensemble.shares if ensemble else (),
        pinned=pinned,
        models=_models(job, trials),
        reached=reached,
        ran_s=ran_s,
    )


def _models(job: TrainJob, trials: Sequence[Trial]) -> dict[str, ModelConfig]:
    """Each trial's model, by its name; without those of older searches that are refused today."""
    found = {}
    for trial in trials:
        with suppress(ConfigError):
            found[trial.name] = replace(job, trial.changes).model
    return found


def _combine(
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
    # Its seconds were a part of the ending.
    ledger.combined = 0
    try:
        with ledger.reading(is_answered=True, phase="ensemble"):
            together.make(joining, cfg, pinned, data, folder)
    except TooShort:
        ledger.notes.append("No ensemble: there was no time to choose one")
    ledger.lap("ensemble")


def _average_best(
    job: TrainJob, most: int, trials: list[Trial], data: dict[str, Data], folder: Path
) -> None:
    """Average the weights of up to `most` of the best trials.

    Only trials that train on the same arrays as the best one take part.
    """
    best_job = replace(job, trials[0].changes)
    key = data_key(best_job)
    # Weights of another backbone or resolution cannot be averaged, and the validation arrays
    # below are those of the best trial.
    # Heads of a first answer have other shapes.
    drawn = [trial for trial in trials if trial.kept and trial.drawn]
    alike = [trial for trial in drawn if data_key(replace(job, trial.changes)) == key]
    rule = job.train.stopping
    soup.make(
        alike[:most],
        lambda weights: validate(best_job, data[key], weights),
        rule.metric,
        rule.mode,
        folder,
    )


@dataclass(frozen=True)
class _Strategy:
    """Which trials the search runs."""

    total: int
    """How many trials."""

    searcher: Callable[[int], Any]
    """Makes Tune's searcher, given how many trials it may draw before the first one ends."""

    scheduler: Any
    """Tune's scheduler; None: every trial runs to its end."""

    first: FirstAnswer = field(default_factory=FirstAnswer)
    """What was fitted before."""


def _run(
    job: TrainJob,
    cfg: SearchConfig,
    strategy: _Strategy,
    data: dict[str, Data],
    folder: Path,
    progress: Listener,
    keeping: kept.Kept,
    ledger: Ledger,
) -> tuple[list[Trial], str | None]:
    """Run all trials in Tune, or the rest of an interrupted search.

    Returns (trials from best to worst, why the search stopped before its last trial). Raises
    RaypipeError if no trial has a usable epoch.
    """
    resources = plan_resources(job, cfg, ray.cluster_resources(), strategy.total)
    trainable = _trainable(job, data, folder, resources, cfg.budget_s is not None)
    (folder / OVER).unlink(missing_ok=True)
    ledger.on_over = (folder / OVER).touch
    # What the search's rule looks at, and what the user sees.
    rule = job.train.stopping
    devices = resources.trial.get("GPU", 1.0)
    monitor = Monitor(
        strategy.total,
        rule.metric,
        rule.mode,
        cfg.stopping,
        devices,
        progress,
        keeping.ended,
        most_money=cfg.limits.money,
        ledger=ledger,
        model=job.model,
    )
    # After a kill Tune continues; its own folder has the state.
    tuner = _restored(folder / "tune", trainable)
    if tuner is None:
        # The searcher is made here, because a restored search brings its own.
        ahead = drawn_ahead(cfg, strategy.total, resources.concurrent)
        tune_config = tune.TuneConfig(
            metric=rule.metric,
            mode=rule.mode,
            # -1: the searcher says when there are no more. Tune would call the search finished when
            # the last trial is drawn, which freeze_thaw does at once (see planned.py).
            num_samples=-1 if cfg.scheduler == "freeze_thaw" else strategy.total,
            scheduler=strategy.scheduler,
            search_alg=strategy.searcher(ahead),
            trial_dirname_creator=folder_name,
            reuse_actors=True,
        )
        run_config = _run_config(strategy.scheduler, folder, resources, monitor)
        tuner = tune.Tuner(trainable, tune_config=tune_config, run_config=run_config)
    else:
        monitor.put_into(tune_patches.run_config(tuner))
    multi_worker = resources.worker is not None
    with tune_patches.applied(multi_worker), saved_state.kept_whole(keeping.saved):
        results = tuner.fit()
    ranked = keeping.result(_ranked(results, job, monitor, folder, strategy.first.trials, ledger))
    # Tune calls back for a trial's end before it counts the trial as ended, so the listener has not
    # yet seen the last one.
    standings = leaderboard.standings(ranked, rule.metric, rule.mode)
    progress(strategy.total, strategy.total, standings)
    _write_reached(folder, strategy.first, monitor.reached, monitor.elapsed(), rule.mode)
    return ranked, monitor.stopped


def _write_reached(
    folder: Path,
    first: FirstAnswer,
    by_trials: Sequence[Reached],
    trials_s: float,
    mode: Mode,
) -> None:
    """Keep when the search became better: by its first answer, and then by its trials."""
    later = [with_(one, seconds=first.seconds + one.seconds) for one in by_trials]
    reached = leaderboard.so_far([*first.reached, *later], mode)
    leaderboard.write_reached(folder, reached, first.seconds + trials_s)


def _trainable(
    job: TrainJob,
    data: dict[str, Data],
    folder: Path,
    resources: TrialResources,
    within_budget: bool,
) -> Any:
    """What Tune runs for each trial: a function, or a class for trials of several workers."""
    # Passed through the object store once, and not with every trial.
    given = {
        "job": job.model_dump(mode="json"),
        "data": data,
        "trials": str(folder / "trials"),
    }
    if resources.worker is None:
        over = str(folder / OVER) if within_budget else None
        trainable = tune.with_parameters(run_trial, **given, over=over)
    else:
        trainable = tune.with_parameters(GroupTrial, **given, worker=resources.worker)
    return tune.with_resources(trainable, resources.trial)


def _run_config(
    scheduler: Any, folder: Path, resources: TrialResources, monitor: Monitor
) -> tune.RunConfig:
    """Where Tune writes, what it calls back, and when it stops."""
    # Checkpoints are pointers of 100 bytes, so Tune keeps them all. A function saves one with each
    # report by itself; a class has to be told.
    checkpoints = tune.CheckpointConfig(checkpoint_frequency=1 if resources.worker else 0)
    return tune.RunConfig(
        name="tune",
        storage_path=str(folder),
        callbacks=[monitor, *memory(scheduler)],
        stop=Stop(monitor),
        checkpoint_config=checkpoints,
        failure_config=tune.FailureConfig(max_failures=1),
        verbose=0,
    )


def _restored(folder: Path, trainable: Any) -> Any | None:
    """The tuner of the interrupted search in `folder`; None if there is none, or nothing of it.

    A search that was killed while Tune wrote its state cannot be restored. Its folder is renamed,
    and the trials run again.
    """
    if not tune.Tuner.can_restore(str(folder)):
        return None
    try:
        if not saved_state.unpack(folder):
            return None
        tuner = tune.Tuner.restore(
            str(folder), trainable, resume_unfinished=True, resume_errored=True
        )
    # Tune reads pickles and JSON here: a torn file raises nearly any error.
    except Exception as e:
        aside = folder.with_name(f"{folder.name}-torn-{int(time.time())}")
        folder.rename(aside)
        log.warning(
            "The interrupted search cannot be restored (%s); it is kept in %s",
            type(e).__name__,
            aside,
        )
        return None
    log.info("Continuing the interrupted search in %s", folder)
    return tuner


def _ranked(
    results: Any,
    job: TrainJob,
    monitor: Monitor,
    folder: Path,
    first: Sequence[Trial],
    ledger: Ledger,
) -> list[Trial]:
    """The trials from best to worst, from Tune's results and the first answer."""
    started = _started(results, folder / "trials")
    trials = [_trial_of(result, job, monitor, folder) for result in started]
    trials += first
    if monitor.stopped and not trials and ledger.budget_s is not None:
        ledger.lap("trials")
        raise ledger.too_short()
    if monitor.stopped and not trials:
        raise RaypipeError(
            "The search stopped before its first result",
            got=monitor.stopped,
            fix="Raise the limit in search.stopping",
        )
    # The search needs one model at least.
    if all(trial.checkpoint is None for trial in trials):
        raise _nothing_usable(len(trials), folder)
    rule = job.train.stopping
    return leaderboard.ranked(trials, rule.metric, rule.mode)


def _started(results: Any, trials: Path) -> Iterator[Any]:
    """The results of trials that trained or failed. trials: the folder of their checkpoints."""
    for i in range(len(results)):
        try:
            result = results[i]
        except ValueError:
            # Tune has no folder of a trial that had not started when the search stopped.
            continue
        if result.checkpoint is not None or result.error is not None:
            yield result
        elif _has_own_checkpoint(result, trials):
            # Tune stores its pointer after the report; a search may be stopped in between.
            yield result


def _has_own_checkpoint(result: Any, trials: Path) -> bool:
    """Has a trial finished an epoch, whatever Tune knows of it?"""
    name = trial_checkpoints.name_of(result.path)
    folder = trial_checkpoints.folder_of(trials, name, dict(result.config or {}), None)
    return bool(trial_checkpoints.epoch_checkpoints(folder))


def _trial_of(result: Any, job: TrainJob, monitor: Monitor, folder: Path) -> Trial:
    """The leaderboard's trial of one of Tune's results."""
    rule = job.train.stopping
    trial = leaderboard.trial_of(result, rule.metric, rule.mode, job.train, folder / "trials")
    failures = monitor.failures.get(trial.name, 0)
    # A search that an older version began has no record of it.
    held = monitor.held.get(trial.name, Held(trial.seconds))
    # Older versions kept no schedule beside the weights.
    schedule = trial.schedule or mutations.schedules(folder).get(trial.name, ())
    return with_(
        trial,
        failures=failures,
        schedule=schedule,
        seconds=held.seconds,
        device_s=held.device_s,
        cut=_is_cut(trial, monitor),
    )


def _is_cut(trial: Trial, monitor: Monitor) -> bool:
    """Did a budget end this trial, its own or the search's?"""
    # The scheduler had paused it, or it was running.
    is_open = trial.stopped_early and trial.name not in monitor.ended_before
    return is_budget(trial.stopped) or (is_open and is_budget(monitor.stopped))


def _nothing_usable(trials: int, folder: Path) -> RaypipeError:
    return RaypipeError(
        f"Every one of {trials} trials failed or diverged",
        got=str(folder),
        fix="The trials' error.txt files there say why; without one, lower train.lr",
    )
