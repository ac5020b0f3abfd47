"""Trials can begin in processes that were started in advance: they ask for no environment that
those do not have.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.train._internal.storage import StorageContext
from ray.tune.execution import class_cache, tune_controller
from ray.tune.experiment.trial import Trial

from raypipe.cluster.connect import ENV, prepare_environment
from raypipe.search.trials import tune_patches


class Trainable:
    pass


def test_trials_have_no_environment_of_their_own_unless_the_user_sets_what_tune_hands_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in class_cache.ENV_VARS_TO_PROPAGATE:
        monkeypatch.delenv(name, raising=False)
    prepare_environment()  # ours are on every node that we start
    before = tune_controller._ActorClassCache
    with tune_patches.applied():
        classes = tune_controller._ActorClassCache()
        plain = classes.get(Trainable)
        assert "runtime_env" not in plain._default_options and classes.get(Trainable) is plain
        monkeypatch.setenv(
            "AWS_SECRET_ACCESS_KEY", "1"
        )  # Ray shows an actor's environment on the dashboard
        assert (
            "runtime_env" not in tune_controller._ActorClassCache().get(Trainable)._default_options
        )
        name = min(tune_patches.PROPAGATED - set(ENV))
        monkeypatch.setenv(name, "1")
        own = tune_controller._ActorClassCache().get(Trainable)
        handed_on = own._default_options["runtime_env"]["env_vars"]
        assert handed_on[name] == "1" and "AWS_SECRET_ACCESS_KEY" not in handed_on
    with tune_patches.applied(multi_worker=True):
        assert tune_controller._ActorClassCache is before
    assert tune_controller._ActorClassCache is before


def test_a_trial_has_its_folder_before_it_takes_over_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tune gives the process of a trial that ended also to one that it has not yet scheduled."""
    session = "ray.train._internal.storage._get_ray_train_session_dir"
    monkeypatch.setattr(session, lambda: str(tmp_path / "session"))
    storage = StorageContext(str(tmp_path), "search")
    trial = Trial("unknown", stub=True, storage=storage)
    sent: list[Any] = []
    controller: Any = SimpleNamespace(
        _resetting_trials=set(),
        _on_trial_reset=None,
        _trial_task_failure=None,
        _schedule_trial_task=lambda **task: sent.append(task["kwargs"]["storage"]),
    )
    reset = tune_controller.TuneController._schedule_trial_reset
    with tune_patches.applied():
        tune_controller.TuneController._schedule_trial_reset(controller, trial, {}, "tag")
    assert sent[0].trial_dir_name and Path(trial.local_path).is_dir()
    assert tune_controller.TuneController._schedule_trial_reset is reset
    # Without the change it has none, and its process would fail.
    other = Trial("unknown", stub=True, storage=StorageContext(str(tmp_path), "search"))
    reset(controller, other, {}, "tag")
    assert sent[1].trial_dir_name is None
