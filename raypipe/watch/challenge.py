"""Train a challenger: with the champion's settings, or by a small search around them.

Of a champion that is an ensemble of heads, all heads (heads.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from raypipe.cluster import usage
from raypipe.feed.dataset import Pinned, pin
from raypipe.models.ensemble import Member
from raypipe.monitor.monitor import Monitor
from raypipe.registry.store import Store
from raypipe.registry.versions import ModelVersion
from raypipe.report.formats import cell
from raypipe.search import finished, refit, refit_together, tuner
from raypipe.search import telling as telling_trials
from raypipe.search.result import SearchResult
from raypipe.search.settings import SearchConfig
from raypipe.train import telling, trainer
from raypipe.train.job import TrainJob
from raypipe.train.loop import LoopState
from raypipe.train.measure.utilisation import Utilisation, utilisation
from raypipe.train.origin import CalledFor
from raypipe.train.publish import publish
from raypipe.watch import around, decide, heads
from raypipe.watch.settings import WatchConfig

# The challenger, the key of its training, and the device seconds of all that led to it.
Challenger = tuple[ModelVersion, str, float]


def train(
    store: Store,
    job: TrainJob,
    opened: Pinned,
    say: Callable[[str], None],
    why: CalledFor,
    monitors: Sequence[Monitor] = (),
) -> Challenger:
    """The champion's settings and no others, on the new rows."""
    say(f"Training a challenger on {_table(job)} with {_workers(job)}")
    planned = trainer.plan(job, _pin(job, opened))

    def told(metrics: dict[str, float], state: LoopState) -> None:
        say(f"epoch {state.epoch}: {decide.headline(metrics)}")

    result = trainer.run(planned, telling.epochs(monitors, planned.job, planned.key, told))
    telling.finished(monitors, planned.job, result)
    _tell(utilisation(usage.read(planned.folder / usage.FILE), result.history), say)
    version = publish(store, planned, result, "challenger", called_for=why)
    return version, result.key, result.device_s


def _tell(used: Utilisation | None, say: Callable[[str], None]) -> None:
    """How busy the nodes were; nothing where the training was too short to say."""
    if used is not None:
        say(f"Nodes: {used.text()}")


def _pin(job: TrainJob, opened: Pinned) -> Pinned:
    """The challenger's rows, of the version that is open: its splits may be named otherwise."""
    return pin(job.table, job.feed, kind=job.model.task, opened=opened)


def search(
    store: Store,
    cfg: SearchConfig,
    watch: WatchConfig,
    first: TrainJob,
    opened: Pinned,
    say: Callable[[str], None],
    why: CalledFor,
    monitors: Sequence[Monitor] = (),
) -> Challenger:
    """The best of some trials around the champion's settings.

    A killed search goes on where it was; a finished one is read again.
    """
    base, asked = around.searched(cfg, watch, first)
    trials = asked.samples
    where = _table(first)
    some = f"up to {trials} trials around" if trials > 1 else "one trial of"
    say(f"Searching for a challenger on {where}: {some} the champion's settings")
    if first.feed.sampling == "sources":
        how = "equally often" if first.feed.mix is None else f"by {first.feed.mix}"
        say(f"Sources are drawn {how}")
    told = telling_trials.standings(monitors, base, lambda done, total, standings: None)
    found = tuner.search(base, asked, told, pinned=_pin(base, opened))
    best = found.trials[0]
    drawn = cell(dict(sorted(best.changes.items())))
    _tell(found.used, say)
    say(f"Best on validation: {best.name}, {found.metric} {best.metric:.4g} ({drawn})")

    # The best settings once more, on validation images too, if the job says so.
    def train(again: TrainJob, member: SearchResult) -> SearchResult:
        name = member.trials[0].name
        say(f"Training {name} once more, on {again.feed.train}, with {_workers(again)}")
        planned = refit.planned(again, member)
        epoch = telling.epochs(monitors, planned.job, planned.key, lambda metrics, state: None)
        done = refit.refit(planned, member, epoch, lambda position: None)
        # Under the key of its epochs: an ensemble of several refits has another one.
        telling.finished(monitors, planned.job, done.best)
        return done

    if asked.refit is not None:
        found = refit_together.refitted(base, found, asked, train)
    if not found.is_of_one_refit:
        telling.finished(monitors, found.plan.job, found.best)
    why = replace(why, device_s=found.device_s)
    folders = [found.folder]
    version = publish(
        store, found.plan, found.best, "challenger", found.runs(), folders, why, stay=found.stay
    )
    finished.close(found)
    return version, found.best.key, found.device_s


def of_heads(
    store: Store,
    members: Sequence[Member],
    cfg: SearchConfig,
    first: TrainJob,
    opened: Pinned,
    say: Callable[[str], None],
    why: CalledFor,
    monitors: Sequence[Monitor] = (),
) -> Challenger:
    """The champion's heads, all fitted to the new rows, within search.limits."""
    rows = _pin(first, opened)
    refit.check_splits(first, cfg, rows)
    of_each = heads.jobs(members, first, refit.wanted(first, cfg, rows))
    rows = _pin(of_each[0], opened)
    heads.check(members, of_each, cfg.limits, rows)
    say(f"Fitting the champion's {len(members)} heads to {_table(first)}, {of_each[0].feed.train}")
    found = heads.fitted(members, of_each, lambda job: _pin(job, opened), monitors)
    telling.finished(monitors, found.plan.job, found.best)
    version = publish(store, found.plan, found.best, "challenger", called_for=why)
    return version, found.best.key, found.best.device_s


def _table(job: TrainJob) -> str:
    return f"{job.table.uri}@v{job.table.version}"


def _workers(job: TrainJob) -> str:
    return f"{job.train.most_workers} worker{'s' * (job.train.most_workers > 1)}"
