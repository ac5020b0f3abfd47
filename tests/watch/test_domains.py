"""A window of known domains in any mixture is quiet; anything else is not, whatever the sizes."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from raypipe.errors import DataError
from raypipe.watch import domains
from raypipe.watch.clusters import clusters
from raypipe.watch.domains import Fit, Rows, fit
from raypipe.watch.mixture import nearest_mixture

WIDTH = 40
MIX = np.random.default_rng(0).normal(size=(6, WIDTH))


def draw(rng: np.random.Generator, rows: int, domain: int, apart: float = 3.0) -> np.ndarray:
    """Skewed, correlated features, as behind a ReLU; each domain has moved in one factor."""
    factors = rng.normal(size=(rows, 6))
    factors[:, domain % 6] += apart
    drawn: np.ndarray = np.maximum(factors @ MIX + rng.normal(size=(rows, WIDTH)), 0)
    return drawn


def side(
    parts: list[np.ndarray], names: str | None = None, groups: list[str] | None = None
) -> Rows:
    """Rows of these parts; each part is the domain of one letter of `names`."""
    features = np.concatenate(parts)
    domain_names = None
    if names is not None:
        domain_names = [n for n, part in zip(names, parts, strict=True) for _ in part]
    return Rows(features, features[:, :3], domain_names, groups)


def check(
    sizes: list[int], window: list[int], seed: int, apart: float = 3.0, permutations: int = 199
) -> Fit:
    rng = np.random.default_rng(seed)
    known = [draw(rng, n, k, apart) for k, n in enumerate(sizes)]
    new = [draw(rng, n, k, apart) for k, n in enumerate(window)]
    names = "abcdefghijklmnop"[: len(sizes)]
    return fit(side(known, names), side(new), permutations, seed=seed)


@pytest.mark.parametrize("window", [[80, 0, 0], [0, 80, 0], [40, 40, 0], [10, 20, 50]])
def test_every_mixture_of_known_domains_is_quiet_and_named(window: list[int]) -> None:
    found = check([150, 100, 60], window, seed=1)
    assert found.p_value > 0.01
    weights = {part.domain: part.weight for part in found.parts}
    for name, rows in zip("abc", window, strict=True):
        assert weights[name] == pytest.approx(rows / 80, abs=0.12)
    shares = {part.domain: part.share for part in found.parts}
    assert sum(shares.values()) == pytest.approx(1)
    assert all(
        shares[n] == pytest.approx(r / 80, abs=0.1) for n, r in zip("abc", window, strict=True)
    )
    assert all(part.unlike < 0.15 for part in found.parts)


def test_the_whole_reference_as_one_domain_would_call_one_domain_drift() -> None:
    """The control: this is what a champion of two domains said every night."""
    rng = np.random.default_rng(2)
    both = np.concatenate([draw(rng, 150, 0), draw(rng, 150, 1)])
    night = draw(rng, 80, 0)
    found = fit(Rows(both, both[:, :3]), Rows(night, night[:, :3]), 199)
    assert found.p_value == pytest.approx(1 / 200)


def test_a_third_domain_is_drift_alone_and_as_a_part_of_a_night() -> None:
    alone = check([150, 150], [0, 0, 80], seed=3)
    some = check([150, 150], [30, 30, 40], seed=3)
    assert alone.p_value == some.p_value == pytest.approx(1 / 200)
    assert max(part.unlike for part in alone.parts if part.share) > 0.3
    scores = np.random.default_rng(3).dirichlet(np.ones(3), 230)
    scores[150:] = scores[150:, [0, 0, 0]] / 3
    rng = np.random.default_rng(3)
    known, window = draw(rng, 150, 0), draw(rng, 80, 0)
    found = fit(Rows(known, scores[:150]), Rows(window, scores[150:]), 199)
    assert found.score_p_value == pytest.approx(1 / 200) and found.p_value > 0.01


CASES = {
    "one domain, window larger than it": ([60], [150], 0.0),
    "two that are one": ([80, 80], [30, 30], 0.0),
    "near ones, one alone": ([80, 80], [60, 0], 0.7),
    "near ones, both": ([80, 80], [30, 30], 1.5),
    "a domain of five rows alone": ([100, 40, 5], [0, 0, 60], 4.0),
    "unequal ones": ([150, 30, 5], [20, 20, 20], 1.5),
    "ten": ([15] * 10, [6] * 10, 3.0),
}


@pytest.mark.parametrize("case", CASES)
def test_a_p_value_is_as_rare_as_it_says(case: str) -> None:
    """Of 40 windows without drift; both bounds are exact binomial tests at 0.001."""
    sizes, window, apart = CASES[case]
    p_values = np.array([check(sizes, window, seed, apart, 99).p_value for seed in range(40)])
    for level in (0.05, 0.2):
        count = int((p_values <= level).sum())
        assert stats.binomtest(count, 40, level, alternative="greater").pvalue > 0.001, count
    assert p_values.mean() < 0.8, "a test that never alarms is honest, too"


def test_copies_are_no_evidence() -> None:
    rng = np.random.default_rng(5)
    known, pool = draw(rng, 200, 0), draw(rng, 60, 0)
    window = pool[rng.integers(60, size=300)]
    found = fit(Rows(known, known[:, :3]), Rows(window, window[:, :3]), 199)
    assert found.rows == (200, len(np.unique(window, axis=0)))
    assert found.p_value > 0.01
    assert found.copies_p_value > 0.05 and found.most_copies > 5
    # From half of the night on, the camera hangs.
    window[150:] = window[0]
    found = fit(Rows(known, known[:, :3]), Rows(window, window[:, :3]), 99)
    assert found.p_value > 0.01 and found.copies_p_value < 1e-9 and found.most_copies >= 150
    # -0.0 is 0.0.
    window = np.concatenate([np.abs(known[:50]) * 0.0, -np.abs(known[:50]) * 0.0])
    assert fit(Rows(known, known[:, :3]), Rows(window, window[:, :3]), 99).rows[1] == 1


@pytest.mark.parametrize("pictures", [1, 2, 3])
def test_a_camera_that_hangs_all_night_is_found(pictures: int) -> None:
    """Copies count once, so a night of one picture is one row: no detector but this one sees it."""
    rng = np.random.default_rng(6)
    known = draw(rng, 200, 0)
    window = draw(rng, pictures, 0)[np.arange(60) % pictures]
    found = fit(Rows(known, known[:, :3]), Rows(window, window[:, :3]), 99)
    assert found.rows == (200, pictures) and found.copies_p_value < 1e-4
    # A reference that hangs, too, knows no better.
    same = Rows(window, window[:, :3])
    assert fit(same, same, 99).copies_p_value == 1


def grouped(rng: np.random.Generator, groups: int, rows: int) -> tuple[np.ndarray, list[str]]:
    """Groups that differ much more from each other than the rows of one group."""
    parts = [rng.normal(size=WIDTH) * 2 + rng.normal(size=(rows, WIDTH)) for _ in range(groups)]
    return np.concatenate(parts), [f"g{g}" for g in range(groups) for _ in range(rows)]


def test_rows_of_one_group_are_one_piece_of_news() -> None:
    alone, whole = [], []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        known, of_known = grouped(rng, 30, 12)
        window, of_window = grouped(rng, 4, 30)
        as_groups = [
            Rows(known, known[:, :3], None, of_known),
            Rows(window, window[:, :3], None, of_window),
        ]
        as_rows = [Rows(one.features_ND, one.scores_NC) for one in as_groups]
        whole.append(fit(as_groups[0], as_groups[1], 99, seed=seed))
        alone.append(fit(as_rows[0], as_rows[1], 99, seed=seed))
    false = sum(found.p_value <= 0.05 for found in whole)
    assert stats.binomtest(false, 40, 0.05, alternative="greater").pvalue > 0.001
    assert sum(found.p_value <= 0.05 for found in alone) > 30, "the control"
    # Groups are compared at one size.
    assert whole[0].rows == (360, 48)


def test_few_groups_cannot_say_much_and_the_result_says_so() -> None:
    rng = np.random.default_rng(6)
    known, of_known = grouped(rng, 9, 10)
    window, of_window = grouped(rng, 1, 10)
    reference = Rows(known, known[:, :3], None, of_known)
    found = fit(reference, Rows(window + 50, window[:, :3], None, of_window), 999)
    assert found.least_p == pytest.approx(0.1)
    assert 0.05 < found.p_value < 0.2
    # A side without groups: rows stand alone.
    assert fit(reference, Rows(window + 50, window[:, :3]), 199).least_p == pytest.approx(1 / 200)


def test_many_domains_are_joined_and_keep_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(domains, "MOST_DOMAINS", 3)
    rng = np.random.default_rng(7)
    parts = [draw(rng, 30, k // 2, 6.0) for k in range(6)]
    window = draw(rng, 40, 1, 6.0)
    found = fit(side(parts, "abcdef"), side([window]), 199)
    assert {part.domain for part in found.parts} == {"a + b", "c + d", "e + f"}
    assert found.parts[0].domain == "c + d" and found.p_value > 0.01


def test_a_domain_of_its_own_for_each_row_costs_little_and_is_named_in_short() -> None:
    """registry.domain may be a column of ids, or of times."""
    rng = np.random.default_rng(7)
    known, window = draw(rng, 3000, 0), draw(rng, 60, 0)
    names = [f"night {row}" for row in range(3000)]
    found = fit(Rows(known, known[:, :3], names), Rows(window, window[:, :3]), 99, most=100)
    assert found.rows == (domains.REFERENCE_ROWS * 100, 60) and found.p_value > 0.01
    assert len(found.parts) == domains.MOST_DOMAINS
    assert all(len(part.domain) < 60 for part in found.parts), "hundreds are joined"
    assert any(part.domain.endswith(" more") for part in found.parts)


@pytest.mark.parametrize("odd", ["a\0", "a" * 50_000, "\udc80", "A", " a", "a\n"])
def test_names_that_look_alike_are_different_domains(odd: str) -> None:
    rng = np.random.default_rng(10)
    parts = [draw(rng, 60, k, 6.0) for k in range(3)]
    names = ["a"] * 60 + [odd] * 60 + ["b"] * 60
    known = np.concatenate(parts)
    for place, name in enumerate(("a", odd, "b")):
        window = draw(rng, 40, place, 6.0)
        found = fit(Rows(known, known[:, :3], names), Rows(window, window[:, :3]), 99)
        assert len(found.parts) == 3
        assert (found.parts[0].domain, found.parts[0].share) == (name, 1)


def test_small_domains_are_kept_whole_when_the_reference_is_cut() -> None:
    rng = np.random.default_rng(8)
    parts = [draw(rng, 1900, 0), draw(rng, 40, 1), draw(rng, 5, 2)]
    found = fit(side(parts, "abc"), side([draw(rng, 60, 1)]), 99, most=50)
    assert found.rows == (domains.REFERENCE_ROWS * 50, 50)
    assert found.parts[0].domain == "b" and found.p_value > 0.01
    # All of them: more regroupings than a float can count.
    found = fit(side(parts, "abc"), side([draw(rng, 500, 0)]), 20, most=700)
    assert found.rows == (1945, 500) and found.least_p == pytest.approx(1 / 21)


def test_odd_rows_do_no_harm() -> None:
    rng = np.random.default_rng(9)
    known, window = draw(rng, 50, 0), draw(rng, 50, 0)
    # Features that never move.
    known[:, :30] = window[:, :30] = 1
    assert fit(Rows(known, known[:, :3]), Rows(window, window[:, :3]), 99).p_value > 0.01
    # Nothing moves at all: nothing has moved.
    flat = np.ones((30, 4))
    same = Rows(flat, flat)
    assert fit(same, same, 99).p_value == fit(same, same, 99).score_p_value == 1
    # Names that are not plain text, a blank one, a domain of one row.
    names = ["ü|\n"] * 48 + ["", "'"]
    found = fit(Rows(known, known[:, :3], names), Rows(window, window[:, :3]), 99)
    assert {part.domain for part in found.parts} == {"ü|\n", "", "'"}
    # Huge numbers.
    huge = fit(Rows(known * 1e30, known[:, :3]), Rows(window * 1e30, window[:, :3]), 99)
    assert np.isfinite(huge.statistic) and huge.p_value > 0.01


def test_equal_input_gives_an_equal_result_and_another_seed_another() -> None:
    found = check([90, 90], [30, 30], seed=4, apart=1.0)
    assert found == check([90, 90], [30, 30], seed=4, apart=1.0)
    assert found != check([90, 90], [30, 30], seed=5, apart=1.0)


def test_what_cannot_be_compared_is_refused() -> None:
    good = Rows(np.random.default_rng(1).normal(size=(30, 4)), np.zeros((30, 2)))
    for bad, message in (
        (
            Rows(np.full((30, 4), np.nan), np.zeros((30, 2))),
            "features of the window are not finite",
        ),
        (Rows(np.zeros((30, 4)), np.full((30, 2), np.inf)), "scores of the window are not finite"),
        (Rows(np.zeros((30, 5)), np.zeros((30, 2))), "features are 5 wide and the reference's 4"),
        (Rows(np.zeros((30, 4)), np.zeros((29, 2))), "do not fit together"),
        (Rows(np.zeros((1, 4)), np.zeros((1, 2))), "do not fit together"),
        (Rows(np.zeros((0, 4)), np.zeros((0, 2))), "do not fit together"),
        (Rows(np.zeros((30, 4)), np.zeros((30, 2)), None, ["g"] * 29), "do not fit together"),
    ):
        with pytest.raises(DataError, match=message):
            fit(good, bad)


def test_the_nearest_mixture_is_the_best_of_a_fine_grid() -> None:
    rng = np.random.default_rng(11)
    grid = np.linspace(0, 1, 101)
    triples = np.array([(x, y, 1 - x - y) for x in grid for y in grid if x + y <= 1 + 1e-9])
    for _ in range(20):
        points = rng.normal(size=(4, 5))
        points[3] = rng.dirichlet(np.ones(3)) @ points[:3] + rng.normal(size=5) * 0.3
        products = points @ points.T
        weights = nearest_mixture(products[None])[0]
        away = ((weights @ points[:3] - points[3]) ** 2).sum()
        best = ((triples @ points[:3] - points[3]) ** 2).sum(1).min()
        assert away <= best + 1e-4
        assert weights.min() >= 0 and weights.sum() == pytest.approx(1)


def test_clusters_stand_in_for_names() -> None:
    rng = np.random.default_rng(12)
    parts = [draw(rng, 120, 0, 6.0), draw(rng, 80, 1, 6.0)]
    code_N = clusters(np.concatenate(parts))
    assert (code_N[:120] == 0).mean() > 0.95 and (code_N[120:] == 1).mean() > 0.95
    assert clusters(draw(rng, 300, 0)).max() == 0, "one cloud is one domain"
    assert clusters(np.ones((50, 4))).max() == 0 and clusters(rng.normal(size=(3, 4))).max() == 0


def test_what_the_reference_repeats_may_repeat() -> None:
    """A placeholder for missing pictures, 5 % of the reference and of each night, was an alarm."""
    rng = np.random.default_rng(5)
    known, window = draw(rng, 200, 0), draw(rng, 200, 0)
    known[:10] = window[:10] = known[0]
    window[:10] += 1e-6  # other batches round otherwise
    found = fit(Rows(known, known[:, :3]), Rows(window, window[:, :3]), 99)
    assert found.copies_p_value > 0.05
    # Half of the night is no longer usual, and nor is another row that hangs beside it.
    window[:100] = known[0]
    found = fit(Rows(known, known[:, :3]), Rows(window, window[:, :3]), 99)
    assert found.copies_p_value < 1e-6 and found.most_copies == 100
    window = draw(rng, 200, 0)
    window[:12], window[12:22] = known[0], window[199]
    found = fit(Rows(known, known[:, :3]), Rows(window, window[:, :3]), 99)
    assert found.copies_p_value < 1e-3 and found.most_copies == 11
