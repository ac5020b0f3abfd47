"""What a pinned version yields: every labelled row once, the same numbers however the work is
cut, features only once.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from raypipe.errors import DataError
from raypipe.feed import features
from raypipe.feed.dataset import FeedConfig, Pinned, pin
from raypipe.feed.feature_tasks import run_tasks
from raypipe.feed.feed import Source, fetch
from raypipe.feed.locate import locate
from raypipe.models.tasks import Task
from raypipe.models.zoo import ModelConfig
from raypipe.tables import scan
from raypipe.tables.table import ImageTable, TableConfig, append
from raypipe.timer import OutOfTime, interrupted

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


@pytest.mark.parametrize("split", ["train", "val"])
def test_every_labelled_row_is_located_once(pinned: Pinned, split: str) -> None:
    rows = locate(pinned, split, FEED)
    ids = rows.ids_of(range(len(rows)))
    assert {
        i: pinned.classes[label] for i, label in zip(ids, rows.labels_N, strict=True)
    } == labelled(pinned, split)
    assert len(ids) == len(set(ids)) == rows.sizes_F.sum() and len(rows.fragments) == len(
        rows.sizes_F
    )


@pytest.mark.usefixtures("ray_session")
def test_features_are_computed_once_and_the_same_at_any_split_of_work(
    pinned: Pinned, tmp_path: Path
) -> None:
    def made(store: str, *splits: str) -> dict[str, Source]:
        return features.feature_sources(pinned, list(splits), FROZEN, FEED, str(tmp_path / store))

    together, counts = made("one", "train", "val"), pinned.counts
    apart = {
        **made("two", "val"),
        **made("two", "train"),
    }  # the second computes what the first left
    again = made("two", "train", "val")
    for split in ("train", "val"):
        assert [made[split].decoded for made in (together, apart, again)] == [
            counts[split],
            counts[split],
            0,
        ]
        inputs, rows = fetch(together[split].inputs), fetch(together[split].rows)
        assert inputs.shape == (counts[split], 1280)
        for other in (apart[split], again[split]):
            assert (
                rows.ids == fetch(other.rows).ids
                and rows.labels_N.tolist() == fetch(other.rows).labels_N.tolist()
            )
            np.testing.assert_allclose(inputs, fetch(other.inputs), rtol=1e-4, atol=1e-4)
    # Validation may be the training split again.
    twice = made("two", "train", "train")["train"]
    np.testing.assert_allclose(fetch(twice.inputs), fetch(again["train"].inputs))
    assert set(fetch(together["train"].rows).ids.to_pylist()) == labelled(pinned, "train").keys()


@pytest.mark.usefixtures("ray_session")
def test_a_label_outside_the_classes_is_named(
    half_labelled: TableConfig, pinned: Pinned, tmp_path: Path
) -> None:
    with pytest.raises(
        DataError, match=r"Labels that the model does not know.*got \['warm'\].*Classes: cold, hot"
    ):
        Task("single_label", ("cold", "hot")).encode(["cold", "warm"])
    with pytest.raises(DataError, match=r"Labels that the model does not know.*'warm'"):
        locate(pin(half_labelled, FEED, ("cold", "hot")), "train", FEED)


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
        pin(
            half_labelled.model_copy(
                update={"columns": half_labelled.columns.model_copy(update={"label": "labl"})}
            ),
            FEED,
        )
    with pytest.raises(DataError, match=r"has no version 99"):
        pin(half_labelled.model_copy(update={"version": 99}), FEED)


@pytest.mark.usefixtures("ray_session")
def test_whole_numbers_are_labels_too(half_labelled: TableConfig, tmp_path: Path) -> None:
    """Somebody else's table says 0 and 1 where ours says cold and warm."""
    ours = ImageTable.open(half_labelled)
    rows = scan.rows(
        ours, ours.pin(), ["image_id", "label", "split", "image"], {"source": "ingest"}
    )
    numbers = pc.cast(pc.equal(rows["label"], "warm"), pa.int64())
    append(str(tmp_path / "theirs"), rows.set_column(1, "label", numbers), "theirs")
    pinned = pin(TableConfig(uri=str(tmp_path / "theirs")), FEED)
    assert pinned.classes == ("0", "1")
    theirs, again = locate(pinned, "val", FEED), locate(pin(half_labelled, FEED), "val", FEED)
    assert theirs.ids == again.ids and theirs.labels_N.tolist() == again.labels_N.tolist()


# In a process of its own: after hundreds of other tests the workers have not heard it.
@pytest.mark.share
@pytest.mark.chaos
@pytest.mark.parametrize("hears", [True, False])
@pytest.mark.usefixtures("ray_session")
def test_a_reading_that_a_budget_ends_leaves_no_task_behind(tmp_path: Path, hears: bool) -> None:
    """What followed waited for the CPUs: the end of the search, or the next cell of a notebook."""

    def slow(seconds: float) -> float:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            try:
                time.sleep(0.02)  # as between two batches, it can be interrupted
            except KeyboardInterrupt:
                if hears:
                    raise
        return seconds

    def meet(name: str) -> None:
        (tmp_path / name).touch()
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.02)

    # A worker may take longer to start on a busy host than anybody asks it to stop: two are here.
    list(run_tasks(meet, [("a",), ("b",)]))
    # So many run on two CPUs, and as many wait.
    with pytest.raises(OutOfTime), interrupted(2.0, lambda: OutOfTime("over")):
        list(run_tasks(slow, [(25.0,)] * 4))
    began = time.monotonic()
    assert list(run_tasks(slow, [(0.0,), (0.1,)])) == [0.0, 0.1]
    assert time.monotonic() - began < 10
