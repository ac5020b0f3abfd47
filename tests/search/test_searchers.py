"""What searchers give Tune: the same trials after every interruption, and with Optuna what earlier
trials taught.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from ray.tune.search import Searcher

from raypipe.config import replace, save, validate
from raypipe.errors import ConfigError
from raypipe.job import Job
from raypipe.search import trial_files
from raypipe.search.leaderboard import Trial
from raypipe.search.searchers.planned import Planned
from raypipe.search.searchers.tune_searchers import plan, searcher
from raypipe.search.space import parse
from raypipe.search.trials import by_clock
from raypipe.search.trials.by_clock import ByClock
from raypipe.search.trials.epoch_result import UNUSABLE
from raypipe.search.warm_start import Earlier, earlier

NAN = float("nan")
TEXTS = {
    "train.lr": "loguniform(1e-4, 1e-1)",
    "model.mode": "choice(frozen, finetune)",
    "model.frozen_blocks": "randint(1, 6) if model.mode == 'finetune'",
}
JOB = validate(Job, {"table": {"uri": "cells"}, "search": {"samples": 12, "space": TEXTS}})


def make(
    folder: Path, job: Job = JOB, concurrent: int = 2, hints: list[Earlier] | None = None
) -> Any:
    parsed = parse.parse(job.search.space or {}, job.training)
    return searcher(
        job.training,
        job.search,
        parsed,
        plan(job.training, job.search, parsed, hints or []),
        hints or [],
        folder,
        concurrent,
    )


def of(name: str, folder: Path, **changes: Any) -> Job:
    return replace(JOB, {"search.searcher": name, "run.dir": str(folder), **changes})


def good(changes: dict[str, Any]) -> float:
    """Best with fine-tuning of few blocks at 0.01."""
    import math

    return (
        (changes["model.mode"] == "finetune")
        - abs(math.log10(changes["train.lr"]) + 2)
        - changes.get("model.frozen_blocks", 0) / 9
    )


def run(made: Any, start: int, stop: int) -> list[dict[str, Any]]:
    """Trials one after another, the way Tune tells of them."""
    found = []
    for i in range(start, stop):
        found.append(made.suggest(f"id{i}"))
        value = good(found[-1])
        made.on_trial_result(f"id{i}", {"val_accuracy": value, "epoch": JOB.search.grace})
        made.on_trial_complete(
            f"id{i}", {"val_accuracy": value - 1}
        )  # its last epoch is not its best
    return found


def test_no_more_trials_run_than_may_and_no_more_than_planned_are_given(tmp_path: Path) -> None:
    made = make(tmp_path)
    first = [made.suggest(i) for i in "ab"]
    assert made.suggest("c") is None
    made.on_trial_complete("a", error=True)
    assert made.suggest("c") not in (None, *first) and made.suggest("d") is None
    made.on_trial_complete("b")
    made.on_trial_complete("c")
    run(made, 3, 12)
    assert made.suggest("last") == Searcher.FINISHED


@pytest.mark.parametrize("name", ["random", "tpe", "gp", "bohb"])
def test_a_killed_search_gives_what_an_undisturbed_one_does(name: str, tmp_path: Path) -> None:
    if name != "random":
        pytest.importorskip("optuna")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole = run(make(tmp_path / "a", of(name, tmp_path)), 0, 9)
    first = make(tmp_path / "b", of(name, tmp_path))
    pickled = cloudpickle.dumps(first)  # Tune does, when the search starts
    assert run(first, 0, 6) == whole[:6]
    first.save_to_dir(str(tmp_path / "b"))
    first.suggest("lost")
    journal = tmp_path / "b" / "optuna.journal"
    if journal.exists():
        journal.write_bytes(journal.read_bytes() + b'{"op_code": 4, "wor')  # killed while it wrote
    again = cloudpickle.loads(pickled)
    (tmp_path / "b" / "searcher-state-default.pkl").rename(tmp_path / "b" / "searcher-state-x.pkl")
    again.searcher.restore_from_dir(str(tmp_path / "b"))
    assert run(again, 6, 9) == whole[6:]
    assert len({json.dumps(t, sort_keys=True) for t in whole}) == 9


@pytest.mark.parametrize("name", ["tpe", "gp", "bohb"])
def test_trials_that_tune_forgot_are_drawn_again_although_the_study_knows_later_ones(
    name: str, tmp_path: Path
) -> None:
    """Tune saves its state now and then. Here it saved after trial 6; 6 to 8 had ended, 9 ran."""
    pytest.importorskip("optuna")
    made = make(tmp_path, of(name, tmp_path))
    pickled = cloudpickle.dumps(made)
    run(made, 0, 6)
    made.save_to_dir(str(tmp_path))
    later = [*run(made, 6, 9), made.suggest("running")]
    again = cloudpickle.loads(pickled)
    again.restore_from_dir(str(tmp_path))
    # Tune gives them other names.
    assert [again.suggest("new6")] == later[:1]
    again.on_trial_complete("new6", {"val_accuracy": good(later[0]), "epoch": JOB.search.grace})
    assert [*run(again, 7, 9), again.suggest("running again")] == later[1:]


@pytest.mark.parametrize("name", ["tpe", "gp", "bohb"])
def test_every_searcher_begins_with_the_starts(name: str, tmp_path: Path) -> None:
    """Only the random search did: the others left search.start out without a word."""
    pytest.importorskip("optuna")
    start = {"train.lr": 0.02, "model.mode": "finetune"}
    changes = {"search.start": start, "search.starts": [{"train.lr": 0.003}]}
    made = make(tmp_path, of(name, tmp_path, **changes))
    first, second, third = run(made, 0, 3)
    assert start.items() <= first.items() and second["train.lr"] == 0.003
    assert third["train.lr"] not in (0.02, 0.003)
    if name != "bohb":  # its study is made for each ask
        told = made.searcher._study().trials[0]
        assert told.params["train.lr"] == 0.02 and told.value == good(first)


@pytest.mark.parametrize("name", ["tpe", "gp"])
def test_optuna_knows_values_and_failures(name: str, tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    made = make(tmp_path, of(name, tmp_path))
    changes = run(made, 0, 2)
    made.suggest("nan")
    made.on_trial_result("nan", {"val_accuracy": NAN})
    made.on_trial_complete("nan", {"val_accuracy": NAN})
    made.suggest("died")
    made.on_trial_result("died", {"val_accuracy": 0.9})
    made.on_trial_complete("died", error=True)
    made.on_trial_complete("died", {"val_accuracy": 0.9})  # Tune ran it again after a restore
    journal = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(tmp_path / "optuna.journal"))
    )
    study = optuna.load_study(study_name="search", storage=journal)
    assert [t.state.name for t in study.trials] == ["COMPLETE", "COMPLETE", "FAIL", "FAIL"]
    assert [t.value for t in study.trials[:2]] == [good(c) for c in changes]
    assert [("model.frozen_blocks" in t.params) for t in study.trials[:2]] == [
        "model.frozen_blocks" in c for c in changes
    ]


def test_tpe_comes_closer_than_random_draws(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    best = {}
    for name in ("random", "tpe", "bohb"):
        folder = tmp_path / name
        folder.mkdir()
        found = run(make(folder, of(name, tmp_path, **{"search.samples": 40})), 0, 40)
        best[name] = sum(sorted(map(good, found))[-10:])
    assert best["tpe"] > best["random"] and best["bohb"] > best["random"]


def test_bohb_learns_from_the_largest_budget_that_enough_trials_reached(tmp_path: Path) -> None:
    """Values after one epoch and after nine do not compare: good early is poor late here."""
    pytest.importorskip("optuna")
    made = make(
        tmp_path,
        of("bohb", tmp_path, **{"search.samples": 99, "search.grace": 1, "train.epochs": 9}),
        concurrent=99,
    )
    chooser = made.searcher
    assert chooser.budget() is None
    trials = {f"id{i}": made.suggest(f"id{i}") for i in range(20)}
    for trial, changes in trials.items():
        made.on_trial_result(trial, {"val_accuracy": -good(changes), "epoch": 1})
    made.on_trial_result("id0", {"val_accuracy": NAN, "epoch": 3})
    assert chooser.budget() == 1
    for trial in sorted(trials, key=lambda trial: good(trials[trial]))[-6:]:
        made.on_trial_result(trial, {"val_accuracy": good(trials[trial]), "epoch": 3})
        made.on_trial_result(trial, {"val_accuracy": 9.0, "epoch": 4})  # no rung
    assert chooser.budget() == 3
    study = chooser._study()
    assert sorted(t.value for t in study.trials) == sorted(sorted(map(good, trials.values()))[-6:])


@pytest.mark.parametrize("name", ["random", "tpe"])
def test_grids_are_crossed_whatever_the_searcher(name: str, tmp_path: Path) -> None:
    if name != "random":
        pytest.importorskip("optuna")
    texts = {
        "train.schedule": "grid(cosine, constant)",
        "model.dropout": "grid(0.0, 0.2)",
        "train.lr": "uniform(0.1, 0.2)",
    }
    job = replace(of(name, tmp_path, **{"search.samples": 2}), {"search.space": texts})
    made = make(tmp_path, job, concurrent=99)
    found = [made.suggest(str(i)) for i in range(8)]
    cells = [(c, d) for c in ("cosine", "constant") for d in (0.0, 0.2)] * 2
    assert sorted((f["train.schedule"], f["model.dropout"]) for f in found) == sorted(cells)
    assert len({f["train.lr"] for f in found}) == 8
    # There is none left, and the search is finished when those have ended.
    assert made.suggest("9") is None
    for i in range(8):
        made.on_trial_complete(str(i))
    assert made.suggest("9") == Searcher.FINISHED


def test_a_searcher_that_is_not_installed_is_one_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from raypipe.search.searchers import optuna_search

    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(
        ConfigError,
        match=(
            r"tpe, gp and bohb need Optuna.*pip install "
            r"'raypipe\[optuna\]'.*search\.searcher=random"
        ),
    ):
        optuna_search.require()


def finished(job: Job, key: str, *trials: tuple[dict[str, Any], float]) -> None:
    """What a search leaves."""
    folder = job.run.path / "search" / key
    save(job, folder / "config.yaml")
    made = [
        Trial(f"t{i}", changes, value, 1, False, (), "x")
        for i, (changes, value) in enumerate(trials)
    ]
    trial_files.write(folder / "result.json", made, None, 0)


def test_a_warm_start_reads_other_searches_on_the_same_table_and_metric(tmp_path: Path) -> None:
    job = of("random", tmp_path, **{"search.warm_start": True})
    parsed, here = parse.parse(TEXTS, job.training), tmp_path / "search" / "here"
    here.mkdir(parents=True)
    tuned = {"model.mode": "finetune", "model.frozen_blocks": 2}
    finished(
        job,
        "a",
        ({"train.lr": 0.02, "model.mode": "frozen"}, 0.8),
        ({"train.lr": 0.5, **tuned}, 0.9),
        ({}, NAN),
    )
    finished(replace(job, {"table.uri": "others"}), "b", ({"train.lr": 0.01}, 0.99))
    finished(replace(job, {"train.stopping.metric": "val_loss"}), "c", ({"train.lr": 0.01}, 0.99))
    finished(
        replace(job, {"train.lr": 0.003, "table.version": 3}), "d", ({"model.dropout": 0.5}, 0.7)
    )
    other = replace(job, {"table.columns.label": "other"})
    finished(other, "e", ({"train.lr": 0.01}, 0.99))
    (tmp_path / "search" / "torn").mkdir()
    (tmp_path / "search" / "torn" / "result.json").write_text("{")
    found = earlier(job.training, parsed, here)
    assert [t.metric for t in found] == [0.9, 0.8, 0.7]
    assert found[0].keyed == tuned  # 0.5 lies outside the present space
    assert found[1].keyed == {"train.lr": 0.02, "model.mode": "frozen"}
    assert found[2].keyed == {
        "train.lr": 0.003,
        "model.mode": "frozen",
    }  # as that search's job had it
    first = plan(job.training, job.search, parsed, found)[0]
    assert tuned.items() <= first.items() and 1e-4 <= first["train.lr"] <= 1e-1
    assert (
        plan(job.training, job.search, parsed, found)[1:]
        == plan(job.training, job.search, parsed, [])[1:]
    )
    finished(job, "late", ({"train.lr": 0.02}, 0.95))
    assert earlier(job.training, parsed, here) == found  # a killed search goes on from the same


def test_a_searcher_learns_from_the_epoch_that_a_trial_offers() -> None:
    """With train.result=last it learned from epochs whose weights no trial offers."""

    def learned(job: Job, **drawn: str) -> float | None:
        told: list[float | None] = []
        made = Planned(job, [{"train.lr": 0.1}])
        made._learn = lambda trial_id, value: told.append(value)  # type: ignore[method-assign]
        made.suggest("a")
        for value in (0.7, 0.9, 0.8, NAN):
            made.on_trial_result("a", {"val_accuracy": value, **drawn})
        made.on_trial_complete("a")
        return told[0]

    last = replace(JOB, {"train.result": "last"})
    assert learned(JOB) == 0.9 and learned(last) == 0.8
    assert learned(JOB, **{"config/train.result": "last"}) == 0.8
    assert learned(last, **{"config/train.result": "best"}) == 0.9


@pytest.mark.parametrize("name", ["tpe", "gp"])
def test_optuna_starts_from_earlier_trials(name: str, tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    hints = [
        Earlier(
            {"train.lr": 0.01, "model.mode": "finetune", "model.frozen_blocks": 1}, 0.9 - i / 100
        )
        for i in range(3)
    ]
    made = make(tmp_path, of(name, tmp_path), hints=hints)
    run(made, 0, 1)
    journal = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(tmp_path / "optuna.journal"))
    )
    study = optuna.load_study(study_name="search", storage=journal)
    assert (
        sorted(t.value for t in study.trials if t.value is not None)[-3:] != []
        and len(study.trials) == 4
    )
    assert {"train.lr": 0.01, "model.mode": 1, "model.frozen_blocks": 0} in [
        t.params for t in study.trials
    ]


def test_a_hint_that_the_job_refuses_is_left_out() -> None:
    job = replace(
        JOB,
        {
            "search.space": {
                "model.mode": "choice(frozen, finetune)",
                "model.frozen_blocks": "choice(0, 3)",
            }
        },
    )
    parsed = parse.parse(job.search.space or {}, job.training)
    hint = Earlier({"model.mode": "frozen", "model.frozen_blocks": 3}, 0.9)
    assert plan(job.training, job.search, parsed, [hint]) == plan(
        job.training, job.search, parsed, []
    )


def test_what_tune_pickles_is_the_plan_and_its_state_is_json(tmp_path: Path) -> None:
    job = JOB.training
    made = Planned(JOB, [{"train.lr": 0.1}])
    made.set_max_concurrency(1)
    made.suggest("a")
    made.save(str(tmp_path / "state"))
    assert json.loads((tmp_path / "state").read_text()) == {"next": 1, "live": ["a"], "best": {}}
    assert job.model.mode == "frozen" and asdict(Earlier({}, 1.0)) == {"keyed": {}, "metric": 1.0}


def test_a_spare_trial_begins_only_for_one_that_failed_or_diverged(tmp_path: Path) -> None:
    def made() -> Planned:
        planned = Planned(JOB, [{"train.lr": rate} for rate in (0.1, 0.2, 0.3, 0.4)], spare=2)
        planned.set_max_concurrency(9)
        return planned

    ends = made()
    assert ends.suggest("a") == {"train.lr": 0.1} and ends.suggest("b") == {"train.lr": 0.2}
    assert ends.suggest("c") is None
    ends.on_trial_complete("a", {"val_accuracy": 0.9})
    ends.on_trial_complete("b", {"val_accuracy": 0.8})
    assert ends.suggest("c") == Searcher.FINISHED

    loses = made()
    loses.suggest("a")
    loses.suggest("b")
    loses.on_trial_complete("a", {"val_accuracy": -1e300, UNUSABLE: True})
    assert loses.suggest("c") == {"train.lr": 0.3} and loses.suggest("d") is None
    # A killed search knows it, too.
    loses.save(str(tmp_path / "state"))
    again = made()
    again.restore(str(tmp_path / "state"))
    assert again.suggest("d") is None
    again.on_trial_complete("c", error=True)
    assert again.suggest("d") == {"train.lr": 0.4}
    # There are no more, whatever happens.
    again.on_trial_complete("d", error=True)
    assert again.suggest("e") is None
    again.on_trial_complete("b", {"val_accuracy": 0.8})
    assert again.suggest("e") == Searcher.FINISHED


def test_who_follows_a_trial_by_the_clock_has_the_time_that_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(by_clock, "_node", lambda: "driver")
    clock = ByClock.of(together=2, left_s=50)
    asked = replace(JOB.training, {"train.anneal_s": 120.0})
    assert clock.job_of("trial-002-abcdef", asked) is asked

    def left_s(clock: ByClock) -> float | None:
        return clock.job_of("trial-003-abcdef", asked).train.anneal_s

    assert left_s(clock) == pytest.approx(0.8 * 50 - 3, abs=1)
    # Nobody trains longer than those who began together.
    assert left_s(ByClock.of(2, 900)) == 120.0
    # Somebody sets the time of day: a trial would have had one second, or all of its time.
    real = time.time
    for jump_s in (3600, -3600):
        monkeypatch.setattr(time, "time", lambda jump_s=jump_s: real() + jump_s)
        assert left_s(clock) == pytest.approx(0.8 * 50 - 3, abs=1)
    # The monotonic clock of another node counts from its own start.
    monkeypatch.setattr(by_clock, "_node", lambda: "other")
    monkeypatch.setattr(time, "time", real)
    up_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: up_s - 1e6)
    assert left_s(clock) == pytest.approx(0.8 * 50 - 3, abs=1)


@pytest.mark.parametrize("name", ["tpe", "gp", "bohb"])
def test_no_suggestion_repeats_a_trial(name: str, tmp_path: Path) -> None:
    """All trials have one seed: of sixteen, four trained the weights of others again."""
    pytest.importorskip("optuna")
    space = {
        "model.mode": "grid(frozen, finetune)",
        "train.lr": "loguniform(1e-4, 1e-2) if model.mode == 'finetune'",
        "train.schedule": "grid(cosine, constant)",
        "model.dropout": "choice(0.0, 0.2) if model.mode == 'frozen'",
    }
    starts = tuple({"model.dropout": 0.2} for _ in range(2))
    changes = {"search.space": space, "search.samples": 4, "search.starts": starts}
    job = of(name, tmp_path, **changes)
    made = make(tmp_path, job)
    found = []
    for i in range(12):
        found.append(made.suggest(f"id{i}"))
        made.on_trial_complete(f"id{i}", {"val_accuracy": 0.5, "epoch": job.search.grace})
    assert made.suggest("id12") == Searcher.FINISHED
    assert len({str(sorted(one.items())) for one in found}) == 12
    assert Counter((one["model.mode"], one["train.schedule"]) for one in found) == {
        ("frozen", "cosine"): 2,
        ("frozen", "constant"): 2,
        ("finetune", "cosine"): 4,
        ("finetune", "constant"): 4,
    }
