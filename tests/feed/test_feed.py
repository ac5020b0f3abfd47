"""Every loader delivers the same batches for the same plan, from any step, and survives images
that have rotted.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from raypipe.errors import DataError
from raypipe.feed import feed as feeds
from raypipe.feed.dataset import FeedConfig, pin
from raypipe.feed.feed import Batch, Feed
from raypipe.images.decode import decode
from raypipe.tables.table import TableConfig, append

SIDE, BATCH = 24, 12
CARRIERS = ["threads", "offload", "cache"]
pytestmark = pytest.mark.usefixtures("ray_session")


def written(
    folder: Path,
    textured: Any,
    rot: dict[int, bytes] | None = None,
    count: int = 300,
    each: int = 100,
) -> tuple[TableConfig, list[bytes]]:
    """So many images in files of `each`, in two splits; `rot` says which bytes stand where others
    were hashed.
    """
    images = [textured(seed, side_px=32, kind=("PNG", "JPEG")[seed % 2]) for seed in range(count)]
    for start in range(0, count, each):
        rows = [
            {
                "image_id": f"{i:03d}",
                "label": ("a", "b")[i % 2],
                "split": ("val" if i % 10 == 9 else "train"),
                "sha256": hashlib.sha256(images[i]).hexdigest(),
                "image": (rot or {}).get(i, images[i]),
            }
            for i in range(start, start + each)
        ]
        append(str(folder / "table"), pa.Table.from_pylist(rows), "test")
    return TableConfig(uri=str(folder / "table")), images


@pytest.fixture(scope="module")
def table(
    textured: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TableConfig, list[bytes]]:
    return written(tmp_path_factory.mktemp("feed"), textured)


def opened(
    table: TableConfig, carrier: str, rank: int = 0, world: int = 1, **settings: Any
) -> Feed:
    cfg = FeedConfig(carrier=carrier, shards=6, **settings)
    sources = feeds.prepare(pin(table, cfg), ["train", "val"], SIDE, cfg, seed=5)
    assert sources["train"].carrier == carrier
    return Feed(sources["train"], sources["val"], BATCH, 5, rank, world)


def ids(feed: Feed, batch: Batch, split: str = "train") -> list[str]:
    rows = feed._train_rows if split == "train" else feed._val_rows
    return rows.ids_of(batch.samples_B)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_batches_are_the_images_and_labels_of_the_plan(table: Any, carrier: str) -> None:
    config, images = table
    feed = opened(config, carrier)
    for epoch in (0, 1):
        seen = []
        for batch in feed.train(epoch):
            assert batch.inputs.dtype == torch.uint8 and batch.inputs.shape == (
                BATCH,
                SIDE,
                SIDE,
                3,
            )
            for pixels_HWC, label, i in zip(
                batch.inputs.numpy(), batch.labels_B.tolist(), ids(feed, batch), strict=True
            ):
                np.testing.assert_array_equal(pixels_HWC, decode(images[int(i)], SIDE))
                assert label == int(i) % 2
            seen += ids(feed, batch)
        assert len(set(seen)) == len(seen) == 264 and feed.state() == (
            epoch + 1,
            0,
        )  # 270 rows in batches of 12
    assert sorted(i for b in feed.val() for i in ids(feed, b, "val")) == [
        f"{i:03d}" for i in range(9, 300, 10)
    ]
    feed.close()


def test_all_loaders_and_world_sizes_deliver_identical_batches_and_resume_at_any_step(
    table: Any,
) -> None:
    whole = [b.inputs for b in opened(table[0], "threads").train(3)]
    assert len(whole) == 22
    for carrier in CARRIERS:
        for world, step in ((1, 7), (2, 0), (3, 11), (5, 9)):
            ranks = [opened(table[0], carrier, rank, world).train(3, step) for rank in range(world)]
            steps = list(zip(*ranks, strict=True))
            assert len(steps) == len(whole) - step
            for t, parts in enumerate(steps, start=step):
                places = torch.from_numpy(np.concatenate([p.positions_B for p in parts]))
                together = torch.cat([p.inputs for p in parts])[places.argsort()]
                assert torch.equal(together, whole[t]), (carrier, world, t)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_rotten_image_is_replaced_by_its_neighbour_and_reported(
    textured: Any, tmp_path: Path, carrier: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One whose bytes were cut, and one that still decodes but is another picture than was
    ingested.
    """
    caplog.set_level(logging.WARNING, logger="raypipe")
    config, images = written(tmp_path, textured, {17: b"no image", 40: textured(999, side_px=32)})
    feed = opened(config, carrier, drop_last=False)
    seen: list[str] = []
    for batch in feed.train(0):
        for pixels_HWC, label, i in zip(
            batch.inputs.numpy(), batch.labels_B.tolist(), ids(feed, batch), strict=True
        ):
            np.testing.assert_array_equal(pixels_HWC, decode(images[int(i)], SIDE))
            assert label == int(i) % 2
        seen += ids(feed, batch)
    assert feed.replaced == 2 and not {"017", "040"} & set(seen)
    assert seen.count("018") >= 2 and seen.count("041") >= 2
    assert (
        "Image 017 is broken (" in caplog.text
        and "Image 040 is broken (its bytes do not match their sha256)" in caplog.text
    )
    feed.close()
    with pytest.raises(DataError, match=r"Image 0(17|40) is broken.*on_bad=stop"):
        list(opened(config, carrier, on_bad="stop", drop_last=False).train(0))


@pytest.mark.parametrize("carrier", CARRIERS)
def test_all_loaders_replace_a_rotten_row_group_by_the_same_images(
    textured: Any, tmp_path: Path, carrier: str
) -> None:
    """Of groups of 3, the second is rotten: the third group's first image stands in for it, twice
    where one is due.
    """
    config, images = written(
        tmp_path, textured, dict.fromkeys((3, 4, 5, 28), b"rot"), count=30, each=3
    )
    feed = opened(config, carrier, drop_last=False)
    seen: list[str] = []
    for batch in feed.train(0):
        for pixels_HWC, i in zip(batch.inputs.numpy(), ids(feed, batch), strict=True):
            np.testing.assert_array_equal(pixels_HWC, decode(images[int(i)], SIDE))
        seen += ids(feed, batch)
    feed.close()
    assert feed.replaced == 4 and not {"003", "004", "005", "028"} & set(seen)
    assert seen.count("006") >= 4  # 28's neighbour 29 is of the other split
    with pytest.raises(DataError, match=r"Image 0\d\d is broken.*on_bad=stop"):
        list(opened(config, carrier, on_bad="stop", drop_last=False).train(0))


def test_a_bit_that_flips_in_a_later_epoch_is_noticed(
    textured: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An image is hashed when it is first read, and again when anything in its row group has
    changed since.
    """
    caplog.set_level(logging.WARNING, logger="raypipe")
    config, images = written(tmp_path, textured)
    feed = opened(config, "threads", drop_last=False)
    assert all(len(batch.samples_B) for epoch in (0, 1) for batch in feed.train(epoch))
    feed.close()
    assert feed.replaced == 0
    (path,) = [p for p in tmp_path.rglob("*.parquet") if images[150] in p.read_bytes()]
    stored = bytearray(path.read_bytes())
    stored[stored.index(images[150]) + len(images[150]) - 20] ^= 1
    path.write_bytes(stored)
    seen = [i for batch in feed.train(2) for i in ids(feed, batch)]
    feed.close()
    assert feed.replaced == 1 and "150" not in seen and seen.count("151") >= 2
    assert "Image 150 is broken (its bytes do not match their sha256)" in caplog.text


def test_a_cache_that_does_not_fit_falls_back_and_says_so(
    table: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="raypipe")
    assert feeds.choose(FeedConfig(carrier="cache", cache_mb=10), 11) == "threads"
    assert "The cache cannot hold 11 MB" in caplog.text
    assert (
        feeds.choose(FeedConfig(cache_mb=10), 11) == "threads"
        and feeds.choose(FeedConfig(cache_mb=10), 9) == "cache"
    )


@pytest.mark.parametrize(
    ("set_by_user", "device", "ranks", "threads"),
    [
        (None, "cpu", 1, 2),
        (5, "cpu", 1, 5),
        (None, "cuda", 1, 8),  # of 12 CPUs
        (None, "cuda", 4, 3),
        (None, "cuda", 99, 1),
        (5, "cuda", 4, 5),
    ],
)
def test_a_worker_with_a_gpu_decodes_in_its_part_of_the_cpus(
    set_by_user: int | None,
    device: str,
    ranks: int,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feeds.container, "usable_cpus", lambda: set(range(12)))
    monkeypatch.setattr(feeds.container, "cpu_limit", lambda: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    source = feeds.Source("threads", None, 32, FeedConfig(threads=set_by_user))
    assert source._threads(torch.device(device)) == threads


def test_row_groups_in_flight_are_bounded(table: Any) -> None:
    feed = opened(table[0], "threads")
    assert feed.in_flight_bytes == 0
    list(feed.train(0))
    feed.close()
    assert 0 < feed.in_flight_bytes <= sum(f.bytes for f in feed._train_rows.fragments)


def test_weights_come_from_a_column_and_must_be_weights(tmp_path: Path, textured: Any) -> None:
    rows = [
        {
            "image_id": str(i),
            "label": "ab"[i % 2],
            "split": ("train", "val")[i % 4 == 3],
            "w": float(i % 2),
            "image": textured(i),
        }
        for i in range(60)
    ]
    append(str(tmp_path / "t"), pa.Table.from_pylist(rows), "test")
    config = TableConfig(uri=str(tmp_path / "t"))
    feed = opened(config, "threads", sampling="weighted", weights="w")
    assert {int(i) % 2 for b in feed.train(0) for i in ids(feed, b)} == {1}
    feed.close()
    with pytest.raises(DataError, match="no column 'x'"):
        opened(config, "threads", sampling="weighted", weights="x")


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("world", [1, 2])
def test_validation_is_of_the_images_that_can_be_read(
    textured: Any, tmp_path: Path, carrier: str, world: int
) -> None:
    """What stood for a broken one counted twice. Ranks stay in step, whatever is broken."""
    rotten = {9, *range(89, 250, 10)}
    config, images = written(tmp_path, textured, dict.fromkeys(rotten, b"rot"))
    seen = []
    batches = []
    for rank in range(world):
        feed = opened(config, carrier, rank, world)
        told = list(feed.val())
        for batch in told:
            shown = ids(feed, batch, "val")
            assert len(batch.inputs) == len(batch.positions_B) == batch.share.images == len(shown)
            for pixels_HWC, label, i in zip(
                batch.inputs.numpy(), batch.labels_B.tolist(), shown, strict=True
            ):
                np.testing.assert_array_equal(pixels_HWC, decode(images[int(i)], SIDE))
                assert label == int(i) % 2
            seen += shown
        batches.append(len(told))
        feed.close()
    assert sorted(map(int, seen)) == [i for i in range(9, 300, 10) if i not in rotten]
    assert len(set(batches)) == 1


def test_a_broken_image_is_not_counted_as_decoded(textured: Any, tmp_path: Path) -> None:
    config, _ = written(tmp_path, textured, {9: b"rot", 17: b"rot"})
    cfg = FeedConfig(carrier="cache", shards=6)
    sources = feeds.prepare(pin(config, cfg), ["train", "val"], SIDE, cfg, seed=5)
    assert [sources[split].decoded for split in ("train", "val")] == [269, 29]


def test_every_source_comes_equally_often_or_as_the_mix_says(tmp_path: Path, textured: Any) -> None:
    """45 training images of one source, 15 of another, 1 of it without a label; validation is
    seen as it is.
    """
    rows = [
        {
            "image_id": str(i),
            "label": None if i == 3 else "ab"[i // 4 % 2],
            "split": ("train", "val")[i >= 60],
            "source": "rare" if i % 4 == 3 else "usual",
            "image": textured(i),
        }
        for i in range(80)
    ]
    append(str(tmp_path / "t"), pa.Table.from_pylist(rows), "test")
    config = TableConfig(uri=str(tmp_path / "t"))

    def drawn(**settings: Any) -> tuple[int, int]:
        """(of the rare source, of all) in an epoch; each image comes as often as it should, but
        for rounding.
        """
        feed = opened(config, "threads", sampling="sources", drop_last=False, **settings)
        seen = [int(i) for b in feed.train(0) for i in ids(feed, b)][:59]
        assert sorted(int(i) for b in feed.val() for i in ids(feed, b, "val")) == list(
            range(60, 80)
        )
        feed.close()
        return sum(i % 4 == 3 for i in seen), len(seen)

    rare, seen = drawn()
    assert abs(rare - seen / 2) <= 4, "14 of the 59 images are its own"
    rare, seen = drawn(mix={"rare": 1, "usual": 4})
    assert abs(rare - seen / 5) <= 4
    with pytest.raises(DataError, match=r"feed\.mix does not fit the sources.*rare, usual"):
        opened(config, "threads", sampling="sources", mix={"rare": 1, "unusual": 4})


def test_a_table_without_sources_cannot_be_drawn_by_source(
    table: tuple[TableConfig, list[bytes]],
) -> None:
    with pytest.raises(DataError, match="no column 'source'"):
        opened(table[0], "threads", sampling="sources")
