"""Prepares every worker process of a cluster that raypipe started.

Each process imports this module when it starts, before all others (RAY_preload_python_modules).

1. It sets RAY_ADDRESS. Ray Train and the state API ask for "the" cluster of this host. Without
   RAY_ADDRESS they also see the cluster of another terminal. The workers' environment is fixed
   before the address is known.
2. It imports the other modules of that list while Python's garbage collector rests. The collector
   would go through their half a million objects again and again: with torch and ray.tune a process
   takes 2.05 s of CPU until it is ready, and 1.7 s without. Nor does it look at them later.
"""

from __future__ import annotations

import gc
import importlib
import os
from contextlib import suppress

import ray

LISTED = "RAY_preload_python_modules"


def load(modules: list[str]) -> None:
    """Import modules. Ray tries them again, and logs what cannot be imported."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        for module in modules:
            with suppress(ImportError):
                importlib.import_module(module)
        gc.freeze()
    finally:
        if was_on:
            gc.enable()


if ray.is_initialized():
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    load([name for name in os.environ.get(LISTED, "").split(",") if name not in ("", __name__)])
