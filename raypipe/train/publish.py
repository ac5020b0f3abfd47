"""Publish a finished training: an MLflow run, a model package and a registered version.

The same result is published once.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from raypipe.cluster import usage
from raypipe.cluster.usage import Nodes
from raypipe.config import dump, key_of, to_json
from raypipe.errors import hidden
from raypipe.feed.dataset import Pinned
from raypipe.files import file_lock
from raypipe.models.ensemble import EnsembleModel
from raypipe.registry import made_by, of_task, package, packing, runs, system_metrics, versions
from raypipe.registry.card import HTML, MARKDOWN, html, markdown, of_package
from raypipe.registry.store import Store
from raypipe.registry.versions import ModelVersion
from raypipe.tables import scan
from raypipe.train import learned, origin, shifted, unseen
from raypipe.train.described import card
from raypipe.train.job import TrainJob, TrainResult
from raypipe.train.origin import CalledFor
from raypipe.train.trainer import Plan, assemble

log = logging.getLogger("raypipe")
CALIBRATION = "raypipe.calibration"  # tag of a version: its Calibrated, as JSON
PARENT = "raypipe.parent"  # NAME/N of the champion that it was to replace
CODE = "raypipe.code"  # sha256 of the code that made it
MOST_OF_TAG = 5_000  # characters
# Of the section registry: what a package says, and no training depends on.
SAID = "domain", "group", "intended_use", "data_licence"

# A trial: its name, its parameters, the metrics of its epochs, and what it took.
Child = tuple[str, dict[str, Any], Sequence[dict[str, float]], dict[str, float]]


def publish(
    store: Store,
    planned: Plan,
    result: TrainResult,
    name: str,
    children: Sequence[Child] = (),
    recorded: Sequence[Path] = (),
    called_for: CalledFor | None = None,
    until: float | None = None,
    stay: Sequence[str] = (),
    runs_until: float | None = None,
) -> ModelVersion:
    """Register the `result` of a plan, or return the version that was registered for it before.

    children: trials, logged as nested runs. recorded: folders of work before this training, which
    recorded what the nodes did too, as the search before a refit. called_for: why it was made;
    None: somebody wanted it. until: of time.monotonic, when shifted copies have to be done.
    stay: members of an ensemble that did not learn from validation images, though others did.
    runs_until: of time.monotonic, when no further run of a child is begun.
    """
    assert planned.pinned.version == result.version, "a plan and the result of another one"
    # Of two processes that publish the same result, the second waits and finds the first's version.
    key = package_key(planned.job, result)
    with file_lock(store.folder / f"publish-{key}.lock"):
        registered = versions.find(store, key)
        folders = [*recorded, planned.folder]
        if registered is not None:
            return registered
        why = called_for or CalledFor(name, f"raypipe {name} was called")
        began = planned.job.train.start_from
        # A refit begins with a trial of its own search, which learned from the same rows.
        if began is None or not any(Path(began).is_relative_to(folder) for folder in recorded):
            why = why.behind(began)
        return _publish(
            store, planned, result, key, name, children, folders, why, until, stay, runs_until
        )


def package_key(job: TrainJob, result: TrainResult) -> str:
    """Names a registered version: the training's key, unless its model is calibrated afterwards, or
    the package says more than that.

    So what is named when the training is over makes another package of the same weights. How many
    images judge it, and how long shifted copies may take, is no part: within a budget a clock
    decides that.
    """
    # 2: a temperature that does not help is not kept.
    key = key_of(result.key, "calibrated", 2) if job.model.calibrate else result.key
    said = {name: value for name in SAID if (value := getattr(job.registry, name))}
    return key_of(key, said) if said else key


def _publish(
    store: Store,
    planned: Plan,
    result: TrainResult,
    key: str,
    name: str,
    children: Sequence[Child],
    recorded: Sequence[Path],
    called_for: CalledFor,
    until: float | None,
    stay: Sequence[str],
    runs_until: float | None,
) -> ModelVersion:
    job, pinned = planned.job, planned.pinned
    model = assemble(job, result)
    config = job.model_dump(mode="json")
    sources = _sources(job, pinned)
    facts = {
        "table": {
            "uri": result.version.uri,
            "version": result.version.version,
            "where": job.table.where,
            "sources": sources,
            **({"prepared_from": pinned.version.origin} if pinned.version.origin else {}),
        },
        "metrics": result.metrics,
        "best_epoch": result.best_epoch,
        "key": result.key,
        "code_commit": made_by.commit(),
        "config": config,
    }
    # A killed publication may have left half a package.
    folder = job.run.path / "packages" / key
    shutil.rmtree(folder, ignore_errors=True)
    inherited_N2 = called_for.start.inherited_N2
    held_out = unseen.reference(job, model, pinned, planned.folder, inherited_N2)
    calibrated = held_out.calibrated
    if calibrated is not None:
        facts |= {"temperature": calibrated.temperature, "calibration": asdict(calibrated)}
    severity = shifted.in_time(job, model, pinned, held_out, until)
    facts["severity"] = {
        "why_not": severity.why_not,
        "copied": severity.copied,
        "seconds": round(severity.seconds, 2),
    }
    # The card is part of the package, so that it travels and is hashed with it.
    looks = runs.looks(store, pinned.version)
    members = model.members if isinstance(model, EnsembleModel) else ()
    described = card(job, pinned, result, held_out, store.model, looks, members, stay)
    pages = {HTML: html(described), MARKDOWN: markdown(described)}
    extra = {name: text.encode() for name, text in pages.items()}
    trained_on_N2 = learned.of_training(job, pinned)
    extra |= learned.files(trained_on_N2, inherited_N2)
    if held_out.outcomes is not None:
        extra[package.OUTCOMES] = held_out.outcomes.to_bytes()
    if severity.calibration is not None:
        extra[package.SEVERITY] = to_json(severity.calibration.to_json()).encode()
    nodes = usage.read(*(folder / usage.FILE for folder in recorded))
    made = origin.facts(
        job, pinned, result, held_out, described.judged, nodes, called_for, len(children)
    )
    facts[origin.MADE] = made
    reference = held_out.reference
    packing.build(folder, model, job.model, result.classes, reference, facts, extra)
    run_id = _log(store, job, result, name, config, children, nodes, runs_until)
    for file, text in pages.items():
        runs.log_text(store, run_id, text, of_package(file, key))
    tags = {
        "raypipe.table": str(result.version),
        **of_task.tags(pinned.task),
        "raypipe.sources": _listed(sources),
        "raypipe.metrics": to_json(result.metrics),
        **_tags(made),
    }
    if pinned.version.origin:
        tags[runs.PREPARED_FROM] = pinned.version.origin
    if calibrated is not None:
        tags[CALIBRATION] = to_json(asdict(calibrated))
    return versions.register(store, run_id, Path(folder), key, tags)


def _tags(made: dict[str, Any]) -> dict[str, str]:
    """What pages of MLflow and other tools look for; the package says the same, and more."""
    code, called_for = made["code"], made["called_for"]
    tags = {"raypipe.rows": made["rows"]["train"]["ids_sha256"], CODE: code["sha256"]}
    if code["commit"]:
        tags["raypipe.commit"] = code["commit"] + ("-dirty" if code["dirty"] else "")
    if called_for["parent"]:
        tags[PARENT] = called_for["parent"]
    # MLflow takes 5,000 characters, Unity Catalog 256.
    tags["raypipe.why"] = hidden(called_for["reason"])[:250]
    return tags


def _listed(names: Sequence[str]) -> str:
    """Names as a tag, without credentials. MLflow refuses a longer tag when all else is done: of a
    source a file there may be 100,000.
    """
    text = hidden(",".join(names))
    if len(text) <= MOST_OF_TAG:
        return text
    return f"{len(names):,} sources, in the package's package.json"


def _sources(job: TrainJob, pinned: Pinned) -> list[str]:
    """The sources of the training images, by name; none if the table has no such column."""
    column = pinned.table.columns.source
    schema = pinned.table.at(pinned.version).schema()
    if column not in {field.name for field in schema.fields}:
        return []
    wanted = pinned.rows_of(job.feed.train)
    _, parts = scan.numbered(pinned.table, pinned.version, [column], wanted)
    names: set[str] = set()
    for rows, _ in parts:
        names.update(str(name) for name in rows[column].unique().to_pylist())
    return sorted(names)


def _log(
    store: Store,
    job: TrainJob,
    result: TrainResult,
    name: str,
    config: dict[str, Any],
    children: Sequence[Child],
    nodes: Nodes,
    until: float | None = None,
) -> str:
    """Log the run and the trials to MLflow; the run's id.

    until: of time.monotonic, when no further trial is begun; the best trials come first.
    """

    def log_into(run_id: str) -> None:
        # A mean of several models is no epoch of a training: theirs are in the trials' runs.
        is_mean = result.metrics not in result.history
        epochs = [] if is_mean else [*result.history]
        if epochs[-1:] != [result.metrics]:
            # MLflow shows the last value as the run's. The model may be of an earlier epoch.
            epochs.append(result.metrics)
        runs.log_history(store, run_id, epochs)
        runs.log_text(store, run_id, dump(job), "config.yaml")
        for number, (child, params, history, cost) in enumerate(children):
            if until is not None and time.monotonic() > until:
                log.warning(
                    "%d of %d trials have no run of their own in MLflow: search.budget_s left no "
                    "time for them. The leaderboard has all",
                    len(children) - number,
                    len(children),
                )
                break
            with runs.run(
                store, f"{result.key}/{child}", child, params, result.version, parent=run_id
            ) as child_id:
                runs.log_history(store, child_id, history)
                runs.log_metrics(store, child_id, cost)
        system_metrics.log(store, run_id, nodes)

    return runs.once(store, result.key, name, config, result.version, log_into)
