"""Trials of two workers: a group each, that hands its weights on, and a trial that dies costs the
search nothing else.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raypipe.config import replace
from raypipe.errors import RaypipeError
from raypipe.feed.dataset import pin
from raypipe.job import Job
from raypipe.search import tune_run
from raypipe.search.result import SearchResult
from raypipe.search.schedulers import mutations
from raypipe.search.trials import multi_worker_trial
from raypipe.search.trials.multi_worker_trial import GroupTrial
from raypipe.search.trials.trial import run_trial
from raypipe.train import checkpoint, launch, worker_group
from raypipe.train.loop import LoopState
from raypipe.train.trainer import prepare
from tests.searching import search

from .test_pbt import clone_of, equal, moved, population, tensors

Searches = Callable[..., Job]


@pytest.fixture(scope="module")
def searched(
    ray_session: str, searches: Searches, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Job, SearchResult]:
    job = population(
        tmp_path_factory.mktemp("groups"), searches, **{"train.workers": 2, "train.epochs": 4}
    )
    return job, search(job)


@pytest.mark.slow
def test_a_group_takes_over_weights_and_trains_on_with_the_new_value(
    searched: tuple[Job, SearchResult],
) -> None:
    job, result = searched
    told = moved(job, result)
    found = clone_of(job, result, told)
    begun, first = (found / checkpoint.name(told["epoch"] + i) for i in range(2))
    assert checkpoint.verify(begun) is None and told["donor_values"] != told["values"]
    trials = job.run.path / "search" / result.key / "trials"
    donors = [
        p for p in (trials / told["donor"]).glob(f"*/{begun.name}") if checkpoint.verify(p) is None
    ]
    assert donors and equal(tensors(donors[0]), tensors(begun))

    folder = job.run.path / "again" / "checkpoints"
    (folder / begun.name).mkdir(parents=True)
    for file in begun.iterdir():
        (folder / begun.name / file.name).write_bytes(file.read_bytes())
    plain = job.training
    mine = replace(plain, {**told["values"], "feed.carrier": "cache"})
    data = prepare(mine, pin(mine.table, mine.feed))
    share = worker_group.Share({"CPU": 0.5}, recent=mine.train.epochs)
    launch.on_workers(
        mine, data, folder, folder.with_name("leave"), lambda metrics, state: None, share=share
    )
    assert equal(tensors(folder / first.name), tensors(first))


@pytest.mark.slow
def test_every_group_told_all_its_epochs_and_left_none_behind(
    searched: tuple[Job, SearchResult],
) -> None:
    job, result = searched
    assert len(result.trials) == 2 and all(t.epochs == job.train.epochs for t in result.trials)
    assert mutations.read(job.run.path / "search" / result.key) and not list(
        job.run.path.rglob("leave-*")
    )
    assert checkpoint.verify(Path(result.best.checkpoint)) is None
    assert (
        json.loads((Path(result.best.checkpoint) / checkpoint.MANIFEST).read_text())["world"] == 2
    )


def dies(note: Path) -> Callable[..., None]:
    """A trial whose process is killed at its first start when its rate is the lowest: `note`
    counts.
    """

    def trial(changes: dict[str, Any], **given: Any) -> None:
        if changes["train.lr"] < 1e-6 and not note.exists():
            note.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if changes["train.lr"] > 1:
            raise ZeroDivisionError("a fault of the test")
        run_trial(changes, **given)

    return trial


@pytest.mark.usefixtures("ray_session")
def test_a_trial_that_crashes_neither_stops_nor_wins_the_search(
    searches: Searches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is killed once and goes on; one fails each time; the third is the best."""
    note = tmp_path / "note"
    monkeypatch.setattr(tune_run, "run_trial", dies(note))
    space = {"train.lr": "grid(1e-9, 1e-2, 2.0)"}
    result = search(
        searches(
            tmp_path / "run",
            **{"search.space": space, "search.samples": 1, "search.scheduler": "none"},
        )
    )
    assert note.exists(), "the fault did not fire"
    best, killed, failed = result.trials
    assert (best.changes["train.lr"], best.failures) == (1e-2, 0)
    assert (killed.changes["train.lr"], killed.failures, killed.epochs) == (1e-9, 1, 4)
    assert (failed.changes["train.lr"], failed.failures, failed.checkpoint) == (2.0, 2, None)


def test_a_group_that_never_started_has_left() -> None:
    trial = GroupTrial.__new__(GroupTrial)
    trial.cleanup()  # Tune may stop what it never stepped
    assert trial._thread is None


def test_a_group_that_hangs_ends_with_its_process_and_holds_up_no_other_trial(
    searches: Searches,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    heard: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The trial's process joined its thread without a limit: a reset, and with it the search,
    waited for ever."""
    hangs, comes_to = threading.Event(), threading.Event()
    asked: list[Path] = []

    def on_workers(job: Any, data: Any, folder: Any, leave: Path, *more: Any, **named: Any) -> Any:
        asked.append(leave)
        hangs.set()
        comes_to.wait(60)
        return LoopState()

    monkeypatch.setattr(launch, "on_workers", on_workers)
    monkeypatch.setattr(multi_worker_trial, "LEAVE_S", 0.2)
    job = replace(searches(tmp_path / "run").training, {"train.timeout_s": 0.1})

    def began() -> GroupTrial:
        trial = GroupTrial.__new__(GroupTrial)
        trial._job, trial._data = job.model_dump(mode="json"), defaultdict(list)  # type: ignore[arg-type]
        trial._trials, trial._share = tmp_path / "trials", worker_group.Share({"CPU": 1.0})
        trial._storage = SimpleNamespace(trial_fs_path="/tune/a-trial")  # type: ignore[assignment]
        trial.reset_config({})
        hangs.clear()
        trial._start()
        assert hangs.wait(30), "the fault did not fire"
        return trial

    try:
        stopped = began()
        stopped.cleanup()
        assert "workers of a trial hang" in caplog.text and asked[-1].exists()
        taken = began()
        with pytest.raises(RaypipeError, match=r"trial before hang.*0 s ago.*goes on without"):
            taken.reset_config({})
        # Tune stops the process: nothing is waited for again.
        caplog.clear()
        taken.cleanup()
        assert not caplog.text
        # A group that leaves in time is no fault.
        monkeypatch.setattr(multi_worker_trial, "LEAVE_S", 30.0)
        left = began()
        comes_to.set()
        assert left.reset_config({}) and not asked[-1].exists()
    finally:
        comes_to.set()
