"""Which images the weights of a package have learned from, image by image.

Two files of the package, so that its seal covers them: `trained_on.npy` has the rows of its own
training, and `inherited.npy` those behind the weights that it started from, back to the first
ancestor. With both, nobody has to read an old version of a table, which may be vacuumed.

Two models are compared on rows that neither has learned from. A row can become a test row later: a
new split, another `where`, the same image in another table. A test row counts as learned if its
table and id are known, or the sha256 of its image (`is_among`); elsewhere its image decides, if
that is known (`is_old`). Whether validation can choose is asked of both (`decides`).

A row takes 16 bytes: the first 8 of a hash of table and id, which are 0 where it has no id, and the
first 8 of the image's sha256, which are 0 where the table has no column sha256. Two of a million
images agree by chance in one of 10 million such sets. uint64 (N, 2), sorted, each row once.

A prepared table has the images of its source, in other bytes and under another table's id. So each
of its rows is known by two such pairs, its own and that of the source's row: uint64 (N, 4) as read
from the table, two rows in a package. Names with NK take both: K is 2, or 4 of a prepared table.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Container, Iterable

import numpy as np
import pyarrow as pa

from raypipe.errors import DataError
from raypipe.feed.dataset import Pinned, left_out
from raypipe.feed.stored import SHA256, parsed
from raypipe.models.labels import Kind
from raypipe.registry.package import Package
from raypipe.tables import label_column, scan
from raypipe.tables.prepared import ORIGINAL
from raypipe.tables.table import ImageTable, TableVersion
from raypipe.train.job import TrainJob

OWN, INHERITED = "trained_on.npy", "inherited.npy"
NONE_N2 = np.empty((0, 2), np.uint64)
FEW = 0.1
"""Of a split's rows: so many that weights have learned from, as duplicates, decide nothing."""


def rows_of(
    pinned: Pinned,
    version: TableVersion,
    where: scan.Where,
    without: frozenset[str | None] = frozenset(),
) -> tuple[list[str | None], np.ndarray]:
    """(ids, identities_NK) of the labelled rows of a version, in the table's order.

    without: ids that do not count. Raises DataError as tables do.
    """
    return of_table(pinned.table, version, where, pinned.task.kind, without)


def of_table(
    table: ImageTable,
    version: TableVersion,
    where: scan.Where,
    kind: Kind,
    without: frozenset[str | None] = frozenset(),
) -> tuple[list[str | None], np.ndarray]:
    """As `rows_of`, of a table that nobody has pinned for a training. kind: of the labels."""
    columns = table.columns
    has = {field.name for field in table.at(version).schema().fields}
    wanted = [columns.id, columns.label, *hashes_of(version, has)]
    ids: list[str | None] = []
    parts = [np.empty((0, 4 if version.origin_id else 2), np.uint64)]
    for part in scan.each(table, version, list(dict.fromkeys(wanted)), where):
        labels = label_column.read(part[columns.label], kind, columns.label)
        names = part[columns.id].cast(pa.string()).to_pylist()
        known = zip(labels.is_valid().to_pylist(), names, strict=True)
        kept_N = np.array([is_known and name not in without for is_known, name in known], bool)
        ids += [name for name, is_kept in zip(names, kept_N.tolist(), strict=True) if is_kept]
        parts.append(of_part(version, part.filter(pa.array(kept_N)), columns.id))
    return ids, np.concatenate(parts)


def hashes_of(version: TableVersion, has: Container[str]) -> list[str]:
    """The columns of hashes that `of_part` reads. has: the names of all columns of the table."""
    names = (SHA256, ORIGINAL) if version.origin_id else (SHA256,)
    return [name for name in names if name in has]


def of_part(version: TableVersion, rows: pa.Table, id_column: str) -> np.ndarray:
    """identities_NK of some rows of a version."""
    ids = rows[id_column].cast(pa.string()).to_pylist()
    own, original = (rows[c] if c in rows.schema.names else None for c in (SHA256, ORIGINAL))
    own_N2 = identities(version.table_id, ids, own)
    if not version.origin_id:
        return own_N2
    return np.hstack([own_N2, identities(version.origin_id, ids, original)])


def of_training(job: TrainJob, pinned: Pinned) -> np.ndarray:
    """identities_N2 of the rows that this job trains on."""
    without = left_out(job.feed)
    return _sorted(rows_of(pinned, pinned.version, pinned.rows_of(job.feed.train), without)[1])


def files(own_N2: np.ndarray, inherited_N2: np.ndarray) -> dict[str, bytes]:
    """What the package keeps; no second file for weights that had no parent."""
    kept = {OWN: _bytes(own_N2)}
    return kept | ({INHERITED: _bytes(inherited_N2)} if len(inherited_N2) else {})


def by(package: Package) -> np.ndarray | None:
    """identities_N2 of all rows that its weights have learned from; None: it does not say.

    Raises DataError for files that raypipe cannot have written: other numbers would match no row,
    and test rows that it knows would count.
    """
    if OWN not in package.files:
        return None
    kept = [name for name in (OWN, INHERITED) if name in package.files]
    return united(*(_read(name, package.files[name]) for name in kept))


def _read(name: str, data: bytes) -> np.ndarray:
    try:
        rows_N2: np.ndarray = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError):
        rows_N2 = np.empty(0)
    if rows_N2.dtype != np.uint64 or rows_N2.ndim != 2 or rows_N2.shape[1] != 2:
        raise DataError(
            f"{name} of a package does not say which rows it has learned from",
            got=f"{rows_N2.dtype} {rows_N2.shape}",
            rule="It is what raypipe wrote when the model was registered: uint64 (rows, 2)",
            fix="Restore the package, or train and register again with another run.seed",
        )
    return rows_N2


def united(*some_NK: np.ndarray) -> np.ndarray:
    """identities_N2 of all of the rows, sorted, each once."""
    return _sorted(np.concatenate(some_NK))


def is_among(rows_NK: np.ndarray, known_M2: np.ndarray) -> np.ndarray:
    """bool (N,): the row's id is known, or its image. No id, and an unknown sha256 (0), are
    nobody's."""
    is_known_N = np.zeros(len(rows_NK), bool)
    for k in range(rows_NK.shape[1]):
        is_known_N |= np.isin(rows_NK[:, k], known_M2[:, k % 2]) & (rows_NK[:, k] != 0)
    return is_known_N


def is_old(rows_NK: np.ndarray, known_M2: np.ndarray) -> np.ndarray:
    """bool (N,): the row is a known one: its image is known, or its id where an image is not.

    Several photographs of a table may share an id, so another image is a new row. A test row is
    compared by `is_among`, which rather leaves out one too many.
    """
    has_image_M = known_M2[:, 1] != 0
    is_old_N = np.zeros(len(rows_NK), bool)
    # By its own pair, and of a prepared table by that of the source's row.
    for k in range(0, rows_NK.shape[1], 2):
        ids_N, images_N = rows_NK[:, k], rows_NK[:, k + 1]
        has_image_N = images_N != 0
        is_old_N |= np.isin(images_N, known_M2[:, 1]) & has_image_N
        # Of two rows with images these decide: only where one has none, the id does.
        same_id_N = np.isin(ids_N, known_M2[:, 0]) & ~has_image_N
        same_id_N |= np.isin(ids_N, known_M2[~has_image_M, 0])
        is_old_N |= same_id_N & (ids_N != 0)
    return is_old_N


def is_unclear(rows_NK: np.ndarray, known_M2: np.ndarray) -> np.ndarray:
    """bool (N,): the row's id is known, and its image is another one.

    It is a new photograph, or the known image in other bytes: its table was encoded anew. Nothing
    says which. To train on, it is a new row (`is_old`): else new photographs would be left out.
    """
    unclear_N: np.ndarray = is_among(rows_NK, known_M2) & ~is_old(rows_NK, known_M2)
    return unclear_N


def decides(pinned: Pinned, split: str, known_M2: np.ndarray) -> bool:
    """Do so many rows of the split belong to the known ones that its metrics say little?

    A row with a known id and another image is a known one, too, if the table has lost the known
    image: its images were encoded anew, and their bytes say nothing. Beside a new photograph of a
    known product the known one is still there.
    """
    if not len(known_M2):
        return False
    rows_NK = rows_of(pinned, pinned.version, pinned.rows_of(split))[1]
    if not len(rows_NK):
        return False
    is_known_N = is_old(rows_NK, known_M2)
    # The hashes of the whole table are read only where they decide.
    if is_known_N.mean() <= FEW < is_among(rows_NK, known_M2).mean():
        is_known_N |= _has_lost_its_image(rows_NK, known_M2, _images_of(pinned))
    return bool(is_known_N.mean() > FEW)


def _has_lost_its_image(
    rows_NK: np.ndarray, known_M2: np.ndarray, images_L: np.ndarray
) -> np.ndarray:
    """bool (N,): the row's id is known, and no image that is known under it is in the table.

    images_L: of all rows of the table.
    """
    ids_NJ = rows_NK[:, ::2]  # J is 1, or 2 of a prepared table
    is_here_M = np.isin(known_M2[:, 1], images_L)
    is_known_NJ = np.isin(ids_NJ, known_M2[:, 0]) & (ids_NJ != 0)
    is_here_NJ = np.isin(ids_NJ, known_M2[is_here_M, 0]) & (ids_NJ != 0)
    has_lost_N: np.ndarray = is_known_NJ.any(axis=1) & ~is_here_NJ.any(axis=1)
    return has_lost_N


def _images_of(pinned: Pinned) -> np.ndarray:
    """The image of each row of the pinned version, as in identities; of a prepared table the
    source's, too. Rows without a label and those of other splits are among them."""
    table, version = pinned.table.without_sample(), pinned.version
    has = {field.name for field in table.at(version).schema().fields}
    names = hashes_of(version, has)
    parts = [np.empty(0, np.uint64)]
    for part in scan.each(table, version, names):
        parts += [_first_8(part[name]) for name in names]
    return np.concatenate(parts)


def identities(
    table_id: str, ids: Iterable[str | None], hashes: pa.ChunkedArray | None
) -> np.ndarray:
    """identities_N2 of rows by the id of their table, their ids, and hex or binary sha256."""
    # Rows without an id have none in common. An older raypipe kept the hash of None for them.
    digests = [
        bytes(8)
        if i is None
        else hashlib.blake2b(repr((table_id, i)).encode(), digest_size=8).digest()
        for i in ids
    ]
    rows_N2 = np.zeros((len(digests), 2), np.uint64)
    rows_N2[:, 0] = np.frombuffer(b"".join(digests), "<u8")
    if hashes is not None:
        rows_N2[:, 1] = _first_8(hashes)
    return rows_N2


def _first_8(hashes: pa.ChunkedArray) -> np.ndarray:
    """uint64 (N,): the first 8 bytes of each sha256; 0 where a value is none."""
    images_N: np.ndarray = np.ascontiguousarray(parsed(hashes)[:, :8]).view("<u8")[:, 0]
    return images_N


def _sorted(rows_NK: np.ndarray) -> np.ndarray:
    return np.unique(rows_NK.reshape(-1, 2), axis=0)


def _bytes(rows_N2: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, rows_N2.astype("<u8"))
    return out.getvalue()
