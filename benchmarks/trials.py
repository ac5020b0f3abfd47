"""Claim: a search costs its trials' own work, and decodes each image once.

Sixteen trials of about a second's training each (a part of `python -m benchmarks.search --json`), two at a time on two cores:
a small network on 64 px photographs, every rate of a grid, no scheduler, so that all run to their end. The cluster is there
before, with the processes that Ray starts in advance and RAY_preload_python_modules=torch,ray.tune, as `raypipe tune` sets it
for a cluster that it starts; everything else, from pinning the table to the ranked leaderboard, is in the wall time. Work is
the time that trials spent in their training loops; ideal is half of it. Images are counted where they are decoded, in every
process, by a hook around the one function that decodes: in the same search done before, for such a hook is a runtime
environment, and processes that were started in advance have none.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import pictures

TRIALS, AT_ONCE, IMAGES = 16, 2, 640
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
        "train": {"epochs": 4, "batch_size": 32, "precision": "fp32", "stopping": {"metric": "val_loss", "patience": None}},
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
        from raypipe.search import places

        uri = pictures.table(folder, IMAGES)
        counted, _ = _searched(job(folder / "counted", uri), {"worker_process_setup_hook": "benchmarks.trials.count_decoded"})
        decoded = (folder / "decoded").stat().st_size
        os.environ["RAY_preload_python_modules"] = places.PRELOAD  # noqa: SIM112
        result, wall_s = _searched(job(folder / "timed", uri), None)
        work_s = sum(t.seconds for t in result.trials)
    assert len(result.trials) == TRIALS and not any(t.stopped_early for t in result.trials)
    assert result.decoded == counted.decoded == decoded, "what the search reports is what was decoded"
    return {
        "wall_vs_ideal": round(wall_s / (work_s / AT_ONCE), 3),
        "overhead_ms_per_trial": round(1e3 * (wall_s - work_s / AT_ONCE) / (TRIALS / AT_ONCE)),
        "decoded_vs_table": round(decoded / IMAGES, 3),
        "wall_s": round(wall_s, 1),
        "work_s_per_trial": round(work_s / TRIALS, 2),
    }


def _searched(asked: dict[str, Any], environment: dict[str, Any] | None) -> tuple[Any, float]:
    """(the search's result, its wall time) on a cluster that has been there for a while."""
    import ray

    from raypipe.cluster.connect import close
    from raypipe.config import validate
    from raypipe.search.settings import SearchJob
    from raypipe.search.tuner import search

    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    if environment:
        count_decoded()  # here, too
    size = {"num_cpus": AT_ONCE, "object_store_memory": 300 * 2**20}
    ray.init("local", **size, runtime_env=environment, include_dashboard=False, log_to_driver=False)
    time.sleep(WARM_S)
    started = time.perf_counter()
    result = search(validate(SearchJob, asked))
    wall_s = time.perf_counter() - started
    close()
    return result, wall_s


if __name__ == "__main__":
    print(measure())
