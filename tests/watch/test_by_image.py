"""Which images of a batch a champion has learned from, where bytes alone do not tell."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
from deltalake import write_deltalake

from raypipe.config import RunConfig
from raypipe.registry.package import Package
from raypipe.tables.table import ImageTable, TableConfig
from raypipe.train import learned
from raypipe.watch import examination, feedback_rows
from raypipe.watch.feedback_rows import Champion
from raypipe.watch.predicted import Batch
from raypipe.watch.settings import WatchConfig


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def champion(
    table_id: str, ids: list[str | None], hashes: list[str], verify: bool = True
) -> Package:
    rows_N2 = learned.identities(table_id, ids, pa.chunked_array([hashes]))
    files = learned.files(learned.united(rows_N2), learned.NONE_N2)
    info = {"config": {"feed": {"verify": verify}}}
    return cast(Package, SimpleNamespace(files=files, info=info))


def batch_of(uri: Path, ids: list[str | None], images: list[bytes], **more: Any) -> Batch:
    columns = {"image_id": pa.array(ids, pa.string()), "image": images}
    write_deltalake(str(uri), pa.table(columns | more))
    empty, version = np.zeros((len(ids), 1)), ImageTable(str(uri)).pin()
    return Batch(version, ids, [sha(image) for image in images], empty, empty)


def learned_images(package: Package, mine: Batch) -> list[bool]:
    """What the labels of these images are left out for; the note of the check counts the same."""
    source = TableConfig(uri=mine.version.uri)
    images = list(zip(mine.ids, mine.sha256, strict=True))
    run, watch = RunConfig(dir=f"{mine.version.uri} run"), WatchConfig()
    by = Champion(package, "m/1", None)
    labels = dict.fromkeys(images, "a label")
    left_out = feedback_rows._left_out(run, watch, by, source, mine, labels)
    reference: Any = SimpleNamespace(groups=None)
    notes = examination._not_compared(package, reference, source, mine, watch)
    said = f"has learned from {len(left_out)} of these {len(images)} images"
    assert any(said in note for note in notes) == bool(left_out)
    return [left_out.get(image) == "learned" for image in images]


def test_where_the_column_hashes_other_bytes_the_ids_tell(tmp_path: Path) -> None:
    """With feed.verify=false a package may list hashes of anything: no image was ever learned."""
    of_photographs = [sha(b"photograph %d" % n) for n in range(4)]
    ids: list[str | None] = [f"i{n}" for n in range(4)]
    images = [b"%d" % n for n in range(4)]
    mine = batch_of(tmp_path / "night", ids, images, sha256=of_photographs)
    table_id = mine.version.table_id
    package = champion(table_id, ids[:2], of_photographs[:2], verify=False)
    assert learned_images(package, mine) == [True, True, False, False]
    # Where the column was compared with the bytes, these are new photographs.
    package = champion(table_id, ids[:2], of_photographs[:2])
    assert learned_images(package, mine) == [False] * 4
    package = champion(table_id, ids[:2], [sha(image) for image in images[:2]])
    assert learned_images(package, mine) == [True, True, False, False]


def test_an_image_of_a_prepared_table_is_known_as_the_one_of_its_source(tmp_path: Path) -> None:
    """Its bytes are others and its table is another one, so no image was ever learned."""
    # The photographs 1 and 2 share an id, and 3 has none.
    ids: list[str | None] = ["i0", "i1", "i1", None, "i4"]
    images = [b"%d, smaller" % n for n in range(5)]
    originals = [sha(b"%d" % n) for n in range(5)]
    hashes = [sha(image) for image in images]
    mine = batch_of(tmp_path / "copy", ids, images, sha256=hashes, original_sha256=originals)
    copy = dataclasses.replace(mine.version, origin="/source@v0", origin_id="source")
    prepared = dataclasses.replace(mine, version=copy)
    known = [0, 1, 3]
    package = champion("source", [ids[n] for n in known], [originals[n] for n in known])
    assert learned_images(package, prepared) == [True, True, False, True, False]
    assert learned_images(package, mine) == [False] * 5, "of another table it says nothing"
    # A source without hashes: its ids tell.
    bare = champion("source", ids[:2], ["", ""])
    assert learned_images(bare, prepared) == [True, True, True, False, False]


def test_an_image_that_was_copied_unchanged_is_found_by_its_own_bytes(tmp_path: Path) -> None:
    """Its row may have the sha256 that the source promised, and not that of its bytes."""
    images = [b"broken"]
    columns = {"sha256": [sha(b"promised")], "original_sha256": [sha(b"broken")]}
    mine = batch_of(tmp_path / "copy", ["i0"], images, **columns)
    copy = dataclasses.replace(mine.version, origin="/source@v0", origin_id="source")
    prepared = dataclasses.replace(mine, version=copy)
    assert learned_images(champion("source", ["i0"], [sha(b"another")]), prepared) == [False]
    assert learned_images(champion("source", ["i0"], [sha(b"broken")]), prepared) == [True]
