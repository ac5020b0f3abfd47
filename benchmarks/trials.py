"""Claim: what a search costs above its trials' own training steps, and that it decodes each image
once.

Sixteen trials of about a second (a part of `python -m benchmarks.search --json`), two at a time on
two cores: a small network on 64 px photographs, every rate of a grid, no scheduler, so that all run
to their end. The cluster is there before, with the processes that Ray starts in advance and
RAY_preload_python_modules=torch,ray.tune, as `raypipe tune` sets it for a cluster that it starts.
Everything else, from pinning the table to the ranked leaderboard, is in the wall time.

Work is the time of training steps alone: data, augmentation, forward, backward, optimizer. Building
the model, validation and checkpoints are a trial's cost and no work; they are told apart as
`rest_s_per_trial`. Ideal is the work, two at a time.

A trial is to have WORK_S of work, and machines differ. So a first search, with CALIBRATION images,
measures what an image costs here, and the timed one trains on as many images as fill WORK_S. The
first one also counts decoded images where they are decoded, in every process, by a hook around the
one function that decodes: such a hook is a runtime environment, and processes that were started in
advance have none, so it would change the timed search.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import pictures

if TYPE_CHECKING:
    from raypipe.search.leaderboard import Trial

TRIALS, AT_ONCE, EPOCHS, BATCH = 16, 2, 4, 32
CALIBRATION = 320  # images of the first search
WORK_S = 1.0  # training steps of one trial
FEWEST_IMAGES, MOST_IMAGES = 2 * BATCH, 4096
WARM_S = 8.0  # until those processes have imported
COUNT = "RAYPIPE_BENCHMARK_DECODED"  # a file that gets a byte for every image decoded


def count_decoded() -> None:
    """Set up in each worker process: note every image that it decodes."""
    from raypipe.images import decode

    plain, note = decode._pixels, os.open(os.environ[COUNT], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def counted(*args: Any) -> Any:
        os.write(note, b".")
        return plain(*args)

    decode._pixels = counted


def job(folder: Path, uri: str) -> dict[str, Any]:
    rates = ", ".join(f"{1e-4 * 1.3**i:.2e}" for i in range(TRIALS))
    return {
        "table": {"uri": uri},
        "run": {"dir": str(folder / "run")},
        "cluster": {"address": "local", "cpus": AT_ONCE, "object_store_mb": 300},
        "feed": {"val": "train", "test": "train"},
        "model": {"name": "small_cnn", "mode": "finetune", "pretrained": False, "side_px": 64},
        "train": {
            "epochs": EPOCHS,
            "batch_size": BATCH,
            "precision": "fp32",
            "stopping": {"metric": "val_loss", "patience": None},
        },
        "search": {"samples": 1, "scheduler": "none", "space": {"train.lr": f"grid({rates})"}},
    }


def measure() -> dict[str, Any]:
    """wall_vs_ideal, overhead_ms_per_trial, decoded_vs_table, and what they are made of."""
    from raypipe.cluster.connect import prepare_environment

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ[COUNT] = str(folder / "decoded")
        Path(os.environ[COUNT]).touch()
        prepare_environment()
        from raypipe.search.trials import tune_patches

        hook = {"worker_process_setup_hook": "benchmarks.trials.count_decoded"}
        first = pictures.table(folder, CALIBRATION)
        counted, _ = _searched(job(folder / "counted", first), hook)
        decoded = (folder / "decoded").stat().st_size
        images = images_for(WORK_S, steps_s(counted.trials, CALIBRATION) / TRIALS)
        os.environ["RAY_preload_python_modules"] = tune_patches.PRELOAD  # noqa: SIM112
        result, wall_s = _searched(job(folder / "timed", pictures.table(folder, images)), None)
    for found in (counted, result):
        assert len(found.trials) == TRIALS and not any(t.stopped_early for t in found.trials)
    assert counted.decoded == decoded, "what the search reports is what was decoded"
    work_s, spent_s = steps_s(result.trials, images), sum(t.seconds for t in result.trials)
    return {
        "wall_vs_ideal": round(wall_s / (work_s / AT_ONCE), 3),
        "overhead_ms_per_trial": round(1e3 * (wall_s - work_s / AT_ONCE) / (TRIALS / AT_ONCE)),
        "decoded_vs_table": round(decoded / CALIBRATION, 3),
        "wall_s": round(wall_s, 1),
        "work_s_per_trial": round(work_s / TRIALS, 2),
        "rest_s_per_trial": round((spent_s - work_s) / TRIALS, 2),
        "images": images,
    }


def steps_s(trials: Sequence[Trial], images: int) -> float:
    """What all trials' training steps took; the meter tells the mean step of each epoch."""
    return sum(line["step_s"] * (images // BATCH) for trial in trials for line in trial.history)


def images_for(wanted_s: float, calibrated_s: float) -> int:
    """How many images make a trial's steps take so long, where CALIBRATION took `calibrated_s`."""
    batches = round(CALIBRATION * wanted_s / calibrated_s / BATCH)
    return min(MOST_IMAGES, max(FEWEST_IMAGES, batches * BATCH))


def _searched(asked: dict[str, Any], environment: dict[str, Any] | None) -> tuple[Any, float]:
    """(the search's result, its wall time) on a cluster that has been there for a while."""
    import ray

    from raypipe.cluster.connect import close
    from raypipe.config import validate
    from raypipe.job import Job
    from raypipe.search.tuner import search

    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    if environment:
        count_decoded()  # here, too
    size = {"num_cpus": AT_ONCE, "object_store_memory": 300 * 2**20}
    ray.init("local", **size, runtime_env=environment, include_dashboard=False, log_to_driver=False)
    time.sleep(WARM_S)
    job = validate(Job, asked)
    started = time.perf_counter()
    result = search(job.training, job.search)
    wall_s = time.perf_counter() - started
    close()
    return result, wall_s


if __name__ == "__main__":
    print(measure())
