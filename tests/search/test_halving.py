"""Halving keeps what is good, spends little on the rest, and forgets nothing; the cap moves when
rankings do.
"""

from __future__ import annotations

import json
import math
import random
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.halving import CURVES, Table, compare, ratios, run
from raypipe.search.schedulers import halving
from raypipe.search.schedulers.halving import Halving, noise, rungs

NAN = float("nan")


def steady(count: int, epochs: int = 27, wobble: float = 0.0, seed: int = 0) -> Table:
    """Curves that rise in parallel, the best last, each epoch off by up to `wobble` times the gap
    between neighbours.
    """
    draw = random.Random(seed)
    rise = [
        [
            i / count + 0.1 * e / epochs + draw.uniform(-wobble, wobble) / count
            for e in range(epochs)
        ]
        for i in range(count)
    ]
    return Table(rise, "max")


def crossed(count: int, epochs: int = 27) -> Table:
    """Those that lead until epoch 2 are last from then on."""
    return Table(
        [[(i if e < 2 else count - i) / count for e in range(epochs)] for i in range(count)], "max"
    )


def epochs_of(table: Table, rule: Halving, workers: int = 2) -> list[int]:
    """How many epochs each trial was trained, in the order of the table."""
    seen: dict[str, int] = {}
    report = rule.report
    rule.report = lambda trial, epoch, value: (
        seen.__setitem__(trial, epoch),
        report(trial, epoch, value),
    )[1]  # type: ignore
    run(table, range(len(table.values)), rule, workers)
    return [seen[str(i)] for i in range(len(table.values))]


def test_rungs_multiply_and_end_at_the_full_budget() -> None:
    assert (
        rungs(27, 1, 3) == [1, 3, 9, 27]
        and rungs(40, 3, 3) == [3, 9, 27, 40]
        and rungs(4, 4, 2) == rungs(4, 9, 2) == [4]
    )


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), workers=st.integers(1, 4), mode=st.sampled_from(["max", "min"]))
def test_the_best_of_parallel_curves_is_trained_in_full_and_most_others_are_not(
    seed: int, workers: int, mode: Any
) -> None:
    sign, order = (1 if mode == "max" else -1), random.Random(seed).sample(range(27), 27)
    table = Table([[sign * value for value in steady(27).values[i]] for i in order], mode)
    trained = epochs_of(table, Halving(27, 1, 3, mode), workers)
    assert trained[order.index(26)] == 27 and set(trained) <= {1, 3, 9, 27}
    assert (
        sum(trained) < 27 * 27 / 3
    )  # half of them one epoch, if they do not come in the order of their worth


def test_even_when_each_trial_is_better_than_all_before_it_is_cheaper_than_training_in_full() -> (
    None
):
    assert sum(epochs_of(steady(27), Halving(27, 1, 3), 1)) < 27 * 27


def test_a_trial_pauses_at_a_rung_and_goes_on_when_it_is_among_the_best() -> None:
    rule = Halving(9, 1, 3)
    assert [rule.report(t, 1, v) for t, v in zip("ab", (0.5, 0.6), strict=True)] == [
        "pause",
        "pause",
    ]
    assert rule.promotable() == []  # a third of two is none
    assert rule.report("c", 1, 0.4) == "pause" and rule.promotable() == ["b"]
    rule.resume("b")
    assert rule.promotable() == [] and [rule.report("b", e, 0.7) for e in (2, 3)] == [
        "go on",
        "pause",
    ]


def test_of_equals_the_first_goes_on() -> None:
    rule = Halving(9, 1, 3)
    for trial in "abcdef":
        rule.report(trial, 1, 0.69)  # they all predict one class
    assert rule.promotable() == ["a", "b"]


def test_without_pauses_a_trial_is_stopped_or_goes_on() -> None:
    rule = Halving(9, 1, 3, pauses=False)
    said = [rule.report(t, 1, v) for t, v in zip("abcde", (0.5, 0.4, 0.6, 0.6, 0.5), strict=True)]
    assert said == ["go on", "stop", "go on", "stop", "stop"] and rule.promotable() == []


@pytest.mark.parametrize("pauses", [True, False])
def test_a_value_that_is_no_number_stops_its_trial_and_helps_nobody(pauses: bool) -> None:
    rule = Halving(9, 1, 3, pauses=pauses)
    assert rule.report("a", 1, NAN) == rule.report("b", 1, NAN) == "stop"
    rule.report("c", 1, 0.1)
    assert rule.promotable() == (["c"] if pauses else []) and rule.last() in ("c", None)


def test_when_nothing_is_left_the_best_is_trained_in_full_once() -> None:
    rule = Halving(27, 1, 3)
    for trial, value in (("a", 0.3), ("b", 0.5)):
        rule.report(trial, 1, value)
    assert rule.promotable() == [] and rule.last() == "b"
    rule.resume("b", to_the_end=True)
    assert {rule.report("b", e, 0.5) for e in range(2, 27)} == {"go on"} and rule.report(
        "b", 27, 0.5
    ) == "stop"
    assert rule.last() is None  # a is not the best, and b is done


@settings(max_examples=30, deadline=None)
@given(total=st.integers(1, 40), seed=st.integers(0, 99))
def test_those_called_hopeless_are_those_that_are_never_promoted(total: int, seed: int) -> None:
    table, order = (
        steady(total, wobble=3, seed=seed),
        random.Random(seed).sample(range(total), total),
    )
    with_end, without = Halving(27, 1, 3, total=total), Halving(27, 1, 3)
    assert run(table, order, with_end, 2) == run(table, order, without, 2)
    assert (
        not set(with_end.hopeless()) & {*with_end.promotable(), with_end.last()}
        and without.hopeless() == []
    )
    if total >= 6:
        assert len(with_end.hopeless()) >= total // 2


def test_one_that_ended_is_not_waited_for() -> None:
    rule = Halving(9, 1, 3)
    for trial, value in zip("abc", (0.3, 0.9, 0.5), strict=True):
        rule.report(trial, 1, value)
    rule.forget("b")
    assert rule.promotable() == [] and rule.last() == "c"


def test_the_cap_stays_while_rankings_agree_and_moves_when_they_do_not() -> None:
    agree, differ = Halving(27, 1, 3, capped=True), Halving(27, 1, 3, capped=True)
    trained = epochs_of(steady(60), agree)
    assert agree.cap == 3 and sorted(trained)[-2:] == [3, 27]  # one was trained in full in the end
    epochs_of(crossed(60), differ)
    assert differ.cap == 9  # ranked otherwise at 3 than at 1, and at 9 as at 3


def test_the_cap_saves_epochs_and_finds_the_same_where_rankings_agree() -> None:
    table = steady(81, wobble=0.2)
    whole = (
        run(table, range(81), Halving(27, 1, 3), 2),
        run(table, range(81), Halving(27, 1, 3, capped=True), 2),
    )
    assert whole[1].whole < 0.65 * whole[0].whole and whole[1].found == whole[0].found


def test_noise_moves_the_cap_less_often_than_if_it_were_taken_for_a_ranking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def caps() -> list[int]:
        rules = [Halving(27, 1, 3, capped=True) for _ in range(4)]
        for seed, rule in enumerate(rules):
            run(steady(60, 27, 2.0, seed), random.Random(seed).sample(range(60), 60), rule, 2)
        return [rule.cap for rule in rules]

    with_noise = caps()
    monkeypatch.setattr(halving, "noise", lambda curves, otherwise: 0.0)
    assert sum(with_noise) < sum(caps())


def test_noise_is_how_far_apart_curves_are_that_cross_and_cross_again() -> None:
    a, b = {1: 0.5, 2: 0.6, 3: 0.5}, {1: 0.4, 2: 0.7, 3: 0.4}  # b leads in epoch 2 alone
    below = {1: 0.1, 2: 0.1, 3: 0.1}
    assert (
        noise([a, b]) == pytest.approx(0.1) and noise([a, below], 0.25) == 0.25 and noise([]) == 0
    )
    assert noise([a, {1: 0.4, 2: 0.7}]) == 0  # once might be for good


@given(
    curves=st.lists(
        st.dictionaries(st.integers(1, 6), st.sampled_from([0.1, 0.2, 0.3, 0.4]), max_size=6),
        max_size=7,
    )
)
def test_the_noise_of_all_pairs_at_once_is_that_of_each_pair(
    curves: list[dict[int, float]],
) -> None:
    apart = []
    for one, other in combinations(curves, 2):
        leads = [one[epoch] - other[epoch] for epoch in sorted(one.keys() & other.keys())]
        signs = [lead > 0 for lead in leads if lead]
        if sum(a != b for a, b in pairwise(signs)) >= 2:
            apart.append(abs(leads[-1]))
    apart.sort()
    expected = apart[min(len(apart) - 1, int(0.9 * len(apart)))] if apart else 0.7
    assert noise(curves, 0.7) == expected


@pytest.mark.parametrize("capped", [False, True])
def test_a_rule_goes_on_after_a_restore_as_if_nothing_had_happened(capped: bool) -> None:
    table = steady(40, wobble=4, seed=3)
    said: list[list[Any]] = [[], []]
    for log, restored in zip(said, (False, True), strict=True):
        rule = Halving(27, 1, 3, capped=capped)
        for trial, curve in enumerate(table.values):
            for epoch, value in enumerate(curve, 1):
                verdict = rule.report(str(trial), epoch, value)
                log.append((verdict, rule.promotable(), rule.cap))
                if restored:
                    state = rule.state()
                    rule = Halving(27, 1, 3, capped=capped)
                    rule.restore(state)
                    assert json.loads(json.dumps(state["paused"])) == state["paused"]
                if verdict != "go on":
                    break
            for name in rule.promotable():
                rule.resume(name)
    assert said[0] == said[1]


def test_a_state_is_not_changed_by_later_reports() -> None:
    rule, other = Halving(9, 1, 3, capped=True), Halving(9, 1, 3, capped=True)
    for trial, value in zip("abc", (0.3, 0.9, 0.5), strict=True):
        rule.report(trial, 1, value)
    state = rule.state()
    kept = json.dumps(state)
    other.restore(state)
    for one in (rule, other):
        one.resume("b")
        one.report("b", 2, 0.95)
        one.report("b", 3, 0.9)
        one.end("a")
        assert json.dumps(state) == kept


def test_an_epoch_told_again_gets_the_same_answer() -> None:
    rule = Halving(9, 1, 3)
    for trial, value in zip("abc", (0.3, 0.9, 0.5), strict=True):
        assert rule.report(trial, 1, value) == rule.report(trial, 1, math.pi) == "pause"
    assert rule.promotable() == ["b"]
    rule.resume("b")
    assert rule.report("b", 1, 0.0) == "go on"  # its checkpoint was older than what was known of it
    assert rule.report("a", 2, 0.9) == "pause"  # Tune started it, and nobody had asked for that


def test_a_trial_that_was_forgotten_in_a_kill_comes_back_where_it_was() -> None:
    rule = Halving(27, 1, 3)
    assert rule.report("a", 5, 0.5) == "go on" and rule.report("b", 9, 0.5) == "pause"
    assert rule.report("a", 9, 0.6) == "pause" and rule.last() == "a"


def test_asha_and_its_cap_save_epochs_on_real_curves() -> None:
    """The figures are in benchmarks/results; here, that no change of a rule loses them."""
    table = Table.read(CURVES, "val_accuracy")
    assert len(table.values) >= 100 and table.epochs == 27
    found = compare(table)  # five orders would say anything: 0.82
    assert (
        ratios(found)["asha_vs_random"] < 0.5 and found["pasha"]["whole"] < found["asha"]["whole"]
    )
    assert found["asha"]["short"] < 1.5 and found["pasha"]["short"] < 1.5


def test_one_that_diverges_on_its_way_to_the_end_was_not_trained_in_full() -> None:
    """The search ended with nine epochs of twenty, and said nothing."""
    rule = Halving(9, 3, 3)
    for trial, score in (("a", 0.9), ("b", 0.5), ("c", 0.4)):
        rule.report(trial, 3, score)
    rule.resume("a")
    assert rule.report("a", 5, math.nan) == "stop" and rule.last() == "b"
    rule.resume("b", to_the_end=True)
    rule.report("b", 9, 0.6)
    assert rule.last() is None
