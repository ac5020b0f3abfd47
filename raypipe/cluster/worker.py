"""Prepares every worker process of a cluster that raypipe started.

Each process imports this module when it starts, before all others (RAY_preload_python_modules).

1. It sets RAY_ADDRESS. Ray Train and the state API ask for "the" cluster of this host. Without
   RAY_ADDRESS they also see the cluster of another terminal. The workers' environment is fixed
   before the address is known.
2. In a process that was started in advance, it imports the modules of RAYPIPE_PRELOAD (a,b; see
   `connect`). One with a runtime environment of its own was started for one actor, as that of a
   submitted job, and imports what that needs.
3. Python's garbage collector rests meanwhile. It would go through half a million new objects again
   and again, which takes a sixth of the CPU time until a process is ready. Nor does it look at them
   later.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from contextlib import suppress

import ray


def load(modules: list[str]) -> None:
    """Import modules. One that is missing here is imported where it is needed, and fails there."""
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


def wanted() -> list[str]:
    """The modules that this process imports before it has work."""
    was_started_in_advance = "--runtime-env-hash=0" in sys.argv
    listed = os.environ.get("RAYPIPE_PRELOAD", "").split(",")
    return list(filter(None, listed)) if was_started_in_advance else []


if ray.is_initialized():
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    load(wanted())
