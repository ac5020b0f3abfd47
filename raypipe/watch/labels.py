"""Labelled training images: how many there are of each source, and how many are new.

New are those that the champion's training did not have: rows of another id, or that had no label
then.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from raypipe.errors import DataError, Unreachable
from raypipe.feed.dataset import Pinned
from raypipe.registry.package import Package
from raypipe.tables import label_column, scan
from raypipe.tables.table import TableVersion
from raypipe.train import learned
from raypipe.train.job import TrainJob

log = logging.getLogger("raypipe")
ALL = "all"  # the source of a table without sources
SOURCE = "raypipe source"  # a name that no column of a table is likely to have


def new_labels(job: TrainJob, pinned: Pinned, package: Package) -> dict[str, int]:
    """Labelled training images that the champion's training did not have, by source.

    Where the champion's version of the table cannot be read any more, its package says which rows
    its weights have learned from. An older package does not: then images of new sources count.
    """
    theirs = package.info["table"]
    # A table that was made again starts at version 0 again, and may have grown past theirs.
    made = package.info.get("made", {}).get("table_id") or pinned.version.table_id
    is_same = (theirs["uri"], made) == (pinned.version.uri, pinned.version.table_id)
    config = package.info.get("config", {})
    # What a replay left out is in no list, if the weights have no parent that knew it.
    is_partial = bool(config.get("feed", {}).get("leave_out"))
    is_partial &= learned.INHERITED not in package.files
    if learned.OWN in package.files and not is_partial:
        # Of a part of the rows: its package says from which it has learned.
        kept = config.get("table", {})
        selection = kept.get("where") or {}, kept.get("sample", 1.0)
        is_same &= selection == (job.table.where, job.table.sample)
    if is_same and theirs["version"] <= pinned.version.version:
        try:
            before = pinned.table.pin(theirs["version"])
            had = _labelled_ids(job, pinned, before)
        except Unreachable:
            raise
        except DataError as e:
            log.warning("The champion's version of the table cannot be read: %s", e.what)
        else:
            return _surplus(_labelled_ids(job, pinned, pinned.version), had)
    known_N2 = None if is_partial else learned.by(package)
    if known_N2 is not None:
        return _unlearned(job, pinned, known_N2)
    labelled = labelled_by_source(job, pinned)
    # Of an older package. A table without sources is one.
    known = theirs["sources"] or [ALL]
    return {name: n for name, n in labelled.items() if name not in known}


def _unlearned(job: TrainJob, pinned: Pinned, known_N2: np.ndarray) -> dict[str, int]:
    """Labelled training rows that weights have not learned from, by source.

    known_N2: identities of the rows that they have (learned.py).
    """
    name, version = pinned.table.columns.id, pinned.version
    has = {field.name for field in pinned.table.at(version).schema().fields}
    found: Counter[str] = Counter()
    unclear = 0
    for rows in _labelled(job, pinned, version, [name, *learned.hashes_of(version, has)]):
        if not len(rows):
            continue
        rows_NK = learned.of_part(version, rows, name)
        is_new_N = ~learned.is_old(rows_NK, known_N2)
        unclear += int(learned.is_unclear(rows_NK, known_N2).sum())
        found.update(s for s, new in zip(_sources(rows), is_new_N.tolist(), strict=True) if new)
    if unclear:
        log.warning(
            "%d of %d new labelled images have an id that the champion knows, and other bytes",
            unclear,
            found.total(),
        )
    return dict(found)


def labelled_by_source(job: TrainJob, pinned: Pinned) -> dict[str, int]:
    """Labelled training rows of each source; a table without sources is one."""
    by_source: Counter[str] = Counter()
    for rows in _labelled(job, pinned, pinned.version, []):
        by_source.update(_sources(rows))
    return dict(by_source)


def _labelled_ids(job: TrainJob, pinned: Pinned, version: TableVersion) -> Counter[tuple[str, Any]]:
    """How often each (source, id) is among the labelled training rows of a version."""
    found: Counter[tuple[str, Any]] = Counter()
    for rows in _labelled(job, pinned, version, [pinned.table.columns.id]):
        ids = rows[pinned.table.columns.id].to_pylist()
        found.update(zip(_sources(rows), ids, strict=True))
    return found


def _surplus(now: Counter[tuple[str, Any]], before: Counter[tuple[str, Any]]) -> dict[str, int]:
    by_source: Counter[str] = Counter()
    for (source, _), count in (now - before).items():
        by_source[source] += count
    return dict(by_source)


def _labelled(
    job: TrainJob, pinned: Pinned, version: TableVersion, more: list[str]
) -> Iterator[pa.Table]:
    """The labelled training rows of a version, some at a time: `source`, and the columns `more`."""
    names = pinned.table.columns
    fields = {field.name for field in pinned.table.at(version).schema().fields}
    wanted = [names.label, *more, *([names.source] if names.source in fields else [])]
    trained_on = pinned.rows_of(job.feed.train)
    # One column may be two of them.
    _, parts = scan.numbered(pinned.table, version, list(dict.fromkeys(wanted)), trained_on)
    for rows, _ in parts:
        # A row whose label is blank teaches nothing.
        labels = label_column.read(rows[names.label], pinned.task.kind, names.label)
        rows = rows.filter(labels.is_valid())
        if names.source in fields:
            sources = pa.array([str(one) for one in rows[names.source].to_pylist()], pa.string())
        else:
            sources = pa.array([ALL] * len(rows), pa.string())
        yield rows.append_column(SOURCE, sources)


def _sources(rows: pa.Table) -> list[str]:
    return [str(source) for source in rows[SOURCE].to_pylist()]
