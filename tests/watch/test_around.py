"""A challenger is looked for near the champion: its own settings first, its backbone kept, judged
on rows that no trial saw.
"""

from __future__ import annotations

from typing import Any

import pytest

from raypipe.config import replace, validate
from raypipe.errors import ConfigError
from raypipe.job import Job
from raypipe.search.searchers.tune_searchers import plan
from raypipe.search.settings import SearchConfig
from raypipe.search.space import parse as spaces
from raypipe.train.job import TrainJob
from raypipe.watch import around

CHAMPION = validate(
    TrainJob,
    {
        "table": {"uri": "/t", "version": 3},
        "model": {"name": "small_cnn", "mode": "finetune", "pretrained": False, "dropout": 0.3},
        "train": {
            "lr": 0.002,
            "weight_decay": 0.0,
            "epochs": 7,
            "workers": 4,
            "start_from": "/gone",
        },
    },
)


def job(**sections: Any) -> Job:
    return validate(Job, {"table": {"uri": "/t"}, "run": {"seed": 5}} | sections)


def challenger(of: Job, *rest: Any) -> TrainJob:
    return around.challenger(of.training, of.watch, of.search.refit, *rest)


def searched(of: Job, first: TrainJob) -> tuple[TrainJob, SearchConfig]:
    return around.searched(of.search, of.watch, first)


def changed(**changes: Any) -> TrainJob:
    return replace(CHAMPION, {name.replace("__", "."): value for name, value in changes.items()})


def test_the_first_trial_has_the_champions_settings_and_the_others_lie_near_them() -> None:
    first = challenger(job(), CHAMPION, 9, ["old", "new"])
    wanted, search = searched(job(), first)
    space = spaces.parse(search.space or {}, wanted)
    trials = plan(wanted, search, space, [])
    assert len(trials) == search.samples == 8
    assert trials[0]["train.lr"] == 0.002 and trials[0]["model.dropout"] == 0.3
    assert all(
        0.001 <= t["train.lr"] <= 0.004 and t["model.dropout"] in (0.0, 0.2, 0.3, 0.5)
        for t in trials
    )
    assert len({t["train.lr"] for t in trials}) == 8
    assert trials == plan(wanted, search, space, []), "drawn again after a kill, they are the same"
    assert wanted.table.version == 9 and wanted.run.seed == 5
    assert wanted.train.epochs == 7 and wanted.model.name == "small_cnn"
    assert wanted.train.workers == 1 and wanted.train.start_from is None
    # The clock that a champion had is not a challenger's.
    assert challenger(job(), changed(train__anneal_s=98.7), 9, ["old"]).train.anneal_s is None


def test_a_challenger_has_no_more_workers_than_images_of_a_batch() -> None:
    """Norms over all workers counted an image twice, without a word."""
    champion = changed(train__sync_bn=True, train__batch_size=4)
    challenger(job(watch={"retrain_workers": 4}), champion, 9, ["old"])
    with pytest.raises(ConfigError, match=r"retrain_workers=8.*batch_size=4.*workers=4, or fewer"):
        challenger(job(watch={"retrain_workers": 8}), champion, 9, ["old"])
    # A champion of before that has too few goes on with that.
    worse = replace(champion, {"train.workers": 6})
    assert challenger(job(watch={"retrain_workers": 8}), worse, 9, ["old"]).train.workers == 8


def test_a_champion_that_was_trained_on_validation_rows_is_judged_on_them_no_more() -> None:
    """A refit changes more than the data: what it changed is the job's again, for a trial must be
    judged and afforded.
    """
    refitted = changed(
        feed__train="train+val",
        train__result="last",
        train__epochs=40,
        train__stopping__patience=None,
        train__stopping__plateau=None,
    )
    mine = job(
        train={"epochs": 4, "stopping": {"patience": 2, "plateau": 3}},
        search={"refit": {"train.epochs": 40, "table.version": None}},
        watch={"retrain_workers": 2},
    )
    first = challenger(mine, refitted, 9, ["old"])
    assert (first.feed.train, first.feed.val, first.train.result) == ("train", "val", "best")
    assert first.train.epochs == 4
    assert (first.train.stopping.patience, first.train.stopping.plateau) == (2, 3)
    assert first.table.version == 9, "the refit names the job's, which is none"
    wanted, search = searched(mine, first)
    assert wanted.train.workers == 1 and search.refit == {
        "train.workers": 2,
        "train.epochs": 40,
        "table.version": None,
    }


def test_the_resolution_stays_that_of_the_champion_where_the_job_names_none() -> None:
    """A refit within a budget may have kept 96 px; the own 224 px would take five times as long."""
    refitted = changed(feed__train="train+val", model__side_px=96)
    refit = {"refit": {"model.side_px": 224}}
    assert challenger(job(search=refit), refitted, 9, ["old"]).model.pixels == 96
    named = job(search=refit, model={"side_px": 64})
    assert challenger(named, refitted, 9, ["old"]).model.pixels == 64


def test_one_trial_is_trained_again_if_a_refit_is_asked_for() -> None:
    alone = job(watch={"retrain_samples": 1})
    assert not around.is_search(alone.watch, alone.search)
    refit = {"train.epochs": 40}
    again = job(watch={"retrain_samples": 1}, search={"preset": "good", "refit": refit})
    assert around.is_search(again.watch, again.search)
    first = challenger(again, CHAMPION, 9, ["old"])
    wanted, search = searched(again, first)
    (only,) = plan(wanted, search, spaces.parse(search.space or {}, wanted), [])
    assert (only["train.lr"], only["model.dropout"]) == (0.002, 0.3)
    assert search.refit_changes is not None and search.refit_changes["train.epochs"] == 40


def test_a_refit_of_heads_searches_around_a_head_alone() -> None:
    """A challenger of fine-tuned settings would gain nothing by it."""
    fast = job(watch={"retrain_samples": 1}, search={"preset": "fast"})
    assert fast.search.refit == "heads"
    assert not around.is_search(fast.watch, fast.search)
    assert around.is_search(fast.watch, fast.search, is_head=True)
    none = job(watch={"retrain_samples": 1}, search={"preset": "fast", "refit": None})
    assert not around.is_search(none.watch, none.search, is_head=True)
    first = challenger(fast, CHAMPION, 9, ["old"])
    _, search = searched(fast, first)
    assert search.refit == "heads"
    assert search.budget_s is None, "a budget would cut the trial, and not the refit"


@pytest.mark.parametrize(
    ("champions", "asked", "sources", "is_"),
    [
        ("natural", "auto", ["old", "new"], "sources"),
        ("natural", "auto", ["old"], "natural"),
        ("balanced", "auto", ["old", "new"], "balanced"),
        ("sources", "auto", ["old", "new"], "sources"),
        ("balanced", "sources", ["old", "new"], "sources"),
        ("natural", "natural", ["old", "new"], "natural"),
    ],
)
def test_old_and_new_sources_count_equally_unless_something_else_was_said(
    champions: str, asked: str, sources: list[str], is_: str
) -> None:
    champion = changed(feed__sampling=champions)
    assert (
        challenger(job(watch={"retrain_sampling": asked}), champion, 9, sources).feed.sampling
        == is_
    )


@pytest.mark.parametrize("asked", ["natural", "sources", "weighted"])
def test_a_column_of_weights_goes_with_its_sampling(asked: str) -> None:
    """The champion's weights had stayed: "weights are for sampling=weighted", said the retrain."""
    weighted = {"sampling": "weighted", "weights": "often"}
    champion = changed(feed__sampling="weighted", feed__weights="often")
    first = challenger(job(watch={"retrain_sampling": asked}), champion, 9, ["old", "new"])
    assert first.feed.weights == ("often" if asked == "weighted" else None)
    again = challenger(job(feed=weighted), champion, 9, ["old", "new"])
    assert again.feed.sampling == "weighted" and again.feed.weights == "often"


@pytest.mark.parametrize("task", ["multi_label", "regression", "probability"])
def test_balanced_is_for_one_class_an_image_and_is_refused_at_once(task: str) -> None:
    """The retrain refused it, by the name of a setting that nobody had set."""
    with pytest.raises(ConfigError, match=rf"watch\.retrain_sampling=balanced.*task={task}"):
        job(model={"task": task}, watch={"retrain_sampling": "balanced"})


def test_a_stated_mix_and_a_stated_space_hold() -> None:
    mine = job(
        feed={"sampling": "sources", "mix": {"old": 3, "new": 1}},
        watch={"retrain_space": {"train": {"lr": "choice(0.1, 0.2)"}}, "retrain_samples": 2},
    )
    first = challenger(mine, CHAMPION, 9, ["old", "new"])
    assert first.feed.mix == {"old": 3, "new": 1}
    _, search = searched(mine, first)
    assert search.space == {"train.lr": "choice(0.1, 0.2)"} and search.samples == 2


def test_a_value_of_the_champions_that_is_not_drawn_is_told_by_its_own_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log said that search.start, which nobody had set, has a value that no trial has."""
    space = {"train.lr": "choice(0.1, 0.2)", "model.dropout": "uniform(0.1, 0.5)"}
    mine = job(watch={"retrain_space": space})
    first = challenger(mine, CHAMPION, 9, ["old"])
    wanted, search = searched(mine, first)
    assert "champion's train.lr=0.002" in caplog.text and "watch.retrain_space" in caplog.text
    assert "dropout" not in caplog.text and search.start == {"model.dropout": 0.3}
    assert spaces.left_out(search.start, spaces.parse(space, wanted)) == []
    with pytest.raises(ConfigError, match=r"watch\.retrain_space is wrong"):
        job(watch={"retrain_space": {}})


def test_a_mix_that_does_not_know_a_new_source_is_not_taken_over() -> None:
    champion = changed(feed__sampling="sources", feed__mix={"old": 3, "older": 1})
    assert challenger(job(), champion, 9, ["old", "older"]).feed.mix == {
        "old": 3,
        "older": 1,
    }
    assert challenger(job(), champion, 9, ["old", "older", "new"]).feed.mix is None


def test_a_space_that_cannot_be_drawn_is_refused_by_its_own_name() -> None:
    mine = job(watch={"retrain_space": {"train.rate": "choice(0.1)"}})
    with pytest.raises(
        ConfigError, match=r"watch\.retrain_space names an unknown field train\.rate"
    ):
        searched(mine, challenger(mine, CHAMPION, 9, []))


def test_a_population_is_no_small_search() -> None:
    populated = job(search={"scheduler": "pbt"})
    _, search = searched(populated, challenger(populated, CHAMPION, 9, []))
    assert search.scheduler == "asha"


def test_a_mix_without_sampling_by_source_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mix says how often a source is drawn.*sources"):
        job(feed={"mix": {"old": 1}})


def test_a_head_that_is_fitted_at_once_is_fitted_once() -> None:
    """Rates and decays near the champion's say nothing about it; nor is there a first answer."""
    champion = validate(TrainJob, {"table": {"uri": "/t"}, "train": {"solver": "closed"}})
    mine = job(watch={"retrain_samples": 8}, search={"first_answer": True})
    _, once = searched(mine, champion)
    _, steps = searched(mine, replace(champion, {"train.solver": "steps"}))
    assert (once.samples, steps.samples) == (1, 8)
    assert not once.first_answer and not steps.first_answer


def test_rows_that_a_replay_left_out_one_night_are_not_left_out_for_good() -> None:
    """The next challenger trained without them and said "all old ones"; on another host the list
    was missing, and each retrain failed."""
    champions = changed(feed__leave_out="/gone/replay.json")
    assert challenger(job(), champions, 9, ["old"]).feed.leave_out is None
    own = job(feed={"leave_out": "/mine.json"})
    assert challenger(own, champions, 9, ["old"]).feed.leave_out == "/mine.json"
