"""What was stored is checked, row by row; what is broken is replaced or stops the run, wherever
it lies.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from raypipe.config import validate
from raypipe.errors import DataError
from raypipe.feed import feed as feeds
from raypipe.feed.dataset import FeedConfig, pin
from raypipe.feed.feed import Feed
from raypipe.feed.locate import locate
from raypipe.images.decode import decode
from raypipe.models.zoo import ImageModel
from raypipe.tables.table import TableConfig
from raypipe.train import unseen
from raypipe.train.job import TrainJob

SIDE, IMAGES = 24, 40


@pytest.fixture(scope="module")
def images(textured: Any) -> list[bytes]:
    return [textured(seed, side_px=32) for seed in range(IMAGES)]


Write = Callable[..., TableConfig]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A table of these images (null: none), in files of `group` rows, with these hashes; `more`
    columns.
    """

    def written(
        images: Sequence[bytes | None], hashes: Any = None, group: int = 10, **more: Any
    ) -> TableConfig:
        rows = len(images)
        columns: dict[str, Any] = {
            "image_id": pa.array([f"{i:02d}" for i in range(rows)]),
            "image": pa.array(images, pa.binary()),
            "label": pa.array(["ab"[i % 2] for i in range(rows)]),
            "split": pa.array(["val" if i >= rows - 10 else "train" for i in range(rows)]),
        }
        table = pa.table(columns | more | ({} if hashes is None else {"sha256": hashes}))
        for start in range(0, rows, group):
            write_deltalake(str(tmp_path / "t"), table.slice(start, group), mode="append")
        return TableConfig(uri=str(tmp_path / "t"))

    return written


def hexadecimal(images: Sequence[bytes]) -> list[str | None]:
    return [hashlib.sha256(image).hexdigest() for image in images]


def opened(table: TableConfig, **settings: Any) -> Feed:
    cfg = FeedConfig(carrier="threads", drop_last=False, **settings)
    sources = feeds.prepare(pin(table, cfg), ["train", "val"], SIDE, cfg, seed=5)
    return Feed(sources["train"], sources["val"], 7, 5)


def shown(feed: Feed, images: Sequence[bytes]) -> list[int]:
    """The images of an epoch, each of which is what its id says, with its label."""
    seen: list[int] = []
    for batch in feed.train(0):
        ids = [int(i) for i in feed._train_rows.ids_of(batch.samples_B)]
        for pixels, label, i in zip(
            batch.inputs.numpy(), batch.labels_B.tolist(), ids, strict=True
        ):
            np.testing.assert_array_equal(pixels, decode(images[i], SIDE))
            assert label == i % 2
        seen += ids
    feed.close()
    return seen


def test_a_rotten_image_alone_in_its_row_group_is_replaced_by_the_next_groups(
    images: list[bytes], write: Write
) -> None:
    stored = [b"rot" if i in (4, 29) else image for i, image in enumerate(images)]
    table = write(stored, hexadecimal(images), group=1)
    feed = opened(table)
    seen = shown(feed, images)
    assert feed.replaced == 2 and set(seen) == set(range(30)) - {4, 29}
    assert seen.count(5) >= 2 and seen.count(0) >= 2  # behind the last group is the first
    with pytest.raises(DataError, match=r"Image (04|29) is broken.*on_bad=stop"):
        shown(opened(table, on_bad="stop"), images)


def test_a_split_without_a_readable_image_stops_with_the_way_out(
    images: list[bytes], write: Write
) -> None:
    table = write([b"rot"] * 30 + images[30:], group=7)
    with pytest.raises(DataError, match=r"None of the 30 images of a split is readable.*Restore"):
        shown(opened(table), images)


@pytest.mark.parametrize("rotten", [3, 17])
def test_one_null_hash_leaves_the_other_rows_checked(
    rotten: int, images: list[bytes], write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="raypipe")
    hashes = hexadecimal(images)
    hashes[0] = None
    stored = list(images)
    stored[rotten] = images[39]  # it decodes, and is another picture
    feed = opened(write(stored, pa.array(hashes)))
    assert rotten not in shown(feed, images) and feed.replaced == 1
    assert "1 of 30 images of split train have no sha256" in caplog.text


@pytest.mark.parametrize(
    "other",
    {
        "md5": lambda image: hashlib.md5(image).hexdigest(),
        "numbers": len,
        "base64": lambda image: "q83vASNF",
        "bytes of other lengths": lambda image: image[:20],
    }.items(),
    ids=lambda pair: pair[0],
)
def test_a_column_that_holds_no_hashes_is_not_taken_for_one(
    other: tuple[str, Any], images: list[bytes], write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    """On ba74455 two MD5s made one digest, and every image looked broken."""
    caplog.set_level(logging.WARNING, logger="raypipe")
    feed = opened(write(images, pa.array([other[1](image) for image in images])))
    assert set(shown(feed, images)) == set(range(30)) and feed.replaced == 0
    assert "30 of 30 images of split train have no sha256" in caplog.text


def test_a_column_of_hashes_of_something_else_is_named_once_and_can_be_left_alone(
    images: list[bytes], write: Write
) -> None:
    table = write(images, hexadecimal([image + b"original" for image in images]))
    with pytest.raises(DataError, match=r"Column 'sha256' of .* is not the sha256.*verify=false"):
        opened(table)
    feed = opened(table, verify=False)
    assert set(shown(feed, images)) == set(range(30)) and feed.replaced == 0


def test_a_whole_row_group_that_rotted_is_no_reason_to_doubt_the_column(
    images: list[bytes], write: Write
) -> None:
    stored = [images[-1] if i < 10 else image for i, image in enumerate(images)]
    feed = opened(write(stored, hexadecimal(images)))
    assert not set(range(10)) & set(shown(feed, images)) and feed.replaced == 10


def test_hashes_may_be_bytes_or_capitals(images: list[bytes], write: Write) -> None:
    stored = [*images[:8], images[9], *images[9:]]
    for hashes in (
        pa.array([hashlib.sha256(image).digest() for image in images]),
        pa.array([(text or "").upper() for text in hexadecimal(images)]),
    ):
        table = write(stored, hashes)
        feed = opened(table)
        assert 8 not in shown(feed, images) and feed.replaced == 1
        for path in Path(table.uri).rglob("*"):
            path.unlink() if path.is_file() else None


@pytest.mark.parametrize("hashed", [True, False])
def test_a_null_image_is_a_broken_one(
    hashed: bool, images: list[bytes], write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="raypipe")
    stored = [None if i == 6 else image for i, image in enumerate(images)]
    feed = opened(write(stored, pa.array(hexadecimal(images)) if hashed else None))
    assert set(shown(feed, images)) == set(range(30)) - {6} and feed.replaced == 1
    assert "Image 06 is broken (its row holds no image)" in caplog.text


@pytest.mark.parametrize("kind", ["dictionary", "fixed", "view"])
def test_images_are_read_whatever_arrow_type_their_file_names(
    kind: str, images: list[bytes], write: Write
) -> None:
    """Delta says binary; a file may hold a dictionary, values of one size, or views."""
    size = max(map(len, images))
    padded = [image.ljust(size, b"\0") for image in images]
    table = write(padded, hexadecimal(padded))
    for path in Path(table.uri).glob("*.parquet"):
        held = pq.read_table(path)
        column = held["image"].combine_chunks()
        changed = {
            "dictionary": column.dictionary_encode,
            "fixed": lambda column=column: column.cast(pa.binary(size)),
            "view": lambda column=column: column.cast(pa.binary_view()),
        }[kind]()
        pq.write_table(
            held.set_column(held.schema.get_field_index("image"), "image", changed), path
        )
    feed = opened(table)
    assert set(shown(feed, padded)) == set(range(30)) and feed.replaced == 0
    assert locate(pin(table, FeedConfig()), "train", FeedConfig()).digests(0) is not None


def test_no_image_counts_twice_where_a_model_is_judged(images: list[bytes], write: Write) -> None:
    """The one that stood for a broken image counted twice."""
    stored = [b"rot" if i == 34 else image for i, image in enumerate(images)]
    tree = {
        "table": write(stored, hexadecimal(images)).model_dump(),
        "feed": {"carrier": "threads"},
        "model": {"name": "small_cnn", "mode": "finetune", "pretrained": False, "side_px": SIDE},
    }
    job = validate(TrainJob, tree)
    pinned = pin(job.table, job.feed)
    found, labels_N = unseen.predict_split(job, ImageModel(job.model, 2), pinned, "val")
    assert found.ids == tuple(str(i) for i in range(30, 40) if i != 34)
    assert labels_N.tolist() == [int(i) % 2 for i in found.ids]
