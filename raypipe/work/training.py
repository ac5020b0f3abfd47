"""`train` and `tune`: a model is trained, or searched and trained once more, and registered.

Whoever searches without being `raypipe tune` (the quickstart, benchmarks) calls
`search_and_register`, or `search_and_refit` where nothing is to be registered.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from raypipe.cluster import usage
from raypipe.cluster.connect import connect, nodes
from raypipe.config import replace
from raypipe.costs.spent import Price, Spent
from raypipe.errors import DataError
from raypipe.failures import find_own
from raypipe.feed.dataset import FeedConfig, Pinned, pin
from raypipe.job import Job
from raypipe.models import labels
from raypipe.monitor.monitor import Monitor
from raypipe.registry import promote, runs, tracking, uploads
from raypipe.registry.runs import KEY
from raypipe.registry.store import Store, answer_s, open_store
from raypipe.registry.versions import ModelVersion
from raypipe.search import feasible, finished, outcome, refit, tuner, variants
from raypipe.search import page as search_page
from raypipe.search import telling as telling_trials
from raypipe.search.ledger import Ledger
from raypipe.search.limits import Variant
from raypipe.search.result import SearchResult
from raypipe.search.trials import tune_patches
from raypipe.train import telling, trainer, unseen
from raypipe.train.job import TrainJob, TrainResult
from raypipe.train.launch import join, nodes_of, wants_gpu
from raypipe.train.measure.utilisation import utilisation
from raypipe.train.origin import CalledFor
from raypipe.train.publish import publish
from raypipe.train.spark_place import refuse
from raypipe.work import artifacts, in_time, kept_refits, lacking, monitoring
from raypipe.work.results.models import Registered, Searched, Trained
from raypipe.work.show import Show, Training

FEW_CLASSES = 20  # with more of them that are all numbers, a regression may be meant


@artifacts.kept
def train(job: Job, show: Show) -> Trained:
    """Train one model and register it; the first model becomes champion."""
    with monitoring.opened(job, "train") as monitors:
        return _train(job, show, monitors)


def _train(job: Job, show: Show, monitors: Sequence[Monitor]) -> Trained:
    began = time.monotonic()
    pinned = pin(job.table, job.feed, kind=job.model.task)
    job = _with_moves(replace(job, {"train.workers": join(job.training).train.workers}))
    # A wrong address must not cost a training.
    store = open_store(job.run, job.registry, job.artifacts)
    _tell_of_champion(store, pinned, show)
    _tell_of_splits(pinned, job.feed, show)
    if job.idle_augment:
        show.say(job.idle_augment)
    show.say(f"Training {job.model.name} ({job.model.mode}) with {_workers(job)}")
    with _shown(job.training, show) as told:
        planned = trainer.plan(job.training, pinned)
        epoch = telling.epochs(monitors, planned.job, planned.key, told.epoch)
        result = trainer.run(planned, epoch, told.step)
    telling.finished(monitors, planned.job, result)
    metric = planned.job.train.stopping.metric
    with _kept("training", planned.folder, metric, result.metrics):
        version = publish(store, planned, result, "train")
    registered = Registered(version, crown_first(store, version), store.uri)
    test = _test(planned, result, store)
    price = Price.of(job.cost, nodes_of(job.training))
    spent = Spent(time.monotonic() - began, result.device_s, price)
    runs.log_once(store, result.key, spent.logged())
    used = utilisation(usage.read(planned.folder / usage.FILE), result.history)
    return Trained(planned.job, result, registered, spent, test, used)


def _shown(job: TrainJob, show: Show) -> AbstractContextManager[Training]:
    train = job.train
    # A head that is fitted at once counts as one.
    epochs = train.epochs if train.solver == "steps" else 1
    return show.training(epochs, train.stopping.metric, train.anneal_s)


def _with_moves(job: Job) -> Job:
    """The job with its table of moves named, if that is below `artifacts.uri`: the file of a
    training knows no such section, and a promotion by that file would be in another table.
    """
    alone = tracking.moves_of(job.run, job.registry).uri
    if tracking.moves_of(job.run, job.registry, job.artifacts).uri == alone:
        return job  # nothing is named: the folder may be moved
    placed = tracking.placed(job.run, job.registry, job.artifacts)
    return job.model_copy(update={"registry": placed})


def _tell_of_splits(
    pinned: Pinned, feed: FeedConfig, show: Show, refits: str | None = None
) -> None:
    """Say so if images are trained on, or chosen by, and judged on: their metrics would look too
    good. And if what is judged was not learned, or if nothing is.

    refits: what a refit trains on, which is the model then.
    """
    for name in ("val", "test"):
        split = getattr(feed, name)
        if pinned.common(feed.train, split):
            means = "its metrics say nothing about new images"
            if name == "test":
                means = "the model is not tested"
            show.say(
                f"feed.{name}={split} has images that are trained on (feed.train={feed.train}): "
                f"{means}"
            )
    for name in ("val", "test"):
        split = getattr(feed, name)
        missing = pinned.unlearned(feed.train, split)
        if missing:
            # A refit may not come: it has no time, or comes to nothing.
            later = refits is not None and not pinned.unlearned(refits, split)
            learns = "no model learns them before search.refit" if later else "no model learns them"
            show.say(
                f"{len(missing)} of {len(pinned.classes)} classes have no training images, as "
                f"{next(iter(missing))!r}: {learns}, and {sum(missing.values()):,} "
                f"labels in feed.{name}={split} are of them"
            )
    if not pinned.counts[feed.test]:
        # A slip, where it names none of the table's splits.
        means = ": the model is not tested"
        if refits is not None:
            means = (
                ". search.refit trains on validation images, too: nothing will say how good the "
                "model is (search.refit=null keeps them apart)"
            )
        show.say(
            f"The table has no labelled images in feed.test={feed.test} (its splits are "
            f"{', '.join(sorted(pinned.splits))}){means}"
        )
    _tell_of_labels(pinned, feed, show)
    if pinned.common(feed.val, feed.test):
        show.say(
            f"feed.test={feed.test} has images that choose the epoch (feed.val={feed.val}): "
            "its metrics are too good"
        )


def _tell_of_labels(pinned: Pinned, feed: FeedConfig, show: Show) -> None:
    """Say so if images lack a label, or labels are used by nobody or look like measurements."""
    used: set[str | None] = set()
    for name in ("train", "val", "test"):
        used |= {*pinned.parts(getattr(feed, name))}
    bare = {s: rows for s, rows in pinned.columns.unlabelled().items() if s in used}
    if bare:
        named = ", ".join(f"{rows:,} of {split}" for split, rows in bare.items())
        show.say(f"Images without a label are not used: {named}")
    others = {s: rows for s, rows in pinned.columns.labelled().items() if s not in used}
    if feed.leave_out is not None:
        others.pop(None, None)  # what is left out has no split here
    if others:
        named = ", ".join("no split" if one is None else repr(one) for one in [*others][:3])
        show.say(
            f"{sum(others.values()):,} labelled images are not used: their split is {named}. "
            "feed.train, feed.val and feed.test say which are"
        )
    classes = pinned.classes
    is_many = pinned.task.kind == "single_label" and len(classes) > FEW_CLASSES
    if is_many and all(labels.read("regression", name).text for name in classes):
        show.say(
            f"All {len(classes)} classes are numbers. If they are measurements, set "
            "model.task=regression"
        )


def _tell_of_champion(store: Store, pinned: Pinned, show: Show) -> None:
    """Say so if the registered model answers another question so far."""
    said = promote.beside(store, pinned.task)
    if said:
        show.say(said)


def _workers(job: Job) -> str:
    fewest, most = job.train.fewest_workers, job.train.most_workers
    if fewest == most:
        return f"{most} worker{'s' * (most > 1)}"
    return f"{fewest} to {most} workers"


def _test(planned: trainer.Plan, result: TrainResult, store: Store) -> dict[str, float]:
    """The result's metrics on the test split, in its MLflow run too."""
    tested = unseen.test(planned, result)
    if tested and (run_id := runs.finished_run(store, result.key)):
        runs.log_metrics(store, run_id, tested)
    return tested


@artifacts.kept
def tune(job: Job, show: Show) -> Searched:
    """Search hyperparameters and register the best model; the first one becomes champion."""
    with monitoring.opened(job, "tune") as monitors:
        return _tune(job, show, monitors)


def _tune(job: Job, show: Show, monitors: Sequence[Monitor]) -> Searched:
    ledger, job = Ledger(job.search.budget_s, show.began), _with_moves(job)
    refuse(job.training, "A search")
    with ledger.reading():
        pinned = pin(job.table, job.feed, kind=job.model.task)
        # Trials' processes import Tune's patches when they start.
        resources = connect(job.cluster, preload=tune_patches.PRELOAD)
    ledger.started()
    wanted = refit.wanted(job.training, job.search, pinned)
    refits = None if wanted is None else refit.learned(job.training, wanted)
    _tell_of_splits(pinned, job.feed, show, refits)
    price = price_of(job, resources)
    result, version, store = search_and_register(job, show, pinned, price, monitors, ledger)
    registered = Registered(version, crown_first(store, version), store.uri)
    test = _test(result.plan, result.best, store)
    a_second = price.usd_per_device_s if price else None
    parts = outcome.blocks(result, *_timings(result, ledger))
    page = search_page.write(result, version, store, test, a_second, parts, ledger.notes)
    # From the start of the process, as a budget counts.
    seconds, device_s = ledger.spent_s, result.device_s
    spent = Spent(seconds, device_s, price, result.spared.share, result.spared.device_s)
    runs.log_once(store, result.best.key, spent.logged())
    best = result.folder / finished.BEST
    ledger.lap("ending")
    return Searched(result, registered, page, best, spent, test, result.used, ledger)


def _timings(result: SearchResult, ledger: Ledger) -> tuple[dict[str, Variant], Variant | None]:
    """What the models of a search take, for its page, as variants.of_result.

    A budget has no seconds to time them for the page alone. There it is what search.limits had
    measured.
    """
    if ledger.budget_s is not None:
        return variants.read(result.folder), None
    return variants.of_result(result)


@contextmanager
def _kept(what: str, folder: Path, metric: str, metrics: Mapping[str, float]) -> Iterator[None]:
    """Say what is there when the images that judge a finished model cannot be read.

    what: search or training, whose result is in `folder`. metrics: of validation images.
    """
    try:
        yield
    except Exception as e:
        # Ray wraps what its tasks raise.
        own = find_own(e)
        if not isinstance(own, DataError):
            raise
        reached = f"{metric} {metrics[metric]:.4g}, " if metric in metrics else ""
        kept = f"Its result ({reached}{folder}) is kept, and no model is registered"
        again = f"Once that is mended, run the same command again: it goes on after the {what}"
        raise type(own)(
            f"The {what} has ended, and then this failed: {own.what}",
            got=own.got,
            rule=". ".join(part for part in (own.rule, kept) if part),
            fix=". ".join(part for part in (own.fix, again) if part),
        ) from None


def price_of(job: Job, resources: dict[str, float]) -> Price | None:
    """What the nodes cost, if the configuration says on what it runs."""
    kind = "GPU" if wants_gpu(job.train, resources) else "CPU"
    return Price.of(job.cost, nodes(), resources.get(kind, 0.0))


def search_and_register(
    job: Job,
    show: Show,
    pinned: Pinned | None = None,
    price: Price | None = None,
    monitors: Sequence[Monitor] = (),
    ledger: Ledger | None = None,
) -> tuple[SearchResult, ModelVersion, Store]:
    """The search, its refit if the job asks for one, and the registered model.

    pinned: the job's rows, if they are pinned already. price: of the nodes, for the trials' runs.
    ledger: the clock of search.budget_s; None: it begins now.
    """
    ledger = ledger or Ledger(job.search.budget_s)
    with ledger.reading():
        job = job.model_copy(update={"train": feasible.one_worker(job.training).train})
        # Before a store is made.
        feasible.check(job.training, job.search, pinned)
        store = open_store(job.run, job.registry, job.artifacts)
        if ledger.budget_s is not None:
            ledger.forecast.answer_s = answer_s(store)
            ledger.forecast.uploads = _uploads(job, store)
        if pinned is not None:
            _tell_of_champion(store, pinned, show)
    found = _searched(job, show, pinned, monitors, ledger)
    # Two terminals that searched together would plan two refits, and register two versions.
    with ledger.owned(found.folder):
        result = _with_refit(job, found, show, monitors, ledger)
        if not result.is_of_one_refit:
            telling.finished(monitors, result.plan.job, result.best)
        children = result.runs(price.usd_per_device_s if price else None)
        plan, until, runs_until = in_time.ending(result, ledger)
        asked = _called_for(result, plan, job.train.start_from)
        folders = [result.folder]
        # A refit's own metrics have nothing of validation.
        with _kept("search", found.folder, found.metric, found.best.metrics):
            version = publish(
                store,
                plan,
                result.best,
                "search",
                children,
                folders,
                asked,
                until,
                result.stay,
                runs_until,
            )
        lacking.note(version, result.job.run, ledger)
        kept_refits.settle(job, found, result, ledger)
        finished.close(result)
    return result, version, store


def _uploads(job: Job, store: Store) -> tuple[float | None, ...]:
    """Of each store elsewhere that gets the package, MB a second as they were noted last."""
    places = [uploads.place(store), uploads.place_of(job.artifacts.uri or "")]
    return tuple(uploads.mb_per_s(store.folder, place) for place in places if place)


def _called_for(result: SearchResult, planned: trainer.Plan, began: str | None) -> CalledFor:
    """Why a search made its model. began: `train.start_from` of its job."""
    asked = CalledFor(
        "tune", "raypipe tune was called", device_s=result.device_s, heads=result.heads
    )
    # A refit starts from the best trial's weights, and an ensemble's job is its first member's:
    # what trials started from is the search's to say. `publish` says the plan's own.
    if (result.refitted or result.shares) and planned.job.train.start_from != began:
        return asked.behind(began)
    return asked


def search_and_refit(
    job: Job,
    show: Show,
    pinned: Pinned | None = None,
    monitors: Sequence[Monitor] = (),
    ledger: Ledger | None = None,
) -> SearchResult:
    """The search, and its refit if the job asks for one; nothing is registered.

    pinned, ledger: as `search_and_register` takes them.
    """
    ledger = ledger or Ledger(job.search.budget_s)
    with ledger.reading():
        job = job.model_copy(update={"train": feasible.one_worker(job.training).train})
    found = _searched(job, show, pinned, monitors, ledger)
    with ledger.owned(found.folder):
        return _with_refit(job, found, show, monitors, ledger)


def _searched(
    job: Job, show: Show, pinned: Pinned | None, monitors: Sequence[Monitor], ledger: Ledger
) -> SearchResult:
    # What is in here cannot look at a clock, until trials run.
    with ledger.reading():
        pinned = pinned or pin(job.table, job.feed, kind=job.model.task)
        in_time.begin(job, pinned, ledger)
        with show.searching(job.train.stopping.metric) as told:
            listener = telling_trials.standings(monitors, job.training, told)
            return tuner.search(job.training, job.search, listener, pinned, ledger)


def _with_refit(
    job: Job, found: SearchResult, show: Show, monitors: Sequence[Monitor], ledger: Ledger
) -> SearchResult:
    def train(again: TrainJob, found: SearchResult, until: float | None) -> SearchResult:
        return _refitted(again, found, show, monitors, until)

    return in_time.refitted(job, found, ledger, train)


def _refitted(
    again: TrainJob,
    found: SearchResult,
    show: Show,
    monitors: Sequence[Monitor],
    until: float | None,
) -> SearchResult:
    show.say(
        f"Training {found.trials[0].name} once more, on {again.feed.train} at "
        f"{again.model.pixels} px: what {again.feed.val} says is no test now"
    )
    with _shown(again, show) as told:
        planned = refit.planned(again, found)
        epoch = telling.epochs(monitors, planned.job, planned.key, told.epoch)
        done = refit.refit(planned, found, epoch, told.step, until)
    # Under the key of its epochs: an ensemble of several refits has another one.
    telling.finished(monitors, planned.job, done.best)
    return done


def crown_first(store: Store, version: ModelVersion) -> ModelVersion | None:
    """The first model becomes champion; a later one has to win against it (raypipe retrain).

    Returns the champion. None: there was one, and somebody has taken the alias away. Nothing has
    compared this version, so it stays a challenger.
    """
    champion = promote.champion(store)
    if champion is None and not promote.had_champion(store):
        # Another training may have been faster: then its model is the first.
        with suppress(promote.Lost):
            promote.promote(
                store, version, expected=None, evidence={"first": version.tags.get(KEY)}
            )
        return promote.require_champion(store)
    return champion
