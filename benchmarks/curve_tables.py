"""Tables of learning curves: configurations, their metric after each epoch, seconds an epoch.

    solar      benchmarks/data/solar_curves.csv (curves.py)
    emoji      benchmarks/data/emoji_curves.csv, made after freeze_thaw was frozen
    TASK       one of Quick-Tune's 18 tasks, of a folder that is not in this repository

Quick-Tune's (Arango et al., ICLR 2024; repository rapanti/quicktune, commit 41e6a217, BSD-3-Clause)
are other people's fine-tuning runs of 50 epochs. A third of the configurations have one epoch only,
probably for want of memory, and others were cut by a limit of time. A search sees such a trial as
it was: each of its epochs is reported and costs its seconds; then the trial is over. Nothing says
before that it will be.

A table that has accuracies alone gives the surrogate their logits.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raypipe.search.schedulers.curves import target
from raypipe.search.space.samplers import SPAN, are_ordered

DATA = Path(__file__).parent / "data"
CURVES = "RAYPIPE_CURVES"  # the variable that names the folder of Quick-Tune's tables
_DECADES = 100  # a range is logarithmic from this ratio of its ends on


@dataclass(frozen=True)
class CurveTable:
    """M configurations; curves may have different lengths."""

    name: str
    values: list[list[float]]
    """Accuracy after each epoch."""

    targets: list[list[float]]
    """What the surrogate models, lower is better."""

    seconds: list[list[float]] | None
    """Of each epoch, if they were measured."""

    x_MD: np.ndarray
    """Coordinates between 0 and 1."""

    group_D: np.ndarray
    """Coordinates of one field share a number."""

    epochs: int

    @property
    def bar(self) -> float:
        """1 % short of the best final value."""
        return 0.99 * max(curve[-1] for curve in self.values)

    @property
    def best(self) -> float:
        """Of all epochs."""
        return max(max(curve) for curve in self.values)


def table(name: str, folder: Path | None) -> CurveTable:
    """One of the tables above. folder: of Quick-Tune's."""
    if name in ("solar", "emoji"):
        return heads(name, DATA / f"{name}_curves.csv")
    if folder is None:
        raise SystemExit(f"Table {name}: no folder of Quick-Tune's curves is given or found")
    return quicktune(name, folder)


def curves_folder(given: Path | None = None) -> Path | None:
    """The folder of Quick-Tune's tables: the given one, $RAYPIPE_CURVES, or ../shared/curves beside
    the checkout; None if there is none.
    """
    beside = Path(__file__).resolve().parents[2] / "shared" / "curves"
    named = os.environ.get(CURVES)
    for folder in (given, Path(named) if named else None, beside):
        if folder is not None and (folder / "quicktune-curves.parquet").exists():
            return folder
    return None


def tasks(folder: Path) -> list[str]:
    """Quick-Tune's tasks, by name. The even ones were developed on, the odd ones held back."""
    import pandas as pd

    names = pd.read_parquet(folder / "quicktune-curves.parquet", columns=["task"])
    return sorted(names.task.unique())


def heads(name: str, file: Path) -> CurveTable:
    """A table of curves.py."""
    text = file.read_text(encoding="utf-8")
    rows = list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))
    values = [_columns(row, "val_accuracy@") for row in rows]
    losses = [_columns(row, "val_loss@") for row in rows]
    targets = [
        [target({"val_loss": loss}, "val_accuracy", "max") for loss in curve] for curve in losses
    ]
    # Drawn from few values, so a choice, which a search may know the order of; all else is a range.
    fields = [key for key in rows[0] if "@" not in key and key != "seconds"]
    columns = {}
    for field in fields:
        drawn = [float(row[field]) for row in rows]
        few = sorted(set(drawn)) if len(set(drawn)) <= 8 else None
        if few and are_ordered(few):
            columns[field] = [_scaled(drawn, SPAN)]
        else:
            columns[field] = _one_hot(drawn, few) if few else [_scaled(drawn)]
    epochs = len(values[0])
    seconds = [[float(row["seconds"])] * epochs for row in rows] if "seconds" in rows[0] else None
    x_MD, group_D = _joined(columns)
    return CurveTable(name, values, targets, seconds, x_MD, group_D, epochs)


def quicktune(task: str, folder: Path) -> CurveTable:
    """One of Quick-Tune's tasks."""
    import pandas as pd

    curves = pd.read_parquet(folder / "quicktune-curves.parquet")
    known = sorted(curves.task.unique())
    if task not in known:
        raise SystemExit(f"Table {task}: is none. There are solar, emoji, {', '.join(known)}")
    curves = curves[curves.task == task].sort_values(["config", "epoch"])
    values, targets, seconds, names = [], [], [], []
    for config, rows in curves.groupby("config"):
        shares = (rows.val_accuracy / 100).tolist()
        values.append(shares)
        targets.append([target({"val_accuracy": v}, "val_accuracy", "max") for v in shares])
        seconds.append(rows.seconds.tolist())
        names.append(config)
    drawn = pd.read_parquet(folder / "quicktune-configs.parquet").set_index("config").loc[names]
    columns: dict[str, list[Any]] = {}
    for name in drawn.columns:
        numbers = drawn[name].astype(float)
        if numbers.nunique() < 2:
            continue
        if name.startswith("cat:"):
            one_hot = numbers.fillna(0).to_numpy() * math.sqrt(0.5)
            columns.setdefault(name.split(":")[1], []).append(one_hot)
        else:
            columns[name] = [_scaled(numbers.fillna(numbers.min()).tolist())]
    x_MD, group_D = _joined(columns)
    return CurveTable(task, values, targets, seconds, x_MD, group_D, 50)


def _columns(row: dict[str, str], prefix: str) -> list[float]:
    return [float(value) for name, value in row.items() if name.startswith(prefix)]


def _scaled(drawn: Sequence[float], span: float = _DECADES) -> np.ndarray:
    """From 0 to 1; by logarithms where values differ by a factor of `span`. Zeros count as a tenth
    of the least other one.
    """
    values = np.array(drawn, np.float64)
    positive = values[values > 0]
    if values.min() >= 0 and len(positive) and positive.max() / positive.min() >= span:
        values = np.log(np.maximum(values, positive.min() / 10))
    return (values - values.min()) / max(values.max() - values.min(), 1e-12)


def _one_hot(drawn: Sequence[float], members: Sequence[float]) -> list[np.ndarray]:
    return [math.sqrt(0.5) * (np.array(drawn) == member) for member in members]


def _joined(columns: dict[str, list[Any]]) -> tuple[np.ndarray, np.ndarray]:
    """(x_MD, group_D) of each field's columns."""
    groups = [number for number, some in enumerate(columns.values()) for _ in some]
    return np.array([one for some in columns.values() for one in some]).T, np.array(groups)
