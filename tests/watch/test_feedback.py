"""Label drift: what labels that came later say of a champion. Pure functions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from raypipe.errors import DataError
from raypipe.models import outcomes
from raypipe.models.outcomes import Outcomes
from raypipe.models.tasks import Task
from raypipe.watch import check, chosen, error_tests, feedback
from raypipe.watch.chosen import NOBODY, Seen
from raypipe.watch.detect import DriftReport
from raypipe.watch.error_tests import LEAST, fisher
from raypipe.watch.feedback import Feedback, judge
from raypipe.work.results import watching


def drawn(rng: np.random.Generator, images: int, easy: float = 0.0, wrong: float = 0.0) -> Outcomes:
    """A calibrated model's outcomes. easy: shifts its confidence; wrong: errors that it does not
    expect."""
    sure_N = np.clip(rng.beta(6, 2, images) * 0.5 + 0.5 + easy, 0.5, 1)
    error_N = (rng.random(images) > sure_N - wrong).astype(float)
    return Outcomes(error_N, sure_N)


def p_of(says: Feedback, on: str) -> float:
    return next(one.p_value for one in says.found if one.on == on)


def test_one_stratum_is_scipys_fisher_and_several_are_independent() -> None:
    one = stats.fisher_exact([[7, 33], [9, 111]], alternative="greater").pvalue
    assert fisher([120], [9], [40], [7]) == pytest.approx(one)
    # By hand: 1 of 1 wrong here in both strata, 0 of 1 there.
    assert fisher([1, 1], [0, 0], [1, 1], [1, 1]) == pytest.approx(0.25)
    assert fisher([5, 5], [0, 0], [5, 5], [0, 0]) == 1
    assert fisher([0, 9], [0, 2], [4, 0], [4, 0]) == 1


def test_without_drift_alarms_are_as_rare_as_alpha() -> None:
    rng = np.random.default_rng(1)
    alarms = {"errors": 0, "calibration": 0}
    for _ in range(400):
        says = judge(drawn(rng, 300), drawn(rng, 60), NOBODY, True, 0)
        for on in alarms:
            alarms[on] += p_of(says, on) <= 0.05
    for count in alarms.values():
        assert stats.binomtest(count, 400, 0.05, alternative="greater").pvalue > 0.001


def test_a_loss_is_seen_and_a_gain_is_not() -> None:
    rng = np.random.default_rng(2)
    known = drawn(rng, 400)
    worse = judge(known, drawn(rng, 200, wrong=0.25), NOBODY, True, 0)
    assert p_of(worse, "errors") < 1e-4 and p_of(worse, "calibration") < 1e-4
    better = judge(known, drawn(rng, 200, easy=0.3), NOBODY, True, 0)
    assert p_of(better, "errors") > 0.5
    assert worse.low is not None and worse.high is not None and worse.measured is not None
    assert worse.low < worse.measured < worse.high < (worse.known or 0)


def test_unsure_images_are_wrong_more_often_and_calibration_knows_it() -> None:
    rng = np.random.default_rng(3)
    known = drawn(rng, 500)
    hard = drawn(rng, 2000)
    chosen = np.argsort(hard.sure_N)[:150]
    came = Outcomes(hard.error_N[chosen], hard.sure_N[chosen])
    others = Seen(np.delete(hard.sure_N, chosen), np.zeros(1850, int))
    # Whoever labels the least sure ones must not raise an alarm.
    says = judge(known, came, others, True, 0)
    assert [one.on for one in says.found] == ["calibration"]
    assert p_of(says, "calibration") > 0.01
    assert "less sure" not in says.notes[-1] and "surer of other images" in says.notes[-1]
    # Fisher's test alone would.
    assert p_of(judge(known, came, NOBODY, True, 0), "errors") < 1e-6


def test_a_night_of_the_hard_domain_is_no_drift() -> None:
    rng = np.random.default_rng(4)
    easy, hard = drawn(rng, 300, wrong=0.0), drawn(rng, 100, wrong=0.3)
    both = Outcomes(
        np.concatenate([easy.error_N, hard.error_N]),
        np.concatenate([easy.sure_N, hard.sure_N]),
        ("easy",) * 300 + ("hard",) * 100,
    )
    night = drawn(rng, 150, wrong=0.3)
    says = judge(both, night, NOBODY, True, 0)
    assert min(one.p_value for one in says.found) > 0.05
    assert "hard" in says.found[0].detail
    # Without domains it would be.
    pooled = judge(replace(both, domains=()), night, NOBODY, True, 0)
    assert p_of(pooled, "errors") < 0.001
    # And worse than the hard one is drift.
    assert p_of(judge(both, drawn(rng, 150, wrong=0.6), NOBODY, True, 0), "errors") < 0.001


def test_small_domains_count_together_and_a_single_image_does_not_hide_a_loss() -> None:
    rng = np.random.default_rng(5)
    known = drawn(rng, 340)
    names = ("a",) * 300 + tuple(f"rare {n}" for n in range(40))
    worse = drawn(rng, 200, wrong=0.5)
    says = judge(replace(known, domains=names), worse, NOBODY, True, 0)
    assert p_of(says, "errors") < 0.001
    lone = judge(replace(known, domains=("a",) * 339 + ("b",)), worse, NOBODY, True, 0)
    assert p_of(lone, "errors") < 1e-6


def test_of_a_group_one_image_is_compared() -> None:
    rng = np.random.default_rng(6)
    known = drawn(rng, 300)
    came = replace(drawn(rng, 200), groups=tuple(f"g{n // 10}" for n in range(200)))
    says = judge(known, came, NOBODY, True, 0)
    assert "20" in says.notes[0] and "one of each group" in says.notes[0]
    # Ten modules, each all wrong or all right, are ten images.
    module = Outcomes(np.repeat([1.0, 0.0] * 5, 30), np.full(300, 0.9))
    few = judge(
        known, replace(module, groups=tuple(f"g{n // 30}" for n in range(300))), NOBODY, True, 0
    )
    assert not few.found and f"{LEAST} of each" in few.notes[-1]
    blank = judge(known, replace(came, groups=("",) * 200), NOBODY, True, 0)
    assert not any("group" in note for note in blank.notes)


def test_numbers_are_compared_by_their_absolute_errors() -> None:
    rng = np.random.default_rng(7)
    nan_N = np.full(300, np.nan)
    known = Outcomes(np.abs(rng.normal(0, 1, 300)), nan_N)
    same = Outcomes(np.abs(rng.normal(0, 1, 100)), nan_N[:100])
    worse = Outcomes(np.abs(rng.normal(0, 2, 100)), nan_N[:100])
    better = Outcomes(np.abs(rng.normal(0, 0.2, 100)), nan_N[:100])
    assert p_of(judge(known, same, NOBODY, False, 0), "errors") > 0.01
    assert p_of(judge(known, better, NOBODY, False, 0), "errors") == 1
    says = judge(known, worse, NOBODY, False, 0)
    assert [one.on for one in says.found] == ["errors"]
    assert p_of(says, "errors") < 1e-4
    assert says.sure is None and says.measured == pytest.approx(worse.error_N.mean())
    assert "mean absolute error" in str(says)


@pytest.mark.parametrize("images", [0, 1, LEAST - 1])
def test_too_few_are_measured_and_not_tested(images: int) -> None:
    rng = np.random.default_rng(8)
    says = judge(drawn(rng, 300), drawn(rng, images), NOBODY, True, 0)
    assert not says.found and says.labelled == images
    assert (says.measured is None) == (not images)
    few = judge(drawn(rng, images), drawn(rng, 100), NOBODY, True, 0)
    assert not few.found


def test_a_model_that_is_always_sure_and_a_huge_batch() -> None:
    sure = Outcomes(np.zeros(50), np.ones(50))
    says = judge(sure, Outcomes(np.ones(50), np.ones(50)), NOBODY, True, 0)
    assert all(one.p_value == error_tests.LEAST_P for one in says.found)
    rng = np.random.default_rng(9)
    large = judge(drawn(rng, 5_000), drawn(rng, 20_000), NOBODY, True, 0)
    assert all(0.001 < one.p_value <= 1 for one in large.found)


def test_a_row_keeps_what_was_measured() -> None:
    rng = np.random.default_rng(10)
    for is_share in (True, False):
        says = judge(drawn(rng, 300), drawn(rng, 80), NOBODY, is_share, 0)
        kept = feedback.of_row(feedback.as_row(says))
        assert kept == replace(says, found=(), notes=())
        assert str(kept) == str(says)
    assert feedback.of_row({}) == feedback.NOTHING
    assert feedback.of_row(feedback.as_row(feedback.NOTHING)) == feedback.NOTHING


def test_outcomes_of_each_kind_of_task() -> None:
    classes = Task("single_label", ("cat", "dog"))
    scores_NC = np.array([[0.9, 0.1], [0.4, 0.6], [0.8, 0.2]])
    assert outcomes.errors_of_texts(classes, scores_NC, ["cat", "cat", "cow"]).tolist() == [0, 1, 1]
    assert outcomes.unknown(classes, ["cat", "cow"]) == ["cow"]
    assert outcomes.errors(classes, scores_NC, np.eye(2)[[0, 0, 0]]).tolist() == [0, 1, 0]
    assert outcomes.sure(classes, scores_NC).tolist() == [0.9, 0.6, 0.8]
    tags = Task("multi_label", ("dent", "scratch"))
    said = outcomes.errors_of_texts(tags, scores_NC, ["dent", "scratch|dent", "dent|rust"])
    assert said.tolist() == [0, 1, 1]
    assert outcomes.unknown(tags, ["dent|rust", ""]) == ["rust"]
    assert outcomes.sure(tags, scores_NC) == pytest.approx([0.81, 0.36, 0.64])
    number = Task("regression", ("value",))
    assert outcomes.errors_of_texts(number, np.array([[1.5]]), ["3"]).tolist() == [1.5]
    assert np.isnan(outcomes.sure(number, np.array([[1.5]]))).all()


def test_outcomes_survive_the_package_and_nothing_else_does() -> None:
    rng = np.random.default_rng(11)
    one = replace(drawn(rng, 30), domains=("ä", "") * 15, groups=("g",) * 30, split="test")
    again = Outcomes.from_bytes(one.to_bytes(), "here")
    assert (again.domains, again.groups, again.split) == (one.domains, one.groups, "test")
    assert np.array_equal(again.error_N, one.error_N)
    bad = [
        b"",
        b"no zip",
        one.to_bytes()[:-40],
        replace(one, error_N=one.error_N[:-1]).to_bytes(),
        replace(one, error_N=one.error_N * np.nan).to_bytes(),
        replace(one, error_N=one.error_N - 2).to_bytes(),
        replace(one, domains=("a",)).to_bytes(),
        replace(one, domains=(("a",),) * 30).to_bytes(),  # type: ignore[arg-type]
    ]
    for data in bad:
        with pytest.raises(DataError, match="outcomes of here"):
            Outcomes.from_bytes(data, "here")


def two_habits(
    rng: np.random.Generator, images: int, sure: float, high: float, low: float
) -> Outcomes:
    """Images of which a share is sure, and how often these and the others are wrong."""
    is_sure_N = rng.random(images) < sure
    sure_N = np.where(is_sure_N, rng.uniform(0.8, 1, images), rng.uniform(0.5, 0.8, images))
    return Outcomes((rng.random(images) < np.where(is_sure_N, high, low)).astype(float), sure_N)


def joined(*some: Outcomes, names: tuple[str, ...] = ()) -> Outcomes:
    domains = tuple(name for name, one in zip(names, some, strict=False) for _ in range(len(one)))
    error_N, sure_N = (np.concatenate([getattr(o, w) for o in some]) for w in ("error_N", "sure_N"))
    return Outcomes(error_N, sure_N, domains)


def test_a_mixture_of_domains_that_err_at_opposite_ends_of_confidence_is_no_drift(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(12)
    one, other = (0.7, 0.4, 0.05), (0.3, 0.05, 0.4)
    alarms = {0: 0, error_tests.MIXED: 0}
    for _ in range(40):
        known = [two_habits(rng, 2000, *of) for of in (one, other)]
        night = joined(*(two_habits(rng, 500, *of) for of in (one, other)))
        for mixed in alarms:
            monkeypatch.setattr(error_tests, "MIXED", mixed)
            says = judge(joined(*known, names=("a", "b")), night, NOBODY, True, 0)
            alarms[mixed] += p_of(says, "calibration") <= 0.05
    # Against each domain alone, such nights alarm.
    assert alarms[0] > 20 and alarms[error_tests.MIXED] <= 6


def test_images_that_chose_the_model_are_measured_and_not_tested() -> None:
    rng = np.random.default_rng(13)
    known = replace(drawn(rng, 400), split="val", chose=True)
    says = judge(known, drawn(rng, 100, wrong=0.5), NOBODY, True, 0)
    assert not says.found and "val, which chose the model" in says.notes[-1]
    assert says.measured is not None and says.known is not None


def test_images_of_no_group_stand_alone_in_the_interval_too() -> None:
    rng = np.random.default_rng(14)
    known, came = drawn(rng, 300), drawn(rng, 120)
    alone = judge(known, came, NOBODY, True, 0)
    blank = judge(known, replace(came, groups=("",) * 120), NOBODY, True, 0)
    assert (blank.low, blank.high) == pytest.approx((alone.low, alone.high))


def test_one_huge_error_decides_nothing_about_numbers() -> None:
    rng = np.random.default_rng(15)
    nan_N = np.full(300, np.nan)
    known = Outcomes(np.abs(rng.normal(0, 1, 300)), nan_N)
    outlier = np.r_[1e9]
    better = Outcomes(np.r_[np.abs(rng.normal(0, 0.3, 99)), outlier], nan_N[:100])
    assert p_of(judge(known, better, NOBODY, False, 0), "errors") == 1
    spoiled = Outcomes(np.r_[known.error_N[1:], outlier], nan_N)
    worse = Outcomes(np.abs(rng.normal(0, 3, 100)), nan_N[:100])
    assert p_of(judge(spoiled, worse, NOBODY, False, 0), "errors") < 1e-4


def test_a_night_of_two_domains_of_numbers_is_no_drift() -> None:
    """One is always off by 1, the other by 0 or 2: a mixture has the mean of both."""
    rng = np.random.default_rng(16)

    def narrow(images: int) -> np.ndarray:
        return 1 + 0.1 * rng.random(images)

    def wide(images: int) -> np.ndarray:
        return 2 * rng.integers(0, 2, images) + 0.1 * rng.random(images)

    alarms = 0
    for _ in range(60):
        error_N = np.r_[narrow(300), wide(300)]
        known = Outcomes(error_N, np.full(600, np.nan), ("n",) * 300 + ("w",) * 300)
        came = Outcomes(np.r_[narrow(100), wide(100)], np.full(200, np.nan))
        alarms += p_of(judge(known, came, NOBODY, False, 0), "errors") <= 0.01
    assert alarms <= 3


def test_held_out_images_of_domains_too_small_to_compare_with_are_said() -> None:
    rng = np.random.default_rng(17)
    known = replace(drawn(rng, 315), domains=("a",) * 300 + ("b",) * 15)
    says = judge(known, drawn(rng, 60), NOBODY, True, 0)
    assert any("15 held-out images" in note for note in says.notes)
    names = ("x\n\x1b[31m" + "y" * 500,) * 200 + ("(no name)",) * 115
    odd = judge(replace(known, domains=names), drawn(rng, 60), NOBODY, True, 0)
    assert all("\n" not in one.detail and len(one.detail) < 400 for one in odd.found)


def test_of_a_single_group_of_numbers_no_end_is_known() -> None:
    rng = np.random.default_rng(18)
    nan_N = np.full(300, np.nan)
    known = Outcomes(rng.random(300), nan_N)
    came = Outcomes(rng.random(40), nan_N[:40], groups=("one",) * 40)
    says = judge(known, came, NOBODY, False, 0)
    assert says.high is None and "to ?" in str(says)
    assert str(feedback.of_row(feedback.as_row(says))) == str(says)


def test_a_night_of_its_own_confidence_is_a_random_draw_and_a_choice_within_it_is_none() -> None:
    rng = np.random.default_rng(19)
    known = drawn(rng, 400)
    sure, unsure = drawn(rng, 200, easy=0.2), drawn(rng, 200, easy=-0.1)
    # Nothing of the sure night has a label, and half of the other one.
    others = Seen(np.r_[sure.sure_N, unsure.sure_N[100:]], np.repeat([0, 1], [200, 100]))
    half = unsure.only(np.arange(100))
    says = judge(known, half, others, True, 0, np.ones(100, int))
    assert [one.on for one in says.found] == ["errors", "calibration"]
    # Of one night, it would be a choice; and the less sure half of that night is one.
    one_night = replace(others, window_N=np.ones(300, int))
    assert [one.on for one in judge(known, half, one_night, True, 0, np.ones(100, int)).found] == [
        "calibration"
    ]
    order = np.argsort(unsure.sure_N)
    rest = Seen(np.r_[sure.sure_N, unsure.sure_N[order[100:]]], others.window_N)
    chosen = judge(known, unsure.only(order[:100]), rest, True, 0, np.ones(100, int))
    assert [one.on for one in chosen.found] == ["calibration"]
    assert "surer of other images" in chosen.notes[-1]


def test_a_random_draw_is_called_a_choice_as_rarely_as_it_should() -> None:
    rng = np.random.default_rng(20)
    known, calls = drawn(rng, 100), 0
    for _ in range(300):
        # Rounded: a model that says the same of many images.
        sure_N = np.round(rng.beta(6, 2, 300), 1)
        window_N = rng.integers(0, 3, 300)
        came = Outcomes(np.zeros(60), sure_N[:60])
        others = Seen(sure_N[60:], window_N[60:])
        says = judge(known, came, others, True, 0, window_N[:60])
        calls += any("surer" in n or "less sure" in n for n in says.notes)
    assert stats.binomtest(calls, 300, chosen.CHOSEN, alternative="greater").pvalue > 0.001
    assert calls > 0


def test_images_that_name_their_domain_are_compared_with_it() -> None:
    """Where nobody knows, a small domain hides a loss: it may have been a night of that one."""
    rng = np.random.default_rng(21)
    large, small = drawn(rng, 400), drawn(rng, 20, wrong=0.4)
    known = joined(large, small, names=("a", "b"))
    night = drawn(rng, 200, wrong=0.2)
    assert p_of(judge(known, night, NOBODY, True, 0), "errors") > 0.05
    says = judge(known, replace(night, domains=("a",) * 200), NOBODY, True, 0)
    assert p_of(says, "errors") < 1e-4 and p_of(says, "calibration") < 1e-4
    assert says.known == pytest.approx(1 - large.error_N.mean())
    assert "of the same domains" in says.found[0].detail
    # A domain that nobody knows: all are compared as before.
    new = judge(known, replace(night, domains=("a",) * 199 + ("c",)), NOBODY, True, 0)
    assert [one.p_value for one in new.found] == [
        one.p_value for one in judge(known, night, NOBODY, True, 0).found
    ]


def test_named_domains_in_any_mixture_are_no_drift() -> None:
    rng = np.random.default_rng(22)
    alarms = {"errors": 0, "calibration": 0}
    for _ in range(200):
        known = joined(drawn(rng, 200), drawn(rng, 60, wrong=0.3), names=("a", "b"))
        count = int(rng.integers(0, 120))
        night = joined(drawn(rng, 120 - count), drawn(rng, count, wrong=0.3), names=("a", "b"))
        says = judge(known, night, NOBODY, True, 0)
        for on in alarms:
            alarms[on] += p_of(says, on) <= 0.05
    for calls in alarms.values():
        assert stats.binomtest(calls, 200, 0.05, alternative="greater").pvalue > 0.001


def test_every_place_says_the_same_numbers() -> None:
    rng = np.random.default_rng(23)
    says = judge(drawn(rng, 300), drawn(rng, 80), NOBODY, True, 0)
    report = DriftReport((), 0.5, False, 0.01, 300, 80, (), feedback=says)
    logged = check._metrics(report)
    told = watching.feedback_facts(says)
    assert told is not None and told["measured"] == says.measured == logged["drift.measured"]
    assert (told["labelled"], logged["drift.labelled"]) == (80, 80.0)
    assert logged["drift.measured_known"] == told["measured_known"] == says.known
    assert f"{100 * logged['drift.measured']:.0f} %" in str(says)
    # Nothing came: nothing is logged, and not a zero.
    assert not any(
        "measured" in name or "labelled" in name
        for name in check._metrics(replace(report, feedback=feedback.NOTHING))
    )


@pytest.mark.parametrize(
    "odd",
    [
        {"measured": "0.9"},
        {"measured": float("nan")},
        {"measured": 90.0},
        {"measured": -0.1},
        {"labelled": None},
        {"labelled": "120"},
        {"labelled": 0},
    ],
)
def test_a_foreign_row_says_nothing(odd: dict[str, object]) -> None:
    rng = np.random.default_rng(24)
    row = feedback.as_row(judge(drawn(rng, 300), drawn(rng, 80), NOBODY, True, 0))
    assert str(feedback.of_row(row))
    assert feedback.of_row(row | odd) == feedback.NOTHING
    assert "? to" in str(feedback.of_row(row | {"measured_low": None}))
