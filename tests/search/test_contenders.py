"""Which features a first answer reads, and which heads it fits to them."""

from __future__ import annotations

from typing import Any

import pytest

from raypipe.config import replace, validate
from raypipe.errors import ConfigError
from raypipe.models.tasks import Kind
from raypipe.models.zoo import ModelConfig
from raypipe.search import contenders, refit
from raypipe.search.contenders import Reading, fitting, heads, readings
from raypipe.search.settings import SearchConfig
from raypipe.search.trials.trial import data_key
from raypipe.train.job import TrainJob

STAGED = Reading("efficientnet_lite0_stages", 128, 0.33)
CHEAP, DEAR, DEARER = Reading("a", 128, 0.25), Reading("a", 224, 1.0), Reading("b", 240, 1.6)
ALL = [CHEAP, DEAR, DEARER]


def test_readings_are_taken_from_the_cheapest_on_as_long_as_they_fit() -> None:
    """1,000 images at 50 a second of work 1: 5, 20 and 32 s, of which heads have a quarter."""
    assert fitting(ALL, 1000, 50.0, None) == ALL
    for seconds, count in ((6.6, 0), (6.7, 1), (33.3, 1), (33.4, 2), (76.0, 3), (0.0, 0)):
        assert fitting(ALL, 1000, 50.0, seconds) == ALL[:count]
    # One that does not fit ends it: what follows is dearer.
    assert fitting([DEAR, CHEAP], 1000, 50.0, 7.0) == []


def test_no_reading_is_planned_beyond_the_seconds() -> None:
    for seconds in range(1, 200, 7):
        found = fitting(ALL, 2000, 40.0, float(seconds))
        assert sum(2000 * one.work / 40 for one in found) <= 0.75 * seconds


def test_installed_backbones_are_read_at_two_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "is_installed", lambda name: "lite2" not in name)
    found = readings(ModelConfig())
    assert [one.name for one in found] == [
        "efficientnet_lite0_stages, 128 px",
        "efficientnet_lite1_stages, 128 px",
        "efficientnet_lite0_stages, 224 px",
        "efficientnet_lite1_stages, 240 px",
    ]
    assert [round(one.work, 2) for one in found] == [0.33, 0.46, 1.0, 1.6]
    # Images of 64 px, of 8 px and of 4,000 px.
    small = [readings(ModelConfig(), images_px)[0].side_px for images_px in (64, 8, 4000)]
    assert small == [64, 32, 128]
    at_64 = readings(ModelConfig(name="small_cnn", pretrained=False, mode="finetune", side_px=64))
    assert {one.side_px for one in at_64} == {64}


def test_a_providers_backbone_is_read_alone_and_only_with_weights() -> None:
    random = ModelConfig(name="timm:resnet18", pretrained=False, mode="finetune", side_px=64)
    assert readings(random) == []
    named = ModelConfig(name="timm:resnet18", side_px=64)
    assert [one.name for one in readings(named)] == ["timm:resnet18, 64 px"]


@pytest.mark.parametrize("task", ["single_label", "multi_label", "probability", "regression"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"train.focal_gamma": 2.0},
        {"train.class_weights": "balanced"},
        {"model.views": 8, "model.mode": "finetune", "model.frozen_blocks": 3},
        {"train.start_from": "there", "train.label_smoothing": 0.1},
        {"model.name": "small_cnn", "model.pretrained": False, "model.mode": "finetune"},
    ],
)
def test_every_head_is_a_job_that_is_not_refused(task: Kind, settings: dict[str, Any]) -> None:
    job = TrainJob.model_validate({"table": {"uri": "t"}, "model": {"task": task}})
    numeric = task in ("probability", "regression")
    if numeric and {"train.class_weights", "train.label_smoothing"} & settings.keys():
        return
    if task == "regression" and "train.focal_gamma" in settings:
        return
    job = replace(job, settings)
    reading = readings(job.model)[0]
    found = list(heads(reading, job.model, job.train))
    assert len(found) == 3
    jobs = [replace(job, changes) for changes in found]
    assert [(one.model.name, one.model.head) for one in jobs] == [
        ("efficientnet_lite0_stages", "kernel"),
        ("efficientnet_lite0_stages", "linear"),
        ("efficientnet_lite0", "kernel"),
    ]
    assert all(one.train.solver != "steps" and one.model.mode == "frozen" for one in jobs)


def test_what_a_search_draws_instead_of_auto_needs_no_number() -> None:
    given = {"table": {"uri": "t"}, "train": {"lr": "auto", "batch_size": "auto"}}
    job = validate(TrainJob, given)
    found = [replace(job, changes) for changes in heads(STAGED, job.model, job.train)]
    assert len(found) == 3 and {one.train.lr for one in found} == {1e-3}


def test_a_refit_that_a_head_refuses_is_one_message_before_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The best trial may be one that was fitted at once."""
    monkeypatch.setattr(contenders, "is_installed", lambda name: "lite0" in name)
    job = validate(TrainJob, {"table": {"uri": "t"}})
    wanted = {"model.mode": "finetune", "model.side_px": 224}
    refit.check(job, validate(SearchConfig, {"refit": wanted}))
    refit.check(
        job, validate(SearchConfig, {"refit": {"model.side_px": 224}, "first_answer": True})
    )
    with pytest.raises(ConfigError, match="solver=closed"):
        refit.check(job, validate(SearchConfig, {"refit": wanted, "first_answer": True}))


def test_a_head_and_a_trial_of_another_normalisation_read_other_arrays() -> None:
    """An ensemble judged the head by the features of trials, to which it was not fitted."""
    job = TrainJob.model_validate({"table": {"uri": "unused"}, "model": {"mean": 0.4, "std": 0.2}})
    (changes, *_) = heads(STAGED, job.model, job.train)
    drawn = {"model.name": STAGED.backbone, "model.side_px": STAGED.side_px}
    head, trial = replace(job, changes), replace(job, drawn)
    assert head.model.mode == trial.model.mode == "frozen" and head.model.mean is None
    assert data_key(head) != data_key(trial)
    assert data_key(head) == data_key(replace(head, {"model.head": "linear"}))
