"""Sets RAY_ADDRESS in every worker process of a cluster that raypipe started.

Ray Train and the state API ask for "the" cluster of this host. Without RAY_ADDRESS they also see
the cluster of another terminal. The workers' environment is fixed before the address is known, so
each process imports this module when it starts (RAY_preload_python_modules).
"""

from __future__ import annotations

import os

import ray

if ray.is_initialized():
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
