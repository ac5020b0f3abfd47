"""Freeze-thaw search trains what is promising and forgets nothing; its model's slopes are right."""

from __future__ import annotations

import math
import pickle
import random
import time
from typing import Any

import numpy as np
import pytest
from ray.tune.experiment import Trial
from threadpoolctl import ThreadpoolController

from raypipe.config import validate
from raypipe.errors import ConfigError
from raypipe.job import Job
from raypipe.search.schedulers import surrogate
from raypipe.search.schedulers.curves import MOST_OBSERVED, Curve, log_seconds, target
from raypipe.search.schedulers.freeze_thaw import MOST_CANDIDATES, FreezeThaw
from raypipe.search.schedulers.surrogate import Data, Likeness, Posterior
from raypipe.search.schedulers.thaw_scheduler import SECONDS, freeze_thaw
from raypipe.search.space import parse
from raypipe.search.space.coordinates import Coordinates
from raypipe.search.trials.epoch_result import result_of

EPOCHS = 9
NAN = float("nan")


def losses(x: float, epochs: int = EPOCHS) -> list[float]:
    """A curve whose end depends on x: best at 0.7."""
    return [0.1 + (x - 0.7) ** 2 + 1 / (epoch + 1) for epoch in range(epochs)]


def rule_of(xs: list[float], epochs: int = EPOCHS, **more: Any) -> FreezeThaw:
    rule = FreezeThaw(epochs, np.array([0]), **{"mode": "min", **more})
    for i, x in enumerate(xs):
        rule.meet(str(i), np.array([x]))
    return rule


def said_by(
    rule: FreezeThaw, curves: list[list[float]], workers: int = 2, restarts: bool = False
) -> list[tuple[str, int, str]]:
    """(trial, epoch, verdict) of a whole search; with restarts the rule is made anew each time."""
    running: list[str] = []
    log: list[tuple[str, int, str]] = []
    done = dict.fromkeys(map(str, range(len(curves))), 0)
    while True:
        while len(running) < workers and (chosen := rule.choose()):
            running.append(chosen)
        if not running:
            assert rule.done
            return log
        trial = running.pop(0)
        done[trial] += 1
        value = curves[int(trial)][done[trial] - 1]
        aim = math.log(value) if value > 0 else NAN
        # A curve that is shorter than the rule's is of a trial that ended by itself.
        ended = done[trial] == len(curves[int(trial)])
        verdict = rule.report(trial, done[trial], value, aim, ended=ended)
        log.append((trial, done[trial], verdict))
        if verdict == "go on":
            running.append(trial)
        if restarts:
            state = pickle.loads(pickle.dumps(rule.state()))
            rule = rule_of([float(x[0]) for x in rule._x.values()], rule.max_epochs)
            rule.restore(state)


def some(count: int, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [draw.random() for _ in range(count)]


def observed(seed: int = 3) -> Data:
    """Three fields of one, two and one coordinates; five trials of some epochs each."""
    draw = np.random.default_rng(seed)
    trial_N = np.array([0, 0, 0, 1, 1, 2, 3, 3, 4])
    epoch_N = np.array([1, 2, 5, 1, 3, 1, 1, 8, 2])
    y_N = draw.normal(size=9)
    return Data(draw.random((5, 4)), trial_N, np.log(epoch_N), y_N, np.array([0, 1, 1, 2]))


def test_slopes_are_those_of_finite_differences() -> None:
    data = observed()
    means_P, sds_P = surrogate.prior(data.groups)
    for seed in range(3):
        theta_P = means_P + 0.5 * sds_P * np.random.default_rng(seed).normal(size=len(means_P))
        _, slope_P = surrogate.log_posterior(theta_P, data)
        for p in range(len(theta_P)):
            step_P = np.zeros(len(theta_P))
            step_P[p] = 1e-5
            above, _ = surrogate.log_posterior(theta_P + step_P, data)
            below, _ = surrogate.log_posterior(theta_P - step_P, data)
            assert slope_P[p] == pytest.approx((above - below) / 2e-5, rel=1e-4, abs=1e-6)


def test_fitting_makes_the_data_more_probable() -> None:
    data = observed()
    start_P = surrogate.prior(data.groups)[0]
    fitted_P = surrogate.fit(data)
    assert surrogate.log_posterior(fitted_P, data)[0] > surrogate.log_posterior(start_P, data)[0]


def test_a_curve_is_known_where_it_was_observed_and_not_elsewhere() -> None:
    data = observed()
    theta_P = surrogate.prior(data.groups)[0]
    theta_P[surrogate.NOISE] = -5.0
    x = {str(row): x_D for row, x_D in enumerate(data.x_MD)}
    x |= {"twin": data.x_MD[0], "far": data.x_MD[0] + 9.0}
    names, likeness = list(x)[: len(data.x_MD)], Likeness(theta_P, data.group_D, x)
    alike_MM = likeness.between(names, names)
    posterior = Posterior(theta_P, data, alike_MM)
    mean_N, sd_N = posterior.at(alike_MM[:, data.trial_N], data.trial_N, data.t_N)
    assert mean_N == pytest.approx(data.y_N, abs=0.05) and sd_N.max() < 0.05
    # A trial with the same values is another trial: its own term is not known.
    others = likeness.between(names, ["twin", "far"])
    _, (sd_of_twin, sd_far) = posterior.at(others, np.array([-1, -1]), data.t_N[[0, 0]])
    assert 0.1 < sd_of_twin < sd_far


def test_likeness_is_the_same_however_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    data = observed()
    theta_P = surrogate.prior(data.groups)[0]
    x = {str(row): x_D for row, x_D in enumerate(data.x_MD)}
    at_once = Likeness(theta_P, data.group_D, x).between(list(x), list(x))
    assert np.diag(at_once).tolist() == [1.0] * 5 and (at_once == at_once.T).all()
    one_by_one = Likeness(theta_P, data.group_D, x)
    monkeypatch.setattr(surrogate, "MOST_KEPT", 3)  # so that some are forgotten
    for row in range(5):
        for column in range(5):
            got = one_by_one.between([str(row)], [str(column)])
            assert got.tolist() == [[at_once[row, column]]]


def test_targets_far_off_are_cut_and_lost_ones_too() -> None:
    y_N, _, _ = surrogate.standardised([1.0, 1.1, 1.2, 50.0, math.inf])
    assert y_N[3] == y_N[4] == y_N.max() and np.isfinite(y_N).all()
    assert surrogate.standardised([2.0, 2.0])[0].tolist() == [0, 0]
    assert surrogate.standardised([math.inf])[0].tolist() == [0]
    # Most are as good as the best: the others still differ.
    most, _, _ = surrogate.standardised([1.0, 1.0, 1.0, 1.0, 2.0, 3.0])
    assert most[4] > most[0]


def test_the_target_is_the_loss_else_the_metric() -> None:
    assert target({"val_loss": 2.0, "val_accuracy": 0.9}, "val_accuracy", "max") == math.log(2)
    better, worse = (target({"val_accuracy": v}, "val_accuracy", "max") for v in (1.0, 0.5))
    assert better < worse == 0
    assert target({"val_mae": 0.5}, "val_mae", "min") < target({"val_mae": 2.0}, "val_mae", "min")
    assert math.isnan(target({}, "val_accuracy", "max"))


@pytest.mark.parametrize("key", ["val_r2", "val_mae", "val_loss"])
def test_a_better_number_is_a_better_target_whatever_its_sign(key: str) -> None:
    """R2 may be negative, and so may the loss of a likelihood."""
    numbers = [-300.0, -3.0, -0.01, 0.0, 0.01, 0.5, 0.99, 1.5, 200.0]
    aims = [target({key: v}, key, "max" if key == "val_r2" else "min") for v in numbers]
    assert all(math.isfinite(aim) for aim in aims)
    assert aims == sorted(aims, reverse=key == "val_r2") and len(set(aims)) == len(aims)
    assert math.isnan(target({key: NAN}, key, "max"))


def test_the_best_is_trained_in_full_and_most_epochs_are_saved() -> None:
    xs = some(40)
    curves = [losses(x) for x in xs]
    log = said_by(rule_of(xs), curves)
    found = min(curves[int(trial)][epoch - 1] for trial, epoch, _ in log)
    assert found < min(curve[-1] for curve in curves) * 1.002
    assert any(epoch == EPOCHS for _, epoch, _ in log) and len(log) < 40 * EPOCHS * 0.7


@pytest.mark.parametrize("seed", range(3))
def test_the_best_is_found_though_trials_like_it_are_bad(seed: int) -> None:
    """The model thinks little of it until it has begun, and all begin before the end."""
    xs, own = [*some(40, seed), 0.02], some(40, 100 + seed)
    curves = [[v + 0.3 * more for v in losses(x)] for x, more in zip(xs[:-1], own, strict=True)]
    curves.append([0.05 + 1 / (epoch + 1) for epoch in range(EPOCHS)])
    log = said_by(rule_of(xs), curves)
    assert ("40", EPOCHS) in {(trial, epoch) for trial, epoch, _ in log}
    assert len({trial for trial, _, _ in log}) == 41 and len(log) < 41 * EPOCHS * 0.6


def test_a_restored_rule_decides_as_if_nothing_had_happened() -> None:
    xs = some(12)
    curves = [losses(x) for x in xs]
    assert said_by(rule_of(xs), curves) == said_by(rule_of(xs), curves, restarts=True)


def test_an_epoch_told_again_gets_the_same_answer_and_counts_once() -> None:
    rule = rule_of(some(6))
    trial = rule.choose()
    assert trial is not None
    first = rule.report(trial, 1, 0.5, math.log(0.5), 2.0)
    state = pickle.dumps(rule.state())
    assert rule.report(trial, 1, 0.9, math.log(0.9), 2.0) == first
    assert pickle.dumps(rule.state()) == state


@pytest.mark.parametrize(("epochs", "verdict"), [(27, "pause"), (50, "go on")])
def test_a_trial_does_not_pause_in_the_first_25th_of_its_epochs(epochs: int, verdict: str) -> None:
    rule = FreezeThaw(epochs, np.zeros(1, int), mode="min")
    for name, x in (("good", 0.1), ("bad", 0.7), ("like the good one", 0.12)):
        rule.meet(name, np.array([x]))
    for trial in ("good", "bad"):
        rule.begin(trial)
    assert rule.report("good", 1, 0.1, math.log(0.1)) == "go on"
    assert rule.report("bad", 1, 0.9, math.log(0.9)) == verdict


def test_a_lost_trial_ends_and_those_like_it_are_avoided() -> None:
    rule = rule_of([0.1, 0.9, 0.12, 0.88])
    assert rule.report("0", 1, NAN, NAN) == "stop" and rule.is_ended("0")
    rule.report("1", 1, 5.0, math.log(5.0))
    rule.forget("1")
    mean_C, _ = rule._predict(rule._model(), ["2", "3"], np.array([1, 1]))
    assert mean_C[0] > mean_C[1]
    assert {rule.choose(), rule.choose()} == {"1", "3"}


@pytest.mark.parametrize("curve", [[0.5] * EPOCHS, [NAN] * EPOCHS], ids=["equal", "all lost"])
def test_a_search_ends_when_all_trials_are_the_same(curve: list[float]) -> None:
    log = said_by(rule_of(some(8)), [curve] * 8)
    assert len(log) <= 8 * EPOCHS
    assert any(epoch == EPOCHS for _, epoch, _ in log) or math.isnan(curve[0])


@pytest.mark.parametrize(("trials", "epochs"), [(1, EPOCHS), (1, 1), (5, 1)])
def test_one_trial_and_one_epoch_are_a_search_too(trials: int, epochs: int) -> None:
    xs = some(trials)
    log = said_by(rule_of(xs, epochs), [losses(x, epochs) for x in xs])
    assert log[-1][1] == epochs or trials > 1
    assert any(epoch == epochs for _, epoch, _ in log)


def test_trials_that_end_by_their_own_rule_are_not_all_trained() -> None:
    """As train.stopping.patience ends them: no trial reaches the last epoch."""
    xs = some(30)
    curves = [losses(x) for x in xs]
    log = said_by(rule_of(xs, epochs=27), curves)
    assert all(verdict == "stop" for _, epoch, verdict in log if epoch == EPOCHS)
    assert len(log) < 30 * EPOCHS * 0.8
    found = min(curves[int(trial)][epoch - 1] for trial, epoch, _ in log)
    assert found < min(curve[-1] for curve in curves) * 1.002


def test_nothing_to_try_is_done() -> None:
    rule = rule_of([])
    assert rule.choose() is None and rule.done


def test_a_failed_trial_is_not_waited_for_and_may_come_back() -> None:
    rule = rule_of([0.1, 0.9])
    first = rule.choose()
    assert first == "0"
    rule.fail("0")
    assert rule.choose() == "1" and not rule.done
    rule.report("0", 1, 0.5, math.log(0.5))  # Tune had started it again
    assert "0" not in rule.state()["failed"]


def test_a_trial_that_tune_starts_again_is_not_paused() -> None:
    """Tune keeps a list of its own of trials that are to start, and asserts that it is true."""
    job = validate(Job, {"table": {"uri": "unused"}})
    space = parse.parse({"train.lr": "loguniform(1e-4, 1e-2)"}, job.training)
    made = freeze_thaw(job.train.stopping, 3, space, seed=0, concurrent=1)
    trial = Trial("unused", config={"train.lr": 1e-3}, stub=True)
    made.on_trial_add(None, trial)
    assert trial.status == Trial.PAUSED
    made.rule.choose()
    # As Tune does when a trial fails for the first time.
    trial.set_status(Trial.PENDING)
    made.on_trial_error(None, trial)
    made.on_trial_add(None, trial)
    assert trial.status == Trial.PENDING and made.rule.is_running(trial.trial_id)


def test_a_trial_that_had_failed_before_a_kill_is_tried_again_at_once() -> None:
    """It waited instead, was never chosen, ended as if it had been stopped early, and won."""
    job = validate(Job, {"table": {"uri": "unused"}})
    space = parse.parse({"train.lr": "loguniform(1e-4, 1e-2)"}, job.training)
    trial = Trial("unused", config={"train.lr": 1e-3}, stub=True)
    before, after = (
        freeze_thaw(job.train.stopping, 3, space, seed=0, concurrent=1) for _ in range(2)
    )
    before.on_trial_add(None, trial)
    assert before.rule.choose() == trial.trial_id
    before.on_trial_error(None, trial)
    after.rule.restore(before.rule.state())
    # As Tune does with trials that failed.
    trial.set_status(Trial.PENDING)
    after.on_trial_add(None, trial)
    assert trial.status == Trial.PENDING and after.rule.is_running(trial.trial_id)
    after.on_trial_error(None, trial)
    assert after.rule.is_failed(trial.trial_id) and after.rule.choose() is None


def test_a_trial_that_the_end_of_a_search_cut_is_not_waited_for() -> None:
    """The budget was over before an answer, and the same command gave the search more time."""
    job = validate(Job, {"table": {"uri": "unused"}})
    space = parse.parse({"train.lr": "loguniform(1e-4, 1e-2)"}, job.training)
    trial = Trial("unused", config={"train.lr": 1e-3}, stub=True)
    before, after = (
        freeze_thaw(job.train.stopping, 3, space, seed=0, concurrent=1) for _ in range(2)
    )
    before.on_trial_add(None, trial)
    assert before.rule.choose() == trial.trial_id
    # Tune tells its schedulers of no such end.
    trial.set_status(Trial.TERMINATED)
    after.rule.restore(before.rule.state())
    after.on_trial_add(None, trial)
    assert trial.status == Trial.PAUSED and after.rule.choose() == trial.trial_id


def test_the_better_trial_comes_first_however_dear_it_is() -> None:
    rule = rule_of([0.5, 0.5 + 1e-9, 0.2])
    for trial, value, seconds in (("0", 0.4, 1000.0), ("1", 0.5, 1.0)):
        for epoch in (1, 2):
            rule.report(trial, epoch, value, math.log(value), seconds)
        rule.forget(trial)
    dear, cheap, new = rule._log_seconds(["0", "1", "2"])
    assert cheap < new < dear  # guessed in between
    assert rule.choose({"0", "1"}) == "0"


def test_an_epoch_of_before_a_kill_makes_no_trial_look_cheap() -> None:
    job = validate(Job, {"table": {"uri": "unused"}})
    rule = job.train.stopping
    space = parse.parse({"train.lr": "loguniform(1e-4, 1e-2)"}, job.training)
    made = freeze_thaw(rule, 9, space, seed=0, concurrent=1)
    trials = [Trial("unused", config={"train.lr": lr}, stub=True) for lr in (1e-3, 2e-3)]
    told = {"val_accuracy": 0.5, "val_loss": 1.0}
    for trial, earlier, seconds in zip(trials, (False, True), (20.0, 0.01), strict=True):
        made.on_trial_add(None, trial)
        result = result_of(told, 1, False, rule.metric, rule.mode, earlier=earlier)
        made.on_trial_result(None, trial, result | {SECONDS: seconds})
    one, other = np.exp(made.rule._log_seconds([trial.trial_id for trial in trials]))
    assert one == pytest.approx(20) and other == pytest.approx(20)
    assert made.rule.state()["spent"] == pytest.approx(40)


def test_a_search_of_dear_trials_waits_in_epochs() -> None:
    """Few epochs of a dear trial take all the seconds of the others: no reason to give it up."""
    rule = rule_of([0.1, 0.9], epochs=100)
    rule.report("0", 1, 0.5, 0.0, 1.0)
    rule.report("1", 1, 0.5, 0.0, 1000.0)
    for epoch in range(2, 101):
        rule.report("1", epoch, 0.5, 0.0, 1000.0)
        assert not rule._is_settled(["0", "1"])
    rule.report("0", 2, 0.5, 0.0, 1.0)  # as many epochs as one whole training has
    assert rule._is_settled(["0", "1"])
    rule.meet("2", np.array([0.5]))
    assert not rule._is_settled(["0", "1", "2"])  # one that has not begun


def timed(odd: float, at: int, count: int = 8, epochs: int = 27) -> list[tuple[str, int]]:
    """(trial, epoch) of a search whose epochs take ten seconds, but for one."""
    xs, own = some(count, 1), some(count, 2)
    rule, done = rule_of(xs, epochs), dict.fromkeys(map(str, range(count)), 0)
    log: list[tuple[str, int]] = []
    while trial := rule.choose():
        verdict = "go on"
        while verdict == "go on":
            done[trial] += 1
            x, more = xs[int(trial)], own[int(trial)]
            value = losses(x, epochs)[done[trial] - 1] + 0.2 * more
            seconds = odd if len(log) == at else 10.0
            log.append((trial, done[trial]))
            verdict = rule.report(trial, done[trial], value, math.log(value), seconds)
    return log


@pytest.mark.parametrize("odd", [28800.0, -3600.0, NAN, math.inf])
@pytest.mark.parametrize("at", range(5, 60, 11))
def test_an_odd_clock_changes_a_search_little(odd: float, at: int) -> None:
    """A laptop sleeps, or its clock is set back."""
    log, usual = timed(odd, at), timed(10.0, at)
    assert {trial for trial, _ in log} == {trial for trial, _ in usual}
    assert 0.9 * len(usual) < len(log) < 1.6 * len(usual) < 0.7 * 8 * 27


def test_seconds_that_were_observed_are_not_guessed_however_many_trials_there_are() -> None:
    names = [str(i) for i in range(MOST_OBSERVED + 50)]
    curves = {name: Curve({1: 0.0}, 0.0, [9.0 if i < 50 else 1.0]) for i, name in enumerate(names)}
    found = log_seconds(curves, {name: np.array([0.5]) for name in names}, names)
    assert np.exp(found) == pytest.approx([9.0] * 50 + [1.0] * MOST_OBSERVED)


def test_seconds_that_are_known_late_count_for_earlier_epochs_too() -> None:
    """After a kill, epochs are told again without theirs."""
    late, known = rule_of([0.1, 0.9]), rule_of([0.1, 0.9])
    for epoch in range(1, 5):
        for rule, seconds in ((late, None if epoch < 4 else 0.01), (known, 0.01)):
            rule.report("0", epoch, 1 / epoch, -math.log(epoch), seconds)
    for key in ("spent", "improved"):
        assert late.state()[key] == pytest.approx(known.state()[key]), key


def test_the_best_is_trained_in_full_though_it_runs_when_nothing_else_is_worth_it() -> None:
    rule = rule_of([0.1, 0.5, 0.9], epochs=4)
    for trial, value in (("0", 0.5), ("1", 0.1), ("2", 0.9)):
        rule.report(trial, 1, value, math.log(value))
        rule.forget(trial)
    for epoch in range(2, 4):
        rule.report("2", epoch, 0.9, math.log(0.9))
        rule.report("0", epoch, 0.5, math.log(0.5))
    rule._news -= 100
    rule.begin("1")
    assert rule.choose() is None and not rule.done
    assert [rule.report("1", epoch, 0.1, math.log(0.1)) for epoch in (2, 3, 4)][:2] == ["go on"] * 2
    # And not another one while Tune still saves it.
    rule.restore({**rule.state(), "ended": {}, "to_the_end": None})
    curve = rule._curves["1"]
    rule._curves["1"] = Curve({1: curve.targets[1]}, curve.best)
    assert rule.choose({"0", "2"}) is None and rule.choose() == "1"


@pytest.mark.parametrize("end", [3, 4], ids=["its own rule's", "the last epoch"])
def test_a_trial_that_diverged_at_its_end_was_not_trained_in_full(end: int) -> None:
    """The search ended with the best of the others after one epoch."""
    rule = rule_of([0.1, 0.5, 0.9], epochs=4)
    for trial, value in (("0", 0.5), ("1", 0.1), ("2", 0.9)):
        rule.report(trial, 1, value, math.log(value))
        rule.forget(trial)
    for epoch in range(2, end):
        rule.report("1", epoch, 0.1, math.log(0.1))
    assert rule.report("1", end, NAN, NAN, ended=True) == "stop"
    rule._news -= 100  # nothing improves any more
    assert rule.choose() == "0" and not rule.done
    said = [rule.report("0", epoch, 0.5, math.log(0.5)) for epoch in (2, 3, 4)]
    assert said == ["go on", "go on", "stop"]
    assert rule.choose() is None and rule.done


@pytest.mark.parametrize("again", [3, 4], ids=["an earlier epoch", "its last epoch"])
def test_a_trial_that_diverges_when_it_trains_an_epoch_again_was_not_trained_in_full(
    again: int,
) -> None:
    """A kill had damaged its checkpoint."""
    rule = rule_of([0.1, 0.5], epochs=4)
    rule.report("0", 1, 0.5, math.log(0.5))
    rule.forget("0")
    for epoch in range(1, 5):
        rule.report("1", epoch, 0.1, math.log(0.1))
    assert rule.report("1", again, NAN, NAN) == "stop"
    rule._news -= 100  # nothing improves any more
    assert rule.choose() == "0" and not rule.done


def test_the_best_by_the_metric_is_trained_in_full_however_many_wait() -> None:
    """It may have a bad loss: then it was no candidate, and another one was."""
    count = MOST_CANDIDATES // 2 + 9
    rule = rule_of(some(count), mode="max")
    for i in range(count):
        rule.report(str(i), 1, i / count, math.log(1 + i / count))
        rule.forget(str(i))
    assert len(rule._open()) == MOST_CANDIDATES // 2
    rule._news -= 3 * count  # nothing improves any more
    assert rule.choose() == str(count - 1)


def test_all_that_are_trained_in_full_may_diverge() -> None:
    """Then the next best one is, until none is left."""
    xs = some(4)
    log = said_by(rule_of(xs), [[*losses(x)[:-1], NAN] for x in xs])
    assert {trial for trial, epoch, _ in log if epoch == EPOCHS} == set("0123")


def test_a_state_is_not_changed_by_later_reports() -> None:
    rule = rule_of([0.1, 0.9])
    for trial, epoch in (("0", 1), ("0", 2), ("1", 1)):
        rule.report(trial, epoch, 0.5, math.log(0.5), 2.0)
    state = rule.state()
    kept = pickle.dumps(state)
    other = rule_of([0.1, 0.9])
    other.restore(state)
    for one in (rule, other):
        one.begin("1")
        one.report("1", 2, 0.4, math.log(0.4), 3.0)
        one.end("0")
        one.fail("1")
        assert pickle.dumps(state) == kept
    assert rule.state() == other.state()


def test_equal_trials_come_in_the_same_order_after_a_restore() -> None:
    """What they are worth differs in its last digits, by who else is asked for."""

    def said(seed: int, restarts: bool) -> list[tuple[str, int]]:
        draw = random.Random(seed)
        rule, log = rule_of([0.5] * 9), []
        done = dict.fromkeys(map(str, range(9)), 0)
        while trial := rule.choose():
            if draw.random() < 0.3:
                rule.fail(trial)
                log.append((trial, -1))
                continue
            done[trial] += 1
            value = losses(0.5)[done[trial] - 1]
            rule.report(trial, done[trial], value, math.log(value))
            log.append((trial, done[trial]))
            rule.forget(trial)
            if restarts:
                state = pickle.loads(pickle.dumps(rule.state()))
                rule = rule_of([0.5] * 9)
                rule.restore(state)
        return log

    for seed in range(6):
        assert said(seed, True) == said(seed, False)


def test_a_search_that_an_older_raypipe_began_continues() -> None:
    rule = rule_of([0.1, 0.9])
    rule.report("0", 1, 0.5, math.log(0.5), 2.0)
    rule.report("0", 2, 0.4, math.log(0.4), 4.0)
    old = rule.state()
    old["begun"] = old["spent"]
    del old["news"]
    curve = Curve.__new__(Curve)
    curve.__setstate__({**old["curves"]["0"].__dict__, "seconds": 6.0, "timed": 2})
    rule.restore({**old, "curves": {"0": curve}})
    assert curve.seconds == [3.0, 3.0] and rule.state()["news"] == 2
    assert rule.choose() in ("0", "1")


def test_a_thousand_trials_do_not_make_it_slow() -> None:
    """Work is bounded by observations and candidates; 0.5 s a decision is twenty times today's."""
    rule = FreezeThaw(27, np.arange(20), mode="min")
    draw = np.random.default_rng(0)
    for i in range(1000):
        rule.meet(str(i), draw.random(20))
    for i in range(600):
        targets = {epoch: float(draw.normal()) for epoch in (1, 3, 8)}
        rule._curves[str(i)] = Curve(targets, -1.0, [1.0])
    rule._reports = rule._fitted = 600
    data = rule._model().posterior._data
    assert len(data.y_N) <= 300 and len(data.x_MD) <= 150 and len(rule._open()) <= 256
    started = time.process_time()
    assert rule.choose() is not None
    assert time.process_time() - started < 0.5


def test_its_linear_algebra_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one for each core they waited for each other: sixteen times the CPU beside trials."""
    seen = []

    def threads() -> set[int]:
        blas = ThreadpoolController().select(user_api="blas")
        return {one["num_threads"] for one in blas.info()}

    def watched(function: Any) -> Any:
        def call(*given: Any, **more: Any) -> Any:
            seen.append((function.__name__, threads()))
            return function(*given, **more)

        return call

    monkeypatch.setattr(surrogate, "cho_factor", watched(surrogate.cho_factor))
    monkeypatch.setattr(surrogate, "cho_solve", watched(surrogate.cho_solve))
    monkeypatch.setattr(surrogate, "fit", watched(surrogate.fit))
    rule = rule_of([0.1, 0.5, 0.9])
    with ThreadpoolController().limit(limits=2, user_api="blas"):
        for trial in "012012012":
            rule.report(trial, rule._epoch(trial) + 1, 0.5, math.log(0.5))
            rule.forget(trial)
        assert rule.forecast() and rule.choose() and threads() == {2}
    assert len(seen) > 20 and all(now == {1} for _, now in seen)


def test_coordinates_of_a_space() -> None:
    job = validate(Job, {"table": {"uri": "unused"}, "model": {"mode": "finetune"}})
    space = parse.parse(
        {
            "train.lr": "loguniform(1e-4, 1e-2)",
            "train.batch_size": "choice(16, 32, 32)",
            "model.dropout": "uniform(0.0, 0.5) if train.batch_size == 16",
        },
        job.training,
    )
    coordinates = Coordinates(space)
    names = [field.name for field in space.fields]
    small = coordinates.of({"train.lr": 1e-3, "train.batch_size": 16, "model.dropout": 0.25})
    large = coordinates.of({"train.lr": 1e-3, "train.batch_size": 32})
    of = {name: coordinates.group_D == number for number, name in enumerate(names)}
    assert small[of["train.lr"]] == pytest.approx([0.5])
    one, other = small[of["train.batch_size"]], large[of["train.batch_size"]]
    assert len(one) == 3 and np.linalg.norm(one - other) == pytest.approx(1)
    assert small[of["model.dropout"]].tolist() == [0.5, 0]
    assert large[of["model.dropout"]].tolist() == [0, 1]


def test_chosen_numbers_keep_their_order() -> None:
    job = validate(Job, {"table": {"uri": "unused"}, "model": {"mode": "finetune"}})
    space = parse.parse(
        {
            "train.batch_size": "choice(64, 16, 32)",
            "model.dropout": "choice(0.5, 0.0, 0.2)",
            "model.side_px": "choice(96, 48) if train.batch_size == 16 else choice(64)",
            "model.frozen_blocks": "choice(0, 3, 8) if train.batch_size == 16",
            "train.schedule": "choice(cosine, one_cycle, constant)",
        },
        job.training,
    )
    coordinates = Coordinates(space)
    drawn = {"train.batch_size": 32, "model.dropout": 0.2, "train.schedule": "constant"}
    with_side = coordinates.of({**drawn, "model.side_px": 96})
    of = {field.name: coordinates.group_D == n for n, field in enumerate(space.fields)}
    assert with_side[of["train.batch_size"]] == pytest.approx([0.5])  # logarithms: a factor of 4
    assert with_side[of["model.dropout"]] == pytest.approx([0.4])
    assert with_side[of["model.side_px"]][0] == 1.0
    assert with_side[of["model.frozen_blocks"]].tolist() == [0, 1]  # absent
    assert of["train.schedule"].sum() == 4


def test_a_chosen_value_and_a_range_share_no_coordinate() -> None:
    job = validate(Job, {"table": {"uri": "unused"}, "model": {"mode": "finetune"}})
    space = parse.parse(
        {
            "train.batch_size": "choice(16, 32)",
            "model.dropout": "choice(0.0) if train.batch_size == 16 else loguniform(1e-3, 0.1)",
            "model.frozen_blocks": "choice(0, 4, 8) if train.batch_size == 16 else randint(9, 12)",
        },
        job.training,
    )
    coordinates = Coordinates(space)
    of = {field.name: coordinates.group_D == n for n, field in enumerate(space.fields)}
    small = coordinates.of({"train.batch_size": 16, "model.dropout": 0.0, "model.frozen_blocks": 4})
    low, high = (
        coordinates.of(
            {"train.batch_size": 32, "model.dropout": rate, "model.frozen_blocks": blocks}
        )
        for rate, blocks in ((1e-2, 9), (1e-1, 11))
    )
    # Whether 0 was chosen, and not; the place in the range, and whether there is none.
    assert small[of["model.dropout"]] == pytest.approx([0.5**0.5, 0, 0, 1])
    assert low[of["model.dropout"]] == pytest.approx([0, 0.5**0.5, 0.5, 0])
    assert high[of["model.dropout"]] == pytest.approx([0, 0.5**0.5, 1, 0])
    assert small[of["model.frozen_blocks"]].tolist() == [0.5, 0, 0, 1]
    assert low[of["model.frozen_blocks"]].tolist() == [0, 1, 0, 0]
    assert high[of["model.frozen_blocks"]].tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("search", "said"),
    [({"searcher": "tpe"}, "would learn from none"), ({"pauses": False}, "pauses trials")],
    ids=str,
)
def test_settings_that_do_not_go_together_are_refused(search: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        validate(Job, {"table": {"uri": "x"}, "search": {"scheduler": "freeze_thaw", **search}})
