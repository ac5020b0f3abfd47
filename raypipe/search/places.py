"""Where trials run: on CPUs and GPUs that they take as plain actors do, in processes that are there already.

Tune asks for a placement group for every trial that it may start next, and takes it back within milliseconds when a trial that
ends leaves its actor to the next one. Ray (2.60) loses the resources of a group that is removed after a node has prepared its
bundle and before the bundle is committed. Such a CPU is never free again, and after a few searches what comes next waits for
ever: in the GCS's log the group has "Finished leasing resource" and "is removed", and no "Finished removing".

Tune also gives trials environment variables of their own (for PyTorch Lightning, and what Ray Train reads in the process that
starts a group), and so Ray starts a new process for each, instead of one that has just decoded images and imported what a
trial needs.

Tune has no setting for either, so its modules are given other values while a search runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray.air.execution.resources import FixedResourceManager
from ray.tune.execution import class_cache, tune_controller


@contextmanager
def plain(groups: bool = False) -> Iterator[None]:
    """Within it, Tune counts what trials take against the cluster's resources at the start, and reserves nothing. `groups`:
    trials start groups of workers, and need Ray Train's variables."""
    changed: list[tuple[Any, str, Any]] = [
        (tune_controller, "PlacementGroupResourceManager", FixedResourceManager),
        (class_cache, "DEFAULT_ENV_VARS", {}),
    ]
    if not groups:
        secrets = {name for name in class_cache.ENV_VARS_TO_PROPAGATE if name.startswith("AWS_")}
        changed.append((class_cache, "ENV_VARS_TO_PROPAGATE", secrets))
    before = [(module, name, getattr(module, name)) for module, name, _ in changed]
    for module, name, value in changed:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
