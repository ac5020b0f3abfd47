"""In which order trials come, which of them are none, and what the order does not say."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from raypipe.models.zoo import ModelConfig
from raypipe.search import leaderboard, page
from raypipe.search.leaderboard import Trial, ahead, compared, ranked
from raypipe.search.result import SearchResult
from raypipe.train.stopping import FITTED
from raypipe.work import tables

NAN = float("nan")


def trial(name: str, metric: float, *losses: float, failed: bool = False) -> Trial:
    """One with these losses, each at an epoch with that metric."""
    history = tuple({"val_accuracy": metric, "val_loss": loss} for loss in losses)
    return Trial(name, {}, metric, len(losses), False, history, None if failed else "somewhere")


def curve(name: str, *values: float, stopped: str | None = None) -> Trial:
    """One with these accuracies, an epoch each."""
    history = tuple({"val_accuracy": value, "val_loss": 1 - value} for value in values)
    return Trial(name, {}, max(values), len(values), False, history, "somewhere", stopped)


def test_equal_accuracies_are_ranked_by_the_loss_of_the_kept_epoch_and_then_by_name() -> None:
    trials = [
        trial("a", 0.9, 0.5, 0.1),  # the first of equal epochs is the one whose weights were kept
        trial("b", 0.9, 0.3),
        trial("c", 0.9, 0.3),
        trial("d", 0.95, 0.9),
        trial("e", 0.9, NAN),  # it has an accuracy, and weights of NaN
        trial("f", NAN, failed=True),
        trial("g", 0.8, 0.01),
    ]
    order = [t.name for t in ranked(reversed(trials), "val_accuracy", "max")]
    assert order == ["d", "b", "c", "a", "g", "e", "f"]
    assert [t.name for t in ranked(trials, "val_accuracy", "min")] == [
        "g",
        "b",
        "c",
        "a",
        "d",
        "e",
        "f",
    ]


def test_with_the_last_epoch_as_the_result_its_loss_ranks_equal_trials() -> None:
    """It was the loss of the first epoch that was as good, whose weights nobody has."""
    first, second = trial("a", 0.9, 0.1, 0.5), trial("b", 0.9, 0.2, 0.4)
    assert [t.name for t in ranked([first, second], "val_accuracy", "max")] == ["a", "b"]
    by_last = ranked([first, second], "val_accuracy", "max", "last")
    assert [t.name for t in by_last] == ["b", "a"]
    # A trial may draw it.
    second = replace(second, changes={"train.result": "best"})
    by_own = ranked([first, second], "val_accuracy", "max", "last")
    assert [t.name for t in by_own] == ["b", "a"], "0.2 is less than 0.5"


def test_trials_with_unequal_epochs_are_compared_after_as_many() -> None:
    long, short, poor = curve("long", 0.5, 0.6, 0.8), curve("short", 0.7), curve("poor", 0.1, 0.2)
    trials = ranked([poor, short, long], "val_accuracy", "max")
    assert [t.name for t in trials] == ["long", "short", "poor"]
    assert compared(trials, "val_accuracy", "max") == {
        "long": (1, 0.5),
        "short": (1, 0.7),
        "poor": (1, 0.1),
    }
    (leads,) = ahead(trials, "val_accuracy", "max")
    assert (leads.trial, leads.epochs, leads.metric, leads.first) == ("short", 1, 0.7, 0.5)
    ended = curve("short", 0.7, stopped="its own rule")  # it would have had no more epochs
    assert not ahead([long, ended, poor], "val_accuracy", "max")
    assert compared([long, ended, poor], "val_accuracy", "max")["short"] == (2, 0.7)


def test_where_all_had_as_many_epochs_nothing_is_added() -> None:
    trials = [curve("a", 0.5, 0.6), curve("b", 0.4, 0.5), replace(curve("c", 0.1), checkpoint=None)]
    assert (
        compared(trials, "val_accuracy", "max") == {} and ahead(trials, "val_accuracy", "max") == []
    )


def test_what_a_budget_cut_or_a_failure_lost_was_not_saved() -> None:
    """Ten epochs each: the scheduler ended one after 2, a budget another, and one failed."""
    whole = replace(curve("a", *[0.5] * 10), device_s=100.0)
    early = replace(curve("b", 0.4, 0.4), stopped_early=True, device_s=10.0)
    cut = replace(curve("c", 0.4, 0.4), stopped_early=True, device_s=10.0, cut=True)
    failed = replace(trial("d", NAN, 0.5, failed=True), device_s=5.0)
    own = replace(curve("e", *[0.5] * 5, stopped="no improvement"), device_s=20.0)
    found = leaderboard.spared([whole, early, cut, failed, own], 10, 50)
    # 8 epochs at 5 s, and 5 epochs at 4 s.
    assert found == leaderboard.Spared(13 / 50, 8 * 5.0 + 5 * 4.0)
    assert leaderboard.spared([], 10, 0) == leaderboard.Spared()


def test_the_columns_of_cost_are_those_that_say_something() -> None:
    done = [replace(curve("a", 0.5), seconds=3.0, device_s=3.0)]
    rows = leaderboard.standings(done, "val_accuracy", "max")
    assert "s" in tables.leaderboard("val_accuracy", rows).columns
    assert "device s" not in tables.leaderboard("val_accuracy", rows).columns
    priced = tables.leaderboard("val_accuracy", rows, usd_per_device_s=0.5)
    assert priced.rows[0][priced.columns.index("$")] == "1.5000"
    shared = leaderboard.standings([replace(done[0], device_s=1.5)], "val_accuracy", "max")
    table = tables.leaderboard("val_accuracy", shared)
    assert table.rows[0][table.columns.index("device s")] == 1.5
    # An older result knows neither.
    old = leaderboard.standings([curve("a", 0.5)], "val_accuracy", "max")
    assert not {"s", "device s", "$"} & set(tables.leaderboard("val_accuracy", old).columns)


def test_how_a_trial_ended_is_said_of_each_by_its_name() -> None:
    """One that its own rule ended "ran to the end", and "trial 1" of the page was no trial-001."""
    names = ("trial-007-a", "trial-001-b", "trial-002-c", f"{leaderboard.FIRST}-1", "trial-003-d")
    whole, own, early, head, lost = (curve(name, 0.9, 0.8) for name in names)
    trials = [
        whole,
        replace(own, stopped="no improvement of val_loss for 3 epochs"),
        replace(early, stopped_early=True),
        replace(head, stopped=FITTED),
        replace(lost, checkpoint=None, metric=NAN),
    ]
    standings = leaderboard.standings(trials, "val_accuracy", "max")
    assert [one.state for one in standings] == ["full", "stopped", "stopped", "fitted", "failed"]
    assert [row[1] for row in tables.leaderboard("val_accuracy", standings).rows] == list(names)
    result = SimpleNamespace(
        trials=trials, metric="val_accuracy", mode="max", epochs=8, full_epochs=8
    )
    rows = page.section(result).rows  # type: ignore[arg-type]
    assert [row.trial for row in rows] == list(names)
    assert [row.stopped_early for row in rows] == [False, True, True, False, False]
    assert [row.fitted for row in rows] == [False, False, False, True, False]


def test_what_was_not_made_is_one_line_of_the_page() -> None:
    notes = ["No refit: it diverged", "The ensemble was checked on 30 of 400 validation images"]
    assert page.not_made(notes[1:]) == page.not_made([]) == {}
    notes.append("No ensemble: there was no time to choose one")
    said = "Refit: it diverged. Ensemble: there was no time to choose one"
    assert page.not_made(notes) == {"not made": said}


def found(model: ModelConfig, models: dict[str, ModelConfig], **more: Any) -> SearchResult:
    """A search, with the registered model's or its first member's config."""
    job, best = cast(Any, SimpleNamespace(model=model)), cast(Any, None)
    return SearchResult("key", job, best, (), "val_accuracy", 1.0, models=models, **more)


def test_views_that_validation_does_not_have_are_said() -> None:
    """The page showed figures of one view beside a model that predicts over eight."""
    head, tuned = ModelConfig(), ModelConfig(mode="finetune", views=8)
    assert page.validated(found(head, {"a": head})) == {}
    models = {"a": head, "b": tuned}
    trial = "each trial with one view of an image"
    ending = "; fine-tuned trials predict over 8"
    assert page.validated(found(tuned, models)) == {"validated": trial + ending}
    own = f"{trial}, as the registered model predicts{ending}"
    assert page.validated(found(head, models)) == {"validated": own}
    whole = found(tuned, models, members=("b", "a"), shares=(0.5, 0.5))
    said = f"{trial}, the ensemble as it predicts{ending}"
    assert page.validated(whole) == {"validated": said}


def test_what_a_refit_changes_is_not_said_to_be_validated() -> None:
    """search.refit.model.views=8 said nothing, and at 224 px the trials' views were named."""
    small = ModelConfig(mode="finetune", side_px=96)
    large = ModelConfig(mode="finetune", side_px=224, views=8)
    models = {"a": small, "b": ModelConfig(side_px=96)}

    def said(now: ModelConfig, models: dict[str, ModelConfig] = models, **more: Any) -> str:
        result = found(now, models, refitted=True, **{"again": ("a",), **more})
        return page.validated(result).get("validated", "")

    assert said(large) == (
        "a with one view of an image at 96 px, before it was trained again; "
        "as registered, over 8 views at 224 px, it is not validated"
    )
    assert said(ModelConfig(mode="finetune", side_px=224)) == (
        "a at 96 px, before it was trained again; as registered, at 224 px, it is not validated"
    )
    # Of an ensemble, the fine-tuned member comes first.
    together = {"members": ("a", "b"), "shares": (0.5, 0.5), "again": ("a", "b")}
    assert said(large, **together) == said(large)
    # A refit of other trials' views takes them away.
    assert "over 1 view at 96 px" in said(small, {"a": large})
    assert "over 8 views at 224 px" in said(large, {"a": large})
    # Another network is another model, whatever its pixels.
    assert said(small, {"b": models["b"]}, again=("b",)) == (
        "b frozen, at 96 px, before it was trained again; "
        "as registered, fine-tuned, at 96 px, it is not validated"
    )
    other = ModelConfig(name="small_cnn", pretrained=False, mode="finetune", side_px=96)
    assert said(other) == (
        "a with efficientnet_lite0, at 96 px, before it was trained again; "
        "as registered, with small_cnn, at 96 px, it is not validated"
    )
    # Where it changes none of these, there is nothing to say; nor of a member that stays.
    assert said(small) == said(models["b"], again=("b",)) == ""
    stays = said(large, {"a": large, "b": models["b"]}, **together | {"again": ("b",)})
    assert stays == "each trial with one view of an image; fine-tuned trials predict over 8"


def test_a_metric_without_a_value_is_no_divergence() -> None:
    """It told of a learning rate that is too high."""
    sound = {"train_loss": 0.1, "val_loss": 0.1, "val_r2": math.nan}

    def lacks(line: dict[str, float]) -> bool:
        one = Trial("a", {}, math.nan, 1, False, (line,), None)
        return leaderboard.lacks_metric([one], "val_r2")

    assert lacks(sound) and not lacks(sound | {"val_loss": math.nan})
    assert not lacks(sound | {"val_r2": 0.5}), "its weights are damaged"
    assert not leaderboard.lacks_metric([], "val_r2")
