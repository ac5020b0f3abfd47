"""Where every labelled image of a split lies, with its label, its sha256 and its sampling
weight.
"""

from __future__ import annotations

import logging
import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypipe.errors import DataError
from raypipe.feed.dataset import FeedConfig, Pinned, Rows
from raypipe.feed.encoded import MISMATCH, encoded
from raypipe.feed.sampling import source_weights
from raypipe.tables import label_column, scan
from raypipe.tables.fragment import Fragment, is_bytes

log = logging.getLogger("raypipe")

SHA256 = "sha256"  # the hash of the stored bytes: a column of tables that raypipe writes
PROBES = 8  # row groups that are read to check the column as a whole
ENOUGH = 16  # images that must not match before the whole column counts as wrong


def locate(pinned: Pinned, split: str, cfg: FeedConfig, hashes: bool | None = None) -> Rows:
    """The labelled rows of a split; no row where the split is empty.

    hashes: read the column sha256, too. None: only where cfg.verify asks for it.

    Raises DataError for a missing column, unusable weights, rows of files without the image column,
    and a column sha256 that hashes other bytes.
    """
    table = pinned.table
    columns = table.columns
    schema = pa.schema(table.at(pinned.version).schema().to_arrow())
    hashed = SHA256 in schema.names and (cfg.verify if hashes is None else hashes)
    weights = cfg.weights if cfg.sampling == "weighted" else None
    by_source = cfg.sampling == "sources" and split == cfg.train  # only training draws by source

    wanted = [columns.id, columns.label]
    if hashed:
        wanted.append(SHA256)
    if weights:
        wanted.append(weights)
    if by_source:
        wanted.append(columns.source)

    fragments, groups = _labelled_groups(pinned, split, wanted)
    if not groups:
        no_labels = pinned.task.encode([])
        no_ids = pa.array([], pa.large_string())
        return Rows(no_labels, no_ids, np.empty(0, np.int64), column=columns.image)

    # Sampling weights, only where the config asks for some.
    rows = pa.concat_tables(groups)
    weights_N = None
    if weights:
        weights_N = _weights(rows[weights], weights)
    if by_source:
        sources_N = [str(source) for source in rows[columns.source].to_pylist()]
        weights_N = source_weights(sources_N, cfg.mix)

    ids = [chunk.cast(pa.large_string()) for chunk in rows[columns.id].chunks]
    located = Rows(
        labels_N=pinned.task.encode(rows[columns.label].to_pylist()),
        ids=pa.concat_arrays(ids),
        sizes_F=np.array([len(group) for group in groups], dtype=np.int64),
        fragments=tuple(fragment.for_images() for fragment in fragments),
        row_N=rows[scan.ROW].to_numpy().astype(np.int32),
        sha256_N32=_digests(rows[SHA256], pinned, split) if hashed else None,
        weights_N=weights_N,
        column=columns.image,
        storage_options=table.storage_options,
    )
    # Refuse rows that cannot be what was stored, before anything is decoded.
    _check_images(located, pinned, split)
    if cfg.verify and located.sha256_N32 is not None:
        _check_hash_column(located, pinned)
    return located


def _labelled_groups(
    pinned: Pinned, split: str, columns: list[str]
) -> tuple[list[Fragment], list[pa.Table]]:
    """The row groups of a split that have labelled rows, and these rows."""
    label = pinned.table.columns.label
    kind = pinned.task.kind
    fragments: list[Fragment] = []
    groups: list[pa.Table] = []
    where = pinned.rows_of(split)
    for fragment, group in scan.located(pinned.table, pinned.version, columns, where):
        at = group.schema.get_field_index(label)
        group = group.set_column(at, label, label_column.read(group[label], kind, label))
        labelled = group.filter(pc.is_valid(group[label]))
        if len(labelled):
            fragments.append(fragment)
            groups.append(labelled)
    return fragments, groups


def _weights(column: pa.ChunkedArray, name: str) -> np.ndarray:
    """The column as float64. Raises DataError unless all are finite, none negative, one
    positive.
    """
    try:
        weights_N = column.cast(pa.float64()).to_numpy()
    except pa.ArrowException:
        weights_N = np.full(len(column), np.nan)

    usable_N = np.isfinite(weights_N) & (weights_N >= 0)
    if not usable_N.all() or not weights_N.max():
        wrong: object = 0
        if not usable_N.all():
            wrong = column[int(np.flatnonzero(~usable_N)[0])].as_py()
        raise DataError(
            f"Column {name!r} cannot weigh samples",
            got=wrong,
            rule="Weights are numbers from 0 up, not all 0",
        )

    # The sum of all weights must not overflow.
    largest = weights_N.max()
    if largest >= 1e300 / len(weights_N):
        return weights_N / largest
    return weights_N


def _digests(column: pa.ChunkedArray, pinned: Pinned, split: str) -> np.ndarray | None:
    """The column sha256 as N x 32 bytes: zeros where a value is no sha256, None where none is.

    Logs a warning with the number of images that cannot be checked.
    """
    kind = column.type
    readable = pa.types.is_string(kind) or pa.types.is_large_string(kind) or is_bytes(kind)
    digests = [_digest(value) for value in column.to_pylist()] if readable else []
    known = sum(digest is not None for digest in digests)
    if known < len(column):
        log.warning(
            "%d of %d images of split %s have no sha256 in %s: "
            "whether they changed is not checked, only that they decode",
            len(column) - known,
            len(column),
            split,
            pinned.version,
        )
    if not known:
        return None
    joined = b"".join(digest or bytes(32) for digest in digests)
    return np.frombuffer(joined, np.uint8).reshape(-1, 32)


def _digest(value: str | bytes | None) -> bytes | None:
    """32 bytes of a sha256 (64 hexadecimal digits or the bytes themselves); None for all else."""
    if isinstance(value, str):
        return bytes.fromhex(value) if re.fullmatch("[0-9a-fA-F]{64}", value) else None
    if value is not None and len(value) == 32:
        return value
    return None


def _check_images(rows: Rows, pinned: Pinned, split: str) -> None:
    """Raise DataError for rows of files that were written before the image column was added."""
    lacks_column = [dict(fragment.names).get(rows.column) == "" for fragment in rows.fragments]
    without = int(rows.sizes_F[lacks_column].sum())
    if without:
        raise DataError(
            f"{without} of the {len(rows)} labelled rows of split {split!r} "
            f"hold no image in {pinned.version}",
            got=rows.column,
            rule="Their files were written before this column was added",
            fix="Fill the column, or leave these rows out with table.where",
        )


def _check_hash_column(rows: Rows, pinned: Pinned) -> None:
    """Raise DataError where the column sha256 is well-formed but hashes other bytes.

    Reads row groups from all over the table until one image matches. In a sound table this is the
    first image.
    """
    assert rows.row_N is not None and rows.sha256_N32 is not None
    ends_F = np.cumsum(rows.sizes_F)
    probes = np.unique(np.linspace(0, len(ends_F) - 1, PROBES).astype(int)).tolist()
    groups_without_match = 0
    mismatches = 0
    for group in probes:
        end = int(ends_F[group])
        samples = slice(end - int(rows.sizes_F[group]), end)
        digests = rows.sha256_N32[samples]
        hashed = int(digests.any(1).sum())  # zeros: an image without a usable sha256
        if not hashed:
            continue
        # One image that matches shows that the column is what it should be.
        images = encoded(rows.fragments[group], rows.column, rows.storage_options)
        broken = images.broken(rows.row_N[samples], digests)
        wrong = sum(reason == MISMATCH for _, reason in broken)
        if wrong < hashed:
            return
        groups_without_match += 1
        mismatches += wrong

    # One damaged row group, or a few images, say nothing about the column.
    if groups_without_match > 1 and mismatches >= ENOUGH:
        raise DataError(
            f"Column {SHA256!r} of {pinned.version} is not the sha256 of its images",
            got=f"none of {mismatches} in {groups_without_match} row groups matches",
            rule="feed.verify compares the stored bytes with it",
            fix="Set feed.verify=false if it hashes something else; else restore the table",
        )
