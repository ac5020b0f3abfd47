"""Trials can begin in processes that were started in advance: they ask for no environment that those do not have."""

from __future__ import annotations

import pytest
from ray.tune.execution import tune_controller

from raypipe.cluster.connect import prepare_environment
from raypipe.search import places


class Trainable:
    pass


def test_trials_have_no_environment_of_their_own_unless_the_user_sets_what_tune_hands_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in places.ENV_VARS_TO_PROPAGATE:
        monkeypatch.delenv(name, raising=False)
    prepare_environment()  # ours are on every node that we start
    before = tune_controller._ActorClassCache
    with places.plain():
        classes = tune_controller._ActorClassCache()
        plain = classes.get(Trainable)
        assert "runtime_env" not in plain._default_options and classes.get(Trainable) is plain
        name = "AWS_SESSION_TOKEN"
        monkeypatch.setenv(name, "1")
        own = tune_controller._ActorClassCache().get(Trainable)
        assert own._default_options["runtime_env"]["env_vars"][name] == "1"
    with places.plain(groups=True):
        assert tune_controller._ActorClassCache is before
    assert tune_controller._ActorClassCache is before
