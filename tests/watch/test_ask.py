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


def test_what_has_a_label_is_not_asked_for_and_neither_are_its_copies() -> None:
    scores_NC = np.tile(UNSURE, (5, 1))
    distance_N, hashes = np.array([1.0, 2.0, 3.0, 4.0, 5.0]), ["a", "b", "c", "d", "d"]
    for features_ND in (None, crowd(0, 5)):
        for most in (2, 9):
            asked = ask.worth_a_label(
                scores_NC, distance_N, hashes, most, features_ND, labelled={"d", "b"}
            )
            assert asked == [2, 0]
    every = set(hashes)
    assert ask.worth_a_label(scores_NC, distance_N, hashes, 2, crowd(0, 5), labelled=every) == []


def test_of_numbers_novelty_alone_counts() -> None:
    numbers_N1 = np.array([[3.0], [9.0], [1.0]])
    assert ask.uncertainty(numbers_N1) is None
    assert ask.worth_a_label(numbers_N1, np.array([1.0, 1.5, 3.0]), list("abc"), 2) == [2, 1]


def test_of_tags_the_least_sure_one_counts() -> None:
    """Of two certain tags the two best were equally likely: the surest images were asked for."""
    scores_NC = np.array([[0.99, 0.99, 0.01], [0.01, 0.01, 0.01], [0.99, 0.5, 0.01], [0.9, 0.2, 0]])
    compared_N2 = ask.compared("multi_label", scores_NC)
    assert ask.worth_a_label(compared_N2, np.ones(4), list("abcd"), 4)[:2] == [2, 3]
    assert ask.uncertainty(compared_N2) == pytest.approx([0.02, 0.02, 1, 0.4])
    assert ask.compared("single_label", scores_NC) is scores_NC
    assert ask.compared("regression", scores_NC).shape == (4, 1)


def test_what_is_no_number_is_asked_for_and_leaves_the_others_their_places() -> None:
    scores_NC = np.array([SURE, UNSURE, [np.nan] * 3, SURE])
    distance_N = np.array([1.0, 9.0, np.nan, 4.0])
    assert ask.worth_a_label(scores_NC, distance_N, list("abcd"), 4) == [2, 1, 3, 0]


def crowd(copies: int, others: int, seed: int = 0) -> np.ndarray:
    """Features: one picture `copies` times with a little noise, then `others` different ones."""
    rng = np.random.default_rng(seed)
    alike_ND = rng.normal(size=(1, 16)) + 1e-3 * rng.normal(size=(copies, 16))
    return np.concatenate([alike_ND, rng.normal(size=(others, 16))])


def test_nearly_the_same_picture_is_not_asked_for_again_and_again() -> None:
    """60 of the most valuable images show one thing: without features all of them are asked for."""
    features_ND = crowd(60, 90)
    value_N = np.r_[np.full(60, 9.0), np.linspace(1, 2, 90)]
    scores_NC, hashes = np.tile(UNSURE, (150, 1)), [str(n) for n in range(150)]
    before = ask.worth_a_label(scores_NC, value_N, hashes, 20)
    after = ask.worth_a_label(scores_NC, value_N, hashes, 20, features_ND)
    assert sum(row < 60 for row in before) == 20
    assert sum(row < 60 for row in after) == 1 and len(set(after)) == 20
    again = ask.worth_a_label(scores_NC, value_N, hashes, 20, features_ND)
    assert again == after
    assert ask.worth_a_label(scores_NC, value_N, hashes, 20, features_ND, seed=1) != after


def test_the_most_valuable_is_always_asked_for_and_value_still_counts() -> None:
    features_ND = crowd(0, 2000)
    value_N = np.random.default_rng(1).permutation(2000).astype(float)
    scores_NC, hashes = np.tile(UNSURE, (2000, 1)), [str(n) for n in range(2000)]
    asked = ask.worth_a_label(scores_NC, value_N, hashes, 50, features_ND)
    assert asked[0] == value_N.argmax()
    assert min(value_N[asked]) >= 2000 - ask.POOL * 50, "none but of the most valuable"
    assert (np.diff(value_N[asked]) < 0).all(), "the list is in the order of values"


def test_fewer_images_than_asked_for_and_none() -> None:
    features_ND, distance_N = crowd(2, 2), np.arange(4.0)
    scores_NC = np.tile(UNSURE, (4, 1))
    assert ask.worth_a_label(scores_NC, distance_N, list("abcd"), 9, features_ND) == [3, 2, 1, 0]
    assert ask.worth_a_label(scores_NC, distance_N, list("abcd"), 0, features_ND) == []
    nothing = np.empty((0, 16))
    assert ask.worth_a_label(scores_NC[:0], distance_N[:0], [], 5, nothing) == []


def test_copies_by_hash_are_asked_for_once_and_equal_features_last() -> None:
    features_ND = np.ones((6, 3))
    features_ND[5] = 2
    distance_N = np.array([9.0, 9.0, 8.0, 7.0, 6.0, 1.0])
    scores_NC = np.tile(UNSURE, (6, 1))
    hashes = ["a", "a", "b", "c", "d", "e"]
    assert ask.worth_a_label(scores_NC, distance_N, hashes, 2, features_ND) == [0, 5]
    # All neighbourhoods are asked for: the most valuable of the rest follow.
    assert ask.worth_a_label(scores_NC, distance_N, hashes, 4, features_ND) == [0, 2, 3, 5]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_features_that_are_no_numbers_are_one_neighbourhood(bad: float) -> None:
    features_ND = crowd(0, 60)
    features_ND[:30, 2] = bad
    distance_N = np.r_[np.full(30, np.nan), np.ones(30)]
    scores_NC, hashes = np.tile(UNSURE, (60, 1)), [str(n) for n in range(60)]
    asked = ask.worth_a_label(scores_NC, distance_N, hashes, 10, features_ND)
    assert sum(row < 30 for row in asked) == 1 and len(asked) == 10
    features_ND[:] = bad
    assert len(ask.worth_a_label(scores_NC, distance_N, hashes, 10, features_ND)) == 10


def test_huge_and_constant_features_and_one_class() -> None:
    features_ND = crowd(0, 40)
    features_ND[3] = 1e300
    one_N1, hashes = np.ones((40, 1)), [str(n) for n in range(40)]
    assert len(set(ask.worth_a_label(one_N1, np.arange(40.0), hashes, 9, features_ND))) == 9
    same_ND = np.zeros((40, 4), np.float32)
    assert ask.worth_a_label(one_N1, np.arange(40.0), hashes, 3, same_ND) == [39, 38, 37]
    assert len(ask.worth_a_label(one_N1, np.arange(40.0), hashes, 3, same_ND[:, :0])) == 3


def test_one_image_with_a_huge_feature_leaves_the_others_different() -> None:
    """Ten things, thirty pictures each. Beside 1e9 all their features had counted as constant."""
    rng = np.random.default_rng(0)
    things_ND = np.repeat(rng.normal(size=(10, 16)), 30, 0) + rng.normal(size=(300, 16)) * 0.01
    features_ND = np.vstack([things_ND, np.ones((1, 16))])
    features_ND[:, 0] = 0
    features_ND[-1, 0] = 1e9
    drawn = ask.spread(features_ND, np.ones(301), 12, 0)
    assert len({row // 30 for row in drawn}) >= 9


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
    assert [row["image_id"] for row in rows] == ["", "'=HYPERLINK(1)", 'x,"y']
    assert {row["path"] for row in rows} == {""}
    assert [row["sha256"] for row in rows] == ["b", "a", "c"]
    assert rows[0]["uncertainty"] == "0.950" and rows[0]["times_as_far"] == "2.00"
    assert rows[1]["champion_says"] == "'+1" and {row["label"] for row in rows} == {""}
    paths = {0: "night/1.png", 1: None, 2: "=1.png"}
    ask.write(file, [1, 0, 2], ids, list("abc"), labels, scores_NC, np.ones(3), paths)
    rows = list(csv.DictReader(file.open()))
    assert [row["path"] for row in rows] == ["", "night/1.png", "'=1.png"]
