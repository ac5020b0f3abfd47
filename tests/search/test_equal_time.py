"""What the comparison in equal wall time says of its lines, and which methods it has."""

from __future__ import annotations

import inspect
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import equal_time, our_tune, plain_optuna, plain_tune
from benchmarks.ledger import LEDGERS, Ledger, hash_of
from benchmarks.ranks import interval, ranks, seconds_to, summary
from benchmarks.scored import NoModel
from benchmarks.task_tables import source_of
from raypipe.config import validate
from raypipe.job import Job
from raypipe.search import ledger as clocks
from raypipe.search.presets import MANY, PRESETS
from raypipe.search.space import defaults
from raypipe.search.space import parse as spaces
from raypipe.search.trials.epoch_result import result_of

CELLS = {"train": 1575, "val": 393, "test": 656}  # of the task elpv-binary


def line(method: str, test: float | None, task: str = "a", **more: Any) -> dict[str, Any]:
    told = {"task": task, "seed": 1, "budget_s": 60.0, "method": method, "val": 0.8, "test": test}
    return {**told, "curve": [[9.0, 0.8]], **more}


def test_ranks_are_by_test_and_times_by_validation() -> None:
    slow = [[5.0, 0.70], [20.0, 0.895], [30.0, 0.90]]
    lines = [line("ours", 0.80, val=0.90, curve=slow), line("random", 0.85)]
    told = summary(lines, ["ours", "random"])["60 s"]
    assert (told["ours"]["mean_rank"], told["random"]["mean_rank"]) == (2, 1)
    assert told["ours"]["median_s_to_99"] == 20.0 and told["random"]["median_s_to_99"] == 60.0
    assert (told["ours"]["reached_99"], told["random"]["reached_99"]) == (1, 0)
    assert told["random"]["ours_better_by"] == -0.05
    assert ranks([line("x", 0.5), line("y", 0.5), line("z", 0.7)]) == [2.5, 2.5, 1]


def test_only_full_races_count() -> None:
    """Ours has measured the race that it wins alone: that flatters nobody."""
    lines = [line("ours", 0.1, "a"), line("random", 0.9, "a"), line("ours", 0.9, "b")]
    lines += [line("ours", 0.9, "c"), line("random", None, "c")]
    told = summary(lines, ["ours", "random"])["60 s"]
    assert told["races"] == 1 and told["left_out"] == {"b 1": "no random", "c 1": "no random"}
    assert told["ours"]["mean_rank"] == 2 and told["ours"]["mean_test"] == 0.1
    # A race is full with the methods that are asked for.
    assert summary(lines, ["ours"])["60 s"]["races"] == 3
    assert summary(lines, ["ours", "optuna"])["60 s"]["races"] == 0


def test_a_model_after_the_budget_is_last() -> None:
    late, worse = line("ours", 0.9, model_s=60.1), line("random", 0.1)
    told = summary([late, worse], ["ours", "random"])["60 s"]
    assert (told["ours"]["mean_rank"], told["ours"]["late"]) == (2, 1)
    assert ranks([line("ours", 0.9, model_s=59.9), worse]) == [1, 2]


def test_no_model_in_time_is_last_and_does_not_hide_the_race() -> None:
    none = {"task": "a", "seed": 1, "budget_s": 60.0, "method": "ours", "test": None}
    none |= {"no_model": "No epoch ended in 60 s"}
    late = line("optuna", 0.2, model_s=61.0)
    told = summary([none, line("random", 0.1), late], ["ours", "random", "optuna"])["60 s"]
    assert told["races"] == 1 and told["left_out"] == {}
    assert [told[name]["mean_rank"] for name in ("ours", "random", "optuna")] == [3, 1, 2]
    assert told["ours"]["no_model"] == 1 and told["ours"]["mean_test"] is None
    assert "ours_better_by" not in told["random"], "there is nothing to subtract"
    assert seconds_to({"ours": none, "random": line("random", 0.1)}, "ours") is None


def test_whole_sources_of_images_are_drawn() -> None:
    """Four tasks of the same cells are one thing that was seen, and not four."""
    told = interval([1, 1, 1, 1, 2, 2], ["cells"] * 4 + ["emoji"] * 2, 2)
    assert told == [1.0, 2.0]
    assert interval([1, 1, 1, 1], ["cells"] * 4, 2) is None
    # Of many sources it narrows: 1.96 x .05 from the mean.
    low, high = interval([1, 2] * 50, [str(number) for number in range(100)], 2) or (0, 0)
    assert 1.35 < low < 1.45 and 1.55 < high < 1.65
    lines = [line(m, x, task) for task in ("elpv-mono", "elpv-poly") for m, x in [("ours", 0.9)]]
    told_of = summary([*lines, line("ours", 0.9, "digits")], ["ours"], source_of)["60 s"]
    assert told_of["sources"] == 2 and set(told_of["ours"]["by_source"]) == {
        "solar_cells",
        "digits",
    }


def test_images_that_no_test_split_held_are_told_apart() -> None:
    cells = [["a", True], ["b", False], ["c", True]]
    lines = [line("ours", 0.7, task, cells=cells) for task in ("digits", "elpv-mono")]
    told = summary(lines, ["ours"], source_of, {"solar_cells": {"a"}})["60 s"]
    assert told["ours"]["fresh"] == {"images": 2, "right": 0.5}, "of digits nobody said anything"
    assert "fresh" not in summary(lines, ["ours"], source_of)["60 s"]["ours"]


def test_every_method_is_first_in_as_many_races() -> None:
    cells = equal_time.cells_of(["a", "b", "c"], [1, 2], ["x", "y", "z"], 60.0)
    races = [list(race) for _, race in itertools.groupby(cells, lambda c: (c.seed, c.task))]
    assert [race[0].method for race in races] == ["x", "y", "z"] * 2
    assert all({cell.method for cell in race} == {"x", "y", "z"} for race in races)


def test_ours_is_the_preset_that_users_are_told(tmp_path: Path) -> None:
    takes_s = PRESETS["budget_s"]
    for budget_s, preset in ((60, "fast"), (180, "fast"), (600, "good"), (1200, "good")):
        assert our_tune.default_of(budget_s) == {"preset": preset, "budget_s": budget_s}
        assert takes_s[preset] >= budget_s
    assert our_tune.default_of(9000)["preset"] == "best"
    # Docs say the same.
    assert "search.preset=good search.budget_s=600" in Path("docs/search.md").read_text()
    for method in ("ours", "first", "whole"):
        sections = our_tune.settings({"method": method, "budget_s": 600.0})
        job = validate(Job, {"table": {"uri": "x"}, **sections})
        assert job.search.budget_s == 600 and job.search.preset == "good"
        assert job.train.model_fields_set == set(), "a user sets nothing else"


def test_each_method_has_somebody_who_measures_it() -> None:
    assert set(equal_time.METHODS) - set(equal_time.OURS) == set(plain_tune.PEERS)


def test_a_line_with_other_settings_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")

    def measured(method: str, test: float | None, config: dict[str, Any]) -> dict[str, Any]:
        return line(method, test, "digits", config=hash_of(config))

    made = [measured(name, 0.5, equal_time.config_of(name, 60.0)) for name in ("first", "random")]
    made.append(measured("asha", 0.5, {"test": True}))
    made.append(measured("optuna", None, equal_time.config_of("optuna", 60.0, test=False)))
    ledger.file.write_text("".join(json.dumps(one) + "\n" for one in made))
    told = equal_time.report(ledger, ["first", "random"], [1])
    assert (told["cells"], told["of_other_settings"]) == (2, 2)
    others = equal_time.report(ledger, ["first", "random"])
    assert (others["cells"], others["of_other_seeds"]) == (0, 2)
    # A preset that sets something else makes another comparison of the methods that use it.
    monkeypatch.setitem(PRESETS, "ensemble", {"fast": 6, "good": 5, "best": 5})
    equal_time._hash.cache_clear()
    assert equal_time.report(ledger, ["first", "random"], [1])["of_other_settings"] == 3
    equal_time._hash.cache_clear()


def searched(budget_s: float) -> Any:
    """The search and the job of a peer on solar cells, on two CPUs."""
    asked = {"method": "asha", "budget_s": budget_s}
    job = validate(Job, {"table": {"uri": "x"}, **plain_tune.settings(asked)})
    training = defaults.within_budget(job.training, job.search, CELLS, False)
    cfg = defaults.with_default_space(training, job.search, CELLS, False)
    return plain_tune.with_stages(cfg, training.model.name), training


def test_peers_have_the_trials_and_epochs_of_our_default() -> None:
    for budget_s, epochs in ((180.0, 20), (600.0, 4)):
        cfg, training = searched(budget_s)
        ours = validate(
            Job,
            {"table": {"uri": "x"}, **our_tune.settings({"method": "whole", "budget_s": budget_s})},
        )
        assert (
            defaults.within_budget(ours.training, ours.search, CELLS, False).train.epochs == epochs
        )
        assert training.train.epochs == epochs and cfg.samples == MANY == ours.search.samples


@pytest.mark.parametrize("budget_s", [180.0, 600.0])
def test_peers_draw_the_stages_for_frozen_features_alone(budget_s: float) -> None:
    cfg, training = searched(budget_s)
    space = spaces.parse(cfg.space, training)
    drawn = [space.trial(1, number) for number in range(60)]
    names = {one["model.name"] for one in drawn if one.get("model.mode", "frozen") == "frozen"}
    assert names == {"efficientnet_lite0", "efficientnet_lite0_stages"}
    others = {one["model.name"] for one in drawn if one.get("model.mode") == "finetune"}
    assert others == ({"efficientnet_lite0", "small_cnn"} if budget_s == 600 else set())
    # Arrays that all methods read: those of all stages are among them.
    assert any(one["model.name"].endswith("_stages") for one in space.variants())


def test_optuna_begins_with_the_starts_and_hears_of_refusals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cfg, training = searched(600.0)
    space = spaces.parse(cfg.space, training)
    choose, _ = plain_optuna.strategy(training, cfg, space, 2)
    starts = [cfg.start, *cfg.starts]
    for number, start in enumerate(starts):
        changes = choose.suggest(f"t{number}")["changes"]
        assert {name: changes[name] for name in start if name in changes} == {
            name: value for name, value in start.items() if name in changes
        }
        assert changes["model.mode"] == start["model.mode"]
        choose.on_trial_complete(f"t{number}", {"val_accuracy": 0.8, "training_iteration": 1})
    # What the job refuses is told as the worst, and never trained as something else.
    monkeypatch.setattr(type(space), "refusal", lambda self, changes: ValueError("refused"))
    config = choose.suggest("refused")
    told: list[Any] = []
    monkeypatch.setattr(plain_optuna.tune, "report", told.append)
    plain_optuna.run_drawn(config, job=training.model_dump(mode="json"), data={}, trials="x")
    assert told == [result_of({}, 1, True, "val_accuracy", "max")]
    choose.on_trial_complete("refused", {**told[0], "training_iteration": 1})
    values = [trial.value for trial in choose.searcher._ot_study.trials]
    assert values[-1] < -1e299 and values[:-1] == [0.8] * len(starts)


def test_equally_good_epochs_are_told_apart_by_their_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = plain_tune.Best("val_accuracy", "max", 0.0, 1e12, tmp_path / "trials")
    kept: list[Any] = []
    monkeypatch.setattr(best, "_keep", lambda trial, epoch: kept.append((trial, epoch)))
    seen = [("a", 0.5, 0.9), ("b", 0.5, 0.8), ("c", 0.5, 0.85), ("d", 0.4, 0.1), ("e", 0.6, 2.0)]
    for name, accuracy, loss in seen:
        trial = SimpleNamespace(trial_id=name, path=f"x/{name}", config={"train.lr": 1.0})
        result = {"val_accuracy": accuracy, "val_loss": loss, "epoch": 3}
        best.on_trial_result(1, [], trial, result)
    refused = SimpleNamespace(trial_id="f", path="x/f", config={"changes": {}, "refused": True})
    best.on_trial_result(1, [], refused, result_of({}, 1, True, "val_accuracy", "max"))
    assert kept == [("a", 3), ("b", 3), ("e", 3)]
    told = best.told()
    assert [value for _, value in told["curve"]] == [0.5, 0.6]
    assert (told["trials"], told["refused"], told["epochs"]) == (5, 1, 5)
    # After the budget nothing counts, however good it is.
    over = plain_tune.Best("val_accuracy", "max", -1e12, 1.0, tmp_path / "trials")
    monkeypatch.setattr(over, "_keep", lambda trial, epoch: kept.append("late"))
    over.on_trial_result(1, [], trial, {"val_accuracy": 1.0, "val_loss": 0.0, "epoch": 1})
    assert over.kept is None and "late" not in kept


def test_the_best_epochs_checkpoint_outlives_what_its_trial_does_next(tmp_path: Path) -> None:
    trials, changes = tmp_path / "trials", {"train.lr": 1.0}
    best = plain_tune.Best("val_accuracy", "max", 0.0, 1e12, trials)
    trial = SimpleNamespace(trial_id="a", path="x/trial-000-abc", config=changes)
    folder = plain_tune.trial_checkpoints.folder_of(trials, "trial-000-abc", changes, None)
    for epoch, accuracy in ((1, 0.5), (2, 0.6), (3, 0.4)):
        own = folder / plain_tune.checkpoint.name(epoch)
        own.mkdir(parents=True)
        (own / "weights").write_text(f"epoch {epoch}")
        best.on_trial_result(1, [], trial, {"val_accuracy": accuracy, "epoch": epoch})
    plain_tune.shutil.rmtree(trials)
    assert best.kept is not None and (best.kept / "weights").read_text() == "epoch 2"
    assert [path.name for path in tmp_path.iterdir()] == [best.kept.name]


def test_ours_keeps_no_time_for_what_nobody_registers() -> None:
    whole, ours = (
        clock(180.0, clock=lambda: 0.0) for clock in (clocks.Ledger, our_tune.Unregistered)
    )
    assert whole.ending(304, None).seconds - ours.ending(304, None).seconds > 20
    assert ours.ending(304, None).seconds > 8, "package and page"
    # It is asked as a ledger is: a race of ten minutes ended with a TypeError.
    asked = (inspect.signature(of.ending) for of in (clocks.Ledger, our_tune.Unregistered))
    assert len({str(of) for of in asked}) == 1


def test_the_curve_ends_with_the_budget() -> None:
    curve = our_tune.Curve("max", began=0.0, budget_s=1e12)
    for value in (0.5, 0.4, 0.7, 0.7):
        curve.note(value)
    assert [value for _, value in curve.told()["curve"]] == [0.5, 0.7] and curve.told()[
        "val"
    ] == 0.7
    over = our_tune.Curve("max", began=-1e12, budget_s=1.0)
    over.note(0.9)
    with pytest.raises(NoModel, match="No model was there within 1 s"):
        over.told()


def test_a_try_without_tests_cannot_go_into_the_committed_ledger(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["equal_time", "--no-test", "--cells", "0"])
    with pytest.raises(SystemExit):
        equal_time.main()
    assert "Name another --ledger" in capsys.readouterr().err
    assert LEDGERS.parent.name == "results"
