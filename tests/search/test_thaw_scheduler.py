"""Freeze-thaw search on a real cluster: it ends with a model, and continues after an interruption
as if there had been none.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raypipe.job import Job
from raypipe.search.schedulers import thaw_scheduler
from raypipe.search.schedulers.freeze_thaw import FreezeThaw
from raypipe.search.trials import saved_state
from raypipe.search.trials.standing import Standing
from tests.searching import search

Searches = Callable[..., Job]

SEARCH: dict[str, Any] = {
    "search.scheduler": "freeze_thaw",
    "search.samples": 10,
    "search.space": {
        "train.lr": "loguniform(1e-6, 3e-2)",
        "model.dropout": "choice(0.0, 0.2)",
    },
}


@pytest.mark.usefixtures("ray_session")
def test_a_search_ends_with_a_model_and_trains_each_epoch_once(
    searches: Searches, tmp_path: Path
) -> None:
    job = searches(tmp_path, **SEARCH)
    result = search(job)
    assert result.trials[0].metric == min(trial.metric for trial in result.trials)
    assert any(trial.epochs == job.train.epochs for trial in result.trials)
    assert 0 < result.epochs <= job.train.epochs * 10
    # Each epoch was trained once, whatever the pauses.
    assert all(len(trial.history) == trial.epochs for trial in result.trials)
    # Killed before it wrote its result: Tune restores a search in which all has ended.
    (tmp_path / "search" / result.key / "result.json").unlink()
    again = search(job)
    assert [t.name for t in again.trials] == [t.name for t in result.trials]
    assert again.epochs == result.epochs


@pytest.mark.usefixtures("ray_session")
def test_an_interrupted_search_continues_with_what_it_had_learned(
    searches: Searches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One trial at a time, so that both searches hear the same reports; Tune saves after each.
    changes = SEARCH | {"search.concurrent": 1, "search.samples": 5, "train.epochs": 3}
    monkeypatch.setattr(saved_state, "EVERY_S", 0.0)
    monkeypatch.setattr(saved_state, "SHARE", 1.0)
    # Seconds differ from run to run, and the rule looks at them.
    monkeypatch.setattr(thaw_scheduler, "SECONDS", "not measured")
    whole = search(searches(tmp_path / "whole", **changes))
    restored: list[int] = []
    plain = FreezeThaw.restore

    def noted(self: FreezeThaw, state: dict[str, Any]) -> None:
        restored.append(state["reports"])
        plain(self, state)

    def interrupt(done: int, total: int, standings: list[Standing]) -> None:
        if sum(standing.epochs for standing in standings) == 4:
            raise RuntimeError("interrupted")

    monkeypatch.setattr(FreezeThaw, "restore", noted)
    job = searches(tmp_path / "cut", **changes)
    with pytest.raises(Exception, match="interrupted"):
        search(job, interrupt)
    result = search(job)
    assert restored and 0 < restored[0] <= 4
    # The same trials, as far as the same epoch.
    assert {t.name: t.epochs for t in result.trials} == {t.name: t.epochs for t in whole.trials}


@pytest.mark.usefixtures("ray_session")
def test_a_search_that_is_stopped_has_a_result_though_most_trials_never_began(
    searches: Searches, tmp_path: Path
) -> None:
    result = search(searches(tmp_path, **SEARCH | {"search.stopping.epochs": 3}))
    assert "budget of 3 epochs" in str(result.stopped)
    assert 0 < len(result.trials) < 10 and all(trial.cut for trial in result.trials)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_trials_that_fail_are_tried_twice_and_the_others_go_on(
    searches: Searches, tmp_path: Path
) -> None:
    # One worker cannot shard a model, so every trial with zero3 fails.
    space = {"train.lr": "loguniform(1e-4, 3e-2)", "train.strategy": "grid(auto, zero3)"}
    job = searches(tmp_path, **SEARCH | {"search.samples": 2, "search.space": space})
    result = search(job)
    failed = [trial for trial in result.trials if trial.changes["train.strategy"] == "zero3"]
    assert failed and all(trial.failures == 2 for trial in failed)
    assert any(trial.epochs == job.train.epochs for trial in result.trials)
