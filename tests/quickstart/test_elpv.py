"""The solar cells as their authors describe them (Deitsch et al. 2019, table 1)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from raypipe.config import validate
from raypipe.errors import ConfigError
from raypipe.quickstart import elpv
from raypipe.tables.sources import SourceConfig, candidates

pytest.importorskip("elpv_dataset", reason="the solar cells are an extra")
SOURCE = {"kind": "python", "images": "raypipe.quickstart.elpv:cells"}


def listed(**settings: Any) -> list[Any]:
    (part,) = candidates(validate(SourceConfig, SOURCE | settings)).parts
    return part.candidates


def test_labels_are_classes_or_the_probabilities_they_follow_from() -> None:
    pairs = Counter((row["label"], round(3 * float(row["probability"]))) for row in elpv.cells()[1])
    assert pairs == {
        ("functional", 0): 1508,
        ("functional", 1): 295,
        ("defective", 2): 106,
        ("defective", 3): 715,
    }


def test_each_type_is_a_run_of_the_whole() -> None:
    whole = listed()
    mono, poly = (listed(where={"type": kind}) for kind in ("mono", "poly"))
    assert (len(mono), len(poly)) == (1074, 1550) and whole == mono + poly
    assert {c.label for c in listed(labelled=False)} == {None}


def test_what_0_1_called_them_is_answered_with_the_new_name() -> None:
    with pytest.raises(ConfigError, match=r"kind: python.*elpv:cells.*where: \{type: poly\}"):
        validate(SourceConfig, {"kind": "elpv", "type": "poly"})
