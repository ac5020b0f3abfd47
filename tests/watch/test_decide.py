"""Promote or keep, retrain or wait: pure functions, every refusal with its reason."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.config import validate
from raypipe.errors import ConfigError
from raypipe.watch.decide import Comparison, GateConfig, compare, gate, retrain

GATE = GateConfig(alpha=0.05, worse_by=0.02, least_rows=20)


def hits(both: int, champion: int, challenger: int, neither: int) -> tuple[list[bool], list[bool]]:
    """Paired hits of so many rows of each kind."""
    rows = [(True, True)] * both + [(True, False)] * champion + [(False, True)] * challenger + [(False, False)] * neither
    return [first for first, _ in rows], [second for _, second in rows]


def judged(name: str, champion: float, challenger: float, p: float, is_new: bool = False, images: int = 100) -> Comparison:
    return Comparison(name, images, champion, challenger, p, is_new)


def errors(name: str, champion: float, challenger: float, p: float, is_new: bool = False) -> Comparison:
    """Labels with a spread of 10: the margin is 0.2."""
    return Comparison(name, 100, champion, challenger, p, is_new, unit=10.0)


@pytest.mark.parametrize(
    ("lost", "won", "p"),
    [
        (0, 0, 1.0),
        (0, 5, 2 / 2**5),
        (5, 0, 2 / 2**5),
        (1, 9, 22 / 2**10),
        (2, 10, 158 / 2**12),
        (7, 7, 1.0),
        (59, 121, 4.43e-6),  # the 2 x 2 table of Agresti's presidential approval has 86 : 150
        (86, 150, 3.72e-5),
    ],
)
def test_mcnemar_gives_the_known_values(lost: int, won: int, p: float) -> None:
    found = compare("s", *hits(30, lost, won, 4), is_new=True)
    assert found.p_value == pytest.approx(p, rel=0.01)
    assert found.difference == pytest.approx((won - lost) / (34 + won + lost))


@given(both=st.integers(0, 30), lost=st.integers(0, 30), won=st.integers(0, 30), neither=st.integers(1, 30))
def test_mcnemar_is_the_exact_binomial_and_looks_only_where_the_two_differ(
    both: int, lost: int, won: int, neither: int
) -> None:
    found = compare("s", *hits(both, lost, won, neither), is_new=False)
    n = lost + won
    tail = sum(comb(n, k) for k in range(min(lost, won) + 1)) / 2**n
    assert found.p_value == pytest.approx(min(1.0, 2 * tail))
    assert found.p_value == compare("s", *hits(0, lost, won, 1), is_new=False).p_value
    assert found.images == both + n + neither


def test_absolute_errors_are_compared_by_the_same_test() -> None:
    """Of differences that are all 1 or -1, random signs make McNemar's binomial; a constant error more or less is no matter."""
    first, second = hits(3, 4, 15, 2)
    exact = compare("s", first, second, is_new=True)
    found = compare("s", [7.0 - a for a in first], [7.0 - b for b in second], is_new=True, unit=0.5)
    assert found.p_value == pytest.approx(exact.p_value, abs=0.005)
    assert found.difference == pytest.approx(exact.difference / 0.5)
    assert compare("s", [0.3] * 30, [0.3] * 30, is_new=True, unit=1.0).p_value == 1


def test_chance_promotes_numbers_as_rarely_as_alpha_says_and_a_gain_is_seen() -> None:
    rng, promoted = np.random.default_rng(1), 0
    for _ in range(100):
        first, second = np.abs(rng.standard_t(3, (2, 60)))
        promoted += gate([compare("s", first, second, is_new=True, unit=1.0)], GATE).act
    assert promoted <= 7  # expected 2.5: half of 5 % are gains
    better = compare("s", first, 0.6 * first, is_new=True, unit=1.0)
    assert better.p_value < 0.001 and gate([better], GATE).act


def test_rows_that_are_not_pairs_are_our_own_mistake() -> None:
    with pytest.raises(ValueError, match=r"paired rows of equal length.*\(2,\) and \(3,\)"):
        compare("s", [True, False], [True, False, True], is_new=False)
    with pytest.raises(ValueError, match="at least one"):
        compare("s", [], [], is_new=False)


@pytest.mark.parametrize(
    ("slices", "promotes", "says"),
    [
        ([judged("new", 0.5, 0.8, 1e-4, True), judged("old", 0.9, 0.9, 1.0)], True,
         "Promoted: +30.0 points on new (p = 0.0001); +0.0 points on old, no worse"),
        ([judged("new", 0.5, 0.8, 1e-4, True), judged("old", 0.9, 0.88, 0.5)], True, "-2.0 points on old, within the margin"),
        ([judged("new", 0.5, 0.8, 1e-4, True), judged("old", 0.9, 0.87, 0.5)], False,
         "Refused: -3.0 points on old, worse than the margin of -2.0 points"),
        ([judged("new", 0.5, 0.55, 0.3, True), judged("old", 0.9, 0.99, 1e-6)], False,
         "Refused: +5.0 points on new could be chance (p = 0.3)"),
        ([judged("new", 0.8, 0.5, 1e-4, True), judged("old", 0.9, 0.9, 1.0)], False, "Refused: -30.0 points on new"),
        ([judged("old", 0.8, 0.9, 0.01)], True, "Promoted: +10.0 points on old (p = 0.01)"),
        ([judged("old", 0.9, 0.9, 1.0)], False, "Refused: +0.0 points on old could be chance (p = 1)"),
        ([judged("new", 0.1, 0.9, 1e-9, True, images=19), judged("old", 0.9, 0.9, 1.0)], False,
         "Not compared: new has 19 labelled test images, the gate asks for 20"),
        ([], False, "Not compared: there are no labelled test images, the gate asks for 20"),
        ([judged("a", 0.5, 0.8, 0.2, True), judged("b", 0.5, 0.7, 0.01, True)], True, "Promoted: +20.0 points on b (p = 0.01); "
         "+30.0 points on a, no worse"),
        ([errors("new", 5.0, 3.0, 1e-4, True), errors("old", 2.0, 2.15, 0.4)], True,
         "Promoted: error 5 to 3 on new (p = 0.0001); error 2 to 2.15 on old, within the margin"),
        ([errors("new", 5.0, 3.0, 1e-4, True), errors("old", 2.0, 2.25, 0.4)], False,
         "Refused: error 2 to 2.25 on old, worse than the margin of 0.2"),
        ([errors("new", 3.0, 5.0, 1e-4, True)], False, "Refused: error 3 to 5 on new could be chance"),
        ([errors("new", 5.0, 3.0, 1e-4, True), errors("old", 2.0, float("nan"), 1.0)], False, "Refused: error 2 to nan on old"),
    ],
)  # fmt: skip
def test_the_gate_says_what_it_did_and_why(slices: list[Comparison], promotes: bool, says: str) -> None:
    decision = gate(slices, GATE)
    assert decision.act is promotes
    assert says in decision.reason


def test_a_significance_must_be_below_alpha_and_not_at_it() -> None:
    assert not gate([judged("old", 0.5, 0.6, 0.05)], GATE).act
    assert gate([judged("old", 0.5, 0.6, 0.049)], GATE).act


@given(worse=st.floats(0.021, 1))
def test_no_gain_elsewhere_pays_for_a_loss_beyond_the_margin(worse: float) -> None:
    slices = [judged("new", 0.0, 1.0, 1e-12, True), judged("old", 1.0, 1.0 - worse, 0.9)]
    assert not gate(slices, GATE).act
    assert gate(slices, GateConfig(worse_by=1.0)).act


@pytest.mark.parametrize(
    ("drift", "labelled", "known", "force", "acts", "says"),
    [
        (True, {"mono": 500, "poly": 200}, ["mono"], False, True, "Drift, and labels: 200 images of poly"),
        (True, {"mono": 500}, ["mono"], False, False, "no labelled images beyond mono: waiting for labels"),
        (True, {}, [], False, False, "beyond what the champion knows: waiting for labels"),
        (True, {"mono": 500, "poly": 200}, ["mono", "poly"], False, False, "waiting for labels"),
        (False, {"mono": 500, "poly": 200}, ["mono"], False, False, "No drift: the champion stays"),
        (False, {"mono": 500}, ["mono"], True, True, "Retraining was asked for"),
        (True, {"z": 1, "a": 2}, [], False, True, "2 images of a, 1 images of z"),
    ],
)
def test_a_retrain_needs_drift_and_labels_or_an_order(
    drift: bool, labelled: dict[str, int], known: list[str], force: bool, acts: bool, says: str
) -> None:
    decision = retrain(drift, labelled, known, force)
    assert decision.act is acts
    assert says in decision.reason


@pytest.mark.parametrize("bad", [{"alpha": 0}, {"alpha": 1}, {"worse_by": -0.1}, {"least_rows": 0}])
def test_a_gate_that_judges_nothing_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(bad))} is wrong"):
        validate(GateConfig, bad)
