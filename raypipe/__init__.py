"""raypipe: image AutoML for Delta Lake, on Ray.

In Python, `raypipe.tune("tables/cells", label="defect")` and the other verbs; see raypipe/door.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raypipe.version import VERSION

if TYPE_CHECKING:
    from raypipe.door import (
        clean,
        close,
        drift,
        evaluate,
        ingest,
        load,
        predict,
        retrain,
        train,
        tune,
    )

__version__ = VERSION
__all__ = [
    "clean",
    "close",
    "drift",
    "evaluate",
    "ingest",
    "load",
    "predict",
    "retrain",
    "train",
    "tune",
]


def __getattr__(name: str) -> Any:
    """A call of the door, imported at the first use: torch and Ray take seconds."""
    if name not in __all__:
        raise AttributeError(f"module 'raypipe' has no attribute {name!r}")
    from importlib import import_module

    # The room of this name, which can be called.
    if name == "train":
        return import_module("raypipe.train")
    # Before anything imports Ray or MLflow: both read their switches at import.
    import_module("raypipe.cluster.connect").prepare_environment()
    return getattr(import_module("raypipe.door"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
