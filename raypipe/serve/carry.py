"""A package's bytes on their way to Ray's workers: read and hashed once in the driver, and no worker opens a file.

So a package that is swapped while a prediction runs changes nothing, and workers need not see the driver's folder.
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
_opened: dict[str, Package] = {}  # by seal


@dataclass(frozen=True)
class Carried:
    """What a task holds of a package: its seal, and its files in the object store, once for all tasks."""

    seal: str
    files: Any

    def open(self) -> Package:
        """The package, loaded once in each worker process. Ray Data runs one task a CPU, so each takes one thread."""
        if self.seal not in _opened:
            torch.set_num_threads(1)
            keep_memory()
            package = Package.of(
                {name: data.tobytes() for name, data in ray.get(self.files).items()}, self.seal
            )
            package.model  # noqa: B018  # built now, so that the bytes can go
            package.files = {}
            while len(_opened) >= _MOST:
                del _opened[next(iter(_opened))]
            _opened[self.seal] = package
        return _opened[self.seal]


def carry(package: Package) -> Carried:
    """Into the object store as arrays: these are not copied into every worker."""
    return Carried(
        package.seal,
        ray.put({name: np.frombuffer(data, np.uint8) for name, data in package.files.items()}),
    )
