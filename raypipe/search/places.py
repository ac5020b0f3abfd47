"""Trials take their CPUs and GPUs as plain actors do, without placement groups.

Tune asks for a placement group for every trial that it may start next, and takes it back within milliseconds when a trial that
ends leaves its actor to the next one. Ray (2.60) loses the resources of a group that is removed after a node has prepared its
bundle and before the bundle is committed. Such a CPU is never free again, and after a few searches what comes next waits for
ever: in the GCS's log the group has "Finished leasing resource" and "is removed", and no "Finished removing". Tune has no
setting for it, so its module is given Ray's other resource manager while a search runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ray.air.execution.resources import FixedResourceManager
from ray.tune.execution import tune_controller


@contextmanager
def plain() -> Iterator[None]:
    """Within it, Tune counts what trials take against the cluster's resources at the start, and reserves nothing."""
    before = tune_controller.PlacementGroupResourceManager
    tune_controller.PlacementGroupResourceManager = FixedResourceManager
    try:
        yield
    finally:
        tune_controller.PlacementGroupResourceManager = before
