"""Tune's state in one file: a search is restored from what was saved together."""

from __future__ import annotations

import importlib
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.train._internal.storage import StorageContext
from ray.tune import Checkpoint
from ray.tune.execution import experiment_state, tune_controller
from ray.tune.experiment import Trial
from ray.tune.schedulers import PopulationBasedTraining

from raypipe.search.trials import saved_state

FILES = {
    "experiment_state-1.json": '{"trial_data": [["a", "b"]]}',
    "searcher-state-1.pkl": "searcher",
    "search_gen_state-1.json": "limits",
    "callback-states-1.pkl": "callbacks",
}


# Python names of ours in what Tune saves of a search (read out of searches by ASHA, PBT and PB2).
NAMED = """
raypipe.cluster.connect ClusterConfig
raypipe.cluster.spark SparkConfig
raypipe.config RunConfig
raypipe.feed.dataset FeedConfig
raypipe.images.augment AugmentConfig
raypipe.models.zoo ModelConfig
raypipe.registry.tracking RegistryConfig
raypipe.search.budget Speed
raypipe.search.schedulers.halving Halving
raypipe.search.schedulers.pbt Pbt _Pb2
raypipe.search.schedulers.tune_schedulers HalvingScheduler Memory
raypipe.search.searchers.planned Planned
raypipe.search.settings PbtConfig
raypipe.search.trials.monitor Held Monitor Stop _nobody _nothing
raypipe.search.trials.standing Reached Standing
raypipe.search.trials.trial folder_name
raypipe.tables.table Columns TableConfig
raypipe.train.job TrainJob
raypipe.train.settings TrainConfig
raypipe.train.stopping SearchStoppingConfig StoppingConfig
"""


@pytest.mark.parametrize("line", NAMED.split("\n")[1:-1])
def test_what_saved_searches_name_stays_where_it_is(line: str) -> None:
    """Pickles name modules: of a class that moved, no earlier search could be restored."""
    module, *names = line.split()
    assert [name for name in names if not hasattr(importlib.import_module(module), name)] == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A search whose state was saved, and that was killed while Tune copied a later one."""
    with zipfile.ZipFile(tmp_path / saved_state.ARCHIVE, "w") as archive:
        for name, content in FILES.items():
            archive.writestr(name, content)
    (tmp_path / "experiment_state-1.json").write_text("later")
    (tmp_path / "searcher-state-2.pkl").write_text("ha")
    (tmp_path / "tuner.pkl").write_text("the search")
    return tmp_path


def test_a_search_is_restored_from_what_was_saved_together(folder: Path) -> None:
    assert saved_state.unpack(folder)
    found = {path.name: path.read_text() for path in folder.glob("*state*-*")}
    assert found == FILES
    assert (folder / "tuner.pkl").read_text() == "the search"


def test_a_search_of_an_older_version_keeps_its_files(folder: Path) -> None:
    (folder / saved_state.ARCHIVE).unlink()
    later = '{"trial_data": [["c", "d"]]}'
    (folder / "experiment_state-1.json").write_text(later)
    assert saved_state.unpack(folder)
    assert (folder / "experiment_state-1.json").read_text() == later


def test_a_search_without_a_state_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "tuner.pkl").touch()
    assert not saved_state.unpack(tmp_path)
    (tmp_path / "experiment_state-1.json").write_text('{"trial_data": []}')
    assert not saved_state.unpack(tmp_path)


def test_a_state_that_cannot_be_read_is_an_error(folder: Path) -> None:
    (folder / saved_state.ARCHIVE).write_bytes(b"PK")
    with pytest.raises(zipfile.BadZipFile):
        saved_state.unpack(folder)
    (folder / saved_state.ARCHIVE).unlink()
    with pytest.raises(ValueError, match="Expecting value"):
        saved_state.unpack(folder)


def test_tune_is_itself_again_afterwards() -> None:
    def parts() -> tuple[object, ...]:
        controller = tune_controller.TuneController
        return (
            controller.save_to_dir,
            controller.checkpoint,
            tune_controller._ExperimentCheckpointManager,
        )

    before = parts()
    with pytest.raises(ZeroDivisionError), saved_state.kept_whole(lambda: None):
        assert all(now is not then for now, then in zip(parts(), before, strict=True))
        raise ZeroDivisionError
    assert parts() == before
    assert tune_controller._ExperimentCheckpointManager is (
        experiment_state._ExperimentCheckpointManager
    )


def test_tune_saves_each_second_unless_that_takes_long() -> None:
    manager = saved_state._Manager(storage=None, checkpoint_period="auto")
    assert manager._checkpoint_period == saved_state.EVERY_S
    manager._update_auto_checkpoint_time(0.01)
    assert manager._checkpoint_period == saved_state.EVERY_S
    manager._update_auto_checkpoint_time(1.0)
    assert manager._checkpoint_period == pytest.approx(19)


def trial_of(folder: Path, number: int, rate: float) -> Trial:
    """A trial that waits."""
    trial = Trial(
        "unused",
        config={"train.lr": rate},
        trial_id=str(number),
        experiment_tag=str(number),
        storage=StorageContext(
            storage_path=str(folder),
            experiment_dir_name="tune",
            trial_dir_name=f"trial-{number}",
        ),
        stub=True,
    )
    trial.create_placement_group_factory()
    trial.set_status(Trial.PAUSED)
    return trial


class Controller(tune_controller.TuneController):  # type: ignore[misc]
    """Tune's, of which only what it says of its trials is here."""

    def __init__(self, scheduler: Any, trials: list[Trial]) -> None:
        self._scheduler_alg, self._trials, self._live_trials = scheduler, trials, set(trials)
        self._trials_to_cache, self._trial_metadata = set(trials), {}
        self.saved: list[dict[str, Any]] = []
        self._checkpoint_manager = SimpleNamespace(sync_up_experiment_state=self._save)

    def _save(self, save_fn: Any, force: bool, wait: bool) -> None:
        self.saved.append(dict(self._get_trial_checkpoints()))


def test_what_an_exploit_gave_a_waiting_trial_is_saved_with_the_turn(tmp_path: Path) -> None:
    """Its values and its checkpoint: half of them trained its own weights with the new values, and
    none of them lost the exploit.
    """
    scheduler: Any = PopulationBasedTraining(
        metric="val_loss",
        mode="min",
        synch=True,
        log_config=False,
        hyperparam_mutations={"train.lr": lambda: 0.3},
        resample_probability=1.0,
    )
    trials = [trial_of(tmp_path, number, rate) for number, rate in enumerate((0.1, 0.2))]
    controller = Controller(scheduler, trials)
    donor, clone = trials
    for trial in trials:
        scheduler.on_trial_add(SimpleNamespace(search_alg=None), trial)
        scheduler._trial_state[trial].last_score = 0.0
    scheduler._trial_state[donor].last_checkpoint = Checkpoint(str(tmp_path / "donor"))
    scheduler._trial_state[donor].last_result = {"epoch": 2}

    with saved_state.kept_whole(lambda: None):
        controller.checkpoint()
        scheduler._exploit(controller, clone, donor)
        scheduler.must_save = True
        controller.checkpoint()

    state, metadata = controller.saved[-1][clone.trial_id]
    restored = Trial.from_json_state(state, stub=True)
    restored.restore_run_metadata(metadata)
    assert restored.config == {"train.lr": 0.3}
    assert restored.checkpoint is not None and restored.checkpoint.path == str(tmp_path / "donor")
    assert not scheduler.must_save
