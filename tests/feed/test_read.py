"""What a pinned version yields: every labelled row once, the same numbers however the work is cut, features only once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from raypipe.errors import DataError
from raypipe.feed import read
from raypipe.feed.dataset import FeedConfig, Pinned, label_indices, pin
from raypipe.images.decode import decode
from raypipe.models.zoo import ModelConfig
from raypipe.tables import scan
from raypipe.tables.table import ImageTable, TableConfig, append

SMALL = ModelConfig(name="small_cnn", pretrained=False, mode="finetune")
FROZEN = ModelConfig(side_px=32)
FEED = FeedConfig()


@pytest.fixture(scope="module")
def pinned(half_labelled: TableConfig) -> Pinned:
    return pin(half_labelled, FEED)


def labelled(pinned: Pinned, split: str) -> dict[str, str]:
    columns = ["image_id", "label"]
    rows = scan.rows(pinned.table, pinned.version, columns, {"split": split}).to_pylist()
    return {r["image_id"]: r["label"] for r in rows if r["label"] is not None}


def test_pinning_counts_labelled_rows_and_orders_classes(pinned: Pinned) -> None:
    assert pinned.classes == ("cold", "warm")
    assert pinned.counts == {s: len(labelled(pinned, s)) for s in ("train", "val")} | {"test": 0}
    assert sum(pinned.counts.values()) == 60


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("split", ["train", "val"])
def test_the_stream_yields_every_labelled_row_once(pinned: Pinned, split: str) -> None:
    expected = labelled(pinned, split)
    seen: dict[str, int] = {}
    for batch in read.pixels(pinned, split, SMALL, FEED).iter_batches(batch_size=7, batch_format="numpy"):
        assert batch["pixels"].dtype == np.uint8 and batch["pixels"].shape[1:] == (32, 32, 3)
        assert not seen.keys() & set(batch["id"].tolist())
        seen |= dict(zip(batch["id"].tolist(), batch["label"].tolist(), strict=True))
    assert {image_id: pinned.classes[label] for image_id, label in seen.items()} == expected


@pytest.mark.usefixtures("ray_session")
def test_pixels_in_memory_are_the_images_in_id_order(pinned: Pinned) -> None:
    samples = read.pixel_samples(pinned, "val", SMALL, FEED)
    assert samples.ids == tuple(sorted(labelled(pinned, "val")))
    rows = scan.rows(pinned.table, pinned.version, ["image_id", "image"], {"split": "val"}).to_pylist()
    images = {r["image_id"]: r["image"] for r in rows}
    for image_id, pixels_HWC, label in zip(samples.ids, samples.inputs, samples.labels, strict=True):
        np.testing.assert_array_equal(pixels_HWC, decode(images[image_id], 32))
        assert pinned.classes[label] == labelled(pinned, "val")[image_id]


@pytest.mark.usefixtures("ray_session")
def test_features_are_computed_once_and_the_same_at_any_split_of_work(
    pinned: Pinned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    embed = read._embed
    monkeypatch.setattr(read, "_embed", lambda pinned, ids, *rest: asked.append(len(ids)) or embed(pinned, ids, *rest))
    together = read.feature_samples(pinned, ["train", "val"], FROZEN, FEED, str(tmp_path / "one"))
    apart = {}
    for split in ("val", "train"):  # the second call computes what the first left
        apart |= read.feature_samples(pinned, [split], FROZEN, FEED, str(tmp_path / "two"))
    counts = pinned.counts
    assert asked == [counts["train"] + counts["val"], counts["val"], counts["train"]]
    again = read.feature_samples(pinned, ["train", "val"], FROZEN, FEED, str(tmp_path / "two"))
    assert len(asked) == 3
    for split in ("train", "val"):
        assert together[split].inputs.shape == (counts[split], 1280)
        for other in (apart[split], again[split]):
            assert together[split].ids == other.ids and together[split].labels.tolist() == other.labels.tolist()
            np.testing.assert_allclose(together[split].inputs, other.inputs, rtol=1e-4, atol=1e-4)
    assert set(together["train"].ids) == labelled(pinned, "train").keys()


@pytest.mark.usefixtures("ray_session")
def test_a_label_outside_the_classes_is_named(half_labelled: TableConfig, pinned: Pinned, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Labels that the model does not know.*got \['warm'\].*Classes: cold, hot"):
        label_indices(["cold", "warm"], ("cold", "hot"))
    with pytest.raises(DataError, match=r"Labels that the model does not know.*'warm'"):
        read.pixel_samples(pin(half_labelled, FEED, ("cold", "hot")), "train", SMALL, FEED)


def test_what_cannot_train_a_classifier_is_refused(half_labelled: TableConfig) -> None:
    def where(**rows: str) -> TableConfig:
        return half_labelled.model_copy(update={"where": rows})

    with pytest.raises(DataError, match=r"no labels in column 'label'.*5 rows, all unlabelled"):
        pin(where(source="more"), FEED)
    with pytest.raises(DataError, match=r"one class only.*'warm'"):
        pin(where(label="warm"), FEED)
    with pytest.raises(DataError, match=r"no labelled rows in split 'valid'.*\['train', 'val'\]"):
        pin(half_labelled, FeedConfig(val="valid"))
    with pytest.raises(DataError, match=r"no column 'labl'.*Did you mean 'label'"):
        pin(half_labelled.model_copy(update={"columns": half_labelled.columns.model_copy(update={"label": "labl"})}), FEED)
    with pytest.raises(DataError, match=r"has no version 99"):
        pin(half_labelled.model_copy(update={"version": 99}), FEED)


@pytest.mark.usefixtures("ray_session")
def test_whole_numbers_are_labels_too(half_labelled: TableConfig, tmp_path: Path) -> None:
    """Somebody else's table says 0 and 1 where ours says cold and warm."""
    ours = ImageTable.open(half_labelled)
    rows = scan.rows(ours, ours.pin(), ["image_id", "label", "split", "image"], {"source": "ingest"})
    numbers = pc.cast(pc.equal(rows["label"], "warm"), pa.int64())
    append(str(tmp_path / "theirs"), rows.set_column(1, "label", numbers), "theirs")
    pinned = pin(TableConfig(uri=str(tmp_path / "theirs")), FEED)
    assert pinned.classes == ("0", "1")
    theirs = read.pixel_samples(pinned, "val", SMALL, FEED)
    again = read.pixel_samples(pin(half_labelled, FEED), "val", SMALL, FEED)
    assert theirs.ids == again.ids and theirs.labels.tolist() == again.labels.tolist()
