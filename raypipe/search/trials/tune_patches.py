"""Changes to Ray Tune while a search runs: trials are ordinary actors, without placement groups.

1. No placement groups. Tune asks for one for every trial that it may start next. It removes the
   group within milliseconds when a trial that ends leaves its process to the next one. Ray (2.60)
   loses resources if a group is removed after a node has prepared its bundle and before the bundle
   is committed. Such a CPU is never free again, and after a few searches the next one waits for
   ever: in the GCS's log the group has "Finished leasing resource" and "is removed", and no
   "Finished removing". Tune has no setting for it, so its module gets Ray's other resource manager.
2. No runtime environment of a trial's own. A Ray node starts some processes in advance, one a CPU,
   which may have imported what a trial needs (PRELOAD; see cluster/worker.py). In such a process a
   trial starts at once, and not after four seconds. Ray gives such a process only to an actor
   without a runtime environment, so ours have none unless the user set one of the variables that
   Tune propagates. Ray also gives it only if no task has run in it, so tasks that come before the
   trials should run in other processes.
3. No AWS keys in a trial's environment. Tune would propagate AWS_SECRET_ACCESS_KEY, and Ray shows
   an actor's environment on the dashboard and writes it into its logs.
4. A trial has its folder before it takes over the process of one that ended. Tune (2.60) gives such
   a process also to trials that it has not yet scheduled, which have none: the process fails, Tune
   fails again where it wants to write that error ("Should not access `trial_driver_staging_path`
   without setting `trial_dir_name`"), and the search is lost. It happened in one of nine runs with
   about four short trials a second.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray import tune
from ray.air.execution.resources import FixedResourceManager
from ray.tune.execution import class_cache, tune_controller
from ray.tune.execution.class_cache import _ActorClassCache

from raypipe.cluster.connect import ENV
from raypipe.errors import RaypipeError

PRELOAD = "torch,ray.tune,raypipe.search.trials.trial"
_search = threading.Lock()

# The variables that Tune propagates to trials, without the AWS keys. Workers do not need these:
# they have their node's environment, and table.storage_options from the job.
PROPAGATED = {name for name in class_cache.ENV_VARS_TO_PROPAGATE if not name.startswith("AWS_")}


@contextmanager
def applied(multi_worker: bool = False) -> Iterator[None]:
    """Within this context Tune has the changes above; it reserves nothing, and counts what trials
    take against the resources that the cluster had at the start.

    multi_worker: trials start Ray Train groups. They keep the environment that Tune gives them,
    because Ray Train needs it.
    """
    manager = tune_controller.PlacementGroupResourceManager
    classes = tune_controller._ActorClassCache
    propagated = class_cache.ENV_VARS_TO_PROPAGATE
    controller = tune_controller.TuneController
    reset = controller._schedule_trial_reset

    def named(self: Any, trial: Any, *more: Any) -> None:
        trial.init_local_path()
        reset(self, trial, *more)

    controller._schedule_trial_reset = named
    tune_controller.PlacementGroupResourceManager = FixedResourceManager
    if not multi_worker:
        tune_controller._ActorClassCache = _ActorClasses
    class_cache.ENV_VARS_TO_PROPAGATE = PROPAGATED
    try:
        yield
    finally:
        controller._schedule_trial_reset = reset
        tune_controller.PlacementGroupResourceManager = manager
        tune_controller._ActorClassCache = classes
        class_cache.ENV_VARS_TO_PROPAGATE = propagated


@contextmanager
def alone() -> Iterator[None]:
    """Raise RaypipeError if another thread of this process is within.

    Tune's classes are one for all threads, and so are the changes: the first search to end would
    take them back in the middle of the other one.
    """
    if not _search.acquire(blocking=False):
        raise RaypipeError(
            "Another thread of this process runs a search",
            rule="Ray Tune is changed while a search runs, for the whole process",
            fix="Run one after the other, or each in a process of its own",
        )
    try:
        yield
    finally:
        _search.release()


def run_config(tuner: tune.Tuner) -> tune.RunConfig:
    """The run config of a restored tuner: its callbacks were pickled before a kill."""
    return tuner._local_tuner.get_run_config()


class _ActorClasses(_ActorClassCache):  # type: ignore[misc]
    """Tune's actor classes, without a runtime environment where the user set none of PROPAGATED."""

    def get(self, trainable: type) -> Any:
        if any(_is_users(name) for name in PROPAGATED):
            return super().get(trainable)
        if trainable not in self._cache:
            self._cache[trainable] = ray.remote(trainable)
        return self._cache[trainable]


def _is_users(name: str) -> bool:
    """Did the user set this variable to something else than raypipe sets on every node?"""
    ours = ENV.get(name)
    return os.environ.get(name, ours) != ours
