"""What an ensemble of a search's trials is worth on validation images that did not choose it.

    python -m benchmarks.ensemble --json [--tasks emoji elpv-binary] [--seeds 1] [--budget-s 180]
                                  [--home runs/ensemble]

Each task is a table of benchmarks/task_tables.py. A search with `search.preset=fast` keeps the
weights of all its trials, and each says what it says of the VALIDATION images (`said-*.npz` in
HOME: there, they are not searched for again). Then a half of these images chooses and the other
half judges, HALVES times, both ways round. No test split is read.

| choice | what it is |
|---|---|
| best by metric | the trial, or head of the first answer, with the highest accuracy |
| best by loss | the one with the lowest cross-entropy |
| best head | the most accurate head of the first answer: no trial at all |
| mean of heads | of all heads, with equal weights |
| ten best | greedy.choose among the ten best by metric |
| ten best and heads | the same with all heads as candidates: what a search does |

Told are accuracy and minus the cross-entropy, means over halves, and how often the last choice was
made by which aim. Trials were trained without these images, but some were stopped early by all of
them, and their space was chosen on seeds 1 and 2 of the same tasks. So it compares choices among
the same models, and says nothing about how good a search is. Differences were not tested for
significance: the halves are of the same few hundred images.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import task_tables
from raypipe.models.tasks import Task
from raypipe.search import greedy
from raypipe.search.quality import Judge, judge_by

HALVES = 15
MEMBERS = 5  # search.ensemble of the preset; twice as many of the best are candidates
KEEP = 3000  # more than there are trials

Scores = np.ndarray


@dataclass(frozen=True)
class Said:
    """What K models say of N validation images, the best model first."""

    names: list[str]
    heads_K: np.ndarray
    """Is it a head of the first answer?"""
    scores_KNC: list[Scores]
    labels_N: np.ndarray


def searched(task: str, seed: int, budget_s: float, home: Path) -> Said:
    """Run the search, and ask all of its models. Starts Ray."""
    from raypipe.cluster.connect import prepare_environment

    prepare_environment()  # before anything imports Ray
    from benchmarks import our_tune
    from raypipe.cluster.connect import connect
    from raypipe.config import replace, validate
    from raypipe.feed.dataset import pin
    from raypipe.job import Job
    from raypipe.search import together, tuner
    from raypipe.search.trials.trial import data_key
    from raypipe.search.trials.tune_patches import PRELOAD
    from raypipe.train.trainer import prepare
    from raypipe.work import in_time

    table = task_tables.table(task, seed, home / "tables")
    folder = home / f"run-{task}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    sections = {
        "table": table.model_dump(),
        "run": {"dir": str(folder), "seed": seed},
        "cluster": {"address": "local", "object_store_mb": 1500},
        "search": our_tune.default_of(budget_s) | {"keep": KEEP},
        "registry": our_tune.UNJUDGED,
    }
    job = validate(Job, sections)
    connect(job.cluster, preload=PRELOAD)
    rows = pin(job.table, job.feed, kind=job.model.task)
    ledger = our_tune.Unregistered(budget_s)
    in_time.begin(job, rows, ledger)
    found = tuner.search(job.training, job.search, lambda *_: None, rows, ledger)
    asked = [
        together.Candidate(trial.name, replace(found.searched, trial.changes), trial.checkpoint)
        for trial in found.trials
        if trial.checkpoint and Path(trial.checkpoint).exists()
    ]
    jobs = {data_key(one.job): one.job for one in asked}
    data = {key: prepare(one, rows) for key, one in jobs.items()}
    said = together.said_of(asked, rows, data)
    is_head = {trial.name: not trial.drawn for trial in found.trials}
    names = [one.name for one in said.usable]
    heads_K = np.array([is_head[name] for name in names])
    shutil.rmtree(folder)
    return Said(names, heads_K, said.scores_KNC, said.labels_N)


def kept_or_searched(task: str, seed: int, budget_s: float, home: Path) -> Said:
    """Read what an earlier run kept, or search."""
    file = home / f"said-{task}-{seed}-{budget_s:g}s.npz"
    if not file.exists():
        said = searched(task, seed, budget_s, home)
        half = file.with_suffix(".half.npz")
        np.savez(
            half,
            names=said.names,
            heads=said.heads_K,
            scores=np.stack(said.scores_KNC),
            labels=said.labels_N,
        )
        half.replace(file)
    kept = np.load(file)
    scores_KNC = list(kept["scores"].astype(np.float64))
    return Said(kept["names"].tolist(), kept["heads"], scores_KNC, kept["labels"])


def halves(images: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    for _ in range(HALVES):
        order = rng.permutation(images)
        one, other = order[: images // 2], order[images // 2 :]
        yield one, other
        yield other, one


def choices(said: Said, rows: np.ndarray, quality: Judge) -> tuple[dict[str, np.ndarray], str]:
    """The weights_K of each choice on these images, and the aim of the last one."""
    labels_N = said.labels_N[rows]
    scores = [scores_NC[rows] for scores_NC in said.scores_KNC]
    qualities = [quality(one, labels_N) for one in scores]
    by_metric = sorted(range(len(scores)), key=lambda k: qualities[k], reverse=True)
    by_loss = max(range(len(scores)), key=lambda k: greedy.by_loss(qualities[k]))
    heads = [k for k in by_metric if said.heads_K[k]]
    best = by_metric[: 2 * MEMBERS]
    weights, _ = _greedy(said, scores, labels_N, quality, best)
    ours, aim = _greedy(said, scores, labels_N, quality, list(dict.fromkeys(best + heads)))
    found = {
        "best by metric": _equal(said, by_metric[:1]),
        "best by loss": _equal(said, [by_loss]),
        "best head": _equal(said, heads[:1]),
        "mean of heads": _equal(said, heads),
        "ten best": weights,
        "ten best and heads": ours,
    }
    return found, aim


def _equal(said: Said, among: list[int]) -> np.ndarray:
    weights_K = np.zeros(len(said.names))
    weights_K[among] = 1 / len(among)
    return weights_K


def _greedy(
    said: Said, scores: list[Scores], labels_N: np.ndarray, quality: Judge, among: list[int]
) -> tuple[np.ndarray, str]:
    chosen = greedy.choose([scores[k] for k in among], labels_N, quality, most=MEMBERS)
    assert chosen is not None
    weights_K = np.zeros(len(said.names))
    weights_K[among] = chosen.weights_K
    aim = chosen.bar.aim.__name__ if len(chosen.members) > 1 else "a single model"
    return weights_K, aim


def judged(said: Said, task: Task) -> dict[str, Any]:
    """Each choice on images that it was not made on: [accuracy, minus cross-entropy]."""
    quality = judge_by(task, "val_accuracy", "max")
    found = defaultdict(list)
    aims: Counter[str] = Counter()
    scores_KNC = np.stack(said.scores_KNC)
    for one, other in halves(len(said.labels_N), seed=0):
        weights, aim = choices(said, one, quality)
        aims[aim] += 1
        for name, weights_K in weights.items():
            mean_NC = np.tensordot(weights_K, scores_KNC[:, other], 1)
            found[name].append(quality(mean_NC, said.labels_N[other]))
    means = {name: np.mean(values, axis=0).round(4).tolist() for name, values in found.items()}
    return {"choices": means, "aims": dict(aims)}


def measured(task: str, seed: int, budget_s: float, home: Path) -> dict[str, Any]:
    said = kept_or_searched(task, seed, budget_s, home)
    classes = tuple(map(str, range(said.scores_KNC[0].shape[1])))
    return {
        "task": task,
        "seed": seed,
        "models": len(said.names),
        "heads": int(said.heads_K.sum()),
        "images": len(said.labels_N),
    } | judged(said, Task("single_label", classes))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tasks = list(task_tables.DEVELOPMENT)
    parser.add_argument("--tasks", nargs="+", choices=tasks, default=["emoji", "elpv-binary"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--budget-s", type=float, default=180.0)
    parser.add_argument("--home", type=Path, default=Path("runs/ensemble"))
    parser.add_argument("--json", action="store_true", help="accepted for uniformity")
    chosen = parser.parse_args()
    home = chosen.home.absolute()
    home.mkdir(parents=True, exist_ok=True)
    for task in chosen.tasks:
        for seed in chosen.seeds:
            line = measured(task, seed, chosen.budget_s, home)
            print(json.dumps(line | {"cpus": os.cpu_count()}), flush=True)


if __name__ == "__main__":
    main()
