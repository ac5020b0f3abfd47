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
from collections.abc import Callable, Mapping, Sequence
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
from raypipe.config import dump, key_of, replace, save
from raypipe.errors import ConfigError, DataError
from raypipe.feed.dataset import Pinned, pin
from raypipe.models.zoo import ModelConfig
from raypipe.search import (
    first_answer,
    kept,
    leaderboard,
    left,
    opening,
    refit,
    soup,
    starts,
    together,
    tune_run,
    variants,
)
from raypipe.search.first_answer import FirstAnswer
from raypipe.search.leaderboard import SearchResult, Trial
from raypipe.search.ledger import Ledger, TooShort
from raypipe.search.limits import SearchLimits
from raypipe.search.schedulers import mutations, pbt
from raypipe.search.schedulers.thaw_scheduler import freeze_thaw
from raypipe.search.schedulers.tune_schedulers import drawn_ahead, scheduler
from raypipe.search.searchers import optuna_search
from raypipe.search.searchers.tune_searchers import annealed_in, candidates, plan, searcher
from raypipe.search.settings import SearchConfig
from raypipe.search.space import defaults
from raypipe.search.space import parse as spaces
from raypipe.search.space.space import Space
from raypipe.search.trials import interrupts, saved_state, tune_patches
from raypipe.search.trials.monitor import Listener, Monitor
from raypipe.search.trials.trial import data_key, folder_name
from raypipe.search.trials.trial_data import decoded_images, prepare_data
from raypipe.search.trials.trial_resources import gpu_share, plan_resources
from raypipe.search.warm_start import earlier
from raypipe.tables.table import TableVersion
from raypipe.train import checkpoint
from raypipe.train.auto import finders
from raypipe.train.job import TrainJob
from raypipe.train.launch import check_workers, require_shared_folder, wants_gpu
from raypipe.train.spark_place import refuse
from raypipe.train.stopping import OF_BUDGET
from raypipe.train.trainer import check_start, prepare
from raypipe.train.worker import Data, validate

log = logging.getLogger("raypipe")


def check(
    job: TrainJob,
    cfg: SearchConfig,
    pinned: Pinned | None = None,
    resources: Mapping[str, float] | None = None,
) -> tuple[SearchConfig, Space]:
    """The search with its space filled in, and that space, parsed; `space.job` is the trials' job.

    pinned: the job's rows; a default space depends on their numbers. resources: of the cluster that
    will search; None: those of the joined one.

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
    counts = pinned.counts if pinned is not None else {}
    cfg = starts.checked(cfg, job)
    job = defaults.within_budget(job, cfg, counts, gpu)
    cfg = defaults.with_default_space(job, cfg, counts, gpu)
    space = spaces.parse(cfg.space or {}, job)
    if not space.fields and cfg.samples > 1:
        raise ConfigError(
            "search.space has no field, so all trials would be the same one",
            got=f"search.samples={cfg.samples}",
            fix="Name fields, leave search.space out (raypipe then has one), or use raypipe train",
        )
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
    if pinned is not None:
        refit.check_splits(job, cfg, pinned)
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
    own_starts = starts.of(cfg)
    cfg, space = check(job, cfg, rows)
    job = space.job
    # Trials share what is found: one batch size and learning rate for all, unless they draw them.
    share = gpu_share(job, cfg)
    job = finders.resolve(job, rows, lambda: prepare(job, rows), space.always, share)
    space = space.of(job)

    ledger = ledger or Ledger(cfg.budget_s)
    ledger.refits, ledger.refit_share = cfg.refit is not None, cfg.refit_share
    in_key = _in_key(cfg)

    def key_at(version: TableVersion) -> str:
        return key_of(job.training_key(version), in_key)

    key = key_at(rows.version)
    # A refit comes after the search and does not change it.
    asked, cfg = cfg, cfg.model_copy(update={"refit": None})
    folder = job.run.path / "search" / key
    begins = not folder.exists()
    if begins and (said := left.unfinished(folder, dump(job, search=cfg), key_at, rows.version)):
        log.warning("%s", said)
    started = time.perf_counter()
    if cfg.limits.of_models:
        # Of a finished search as well: another refit may break a limit.
        heads = first_answer.models(job, rows) if cfg.first_answer else []
        with ledger.owned(folder), ledger.reading(phase="limits"):
            space = variants.limited(space, asked, rows, folder, heads)
        ledger.lap("limits")
    for line in starts.unused(cfg, space, own_starts):
        log.warning("%s", line)
    if not (folder / "result.json").exists():
        with ledger.owned(folder):
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
    # What a killed run chose may be of another best trial.
    soup.forget(folder)
    together.forget(folder)
    # What to try. After a restore all of this is the same again: hints are stored, and the
    # planned trials depend on the seed.
    hints = earlier(job, space, folder) if cfg.warm_start else []
    planned = [] if space.all_barred else plan(job, cfg, space, hints)
    if defaults.trains_by_clock(job, cfg):
        # Each has all of the time: so many run side by side.
        concurrent = plan_resources(job, cfg, ray.cluster_resources(), len(planned)).concurrent
        planned = planned[:concurrent]
    total = len(planned)
    first = opening.answer(job, cfg, pinned, folder, progress, total, ledger)
    # Every array that a trial may need is in the object store before the first one starts.
    # This ends the caller's timer, too: from now on trials look at the clock.
    is_answered = any(trial.checkpoint is not None for trial in first.trials)

    def end_with_it(why: str) -> None:
        def combine(heads: list[Trial]) -> None:
            if cfg.ensemble > 1:
                _combine(folder, job, cfg, heads, pinned, first.data, ledger)

        opening.end_with(folder, job, cfg, first, why, combine)

    if space.all_barred:
        if not is_answered:
            raise opening.nothing_fitted(cfg.limits)
        end_with_it("search.limits leaves no trial that may begin")
        return
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
        end_with_it(f"{OF_BUDGET}{ledger.budget_s:g} s left no time for trials")
        return
    data = first.data | read
    if defaults.trains_by_clock(job, cfg):
        planned = annealed_in(planned, ledger.left_for_trials_s(total))

    # Who chooses the values, and who ends trials early.
    make_searcher = partial(searcher, job, cfg, space, planned, hints, folder)
    if cfg.populated:
        tune_scheduler = pbt.population(job, cfg, space, folder)
    elif cfg.scheduler == "freeze_thaw":
        concurrent = plan_resources(job, cfg, ray.cluster_resources(), total).concurrent
        rule = job.train.stopping
        tune_scheduler = freeze_thaw(rule, space.most_epochs, space, job.run.seed, concurrent)
    else:
        # The longest trial decides how far the rungs go.
        longest = job.train.model_copy(update={"epochs": space.most_epochs})
        tune_scheduler = scheduler(cfg, longest, total)
    strategy = _Strategy(total, make_searcher, tune_scheduler, first)
    keeping = kept.Kept(job, cfg, folder)
    trials, stopped = _run(job, cfg, strategy, data, folder, progress, keeping, ledger)
    ledger.lap("trials")

    # After the last trial. A kill before the last line repeats these steps.
    mutations.write_schedule(folder / "schedule.yaml", trials[0].schedule)
    if cfg.soup > 1 and trials[0].drawn:
        _average_best(job, cfg.soup, trials, pinned, data, folder, ledger)
    if cfg.ensemble > 1:
        _combine(folder, job, cfg, trials, pinned, data, ledger)
    leaderboard.write(folder / "result.json", trials, stopped, decoded_images(data))
    kept.clear(folder, trials)


def _result(folder: Path, key: str, space: Space, pinned: Pinned, seconds: float) -> SearchResult:
    """The result of a finished search, read from its folder."""
    job = space.job
    trials, stopped, decoded = leaderboard.read(folder / "result.json")
    # A kill may have come right after result.json.
    kept.clear(folder, trials)
    best = trials[0]
    if best.checkpoint is None:  # an older version may have kept such a search
        raise tune_run.nothing_usable(len(trials), folder)
    # The model is that of the best trial, the average of several, or their ensemble.
    average, ensemble = soup.read(folder), together.read(folder)
    if ensemble is not None:
        # Its first member's job; a soup is of the best trial's.
        best = next((trial for trial in trials if trial.name == ensemble.members[0]), best)
    model = ensemble or average
    # Beside a mean of several, that of the best trial may be damaged or gone.
    _require_whole(folder, str(best.checkpoint) if model is None else model.checkpoint)
    trained = leaderboard.training_result(key, pinned.version, pinned.classes, best)
    if model is not None:
        trained = with_(trained, metrics=model.metrics, checkpoint=model.checkpoint)
    # Clocks decide in a search, and another folder may have come to another model: its registered
    # version is not this one's.
    made_of = checkpoint.weights_digest(Path(trained.checkpoint))
    shares = ensemble.shares if ensemble is not None else ()
    trained = with_(trained, key=key_of(key, made_of, *shares))
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
        full_epochs=sum(trial.whole(job.train.epochs) for trial in trials if trial.drawn),
        members=model.members if model else (),
        shares=shares,
        pinned=pinned,
        models=_models(job, trials),
        searched=job,
        reached=reached,
        ran_s=ran_s,
    )


def _require_whole(folder: Path, path: str) -> None:
    """Raise DataError if the model in a checkpoint is not what was written."""
    problem = checkpoint.verify(Path(path), model_only=True)
    if problem is not None:
        raise DataError(
            "The search has ended, and the weights of its model are damaged",
            got=f"{path}: {problem}",
            rule="Nothing altered is loaded",
            fix=f"Remove {folder / 'result.json'}, and run the same command again: it chooses "
            "among the trials whose weights are whole (search.keep says how many are kept)",
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
    ledger.combined = ledger.chosen = 0
    try:
        with ledger.reading(is_answered=True, phase="ensemble"):
            together.make(joining, cfg, pinned, data, folder, ledger.choosing())
    except TooShort:
        ledger.notes.append("No ensemble: there was no time to choose one")
    ledger.lap("ensemble")


def _average_best(
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
    # Weights of another backbone or resolution cannot be averaged, and the validation arrays
    # below are those of the best trial.
    # Heads of a first answer have other shapes.
    drawn = [trial for trial in trials if trial.kept and trial.drawn]
    alike = [trial for trial in drawn if data_key(replace(job, trial.changes)) == key]
    rule = job.train.stopping
    # Its seconds were a part of the ending.
    ledger.combined = max(0, ledger.combined - most * pinned.counts[job.feed.val])
    try:
        with ledger.reading(is_answered=True, phase="soup"):
            soup.make(
                alike[:most],
                lambda weights: validate(best_job, data[key], weights),
                rule.metric,
                rule.mode,
                folder,
            )
    except TooShort:
        ledger.notes.append("No soup: there was no time to judge one")
    ledger.lap("soup")


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
    trainable = tune_run.trainable(job, data, folder, resources, cfg.budget_s is not None)
    (folder / tune_run.OVER).unlink(missing_ok=True)
    ledger.on_over = (folder / tune_run.OVER).touch
    # What the search's rule looks at, and what the user sees.
    rule = job.train.stopping
    devices = resources.trial.get("GPU", 1.0)
    monitor = Monitor(
        strategy.total,
        rule.metric,
        rule.mode,
        cfg.stopping,
        devices,
        opening.beside(strategy.first, rule.metric, rule.mode, progress),
        keeping.ended,
        most_money=cfg.limits.money,
        heads_s=sum(trial.device_s for trial in strategy.first.trials),
        workers=job.train.most_workers,
        ledger=ledger,
        model=job.model,
    )
    # After a kill Tune continues; its own folder has the state.
    tuner = tune_run.restored(folder / "tune", trainable)
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
        run_config = tune_run.run_config(strategy.scheduler, folder, resources, monitor)
        tuner = tune.Tuner(trainable, tune_config=tune_config, run_config=run_config)
    else:
        monitor.put_into(tune_patches.run_config(tuner))
    multi_worker = resources.worker is not None
    with (
        tune_patches.applied(multi_worker),
        saved_state.kept_whole(keeping.saved),
        tune_run.failures_in_a_line(),
        interrupts.heeded(),
    ):
        results = tuner.fit()
    first = strategy.first.trials
    ranked = keeping.result(tune_run.ranked(results, job, monitor, folder, first, ledger))
    # Tune calls back for a trial's end before it counts the trial as ended, so the listener has not
    # yet seen the last one.
    standings = leaderboard.standings(ranked, rule.metric, rule.mode)
    progress(strategy.total, strategy.total, standings)
    opening.write_reached(folder, strategy.first, monitor.reached, monitor.elapsed(), rule.mode)
    return ranked, monitor.stopped
