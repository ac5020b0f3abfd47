"""A label column means the same whether a table is used directly or ingested first."""

from __future__ import annotations

from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from raypipe.config import validate
from raypipe.errors import DataError
from raypipe.models.labels import Kind
from raypipe.tables import label_column, scan
from raypipe.tables.sources import SourceConfig, candidates
from raypipe.tables.table import ImageTable

COLUMNS: list[tuple[Kind, pa.DataType, list[Any]]] = [
    ("single_label", pa.string(), ["1.0", "1", "", "  ", None, "True", " é ", "é", "01"]),
    ("single_label", pa.float64(), [1.0, 1e15, 1e16, 0.1, -0.0, None]),
    ("single_label", pa.float32(), [0.1, 1 / 3, 2.0]),
    ("single_label", pa.decimal128(6, 2), [Decimal("2.10"), Decimal("2.00"), None]),
    ("single_label", pa.bool_(), [True, False, None]),
    ("single_label", pa.date32(), [date(2026, 11, 1)]),
    ("single_label", pa.timestamp("us", "UTC"), [datetime(2026, 11, 1, tzinfo=timezone.utc)]),
    ("multi_label", pa.string(), ["b|a", "", None, "a||a", "1.0|1"]),
    ("multi_label", pa.list_(pa.string()), [["b", "a"], [], None, [" a", "True"]]),
    ("multi_label", pa.list_(pa.int64()), [[10, 9], [9, 10], None]),
    ("multi_label", pa.list_(pa.float64()), [[10.0, 1e15], [0.5]]),
    ("probability", pa.float32(), [1 / 3, 0.0, 1.0, None]),
    ("probability", pa.string(), ["0.50", "", "1"]),
    ("regression", pa.float64(), [1e15, -2.5, None]),
]


def labels_of(folder: Path, kind: Kind) -> tuple[list[str | None], list[str | None]]:
    """The labels as ingest lists them, and as the table itself is read."""
    source = {"kind": "delta", "images": str(folder), "labelled": True, "task": kind}
    parts = candidates(validate(SourceConfig, source)).parts
    ingested = [candidate.label for part in parts for candidate in part.candidates]
    table = ImageTable(str(folder))
    column = scan.rows(table, table.pin(), ["label"])["label"]
    return ingested, label_column.read(column, kind, "label").to_pylist()


def write(folder: Path, held: pa.DataType, labels: list[Any]) -> Path:
    images = [b"%d" % i for i in range(len(labels))]
    write_deltalake(str(folder), pa.table({"image": images, "label": pa.array(labels, held)}))
    return folder


@pytest.mark.parametrize(("kind", "held", "labels"), COLUMNS)
def test_a_table_used_directly_has_the_labels_that_ingest_would_give_it(
    kind: Kind, held: pa.DataType, labels: list[Any], tmp_path: Path
) -> None:
    ingested, direct = labels_of(write(tmp_path / "t", held, labels), kind)
    assert direct == ingested
    assert any(label is not None for label in direct)


@pytest.mark.parametrize(
    ("kind", "held", "label"),
    [
        ("single_label", pa.float64(), float("nan")),
        ("single_label", pa.string(), "nan"),
        ("single_label", pa.string(), "['a']"),
        ("probability", pa.string(), "high"),
        ("probability", pa.float64(), 1.5),
        ("regression", pa.float64(), float("inf")),
    ],
)
def test_what_ingest_quarantines_is_refused_by_name(
    kind: Kind, held: pa.DataType, label: Any, tmp_path: Path
) -> None:
    table = ImageTable(str(write(tmp_path / "t", held, [label])))
    column = scan.rows(table, table.pin(), ["label"])["label"]
    says = rf"Column 'label' has a value that is no label of model\.task={kind}: .*table\.where"
    with pytest.raises(DataError, match=says):
        label_column.read(column, kind, "label")
