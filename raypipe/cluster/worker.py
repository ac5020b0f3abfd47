"""Imported by every worker process of a cluster that raypipe started: names that cluster.

Ray Train and the state API ask for "the" cluster of this host, and find another terminal's too
unless RAY_ADDRESS says which. The workers' environment is fixed before the address is known, so
each process sets it when it starts (RAY_preload_python_modules).
"""

from __future__ import annotations

import os

import ray

if ray.is_initialized():
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
