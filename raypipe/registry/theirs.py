"""MLflow as somebody else uses it in this process, as in a notebook: it stays as it was.

MLflow keeps the address of its store, the experiment and the active run for the whole process.
Ours would take the place of the notebook's, and theirs would get what is ours, or refuse it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# MLflow writes the addresses into these, too.
TRACKING, REGISTRY = "MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"


@contextmanager
def addresses_kept() -> Iterator[None]:
    """After the block, MLflow has the stores that it had before it."""
    before = {name: os.environ.get(name) for name in (TRACKING, REGISTRY)}
    try:
        yield
    finally:
        # Not imported for this: then nobody has set an address.
        mlflow = sys.modules.get("mlflow")
        if mlflow is not None:
            mlflow.set_tracking_uri(before[TRACKING])
            mlflow.set_registry_uri(before[REGISTRY])
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def run_set_aside() -> Iterator[None]:
    """Inside the block, MLflow knows no active run, and no experiment that was set.

    It opens no run of ours beside an active one, nor after `mlflow.set_experiment` of another
    experiment. MLflow has only private names for both.
    """
    from mlflow.tracking import fluent

    active: Any = fluent._active_run_stack  # of this thread
    runs, experiment = active.get(), fluent._active_experiment_id
    active.set([])
    fluent._active_experiment_id = None
    try:
        yield
    finally:
        active.set(runs)
        fluent._active_experiment_id = experiment
