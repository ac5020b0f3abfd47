"""A search has an answer before its first trial: trials must beat it, and no kill loses it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from raypipe.config import replace, validate
from raypipe.errors import ConfigError
from raypipe.feed import features as feeding
from raypipe.feed.dataset import pin
from raypipe.job import Job
from raypipe.models.heads import KernelHead
from raypipe.search import first_answer, opening, page, trial_files, variants
from raypipe.search.contenders import Reading
from raypipe.search.first_answer import FirstAnswer
from raypipe.search.leaderboard import FIRST, Trial
from raypipe.search.ledger import Ledger
from raypipe.search.limits import Variant
from raypipe.search.result import SearchResult
from raypipe.search.trials import trial_data
from raypipe.search.trials.standing import Reached
from raypipe.train import checkpoint, trainer, worker
from raypipe.train.stopping import FITTED

from ..searching import search

Searches = Callable[..., Job]
STAGES_D = 2816  # features of all stages of efficientnet_lite0
# Trials that learn nothing, of pixels as few as those of the first answer.
HOPELESS = {
    "search.first_answer": True,
    "search.samples": 1,
    "search.scheduler": "none",
    "search.space": {"train.lr": "grid(1e-7, 1e-8)"},
    "train.epochs": 2,
    "model.side_px": 32,
}


@pytest.fixture(autouse=True)
def only_lite0(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same heads wherever the tests run."""
    monkeypatch.setattr(
        "raypipe.search.contenders.is_installed", lambda name: name.startswith("efficientnet_lite0")
    )


@pytest.mark.usefixtures("ray_session")
def test_it_is_registered_where_no_trial_beats_it(searches: Searches, tmp_path: Path) -> None:
    job = searches(tmp_path, **HOPELESS, **{"search.soup": 2})
    ledger = Ledger(None)
    told: list[tuple[int, list[str]]] = []

    def progress(done: int, total: int, standings: Any) -> None:
        told.append((done, [one.name for one in standings]))

    found = search(job, progress, ledger=ledger)
    assert ledger.notes == ["No soup: a head of the first answer is better than all trials"]
    names = [trial.name for trial in found.trials]
    assert names[0].startswith(FIRST) and len([n for n in names if n.startswith(FIRST)]) == 3
    assert len([n for n in names if n.startswith("trial-")]) == 2
    assert told[0] == (0, [f"{FIRST}-1"])
    best = found.trials[0]
    assert best.stopped == FITTED and best.checkpoint and best.metric < found.trials[-1].metric

    # Its model, from its job and its checkpoint alone.
    assert found.job.model.mode == "frozen" and found.job.train.solver in ("closed", "lbfgs")
    model = trainer.assemble(found.job, found.best)
    noise = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    assert np.isfinite(model.predict(noise)[1]).all()
    assert found.best.metrics["val_accuracy"] >= 0.9

    # A head at once says nothing about trials' epochs.
    assert found.full_epochs == 4 and found.spared.share == 0
    assert page.first_answer(found)["first answer"].endswith("no trial beat it")
    # The finished search is read again, and says again what it has not made.
    again = Ledger(None)
    assert search(job, ledger=again).trials == found.trials
    assert again.notes == ledger.notes and again.facts() == {"notes": ledger.notes[0]}


@pytest.mark.usefixtures("ray_session")
def test_a_kill_costs_neither_features_nor_finished_heads(
    searches: Searches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = searches(tmp_path, **HOPELESS)
    real = worker._solve
    solved: list[type] = []

    def dies_at_the_third(model: torch.nn.Module, *more: Any) -> float:
        if len(solved) == 2:
            raise KeyboardInterrupt("power cut")
        solved.append(type(model))
        return real(model, *more)

    monkeypatch.setattr(worker, "_solve", dies_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        search(job)
    assert solved[0] is KernelHead

    again: list[type] = []

    def counted(model: torch.nn.Module, *more: Any) -> float:
        again.append(type(model))
        return real(model, *more)

    monkeypatch.setattr(worker, "_solve", counted)
    monkeypatch.setattr(feeding, "embed_group", lambda *given: pytest.fail("embedded again"))
    found = search(job)
    assert len(again) == 1
    heads = [trial for trial in found.trials if not trial.drawn]
    assert sorted(trial.name for trial in heads) == [f"{FIRST}-{i}" for i in (1, 2, 3)]
    assert found.drawn == len(found.trials) - 3
    # Those that were read again cost what their fits took.
    for head in heads:
        state = checkpoint.read(Path(str(head.checkpoint))).state
        assert head.device_s >= state.seconds > 0


@pytest.mark.usefixtures("ray_session")
def test_another_folder_with_another_model_registers_its_own(
    searches: Searches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clocks and failures decide in a search: two folders may come to two models by one command."""

    one_trial = HOPELESS | {"search.space": {"train.lr": "grid(1e-7)"}}

    def found_in(folder: str) -> SearchResult:
        return search(searches(tmp_path / folder, **one_trial))

    one, same = found_in("one"), found_in("same")
    monkeypatch.setattr(first_answer, "make", lambda *given, **more: FirstAnswer())
    other = found_in("other")
    assert one.key == same.key == other.key
    assert one.best.key == same.best.key, "the same weights are the same model"
    assert one.best.key != other.best.key


def test_what_does_not_fit_into_the_seconds_is_left_out(
    searches: Searches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: Any, caplog: Any
) -> None:
    job = searches(tmp_path, **HOPELESS).training
    pinned = pin(job.table, job.feed, kind=job.model.task)
    one_a_second(monkeypatch)
    # 60 images of 32 px.
    none = first_answer.make(job, pinned, tmp_path / "none", seconds=0.5)
    assert none.trials == [] and "none of them fits into 0.5 s" in caplog.text
    # The choice is kept, for a rerun on another machine: more seconds do not change it.
    assert first_answer.make(job, pinned, tmp_path / "none", seconds=1e6).trials == []


def one_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of work 1, whatever this machine has."""
    monkeypatch.setattr(first_answer, "thread_works_per_s", lambda reading: 1.0)
    monkeypatch.setattr(first_answer, "cluster_cpus", lambda: 1.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def test_all_nodes_read_features_and_one_process_predicts_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end was planned with the rate of all nodes: 64 CPUs, of which this process has four."""
    monkeypatch.setattr(first_answer, "thread_works_per_s", lambda reading: 10.0)
    monkeypatch.setattr(first_answer, "cluster_cpus", lambda: 64.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    among = [first_answer._Heads(Reading("efficientnet_lite0_stages", 224, 1.0), {})]
    pinned: Any = SimpleNamespace(counts={"train": 2000, "val": 880})
    job: Any = SimpleNamespace(feed=SimpleNamespace(train="train", val="val"))
    asked: list[float] = []

    def chosen(folder: str, seconds: float) -> tuple[list[Any], float | None]:
        (tmp_path / folder).mkdir(exist_ok=True)
        # None: no seconds are left for the reading of least work.
        left: Any = asked.append
        return first_answer._chosen(among, job, pinned, tmp_path / folder, seconds, left)

    # 2,880 images at 640 a second take 4.5 s, which are three quarters of 6.
    assert chosen("fits", 6.1) == (among, 40.0) and not asked
    assert chosen("fits", 6.1) == (among, 40.0), "as it was kept"
    assert chosen("not", 5.9) == ([], 40.0) and asked == [40.0]

    # Of features that trials need, the part of this process.
    monkeypatch.setattr(trial_data, "cluster_cpus", lambda: 64.0)
    source = SimpleNamespace(decoded=3200)
    read: Any = {"a": SimpleNamespace(features=True, train=source, val=source)}
    assert trial_data.embedded_here(read) == 200
    read["a"].features = False
    assert trial_data.embedded_here(read) == 0


def test_if_nothing_fits_the_reading_of_least_work_may_take_what_is_left(
    searches: Searches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = searches(tmp_path, **HOPELESS).training
    pinned = pin(job.table, job.feed, kind=job.model.task)
    one_a_second(monkeypatch)
    asked: list[float] = []

    def left(seconds: float) -> first_answer.LeftForOne:
        def answer(images_per_s: float) -> float:
            asked.append(images_per_s)
            return seconds

        return answer

    late = first_answer.make(job, pinned, tmp_path / "late", 0.5, left_for_one_s=left(-1.0))
    assert late.trials == []
    found = first_answer.make(job, pinned, tmp_path / "left", 0.5, left_for_one_s=left(100.0))
    assert found.trials and len({trial.changes["model.side_px"] for trial in found.trials}) == 1
    assert all(rate > 1 for rate in asked)


def test_a_model_that_breaks_a_limit_is_not_fitted(searches: Searches, tmp_path: Path) -> None:
    job = searches(tmp_path, **HOPELESS).training
    pinned = pin(job.table, job.feed, kind=job.model.task)
    models = first_answer.models(job, pinned)
    barred = {one.shape: "too large" if one.head == "kernel" else "" for one in models}
    found = first_answer.make(job, pinned, tmp_path / "search", barred=barred)
    assert [trial.name for trial in found.trials] == [f"{FIRST}-2"]
    assert all(trial.changes["model.head"] == "linear" for trial in found.trials)
    everything = dict.fromkeys(barred, "too slow")
    assert not first_answer.make(job, pinned, tmp_path / "none", barred=everything).trials


def test_heads_that_cannot_be_paid_are_not_fitted(searches: Searches, tmp_path: Path) -> None:
    """The first one is: what a head takes is known when it was fitted."""
    job = searches(tmp_path, **HOPELESS).training
    pinned = pin(job.table, job.feed, kind=job.model.task)
    found = first_answer.make(job, pinned, tmp_path / "search", most_s=1e-9)
    assert [trial.name for trial in found.trials] == [f"{FIRST}-1"]


@pytest.mark.usefixtures("ray_session")
def test_it_is_the_model_where_no_trial_keeps_a_limit(
    searches: Searches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads on the stages of a backbone take 1 ms here, and all other models 9 ms."""

    def timed(models: Any, images: Any, rounds: int = 1) -> list[Variant]:
        ms = [1.0 if one.head.features == STAGES_D else 9.0 for one in models]
        return [Variant("", one, one, one, 0.0) for one in ms]

    monkeypatch.setattr(variants, "timed", timed)
    ledger, limits = Ledger(None), {"search.limits.latency_ms": 5}
    found = search(searches(tmp_path, **HOPELESS, **limits, **{"search.soup": 2}), ledger=ledger)
    assert ledger.notes == ["No soup: no trial has begun"] == list(found.notes)
    assert ledger.facts() == {"notes": "No soup: no trial has begun"}
    assert sorted(trial.name for trial in found.trials) == [f"{FIRST}-{i}" for i in (1, 2)]
    assert found.stopped == "search.limits leaves no trial that may begin"
    assert found.trials[0].checkpoint and not (found.folder / "tune").exists()
    # Weighed with as many landmarks as there are images, here 60: 2,048 of them have 23 MB.
    largest = max(one.size_mb for one in variants.read(found.folder).values())
    assert largest < 16
    with pytest.raises(ConfigError, match="No model of the search can keep"):
        search(searches(tmp_path, **HOPELESS, **{"search.limits.latency_ms": 0.5}))


@pytest.mark.usefixtures("ray_session")
def test_no_trial_begins_where_a_head_has_the_target(searches: Searches, tmp_path: Path) -> None:
    """The target knew trials alone: all of them ran."""
    ledger = Ledger(None)
    found = search(searches(tmp_path, **HOPELESS, **{"search.stopping.target": 5}), ledger=ledger)
    assert {trial.drawn for trial in found.trials} == {False} and found.trials[0].checkpoint
    assert not (found.folder / "tune").exists()
    assert found.stopped is not None and found.stopped.endswith("reached the target 5")


def test_only_a_head_that_is_a_model_has_the_target() -> None:
    asked = {"stopping": {"target": 0.8}, "first_answer": True}
    job = validate(Job, {"table": {"uri": "unused"}, "search": asked})

    def why(*heads: tuple[float, str | None]) -> str | None:
        trials = [
            Trial(f"{FIRST}-{i}", {}, value, 1, False, (), checkpoint, FITTED)
            for i, (value, checkpoint) in enumerate(heads)
        ]
        return opening.has_target(job.training, job.search, FirstAnswer(trials))

    assert why() is None and why((0.7, "somewhere"), (0.9, None)) is None
    assert why((math.nan, None)) is None
    said = why((0.7, "somewhere"), (0.9, "somewhere"))
    assert said == "val_accuracy 0.9 reached the target 0.8"


@pytest.mark.parametrize("error", [None, np.linalg.LinAlgError("no convergence")])
def test_a_head_that_fails_costs_only_itself(
    searches: Searches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any
) -> None:
    """Weights of NaN in one head, an error in another one."""
    from raypipe.errors import DataError

    job = replace(searches(tmp_path, **HOPELESS).training, {"train.stopping.metric": "val_loss"})
    pinned = pin(job.table, job.feed, kind=job.model.task)
    real = worker._solve
    calls: list[Any] = []

    def breaks(model: Any, *more: Any) -> float:
        calls.append(model)
        if len(calls) == 1:
            raise DataError("broken") if error is None else error
        took_s = real(model, *more)
        if len(calls) == 2:
            torch.nn.init.constant_(model.linear.weight, float("nan"))
        return took_s

    monkeypatch.setattr(worker, "_solve", breaks)
    found = first_answer.make(job, pinned, tmp_path / "search")
    by_name = {trial.name: trial for trial in found.trials}
    assert sorted(by_name) == [f"{FIRST}-{i}" for i in (2, 3)]
    assert by_name[f"{FIRST}-2"].checkpoint is None and np.isnan(by_name[f"{FIRST}-2"].metric)
    assert by_name[f"{FIRST}-3"].checkpoint and np.isfinite(by_name[f"{FIRST}-3"].metric)


def test_a_head_without_weights_leads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The terminal said "best so far val_accuracy nan", and counted it as a trial that began."""
    history = ({"val_accuracy": 0.8, "val_loss": 1.0},)
    lost = Trial(f"{FIRST}-1", {}, math.nan, 1, False, history, None, FITTED)
    good = Trial(f"{FIRST}-2", {}, 0.8, 1, False, history, "somewhere", FITTED)
    # One that was fitted at once has no further epochs.
    assert good.whole(20) == 1 and Trial("trial-1", {}, 0.8, 1, True, history, "x").whole(20) == 20

    def make(job: Any, pinned: Any, folder: Path, seconds: float, told: Any, *more: Any) -> None:
        told(lost)
        told(good)

    monkeypatch.setattr(first_answer, "make", lambda *given, **more: make(*given))
    job = validate(Job, {"table": {"uri": "unused"}, "search": {"first_answer": True}})
    heard: list[list[str]] = []

    def progress(done: int, total: int, standings: Any) -> None:
        heard.append([one.name for one in standings])

    args = (job.training, job.search, None, tmp_path, progress, 16, Ledger())
    opening.answer(*args)  # type: ignore[arg-type]
    assert heard == [[good.name]]


def test_what_a_first_answer_took_before_a_kill_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page said that the best was reached after 1 s: heads that are read again take no time."""
    clock = [0.0]
    heads = [SimpleNamespace(jobs={"a": 1}, without=lambda barred: heads[0])]
    monkeypatch.setattr(first_answer, "_of_readings", lambda job, pinned: heads)
    monkeypatch.setattr(first_answer, "_chosen", lambda *given: (heads, None))

    def make(*trials: tuple[str, float, float]) -> FirstAnswer:
        def fit(one: Any, pinned: Any, folder: Path, found: Any, told: Any, most_s: Any) -> None:
            for name, took_s, metric in trials:
                clock[0] += took_s
                told(SimpleNamespace(name=name, metric=metric))

        monkeypatch.setattr(first_answer, "_read_and_fit", fit)
        return first_answer.make(None, None, tmp_path, clock=lambda: clock[0])  # type: ignore[arg-type]

    one, two = f"{FIRST}-1", f"{FIRST}-2"
    killed = make((one, 40.0, 0.8))
    assert [(at.by, at.seconds) for at in killed.reached] == [(one, 40)]
    again = make((one, 1.0, 0.8), (two, 5.0, 0.9))
    assert [(at.by, at.seconds) for at in again.reached] == [(one, 40), (two, 46)]
    assert again.seconds == 46
    # Trials have made it better since, and the search is killed once more.
    opening.write_reached(tmp_path, again, [Reached(9, 0.95, "trial-001", 3)], 20, "max")
    last = make((one, 1.0, 0.8), (two, 1.0, 0.9))
    assert [(at.by, at.seconds) for at in last.reached] == [(one, 40), (two, 46)]
    # Another head of the same name: a backbone was removed in between.
    other = make((one, 5.0, 0.7), (two, 1.0, 0.9))
    assert [(at.by, at.value, at.seconds) for at in other.reached] == [
        (one, 0.7, 53),
        (two, 0.9, 46),
    ]
    assert other.seconds == 54
    opening.write_reached(tmp_path, other, [], 0, "max")
    assert [at.by for at in trial_files.read_reached(tmp_path)[0]] == [two], "in the order of time"
    # A head that never led took its time, too: trials come after it.
    worse = make((one, 1.0, 0.8), (two, 1.0, 0.9), (f"{FIRST}-3", 30.0, 0.5))
    assert worse.seconds == 54 + 32
    for _ in range(2):
        opening.write_reached(tmp_path, worse, [Reached(9, 0.95, "trial-001", 3)], 20, "max")
        reached, whole_s = trial_files.read_reached(tmp_path)
        assert reached[-1].seconds == worse.seconds + 9 and whole_s == worse.seconds + 20
        assert worse.seconds >= 80, "the page said that the trial was better after 57 s"
        worse = make((one, 1.0, 0.8), (two, 1.0, 0.9), (f"{FIRST}-3", 1.0, 0.5))
    # A file of an older version says only when heads became better.
    file = tmp_path / trial_files.REACHED
    file.write_text(re.sub(r', *"first_s": *[0-9.]+', "", file.read_text()))
    assert "first_s" not in file.read_text() and trial_files.read_first_s(tmp_path) >= 46
    # A head of NaN has reached nothing: its null ended each further command in a TypeError.
    for _ in range(2):
        odd = make((one, 1.0, math.nan), (two, 1.0, 0.9))
        assert [at.by for at in odd.reached] == [two]
    file.write_text(file.read_text().replace("0.9", "null"))
    assert trial_files.read_reached(tmp_path)[0] == ()


def test_a_reading_tells_how_fast_this_process_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen images were timed for 60 ms; on a busy host that gave a half or a third."""
    now, read = [0.0], [0]

    def prepared(job: object, pinned: object) -> object:
        now[0] += 4.0
        return None

    fitted = Trial("first-answer-1", {}, 0.9, 1, False, (), "somewhere")
    clock = SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0])
    monkeypatch.setattr(first_answer, "time", clock)
    monkeypatch.setattr(first_answer, "prepare", prepared)
    monkeypatch.setattr(first_answer, "embedded_here", lambda data: read[0])
    monkeypatch.setattr(first_answer, "data_key", lambda job: job)
    monkeypatch.setattr(first_answer, "_fitted", lambda *given: fitted)
    none, found = cast(Any, None), first_answer.FirstAnswer(works_per_s=12.0)
    # Features that were kept say nothing, and a slow reading is more than its networks.
    for images, works_per_s in [(0, 12.0), (100, 12.0), (800, 50.0)]:
        read[0] = images
        jobs = {"first-answer-1": (cast(Any, f"reads {images}"), dict[str, Any]())}
        heads = first_answer._Heads(Reading("efficientnet_lite0_stages", 112, 0.25), jobs)
        first_answer._read_and_fit(heads, none, tmp_path, found, lambda trial: None, None)
        assert found.works_per_s == works_per_s
