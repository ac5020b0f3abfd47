"""Which images people are asked to label."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from raypipe.watch import ask

SURE, UNSURE = [0.98, 0.01, 0.01], [0.4, 0.35, 0.25]


def test_unsure_and_unlike_images_come_first_and_copies_once() -> None:
    scores_NC = np.array([SURE, UNSURE, SURE, UNSURE, UNSURE])
    distance_N = np.array([1.0, 1.0, 4.0, 5.0, 5.0])
    hashes = ["a", "b", "c", "d", "d"]
    assert ask.worth_a_label(scores_NC, distance_N, hashes, 10) == [3, 1, 2, 0]
    assert ask.worth_a_label(scores_NC, distance_N, hashes, 1) == [3]
    assert ask.worth_a_label(scores_NC[:0], distance_N[:0], [], 5) == []


def test_of_numbers_novelty_alone_counts() -> None:
    numbers_N1 = np.array([[3.0], [9.0], [1.0]])
    assert ask.uncertainty(numbers_N1) is None
    assert ask.worth_a_label(numbers_N1, np.array([1.0, 1.5, 3.0]), list("abc"), 2) == [2, 1]


def test_what_is_no_number_is_asked_for_and_leaves_the_others_their_places() -> None:
    scores_NC = np.array([SURE, UNSURE, [np.nan] * 3, SURE])
    distance_N = np.array([1.0, 9.0, np.nan, 4.0])
    assert ask.worth_a_label(scores_NC, distance_N, list("abcd"), 4) == [2, 1, 3, 0]


@pytest.mark.parametrize("text", ["=1", " =1", "\n=1", "\t1", "\ufeff=1", "\uff1d1", "-1", "@a"])
def test_no_cell_is_computed(text: str) -> None:
    assert ask._plain(text) == "'" + text
    assert ask._plain("a" + text) == "a" + text


def test_the_file_is_plain_text_for_a_spreadsheet(tmp_path: Path) -> None:
    file = tmp_path / "to-label.csv"
    ids, labels = ["=HYPERLINK(1)", None, 'x,"y'], ["+1", "b", "c"]
    scores_NC = np.array([SURE, UNSURE, SURE])
    ask.write(file, [1, 0, 2], ids, list("abc"), labels, scores_NC, np.array([1.0, 2.0, 3.0]))
    rows = list(csv.DictReader(file.open()))
    assert [row["file"] for row in rows] == ["", "'=HYPERLINK(1)", 'x,"y']
    assert [row["sha256"] for row in rows] == ["b", "a", "c"]
    assert rows[0]["uncertainty"] == "0.950" and rows[0]["times_as_far"] == "2.00"
    assert rows[1]["champion_says"] == "'+1" and {row["label"] for row in rows} == {""}
