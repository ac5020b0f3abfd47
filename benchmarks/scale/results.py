"""Claim: 1,000 trials become a leaderboard, a page and MLflow runs without reading all they stored.

The search of simulated.py, by ASHA. read_tb: what the driver reads to rank the trials,
if the checkpoints were of ViT-L. MLflow's store is SQLite in a folder, as by default.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.scale.memory import peak_mb
from benchmarks.scale.simulated import FILE_GB, Search
from raypipe.registry import runs
from raypipe.registry.store import open_store
from raypipe.search import page as search_page
from raypipe.search import trial_files
from raypipe.search.result import SearchResult
from raypipe.tables.table import TableVersion
from raypipe.train import publish


class Read:
    """Counts the checkpoints whose weights are read and compared with their hashes."""

    def __init__(self) -> None:
        self.tb = 0.0
        self._check = trial_files._has_finite_weights
        trial_files._has_finite_weights = self

    def __call__(self, folder: Path) -> bool:
        self.tb += FILE_GB["weights"] / 1000
        return self._check(folder)


def measure(temporary: str, sizes: dict[str, int]) -> dict[str, Any]:
    search = Search(Path(temporary), sizes["trials"], "asha")
    search.run()
    checked = Read()
    before = peak_mb(reset=True)
    began = time.perf_counter()
    trials = search.ranked()
    found: dict[str, Any] = {
        "trials": len(trials),
        "rank_s": time.perf_counter() - began,
        "read_tb": checked.tb,
    }
    began = time.perf_counter()
    file = search.folder / "result.json"
    trial_files.write(file, trials, None, 0)
    trial_files.read(file)
    found["result_json_s"] = time.perf_counter() - began
    found["result_json_mb"] = file.stat().st_size / 1e6

    version = TableVersion(str(search.folder / "table"), 1)
    job = search.job
    best = trial_files.training_result("key", version, ("a", "b"), trials[0])
    result = SearchResult("key", job.training, best, tuple(trials), "val_loss", 1.0)
    began = time.perf_counter()
    search_page.section(result)
    found["page_s"] = time.perf_counter() - began

    store = open_store(job.run, job.registry)
    children = [
        (trial.name, trial.changes, trial.history, {"seconds": 1.0, "device_s": 1.0})
        for trial in trials
    ]
    began = time.perf_counter()
    publish._log(store, job.training, best, "search", {}, children, {})
    found["mlflow_s"] = time.perf_counter() - began
    found["mlflow_ms_per_trial"] = found["mlflow_s"] / len(trials) * 1000
    began = time.perf_counter()
    runs.looks(store, version)
    found["looks_s"] = time.perf_counter() - began
    found["more_mb"] = peak_mb() - before
    return found
