"""Other people's fine-tuning runs as one table: Quick-Tune's 18 image tasks.

The files are not a part of this repository (Arango et al., ICLR 2024, BSD-3-Clause): a folder
`curves` beside the checkout, under `shared`, or one that is named. Each of the 3,221 configurations
ran on one task only.

All 978 configurations with `linear_probing` have exactly one epoch, in every task, and of the 2,243
others 107 have one: so most single epochs are this switch, not memory that ran out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from raypipe.errors import ConfigError

FOLDER = Path(__file__).resolve().parents[1].parent / "shared" / "curves"
# What names a category: the prefix of its one-hot columns.
CATEGORIES = {
    "model": "cat:model:",
    "optimizer": "cat:opt:",
    "schedule": "cat:sched:",
    "augmentation": "cat:data_augmentation:",
}


@dataclass(frozen=True)
class Runs:
    """One row a configuration."""

    tasks: list[str]
    """Names, sorted."""

    task_N: np.ndarray
    """Which task each ran on."""

    best_N: np.ndarray
    """Best validation accuracy over its epochs, per cent."""

    numbers_NF: np.ndarray
    """Its hyperparameters and its task's size, each scaled to a range of about two."""

    categories_NC: np.ndarray
    """Codes of backbone, optimizer, schedule and augmentation."""

    table_NH: np.ndarray
    """All 71 hyperparameters as they were published, for the baseline."""

    head_only_N: np.ndarray
    """Was only the head trained (`linear_probing`)?"""


def read(folder: Path = FOLDER) -> Runs:
    """Raises ConfigError if the files are not there."""
    files = [folder / f"quicktune-{name}" for name in ("curves.parquet", "configs.parquet")]
    sizes = folder / "quicktune-tasks.json"
    for file in (*files, sizes):
        if not file.is_file():
            raise ConfigError(
                "Quick-Tune's learning curves are not there",
                got=str(file),
                rule="a folder with quicktune-curves.parquet, -configs.parquet and -tasks.json",
                fix="Name the folder: --curves FOLDER",
            )
    curves, settings = (pd.read_parquet(file) for file in files)
    curves["task"] = curves["task"].astype(str)
    best = curves.groupby(["task", "config"])["val_accuracy"].max().reset_index()
    rows = settings.set_index("config").loc[best["config"]].astype(float).reset_index(drop=True)
    tasks = sorted(set(best["task"]))
    known = json.loads(sizes.read_text())
    return Runs(
        tasks=tasks,
        task_N=best["task"].map({name: i for i, name in enumerate(tasks)}).to_numpy(),
        best_N=best["val_accuracy"].to_numpy(float),
        numbers_NF=_numbers(
            rows, *(best["task"].map(lambda t, of=of: known[t][of]) for of in ("images", "classes"))
        ),
        categories_NC=_codes(rows),
        table_NH=rows.to_numpy(),
        head_only_N=rows["linear_probing"].to_numpy() == 1,
    )


def _codes(rows: pd.DataFrame) -> np.ndarray:
    found = []
    for prefix in CATEGORIES.values():
        columns = [name for name in rows if name.startswith(prefix)]
        found.append(rows[columns].to_numpy().argmax(1))
    return np.stack(found, axis=1)


def columns(folder: Path = FOLDER) -> list[str]:
    """The names of all hyperparameters."""
    return [
        name for name in pd.read_parquet(folder / "quicktune-configs.parquet") if name != "config"
    ]


def encoded(
    rows: list[dict[str, float]], images: list[int], classes: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """(numbers_NF, categories_NC) of configurations for tasks of these sizes."""
    table = pd.DataFrame(rows)
    return _numbers(table, pd.Series(images), pd.Series(classes)), _codes(table)


def _numbers(rows: pd.DataFrame, images_N: pd.Series, classes_N: pd.Series) -> np.ndarray:
    """What the hyperparameters do, on scales where a step means about the same everywhere."""

    def log(name: str, least: float) -> pd.Series:
        # Zero is "off": a decade below the smallest value that is on.
        return np.log10(rows[name].clip(lower=least))

    images, classes = np.log10(images_N), np.log10(classes_N)
    plain = rows["cat:opt:sgd"] + rows["cat:opt:momentum"] > 0
    columns = {
        "batch_size": np.log2(rows["batch_size"]) / 4,
        "lr": log("lr", 1e-6),
        # An adaptive optimizer's rate and that of SGD are two decades apart.
        "adaptive_lr": log("lr", 1e-6) - 2 * plain,
        "momentum": rows["momentum"].where(plain, 0.9),
        "frozen": 2 * rows["pct_to_freeze"],
        "layer_decay": 4 * rows["layer_decay"].where(rows["layer_decay"] > 0, 1.0),
        "weight_decay": log("weight_decay", 1e-6) / 2,
        "stoch_norm": rows["stoch_norm"],
        "sp_reg": log("sp_reg", 1e-5) / 2,
        "delta_reg": log("delta_reg", 1e-5) / 2,
        "bss_reg": log("bss_reg", 1e-5) / 2,
        "cotuning_reg": rows["cotuning_reg"] / 2,
        "unclipped": (rows["clip_grad"] < 0) * 1.0,
        "clipped_hard": (rows["clip_grad"] == 1) * 1.0,
        "dropout": 5 * rows["drop"],
        "mixup": 2 * rows["mixup_prob"] * (rows["mixup"] > 0),
        "cutmix": np.log1p(rows["cutmix"]) * rows["mixup_prob"],
        "smoothing": 10 * rows["smoothing"],
        "warmup_epochs": rows["warmup_epochs"] / 5,
        "warmup_lr": log("warmup_lr", 1e-7) / 2,
        "amp": rows["amp"],
        "images": images,
        "classes": classes,
        "images_per_class": images - classes,
        "steps_per_epoch": images - np.log10(rows["batch_size"]),
    }
    return np.stack([np.asarray(column, float) for column in columns.values()], axis=1)
