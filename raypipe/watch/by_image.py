"""What the batch's table says of each image of the batch: its group, when it came, its path, and
whether the champion has learned from it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypipe.errors import DataError
from raypipe.feed.stored import parsed
from raypipe.registry.package import Package, Reference
from raypipe.tables import scan
from raypipe.tables.prepared import ORIGINAL
from raypipe.tables.table import ImageTable, TableConfig, TableVersion
from raypipe.train import belonging, learned
from raypipe.watch.predicted import Batch


def groups(
    package: Package, reference: Reference, source: TableConfig, mine: Batch
) -> list[str] | None:
    """The group of each image of the batch, blank where it has none. None: its table names none."""
    column = package.info["config"].get("registry", {}).get("group")
    values = None if reference.groups is None else _column(column, source, mine)
    if values is None:
        return None
    ids, groups = (one.to_pylist() for one in values)
    names = [belonging.name_of(group) for group in groups]
    return [name or "" for name in _of_images(source, mine, ids, names)]


def arrived(column: str | None, source: TableConfig, mine: Batch) -> list[float] | None:
    """The place of each image in the order of this column, NaN where it has none; equal values
    share a place. None: its table has no such column."""
    values = _column(column, source, mine)
    if values is None:
        return None
    ids, came = values
    if pa.types.is_string(came.type) or pa.types.is_large_string(came.type):
        came = _of_text(column, came, mine)
    # Ranks, as times may be numbers that no float tells apart.
    try:
        places = pc.rank(came, tiebreaker="dense", null_placement="at_end").to_pylist()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise DataError(
            f"The column {column!r} of {mine.version} has no order",
            got=str(came.type),
            rule="It holds times or numbers",
            fix="Name another column in watch.arrived",
        ) from None
    known = pc.invert(pc.is_null(came, nan_is_null=True)).to_pylist()
    places = [p if is_known else None for p, is_known in zip(places, known, strict=True)]
    found = _of_images(source, mine, ids.to_pylist(), places)
    return [np.nan if place is None else float(place) for place in found]


def _of_text(column: str | None, came: pa.ChunkedArray, mine: Batch) -> pa.ChunkedArray:
    """The numbers or ISO times that the texts are: as text, 10 is before 9. Ids are always read as
    text. Raises DataError for other texts."""
    # A blank is no value, as an empty field of a CSV.
    is_blank = pc.equal(pc.utf8_trim_whitespace(came), "")
    came = pc.if_else(is_blank, pa.scalar(None, came.type), came)
    for kind in (pa.int64(), pa.float64(), pa.timestamp("us"), pa.timestamp("us", "UTC")):
        with suppress(pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return came.cast(kind)
    raise DataError(
        f"The column {column!r} of {mine.version} has no order",
        got="text that is neither",
        rule="It holds numbers or times, as such or as text (ISO 8601)",
        fix="Name another column in watch.arrived",
    )


def paths(source: TableConfig, mine: Batch, rows: Sequence[int]) -> dict[int, str | None]:
    """Where the source of these images of the batch had them, by row, as `raypipe ingest` keeps it.
    Empty: its table does not say."""
    if not rows:
        return {}
    some = replace(
        mine, ids=[mine.ids[row] for row in rows], sha256=[mine.sha256[row] for row in rows]
    )
    # Other images are not read: the table may hold all nights so far. Rows without an id cannot be
    # asked for.
    known = sorted({image_id for image_id in some.ids if image_id is not None})
    where: scan.Where = {} if None in some.ids else {ImageTable.open(source).columns.id: known}
    values = _column("path", source, some, where)
    if values is None:
        return {}
    ids, named = (one.to_pylist() for one in values)
    found = _of_images(source, some, ids, named, where)
    return {row: None if path is None else str(path) for row, path in zip(rows, found, strict=True)}


def learned_from(
    package: Package,
    source: TableConfig,
    version: TableVersion,
    images: Sequence[tuple[str | None, str]],
) -> np.ndarray | None:
    """bool (N,): have the package's weights learned from the image? None: it does not say.

    images: id and sha256 of the bytes, of rows of this version. Raises DataError for a package that
    raypipe cannot have written, and for a table that cannot be read.
    """
    known_M2 = learned.by(package)
    if known_M2 is None:
        return None
    ids = [image_id for image_id, _ in images]
    rows_NK = learned.identities(version.table_id, ids, _as_column(sha256 for _, sha256 in images))
    if version.origin_id:
        # As learned.of_part does: a row of a prepared table is also the row of its source.
        originals = _as_column(_originals(source, version, images))
        origin_N2 = learned.identities(version.origin_id, ids, originals)
        rows_NK = np.hstack([rows_NK, origin_N2])
    # Without feed.verify the package's hashes may be of other bytes than the stored ones. Then no
    # image is found among them, and the ids have to say it, also where images share one.
    is_verified = package.info.get("config", {}).get("feed", {}).get("verify", True)
    return (learned.is_old if is_verified else learned.is_among)(rows_NK, known_M2)


def _as_column(hashes: Iterable[str]) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(list(hashes), pa.string())])


def _originals(
    source: TableConfig, version: TableVersion, images: Sequence[tuple[str | None, str]]
) -> list[str]:
    """The sha256 of the source's bytes of each image of a prepared table; "" where it is not known.

    An image that was copied unchanged may have any sha256 in its row, and its own as original.
    """
    table = ImageTable.open(source)
    has = table.at(version).schema().to_arrow().names
    if ORIGINAL not in has:
        return [""] * len(images)
    # The table may hold all nights so far.
    wanted = set(images)
    found: dict[tuple[str | None, str], str] = {}
    id_column, hashes = table.columns.id, learned.hashes_of(version, has)
    for rows in scan.each(table, version, [id_column, *hashes]):
        ids = rows[id_column].cast(pa.string()).to_pylist()
        originals = _hex(rows[ORIGINAL])
        for column in hashes:
            for image_id, digest, original in zip(ids, _hex(rows[column]), originals, strict=True):
                if (image_id, digest) in wanted:
                    found[image_id, digest] = original
    return [found.get(image, "") for image in images]


def _hex(hashes: pa.ChunkedArray) -> list[str]:
    return [digest.tobytes().hex() for digest in parsed(hashes)]


def _of_images(
    source: TableConfig,
    mine: Batch,
    ids: list[str | None],
    values: list[Any],
    where: scan.Where | None = None,
) -> list[Any]:
    """The value of each image of the batch, None where its table has none.

    ids, values: of all rows of the table that match `where`. Images of one id may have several
    values, those without an id above all: then only their bytes say which one is meant, and are
    read.
    """
    by_id: dict[str | None, Any] = {}
    unclear = set()
    for image_id, value in zip(ids, values, strict=True):
        if by_id.setdefault(image_id, value) != value:
            unclear.add(image_id)
    by_image: dict[tuple[str | None, str], Any] = {}
    if not unclear.isdisjoint(mine.ids):
        table = ImageTable.open(source)
        names = [table.columns.id, table.columns.image]
        row = iter(values)
        for part in scan.each(table, mine.version, names, where):
            for image_id, image in zip(*(part[name].to_pylist() for name in names), strict=True):
                value = next(row)
                if image_id in unclear and image is not None:
                    by_image[image_id, hashlib.sha256(image).hexdigest()] = value
    return [
        by_image.get((image_id, digest)) if image_id in unclear else by_id.get(image_id)
        for image_id, digest in zip(mine.ids, mine.sha256, strict=True)
    ]


def _column(
    column: str | None, source: TableConfig, mine: Batch, where: scan.Where | None = None
) -> tuple[pa.ChunkedArray, pa.ChunkedArray] | None:
    """(ids, values) of a column of the batch's table, of rows that match `where`; None if it has no
    such column."""
    table = ImageTable.open(source)
    if column not in table.at(mine.version).schema().to_arrow().names:
        return None
    read = scan.rows(table, mine.version, [table.columns.id, column], where)
    return read[table.columns.id], read[column]
