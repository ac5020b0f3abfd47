"""Labels of every task, as a Delta table holds them, come out of it as targets; a table of
another task is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from raypipe.errors import DataError
from raypipe.feed.dataset import FeedConfig, pin
from raypipe.feed.locate import locate
from raypipe.models.tasks import Kind
from raypipe.tables.table import TableConfig

FEED = FeedConfig()
CASES: list[tuple[Kind, pa.DataType, list[Any], tuple[str, ...], list[Any]]] = [
    ("single_label", pa.int64(), [3, 1, None, 3], ("1", "3"), [1, 0, 1]),
    (
        "multi_label",
        pa.list_(pa.string()),
        [["dent", "crack"], [], None, ["dent"]],
        ("crack", "dent"),
        [[1, 1], [0, 0], [0, 1]],
    ),
    (
        "multi_label",
        pa.string(),
        ["dent|crack", "", None, "dent"],
        ("crack", "dent"),
        [[1, 1], [0, 0], [0, 1]],
    ),
    # What ingest reads as one class is one class, and a blank is unlabelled.
    ("single_label", pa.string(), ["1.0", "1", " ", "True"], ("1", "true"), [0, 0, 1]),
    ("single_label", pa.float64(), [1.0, 1e15, None, 1.0], ("1", "1000000000000000"), [0, 1, 0]),
    (
        "multi_label",
        pa.string(),
        ["b|a", " a | b ", None, "b"],
        ("a", "b"),
        [[1, 1], [1, 1], [0, 1]],
    ),
    ("probability", pa.string(), ["0.5", "1", "", "0"], ("value",), [[0.5], [1], [0]]),
    ("probability", pa.float64(), [0.0, 1.0, None, 0.25], ("value",), [[0], [1], [0.25]]),
    ("regression", pa.string(), ["-12", "1e3", None, "0.5"], ("value",), [[-12], [1000], [0.5]]),
]


def held_blank(kind: Kind, label: Any) -> bool:
    """Only under multi_label is a blank a label: an image without tags."""
    return label == "" and kind != "multi_label"


def table(folder: Path, kind: pa.DataType, labels: list[Any]) -> TableConfig:
    rows = len(labels)
    columns = {
        "image_id": pa.array([str(i) for i in range(2 * rows)]),
        "image": pa.array([b"picture"] * 2 * rows),
        "label": pa.array(labels * 2, kind),
        "split": pa.array(["train"] * rows + ["val"] * rows),
    }
    write_deltalake(str(folder), pa.table(columns))
    return TableConfig(uri=str(folder))


@pytest.mark.parametrize(("kind", "held", "labels", "classes", "encoded"), CASES)
def test_labels_come_out_as_targets_and_unlabelled_rows_stay_behind(
    kind: Kind,
    held: pa.DataType,
    labels: list[Any],
    classes: tuple[str, ...],
    encoded: list[Any],
    tmp_path: Path,
) -> None:
    pinned = pin(table(tmp_path / "t", held, labels), FEED, kind=kind)
    assert pinned.classes == classes and pinned.counts == {"train": 3, "val": 3, "test": 0}
    rows = locate(pinned, "train", FEED)
    unlabelled = [
        i for i, label in enumerate(labels) if label in (None, " ") or held_blank(kind, label)
    ]
    assert rows.ids_of(range(len(rows))) == [str(i) for i in range(4) if i not in unlabelled]
    np.testing.assert_array_equal(rows.labels_N, encoded)


@pytest.mark.parametrize(
    ("kind", "held", "labels", "says"),
    [
        (
            "probability",
            pa.string(),
            ["functional", "defective"],
            r"no label of model\.task=probability: 'functional' is "
            r"not a number",
        ),
        ("probability", pa.float32(), [0.5, 7.0], r"7 is not from 0 to 1.*model\.task=regression"),
        (
            "multi_label",
            pa.float32(),
            [0.5, 7.0],
            r"holds one label a row.*got 'float'.*a list or a text like a\|b",
        ),
        ("multi_label", pa.string(), ["", ""], r"no tag on any image"),
        (
            "multi_label",
            pa.list_(pa.string()),
            [["a"], ["b", None]],
            r"'label' cannot be read as tags.*null in a list",
        ),
        (
            "multi_label",
            pa.list_(pa.string()),
            [["a"], ["b|c"]],
            r"'label' cannot be read as tags.*'b\|c'",
        ),
        (
            "multi_label",
            pa.list_(pa.float64()),
            [[1.0], [float("nan")]],
            r"'label' cannot be read as tags.*'nan'",
        ),
        (
            "multi_label",
            pa.list_(pa.int8()),
            [[0, 1, 0], [1, 0, 0]],
            r"'label' holds one number a class.*\[1\], and not",
        ),
        ("multi_label", pa.list_(pa.bool_()), [[True], [False]], r"holds one number a class"),
        (
            "single_label",
            pa.string(),
            ["a", "NaN", "b"],
            r"single_label: NaN is how",
        ),
        (
            "multi_label",
            pa.string(),
            ["a", "['a', 'b']"],
            r"looks like a list that was written as text",
        ),
        (
            "single_label",
            pa.float64(),
            [1.0, 2.0, float("nan")],
            r"no label of .*: nan is how a number that is none is written",
        ),
        ("regression", pa.float64(), [1.0, 1e300], r"got '1e\+300.*finite"),
        (
            "single_label",
            pa.list_(pa.string()),
            [["a"], ["b"]],
            r"several labels a row.*list.*model\.task=multi_label",
        ),
    ],
)
def test_a_table_of_another_task_is_refused_before_anything_is_decoded(
    kind: Kind, held: pa.DataType, labels: list[Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=says):
        pin(table(tmp_path / "t", held, labels), FEED, kind=kind)
