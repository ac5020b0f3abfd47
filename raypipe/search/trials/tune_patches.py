"""Trials take their CPUs and GPUs as plain actors do, without placement groups.

Tune asks for a placement group for every trial that it may start next, and takes it back within milliseconds when a trial that
ends leaves its actor to the next one. Ray (2.60) loses the resources of a group that is removed after a node has prepared its
bundle and before the bundle is committed. Such a CPU is never free again, and after a few searches what comes next waits for
ever: in the GCS's log the group has "Finished leasing resource" and "is removed", and no "Finished removing". Tune has no
setting for it, so its module is given Ray's other resource manager while a search runs.

And they take the processes that a Ray node starts in advance, one a CPU, which may have imported what a trial needs
(RAY_preload_python_modules, set where the node starts): then a trial begins at once, and not after four seconds. Ray gives
such a process to an actor without a runtime environment of its own, so what Tune sets for every trial is left out where
nothing of it is the user's; and only if no task has run in it, so what runs before the trials should run elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.air.execution.resources import FixedResourceManager
from ray.tune.execution import class_cache, tune_controller
from ray.tune.execution.class_cache import _ActorClassCache

from raypipe.cluster.connect import ENV

PRELOAD = "torch,ray.tune"
# What Tune hands on to its trials. It would hand on AWS_SECRET_ACCESS_KEY too, and Ray shows an actor's environment on the
# dashboard and writes it into its logs. Workers have their node's environment, and table.storage_options from the job.
HANDED_ON = {name for name in class_cache.ENV_VARS_TO_PROPAGATE if not name.startswith("AWS_")}


@contextmanager
def plain(groups: bool = False) -> Iterator[None]:
    """Within it, Tune counts what trials take against the cluster's resources at the start, and reserves nothing. Trials that
    are `groups` of workers keep their environment: it speaks to Ray Train, which they start."""
    before = tune_controller.PlacementGroupResourceManager, tune_controller._ActorClassCache
    handed_on, class_cache.ENV_VARS_TO_PROPAGATE = class_cache.ENV_VARS_TO_PROPAGATE, HANDED_ON
    tune_controller.PlacementGroupResourceManager = FixedResourceManager
    if not groups:
        tune_controller._ActorClassCache = _Classes
    try:
        yield
    finally:
        tune_controller.PlacementGroupResourceManager, tune_controller._ActorClassCache = before
        class_cache.ENV_VARS_TO_PROPAGATE = handed_on


class _Classes(_ActorClassCache):  # type: ignore[misc]
    """Tune's actor classes: with an environment of their own where the user set what Tune hands on, else without."""

    def get(self, trainable: type) -> Any:
        if any(os.environ.get(name, ENV.get(name)) != ENV.get(name) for name in HANDED_ON):
            return super().get(trainable)
        if trainable not in self._cache:
            self._cache[trainable] = ray.remote(trainable)
        return self._cache[trainable]
