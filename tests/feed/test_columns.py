"""Labels and splits as small numbers say what the column says, however many rows and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.config import validate
from raypipe.errors import DataError
from raypipe.feed import columns, sampling
from raypipe.feed.columns import Columns, Labels, Texts
from raypipe.feed.dataset import FeedConfig, pin
from raypipe.feed.locate import locate
from raypipe.models.tasks import Task
from raypipe.tables import scan
from raypipe.tables.table import TableConfig


@pytest.mark.parametrize("different", [3, 255, 256, 65_535, 65_536, 70_000])
def test_texts_take_as_few_bytes_as_their_number_allows(different: int) -> None:
    texts = Texts(2 * different + 1)
    values = [f"v{i}" for i in range(different)]
    texts.add(slice(different), pa.array(values))
    texts.add(np.arange(different, 2 * different), pa.array(values[::-1]))
    assert texts.codes_P.itemsize == (1 if different < 256 else 2 if different < 65_536 else 4)
    read = [texts.values[code - 1] for code in texts.codes_P[:-1].tolist()]
    assert read == values + values[::-1] and texts.codes_P[-1] == 0


@settings(deadline=None)
@given(
    parts=st.lists(
        st.lists(st.sampled_from([None, "a", "b", "c", "d"]), max_size=6), min_size=1, max_size=5
    )
)
def test_texts_are_numbered_in_the_order_of_their_rows(parts: list[list[str | None]]) -> None:
    rows = [value for part in parts for value in part]
    texts = Texts(len(rows))
    done = 0
    for part in parts:
        texts.add(slice(done, done + len(part)), pa.array(part, pa.string()))
        done += len(part)
    assert texts.values == list(dict.fromkeys(value for value in rows if value is not None))
    read = [texts.values[code - 1] if code else None for code in texts.codes_P.tolist()]
    assert read == rows


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=12), data=st.data())
def test_places_are_those_of_the_chosen_rows(sizes: list[int], data: Any) -> None:
    """In parts of three row groups, some of them empty."""
    rows = sum(sizes)
    chosen = np.array(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)), bool)
    texts = Texts(rows)
    read = Columns([], np.cumsum(sizes), Labels(rows, "single_label", "label"), texts, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "GROUPS", 3)
        sizes_F, row_N = read.places(chosen)
    of_group = np.split(chosen, np.cumsum(sizes)[:-1])
    assert sizes_F.tolist() == [int(part.sum()) for part in of_group]
    assert row_N.tolist() == [row for part in of_group for row in np.flatnonzero(part).tolist()]
    assert row_N.dtype == np.uint8


LABELS: dict[str, list[Any]] = {
    "single_label": ["a", "b", None, " ", "1.0", "1"],
    "multi_label": ["a|b", "b|a", "", None, "c", "a"],
    "regression": ["1.5", "1.50", None, "-2", "1e3", " "],
    "probability": ["0.25", ".25", None, "1", "0", " "],
}


@pytest.mark.parametrize("kind", LABELS)
def test_a_split_is_located_as_its_rows_say(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleted rows, rows without a split, files that leave a split out; blocks of five rows."""
    monkeypatch.setattr(columns, "BLOCK", 5)
    monkeypatch.setattr(columns, "GROUPS", 2)
    rng = np.random.default_rng(3)
    uri, number = str(tmp_path / "t"), 0
    for rows in (7, 20, 1, 13):
        table = pa.table(
            {
                "image_id": [f"i{number + n}" for n in range(rows)],
                "image": pa.array([b"picture"] * rows, pa.binary()),
                "label": pa.array(rng.choice(np.array(LABELS[kind], object), rows), pa.string()),
                "split": pa.array(rng.choice(np.array(["train", "val", None], object), rows)),
            }
        )
        write_deltalake(uri, table, mode="append")
        number += rows
    DeltaTable(uri).delete("image_id in ('i3', 'i12', 'i27')")
    pinned = pin(TableConfig(uri=uri), FeedConfig(), kind=kind)

    meant = Task(kind, pinned.classes)
    for split in ("train", "val", "train+val"):
        expected_ids, expected_labels = [], []
        wanted = ["image_id", "label", "split"]
        for row in scan.rows(pinned.table, pinned.version, wanted).to_pylist():
            text = labelled(kind, row["label"])
            if row["split"] in split.split("+") and text is not None:
                expected_ids.append(row["image_id"])
                expected_labels.append(text)
        rows_of = locate(pinned, split, FeedConfig())
        assert rows_of.ids_of(range(len(rows_of))) == expected_ids
        labels = rows_of.labels(slice(None))
        expected = meant.encode(expected_labels)
        assert labels.dtype == expected.dtype and labels.tolist() == expected.tolist()
        if split in pinned.counts:
            assert pinned.counts[split] == len(rows_of)


def labelled(kind: Any, value: Any) -> str | None:
    from raypipe.models import labels

    return None if value is None else labels.read(kind, value).text


def test_a_label_that_is_none_stops_before_anything_is_read_twice(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    table = {"image_id": ["1", "2"], "image": [b"x", b"y"], "label": ["a", "nan"]}
    write_deltalake(uri, pa.table(table | {"split": ["train", "val"]}))
    with pytest.raises(DataError, match=r"Column 'label' has a value that is no label.*got 'nan'"):
        pin(validate(TableConfig, {"uri": uri}), FeedConfig())


@pytest.mark.parametrize("samples", [1, 7, 8, 9, 30])
def test_resampling_in_blocks_draws_what_it_draws_at_once(
    samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = np.random.default_rng(samples).random(samples) ** 3
    whole = sampling.resample(weights, np.random.default_rng(5))
    monkeypatch.setattr(sampling, "BLOCK", 8)
    assert sampling.resample(weights, np.random.default_rng(5)).tolist() == whole.tolist()
    assert whole.sum() == samples
