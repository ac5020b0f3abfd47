"""One function a verb: a validated Job in, a result out. `show` gets messages and progress.

Each checks its table before it starts a cluster, and the rest before it trains. All may be killed
and run again. Those that make a model are in training.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from raypipe.cluster.connect import connect, nodes
from raypipe.config import replace
from raypipe.costs.spent import Price, Spent
from raypipe.feed.dataset import pin
from raypipe.job import Job
from raypipe.monitor.monitor import Monitor
from raypipe.registry import fetching, promote, runs
from raypipe.registry.store import open_store
from raypipe.serve import batch, stream
from raypipe.serve.batch import Calls
from raypipe.tables import clean as cleaning
from raypipe.tables.ingest import ingest as ingest_images
from raypipe.tables.ingest import understand
from raypipe.tables.table import ImageTable
from raypipe.train.spark_place import refuse
from raypipe.watch import around, calls, events, examination, sinks
from raypipe.watch import check as drift_check
from raypipe.watch import retrain as loop
from raypipe.watch.check import CheckResult
from raypipe.watch.decide import Decision
from raypipe.watch.power import measure
from raypipe.watch.sinks import Sinks
from raypipe.watch.windows import Waiting
from raypipe.work import artifacts, find, monitoring, told
from raypipe.work import evaluate as evaluation
from raypipe.work.evaluate import Evaluated
from raypipe.work.results.data import Cleaned, Followed, Ingested, Predicted
from raypipe.work.results.watching import Drifted, Powered, Retrained, Waited
from raypipe.work.show import Show
from raypipe.work.training import price_of, train, tune

if TYPE_CHECKING:
    from raypipe.work.serve import Served

__all__ = [
    "clean",
    "drift",
    "evaluate",
    "ingest",
    "power",
    "predict",
    "retrain",
    "serve",
    "train",
    "tune",
]


@artifacts.kept
def ingest(job: Job, show: Show) -> Ingested:
    """Add a source's images to the job's table; with dry_run, only say what would be done."""
    cfg = job.ingest
    # A label is what the model that will learn from it says.
    if cfg.source.task is None:
        cfg = replace(cfg, {"from.task": job.model.task})
    if cfg.dry_run:
        return Ingested(job.table.uri, None, understand(cfg)[2])
    with show.progress(f"Ingesting {cfg.name}") as tick:
        known = cleaning.known_as(job.clean)
        done = ingest_images(job.table, cfg, tick, job.cluster, show.facts, known)
    return Ingested(job.table.uri, done, {})


@artifacts.kept
def clean(job: Job, show: Show) -> Cleaned:
    """Judge the images of the job's table, and tag a version without the ones to drop."""
    # A wrong name must not cost a cluster start.
    ImageTable.open(job.table).pin(job.table.version)
    connect(job.cluster)
    show.say(f"Looking at the images of {job.table.uri} with fastdup")
    return Cleaned(cleaning.clean(job.table, job.clean), job.clean.tag)


@artifacts.kept
def predict(job: Job, show: Show) -> Predicted | Followed:
    """Predict every image of predict.table, else watch.batch, else the job's table.

    With predict.follow the images of its new versions, too, until SIGTERM.
    """
    began = time.monotonic()
    source = job.predict.table or job.watch.batch or job.table
    ImageTable.open(source).pin(source.version)
    store = find.in_use(job)
    connect(job.cluster)
    if job.predict.follow:
        show.say(f"Following {source.uri}: SIGTERM or Ctrl-C ends it")
        calls = Calls(say=show.say)
        return Followed(stream.follow(store, job.run, source, job.predict, calls, show.progress))
    with show.progress(f"Predicting {source.uri}") as tick:
        calls = Calls(tick, show.say)
        done = batch.predict(store, job.run, source, job.predict, calls=calls)
    price = Price.of(job.cost, nodes())
    spent = Spent(time.monotonic() - began, done.device_s, price, of="prediction")
    return Predicted(done, spent)


@artifacts.kept
def evaluate(job: Job, show: Show) -> Evaluated:
    """The metrics of a registered model on a labelled table, and where it is worse."""
    return evaluation.evaluate(job, show)


@artifacts.kept
def serve(job: Job, show: Show) -> Served:
    """The champion behind HTTP, until SIGTERM or SIGINT."""
    # Not at the top: the other verbs should not wait for a web server's imports.
    from raypipe.work import serve as serving

    return serving.serve(job, show)


@artifacts.kept
def drift(job: Job, show: Show) -> Drifted | Waited:
    """Compare what came to watch.batch since the last check with the champion's reference."""
    with monitoring.opened(job, "drift") as monitors:
        return _drift(job, show, sinks.opened(job.run, job.watch.sinks, monitors))


def _drift(job: Job, show: Show, tell: Sinks) -> Drifted | Waited:
    checked = _check(job, show)
    run, happened = told.of_check(checked)
    # At once: the policy's tables may be out of reach, and later checks do not tell of this one.
    tell.send(*happened)
    called = _call(job, run, checked)
    tell.send(events.heartbeat(run, "drift"))
    if isinstance(checked, Waiting):
        return Waited(checked, called)
    return Drifted(checked, called)


def power(job: Job, show: Show) -> Powered:
    """How often the drift check of the job alarms without drift, and which changes it finds."""
    store = find.looked_at(job)
    champion = promote.require_champion(store)
    if job.drift.needs_sidecar:
        connect(job.cluster)
    package = fetching.fetch(store, champion)
    known = examination.known(package, package.reference())
    if job.watch.horizon is not None:
        show.say(
            f"This tests at drift.alpha={job.drift.alpha:g}. With watch.horizon checks alarm less "
            "often, and only larger changes are found"
        )
    with show.progress(f"Windows of the reference of {champion}", "windows") as tick:
        return Powered(measure(known, job.drift, job.watch.power, job.run.seed, tick), champion)


@artifacts.kept
def retrain(job: Job, show: Show) -> Retrained:
    """Check for drift; on drift train a challenger, compare it, and promote it when better."""
    with monitoring.opened(job, "retrain") as monitors:
        tell = sinks.opened(job.run, job.watch.sinks, monitors)
        return _retrain(job, show, tell, monitors)


def _retrain(job: Job, show: Show, tell: Sinks, monitors: Sequence[Monitor]) -> Retrained:
    began = time.monotonic()
    if around.is_search(job.watch, job.search):
        alone = "watch.retrain_samples=1 and search.refit=null"
        refuse(job.training, "The search for a challenger", alone)
    pinned = pin(job.table, job.feed, kind=job.model.task)
    checked, waiting = None, None
    if job.watch.batch is not None or not job.watch.force:
        found = _check(job, show)
        about, happened = told.of_check(found)
        tell.send(*happened)
        if isinstance(found, Waiting):
            show.say(str(found))
            waiting = found
        else:
            checked = found
    store = find.in_use(job)
    resources = connect(job.cluster)
    cfg = loop.RetrainConfigs(job.search, job.watch, job.gate, job.clean)
    current = promote.require_champion(store)
    run = told.run_of(checked, current, pinned.version)
    tell.send(events.state(run, "started"))

    def reached(state: str) -> None:
        tell.send(events.state(run, state))

    def decided(decision: Decision) -> None:
        # A check that waits for images and what follows from earlier ones are one answer.
        reason = f"{waiting}. {decision.reason}" if waiting else decision.reason
        said = Decision(decision.act, reason)
        of = about if waiting else run
        calls.keep(job.run, job.watch, of, store.model, str(current), said, seal=current.seal)

    done = loop.retrain(
        store,
        job.training,
        cfg,
        checked,
        say=show.say,
        pinned=pinned,
        told=reached,
        decided=decided,
        monitors=monitors,
    )
    if done.challenger is None:
        # It may have stopped after the policy: another process is at it, or it broke too often.
        decided(done.decision)
    spent = None
    if done.key is not None:
        spent = Spent(time.monotonic() - began, done.device_s, price_of(job, resources))
        runs.log_once(store, done.key, spent.logged())
    champion = promote.champion(store)
    tell.send(*told.of_retrain(run, done, champion), events.heartbeat(run, "retrain"))
    return Retrained(done, champion, checked, spent, job.run)


def _call(job: Job, run: str, checked: CheckResult | Waiting) -> bool:
    """Keep what the policy says of a check that was not followed by a retrain; does it call for
    one?"""
    store = open_store(job.run, job.registry, job.artifacts)
    found = None if isinstance(checked, Waiting) else checked
    if found is None:
        current = promote.require_champion(store)
        champion, seal = str(current), current.seal
    else:
        champion, seal = found.model, found.seal
    scope = f"{store.model}@{store.alias}"
    said = calls.of_check(job.run, job.watch, scope, champion, seal, found)
    decision = Decision(False, str(checked))
    if found is not None:
        decision = calls.alone(job.run, job.watch, scope, said)
    # A retrain has looked for labels, too: what it has said of this check stays the last word.
    calls.keep(job.run, job.watch, run, store.model, champion, decision, only_first=True, seal=seal)
    return said.act


def _check(job: Job, show: Show) -> CheckResult | Waiting:
    source = find.batch_of(job)
    ImageTable.open(source).pin(source.version)
    store = find.in_use(job)
    connect(job.cluster)
    with show.progress(f"Predicting {source.uri}") as tick:
        return drift_check.check_window(
            store, job.run, source, job.watch, job.predict, job.drift, show.say, tick
        )
