"""A model package for Ray's workers: the driver reads and hashes it once, no worker opens a file.

So a package that is replaced while a prediction runs changes nothing, and workers need no access to
the driver's folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch

from raypipe.models.allocator import keep_memory
from raypipe.registry.package import Package

_MOST = 4  # models that a worker process keeps
_opened: dict[str, Package] = {}  # by seal, of this worker process


@dataclass(frozen=True)
class SharedPackage:
    """What a task gets of a package.

    seal: the hash of the package. files: a reference to its files in the object store. classes: of
    its model. cluster: the Ray job that the files were put for.
    """

    seal: str
    files: Any
    classes: tuple[str, ...]
    cluster: str

    def is_of(self, seal: str | None) -> bool:
        """Is it the package of this seal, in the object store of the cluster that is joined now?"""
        return seal == self.seal and self.cluster == ray.get_runtime_context().get_job_id()

    def open(self) -> Package:
        """The package, loaded once in each worker process."""
        if self.seal in _opened:
            return _opened[self.seal]

        # Ray runs one task a CPU, so each takes one thread.
        torch.set_num_threads(1)
        keep_memory()
        arrays = ray.get(self.files)
        package = Package.of({name: data.tobytes() for name, data in arrays.items()}, self.seal)

        # Build the model now, so that its files need not be kept.
        package.model  # noqa: B018
        package.files = {}
        while len(_opened) >= _MOST:
            oldest = next(iter(_opened))
            del _opened[oldest]
        _opened[self.seal] = package
        return package


def share(package: Package) -> SharedPackage:
    """Put a package into the object store, as arrays: workers then read them without a copy."""
    arrays = {name: np.frombuffer(data, np.uint8) for name, data in package.files.items()}
    job = ray.get_runtime_context().get_job_id()
    return SharedPackage(package.seal, ray.put(arrays), package.classes, job)
