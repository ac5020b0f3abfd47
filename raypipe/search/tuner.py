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
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import tune

from raypipe.cluster.recorder import recorded
from raypipe.cluster.usage import FILE as USAGE
from raypipe.config import dump, key_of, replace, save
from raypipe.feed.dataset import Pinned, pin
from raypipe.models import fingerprint
from raypipe.search import (
    budget,
    feasible,
    finished,
    first_answer,
    kept,
    leaderboard,
    left,
    opening,
    several,
    soup,
    starts,
    together,
    trial_files,
    tune_run,
    variants,
)
from raypipe.search.first_answer import FirstAnswer
from raypipe.search.leaderboard import Trial
from raypipe.search.ledger import Ledger, TooShort
from raypipe.search.limits import SearchLimits
from raypipe.search.result import SearchResult
from raypipe.search.schedulers import mutations, pbt
from raypipe.search.schedulers.thaw_scheduler import freeze_thaw
from raypipe.search.schedulers.tune_schedulers import drawn_ahead, scheduler
from raypipe.search.searchers.tune_searchers import candidates, plan, searcher
from raypipe.search.settings import SearchConfig
from raypipe.search.space.space import Changes, Space
from raypipe.search.trials import interrupts, saved_state, tune_patches
from raypipe.search.trials.by_clock import ByClock
from raypipe.search.trials.monitor import Listener, Monitor
from raypipe.search.trials.trial import data_key, folder_name
from raypipe.search.trials.trial_data import decoded_images, embedded_here, prepare_data
from raypipe.search.trials.trial_resources import at_once, gpu_share, plan_resources
from raypipe.search.warm_start import Earlier, earlier
from raypipe.tables.table import TableVersion
from raypipe.train.auto import finders
from raypipe.train.job import TrainJob
from raypipe.train.launch import require_shared_folder
from raypipe.train.stopping import OF_BUDGET
from raypipe.train.trainer import prepare
from raypipe.train.worker import Data

log = logging.getLogger("raypipe")


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
    job = feasible.one_worker(job)
    own_starts = starts.of(cfg)
    is_default, samples = cfg.space is None, cfg.samples
    cfg, space = feasible.check(job, cfg, rows)
    if cfg.samples < samples:
        log.warning(
            "train.solver=%s takes no steps, and nearly all that the default space draws are "
            "settings of steps: one trial is run. Set search.space to compare heads",
            job.train.solver,
        )
    if said := _idle_augment(cfg, space):
        log.warning("%s", said)
    if cfg.populated and is_default:
        log.info(
            "search.scheduler=%s draws what can change while a trial trains: %s. All trials have "
            "the job's other settings, as model.name=%s, model.mode=%s and %d px",
            cfg.scheduler,
            ", ".join(field.name for field in space.fields),
            job.model.name,
            job.model.mode,
            job.model.pixels,
        )
    job = space.job
    # Trials share what is found: one batch size and learning rate for all, unless they draw them.
    share = gpu_share(job, cfg)
    job = finders.resolve(job, rows, lambda: prepare(job, rows), space.always, share)
    space = space.of(job)

    ledger = ledger or Ledger(cfg.budget_s)
    ledger.refits, ledger.refit_share = cfg.trains_again, cfg.refit_share
    ledger.fits_heads_again = cfg.refit is not None
    key_at = partial(name_of, job, cfg, space)
    key = key_at(rows.version)
    # A refit comes after the search and does not change it.
    asked, cfg = cfg, cfg.model_copy(update={"refit": None})
    folder = job.run.path / "search" / key
    begins = not folder.exists()
    # A finished one may run out of time, too: until its limits are measured and its result is read.
    ledger.goes_on = (folder / "tune").exists() or (folder / "result.json").exists()
    if begins and (said := left.unfinished(folder, dump(job, search=cfg), key_at, rows.version)):
        log.warning("%s", said)
    started = time.perf_counter()
    if cfg.limits.of_models:
        # Of a finished search as well: another refit may break a limit.
        heads = first_answer.models(job, rows) if cfg.first_answer else []
        with ledger.owned(folder), ledger.reading(phase="limits"):
            space = variants.limited(space, asked, rows, folder, heads)
        ledger.lap("limits")
    hints: list[Earlier] = []
    if cfg.warm_start:
        with ledger.owned(folder):
            hints = earlier(space.job, space, folder)
    for line in starts.unused(cfg, space, own_starts, hints):
        log.warning("%s", line)
    if not (folder / "result.json").exists():
        with ledger.owned(folder):
            # Another process may have finished the search while this one waited.
            if not (folder / "result.json").exists():
                usage = recorded(folder / USAGE, job.cluster.usage_every_s)
                with tune_patches.alone(), usage:
                    _search_into(folder, cfg, space, rows, progress, ledger)
    seconds = time.perf_counter() - started
    result = finished.result_of(folder, key, space, rows, seconds)
    # Kept with the result: whoever takes it up is told, too.
    ledger.notes += [note for note in result.notes if note not in ledger.notes]
    if result.checked_on:
        ledger.notes.append(f"The ensemble was checked {result.checked_on}")
    return result


def _idle_augment(cfg: SearchConfig, space: Space) -> str:
    """Which settings of `augment` change no trial and no refit, in words; "" if they all count."""
    modes = {*space.values("model.mode"), (cfg.refit_changes or {}).get("model.mode", "frozen")}
    if "model.mode" not in space.always:
        modes.add(space.job.model.mode)
    if modes != {"frozen"}:
        return ""
    # A default space has more fields than a frozen trial draws.
    return space.job.idle_if_frozen(space.drawable({"model.mode": "frozen"}))


def name_of(job: TrainJob, cfg: SearchConfig, space: Space, version: TableVersion) -> str:
    """The name of a search's folder: a hash of everything that determines its trials.

    job, cfg, space: with all that the search fills in.
    """
    return key_of(job.training_key(version), _in_key(cfg) | _sources(space))


def _sources(space: Space) -> dict[str, Any]:
    """Hashes of the user's own files to which drawn backbones lead; {} where none does.

    The job's own backbone is in its training's key.
    """
    found = {str(drawn): fingerprint.source(str(drawn)) for drawn in space.values("model.name")}
    files = {drawn: source for drawn, source in found.items() if source}
    return {"sources": files} if files else {}


def _in_key(cfg: SearchConfig) -> dict[str, Any]:
    """What of the search determines its trials."""
    # Nor does what is kept; and a preset is what it has set.
    left_out = {"keep", "refit", "preset"}
    # Without them, the key is the same as before they were there.
    if cfg.budget_s is None:
        left_out |= {"budget_s", "refit_share"}
    elif not cfg.trains_again:
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
    feasible.require_packages(space, len(pinned.classes))
    save(job, folder / "config.yaml", search=cfg)
    # What a killed run chose may be of another best trial.
    soup.forget(folder)
    together.forget(folder)
    # What to try. After a restore all of this is the same again: hints are stored, and the
    # planned trials depend on the seed.
    hints = earlier(job, space, folder) if cfg.warm_start else []
    planned = [] if space.all_barred else plan(job, cfg, space, hints)
    spare: list[Changes] = []
    if space.by_clock:
        # Each has all of the time: so many run side by side.
        resources = ray.cluster_resources()
        takes = plan_resources(job, cfg, resources, len(planned))
        beside = at_once(takes, resources, len(planned))
        planned, spare = planned[:beside], planned[beside : 2 * beside]
        # Nothing is read for those that may never begin.
        read_for = {data_key(replace(job, changes)) for changes in planned}
        spare = [one for one in spare if data_key(replace(job, one)) in read_for]
    total = len(planned)
    first = opening.answer(job, cfg, pinned, folder, progress, total, ledger)
    # Every array that a trial may need is in the object store before the first one starts.
    is_answered = any(trial.checkpoint is not None for trial in first.trials)

    def end_with_it(why: str) -> None:
        ledger.forecast.heads_alone = True
        if cfg.soup > 1:
            ledger.notes.append("No soup: no trial has begun")

        def combine(heads: list[Trial]) -> None:
            if cfg.ensemble > 1:
                several.ensemble(folder, job, cfg, heads, pinned, first.data, ledger)

        opening.end_with(folder, job, cfg, first, why, combine, ledger.notes)

    if space.all_barred:
        if not is_answered:
            raise opening.nothing_fitted(cfg.limits)
        end_with_it("search.limits leaves no trial that may begin")
        return
    # What trials reached before a kill is a part of the result: there, the monitor ends them.
    why = None if (folder / "tune").exists() else opening.has_target(job, cfg, first)
    if why is not None:
        end_with_it(why)
        return
    arrays = candidates(cfg, space, planned)
    ledger.forecast.slowest_of(replace(job, changes).model for changes in arrays)
    no_time = False
    try:
        with ledger.reading(is_answered):
            read = prepare_data(job, pinned, arrays)
        # What a first answer embeds is no part of this time.
        ledger.trials_begin(embedded_here(read))
    except TooShort:
        # What trials reached before a kill is worth another start.
        if not is_answered or (folder / "tune").exists():
            raise
        no_time = True
    if no_time:
        # Not above: whatever fails here would be told as the end of the budget.
        end_with_it(f"{OF_BUDGET}{ledger.budget_s:g} s left no time for trials")
        return
    data = first.data | read
    timed = job
    by_clock = None
    if space.by_clock:
        # Not a value of the trials: their names, and who trains the winner again, know no clock.
        left_s = (ledger.left_s(total, None) or 0.0) - ledger.forecast.again_s
        timed = replace(job, {"train.anneal_s": budget.clocked_s(left_s)})
        by_clock = ByClock.of(total, left_s)

    # Who chooses the values, and who ends trials early.
    make_searcher = partial(
        searcher, job, cfg, space, [*planned, *spare], hints, folder, spare=len(spare)
    )
    resources = ray.cluster_resources()
    concurrent = plan_resources(job, cfg, resources, total, len(space.cells)).concurrent
    if cfg.populated:
        tune_scheduler = pbt.population(job, cfg, space, folder)
    elif cfg.scheduler == "freeze_thaw":
        rule = job.train.stopping
        tune_scheduler = freeze_thaw(rule, space.most_epochs, space, job.run.seed, concurrent)
    else:
        # The longest trial decides how far the rungs go.
        longest = job.train.model_copy(update={"epochs": space.most_epochs})
        tune_scheduler = scheduler(cfg, longest, total, concurrent)
    strategy = _Strategy(total, make_searcher, tune_scheduler, first, len(spare), by_clock)
    keeping = kept.Kept(job, cfg, folder)
    trials, stopped = _run(timed, cfg, strategy, data, folder, progress, keeping, ledger)
    ledger.lap("trials")

    # After the last trial. A kill before the last line repeats these steps.
    mutations.write_schedule(folder / "schedule.yaml", trials[0].schedule)
    if cfg.soup > 1 and trials[0].drawn:
        several.soup_of_best(job, cfg.soup, trials, pinned, data, folder, ledger)
    elif cfg.soup > 1:
        ledger.notes.append("No soup: a head of the first answer is better than all trials")
    if cfg.ensemble > 1:
        several.ensemble(folder, job, cfg, trials, pinned, data, ledger)
    decoded = decoded_images(data)
    trial_files.write(folder / "result.json", trials, stopped, decoded, ledger.notes)
    kept.clear(folder, trials)


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

    spare: int = 0
    """Further trials, for those that diverge."""

    by_clock: ByClock | None = None
    """Of trials that train by it."""


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
    within_budget, by_clock = cfg.budget_s is not None, strategy.by_clock
    trainable = tune_run.trainable(job, data, folder, resources, within_budget, by_clock)
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
        first=opening.best_head(strategy.first, rule.metric, rule.mode),
        result=job.train.result,
        ledger=ledger,
        model=job.model,
    )
    # After a kill Tune continues; its own folder has the state.
    tuner = tune_run.restored(folder / "tune", trainable, cfg.scheduler)
    if tuner is None:
        # The searcher is made here, because a restored search brings its own.
        ahead = drawn_ahead(cfg, strategy.total, resources.concurrent)
        tune_config = tune.TuneConfig(
            metric=rule.metric,
            mode=rule.mode,
            # -1: the searcher says when there are no more. Tune would call the search finished when
            # the last trial is drawn, which freeze_thaw does at once (see planned.py).
            num_samples=-1 if cfg.scheduler == "freeze_thaw" else strategy.total + strategy.spare,
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
    drawn = sum(trial.drawn for trial in ranked)
    progress(drawn, max(drawn, strategy.total), standings)
    opening.write_reached(folder, strategy.first, monitor.reached, monitor.elapsed(), rule.mode)
    return ranked, monitor.stopped
