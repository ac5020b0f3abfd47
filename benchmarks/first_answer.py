"""The first answer of a search on six tasks: how good it is, and after how many seconds.

python -m benchmarks.first_answer --json [--tasks digits …] [--seeds 1] [--seconds 60]
                                  [--home runs/tasks] [--backbones efficientnet_lite0] [--fine-tune]

Each task is a table of benchmarks/task_tables.py with a frozen random split. All accuracies are
those of VALIDATION images. The registration predicts the test split too, as `raypipe tune` does:
its score is dropped, and the look is noted (looks.py). For each task:

start_s     Ray's start on this machine, once for all tasks
cold_s      the first answer with no features kept, at the product's own defaults
warm_s      the same with all features kept
register_s  the package and its registration, as `raypipe tune` does it
heads       the metric of every head, and what it took

A line of `HOME/first-answer.jsonl` is one measurement. Those that are there are not made again: the
command goes on where it stopped. --fine-tune: full fine-tuning beside it, with the first values of
a search that fine-tunes (raypipe/search/space/portfolio.yaml) and 20 epochs, at most 20 minutes.
Without patience: a schedule that falls over 20 epochs has to reach its end, and the usual patience
ended it after 8 to 16.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import time
from pathlib import Path
from typing import Any

from raypipe.cluster import connect

connect.prepare_environment()  # before anything imports Ray, which reads its switches at import

from benchmarks import looks, task_tables  # noqa: E402
from raypipe.artifacts.settings import ArtifactsConfig  # noqa: E402
from raypipe.config import replace, validate  # noqa: E402
from raypipe.feed.dataset import pin  # noqa: E402
from raypipe.registry.store import open_store  # noqa: E402
from raypipe.search import contenders, first_answer, leaderboard, trial_files  # noqa: E402
from raypipe.search.leaderboard import Trial  # noqa: E402
from raypipe.search.space import portfolio  # noqa: E402
from raypipe.train import trainer  # noqa: E402
from raypipe.train.job import TrainJob  # noqa: E402
from raypipe.train.publish import publish  # noqa: E402
from raypipe.train.trainer import Plan  # noqa: E402
from raypipe.train.worker import Prepared  # noqa: E402

LEDGER = "first-answer.jsonl"
FINE_TUNE_S = 1200.0
DROPPED = "computed by the registration and dropped: the benchmark shows validation only"
# The first start of a search that fine-tunes.
_HAND = next(one for one in portfolio.learned() if one["model.mode"] == "finetune")
FINE_TUNE: dict[str, Any] = dict(_HAND) | {
    "model.name": "efficientnet_lite0",
    "model.side_px": 128,
    "train.lr": 1e-3,
    "train.epochs": 20,
    "train.stopping.patience": None,
    "train.stopping.seconds": FINE_TUNE_S,
}


def job_of(table: Any, folder: Path) -> TrainJob:
    """A job at the defaults, whose run lies in the folder."""
    return validate(TrainJob, {"table": table.model_dump(), "run": {"dir": str(folder)}})


def best_of(trials: list[Trial], job: TrainJob) -> Trial:
    rule = job.train.stopping
    return leaderboard.ranked(trials, rule.metric, rule.mode)[0]


def measured(task: str, seed: int, home: Path, seconds: float | None) -> dict[str, Any]:
    """One task: the first answer cold and warm, and its registration."""
    table = task_tables.table(task, seed, home)
    folder = home / f"{task}-{seed}" / "first-answer"
    shutil.rmtree(folder, ignore_errors=True)
    job = job_of(table, folder)
    pinned = pin(job.table, job.feed, kind=job.model.task)
    cold = first_answer.make(job, pinned, folder / "cold", seconds)
    # The same readings as the cold call, all of whose features are kept now.
    (folder / "warm").mkdir()
    shutil.copy(folder / "cold" / first_answer.FILE, folder / "warm" / first_answer.FILE)
    warm = first_answer.make(job, pinned, folder / "warm", seconds)

    best = best_of(cold.trials, job)
    began = time.perf_counter()
    best_job = replace(job, best.changes)
    result = trial_files.training_result("first", pinned.version, pinned.classes, best)
    prepared = Prepared(lambda: trainer.prepare(best_job, pinned))
    planned = Plan(best_job, pinned, "first", folder / "cold", prepared)
    store = open_store(job.run, job.registry, ArtifactsConfig())
    digest = task_tables.digest(table)
    looks.note(task, f"seed {seed}, {digest}", "python -m benchmarks.first_answer", DROPPED)
    publish(store, planned, result, "search")
    register_s = time.perf_counter() - began

    metric = job.train.stopping.metric
    heads = [
        {
            "head": " ".join(str(value) for value in trial.changes.values()),
            metric: round(trial.metric, 4),
            "val_loss": round(trial.history[0]["val_loss"], 4),
            "seconds": round(trial.seconds, 2),
        }
        for trial in cold.trials
    ]
    return {
        "task": task,
        "seed": seed,
        "what": "first answer",
        "digest": digest,
        "images": {job.feed.train: pinned.counts["train"], job.feed.val: pinned.counts["val"]},
        metric: round(best.metric, 4),
        "val_loss": round(best.history[0]["val_loss"], 4),
        "best": dict(best.changes),
        "cold_s": round(cold.seconds, 1),
        "warm_s": round(warm.seconds, 1),
        "register_s": round(register_s, 1),
        "seconds": seconds,
        "heads": heads,
    }


def fine_tuned(task: str, seed: int, home: Path) -> dict[str, Any]:
    """Full fine-tuning of one task."""
    table = task_tables.table(task, seed, home)
    job = replace(job_of(table, home / f"{task}-{seed}" / "fine-tuned"), FINE_TUNE)
    result = trainer.run(job)
    metric = job.train.stopping.metric
    return {
        "task": task,
        "seed": seed,
        "what": "fine-tuned",
        "digest": task_tables.digest(table),
        metric: round(result.metrics[metric], 4),
        "val_loss": round(result.metrics["val_loss"], 4),
        "epochs": len(result.history),
        "seconds": round(result.device_s, 1),
    }


def known(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tasks = list(task_tables.DEVELOPMENT)
    parser.add_argument("--tasks", nargs="+", choices=tasks, default=tasks)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--home", type=Path, default=Path("runs/tasks"))
    parser.add_argument("--backbones", nargs="+", choices=list(contenders.WORK))
    parser.add_argument("--fine-tune", action="store_true")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    if chosen.backbones:
        contenders.WORK = {name: contenders.WORK[name] for name in chosen.backbones}
    home = chosen.home.absolute()
    home.mkdir(parents=True, exist_ok=True)
    what = "fine-tuned" if chosen.fine_tune else "first answer"

    began = time.perf_counter()
    any_job = validate(TrainJob, {"table": {"uri": "none"}, "cluster": {"address": "local"}})
    resources = connect.connect(any_job.cluster)
    machine = {
        "start_s": round(time.perf_counter() - began, 1),
        "cpus": resources.get("CPU"),
        "python": platform.python_version(),
    }
    done = {(line["task"], line["seed"], line["what"]) for line in known(home / LEDGER)}
    for task in chosen.tasks:
        for seed in chosen.seeds:
            if (task, seed, what) in done:
                continue
            if chosen.fine_tune:
                line = fine_tuned(task, seed, home)
            else:
                line = measured(task, seed, home, chosen.seconds)
            with (home / LEDGER).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line | machine) + "\n")
    for line in known(home / LEDGER):
        if line["what"] == what and line["task"] in chosen.tasks:
            print(json.dumps(line) if chosen.json else _said(line), flush=True)


def _said(line: dict[str, Any]) -> str:
    figures = {name: value for name, value in line.items() if isinstance(value, float | int | str)}
    return "  ".join(f"{name} {value}" for name, value in figures.items())


if __name__ == "__main__":
    main()
