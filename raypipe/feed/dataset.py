"""What a training run reads: pinned rows, their classes, and for each split where every labelled image lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, model_validator

from raypipe.config import Section
from raypipe.errors import DataError
from raypipe.feed.order import Order, balanced_weights
from raypipe.models.tasks import NUMERIC, Kind, Task
from raypipe.tables import scan
from raypipe.tables.fragment import Fragment
from raypipe.tables.table import ImageTable, TableConfig, TableVersion


class FeedConfig(Section):
    """How rows become batches. `train`, `val` and `test` name the split column's values; train+val names two.

    carrier: `threads` decode in the worker, `offload` on other CPUs of the cluster, `cache` once per node into `cache_mb` of
    memory; `auto` takes the cache where it fits. shards * window row groups are shuffled at a time; a world size that divides
    `shards` reads every row group once. sampling: `balanced` draws every class equally often, `weighted` by the column
    `weights`, `sources` every source (column table.columns.source) equally often however many images it has, or by the
    shares of `mix`: {mono: 0.5, poly: 0.5}. on_bad: an image that no longer decodes or matches its sha256 is replaced by the
    next one of its row group, or stops the run. trace: a folder that gets the id of every sample of every training batch.
    """

    carrier: Literal["auto", "threads", "offload", "cache"] = "auto"
    cache_mb: int = Field(default=1024, gt=0)
    train: str = "train"
    val: str = "val"
    test: str = "test"
    threads: int = Field(default=2, ge=1)
    prefetch: int = Field(default=2, ge=1)
    shards: int = Field(default=12, ge=1)
    window: int = Field(default=2, ge=1)
    drop_last: bool = True
    sampling: Literal["natural", "balanced", "weighted", "sources"] = "natural"
    weights: str | None = None
    mix: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] | None = None
    verify: bool = True
    on_bad: Literal["replace", "stop"] = "replace"
    trace: str | None = None

    @model_validator(mode="after")
    def _mixes_sources(self) -> FeedConfig:
        if self.mix is not None and self.sampling != "sources":
            raise ValueError(f"mix says how often a source is drawn, and sampling={self.sampling}. Set sampling to sources")
        return self


@dataclass(frozen=True)
class Pinned:
    """The rows of one job: version, task with its classes in label order, and how many labelled rows each split has."""

    table: ImageTable
    version: TableVersion
    where: dict[str, str | list[str]]
    task: Task
    counts: dict[str, int]

    @property
    def classes(self) -> tuple[str, ...]:
        return self.task.classes

    def rows_of(self, split: str) -> scan.Where:
        return {**self.where, self.table.columns.split: parts(split)}


@dataclass(frozen=True)
class Rows:
    """The labelled rows of one split, numbered 0..N-1 through their row groups, in table order. Small: no pixel is in it.

    labels_N int64, or labels_NC float32 where the task has no single label; ids (string array); sizes_F samples in each row
    group. row_N is a sample's physical row inside its group, sha256_N32 the hash of its stored bytes where the table has one;
    weights_N where sampling is weighted by a column.
    """

    labels_N: np.ndarray
    ids: pa.Array
    sizes_F: np.ndarray
    fragments: tuple[Fragment, ...] = ()
    row_N: np.ndarray | None = None
    sha256_N32: np.ndarray | None = None
    weights_N: np.ndarray | None = None
    column: str = ""
    storage_options: dict[str, str] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.labels_N)

    def order(self, cfg: FeedConfig, batch_size: int, seed: int) -> Order:
        weights = balanced_weights(self.labels_N) if cfg.sampling == "balanced" else self.weights_N
        return Order(self.sizes_F, batch_size, seed, cfg.shards, cfg.window, cfg.drop_last, weights)


def parts(split: str) -> list[str]:
    """The values that a split's name stands for: train+val are two."""
    return list(dict.fromkeys(split.split("+")))


def pin(cfg: TableConfig, feed: FeedConfig, classes: tuple[str, ...] | None = None, kind: Kind = "single_label") -> Pinned:
    """Resolve the version once and check that it can train a model of this kind of task.

    Raises DataError for: a missing table, column, version or tag; no labels; no two classes; an empty split; labels of
    another kind.
    """
    table = ImageTable.open(cfg)
    c = cfg.columns
    table.require(table.delta(), c.label, c.id, c.split, *([c.source] if feed.sampling == "sources" else []))
    version = table.pin(cfg.version)
    _check_held(table, version, kind)
    found = scan.rows(table, version, [c.label, c.split], cfg.where)
    labelled = found.filter(pc.is_valid(found[c.label]))
    if not len(labelled):
        raise DataError(
            f"{version} has no labels in column {c.label!r}",
            got=f"{len(found)} rows, all unlabelled",
            rule="Training needs labelled rows",
            fix="Ingest with labels, or map another column with table.columns.label",
        )
    labels = labelled[c.label].to_pylist()
    task = Task(kind, classes) if classes else Task.of(kind, labels)
    if kind == "single_label" and len(task.classes) < 2:
        raise DataError(
            f"{version} has one class only", got=task.classes[0], rule="A classifier needs two", fix="Check table.columns.label"
        )
    if not task.classes:
        raise DataError(f"{version} has no tag on any image", rule="Tags are what is learned", fix="Check table.columns.label")
    if kind in NUMERIC:  # before anything is decoded
        task.encode(labels)
    counts: dict[str, int] = {}
    for split in dict.fromkeys((feed.train, feed.val, feed.test)):
        counts[split] = sum(pc.sum(pc.equal(labelled[c.split], part)).as_py() or 0 for part in parts(split))
        if counts[split] == 0 and split != feed.test:
            have = sorted({s for s in labelled[c.split].to_pylist() if s is not None})
            raise DataError(
                f"{version} has no labelled rows in split {split!r}",
                got=have,
                fix="Set feed.train and feed.val to splits it has",
            )
    return Pinned(table, version, dict(cfg.where), task, counts)


def _check_held(table: ImageTable, version: TableVersion, kind: Kind) -> None:
    """Raise DataError when the label column's type is one of another task; as text (which it is read as) it might pass."""
    name = table.columns.label
    held = pa.schema(table.delta(version.version).schema().to_arrow()).field(name).type
    if kind != "multi_label" and pa.types.is_nested(held):
        raise DataError(
            f"Column {name!r} of {version} holds several labels a row", got=str(held), fix="Set model.task=multi_label"
        )
    if kind == "multi_label" and not (pa.types.is_nested(held) or pa.types.is_string(held) or pa.types.is_large_string(held)):
        raise DataError(
            f"Column {name!r} of {version} holds one label a row",
            got=str(held),
            rule="A multi-label is a list or a text like a|b",
        )


def locate(pinned: Pinned, split: str, cfg: FeedConfig) -> Rows:
    """Where every labelled image of a split lies. Raises DataError for a missing column or unusable weights."""
    table, c = pinned.table, pinned.table.columns
    have = {f.name for f in table.delta(pinned.version.version).schema().fields}
    hashed = ["sha256"] if "sha256" in have and cfg.verify else []
    weighted = [cfg.weights or ""] if cfg.sampling == "weighted" else []
    sourced = [c.source] if cfg.sampling == "sources" and split == cfg.train else []  # only training draws
    found = scan.located(table, pinned.version, [c.id, c.label, *hashed, *weighted, *sourced], pinned.rows_of(split))
    kept = [(f, part.filter(pc.is_valid(part[c.label]))) for f, part in found]
    kept = [(f, part) for f, part in kept if len(part)]
    rows = pa.concat_tables([part for _, part in kept])
    weights_N = rows[cfg.weights].to_numpy().astype(np.float64) if weighted else None
    if weights_N is not None and (not np.isfinite(weights_N).all() or weights_N.min() < 0 or not weights_N.sum()):
        raise DataError(f"Column {cfg.weights!r} cannot weigh samples", rule="Weights are numbers from 0 up, not all 0")
    if sourced:
        weights_N = source_weights([str(s) for s in rows[c.source].to_pylist()], cfg.mix)
    return Rows(
        pinned.task.encode(rows[c.label].to_pylist()),
        pa.concat_arrays([chunk.cast(pa.large_string()) for chunk in rows[c.id].chunks]),
        np.array([len(part) for _, part in kept], dtype=np.int64),
        tuple(f for f, _ in kept),
        rows["row"].to_numpy().astype(np.int32),
        _digests(rows["sha256"]) if hashed and not rows["sha256"].null_count else None,
        weights_N,
        c.image,
        table.storage_options,
    )


def source_weights(sources_N: Sequence[str], mix: Mapping[str, float] | None = None) -> np.ndarray:
    """Weights under which every source comes equally often, or in the shares of `mix`. Raises DataError where `mix` names
    other sources than there are."""
    names, at_N, counts = np.unique(np.asarray(sources_N, dtype=str), return_inverse=True, return_counts=True)
    shares = dict.fromkeys(names.tolist(), 1.0) if mix is None else mix
    if set(shares) != set(names.tolist()):
        raise DataError(
            "feed.mix does not fit the sources of the training rows",
            got=dict(shares),
            rule=f"It gives each of {', '.join(names.tolist())} a share, and nothing else",
            fix="Correct it, or leave it out: then every source comes equally often",
        )
    weights_F = np.array([shares[name] for name in names.tolist()]) / counts
    return np.asarray(weights_F[at_N], dtype=np.float64)


def _digests(hexadecimal: pa.ChunkedArray) -> np.ndarray | None:
    try:
        return np.frombuffer(bytes.fromhex("".join(hexadecimal.to_pylist())), np.uint8).reshape(-1, 32)
    except ValueError:  # somebody else's column of that name
        return None
