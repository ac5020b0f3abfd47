"""The solar cells as their authors describe them (Deitsch et al. 2019, table 1)."""

from __future__ import annotations

from collections import Counter

import pytest

from raypipe.errors import DataError
from raypipe.tables.sources import elpv

pytest.importorskip("elpv_dataset", reason="the solar cells are an extra")


def test_labels_are_classes_or_the_probabilities_they_follow_from() -> None:
    (classes,), (probabilities,) = elpv.cells("all", "label"), elpv.cells("all", "probability")
    assert [c.path for c in classes.candidates] == [c.path for c in probabilities.candidates]
    pairs = Counter(
        (c.label, round(3 * float(p.label or "nan")))
        for c, p in zip(classes.candidates, probabilities.candidates, strict=True)
    )
    assert pairs == {
        ("functional", 0): 1508,
        ("functional", 1): 295,
        ("defective", 2): 106,
        ("defective", 3): 715,
    }


def test_each_type_is_a_run_of_the_whole() -> None:
    whole, mono, poly = (
        elpv.cells(kind, "label")[0].candidates for kind in ("all", "mono", "poly")
    )
    assert (len(mono), len(poly)) == (1074, 1550) and whole == mono + poly
    assert {c.label for c in elpv.cells("all", None)[0].candidates} == {None}


def test_another_label_is_refused() -> None:
    with pytest.raises(DataError, match=r"no 'colour'.*label and probability"):
        elpv.cells("all", "colour")
