"""Is it better to fit heads again to the images that chose them?

    python -m benchmarks.heads_again --json [--tasks emoji …] [--seeds 31 32] [--home runs/heads]

Each task is a table of benchmarks/task_tables.py. Of its TRAINING images, PART fit the heads of a
first answer, and the others choose an ensemble of them (search/greedy.py), as validation images do
in a search. Then the heads are fitted again to all training images, with the weights that were
chosen, as search.refit=heads has it. VALIDATION images judge both. No test split is read.

A line for each table: accuracy and cross-entropy of the most accurate head, of the ensemble and of
the plain mean, each before and after. The last line has the means over tables, and `difference`:
the ensemble's accuracy after less before in points, with its standard error over tables. Tables of
one task share their images, so they are no independent samples.

A head's statistics for standardising are those of all training images both times.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import task_tables

if TYPE_CHECKING:
    from raypipe.feed.dataset import Pinned
    from raypipe.models.heads import Head
    from raypipe.train.job import TrainJob
    from raypipe.train.worker import Data

PART = 0.75
MEMBERS = 5  # search.ensemble of the presets


@dataclass(frozen=True)
class Fitted:
    """What a head says. choosing_NC: fitted to a part, of the others. before_NC and after_NC: of
    validation, fitted to the part and to all."""

    choosing_NC: np.ndarray
    before_NC: np.ndarray
    after_NC: np.ndarray


@dataclass(frozen=True)
class Split:
    """Of the training images: which fit, and which choose. labels_O: of these; labels_V: of
    validation."""

    part: np.ndarray
    others: np.ndarray
    labels_O: np.ndarray
    labels_V: np.ndarray


def measured(task: str, seed: int, home: Path) -> dict[str, Any]:
    """One line. Starts Ray."""
    from raypipe.cluster.connect import prepare_environment

    prepare_environment()  # before anything imports Ray
    from raypipe.cluster.connect import connect
    from raypipe.config import replace, validate
    from raypipe.feed.dataset import pin
    from raypipe.job import Job
    from raypipe.search import feasible, first_answer, greedy
    from raypipe.search.quality import judge_by
    from raypipe.search.trials.trial import data_key

    table = task_tables.table(task, seed, home / "tables")
    sections = {
        "table": table.model_dump(),
        # Features are kept by content: tasks of the same images share them.
        "run": {"dir": str(home / f"run-{task.partition('-')[0]}"), "seed": seed},
        "cluster": {"address": "local", "object_store_mb": 1500},
    }
    job = validate(Job, sections)
    connect(job.cluster)
    rows = pin(job.table, job.feed, kind=job.model.task)
    training = feasible.one_worker(job.training)
    place = home / f"first-{task}-{seed}"
    shutil.rmtree(place, ignore_errors=True)
    found = first_answer.make(training, rows, place)
    jobs = [(replace(training, one.changes), one.checkpoint) for one in found.trials]
    split = split_of(found.data[data_key(jobs[0][0])], seed)
    heads = []
    for of_head, checkpoint in jobs:
        heads.append(fitted(of_head, checkpoint, found.data[data_key(of_head)], split, rows))
    shutil.rmtree(place)

    judge = judge_by(rows.task, "val_accuracy", "max")
    choosing = [head.choosing_NC for head in heads]
    ensemble = greedy.choose(choosing, split.labels_O, judge, most=MEMBERS)
    assert ensemble is not None
    accuracies = [judge(scores_NC, split.labels_O)[0] for scores_NC in choosing]
    weights = {
        "best head": np.eye(len(heads))[int(np.argmax(accuracies))],
        "ensemble": np.array(ensemble.weights_K),
        "mean of heads": np.full(len(heads), 1 / len(heads)),
    }
    told: dict[str, Any] = {"task": task, "seed": seed, "judged": len(split.labels_V)}
    for name, weights_K in weights.items():
        for when in ("before", "after"):
            scores = [getattr(head, f"{when}_NC") for head in heads]
            accuracy, minus_loss = judge(np.tensordot(weights_K, scores, 1), split.labels_V)
            told[f"{name}, {when}"] = [round(accuracy, 4), round(-minus_loss, 4)]
    return told


def split_of(data: Data, seed: int) -> Split:
    """The same images for all heads."""
    from raypipe.feed.feed import fetch

    train, val = fetch(data.train.rows), fetch(data.val.rows)
    order = np.random.default_rng(seed).permutation(len(train))
    part, others = np.split(order, [round(PART * len(train))])
    return Split(np.sort(part), others, train.labels(others), val.labels(np.arange(len(val))))


def fitted(job: TrainJob, checkpoint: str, data: Data, split: Split, rows: Pinned) -> Fitted:
    """A head, fitted to the part and to all training images."""
    from raypipe.feed.feed import fetch
    from raypipe.models.heads import KernelHead
    from raypipe.train import trainer
    from raypipe.train.job import TrainResult
    from raypipe.train.solve.fit import Examples, fit
    from raypipe.train.worker import objective_of

    result = TrainResult("", rows.version, rows.classes, {}, (), 0, checkpoint, 0.0)
    head = trainer.assemble(job, result).head
    images, seen_ND = fetch(data.train.rows), fetch(data.val.inputs)
    x_ND, labels_N = fetch(data.train.inputs), images.labels(np.arange(len(images)))

    def of(places: np.ndarray) -> Head:
        again = copy.deepcopy(head)
        if isinstance(again, KernelHead):
            again.resize(min(job.model.landmarks, len(places)))
        examples = Examples(x_ND[places], labels_N[places])
        fit(again, examples, objective_of(job, data), job.train.solver, job.run.seed)
        return again

    of_part, of_all = of(split.part), of(np.arange(len(images)))
    return Fitted(said(of_part, x_ND[split.others]), said(of_part, seen_ND), said(of_all, seen_ND))


def said(head: Head, features_ND: np.ndarray) -> np.ndarray:
    """scores_NC of these features."""
    import torch

    with torch.inference_mode():
        logits_NC = head.eval()(torch.from_numpy(np.array(features_ND)))
        return logits_NC.softmax(1).double().numpy()


def together(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The means over tables: of each task first, so that each counts once."""
    names = [name for name in lines[0] if name.endswith((", before", ", after"))]
    tasks = sorted({line["task"] for line in lines})
    means = {}
    for name in names:
        of_tasks = [np.mean([o[name] for o in lines if o["task"] == task], 0) for task in tasks]
        means[name] = np.mean(of_tasks, 0).round(4).tolist()
    gains = [100 * (one["ensemble, after"][0] - one["ensemble, before"][0]) for one in lines]
    error = float(np.std(gains, ddof=1) / np.sqrt(len(gains))) if len(gains) > 1 else None
    return {"tables": len(lines), "means": means, "difference": [float(np.mean(gains)), error]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tasks = list(task_tables.DEVELOPMENT)
    parser.add_argument("--tasks", nargs="+", choices=tasks, default=tasks)
    parser.add_argument("--seeds", nargs="+", type=int, default=[31])
    parser.add_argument("--home", type=Path, default=Path("runs/heads"))
    parser.add_argument("--json", action="store_true", help="accepted for uniformity")
    chosen = parser.parse_args()
    home = chosen.home.absolute()
    home.mkdir(parents=True, exist_ok=True)
    lines = []
    for task in chosen.tasks:
        for seed in chosen.seeds:
            lines.append(measured(task, seed, home))
            print(json.dumps(lines[-1] | {"cpus": os.cpu_count()}), flush=True)
    print(json.dumps(together(lines)), flush=True)


if __name__ == "__main__":
    main()
