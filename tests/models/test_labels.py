"""One place decides what a label is: the same value reads the same however it was written, and
nothing is guessed.
"""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.models.labels import NUMERIC, Kind, name, read
from raypipe.models.tasks import Task

SAME: list[tuple[Kind, list[Any], str | None]] = [
    (
        "single_label",
        [1, 1.0, "1", "1.0", " 1 ", np.int64(1), np.float32(1), Decimal("1.0"), b"1"],
        "1",
    ),
    ("single_label", [True, "True", "true", "TRUE", np.bool_(True)], "true"),
    ("single_label", [0.1, np.float32(0.1), np.float16(0.1), "0.1", Decimal("0.10")], "0.1"),
    ("single_label", [-0.0, 0.0, 0, "-0.0", "0"], "0"),
    ("single_label", ["caf\u00e9", "cafe\u0301", "caf\u00e9".encode()], "caf\u00e9"),
    ("single_label", [None, "", "  "], None),
    ("single_label", [date(2026, 11, 1), "2026-11-01", np.datetime64("2026-11-01")], "2026-11-01"),
    ("single_label", [PurePosixPath("a/b"), "a/b"], "a/b"),
    (
        "multi_label",
        [["b", "a"], ("a", "b"), "b|a", "a|b|a", " a || b ", np.array(["a", "b"]), ["a", "", "b"]],
        "a|b",
    ),
    ("multi_label", [[], "", "|", [""]], ""),
    ("multi_label", [[1.0], ["1"], "1.0", 1], "1"),
    ("multi_label", [None], None),
    ("probability", [1, 1.0, "1", "1.0", "1e0", "+1", np.float32(1)], "1"),
    ("probability", [1 / 3, "0.3333333333333333"], "0.3333333333333333"),
    ("regression", [10**18, 1e18, "1000000000000000000", "1e18"], "1e+18"),
    ("regression", [None, "", " "], None),
]


@pytest.mark.parametrize(("kind", "values", "text"), SAME)
def test_the_same_value_reads_the_same_however_it_was_written(
    kind: Kind, values: list[Any], text: str | None
) -> None:
    assert {read(kind, value) for value in values} == {(text, "")}


def test_texts_that_only_look_like_numbers_stay_what_they_are() -> None:
    texts = ["01", "1.00", "2.10", "2.1", "1e3", "+1", "None", "null", "NA", "a|b", "(none)", "yes"]
    assert [read("single_label", text).text for text in texts] == texts


@pytest.mark.parametrize(
    ("kind", "value", "why"),
    [
        ("single_label", float("nan"), "nan is not a name"),
        ("single_label", np.datetime64("NaT"), "NaT is not a name"),
        ("single_label", object(), "a value of type object is no name"),
        ("single_label", len, "a value of type builtin_function_or_method is no name"),
        ("multi_label", ["a", object()], "a value of type object is no name"),
        ("probability", object(), ""),
        ("regression", object(), ""),
        ("single_label", "NaN", "NaN is how a number that is none is written"),
        ("single_label", ["a"], "is a list; model.task=multi_label"),
        ("single_label", [], "is a list"),
        ("single_label", {"a": 1}, "is not one name"),
        ("single_label", "['a', 'b']", "looks like a list that was written as text"),
        ("single_label", "\ud800", "not valid Unicode"),
        ("single_label", "caf\xe9".encode("latin-1"), "not UTF-8"),
        ("single_label", "a\0b", "null character"),
        ("multi_label", ["a", None], "holds a null"),
        ("multi_label", ["a", float("nan")], "nan is not a name"),
        ("multi_label", ["a|b"], "holds the bar"),
        ("multi_label", [0, 1, 0], "one number a class"),
        ("multi_label", [True, False], "one number a class"),
        ("multi_label", [["a"]], "is not one name"),
        ("multi_label", '["a","b"]', "looks like a list"),
        ("multi_label", float("nan"), "nan is not a name"),
        ("probability", 1.01, "not from 0 to 1; model.task=regression"),
        ("probability", True, "is not a number"),
        ("probability", "1,5", "is not a number"),
        ("probability", "50%", "is not a number"),
        ("regression", "1_000", "is not a number"),
        ("regression", "inf", "is not a number"),
        ("regression", float("nan"), "not a finite number"),
        ("regression", 1e39, "not a finite number of 32 bits"),
        ("regression", 10**400, "not a finite number"),
        ("regression", [], "is not a number"),
    ],
)
def test_what_cannot_be_told_has_a_reason_and_no_label(kind: Kind, value: Any, why: str) -> None:
    said = read(kind, value)
    assert said.text is None and why in said.why


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary(max_size=8)
    | st.decimals(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=8,
)


@given(
    kind=st.sampled_from(["single_label", "multi_label", "probability", "regression"]), value=VALUES
)
def test_any_value_is_a_label_that_arrow_can_keep_or_unlabelled_or_has_a_reason(
    kind: Kind, value: Any
) -> None:
    said = read(kind, value)
    assert not (said.why and said.text is not None)
    if said.text is not None:
        assert said.text.encode().decode() == said.text
        assert (
            read(kind, said.text) == said
        )  # a label read again, as from our own table, is the same
        task = Task.of(kind, [said.text])
        if kind in NUMERIC or task.classes:
            assert np.isfinite(task.encode([said.text])).all()


@given(VALUES)
def test_a_split_is_a_name_too(value: Any) -> None:
    said = name(value)
    assert said.text is None or (said.text.strip() == said.text != "" and not said.why)
