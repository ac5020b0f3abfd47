"""A real search within a budget, by a clock that the test moves: no host is too slow for it."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import ray

from raypipe.cli.console import Console
from raypipe.config import replace
from raypipe.failures import explain
from raypipe.files import is_owned
from raypipe.job import Job
from raypipe.search import budget, opening, refit, several, tuner
from raypipe.search.leaderboard import FIRST
from raypipe.search.ledger import Ledger, TooShort
from raypipe.search.space import defaults
from raypipe.search.trials.standing import Standing
from raypipe.tables.table import TableConfig
from raypipe.timer import OutOfTime, interrupted
from raypipe.train import checkpoint
from raypipe.work import in_time, kept_refits, reports, training

from .test_refit import cells
from .test_tuner import Searches

__all__ = ["cells"]
BUDGET = 2000.0
ASKED = {
    "search.budget_s": BUDGET,
    "search.samples": 500,
    "search.space": {"train.lr": "loguniform(1e-4, 1e-2)"},
    "search.refit": {"train.epochs": 3},
    "registry.severity_images": 0,
}


class Shown(Console):
    """Calls `heard` whenever a trial reports."""

    def __init__(self, heard: Callable[[Sequence[Standing]], None]) -> None:
        super().__init__(as_json=True)
        self.heard = heard

    @contextmanager
    def searching(self, metric: str) -> Iterator[Any]:
        yield lambda done, total, standings: self.heard(standings)


def searched(job: Job, later: float = 0.0, began: float = 0.0) -> tuple[Any, Any, Ledger]:
    """The search and its model; the clock goes from `began` to `later` when three trials have
    reported."""
    now = [began]

    def heard(standings: Sequence[Standing]) -> None:
        if len(standings) >= 3:
            now[0] = later

    ledger = Ledger(BUDGET, 0.0, lambda: now[0])
    result, version, _ = training.search_and_register(job, Shown(heard), ledger=ledger)
    return result, version, ledger


@pytest.mark.usefixtures("ray_session")
def test_trials_end_for_a_refit_that_fits(
    cells: TableConfig, searches: Searches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = searches(tmp_path, **ASKED, **{"table.uri": cells.uri})
    # Another terminal plans no refit of its own, and registers no other model.
    held = []
    for where, name in ((refit, "planned"), (training, "publish")):
        real = getattr(where, name)

        def spied(*given: Any, real: Any = real) -> Any:
            held.append(is_owned(next((tmp_path / "search").iterdir())))
            return real(*given)

        monkeypatch.setattr(where, name, spied)
    result, version, ledger = searched(job, later=1100)
    assert held == [True, True] and not is_owned(result.folder)
    assert 3 <= len(result.trials) < 500 and "the budget of 2000 s" in str(result.stopped)
    assert result.refitted and result.job.train.anneal_s < 900 and len(result.best.history) == 3
    said = ledger.summary()
    assert said and not said["notes"]
    assert "images/s trained" in said["phases"]["trials"]["evidence"]
    assert "epochs of" in said["phases"]["refit"]["evidence"]
    assert said["phases"]["ending"]["planned_s"] > 0

    # The finished parts are read, and the model is the one that is there: also where no time is
    # left for a refit, and after another refit was asked for.
    again, same, _ = searched(job, later=1100)
    assert (again.best.key, same) == (result.best.key, version)
    with monkeypatch.context() as patched:
        real = in_time.refitted

        def late(job: Any, found: Any, ledger: Ledger, train: Any) -> Any:
            ledger._clock = lambda: 1995.0
            return real(job, found, ledger, train)

        patched.setattr(in_time, "refitted", late)
        again, same, ledger = searched(job)
    assert (again.best.key, same) == (result.best.key, version)
    assert not [note for note in ledger.notes if note.startswith(kept_refits.NONE)]
    other, second, _ = searched(replace(job, {"search.refit": {"train.epochs": 2}}))
    assert other.refitted and str(second).endswith("/2")
    again, same, _ = searched(job, began=200)
    assert (again.best.key, same) == (result.best.key, version)


@pytest.mark.usefixtures("ray_session")
def test_where_no_time_is_left_the_best_trial_is_the_answer(
    cells: TableConfig, searches: Searches, tmp_path: Path
) -> None:
    job = searches(tmp_path, **ASKED, **{"table.uri": cells.uri})
    result, version, ledger = searched(job, later=1990)
    assert not result.refitted and str(version).endswith("/1")
    assert "No refit" in ledger.notes[0] and " left (" in ledger.notes[0]

    # A rerun has all of the time for a refit, and would register another model.
    for _ in range(2):
        again, same, ledger = searched(job, later=0)
        assert same == version and again.best.key == result.best.key and not again.refitted
        (said,) = ledger.notes
        assert " left (" in said and "when this model was registered (to try again" in said
        assert said.count("registered") == 1
    other = replace(job, {"search.refit": {"train.epochs": 4}})
    again, newer, _ = searched(other, later=0)
    assert again.refitted and str(newer).endswith("/2")
    (result.folder / kept_refits.SETTLED).unlink()
    again, newer, _ = searched(job, later=0)
    assert again.refitted and str(newer).endswith("/3")


@pytest.mark.usefixtures("ray_session")
def test_trials_by_the_clock_are_as_many_as_run_side_by_side(
    cells: TableConfig, searches: Searches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a default space of a larger table would say.
    monkeypatch.setattr(defaults, "trains_by_clock", lambda *given: True)
    whole = {"search.scheduler": "none", "search.refit": None, "search.concurrent": 3}
    job = searches(tmp_path, **ASKED | whole, **{"table.uri": cells.uri})
    result, version, _ = searched(job, later=0.0)
    side_by_side = min(3, int(ray.cluster_resources()["CPU"]))
    assert len(result.trials) == side_by_side and result.stopped is None
    assert str(version).endswith("/1")
    # Their rate followed the clock. Who trains the winner again has other time.
    assert checkpoint.read(Path(result.best.checkpoint)).state.progress is not None
    assert result.job.train.anneal_s is None


@pytest.mark.usefixtures("ray_session")
def test_a_trial_by_the_clock_that_diverges_is_followed_by_another(
    cells: TableConfig, searches: Searches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its CPU was idle until the clock of the others was over."""
    monkeypatch.setattr(defaults, "trains_by_clock", lambda *given: True)
    one = {"search.scheduler": "none", "search.refit": None, "search.concurrent": 1}
    rates = {
        "search.space": {"train.lr": "choice(1e30, 1e-3, 1e-3, 1e-3)"},
        "search.start": {"train.lr": 1e30},
    }
    job = searches(tmp_path, **ASKED | one | rates, **{"table.uri": cells.uri})
    result, _, _ = searched(job, later=0.0)
    first = next(trial for trial in result.trials if trial.name.startswith("trial-001"))
    assert len(result.trials) == 2 and first.checkpoint is None
    assert result.trials[0].changes["train.lr"] == 1e-3
    assert checkpoint.read(Path(result.best.checkpoint)).state.progress is not None


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("wait", [ray.get, lambda one: ray.wait([one], timeout=60)])
def test_a_wait_for_a_task_ends_when_the_time_is_over(wait: Callable[[Any], Any]) -> None:
    """Ray waited on until the task had ended, and the search was lost in a SystemError, or went on
    without a clock where somebody took that for an error of his own."""

    @ray.remote(num_cpus=0)
    def endless() -> None:
        time.sleep(30)

    running, began = endless.remote(), time.monotonic()
    try:
        with (
            pytest.raises(OutOfTime),
            interrupted(0.3, lambda: OutOfTime("over")),
            suppress(Exception),
        ):
            wait(running)
        assert time.monotonic() - began < 10
    finally:
        ray.cancel(running, force=True)


FIRST_ONLY = {
    "search.budget_s": BUDGET,
    "search.first_answer": True,
    "search.samples": 1,
    "search.scheduler": "none",
    "search.space": {"train.lr": "grid(1e-7)"},  # a trial learns nothing
    "search.refit": {"train.epochs": 5},
    "train.epochs": 2,
    "model.side_px": 32,
    "registry.severity_images": 0,
}


@pytest.mark.usefixtures("ray_session")
def test_a_first_answer_that_wins_is_fitted_again_on_both_splits(
    cells: TableConfig, searches: Searches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_lite0(monkeypatch)
    monkeypatch.setattr(training, "answer_s", lambda store: 0.01)
    job = searches(tmp_path, **FIRST_ONLY, **{"table.uri": cells.uri})
    now = [0.0]
    ledger = Ledger(BUDGET, 0.0, lambda: now[0])
    result, _, _ = training.search_and_register(job, Shown(lambda standings: None), ledger=ledger)
    assert result.trials[0].name.startswith(FIRST)
    assert result.refitted and ledger.notes == [] and ledger.forecast.answer_s == 0.01
    assert result.job.feed.train == "train+val" and result.job.train.solver == "closed"
    # It leads from the start, and no trial became better.
    assert result.reached[-1].value == result.trials[0].metric
    assert {one.by[: len(FIRST)] for one in result.reached} == {FIRST}
    assert 0 < ledger.forecast.image_s < 1
    # Its images are no evidence of how fast trials' are embedded: the clock stood still.
    assert ledger.forecast.embedded_per_s is None


@pytest.mark.usefixtures("ray_session")
def test_a_first_answer_is_registered_where_no_time_is_left_for_a_trial(
    cells: TableConfig, searches: Searches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_lite0(monkeypatch)
    job = searches(tmp_path, **FIRST_ONLY, **{"table.uri": cells.uri})
    now = [0.0]

    def heard(standings: Sequence[Standing]) -> None:
        now[0] = 1985.0

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def search() -> tuple[Any, Any, Any]:
        now[0] = 0.0
        ledger = Ledger(BUDGET, 0.0, lambda: now[0])
        return training.search_and_register(job, Shown(heard), ledger=ledger)

    # What fails then was told as the end of the budget.
    with monkeypatch.context() as patched, pytest.raises(OSError) as raised:
        patched.setattr(opening, "end_with", full)
        search()
    assert "The disk is full" in explain(raised.value)[1]
    result, version, _ = search()
    assert str(version).endswith("/1") and not result.refitted
    assert {trial.drawn for trial in result.trials} == {False}
    assert "left no time for trials" in str(result.stopped)
    cost = next(one for one in reports.model(job, 1, reread=False).answers if one.name == "cost")
    assert "in 0 trials and 3 heads" in cost.text and "training" not in cost.text
    assert result.reached[-1].value == result.trials[0].metric


@pytest.mark.usefixtures("ray_session")
def test_a_search_whose_time_was_over_before_an_epoch_begins_its_trials_when_it_is_rerun(
    cells: TableConfig, searches: Searches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed while its heads were combined. Its rerun had all of the time, began no trial,
    and said nothing."""
    only_lite0(monkeypatch)
    own = {"search.refit": None, "search.ensemble": 2, "table.uri": cells.uri}
    job = searches(tmp_path, **FIRST_ONLY | own)
    now = [0.0]

    class OverWithTheFirstTrial(Ledger):
        def trials_begin(self, embedded: int = 0) -> None:
            super().trials_begin(embedded)
            now[0] = 1999.0

    def killed(*given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(several, "ensemble", killed)
        late = OverWithTheFirstTrial(BUDGET, 0.0, lambda: now[0])
        training.search_and_register(job, Shown(lambda standings: None), ledger=late)
    result, _, _ = searched(job)
    assert sum(trial.drawn for trial in result.trials) == 1


@pytest.mark.usefixtures("ray_session")
def test_a_rerun_says_what_judges_the_version_that_is_registered(
    cells: TableConfig, searches: Searches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said what its own clock would have planned, beside the metrics of another plan."""
    own = {"search.samples": 1, "search.refit": None, "table.uri": cells.uri}
    job = searches(tmp_path, **ASKED | own)

    def on_a_slow_host(job: Job) -> tuple[Any, list[str]]:
        with monkeypatch.context() as patched:
            patched.setattr(budget, "judged_images", lambda *given: 5)
            _, version, ledger = searched(job)
        return version, ledger.notes

    def on_a_fast_host(job: Job) -> tuple[Any, list[str]]:
        _, version, ledger = searched(job)
        return version, ledger.notes

    version, said = on_a_slow_host(job)
    assert len(said) == 1 and said[0].startswith("At most 5 images of a split judge the model")
    assert on_a_fast_host(job) == (version, said)
    # And the other way round, in another registry.
    other = replace(job, {"registry.model": "other"})
    version, said = on_a_fast_host(other)
    assert said == [] and on_a_slow_host(other) == (version, [])


@pytest.mark.usefixtures("ray_session")
def test_an_interrupted_search_without_time_to_go_on_is_told_so(
    cells: TableConfig, searches: Searches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told to take another budget, with which nothing is kept."""
    own = {"search.samples": 1, "search.refit": None, "table.uri": cells.uri}
    job = searches(tmp_path, **ASKED | own)
    now, read = [0.0], tuner.prepare_data

    def killed(timed: Any, cfg: Any, strategy: Any, data: Any, folder: Path, *more: Any) -> None:
        (folder / "tune").mkdir()
        raise KeyboardInterrupt

    def slow(*given: Any) -> Any:
        now[0] = 1990.0
        return read(*given)

    monkeypatch.setattr(tuner, "_run", killed)
    with pytest.raises(KeyboardInterrupt):
        searched(job)
    monkeypatch.setattr(tuner, "prepare_data", slow)
    with pytest.raises(TooShort, match=r"begun before.*is another search.*same command again"):
        ledger = Ledger(BUDGET, 0.0, lambda: now[0])
        training.search_and_register(job, Shown(lambda standings: None), ledger=ledger)


def only_lite0(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same heads wherever the tests run."""
    monkeypatch.setattr(
        "raypipe.search.contenders.is_installed", lambda name: name.startswith("efficientnet_lite0")
    )
