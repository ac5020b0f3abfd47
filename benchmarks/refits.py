"""One long refit of a search's best trial, or the mean of several short ones in the same time?

    python -m benchmarks.refits --json [--tasks emoji elpv-binary] [--seeds 1] [--parts 3]
                                [--epochs 18] [--side-px 128] [--home runs/refits]

Each task is a table of benchmarks/task_tables.py. A network with the hand-set start of the default
space is trained PARTS times for EPOCHS epochs, with other random numbers, and once for PARTS *
EPOCHS epochs. All learn the training split, and say what they say of the VALIDATION images
(`said-*.npz` in HOME: there, they are not trained again). No test split is read. Two trainings run
side by side, with one thread each.

Told are accuracy and cross-entropy of: one short, one long, the mean of the short ones, two heads
of a first answer, and the plain mean of these heads with each of the others, as a refit of an
ensemble has it (search/refit_together.py). `difference` is the accuracy of several short ones less
that of the long one, with its standard error over images.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

HEADS = (128, 224)
LONG = "long"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=["emoji", "elpv-binary"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--parts", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=18)
    parser.add_argument("--side-px", type=int, default=128)
    parser.add_argument("--home", type=Path, default=Path("runs/refits"))
    parser.add_argument("--one", nargs=3, metavar=("TASK", "SEED", "MODEL"), help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    asked.home.mkdir(parents=True, exist_ok=True)
    if asked.one:
        trained(asked, *asked.one)
        return
    for task in asked.tasks:
        for seed in asked.seeds:
            made(asked, task, seed)
            print(json.dumps({"task": task, "seed": seed} | told(asked, task, seed)), flush=True)


def file_of(asked: argparse.Namespace, task: str, seed: int | str, model: str) -> Path:
    how = f"{asked.parts}x{asked.epochs}-{asked.side_px}"
    return Path(asked.home) / f"said-{task}-{seed}-{how}-{model}.npz"


def models_of(asked: argparse.Namespace) -> list[str]:
    return [LONG, *(f"short-{n}" for n in range(asked.parts)), *(f"head-{px}" for px in HEADS)]


def made(asked: argparse.Namespace, task: str, seed: int) -> None:
    """Train what is missing, two at a time."""
    from benchmarks import task_tables

    task_tables.table(task, seed, asked.home / "tables")
    missing = [m for m in models_of(asked) if not file_of(asked, task, seed, m).exists()]
    own = ["--parts", asked.parts, "--epochs", asked.epochs, "--side-px", asked.side_px]

    def train(model: str) -> None:
        command = [sys.executable, "-m", "benchmarks.refits", "--one", task, seed, model]
        command += [*own, "--home", asked.home]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run([str(part) for part in command], check=True, env=env)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, missing))


def trained(asked: argparse.Namespace, task: str, seed: str, model: str) -> None:
    """Train one model in this process, and keep what it says of the validation images."""
    from raypipe.cluster.connect import prepare_environment

    prepare_environment()  # before anything imports Ray
    from benchmarks import task_tables
    from benchmarks.first_answer import FINE_TUNE
    from raypipe.config import replace, validate
    from raypipe.feed.dataset import pin
    from raypipe.search import together
    from raypipe.search.trials.trial import data_key
    from raypipe.train import trainer
    from raypipe.train.job import TrainJob

    table = task_tables.table(task, int(seed), asked.home / "tables")
    folder = asked.home / f"{task}-{seed}-{model}"
    kind, _, number = model.partition("-")
    sections = {
        "table": table.model_dump(),
        "run": {"dir": str(folder)},
        # Features of a frozen backbone are computed by a cluster.
        "cluster": {"address": "local" if kind == "head" else "none"},
    }
    if kind == "head":
        changes: dict[str, Any] = {
            "model.name": "efficientnet_lite0_stages",
            "model.mode": "frozen",
            "model.side_px": int(number),
            "model.head": "kernel",
            "train.solver": "closed",
        }
    else:
        changes = FINE_TUNE | {
            "model.side_px": asked.side_px,
            "train.epochs": asked.epochs * (asked.parts if kind == LONG else 1),
            "train.result": "last",
            "run.seed": int(number or 0) + 1,
        }
    job = replace(validate(TrainJob, sections), changes)
    pinned = pin(job.table, job.feed, kind=job.model.task)
    result = trainer.run(trainer.plan(job, pinned))
    file = file_of(asked, task, seed, model)
    one = together.Candidate(model, job, result.checkpoint)
    said = together.said_of([one], pinned, {data_key(job): trainer.prepare(job, pinned)})
    np.savez(
        file,
        scores_NC=said.scores_KNC[0],
        labels_N=said.labels_N,
        samples_N=said.samples_N,
        seconds=result.device_s,
    )


def told(asked: argparse.Namespace, task: str, seed: int) -> dict[str, Any]:
    """What the models and their means are worth."""
    said = {m: np.load(file_of(asked, task, seed, m)) for m in models_of(asked)}
    labels_N = said[LONG]["labels_N"].astype(int)
    scores = {name: one["scores_NC"].astype(float) for name, one in said.items()}
    shorts = [scores[f"short-{n}"] for n in range(asked.parts)]
    heads_NC = np.mean([scores[f"head-{px}"] for px in HEADS], axis=0)
    means = {
        "one short": shorts[0],
        "one long": scores[LONG],
        "several short": np.mean(shorts, axis=0),
        "heads": heads_NC,
    }
    for name in ("one short", "one long", "several short"):
        means[f"{name} and heads"] = (means[name] + heads_NC) / 2
    right = {name: one.argmax(1) == labels_N for name, one in means.items()}
    figures: dict[str, Any] = {"images": len(labels_N)}
    for name, one in means.items():
        own = np.clip(one[np.arange(len(labels_N)), labels_N], 1e-9, 1)
        figures[name] = {
            "accuracy": round(float(right[name].mean()), 4),
            "cross_entropy": round(float(-np.log(own).mean()), 4),
        }
    figures["each short"] = [round(float((s.argmax(1) == labels_N).mean()), 4) for s in shorts]
    for end in ("", " and heads"):
        apart = right[f"several short{end}"].astype(float) - right[f"one long{end}"]
        error = apart.std() / np.sqrt(len(apart))
        figures[f"difference{end}"] = [round(float(apart.mean()), 4), round(float(error), 4)]
    figures["seconds"] = {name: round(float(one["seconds"]), 1) for name, one in said.items()}
    return figures


if __name__ == "__main__":
    main()
