"""One training run: the loop, parallel strategies, checkpoints, stopping rules."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """This package, which can be called: `raypipe.train("tables/cells", label="defect")`.

    The call of the Python door has the room's name. Python sets a package as an attribute of its
    parent when it is imported, so `raypipe.train` is the room, and the room passes the call on.
    """

    def __call__(self, table: Any = None, **settings: Any) -> Any:
        """Train one model and register it; see raypipe/door.py."""
        import_module("raypipe.cluster.connect").prepare_environment()
        return import_module("raypipe.door").train(table, **settings)


sys.modules[__name__].__class__ = _Room
