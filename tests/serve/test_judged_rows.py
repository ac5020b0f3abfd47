"""What slices and groups are made of keeps apart what the table keeps apart."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from PIL import Image

from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.registry import packing
from raypipe.registry.inputs import Addresses
from raypipe.registry.package import NOT_FINITE, Package, Reference
from raypipe.registry.served import ServedImageModel
from raypipe.serve import evaluation, judged_rows
from raypipe.tables.table import Columns
from tests.conftest import encode

LONG = 2**60  # next to it, a float64 tells numbers apart that differ by 256


@pytest.mark.parametrize(
    "column",
    [
        pa.array([LONG, LONG + 1, None]),
        pa.array([Decimal(LONG), Decimal(LONG + 1), None], pa.decimal128(20, 0)),
    ],
    ids=["long", "decimal"],
)
def test_long_numbers_name_groups_and_slices(column: pa.Array) -> None:
    """They ended an evaluation in a traceback, or two parts were one."""
    values = pa.chunked_array([column])
    expected = [str(LONG), str(LONG + 1), None]
    named = evaluation._values(judged_rows._slice_values(values)).tolist()
    assert [None if name is None else str(name) for name in named] == expected
    assert evaluation._values(judged_rows._texts(values)).tolist() == expected


def test_short_numbers_stay_numbers_and_nan_is_no_group() -> None:
    for kind in (pa.int32(), pa.int64(), pa.float64(), pa.decimal128(10, 2)):
        values = pa.chunked_array([pa.array([1.0, None, 3.0]).cast(kind)])
        found = evaluation._values(judged_rows._slice_values(values))
        assert found.dtype.kind == "f" and found[[0, 2]].tolist() == [1, 3]
    numbers = pa.chunked_array([pa.array([0.5, float("nan"), None])])
    assert judged_rows._texts(numbers).to_pylist() == ["0.5", None, None]


@pytest.fixture
def odd(tmp_path: Path) -> Package:
    """It has no finite answer to white images."""
    name, options = "file:tests.serve.odd_models:net", {"how": "nan"}
    cfg = ModelConfig(name=name, options=options, pretrained=False, mode="finetune", side_px=32)
    reference = Reference(np.zeros((4, 3)), np.full((4, 2), 0.5), tuple("wxyz"))
    made = packing.build(tmp_path, ImageModel(cfg, 2).eval(), cfg, ("a", "b"), reference, {})
    return Package(made, Package(made).seal)


def coloured(*colours: str) -> list[bytes | None]:
    return [encode(Image.new("RGB", (40, 40), colour)) for colour in colours]


def test_an_image_that_gives_nan_is_not_judged_and_the_others_are(odd: Package) -> None:
    """One such image ended each evaluation of its table; `predict` gives it a row with an error."""
    images = [*coloured("black", "white", "black"), b"no image"]
    batch = pa.table(
        {
            "image_id": ["1", "2", "3", "4"],
            "image": pa.array(images, pa.binary()),
            "label": ["a", "a", None, "b"],
        }
    )
    rows = judged_rows.judged(odd, batch, Columns(), [], most=4)
    assert rows["skipped"].to_pylist() == [
        None,
        "without a finite answer",
        "without a label",
        "do not decode",
    ]
    assert [scores is None for scores in rows["scores"].to_pylist()] == [False, True, True, True]


def test_an_image_that_gives_nan_costs_only_its_row_also_alone_and_in_mlflow(odd: Package) -> None:
    white, *others = coloured("white", *["black"] * 5, "white", "black")
    attempt = odd.attempt_finite([white, None, *others])
    assert {place for place, why in attempt.errors.items() if why == NOT_FINITE} == {0, 7}
    assert attempt.good == (2, 3, 4, 5, 6, 8) and 1 in attempt.errors
    # Alone in its batch it says nothing of the model.
    assert odd.attempt_finite([white]).errors == {0: NOT_FINITE}

    served = ServedImageModel()
    served.package, served.addresses = odd, Addresses()
    answers = served.predict(None, pd.DataFrame({"image": [white, others[0]]}))
    assert answers["error"].tolist() == [NOT_FINITE, ""] and answers["label"][0] == ""


def test_labels_that_are_numbers_make_slices_of_numbers(tmp_path: Path) -> None:
    """A table's labels are read as text: each number was a slice of its own, too small to show."""
    cfg = ModelConfig(name="small_cnn", pretrained=False, mode="finetune", task="regression")
    nothing = Reference(np.zeros((4, 64)), np.zeros((4, 1)), tuple("wxyz"))
    made = packing.build(tmp_path, ImageModel(cfg, 1).eval(), cfg, ("value",), nothing, {})
    labels = [*[f"{n}.5" for n in range(20)], None]
    columns = {"image_id": [str(n) for n in range(21)], "image": coloured(*["red"] * 21)}
    batch = pa.table(columns | {"label": labels, "note": labels})
    rows = judged_rows.judged(Package(made), batch, Columns(), ["label", "note"], most=0)
    found = evaluation._values(rows["column:label"])
    assert found.dtype.kind == "f" and found[:20].tolist() == [n + 0.5 for n in range(20)]
    # Another column of text is text.
    assert evaluation._values(rows["column:note"]).tolist() == labels
