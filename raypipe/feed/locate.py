"""Where every labelled image of a split lies, with its label and its sampling weight."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from raypipe.errors import DataError
from raypipe.feed import stored
from raypipe.feed.dataset import FeedConfig, Pinned
from raypipe.feed.encoded import MISMATCH, encoded
from raypipe.feed.rows import Rows
from raypipe.feed.sampling import source_weights
from raypipe.feed.stored import SHA256
from raypipe.tables import scan

log = logging.getLogger("raypipe")

PROBES = 8  # row groups that are read to check the column as a whole
ENOUGH = 16  # images that must not match before the whole column counts as wrong


def locate(pinned: Pinned, split: str, cfg: FeedConfig, contents: bool = False) -> Rows:
    """The labelled rows of a split; no row where the split is empty.

    contents: read ids and hashes of all rows now, as the features of a frozen backbone need them.

    Raises DataError for a missing column, unusable weights, rows of files without the image column,
    and a column sha256 that hashes other bytes.
    """
    table = pinned.table
    columns = table.columns
    schema = table.snapshot(pinned.version).schema()
    table.require(table.at(pinned.version), columns.id)
    # Ids are names: they are read as text.
    as_names, _ = scan.with_names(table, schema, [columns.id], {})
    hashes = schema.field(SHA256) if SHA256 in schema.names and (cfg.verify or contents) else None

    read = pinned.columns
    chosen_P = read.chosen(pinned.parts(split))
    sizes_F, row_N = read.places(chosen_P)
    groups = np.flatnonzero(sizes_F).tolist()
    fragments = [read.fragments[group] for group in groups]
    if hashes is None:
        # Images are read without the footer, which would travel to every node.
        fragments = [fragment.for_images() for fragment in fragments]
    located = Rows(
        labels_N=read.labels.encoded(pinned.task, chosen_P),
        sizes_F=sizes_F[groups],
        fragments=tuple(fragments),
        row_N=row_N,
        column=columns.image,
        id_field=as_names.field(columns.id),
        hash_field=hashes,
        storage_options=table.storage_options,
    )
    if not groups:
        return located

    # Refuse rows that cannot be what was stored, before anything is decoded.
    located = replace(located, weights_N=_weights_of(located, pinned, split, cfg))
    _check_images(located, pinned, split)
    if contents:
        located = _with_contents(located, pinned)
    if cfg.verify and hashes is not None:
        _check_hash_column(located, pinned, split)
    return located


def columns_of(rows: Rows, pinned: Pinned, names: list[str]) -> pa.Table:
    """Small columns of all samples, in their order."""
    assert rows.row_N is not None
    fragments, parts = scan.numbered(pinned.table, pinned.version, names, only=rows.fragments)
    # Which of all rows of these row groups are samples.
    physical_F = np.array([fragment.rows for fragment in fragments], np.int64)
    is_sample_P = np.zeros(int(physical_F.sum()), bool)
    is_sample_P[np.repeat(np.cumsum(physical_F) - physical_F, rows.sizes_F) + rows.row_N] = True
    return pa.concat_tables(
        part.filter(pa.array(is_sample_P[numbers_N])) for part, numbers_N in parts
    )


def _with_contents(rows: Rows, pinned: Pinned) -> Rows:
    """The rows with their ids and, if there are any, their hashes."""
    names = [pinned.table.columns.id] + ([SHA256] if rows.hash_field is not None else [])
    read = columns_of(rows, pinned, names)
    ids = [chunk.cast(pa.large_string()) for chunk in read[names[0]].chunks]
    hashes = stored.parsed(read[SHA256]) if rows.hash_field is not None else None
    return replace(rows, ids=pa.concat_arrays(ids), sha256_N32=hashes)


def _weights_of(rows: Rows, pinned: Pinned, split: str, cfg: FeedConfig) -> np.ndarray | None:
    """Sampling weights, only where the config asks for some. Only training draws samples."""
    if split != cfg.train:
        return None
    if cfg.sampling == "weighted" and cfg.weights:
        read = columns_of(rows, pinned, [cfg.weights])
        return _weights(read[cfg.weights], cfg.weights)
    if cfg.sampling == "sources":
        name = pinned.table.columns.source
        sources = columns_of(rows, pinned, [name])[name].combine_chunks().dictionary_encode()
        return source_weights(sources, cfg.mix)
    return None


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


def _check_hash_column(rows: Rows, pinned: Pinned, split: str) -> None:
    """Raise DataError where the column sha256 is well-formed but hashes other bytes.

    Reads row groups from all over the table until one image matches. In a sound table this is the
    first image. Logs a warning with the number of images that cannot be checked.
    """
    assert rows.row_N is not None
    probes = np.unique(np.linspace(0, len(rows.sizes_F) - 1, PROBES).astype(int)).tolist()
    digests = {group: rows.digests(group) for group in probes}
    _warn_of_unknown(list(digests.values()), rows, pinned, split)

    groups_without_match = 0
    mismatches = 0
    for group, digests_n32 in digests.items():
        assert digests_n32 is not None
        hashed = int(digests_n32.any(1).sum())  # zeros: an image without a usable sha256
        if not hashed:
            continue
        # One image that matches shows that the column is what it should be.
        images = encoded(rows.fragments[group], rows.column, rows.storage_options)
        broken = images.broken(rows.row_N[rows.samples(group)], digests_n32)
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


def _warn_of_unknown(
    probed: Sequence[np.ndarray | None], rows: Rows, pinned: Pinned, split: str
) -> None:
    """Log how many images have no usable sha256, of those in the row groups that were looked at."""
    known = sum(int(digests_n32.any(1).sum()) for digests_n32 in probed if digests_n32 is not None)
    images = sum(len(digests_n32) for digests_n32 in probed if digests_n32 is not None)
    if known == images:
        return
    some = "" if images == len(rows) else f" in {len(probed)} of {len(rows.sizes_F)} row groups"
    log.warning(
        "%d of %d images of split %s%s have no sha256 in %s: "
        "whether they changed is not checked, only that they decode",
        images - known,
        images,
        split,
        some,
        pinned.version,
    )
