"""One function a verb: run the room's work on a validated Job, tell people, and return what --json
prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from raypipe.cli.console import Console
from raypipe.cluster.connect import connect
from raypipe.config import replace, save
from raypipe.errors import ConfigError
from raypipe.feed.dataset import pin
from raypipe.job import Job
from raypipe.registry import promote, tracking
from raypipe.registry.promote import ModelVersion
from raypipe.registry.tracking import Store
from raypipe.search import page as search_page
from raypipe.search import refit, tuner
from raypipe.search.leaderboard import SearchResult
from raypipe.search.trials import tune_patches
from raypipe.serve import batch
from raypipe.tables import clean as cleaning
from raypipe.tables.ingest import ingest as ingest_images
from raypipe.tables.ingest import understand
from raypipe.tables.table import ImageTable, TableConfig
from raypipe.train import trainer
from raypipe.train.job import TrainJob, TrainResult
from raypipe.train.launch import check_workers
from raypipe.train.publish import publish
from raypipe.watch import retrain as loop
from raypipe.watch.check import CheckResult
from raypipe.watch.check import check as drift_check

Result = dict[str, Any]


def ingest(job: Job, console: Console) -> Result:
    cfg = job.ingest
    if cfg.source.task is None:  # a label is what the model that will learn from it says
        cfg = replace(cfg, {"from.task": job.model.task})
    if cfg.dry_run:
        facts = understand(cfg)[2]
        console.facts(facts | {"table": f"{job.table.uri}: nothing was written"})
        return {"understood": facts, "dry_run": True}
    with console.progress(f"Ingesting {cfg.name}") as tick:
        done = ingest_images(
            job.table, cfg, tick, job.cluster, console.facts, cleaning.known_as(job.clean)
        )
    console.facts(
        {
            "table": done.version,
            "accepted": done.accepted,
            "already there": done.present,
            **_if_any("of these dropped by an earlier cleaning", done.dropped),
            **_if_any("of these in another split, where they stay", done.other_split),
            **_if_any("back after an earlier cleaning by other rules", done.returned),
            "relabelled": done.relabelled,
            **_if_any("of these without a label now", done.labels_removed),
            "duplicates": done.duplicates,
            "quarantined": done.reasons or 0,
            "unlabelled": done.unlabelled,
            "splits": done.splits,
        }
    )
    return {
        "table": str(done.version),
        **{
            k: getattr(done, k)
            for k in (
                "seen",
                "accepted",
                "present",
                "dropped",
                "other_split",
                "returned",
                "relabelled",
                "labels_removed",
                "duplicates",
                "quarantined",
                "reasons",
                "splits",
            )
        },
    }


def _if_any(name: str, count: int) -> dict[str, int]:
    """A line of the summary that is of interest only where it counts something."""
    return {name: count} if count else {}


def clean(job: Job, console: Console) -> Result:
    ImageTable.open(job.table).pin(job.table.version)  # a wrong name must not cost a cluster start
    connect(job.cluster)
    console.say(f"Looking at the images of {job.table.uri} with fastdup")
    done = cleaning.clean(job.table, job.clean)
    console.facts(
        {
            "looked at": f"{done.images} images of {done.raw}",
            "found": done.counts or "nothing",
            "dropped": done.dropped,
            f"tag {job.clean.tag}": done.clean,
        }
    )
    return {
        "table": str(done.clean),
        "images": done.images,
        "dropped": done.dropped,
        "verdicts": done.counts,
    }


def train(job: Job, console: Console) -> Result:
    pin(job.table, job.feed, kind=job.model.task)
    check_workers(job.train, connect(job.cluster, job.needs_cluster))
    store = tracking.open_store(job.run, job.registry)  # a wrong address must not cost a training
    fewest, most = job.train.fewest_workers, job.train.most_workers
    workers = (
        f"{most} worker{'s' * (most > 1)}" if fewest == most else f"{fewest} to {most} workers"
    )
    console.say(f"Training {job.model.name} ({job.model.mode}) with {workers}")

    with console.training(job.train.epochs, job.train.stopping.metric) as told:
        result = trainer.run(job, progress=told.epoch, steps=told.step)
    version = publish(store, job, result, "train")
    champion = crown_first(store, version)
    tested = _test(job, result, job.folder(result.key), store)
    ended: dict[str, Any] = {"test": tested} if tested else {}
    ended |= {
        f"{job.train.result} epoch": result.best_epoch + 1,
        "stopped": result.stopped or f"after all {job.train.epochs} epochs",
    }
    console.facts(_outcome(result.metrics, version, champion, store) | ended | _cost(job, result))
    return {
        "model": str(version),
        "champion": str(champion),
        "table": str(result.version),
        "metrics": result.metrics,
        "test": tested,
        "epochs": len(result.history),
        "stopped": result.stopped,
        "mlflow_uri": store.uri,
    }


def _test(job: TrainJob, result: TrainResult, folder: Path, store: Store) -> dict[str, float]:
    """The result's metrics on the test split, in its MLflow run too."""
    tested = trainer.test(job, result, folder)
    if tested and (run_id := tracking.finished_run(store, result.key)):
        tracking.log_metrics(store, run_id, tested)
    return tested


def tune(job: Job, console: Console) -> Result:
    pin(job.table, job.feed, kind=job.model.task)
    connect(job.cluster, preload=tune_patches.PRELOAD)
    result, version, store = search_and_register(job, console)
    champion = crown_first(store, version)
    console.leaderboard(result.metric, result.standings)
    tested = _test(result.job, result.best, result.kept, store)
    ended: dict[str, Any] = {"test": tested} if tested else {}
    ended |= {"stopped": result.stopped} if result.stopped else {}
    ended |= (
        {"mean of weights": f"of {len(result.members)} trials: {', '.join(result.members)}"}
        if result.members
        else {}
    )
    ended |= refit.summary(result)
    ended["images decoded"] = f"{result.decoded}, for {len(result.trials)} trials together"
    ended["epochs"] = (
        f"{result.epochs} of the {result.full_epochs} that all trials would take to their ends"
    )
    ended |= search_page.ranking(result)
    page, best = search_page.write(result, version, store, tested), best_config(result)
    again = f"raypipe train {best}" + (
        " (the best trial alone: a mean of weights is not trained)" if result.members else ""
    )
    ended |= {"report": page, "again": again}
    console.facts(_outcome(result.best.metrics, version, champion, store) | ended)
    return {
        "model": str(version),
        "champion": str(champion),
        "table": str(result.best.version),
        "metrics": result.best.metrics,
        "test": tested,
        "soup": list(result.members),
        "refitted": result.refitted,
        "epochs": {"run": result.epochs, "full": result.full_epochs},
        "report": str(page),
        "best_config": str(best),
        "trials": len(result.trials),
        "decoded": result.decoded,
        "best": result.trials[0].changes,
        "ahead": [asdict(one) for one in result.ahead],
        "stopped": result.stopped,
        "mlflow_uri": store.uri,
    }


def search_and_register(job: Job, console: Console) -> tuple[SearchResult, ModelVersion, Store]:
    tuner.check(job)
    store = tracking.open_store(job.run, job.registry)
    with console.searching(job.train.stopping.metric) as told:
        result = tuner.search(job, told)
    if job.search.refit is not None:
        result = _refitted(job, result, console)
    children = [(t.name, t.changes, t.history) for t in result.trials]
    return result, publish(store, result.job, result.best, "search", children, result.kept), store


def _refitted(job: Job, found: SearchResult, console: Console) -> SearchResult:
    again = refit.job_of(job, found)
    console.say(
        f"Training {found.trials[0].name} once more, on {again.feed.train} at "
        f"{again.model.pixels} px: "
        f"what {again.feed.val} says is no test now"
    )
    with console.training(again.train.epochs, again.train.stopping.metric) as told:
        return refit.refit(again, found, told.epoch, told.step)


def best_config(result: SearchResult) -> Path:
    """The best trial's job as a file that `raypipe train` takes, on the version of the table that
    was searched on.
    """
    table = result.job.table.model_copy(update={"version": result.best.version.version})
    return save(result.job.model_copy(update={"table": table}), result.folder / "best.yaml")


def predict(job: Job, console: Console) -> Result:
    source = _batch(job)
    ImageTable.open(source).pin(source.version)
    store = tracking.open_store(job.run, job.registry)
    promote.require_champion(store)
    connect(job.cluster)
    with console.progress(f"Predicting {source.uri}") as tick:
        done = batch.predict(store, job.run, source, job.predict, progress=tick)
    console.facts(
        {
            "model": done.model,
            "images": f"{done.images} of {done.table}",
            "labels": done.labels,
            "predictions": done.out,
        }
    )
    return {
        "predictions": str(done.out),
        "model": done.model,
        "table": str(done.table),
        "images": done.images,
        "labels": done.labels,
    }


def drift(job: Job, console: Console) -> Result:
    checked = _check(job, console)
    verdict(checked, console)
    return {
        "is_drift": checked.report.is_drift,
        "p_value": checked.report.p_value,
        "model": checked.model,
        "table": str(checked.table),
        "evidence": checked.report.evidence,
        "report": checked.page,
    }


def retrain(job: Job, console: Console) -> Result:
    pin(job.table, job.feed, kind=job.model.task)
    checked = None if job.watch.force and job.watch.batch is None else _check(job, console)
    connect(job.cluster)
    store = tracking.open_store(job.run, job.registry)
    done = loop.retrain(store, job, checked, say=console.say)
    comparison(done, console)
    return {
        "promoted": done.decision.act and done.challenger is not None,
        "reason": done.decision.reason,
        "champion": str(promote.champion(store)),
        "challenger": str(done.challenger) if done.challenger else None,
        "slices": {
            s.slice: {
                "champion": s.champion,
                "challenger": s.challenger,
                "measure": "accuracy" if s.unit is None else "mean absolute error",
                "images": s.images,
                "p_value": s.p_value,
                "won": s.won,
                "lost": s.lost,
                "at_worst": s.at_worst(0.05),
            }
            for s in done.slices
        },
    }


def verdict(checked: CheckResult, console: Console) -> None:
    r = checked.report
    rows = [
        [
            e.detector.upper(),
            e.on,
            e.statistic,
            p_text(e.p_value),
            "drift" if e.is_drift else "no drift",
        ]
        for e in r.evidence
    ]
    said = "DRIFT" if r.is_drift else "no drift"
    sizes = f"{r.batch_images} images against {r.reference_images}"
    title = f"{checked.name}: {said} (p {p_text(r.p_value)}, alpha {r.alpha:g}), {sizes}"
    console.table(title, ["test", "on", "statistic", "p", ""], rows)
    console.facts({"report": checked.page})


def comparison(done: loop.RetrainResult, console: Console) -> None:
    """The table of slices; where there are several, all rows together are its last line."""
    if done.slices:
        errors = done.slices[0].unit is not None
        figure = "{:.4g}" if errors else "{:.1%}"
        shown = list(done.slices) + ([done.union] if done.union and len(done.slices) > 1 else [])
        rows = []
        for s in shown:
            means = [figure.format(s.champion), figure.format(s.challenger)]
            gain = [f"{s.difference * 100:+.1f}", f"{s.at_worst(0.05) * 100:+.1f}"]
            name = f"{s.slice} (new)" if s.is_new else s.slice
            rows.append([name, s.images, *means, *gain, p_text(s.p_value)])
        measured = ": mean absolute error" if errors else ""
        title = f"{done.champion} against {done.challenger}, same test images{measured}"
        gained = "% of unit" if errors else "points"
        heads = ["slice", "images", "champion", "challenger", gained, "at worst (95 %)", "p"]
        console.table(title, heads, rows)
    console.facts({"decision": done.decision.reason})


def p_text(p: float) -> str:
    """A p-value for people: four figures' worth, and never a bare 0."""
    return f"{p:.3g}" if p >= 1e-6 else "< 1e-6"


def crown_first(store: Store, version: ModelVersion) -> ModelVersion:
    """The first model becomes champion; a later one has to win against it (raypipe retrain)."""
    champion = promote.champion(store)
    if champion is None:
        promote.promote(store, version, expected=None)
        return version
    return champion


def _check(job: Job, console: Console) -> CheckResult:
    if job.watch.batch is None:
        raise ConfigError(
            "There is no batch to check",
            rule="watch.batch.uri names a Delta table of new images",
            fix="Add watch.batch.uri=…",
        )
    source = job.watch.batch
    ImageTable.open(source).pin(source.version)
    store = tracking.open_store(job.run, job.registry)
    promote.require_champion(store)
    connect(job.cluster)
    with console.progress(f"Predicting {source.uri}") as tick:
        return drift_check(store, job, source, job.watch.name, progress=tick)


def _batch(job: Job) -> TableConfig:
    return job.predict.table or job.watch.batch or job.table


PHASES = ("data", "augment", "forward", "backward", "optimizer", "other")


def _cost(job: Job, result: TrainResult) -> dict[str, Any]:
    """What the last epoch's steps took, and where to look further."""
    last, folder = result.history[-1], job.folder(result.key)
    facts: dict[str, Any] = {}
    if last.get("step_s"):
        shares = [f"{p} {last[f'{p}_s'] / last['step_s']:.0%}" for p in PHASES if f"{p}_s" in last]
        waited = last.get("communication_s")
        shares += (
            [] if waited is None else [f"communication {waited / last['step_s']:.0%} (in backward)"]
        )
        facts["a step"] = f"{last['step_s'] * 1000:,.1f} ms: {', '.join(shares)}"
    units = {"mfu": ".1%", "gflops_per_s": ",.0f", "gpu_memory_mb": ",.0f", "cpu_memory_mb": ",.0f"}
    facts["a worker"] = {
        name: format(last[name], unit) for name, unit in units.items() if name in last
    }
    if job.train.tensorboard:
        facts["tensorboard"] = f"tensorboard --logdir {folder / 'tensorboard'}"
    if job.train.profile:
        traces = sorted((folder / "profile").glob("*.json"))
        facts["profile"] = (
            traces or f"none: the run had finished before, or it never came to {job.train.profile}"
        )
    return facts


def _outcome(
    metrics: Mapping[str, float], version: ModelVersion, champion: ModelVersion, store: Store
) -> dict[str, Any]:
    is_champion = (
        " (champion)"
        if version.version == champion.version
        else f"; champion stays {champion}: raypipe retrain compares them"
    )
    judged = {k: v for k, v in metrics.items() if k.startswith("val_")}
    return ({"validation": judged} if judged else {}) | {
        "model": f"{version}{is_champion}",
        "mlflow": store.uri,
    }
