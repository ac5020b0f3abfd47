"""Schedulers under Tune: as many epochs as the rule says, every trial ends, and a restored search
remembers its rungs.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.search import ConcurrencyLimiter

from benchmarks.halving import Table, run
from raypipe.config import validate
from raypipe.errors import ConfigError
from raypipe.job import Job
from raypipe.search.schedulers import tune_schedulers
from raypipe.search.schedulers.halving import Halving
from raypipe.search.searchers.planned import Planned
from raypipe.search.trials import tune_patches
from raypipe.search.trials.trial import allow_slow_handover

TRIALS, EPOCHS = 9, 9
WORTH = [0.3, 0.8, 0.1, 0.6, 0.2, 0.9, 0.4, 0.7, 0.5]


def curve(trial: int) -> list[float]:
    return [WORTH[trial] + 0.001 * epoch for epoch in range(EPOCHS)]


def train(config: dict[str, Any]) -> None:
    """Reports a curve, and goes on from its checkpoint."""
    allow_slow_handover()
    found = tune.get_checkpoint()
    done = json.loads((Path(found.path) / "epoch").read_text()) if found else 0
    values = [
        worth + 0.001 * epoch for worth in [config["worth"]] for epoch in range(config["epochs"])
    ]
    for epoch in range(done, config["epochs"]):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "epoch").write_text(json.dumps(epoch + 1))
            report = {"epoch": epoch + 1, "val_accuracy": values[epoch]}
            tune.report(report, checkpoint=tune.Checkpoint.from_directory(folder))


def job(**search: Any) -> Job:
    space = {"train.lr": f"grid({', '.join(str(worth) for worth in WORTH)})"}
    changes = {"samples": 1, "grace": 1, "space": space, **search}
    return validate(
        Job, {"table": {"uri": "unused"}, "train": {"epochs": EPOCHS}, "search": changes}
    )


def scheduled(of: Job) -> Any:
    return tune_schedulers.scheduler(of.search, of.train, TRIALS)


def epochs_under(search: Job, folder: Path, at_once: int) -> dict[float, int]:
    """Worth -> epochs trained, of a search on a real cluster."""
    chosen = tune_schedulers.scheduler(search.search, search.train, TRIALS)
    tuner = tune.Tuner(
        tune.with_resources(train, {"CPU": 1}),
        param_space={"worth": tune.grid_search(WORTH), "epochs": EPOCHS},
        tune_config=tune.TuneConfig(
            metric="val_accuracy",
            mode="max",
            scheduler=chosen,
            search_alg=tune.search.BasicVariantGenerator(
                max_concurrent=tune_schedulers.drawn_ahead(search.search, TRIALS, at_once)
            ),
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(folder),
            callbacks=tune_schedulers.memory(chosen),
            verbose=0,
        ),
    )
    with tune_patches.applied():
        results = tuner.fit()
    assert not results.errors and all(result.metrics for result in results)
    return {result.config["worth"]: result.metrics["epoch"] for result in results}


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("name", ["asha", "pasha"])
def test_a_search_spends_what_the_rule_on_a_table_does(name: str, tmp_path: Path) -> None:
    """One trial at a time, so that both hear the same reports."""
    table, capped = Table([curve(i) for i in range(TRIALS)], "max"), name == "pasha"
    spent = epochs_under(job(scheduler=name), tmp_path, at_once=1)
    on_table = run(table, range(TRIALS), Halving(EPOCHS, 1, 3, capped=capped, total=TRIALS), 1)
    assert sum(spent.values()) == on_table.whole < TRIALS * EPOCHS / 2
    assert spent[0.9] == EPOCHS and spent[0.1] == 1


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize(
    "search", [{"scheduler": "hyperband"}, {"scheduler": "median"}, {"pauses": False}, {}], ids=str
)
def test_every_trial_ends_and_the_best_is_trained_in_full(
    search: dict[str, Any], tmp_path: Path
) -> None:
    spent = epochs_under(job(**search), tmp_path, at_once=2)
    assert len(spent) == TRIALS and spent[0.9] == EPOCHS and sum(spent.values()) < TRIALS * EPOCHS


class Watched(tune.Callback):  # type: ignore[misc]
    """How many trials were to run at a time, at most."""

    most = 0

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        active = [trial for trial in trials if trial.status in (Trial.PENDING, Trial.RUNNING)]
        self.most = max(self.most, len(active))


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("name", ["asha", "pasha"])
def test_a_trial_that_continues_takes_one_of_the_places(name: str, tmp_path: Path) -> None:
    """It was not counted, and a new one began beside it: two groups of workers, in the room of one,
    waited for each other for ever."""
    of, watched = job(scheduler=name, concurrent=1), Watched()
    chosen = tune_schedulers.scheduler(of.search, of.train, TRIALS, 1)
    planned = Planned(of.training, [{"worth": worth, "epochs": EPOCHS} for worth in WORTH])
    tuner = tune.Tuner(
        tune.with_resources(train, {"CPU": 1}),
        tune_config=tune.TuneConfig(
            metric="val_accuracy",
            mode="max",
            num_samples=TRIALS,
            scheduler=chosen,
            search_alg=ConcurrencyLimiter(planned, 1),
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(tmp_path),
            callbacks=[watched, *tune_schedulers.memory(chosen)],
            verbose=0,
        ),
    )
    with tune_patches.applied():
        results = tuner.fit()
    spent = [result.metrics["epoch"] for result in results]
    assert watched.most == 1
    # Trials that continue still come before new ones.
    table, capped = Table([curve(i) for i in range(TRIALS)], "max"), name == "pasha"
    on_table = run(table, range(TRIALS), Halving(EPOCHS, 1, 3, capped=capped, total=TRIALS), 1)
    assert len(spent) == TRIALS and sum(spent) == on_table.whole and max(spent) == EPOCHS


def test_places_are_kept_only_where_tune_does_not_count_them() -> None:
    def places(train: dict[str, Any] | None = None, **search: Any) -> int | None:
        of = job(**search)
        changed = of.train.model_copy(update=train or {})
        chosen = tune_schedulers.scheduler(of.search, changed, TRIALS, 2)
        assert isinstance(chosen, tune_schedulers.HalvingScheduler)
        return chosen.concurrent

    assert places() is None and places(scheduler="pasha") is None
    assert places(concurrent=2) == 2 == places({"workers": 2}) == places({"workers": (1, 2)})


def test_a_restored_search_gives_back_the_places_of_trials_that_wait() -> None:
    of = job(concurrent=1)
    chosen: Any = tune_schedulers.scheduler(of.search, of.train, TRIALS, 1)
    planned = ConcurrencyLimiter(Planned(of.training, [{"worth": worth} for worth in WORTH]), 1)
    planned.suggest("a")
    chosen.rule.report("a", 1, 0.3)  # paused, and killed before another trial was drawn
    waiting = Drawn("a")
    chosen.on_trial_add(None, waiting)
    controller = SimpleNamespace(
        get_trials=lambda: [waiting],
        search_alg=SimpleNamespace(
            is_finished=lambda: False, on_trial_complete=planned.on_trial_complete
        ),
    )
    assert planned.suggest("b") is None
    assert chosen.choose_trial_to_run(controller) is None and planned.suggest("b")


def test_the_median_of_a_restored_search_is_that_of_all_trials() -> None:
    def reports(rule: Any, trial: Drawn, value: float) -> str:
        alone = SimpleNamespace(get_live_trials=list)
        return str(rule.on_trial_result(alone, trial, {"epoch": 1, "val_accuracy": value}))

    before: Any = scheduled(job(scheduler="median"))
    before.set_search_properties("val_accuracy", "max")
    trials = [Drawn(name) for name in "abc"]
    for trial in trials:
        reports(before, trial, 0.8)
    (kept,) = tune_schedulers.memory(before)
    state = cloudpickle.loads(cloudpickle.dumps(kept.get_state()))

    after: Any = scheduled(job(scheduler="median"))
    after.set_search_properties("val_accuracy", "max")
    (remembering,) = tune_schedulers.memory(after)
    remembering.set_state(state)
    for trial in (*trials, late := Drawn("d")):
        after.on_trial_add(None, trial)
    assert reports(after, late, 0.1) == "STOP"
    assert reports(after, trials[0], 0.8) and state == kept.get_state(), "it is read only"
    assert not tune_schedulers.memory(scheduled(job(scheduler="hyperband")))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"searcher": "tpe"}, r"search\.searcher=tpe would learn from none"),
        ({"concurrent": 2}, r"starts all trials.*Leave out search\.concurrent=2"),
    ],
)
def test_what_hyperband_cannot_keep_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        job(scheduler="hyperband", **changes)


@dataclass(eq=False)  # as Tune's, which are keys
class Drawn:
    """What a scheduler uses of one of Tune's trials."""

    trial_id: str
    status: str = Trial.PENDING
    checkpoint: Any = None
    last_result: dict[str, Any] = field(default_factory=dict)

    def set_status(self, status: str) -> None:
        self.status = status


def test_a_restored_search_remembers_its_rungs_and_leaves_paused_trials_paused() -> None:
    before = scheduled(job())
    assert isinstance(before, tune_schedulers.HalvingScheduler)
    for trial, value in zip("abc", (0.3, 0.9, 0.5), strict=True):
        before.rule.report(trial, 1, value)
    (kept,) = tune_schedulers.memory(before)
    state = cloudpickle.dumps(kept.get_state())
    new = scheduled(job())
    after, (remembering,) = cloudpickle.loads(
        cloudpickle.dumps((new, tune_schedulers.memory(new)))
    )  # Tune keeps them in one file
    remembering.set_state(cloudpickle.loads(state))
    trials = [Drawn(name) for name in "abcd"]
    for trial in trials:
        after.on_trial_add(None, trial)
    assert [trial.status for trial in trials] == [Trial.PAUSED] * 3 + [Trial.PENDING]
    # Tune was killed when it knew an epoch and not yet its checkpoint: the trial reports it again.
    behind = Drawn("a", last_result={"epoch": 1})
    after.on_trial_add(None, behind)
    assert behind.status == Trial.PENDING
    assert after.rule.promotable() == ["b"]


def test_none_is_tunes_own_order() -> None:
    assert scheduled(job(scheduler="none")) is None and tune_schedulers.memory(None) == []


def test_names_are_those_of_the_settings() -> None:
    names = Job.model_fields["search"].annotation.model_fields["scheduler"].annotation
    assert set(tune_schedulers.SCHEDULERS) >= set(names.__args__) - {"pbt", "pb2", "freeze_thaw"}
