"""What a training run reads: one pinned table version, its classes, and the rows of each split."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, model_validator

from raypipe.config import Section
from raypipe.errors import ConfigError, DataError
from raypipe.feed.columns import Columns, Labels
from raypipe.files import by_content
from raypipe.models.tasks import Kind, Task, tags
from raypipe.tables import conditions, scan
from raypipe.tables.address import resolve
from raypipe.tables.table import ImageTable, TableConfig, TableVersion

# They feed a training on CPUs: decoding is the smaller part of its steps.
CPU_THREADS = 2


class FeedConfig(Section):
    """How rows become batches.

    `verify` and `on_bad` hold for training, validation and the test split, with every loader and
    with frozen features. `predict`, `drift`, `evaluate` and the comparison of models read every row
    and compare no sha256. An image that does not decode is left out there, and counted; in a table
    of predictions its row has an error.
    """

    carrier: Literal["auto", "threads", "offload", "cache"] = "auto"
    """Where images are decoded. `threads`: in the training worker. `offload`: on other CPUs of the
    cluster. `cache`: once, and kept in the memory of Ray's object store. `auto`: cache if
    `cache_mb` allows it, else threads."""

    cache_mb: int = Field(default=1024, gt=0)
    """The most megabytes of decoded pixels that the cache may hold. 1024: 7,000 images of 224
    px.
    """

    train: str = "train"
    """The split to train on: a value of the split column. train+val names two values, unless the
    column has the value train+val. `val` and `test` are written in the same way."""

    val: str = "val"
    """The split for validation after each epoch, early stopping and the choice of a model."""

    test: str = "test"
    """The split for the final metrics. It may be empty."""

    threads: int | None = Field(default=None, ge=1)
    """Decoding threads of each training worker, with carrier `threads`. null: 2; for a worker with
    a GPU its share of the node's CPUs, at most 8."""

    prefetch: int = Field(default=2, ge=1)
    """Batches decoded ahead of the training step. Each takes memory: 9.6 MB for 64 images of
    224 px."""

    shards: int = Field(default=12, ge=1)
    """Number of parts of the sample order that are read side by side. If the number of workers
    divides it, each row group is read once: 12 is divisible by 1, 2, 3, 4, 6 and 12."""

    window: int = Field(default=2, ge=1)
    """Row groups of a shard that are shuffled together. shards * window row groups are in memory at
    a time. More: better shuffling."""

    drop_last: bool = True
    """Drop the samples that do not fill the last batch of an epoch. false: fill that batch with
    samples from the epoch's start."""

    sampling: Literal["natural", "balanced", "weighted", "sources"] = "natural"
    """How often a sample is drawn. `natural`: once an epoch. `balanced`: every class equally often.
    `weighted`: by the column `weights`. `sources`: every source (column table.columns.source)
    equally often, or by `mix`."""

    weights: str | None = None
    """The column with the samples' relative weights, for sampling=weighted. Numbers from 0 up."""

    mix: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] | None = None
    """The share of each source, for sampling=sources: {mono: 0.5, poly: 0.5}. null: equal
    shares.
    """

    verify: bool = True
    """Compare the hash of every image with the column sha256, in rows that have one, each time a
    row group is read; for frozen features, once a run. false: trust the column. Then images whose
    features are stored are not read at all."""

    on_bad: Literal["replace", "stop"] = "replace"
    """What to do with an image that does not decode, is null, or does not match its sha256.
    `replace`: take the next readable one. `stop`: end the run."""

    leave_out: str | None = None
    """A JSON file with a list of ids: rows of the training split that are not trained on. If the
    file's name is a sha256, it is compared with the content. A retrain with watch.replay writes
    such a file."""

    trace: str | None = None
    """A folder into which raypipe writes the id and the position of every sample of every training
    batch. null: none."""

    @property
    def cpu_threads(self) -> int:
        """Decoding threads where there is no GPU to feed."""
        return self.threads or CPU_THREADS

    @model_validator(mode="after")
    def _sampling_has_its_settings(self) -> FeedConfig:
        if self.mix is not None and self.sampling != "sources":
            raise ValueError(
                f"mix says how often a source is drawn, and sampling={self.sampling}. "
                "Set sampling to sources"
            )
        if self.sampling == "weighted" and not self.weights:
            raise ValueError(
                "sampling=weighted draws by a column of weights. Set weights to its name"
            )
        if self.weights and self.sampling != "weighted":
            raise ValueError(
                f"weights are for sampling=weighted, and sampling={self.sampling} ignores them"
            )
        return self


@dataclass(frozen=True)
class Pinned:
    """The rows of one job: a table version, and the task that its labels pose.

    counts: labelled rows by split. splits: all values of the split column. columns: labels and
    splits of all rows.
    """

    table: ImageTable
    version: TableVersion
    where: dict[str, str | list[str]]
    task: Task
    counts: dict[str, int]
    splits: frozenset[str]
    columns: Columns = field(repr=False, compare=False)

    @property
    def classes(self) -> tuple[str, ...]:
        """In the order of the model's outputs."""
        return self.task.classes

    def holds(self, cfg: TableConfig) -> bool:
        """Does `cfg` name this very version, with the same columns?"""
        mine = (self.version.version, self.table.uri, self.table.columns)
        theirs = (cfg.version, resolve(cfg.uri), cfg.columns)
        return mine == theirs and self.table.storage_options == cfg.storage_options

    def rows_of(self, split: str) -> scan.Where:
        """The filter that selects a split's rows, among those that `where` allows."""
        wanted: scan.Where = {self.table.columns.split: self.parts(split)}
        schema = pa.schema(self.table.at(self.version).schema().to_arrow())
        return conditions.both(self.where, wanted, schema)

    def parts(self, split: str) -> list[str]:
        return parts(split, self.splits)

    def common(self, one: str, other: str) -> list[str]:
        """The values of the split column that both of these splits have, sorted."""
        return sorted(set(self.parts(one)) & set(self.parts(other)))

    def unlearned(self, train: str, split: str) -> dict[str, int]:
        """The classes of a split of which `train` has no image, with their images in that split.

        A number is no class: {}.
        """
        known = self.labels(train)
        return {name: images for name, images in self.labels(split).items() if name not in known}

    def labels(self, split: str) -> dict[str, int]:
        """The classes of a split, or its tags, with their images; {} of numbers."""
        labels = self.columns.labels
        if not isinstance(labels, Labels):
            return {}
        found = labels.counts(self.columns.chosen(self.parts(split)))
        return _by_tag(found) if self.task.kind == "multi_label" else found


def _by_tag(counts: Mapping[str, int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for label, images in counts.items():
        for tag in tags(label):
            found[tag] = found.get(tag, 0) + images
    return found


def parts(split: str, known: Collection[str] = ()) -> list[str]:
    """The values of the split column that a split's name stands for: train+val stands for two.

    A value may hold a plus itself. `known` are the column's values, and the longest known one is
    taken: line+2+val is line+2 and val where the column has the value line+2.
    """
    words = split.split("+")
    values: list[str] = []
    while words:
        longest = 1
        for size in range(len(words), 0, -1):
            if "+".join(words[:size]) in known:
                longest = size
                break
        values.append("+".join(words[:longest]))
        words = words[longest:]
    return list(dict.fromkeys(values))


def pin(
    cfg: TableConfig,
    feed: FeedConfig,
    classes: tuple[str, ...] | None = None,
    kind: Kind = "single_label",
    opened: Pinned | None = None,
) -> Pinned:
    """Look up the version once, and check that it can train a model for this kind of task.

    opened: pinned before; if it is of the same version, neither log nor footers are read again.

    Raises DataError for: a missing table, column, version or tag; no labels; fewer than two
    classes; an empty split; labels of another kind.
    """
    if opened is not None and opened.holds(cfg):
        # Copies share what is open.
        table, version = dataclasses.replace(opened.table, sample=cfg.sample), opened.version
    else:
        table, version = ImageTable.open_pinned(cfg)
    columns = cfg.columns

    # The columns must be there, and the label column must have a type of this kind of task.
    needed = [columns.image, columns.label, columns.id, columns.split]
    if feed.sampling == "sources":
        needed.append(columns.source)
    table.require(table.at(version), *needed, *cfg.where)
    _check_label_type(table, version, kind)

    # Small columns only: images are not read here.
    read = Columns.read(table, version, kind, cfg.where)
    without = left_out(feed)
    if without:
        _leave_out(
            table, version, read, cfg.where, set(parts(feed.train, read.splits.values)), without
        )
    by_split = read.labelled()
    if not by_split:
        raise DataError(
            f"{version} has no labels in column {columns.label!r}",
            got=f"{read.matching} rows, all unlabelled",
            rule="Training needs labelled rows",
            fix="Ingest with labels, or map another column with table.columns.label",
        )

    # What the labels say, and how many there are in each split.
    task = _task(kind, classes, read.labels.distinct, version)
    splits = frozenset(read.splits.values)
    counts = _counts(by_split, feed, splits, version)
    return Pinned(table, version, dict(cfg.where), task, counts, splits, read)


def left_out(feed: FeedConfig) -> frozenset[str | None]:
    """The ids of `feed.leave_out`. Raises ConfigError for a file that holds something else."""
    if feed.leave_out is None:
        return frozenset()
    file = Path(feed.leave_out)
    try:
        data = file.read_bytes()
        ids = json.loads(data)
        named = by_content(str(file))
        is_ours = named == str(file) or named == hashlib.sha256(data).hexdigest()
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"feed.leave_out cannot be read: {type(e).__name__}",
            got=str(file),
            fix="Name a JSON file with a list of ids, or set feed.leave_out=null",
        ) from None
    if (
        not is_ours
        or not isinstance(ids, list)
        or not all(i is None or type(i) is str for i in ids)
    ):
        raise ConfigError(
            "feed.leave_out holds something else",
            got=str(file),
            rule="A JSON list of ids; a file that is named by a sha256 has this very content",
            fix="Name such a file, or set feed.leave_out=null",
        )
    return frozenset(ids)


def _leave_out(
    table: ImageTable,
    version: TableVersion,
    read: Columns,
    where: scan.Where,
    splits: Collection[str],
    without: frozenset[str | None],
) -> None:
    """Forget the split of rows that are not trained on: then no split has them."""
    names = table.columns
    ids = pa.array(sorted(i for i in without if i is not None), pa.string())
    wanted = list(dict.fromkeys([names.id, names.split]))
    _, found = scan.numbered(table, version, wanted, where)
    for part, numbers_N in found:
        column = part[names.id].cast(pa.string())
        is_out = pc.is_in(column, value_set=ids)
        if None in without:
            is_out = pc.or_(is_out, column.is_null())
        in_split = pc.is_in(
            part[names.split], value_set=pa.array(sorted(splits), part[names.split].type)
        )
        read.splits.codes_P[numbers_N[pc.and_(is_out, in_split).to_numpy()]] = 0


def _task(
    kind: Kind, classes: tuple[str, ...] | None, labels: Sequence[str], version: TableVersion
) -> Task:
    """The task that the different labels pose. classes: those of an earlier model, else the
    labels' own.
    """
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
            rule="The tags are the classes to learn",
            fix="Check table.columns.label",
        )
    return task


def _counts(
    by_split: Mapping[str | None, int],
    feed: FeedConfig,
    splits: frozenset[str],
    version: TableVersion,
) -> dict[str, int]:
    """Labelled rows in each split of the job. Raises DataError for an empty split.

    Only the test split may be empty. But where it names several values and some have rows, an empty
    one is an error, too: its name may be misspelt.
    """
    counts: dict[str, int] = {}
    for split in dict.fromkeys((feed.train, feed.val, feed.test)):
        by_value: dict[str, int] = {}
        for value in parts(split, splits):
            by_value[value] = by_split.get(value, 0)
        counts[split] = sum(by_value.values())

        # Where a split names several values, one of them may be misspelt.
        empty = [value for value, rows in by_value.items() if not rows]
        if empty and (split != feed.test or counts[split]):
            raise DataError(
                f"{version} has no labelled rows in split {empty[0]!r}",
                got=sorted(value for value in by_split if value is not None),
                rule="A split that is named needs labelled images",
                fix="Label images of that split, or set feed.train, feed.val and feed.test to "
                "splits that have labels",
            )
    return counts


def _check_label_type(table: ImageTable, version: TableVersion, kind: Kind) -> None:
    """Raise DataError where the label column's type belongs to another kind of task.

    Labels are read as text, so a wrong type might pass later checks.
    """
    name = table.columns.label
    schema = pa.schema(table.at(version).schema().to_arrow())
    label_type = schema.field(name).type
    is_list = pa.types.is_nested(label_type)
    is_text = pa.types.is_string(label_type) or pa.types.is_large_string(label_type)
    if kind != "multi_label" and is_list:
        raise DataError(
            f"Column {name!r} of {version} holds several labels a row",
            got=str(label_type),
            fix="Set model.task=multi_label",
        )
    if kind == "multi_label" and not (is_list or is_text):
        raise DataError(
            f"Column {name!r} of {version} holds one label a row",
            got=str(label_type),
            rule="A multi-label is a list or a text like a|b",
        )
