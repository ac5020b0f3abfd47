"""Tune's state in one file: a search is restored from what was saved together.

# Starts no Ray cluster.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from ray.tune.execution import experiment_state, tune_controller

from raypipe.search.trials import saved_state

FILES = {
    "experiment_state-1.json": '{"trial_data": [["a", "b"]]}',
    "searcher-state-1.pkl": "searcher",
    "search_gen_state-1.json": "limits",
    "callback-states-1.pkl": "callbacks",
}


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
