"""When a search stops, from what Ray Tune tells its callback; no cluster is needed to know."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
from ray import tune
from ray.tune.experiment import Trial

from raypipe.search.budget import Speed
from raypipe.search.ledger import Ledger
from raypipe.search.trials import tune_patches
from raypipe.search.trials.monitor import Held, Monitor, Stop
from raypipe.search.trials.standing import Standing
from raypipe.train.stopping import SearchStoppingConfig, is_budget


@dataclass
class Told:
    """What the callback uses of one of Tune's trials."""

    trial_id: str
    done: bool = False
    status: str = Trial.RUNNING
    config: dict[str, Any] = field(default_factory=lambda: {"train.lr": 0.1})
    last_result: dict[str, Any] = field(default_factory=dict)
    storage: Any = field(default_factory=lambda: SimpleNamespace(trial_dir_name="there"))
    RUNNING, ERROR = Trial.RUNNING, Trial.ERROR

    @property
    def path(self) -> str:
        return f"tune/{self.trial_id}"

    def is_finished(self) -> bool:
        return self.done


def watch(devices: float = 1.0, listener: Any = None, **stopping: Any) -> Monitor:
    heard = [listener] if listener else []
    rule = SearchStoppingConfig(**stopping)
    made = Monitor(16, "val_accuracy", "max", rule, devices, *heard)
    made.setup()
    return made


def epoch(
    seen: Monitor,
    name: str,
    value: float,
    number: int = 1,
    seconds: float = 1.0,
    workers: float = 1.0,
) -> None:
    result = {
        "val_accuracy": value,
        "training_iteration": number,
        "time_this_iter_s": seconds,
        "time_total_s": 1e6,  # of a clone: its donor's, too
        "workers": workers,
    }
    seen.on_trial_result(0, [], Told(name), result)


def trial(seen: Monitor, name: str, *values: float) -> None:
    for i, value in enumerate(values, 1):
        epoch(seen, name, value, i)
    seen.on_trial_complete(0, [], Told(name, done=True))


def test_a_search_without_rules_never_stops() -> None:
    seen = watch()
    for i in range(50):
        trial(seen, str(i), 0.5, 0.4)
    assert not Stop(seen).stop_all() and seen.stopped is None


def test_before_tune_has_begun_nothing_stops_and_never_a_single_trial() -> None:
    stop = Stop(watch(seconds=100))
    assert not stop.stop_all() and not stop("a", {})


def test_the_best_stands_still() -> None:
    seen = watch(patience=2)
    trial(seen, "a", 0.3, 0.9, 0.2)
    trial(seen, "b", 0.8)
    assert not Stop(seen).stop_all()
    epoch(seen, "d", 0.95)  # it leads, and still runs
    trial(seen, "c", 0.9)
    assert not Stop(seen).stop_all()
    trial(seen, "d", 0.95)
    seen.on_trial_error(0, [], Told("e", done=True))  # a trial without a result improved nothing
    assert not Stop(seen).stop_all()
    trial(seen, "f", 0.5)
    assert (
        Stop(seen).stop_all()
        and seen.stopped
        == "no improvement of val_accuracy for 2 trials (best 0.95 in trial 4 of those that ended)"
    )


def test_trials_that_never_began_are_no_trials_without_an_improvement() -> None:
    seen = watch(patience=2)
    trial(seen, "a", 0.5)
    for name in "bcd":
        trial(seen, name)
    assert not Stop(seen).stop_all()


def test_trials_that_never_began_are_not_told_as_ended() -> None:
    told: list[int] = []
    seen = watch(listener=lambda done, total, standings: told.append(done))
    trial(seen, "a", 0.5)
    began, failed = Told("a", done=True), Told("b", done=True)
    never = [Told(name, done=True) for name in "cde"]
    seen.on_trial_error(0, [began, failed, *never], failed)
    # It failed, and a restored search runs it again.
    again = Told("b")
    seen.on_trial_error(0, [began, again, *never], again)
    assert told[-2:] == [2, 1]


def test_a_trial_that_ends_again_after_a_restore_counts_once() -> None:
    seen = watch(patience=1)
    trial(seen, "a", 0.5)
    trial(seen, "a", 0.5)
    assert not Stop(seen).stop_all()


@pytest.mark.parametrize(
    ("stopping", "says"),
    [
        ({"target": 0.9}, "val_accuracy 0.92 reached the target 0.9"),
        ({"epochs": 5}, "the budget of 5 epochs is spent"),
        ({"gpu_hours": 1}, "the budget of 1 GPU-hours is spent (1)"),
        ({"money": 2, "price_per_hour": 2.0}, "the budget of 2 in money is spent (2)"),
    ],
)
def test_targets_and_budgets_count_running_trials_and_shares_of_a_gpu(
    stopping: dict[str, Any], says: str
) -> None:
    seen = watch(devices=0.5, **stopping)
    epoch(seen, "a", 0.5, 2, 3600.0)
    epoch(seen, "b", 0.7, 2, 3000.0)
    assert not Stop(seen).stop_all()
    epoch(seen, "b", 0.92, 3, 600.0)
    assert Stop(seen).stop_all() and seen.stopped == says


def test_heads_of_a_first_answer_count_as_what_trials_have_to_beat() -> None:
    """A head had .95 in the first minute, and all trials ran for a target of .85."""

    def after(**stopping: Any) -> Monitor:
        rule = SearchStoppingConfig(**stopping)
        return Monitor(16, "val_accuracy", "max", rule, 1.0, first=0.95)

    aimed = after(target=0.85)
    assert aimed.stop() and aimed.stopped == "val_accuracy 0.95 reached the target 0.85"
    assert not after(target=0.96).stop()
    patient = after(patience=2)
    trial(patient, "a", 0.5)
    epoch(patient, "c", 0.97)  # it leads, and still runs
    trial(patient, "b", 0.8)
    assert not patient.stop(), "heads are no trials without an improvement"
    beaten = after(patience=2)
    epoch(beaten, "c", 0.9)  # it leads all trials, and no head
    trial(beaten, "a", 0.5)
    assert not beaten.stop()
    trial(beaten, "b", 0.8)
    assert beaten.stop()
    assert beaten.stopped == (
        "no improvement of val_accuracy for 2 trials (best 0.95 of the first answer)"
    )


def test_what_was_spent_and_seen_goes_on_after_a_restore() -> None:
    before = watch(seconds=100, patience=3)
    trial(before, "a", 0.9)
    trial(before, "b", 0.5)
    state = before.get_state() | {"_before": 60.0}
    after = cloudpickle.loads(cloudpickle.dumps(before))
    after.setup()
    after.set_state(cloudpickle.loads(cloudpickle.dumps(state)))
    assert 60 <= after.progress().seconds < 70 and not Stop(after).stop_all()
    trial(after, "c", 0.5)
    trial(after, "d", 0.5)
    assert Stop(
        after
    ).stop_all() and "for 3 trials (best 0.9 in trial 1 of those that ended)" in str(after.stopped)
    again = watch(seconds=100)
    again.set_state(after.get_state())
    assert (
        again.stopped == after.stopped
    )  # killed before its result was written, it stops again for the same reason


def test_time_stops_a_search_without_any_result() -> None:
    seen = watch(seconds=100)
    seen.set_state(seen.get_state() | {"_before": 100.0})
    assert Stop(seen).stop_all() and "budget of 100 s is spent" in str(seen.stopped)


def test_a_restored_search_calls_the_new_listener_and_keeps_what_was_reported(
    tmp_path: Path,
) -> None:
    """Tune unpickles the callbacks of the killed process, and gives them their state."""
    told: list[int] = []
    killed = watch(listener=lambda *args: told.append(1))
    other = tune.Callback()
    made = tune.RunConfig(
        name="tune", storage_path=str(tmp_path), callbacks=[killed, other], stop=Stop(killed)
    )
    tune.Tuner(lambda config: None, run_config=made)
    state = killed.get_state() | {"failures": {"a": 2}}

    restored = tune.Tuner.restore(str(tmp_path / "tune"), lambda config: None)
    run_config = tune_patches.run_config(restored)
    seen = watch(listener=lambda *args: told.append(2))
    seen.put_into(run_config)
    assert run_config.callbacks[0] is seen and type(run_config.callbacks[1]) is tune.Callback
    run_config.callbacks[0].set_state(state)
    epoch(seen, "b", 0.5)
    assert told == [2] and seen.failures == {"a": 2}
    assert not run_config.stop.stop_all()


def test_who_listens_hears_how_trials_stand() -> None:
    told: list[tuple[int, int, list[Standing]]] = []
    seen = watch(listener=lambda *args: told.append(args))
    one, two = Told("a"), Told("b", status=Trial.PAUSED)
    for trial, value, epochs in (
        (one, float("nan"), 1),
        (one, 0.4, 1),
        (one, 0.3, 2),
        (two, 0.5, 1),
    ):
        seen.on_trial_result(
            0,
            [one, two],
            trial,
            {"val_accuracy": value, "training_iteration": epochs, "time_this_iter_s": 1.0},
        )
    one.done, one.last_result = True, {"ended": True}
    seen.on_trial_complete(0, [one, two], one)
    lr = {"train.lr": 0.1}
    assert told[0] == (0, 16, []) and told[2] == (
        0,
        16,
        [Standing("a", lr, 0.4, 2, "running", None, 3.0, 3.0)],
    )
    assert told[-1] == (
        1,
        16,
        [
            Standing("b", lr, 0.5, 1, "waiting", None, 1.0, 1.0),
            Standing("a", lr, 0.4, 2, "full", None, 3.0, 3.0),
        ],
    )


def test_a_trial_holds_the_devices_that_its_workers_had() -> None:
    """An elastic group may start with fewer than its most; a clone's donor is not counted."""
    seen = watch(gpu_hours=1)
    epoch(seen, "a", 0.5, 1, 10.0, workers=2.0)
    epoch(seen, "a", 0.6, 2, 10.0, workers=1.0)
    epoch(seen, "b", 0.4, 1, 5.0, workers=4.0)
    assert seen.held == {"a": Held(20.0, 30.0), "b": Held(5.0, 20.0)}
    assert seen.progress().worker_s == 50.0
    seen.on_step_end(0, [])  # none runs: an epoch that has begun is not counted here
    again = watch()
    again.set_state(cloudpickle.loads(cloudpickle.dumps(seen.get_state())))
    epoch(again, "a", 0.7, 3, 1.0, workers=2.0)
    assert again.held["a"] == Held(21.0, 32.0)


def test_only_trials_that_ended_before_the_search_was_stopped_were_ended_early() -> None:
    seen = watch(epochs=3)
    trial(seen, "a", 0.5, 0.4)
    epoch(seen, "b", 0.5)
    assert Stop(seen).stop_all()
    seen.on_trial_complete(0, [], Told("b", done=True))
    assert seen.ended_before == {"a"}


def test_a_limit_in_money_is_not_passed_by_the_epochs_that_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A budget stops when it is spent; a limit stops before the next epochs would pass it."""
    now = [0.0]
    monkeypatch.setattr("raypipe.search.trials.monitor.time.perf_counter", lambda: now[0])

    def begun(limit: float | None) -> Monitor:
        rule = SearchStoppingConfig(price_per_hour=3600)  # 1 a device second
        made = Monitor(16, "val_accuracy", "max", rule, 1.0, most_money=limit)
        made.setup()
        made.on_step_end(0, [Told("a"), Told("b")])
        return made

    for limit, stops in ((None, False), (59.0, True), (61.0, False)):
        seen = begun(limit)
        for name in ("a", "b"):
            epoch(seen, name, 0.5, seconds=10)
        # 20 spent; two epochs of 10 run, and then two more.
        seen.on_step_end(1, [Told("a"), Told("b")])
        assert not seen.stop()
        for name in ("a", "b"):
            epoch(seen, name, 0.6, 2, seconds=10)
        assert seen.stop() is stops, limit
        assert not stops or "would pass the budget of 59 in money (40 spent)" in str(seen.stopped)
    # Heads of a first answer were paid before.
    rule = SearchStoppingConfig(price_per_hour=3600)
    for heads_s, stops in ((38.0, False), (40.0, True)):
        seen = Monitor(16, "val_accuracy", "max", rule, 1.0, most_money=59.0, heads_s=heads_s)
        epoch(seen, "a", 0.5, seconds=10)
        seen.on_step_end(1, [Told("a")])
        assert seen.stop() is stops
    # A paused trial costs nothing; a first epoch costs what it has taken so far.
    seen = begun(59.0)
    for name in ("a", "b"):
        epoch(seen, name, 0.5, 2, seconds=20)
    seen.on_step_end(1, [Told("a", status=Trial.PAUSED)])
    assert not seen.stop()
    slow = begun(59.0)
    now[0] += 29
    assert not slow.stop()
    now[0] += 2
    assert slow.stop() and slow.stopped is not None and "(0 spent)" in slow.stopped


def test_a_trial_that_fails_is_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the epoch in which it failed, each time; and also without a limit in money."""
    now = [0.0]
    monkeypatch.setattr("raypipe.search.trials.monitor.time.perf_counter", lambda: now[0])
    for limit in (None, 70.0):
        rule = SearchStoppingConfig(price_per_hour=3600)
        seen = Monitor(16, "val_accuracy", "max", rule, 1.0, most_money=limit, workers=2)
        seen.setup()
        for failed in (seen.on_trial_recover, seen.on_trial_error):
            seen.on_step_end(0, [Told("a")])
            now[0] += 20
            failed(0, [], Told("a", done=True))
            seen.on_step_end(1, [])
        assert seen.held == {"a": Held(40.0, 80.0)} and seen.failures == {"a": 2}
        assert seen.stop() is (limit is not None)
    # Tune calls back for no trial that the search's end has cut.
    seen.on_step_end(2, [Told("b")])
    now[0] += 7
    seen.on_step_end(3, [Told("b", status=Trial.TERMINATED)])
    seen.on_step_end(4, [Told("b", status=Trial.TERMINATED)])
    assert seen.held["b"] == Held(7.0, 14.0)


def test_an_epoch_that_a_kill_cut_is_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four GPUs, preempted 9 minutes into an epoch of 10: 36 GPU minutes were not counted."""
    now = [0.0]
    monkeypatch.setattr("raypipe.search.trials.monitor.time.perf_counter", lambda: now[0])
    seen = watch(devices=4.0)
    seen.on_step_end(0, [Told("a"), Told("b", status=Trial.PAUSED)])
    now[0] += 600
    epoch(seen, "a", 0.5, seconds=600.0)
    seen.on_step_end(1, [Told("a")])
    now[0] += 540
    state = cloudpickle.loads(cloudpickle.dumps(seen.get_state()))
    assert seen.held == {"a": Held(600.0, 2400.0)}, "if it ends, it is counted then"
    again = watch(devices=4.0, gpu_hours=1.2)
    again.set_state(state)
    assert again.held == {"a": Held(1140.0, 4560.0)} and again.stop()
    # As after a second kill.
    again.on_step_end(0, [Told("a")])
    now[0] += 60
    assert again.get_state()["held"] == {"a": Held(1200.0, 4800.0)}


def test_each_time_that_the_best_became_better_is_remembered() -> None:
    seen = watch()
    epoch(seen, "a", 0.5)
    epoch(seen, "b", 0.4)
    epoch(seen, "a", float("nan"), 2)
    epoch(seen, "b", 0.7, 2)
    epoch(seen, "a", 0.7, 3)
    assert [(one.by, one.value, one.epochs) for one in seen.reached] == [
        ("a", 0.5, 1),
        ("b", 0.7, 2),
    ]
    assert 0 <= seen.reached[0].seconds <= seen.reached[1].seconds
    # A restored search goes on counting.
    again = watch()
    again.set_state(seen.get_state())
    epoch(again, "c", 0.6)
    epoch(again, "c", 0.8, 2)
    assert [one.value for one in again.reached] == [0.5, 0.7, 0.8]


def test_with_the_last_epoch_as_the_result_no_earlier_one_counts() -> None:
    """A trial had .91 and ended with .86: the search ended for a target of .9, and its page said
    that the best was 91 %. The leaderboard had no such model."""
    rule = SearchStoppingConfig(target=0.9)
    seen = Monitor(16, "val_accuracy", "max", rule, 1.0, result="last")
    epoch(seen, "a", 0.91, 1)
    epoch(seen, "a", 0.86, 2)
    epoch(seen, "a", float("nan"), 3)
    assert not seen.stop() and seen.reached == [], "its last epoch may be another one"
    trial(seen, "b", 0.95, 0.84)
    seen.on_trial_complete(0, [], Told("a", done=True))
    assert not seen.stop()
    # The search ends within these: their last epochs are their models.
    epoch(seen, "c", 0.88)
    epoch(seen, "d", 0.9)
    assert seen.stop()
    seen.on_experiment_end([Told(name) for name in "abcde"])
    reached = [(one.by, one.value, one.epochs) for one in seen.reached]
    assert reached == [("b", 0.84, 2), ("a", 0.86, 3), ("d", 0.9, 1)]
    # A trial may draw it.
    assert not seen._offers_last(Told("e", config={"train.result": "best"}))


def test_a_search_that_goes_on_later_has_reached_nothing_by_trials_that_run() -> None:
    seen = Monitor(16, "val_accuracy", "max", SearchStoppingConfig(), 1.0, result="last")
    epoch(seen, "a", 0.9)
    seen.on_experiment_end([Told("a")])
    assert seen.reached == []


def test_a_budget_for_everything_stops_trials_when_the_rest_is_needed() -> None:
    now, over = [0.0], []
    ledger = Ledger(100.0, 0.0, lambda: now[0])
    ledger.forecast.splits, ledger.on_over = (500, 500), lambda: over.append(now[0])
    seen = Monitor(16, "val_accuracy", "max", SearchStoppingConfig(), 1.0, ledger=ledger)
    stop = Stop(seen)
    now[0] = 8.0
    ledger.started()
    ledger.trials_begin()
    assert not stop.stop_all()
    told = {"val_accuracy": 0.5, "training_iteration": 2, "time_this_iter_s": 1.0}
    told |= {"images_per_s": 50.0, "step_s": 0.4, "forward_s": 0.1}
    frozen = {"model.mode": "frozen", "model.side_px": 96}
    seen.on_trial_result(0, [], Told("a", config=frozen), told)
    assert seen.speed == Speed("a", 2, 96, 50.0, None), "no image passed through the backbone"
    tuned = {"model.mode": "finetune", "model.side_px": 128}
    seen.on_trial_result(0, [], Told("b", config=tuned), told | {"val_accuracy": 0.6})
    seen.on_trial_result(0, [], Told("c", config=frozen), told | {"val_accuracy": 0.4})
    assert seen.speed == Speed("b", 2, 128, 50.0, 200.0), "of the trial that leads"
    now[0] = 100 - ledger.ending(3, seen.speed).seconds - 2
    assert not stop.stop_all() and not over
    now[0] += 2
    assert stop.stop_all() and over == [now[0]] and is_budget(seen.stopped)


def test_a_search_without_an_answer_may_try_again_when_its_time_was_over() -> None:
    now = [0.0]
    ledger = Ledger(10.0, 0.0, lambda: now[0])
    seen = Monitor(16, "val_accuracy", "max", SearchStoppingConfig(), 1.0, ledger=ledger)
    ledger.trials_begin()
    now[0] = 60.0
    assert seen.stop() and seen.get_state()["stopped"] is None
    epoch(seen, "a", 0.5)
    assert seen.get_state()["stopped"] == seen.stopped


def test_a_killed_search_knows_how_fast_its_leading_trial_is() -> None:
    """Else it would expect no refit, and guess how long the end takes."""
    seen, again = watch(), watch()
    seen.speed = Speed("a", 2, 128, 100.0, 300.0)
    again.set_state(cloudpickle.loads(cloudpickle.dumps(seen.get_state())))
    assert again.speed == seen.speed
