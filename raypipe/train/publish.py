"""A finished training result -> an MLflow run, a model package and a registered version; the same result is published once."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from raypipe.config import dump, to_json
from raypipe.feed.dataset import pin
from raypipe.registry import package, promote, tracking
from raypipe.registry.promote import ModelVersion
from raypipe.registry.tracking import Store
from raypipe.tables import scan
from raypipe.train.auto import finders
from raypipe.train.job import TrainJob, TrainResult
from raypipe.train.trainer import assemble, prepare, reference

Child = tuple[str, dict[str, Any], Sequence[dict[str, float]]]


def publish(
    store: Store,
    job: TrainJob,
    result: TrainResult,
    name: str,
    children: Sequence[Child] = (),
    kept: Path | None = None,
) -> ModelVersion:
    """Register `result`, which keeps its files in `kept` (default: its training's folder); `children` are (name, params,
    history) of trials, logged as nested runs."""
    with FileLock(
        store.folder / f"publish-{result.key}.lock"
    ):  # of two at once, the second finds what the first registered
        return promote.find(store, result.key) or _publish(store, job, result, name, children, kept)


def _publish(
    store: Store,
    job: TrainJob,
    result: TrainResult,
    name: str,
    children: Sequence[Child],
    kept: Path | None,
) -> ModelVersion:
    pinned = pin(
        job.table.model_copy(update={"version": result.version.version}),
        job.feed,
        result.classes,
        job.model.task,
    )
    job = finders.settle(
        job, pinned, lambda: prepare(job, pinned)
    )  # numbers, as the training found them
    model = assemble(job, result)
    config = job.model_dump(
        mode="json", include=set(TrainJob.model_fields)
    )  # of a larger job, the part that trained it
    c = pinned.table.columns
    columns = {f.name for f in pinned.table.delta(pinned.version.version).schema().fields}
    sources: list[str] = []
    if c.source in columns:
        trained = scan.rows(
            pinned.table, pinned.version, [c.source], pinned.rows_of(job.feed.train)
        )
        sources = sorted({str(s) for s in trained[c.source].to_pylist()})
    facts = {
        "table": {
            "uri": result.version.uri,
            "version": result.version.version,
            "where": job.table.where,
            "sources": sources,
        },
        "metrics": result.metrics,
        "best_epoch": result.best_epoch,
        "key": result.key,
        "code_commit": tracking.code_commit(),
        "config": config,
    }
    folder = job.run.path / "packages" / result.key
    shutil.rmtree(folder, ignore_errors=True)
    unseen = reference(job, model, pinned, kept or job.folder(result.key))
    package.build(folder, model, job.model, result.classes, unseen, facts)
    run_id = _log(store, job, result, name, config, children)
    tags = {
        "raypipe.table": str(result.version),
        "raypipe.task": job.model.task,
        "raypipe.sources": ",".join(sources),
        "raypipe.metrics": to_json(result.metrics),
    }
    return promote.register(store, run_id, Path(folder), result.key, tags)


def _log(
    store: Store,
    job: TrainJob,
    result: TrainResult,
    name: str,
    config: dict[str, Any],
    children: Sequence[Child],
) -> str:
    def log_into(run_id: str) -> None:
        tracking.log_history(store, run_id, result.history)
        tracking.log_text(store, run_id, dump(job), "config.yaml")
        for child, params, history in children:
            with tracking.run(
                store, f"{result.key}/{child}", child, params, result.version, parent=run_id
            ) as child_id:
                tracking.log_history(store, child_id, history)

    return tracking.once(store, result.key, name, config, result.version, log_into)
