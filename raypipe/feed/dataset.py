"""What a training run reads: pinned rows, their classes, and for each split where every labelled image lies."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, model_validator

from raypipe.config import Section
from raypipe.errors import DataError
from raypipe.feed.encoded import MISMATCH, encoded
from raypipe.feed.order import Order, balanced_weights
from raypipe.models.tasks import NUMERIC, Kind, Task
from raypipe.tables import scan
from raypipe.tables.fragment import Fragment, is_bytes
from raypipe.tables.table import ImageTable, TableConfig, TableVersion

log = logging.getLogger("raypipe")
SHA256 = (
    "sha256"  # the column that holds the hash of the stored bytes, in tables that raypipe writes
)
PROBES, ENOUGH = 8, 16  # row groups looked at, and images, before the whole column is doubted


class FeedConfig(Section):
    """How rows become batches. `train`, `val` and `test` name the split column's values; train+val names two, unless the
    column has that very value.

    carrier: `threads` decode in the worker, `offload` on other CPUs of the cluster, `cache` once per node into `cache_mb` of
    memory; `auto` takes the cache where it fits. shards * window row groups are shuffled at a time; a world size that divides
    `shards` reads every row group once. sampling: `balanced` draws every class equally often, `weighted` by the column
    `weights`, `sources` every source (column table.columns.source) equally often however many images it has, or by the
    shares of `mix`: {mono: 0.5, poly: 0.5}. trace: a folder that gets the id of every sample of every training batch, and its
    place in the epoch's stream.

    verify: every stored image is hashed and compared with the column sha256, in rows that have one, whenever a row group is
    read; for frozen features, once a run. false: it is trusted, and images whose features are kept are not read at all.
    on_bad: an image that does not decode, is null, or does not match is replaced by the next readable one, or stops the run.
    Both hold for training, validation and the test split, with every carrier and with frozen features. `predict`, `drift` and
    the comparison of models read every row, compare no sha256, and stop at an image that does not decode.
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
            raise ValueError(
                f"mix says how often a source is drawn, and sampling={self.sampling}. Set sampling to sources"
            )
        if self.sampling == "weighted" and not self.weights:
            raise ValueError(
                "sampling=weighted draws by a column of weights. Set weights to its name"
            )
        return self


@dataclass(frozen=True)
class Pinned:
    """The rows of one job: version, task with its classes in label order, and how many labelled rows each split has."""

    table: ImageTable
    version: TableVersion
    where: dict[str, str | list[str]]
    task: Task
    counts: dict[str, int]
    splits: frozenset[str] = frozenset()  # the values of the split column

    @property
    def classes(self) -> tuple[str, ...]:
        return self.task.classes

    def rows_of(self, split: str) -> scan.Where:
        return {**self.where, self.table.columns.split: self.parts(split)}

    def parts(self, split: str) -> list[str]:
        return parts(split, self.splits)


@dataclass(frozen=True)
class Rows:
    """The labelled rows of one split, numbered 0..N-1 through their row groups, in table order. Small: no pixel is in it.

    labels_N int64, or labels_NC float32 where the task has no single label; ids (string array); sizes_F samples in each row
    group. row_N is a sample's physical row inside its group, sha256_N32 the hash of its stored bytes where the table has one
    (zeros where a row has none); weights_N where sampling is weighted by a column. ids need not be unique: they name samples in
    messages, and nothing is looked up by them.
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


def parts(split: str, known: Collection[str] = ()) -> list[str]:
    """The values that a split's name stands for: train+val are two. A value that holds a plus itself (`known` are the column's
    values) is found as a whole: line+2+val are line+2 and val."""
    words, found = split.split("+"), list[str]()
    while words:
        sizes = range(len(words), 0, -1)
        size = next((n for n in sizes if "+".join(words[:n]) in known), 1)
        found.append("+".join(words[:size]))
        words = words[size:]
    return list(dict.fromkeys(found))


def pin(
    cfg: TableConfig,
    feed: FeedConfig,
    classes: tuple[str, ...] | None = None,
    kind: Kind = "single_label",
) -> Pinned:
    """Resolve the version once and check that it can train a model of this kind of task.

    Raises DataError for: a missing table, column, version or tag; no labels; no two classes; an empty split; labels of
    another kind.
    """
    table = ImageTable.open(cfg)
    c = cfg.columns
    version = table.pin(cfg.version)
    sourced = [c.source] if feed.sampling == "sources" else []
    needed = [c.image, c.label, c.id, c.split, *sourced, *cfg.where]
    table.require(table.delta(version.version), *needed)
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
            f"{version} has one class only",
            got=task.classes[0],
            rule="A classifier needs two",
            fix="Check table.columns.label",
        )
    if not task.classes:
        raise DataError(
            f"{version} has no tag on any image",
            rule="Tags are what is learned",
            fix="Check table.columns.label",
        )
    if kind in NUMERIC:  # before anything is decoded
        task.encode(labels)
    splits = frozenset(s for s in pc.unique(found[c.split]).to_pylist() if s is not None)
    counts: dict[str, int] = {}
    for split in dict.fromkeys((feed.train, feed.val, feed.test)):
        each = {
            p: pc.sum(pc.equal(labelled[c.split], p)).as_py() or 0 for p in parts(split, splits)
        }
        counts[split] = sum(each.values())
        empty = [part for part, rows in each.items() if not rows]
        if empty and (split != feed.test or counts[split]):  # of two parts, one may be misspelt
            have = sorted({s for s in labelled[c.split].to_pylist() if s is not None})
            raise DataError(
                f"{version} has no labelled rows in split {empty[0]!r}",
                got=have,
                fix="Set feed.train, feed.val and feed.test to splits it has",
            )
    return Pinned(table, version, dict(cfg.where), task, counts, splits)


def _check_held(table: ImageTable, version: TableVersion, kind: Kind) -> None:
    """Raise DataError when the label column's type is one of another task; as text (which it is read as) it might pass."""
    name = table.columns.label
    held = pa.schema(table.delta(version.version).schema().to_arrow()).field(name).type
    if kind != "multi_label" and pa.types.is_nested(held):
        raise DataError(
            f"Column {name!r} of {version} holds several labels a row",
            got=str(held),
            fix="Set model.task=multi_label",
        )
    if kind == "multi_label" and not (
        pa.types.is_nested(held) or pa.types.is_string(held) or pa.types.is_large_string(held)
    ):
        raise DataError(
            f"Column {name!r} of {version} holds one label a row",
            got=str(held),
            rule="A multi-label is a list or a text like a|b",
        )


def locate(pinned: Pinned, split: str, cfg: FeedConfig, hashes: bool | None = None) -> Rows:
    """Where every labelled image of a split lies; no row where the split is empty. `hashes`: also what the column sha256 says
    of each (null: where cfg.verify asks for it).

    Raises DataError for a missing column, unusable weights, rows of files that lack the image column, and a column sha256 that
    is the hash of something else.
    """
    table, c = pinned.table, pinned.table.columns
    schema = pa.schema(table.delta(pinned.version.version).schema().to_arrow())
    hashed = SHA256 in schema.names and (cfg.verify if hashes is None else hashes)
    weighted = [cfg.weights or ""] if cfg.sampling == "weighted" else []
    sourced = (
        [c.source] if cfg.sampling == "sources" and split == cfg.train else []
    )  # only training draws
    columns = [c.id, c.label, *([SHA256] if hashed else []), *weighted, *sourced]
    found = scan.located(table, pinned.version, columns, pinned.rows_of(split))
    kept = [(f, part.filter(pc.is_valid(part[c.label]))) for f, part in found]
    kept = [(f, part) for f, part in kept if len(part)]
    if not kept:
        empty = np.empty(0, np.int64)
        return Rows(pinned.task.encode([]), pa.array([], pa.large_string()), empty, column=c.image)
    rows = pa.concat_tables([part for _, part in kept])
    weights_N = _weights(rows[cfg.weights], cfg.weights) if cfg.weights and weighted else None
    if sourced:
        weights_N = source_weights([str(s) for s in rows[c.source].to_pylist()], cfg.mix)
    located = Rows(
        pinned.task.encode(rows[c.label].to_pylist()),
        pa.concat_arrays([chunk.cast(pa.large_string()) for chunk in rows[c.id].chunks]),
        np.array([len(part) for _, part in kept], dtype=np.int64),
        tuple(f for f, _ in kept),
        rows[scan.ROW].to_numpy().astype(np.int32),
        _digests(rows[SHA256], pinned, split) if hashed else None,
        weights_N,
        c.image,
        table.storage_options,
    )
    _check_images(located, pinned, split)
    if cfg.verify and located.sha256_N32 is not None:
        _check_hashed(located, pinned)
    return located


def source_weights(sources_N: Sequence[str], mix: Mapping[str, float] | None = None) -> np.ndarray:
    """Weights under which every source comes equally often, or in the shares of `mix`. Raises DataError where `mix` names
    other sources than there are."""
    names, at_N, counts = np.unique(
        np.asarray(sources_N, dtype=str), return_inverse=True, return_counts=True
    )
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


def _weights(column: pa.ChunkedArray, name: str) -> np.ndarray:
    try:
        weights_N = column.cast(pa.float64()).to_numpy()
    except pa.ArrowException:
        weights_N = np.full(len(column), np.nan)
    if not np.isfinite(weights_N).all() or weights_N.min() < 0 or not weights_N.max():
        got = next(
            (v for v, w in zip(column, weights_N, strict=True) if not w >= 0 or w == np.inf), 0
        )
        raise DataError(
            f"Column {name!r} cannot weigh samples",
            got=got.as_py() if isinstance(got, pa.Scalar) else got,
            rule="Weights are numbers from 0 up, not all 0",
        )
    most = weights_N.max()
    return (
        weights_N if most < 1e300 / len(weights_N) else weights_N / most
    )  # their sum must be a number


def _digests(column: pa.ChunkedArray, pinned: Pinned, split: str) -> np.ndarray | None:
    """N x 32, zeros where a row's value is no sha256; None, with a word about it, where none is."""
    kind = column.type
    values = (
        column.to_pylist()
        if pa.types.is_string(kind) or pa.types.is_large_string(kind) or is_bytes(kind)
        else []
    )
    read = [_digest(value) for value in values]
    known = sum(digest is not None for digest in read)
    if known < len(column):
        log.warning(
            "%d of %d images of split %s have no sha256 in %s: whether they changed is not checked, only that they decode",
            *(len(column) - known, len(column), split, pinned.version),
        )
    if not known:
        return None
    return np.frombuffer(b"".join(digest or bytes(32) for digest in read), np.uint8).reshape(-1, 32)


def _digest(value: str | bytes | None) -> bytes | None:
    if isinstance(value, str):
        return bytes.fromhex(value) if re.fullmatch("[0-9a-fA-F]{64}", value) else None
    return value if value is not None and len(value) == 32 else None


def _check_images(rows: Rows, pinned: Pinned, split: str) -> None:
    """Raise DataError where files were written before the image column was added: their rows have no image, and never had."""
    lacks = [dict(fragment.names).get(rows.column) == "" for fragment in rows.fragments]
    if without := int(rows.sizes_F[lacks].sum()):
        raise DataError(
            f"{without} of the {len(rows)} labelled rows of split {split!r} hold no image in {pinned.version}",
            got=rows.column,
            rule="Their files were written before this column was added",
            fix="Fill the column, or leave these rows out with table.where",
        )


def _check_hashed(rows: Rows, pinned: Pinned) -> None:
    """Raise DataError where the column sha256 is well-formed and of something else. Looks at row groups from all over the
    table until one image matches, which the first one does."""
    assert rows.row_N is not None and rows.sha256_N32 is not None
    ends, looked, unlike = np.cumsum(rows.sizes_F), 0, 0
    for group in np.unique(np.linspace(0, len(ends) - 1, PROBES).astype(int)).tolist():
        mine = slice(int(ends[group] - rows.sizes_F[group]), int(ends[group]))
        digests = rows.sha256_N32[mine]
        hashed = int(digests.any(1).sum())
        if not hashed:
            continue
        images = encoded(rows.fragments[group], rows.column, rows.storage_options)
        wrong = sum(reason == MISMATCH for _, reason in images.broken(rows.row_N[mine], digests))
        if wrong < hashed:
            return
        looked, unlike = looked + 1, unlike + wrong
    if looked > 1 and unlike >= ENOUGH:
        raise DataError(
            f"Column {SHA256!r} of {pinned.version} is not the sha256 of its images",
            got=f"none of {unlike} in {looked} row groups matches",
            rule="feed.verify compares the stored bytes with it",
            fix="Set feed.verify=false if it is the hash of something else; restore the table if it is not",
        )
