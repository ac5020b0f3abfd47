"""What a training run reads: pinned rows, their classes, and a feed that hands each worker its batches.

Two carriers so far. `cache` holds decoded pixels (or frozen features) once per node in the object store, shared by epochs,
workers and trials without a copy; `offload` lets Ray Data read and decode on other CPUs while workers train. `auto` takes the
cache while the pixels fit into `cache_mb`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow.compute as pc
import torch
from pydantic import Field
from torch import Tensor

from raypipe.config import Section
from raypipe.errors import DataError
from raypipe.feed import order
from raypipe.tables import scan
from raypipe.tables.table import ImageTable, TableConfig, TableVersion


class FeedConfig(Section):
    """How rows become batches. `train`, `val` and `test` name the split column's values."""

    carrier: Literal["auto", "cache", "offload"] = "auto"
    cache_mb: int = Field(default=1024, gt=0)
    train: str = "train"
    val: str = "val"
    test: str = "test"
    threads: int = Field(default=2, ge=1)


@dataclass(frozen=True)
class Pinned:
    """The rows of one job: version, classes in label order, and how many labelled rows each split has."""

    table: ImageTable
    version: TableVersion
    where: dict[str, str | list[str]]
    classes: tuple[str, ...]
    counts: dict[str, int]

    def rows_of(self, split: str) -> scan.Where:
        return {**self.where, self.table.columns.split: split}


@dataclass(frozen=True)
class Samples:
    """Training data in memory. inputs: pixels_NHWC uint8 or features_ND float32; labels_N int64."""

    inputs: np.ndarray
    labels: np.ndarray
    ids: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)


class Feed(Protocol):
    """Batches for one rank: (inputs, labels), equally many on every rank in training."""

    train_rows: int

    def train(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]: ...

    def val(self) -> Iterator[tuple[Tensor, Tensor]]: ...


def pin(cfg: TableConfig, feed: FeedConfig, classes: tuple[str, ...] | None = None) -> Pinned:
    """Resolve the version once and check that it can train a classifier.

    Raises DataError for: a missing table, column, version or tag; no labels; one class only; an empty split.
    """
    table = ImageTable.open(cfg)
    c = cfg.columns
    table.require(table.delta(), c.label, c.id, c.split)
    version = table.pin(cfg.version)
    found = scan.rows(table, version, [c.label, c.split], cfg.where)
    labelled = found.filter(pc.is_valid(found[c.label]))
    if not len(labelled):
        raise DataError(
            f"{version} has no labels in column {c.label!r}",
            got=f"{len(found)} rows, all unlabelled",
            rule="Training needs labelled rows",
            fix="Ingest with labels, or map another column with table.columns.label",
        )
    names = classes or tuple(sorted({str(label) for label in labelled[c.label].to_pylist()}))
    if len(names) < 2:
        raise DataError(
            f"{version} has one class only", got=names[0], rule="A classifier needs two", fix="Check table.columns.label"
        )
    counts: dict[str, int] = {}
    for split in dict.fromkeys((feed.train, feed.val, feed.test)):
        counts[split] = pc.sum(pc.equal(labelled[c.split], split)).as_py() or 0
        if counts[split] == 0 and split != feed.test:
            have = sorted({s for s in labelled[c.split].to_pylist() if s is not None})
            raise DataError(
                f"{version} has no labelled rows in split {split!r}",
                got=have,
                fix="Set feed.train and feed.val to splits it has",
            )
    return Pinned(table, version, dict(cfg.where), names, counts)


def label_indices(labels: Sequence[Any], classes: tuple[str, ...]) -> np.ndarray:
    """int64 class indices; a label is what its text says, so 1 is class "1". Raises DataError for a label outside `classes`."""
    index = {name: i for i, name in enumerate(classes)}
    unknown = sorted({str(label) for label in labels if str(label) not in index})
    if unknown:
        raise DataError("Labels that the model does not know", got=unknown[:5], rule=f"Classes: {', '.join(classes)}")
    return np.array([index[str(label)] for label in labels], dtype=np.int64)


class CacheFeed:
    """The `cache` carrier: arrays shared through the object store, ordered by feed/order.py."""

    def __init__(
        self,
        train: Samples,
        val: Samples,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        device: torch.device | None = None,
    ) -> None:
        self._train, self._val, self._batch_size, self._seed = train, val, batch_size, seed
        self._rank, self._world, self._device = rank, world, device or torch.device("cpu")
        self.train_rows = len(train)

    def train(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in order.global_batches(order.epoch_order(len(self._train), self._seed, epoch), self._batch_size):
            yield self._take(self._train, order.rank_slice(batch, self._rank, self._world))

    def val(self) -> Iterator[tuple[Tensor, Tensor]]:
        mine = np.arange(len(self._val))[self._rank :: self._world]
        batches = -(-len(self._val) // (self._batch_size * self._world))  # alike on every rank: sharded weights gather in step
        for rows in np.array_split(mine, max(1, batches)):
            yield self._take(self._val, rows)

    def _take(self, samples: Samples, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        inputs, labels = torch.from_numpy(samples.inputs[rows]), torch.from_numpy(samples.labels[rows])
        return inputs.to(self._device, non_blocking=True), labels.to(self._device, non_blocking=True)


class OffloadFeed:
    """The `offload` carrier: this worker's shard of a Ray Data stream of (pixels, label) rows."""

    def __init__(self, train: Any, val: Any, train_rows: int, batch_size: int, world: int, device: torch.device) -> None:
        self._shards, self._per_rank, self._device = (train, val), max(1, batch_size // world), device
        self.train_rows, self._rows = train_rows, train_rows // world

    def train(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        return self._batches(self._shards[0], drop_last=self._rows >= self._per_rank)

    def val(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._batches(self._shards[1], drop_last=False)

    def _batches(self, shard: Any, drop_last: bool) -> Iterator[tuple[Tensor, Tensor]]:
        shuffle = 8 * self._per_rank if drop_last else None
        for batch in shard.iter_batches(
            batch_size=self._per_rank, batch_format="numpy", drop_last=drop_last, local_shuffle_buffer_size=shuffle
        ):
            pixels = torch.from_numpy(np.ascontiguousarray(batch["pixels"]))
            yield (
                pixels.to(self._device, non_blocking=True),
                torch.from_numpy(batch["label"]).to(self._device, non_blocking=True),
            )
