"""Splits are a pure function of the image's family: nothing moves, twins stay together, shares hold
on average.
"""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.tables.near_duplicates import Groups, most_in_group
from raypipe.tables.split import CERTAIN, Placed, Strata, draw, missing, position

FRACTIONS = {"train": 0.7, "val": 0.15, "test": 0.15}
LOOKS = st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=12, unique=True)


def flipped(look: bytes, bits: list[int]) -> bytes:
    value = int.from_bytes(look, "big")
    for bit in bits:
        value ^= 1 << bit
    return value.to_bytes(32, "big")


def random_look(seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(32)


def name_of(look: bytes) -> str:
    return hashlib.sha256(look).hexdigest()


@given(st.text(), st.text())
def test_a_position_lies_in_0_to_1_and_depends_on_nothing_but_its_arguments(
    family: str, salt: str
) -> None:
    assert 0 <= position(family, salt) < 1
    assert position(family, salt) == position(family, salt)


@given(
    st.text(), st.dictionaries(st.text(min_size=1), st.floats(1e-3, 1e3), min_size=1, max_size=5)
)
def test_every_family_gets_one_of_the_splits_at_any_scale_of_the_shares(
    family: str, fractions: dict[str, float]
) -> None:
    drawn = draw(family, fractions)
    assert drawn in fractions
    assert draw(family, {name: share * 4 for name, share in fractions.items()}) == drawn


def test_shares_hold_on_average_in_every_class() -> None:
    drawn = Counter((i % 2, draw(f"family {i}", FRACTIONS)) for i in range(20_000))
    for label in (0, 1):
        for name, share in FRACTIONS.items():
            assert drawn[label, name] / 10_000 == pytest.approx(
                share, abs=0.02
            )  # four standard deviations


def test_a_salt_draws_independently() -> None:
    both = Counter(
        (draw(f"{i}", FRACTIONS), draw(f"{i}", FRACTIONS, "share")) for i in range(20_000)
    )
    assert both["train", "train"] / 20_000 == pytest.approx(0.49, abs=0.02)


@given(st.lists(st.text(), unique=True, min_size=1), st.randoms())
def test_a_draw_depends_on_neither_order_nor_company(families: list[str], random: object) -> None:
    alone = {f: draw(f, FRACTIONS) for f in families}
    random.shuffle(families)  # type: ignore[attr-defined]
    assert {
        f: draw(f, FRACTIONS) for f in families[: len(families) // 2 + 1]
    }.items() <= alone.items()


@settings(deadline=None)
@given(LOOKS, LOOKS)
def test_nothing_moves_when_rows_are_added(before: list[bytes], after: list[bytes]) -> None:
    """A later ingest starts from what the table holds: old rows keep their family, and with it
    their split.
    """
    first = Groups()
    kept = {look: first.join(name_of(look), look) for look in before}
    second = Groups()
    assert {look: second.join(name_of(look), look, family) for look, family in kept.items()} == kept
    together = Groups()
    for look in [*before, *(a for a in after if a not in kept)]:
        family = together.join(name_of(look), look)
        assert family == (kept[look] if look in kept else second.join(name_of(look), look))


@settings(deadline=None)
@given(
    st.binary(min_size=32, max_size=32),
    st.sets(st.integers(0, 255), max_size=6),
    st.integers(0, 2**32),
)
def test_a_near_duplicate_shares_the_split_whatever_bits_differ(
    look: bytes, bits: set[int], seed: int
) -> None:
    families = Groups(max_bits=6)
    for i in range(20):
        families.join(f"other {i}", random_look(seed + i))
    first = families.join("first", look)
    assert families.join("near", flipped(look, sorted(bits))) == first
    assert draw(first, FRACTIONS) == draw(families.join("again", look), FRACTIONS)


@settings(deadline=None)
@given(st.binary(min_size=32, max_size=32), st.sets(st.integers(0, 255), min_size=7, max_size=30))
def test_an_image_further_away_founds_its_own_family(look: bytes, bits: set[int]) -> None:
    families = Groups(max_bits=6)
    families.join("first", look)
    assert families.join("far", flipped(look, sorted(bits))) == "far"


@pytest.mark.parametrize("max_bits", [0, 6, 15])
def test_every_pair_within_the_limit_is_found(max_bits: int) -> None:
    """The band index against brute force: differing bits spread over as many bands as they can."""
    families = Groups(max_bits)
    for seed in range(30):
        look = random_look(seed)
        families.join(f"{seed}", look)
        spread = flipped(look, [16 * band + seed % 16 for band in range(max_bits)])
        assert families.join(f"near {seed}", spread) == f"{seed}"


def test_a_family_grows_by_its_nearest_member() -> None:
    look = random_look(1)
    families = Groups(max_bits=6)
    assert [
        families.join(n, flipped(look, list(range(k)))) for n, k in (("a", 0), ("b", 5), ("c", 10))
    ] == ["a"] * 3
    assert families.join("of another run", random_look(2), "known") == "known"
    assert families.join("d", random_look(2)) == "known"


def test_what_lies_between_two_groups_joins_the_nearest_and_the_other_is_named() -> None:
    look = random_look(3)
    between, bits = flipped(look, list(range(6))), list(range(10))
    families = Groups(max_bits=6)
    assert families.join("a", look) == "a"
    assert families.join("b", flipped(look, bits)) == "b"
    assert families.between == {}
    assert families.join("c", between) == "b"
    assert families.between == {between: ["a"]}
    # An equal one has the same others.
    assert families.join("d", between) == "b"
    assert families.between == {between: ["a"]}


def test_a_limit_that_the_index_cannot_keep_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_bits 16 must be below 16"):
        Groups(16)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from(["a", "b", None]), min_size=1, max_size=300), st.text(max_size=3))
def test_strata_keep_the_shares_of_every_label_at_every_point(
    labels: list[str | None], salt: str
) -> None:
    strata, seen = Strata(), Counter[tuple[str | None, str]]()
    for i, label in enumerate(labels):
        drawn = strata.draw(f"family {i}", label, FRACTIONS, salt)
        strata.add(f"family {i}", label, drawn)
        seen[label, drawn] += 1
        for name, share in FRACTIONS.items():
            images = sum(seen[label, other] for other in FRACTIONS)
            assert abs(seen[label, name] - share * images) < len(FRACTIONS)


def test_strata_are_drawn_anew_by_each_salt_and_twins_stay_together() -> None:
    def drawn(salt: str) -> list[str]:
        strata = Strata()
        for i in range(400):
            strata.add(f"{i % 300}", "a", strata.draw(f"{i % 300}", "a", FRACTIONS, salt))
        return [strata.draw(f"{i}", "a", FRACTIONS, salt) for i in range(300)]

    first, second = drawn("1"), drawn("2")
    assert first == drawn("1")
    assert (
        sum(a == b for a, b in zip(first, second, strict=True)) < 210
    )  # 0.7 ** 2 + 2 * 0.15 ** 2 of 300 by chance: 160


def test_a_family_takes_at_most_its_share_and_what_comes_then_stands_for_itself() -> None:
    """A table in which everything looks alike, known rows included."""
    look = random_look(1)
    looks = [flipped(look, [i % 256, i // 256]) for i in range(100)]
    families = Groups(max_bits=6, most=20)
    found = [families.join(f"{i}", each) for i, each in enumerate(looks)]
    assert found == ["0"] * 20 + [f"{i}" for i in range(20, 100)]
    assert families.refused == 80
    half = Groups(max_bits=6, most=20)
    for i in range(50):
        half.join(f"{i}", looks[i], found[i])
    assert [half.join(f"{i}", looks[i]) for i in range(50, 100)] == found[
        50:
    ]  # a later ingest, or one that was killed


@pytest.mark.parametrize(
    ("images", "fractions", "most"),
    [(1000, FRACTIONS, 75), (20, FRACTIONS, 16), (9, {"test": 1}, None)],
)
def test_the_largest_family_is_half_of_the_smallest_split(
    images: int, fractions: dict[str, float], most: int | None
) -> None:
    assert most_in_group(images, fractions) == most


def test_a_gap_is_certain_when_luck_cannot_be_it() -> None:
    def gaps(drawn: Placed, have: Placed) -> list[tuple[str, str | None, bool]]:
        return [
            (m.split, m.label, m.chance < CERTAIN) for m in missing(drawn, drawn + have, FRACTIONS)
        ]

    every = Counter({(label, name): 100 for label in "ab" for name in FRACTIONS})
    assert gaps(every, Counter()) == []
    swallowed: Placed = Counter({("a", "test"): 500, ("b", "test"): 500})
    assert gaps(swallowed, Counter()) == [("train", None, True), ("val", None, True)]
    assert gaps(swallowed, Counter({("a", "train"): 1, ("b", "train"): 1, (None, "val"): 1})) == [
        ("val", "a", True),
        ("val", "b", True),
    ]
    assert (
        gaps(Counter({(None, "test"): 500, (None, "train"): 1, (None, "val"): 1}), Counter()) == []
    )  # nothing is labelled
    assert (
        gaps(Counter({("a", "train"): 9}), Counter()) == []
    )  # few rows: val and test may well be empty
    assert gaps(Counter({("a", "train"): 30}), Counter()) == [
        ("val", None, False),
        ("test", None, False),
    ]
    one_each: Placed = Counter(
        {(f"{i / 7}", ("train", "val", "test")[i % 3]): 1 for i in range(1000)}
    )
    assert gaps(one_each, Counter()) == []  # numbers: each its own class
    assert gaps(Counter(), Counter({("a", "train"): 1000})) == []  # nothing was drawn
