"""Promote or keep: pure functions, every refusal with its reason."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr, xlogy
from scipy.stats import multinomial

from benchmarks.gate import promoted
from raypipe.config import validate
from raypipe.errors import ConfigError
from raypipe.watch.comparison import Comparison, compare, merged
from raypipe.watch.decide import Decision, GateConfig, _level, gate
from raypipe.watch.safety import LOOSEST
from raypipe.watch.superiority import sign_flips

GATE = GateConfig()


def hits(both: int, lost: int, won: int, neither: int) -> tuple[list[bool], list[bool]]:
    """Paired hits of so many rows of each kind: both right, only the champion, only the challenger,
    none.
    """
    champion = [True] * (both + lost) + [False] * (won + neither)
    challenger = [True] * both + [False] * lost + [True] * won + [False] * neither
    return champion, challenger


def judged(name: str, won: int, lost: int, images: int = 1000, is_new: bool = False) -> Comparison:
    """A slice: the challenger alone has `won` images right, the champion alone `lost`."""
    both = (images - won - lost) // 2
    return compare(name, *hits(both, lost, won, images - won - lost - both), is_new)


def errors(
    name: str, champion: float, challenger: float, noise: float = 1.0, is_new: bool = False
) -> Comparison:
    """400 absolute errors with these means; labels have a standard deviation of 10, so the
    tolerance is 0.5.
    """
    wave = np.tile([noise, -noise], 200)
    return compare(name, np.full(400, champion), challenger + wave, is_new, unit=10.0)


def decide(*slices: Comparison, cfg: GateConfig = GATE) -> Decision:
    won, lost = sum(s.won for s in slices), sum(s.lost for s in slices)
    images = sum(s.images for s in slices)
    if len(slices) == 1 or (slices and slices[0].unit is not None):
        union = slices[0]
    else:
        union = judged("all", won, lost, images) if slices else None
    return gate(slices, union, cfg)


@pytest.mark.parametrize(
    ("lost", "won", "two_sided"),
    [
        (0, 5, 2 / 2**5),
        (1, 9, 22 / 2**10),
        (2, 10, 158 / 2**12),
        (59, 121, 4.43e-6),
        (86, 150, 3.72e-5),  # the 2 x 2 table of Agresti's presidential approval
    ],
)
def test_mcnemar_gives_the_known_values(lost: int, won: int, two_sided: float) -> None:
    found = compare("s", *hits(30, lost, won, 4), is_new=True)
    assert found.p_value == pytest.approx(two_sided / 2, rel=0.01)
    assert found.difference == pytest.approx((won - lost) / (34 + won + lost))
    mirrored = compare("s", *hits(30, won, lost, 4), is_new=True)
    assert mirrored.p_harmed == found.p_value
    assert mirrored.p_value > 0.9


def test_gains_that_are_not_finite_have_no_p_value() -> None:
    """It was the smallest that there is, 0.0001."""
    for odd in (np.nan, np.inf, -np.inf):
        assert np.isnan(sign_flips(np.array([odd, 1.0, 1.0])))
    assert np.isnan(sign_flips(np.array([np.inf, -np.inf])))
    assert sign_flips(np.array([1.0, -1.0])) > 0.5


@given(
    both=st.integers(0, 30),
    lost=st.integers(0, 30),
    won=st.integers(0, 30),
    neither=st.integers(1, 30),
)
def test_mcnemar_is_the_exact_binomial_and_looks_only_where_the_two_differ(
    both: int, lost: int, won: int, neither: int
) -> None:
    found = compare("s", *hits(both, lost, won, neither), is_new=False)
    pairs = lost + won
    tail = sum(comb(pairs, k) for k in range(won, pairs + 1)) / 2**pairs
    assert found.p_value == pytest.approx(tail)
    assert found.p_value == compare("s", *hits(0, lost, won, 1), is_new=False).p_value
    assert found.images == both + pairs + neither


@given(lost=st.integers(0, 40), won=st.integers(0, 40), rows=st.integers(81, 500))
def test_the_bound_and_the_test_of_safety_are_one_thing(lost: int, won: int, rows: int) -> None:
    """A slice is safe exactly when its lower bound lies above -tolerance; more losses never make it
    safer.
    """
    found = judged("s", won, lost, rows)
    bound = found.at_worst(0.05)
    assert -1 <= bound <= found.difference
    if abs(bound + 0.05) > 1e-4:
        assert (found.p_worse(0.05) < 0.05) == (bound > -0.05)
    assert judged("s", won, lost + 1, rows).p_worse(0.05) >= found.p_worse(0.05)


@given(lost=st.integers(0, 40), won=st.integers(0, 40), rows=st.integers(81, 500))
def test_at_a_level_of_one_half_the_bound_is_the_difference(lost: int, won: int, rows: int) -> None:
    """gate.safety_alpha from 0.125 on can give a slice's test this level."""
    found = judged("s", won, lost, rows)
    assert found.at_worst(0.5) == pytest.approx(found.difference, abs=1e-6)
    assert found.at_worst(0.4999) <= found.difference


@pytest.mark.parametrize(
    ("won", "lost", "rows"), [(0, 0, 54), (1, 0, 54), (9, 1, 54), (1, 9, 54), (7, 12, 160)]
)
def test_the_statistic_is_the_score_at_the_most_likely_shares(
    won: int, lost: int, rows: int
) -> None:
    """Tango's closed form against a search over a fine grid of shares at the tolerance."""
    lost_G = np.linspace(0.05 + 1e-9, 0.52, 200_001)
    won_G = lost_G - 0.05
    likelihood_G = (
        xlogy(won, won_G) + xlogy(lost, lost_G) + xlogy(rows - won - lost, 1 - won_G - lost_G)
    )
    best = int(likelihood_G.argmax())
    variance = rows * (won_G[best] + lost_G[best] - 0.05**2)
    score = (won - lost + rows * 0.05) / np.sqrt(variance)
    assert judged("s", won, lost, rows).p_worse(0.05) == pytest.approx(
        float(ndtr(-score)), rel=1e-3
    )


@pytest.mark.parametrize("rows", [50, 160, 320])
@pytest.mark.parametrize("differing", [0.05, 0.07, 0.2])
def test_a_slice_that_is_worse_by_the_tolerance_passes_in_five_per_cent_at_most(
    rows: int, differing: float
) -> None:
    """Exact: every result is weighted by its probability. An equal challenger passes more easily
    the more rows there are.
    """
    counts = [
        (won, lost) for won in range(rows // 3) for lost in range(rows // 2) if won + lost <= rows
    ]
    won_K, lost_K = np.array(counts).T
    lost_share = (differing + 0.05) / 2
    shares = [differing - lost_share, lost_share, 1 - differing]
    weights_K = multinomial.pmf(np.stack([won_K, lost_K, rows - won_K - lost_K], 1), rows, shares)
    likely_K = weights_K > 1e-7
    passed = 0.0
    for won, lost, weight in zip(
        won_K[likely_K], lost_K[likely_K], weights_K[likely_K], strict=True
    ):
        passed += weight * (
            Comparison("s", rows, 0.0, 0.0, int(won), int(lost), 1.0, False).p_worse(0.05) < 0.05
        )
    assert weights_K.sum() == pytest.approx(1, abs=1e-6)
    assert passed <= 0.05


def test_absolute_errors_are_compared_by_the_same_test() -> None:
    """Where all differences are 1 or -1, sign flips are McNemar's binomial; a constant error more
    or less changes nothing.
    """
    first, second = hits(3, 4, 15, 2)
    exact = compare("s", first, second, is_new=True)
    found = compare("s", [7.0 - a for a in first], [7.0 - b for b in second], is_new=True, unit=0.5)
    assert found.p_value == pytest.approx(exact.p_value, abs=0.005)
    assert found.difference == pytest.approx(exact.difference / 0.5)
    assert (found.won, found.lost) == (exact.won, exact.lost)
    assert compare("s", [0.3] * 30, [0.3] * 30, is_new=True, unit=1.0).p_value == 1


def test_chance_promotes_numbers_as_rarely_as_alpha_says_and_a_gain_is_seen() -> None:
    rng, promoted = np.random.default_rng(1), 0
    for _ in range(100):
        first, second = np.abs(rng.standard_t(3, (2, 60)))
        promoted += decide(
            compare("s", first, second, is_new=True, unit=1.0), cfg=GateConfig(tolerance=1.0)
        ).act
    assert promoted <= 11  # expected 5
    better = compare("s", first, 0.6 * first, is_new=True, unit=1.0)
    assert better.p_value < 0.001
    assert decide(better).act


def test_a_slice_of_one_number_shows_nothing() -> None:
    """A source with one test image, on which the error was larger, refused every challenger: one
    number has no spread, and no spread was taken for certainty."""
    alone = compare("one", [1.0], [3.0], is_new=False, unit=10.0)
    assert alone.p_harmed == 1 and alone.p_worse(0.9) == 1 and alone.at_worst(0.05) == -np.inf
    decision = decide(errors("many", 5.0, 3.0, is_new=True), alone)
    assert decision.act, decision.reason
    # Two that agree may refuse.
    assert compare("two", [1.0, 1.0], [3.0, 3.001], is_new=False, unit=10.0).p_harmed < 0.01


def test_rows_that_are_not_pairs_are_our_own_mistake() -> None:
    with pytest.raises(ValueError, match=r"paired rows of equal length.*\(2,\) and \(3,\)"):
        compare("s", [True, False], [True, False, True], is_new=False)
    with pytest.raises(ValueError, match="at least one"):
        compare("s", [], [], is_new=False)


OLD_EQUAL = judged("old", won=35, lost=35)
NEW_BETTER = judged("new", won=200, lost=50, is_new=True)


@pytest.mark.parametrize(
    ("slices", "promotes", "says"),
    [
        ([NEW_BETTER, OLD_EQUAL], True, "+15.0 points on new (p = 9.9e-23)"),
        ([NEW_BETTER, OLD_EQUAL], True, "; +0.0 points on old, no worse"),
        # emoji pictures, 1,000 a domain: better on the old domain, no worse on the new one
        (
            [judged("old", 212, 160), judged("new", 105, 100, is_new=True)],
            True,
            "Promoted: +5.2 points on old",
        ),
        (
            [NEW_BETTER, judged("old", 20, 40)],
            True,
            "-2.0 points on old, at worst -3.3 points, within the tolerance",
        ),
        ([NEW_BETTER, judged("old", 20, 70)], False,
         "Refused: -5.0 points on old, at worst -6.6 points, and -5.0 points is tolerated"),
        (
            [judged("a", 50, 350, is_new=True), judged("b", 350, 50, is_new=True)],
            False,
            "Refused: -30.0 points on a",
        ),
        ([NEW_BETTER, judged("old", 3, 6, images=100)], False,
         "100 test images are few, 340 would clear an equal challenger nine times of ten"),
        (
            [OLD_EQUAL],
            False,
            "Refused: no gain beyond chance; the clearest is +0.0 points on old (p = 0.55)",
        ),
        (
            [judged("old", 0, 0)],
            False,
            "no gain beyond chance; the clearest is +0.0 points on old (p = 1)",
        ),
        (
            [judged("a", 16, 4, 20, True), judged("b", 16, 4, 29)],
            False,
            # A split of 600 images of 49 parts was said to be known to a model.
            "Not compared: 49 labelled test images (one of each group, and of copies) that neither",
        ),
        (
            [judged("a", 16, 4, 21, True), judged("b", 16, 4, 29)],
            True,
            "; +48.0 points on a + b, no worse",
        ),
        ([NEW_BETTER, judged("few", 1, 2, images=9)], True, "points on few + new, no worse"),
        (
            [NEW_BETTER, judged("few", 0, 30, images=49)],
            False,
            "Refused: -61.2 points on few, worse beyond chance",
        ),
        ([], False, "no labelled test image that neither model has learned from, the gate needs"),
        ([errors("new", 5.0, 3.0, is_new=True), errors("old", 2.0, 2.15)], True,
         "Promoted: error 5 to 3 on new (p = 0.0001)"),
        ([errors("new", 5.0, 3.0, is_new=True), errors("old", 2.0, 2.15)], True,
         "error 2 to 2.15 on old, at worst +0.233 error, within the tolerance"),
        ([errors("new", 5.0, 3.0, is_new=True), errors("old", 2.0, 2.45)], False,
         "Refused: error 2 to 2.45 on old, at worst +0.533 error, and +0.5 error is tolerated"),
        (
            [errors("new", 3.0, 5.0, is_new=True)],
            False,
            "Refused: no gain beyond chance; the clearest is error 3 to 5 on new",
        ),
        ([errors("new", 5.0, 3.0, is_new=True), errors("old", 2.0, float("nan"))], False,
         "Refused: error 2 to nan on old is not a finite number"),
        (
            [errors("new", float("nan"), 3.0, is_new=True)],
            False,
            "error nan to 3 on new is not a finite number",
        ),
    ],
)  # fmt: skip
def test_the_gate_says_what_it_did_and_why(
    slices: list[Comparison], promotes: bool, says: str
) -> None:
    decision = decide(*slices)
    assert says in decision.reason
    assert decision.act is promotes


def test_a_gain_is_tested_with_the_number_of_slices_in_mind() -> None:
    """One slice alone passes with p = 0.03; beside nine equal ones that is what chance gives, and
    Holm's correction says so.
    """
    gain = judged("a", won=62, lost=42)
    assert 0.025 < gain.p_value < 0.035
    assert decide(gain).act
    others = [judged(f"s{n}", won=35, lost=35) for n in range(9)]
    assert not decide(gain, *others).act


def test_the_same_gain_everywhere_counts_together() -> None:
    """No slice shows it beyond chance, their union does."""
    slices = [judged(f"s{n}", won=44, lost=32) for n in range(6)]
    assert all(s.p_value > 0.05 for s in slices)
    decision = decide(*slices)
    assert decision.act
    assert "on all" in decision.reason


@given(won=st.integers(0, 60), lost=st.integers(0, 60))
def test_no_gain_elsewhere_pays_for_a_loss_beyond_the_tolerance(won: int, lost: int) -> None:
    old = judged("old", won, lost + won + 60)
    assert not decide(judged("new", 900, 0, is_new=True), old).act
    assert not decide(*[judged(f"n{n}", 900, 0) for n in range(20)], old).act


def test_with_many_slices_each_test_is_less_strict_and_never_looser_than_said() -> None:
    equal = [judged(f"s{n}", won=11, lost=11, images=320) for n in range(30)]
    better = [judged(f"s{n}", won=60, lost=5, images=320) for n in range(30)]
    assert _level(equal[:1], GATE) == pytest.approx(GATE.safety_alpha)
    assert _level(equal, GATE) > 1.5 * GATE.safety_alpha
    assert _level(equal, GATE) <= LOOSEST * GATE.safety_alpha
    assert _level(better, GATE) == pytest.approx(
        GATE.safety_alpha, rel=0.01
    )  # nothing is given where the others pass anyway


def test_simulated_challengers_are_promoted_as_often_as_said() -> None:
    """400 draws each; the whole simulation is `python -m benchmarks.gate`."""
    rows, differing = [320, 320], 0.07
    assert promoted(rows, [0.0, 0.10], differing, draws=400, seed=1) > 0.9
    assert promoted(rows, [0.0, 0.0], differing, draws=400, seed=2) <= 0.08
    assert promoted(rows, [-0.05, 0.10], differing, draws=400, seed=3) <= 0.08


@given(parts=st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=20), min_size=2, max_size=5))
def test_pooled_slices_are_what_their_rows_together_are(parts: list[list[float]]) -> None:
    def of(rows: list[float]) -> Comparison:
        return compare("s", [5.0 + r for r in rows], [5.0] * len(rows), is_new=False, unit=2.0)

    together = of([r for rows in parts for r in rows])
    pooled = merged([of(rows) for rows in parts])
    assert pooled.images == together.images
    assert (pooled.won, pooled.lost) == (together.won, together.lost)
    assert pooled.difference == pytest.approx(together.difference, abs=1e-9)
    assert pooled.spread == pytest.approx(together.spread, abs=1e-6)


@pytest.mark.parametrize(
    "bad",
    [{"alpha": 0}, {"alpha": 1}, {"tolerance": -0.1}, {"safety_alpha": 0.7}, {"least_rows": 0}],
)
def test_a_gate_that_judges_nothing_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(bad))} is wrong"):
        validate(GateConfig, bad)
