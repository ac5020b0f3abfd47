"""A new SQLite store of MLflow, made under another name: whoever is killed leaves no half of one.

MLflow makes a store in some dozens of steps, which take seconds. After a kill between two of them
it refuses to open what is there ("table … already exists"). A kill may be Ctrl-C, or the end of
search.budget_s.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_PREFIX = "sqlite:///"


def make_whole(uri: str) -> None:
    """Make the store in a file, if that file is missing. Other addresses are left alone."""
    import mlflow

    if not uri.startswith(_PREFIX) or "?" in uri or ":memory:" in uri:
        return
    file = Path(uri.removeprefix(_PREFIX))
    if file.exists() or not file.parent.is_dir():
        return
    with tempfile.TemporaryDirectory(prefix=".making-", dir=file.parent) as folder:
        beside = Path(folder) / file.name
        # The first question makes the tables.
        mlflow.MlflowClient(f"{_PREFIX}{beside}").get_experiment_by_name("Default")
        _put(beside, file)


def _put(made: Path, file: Path) -> None:
    """Give the store its name, unless another process has made one meanwhile."""
    try:
        os.link(made, file)
    except FileExistsError:
        return
    except OSError:  # a file system without hard links
        if not file.exists():
            made.replace(file)
