"""raypipe: image AutoML for Delta Lake, on Ray.

In Python, `raypipe.tune("tables/cells", label="defect")` and the other verbs; see raypipe/door.py.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raypipe.door import clean, close, drift, ingest, load, predict, retrain, train, tune

__version__ = "0.1.0"
__all__ = ["clean", "close", "drift", "ingest", "load", "predict", "retrain", "train", "tune"]


def _call(name: str) -> Any:
    """A call of the door, imported at the first use: torch and Ray take seconds."""
    from importlib import import_module

    # Before anything imports Ray or MLflow: both read their switches at import.
    import_module("raypipe.cluster.connect").prepare_environment()
    return getattr(import_module("raypipe.door"), name)


class _Package(ModuleType):
    """This package, with the door's calls as properties.

    One room is called train too. Python sets it as an attribute when it is first imported, so a
    plain `raypipe.train` would be the call before that and the room after it. The room is always
    found as `from raypipe.train import …`.
    """

    def __dir__(self) -> list[str]:
        return sorted([*vars(self), *__all__])


def _property(name: str) -> property:
    def ignore_room(package: _Package, value: Any) -> None:
        if not isinstance(value, ModuleType):
            raise AttributeError(f"raypipe.{name} cannot be replaced")

    return property(lambda package: _call(name), ignore_room)


for _name in __all__:
    setattr(_Package, _name, _property(_name))
sys.modules[__name__].__class__ = _Package
