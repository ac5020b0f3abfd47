"""`auto` becomes numbers once. Later runs use these numbers, with any number of workers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import ray
import torch

from raypipe.cluster.container import usable_memory
from raypipe.config import load, replace, validate
from raypipe.errors import ConfigError
from raypipe.feed.dataset import pin
from raypipe.models.tasks import Task
from raypipe.registry import fetching
from raypipe.registry.store import open_store
from raypipe.train import trainer
from raypipe.train.auto import batch_size, finders, learning_rate
from raypipe.train.auto.probe import in_process
from raypipe.train.auto.steps import FALLBACK_LR, AutoValue
from raypipe.train.job import TrainJob
from raypipe.train.objective import Objective
from raypipe.train.publish import publish
from raypipe.train.schedule import find_batch_size, lr_range
from raypipe.train.settings import TrainConfig

from .conftest import Jobs
from .test_probe import up_to_twelve

AUTO = {"train.batch_size": "auto", "train.lr": "auto"}


@pytest.mark.usefixtures("ray_session")
def test_auto_is_found_once_and_trains(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="raypipe")
    job = jobs(**AUTO, **{"train.epochs": 8})
    result = trainer.run(job)
    saved = load(TrainJob, job.run.path / "train" / result.key / "config.yaml")
    assert saved.train.batch_size == 4  # of some 40 images: at least ten steps an epoch
    assert isinstance(saved.train.lr, float) and 1e-4 <= saved.train.lr <= 0.1
    assert result.key == saved.training_key(result.version)
    assert "train.batch_size=4: the smallest that is nearly fastest; images/s: 4: " in caplog.text
    assert "the loss falls fastest there, of 1e-06 to " in caplog.text
    assert result.metrics["val_accuracy"] >= 0.9
    store = open_store(job.run, job.registry)
    packaged = fetching.fetch(store, publish(store, trainer.plan(job), result, "train")).info[
        "config"
    ]["train"]
    assert (packaged["batch_size"], packaged["lr"]) == (
        4,
        saved.train.lr,
    )  # what a challenger will be trained with

    monkeypatch.setattr(finders, "find", lambda *args: pytest.fail("searched again"))
    monkeypatch.setattr(trainer, "prepare", lambda *args: pytest.fail("read the table again"))
    assert trainer.run(job).key == trainer.run(replace(job, {"train.workers": 2})).key == result.key


@pytest.mark.usefixtures("ray_session")
def test_a_frozen_backbone_needs_no_trying(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = {
        "model.name": "efficientnet_lite0",
        "model.mode": "frozen",
        "model.pretrained": True,
        "model.side_px": 32,
    }
    job = jobs(**frozen, **AUTO)
    monkeypatch.setattr(batch_size, "images_per_s", lambda *args: pytest.fail("tried"))
    found = finders.find(job, trainer.prepare(job, pin(job.table, job.feed)), ("batch_size", "lr"))
    assert found["batch_size"].value == 4 and "fit at any size; 4" in found["batch_size"].reason
    assert 1e-4 <= found["lr"].value <= 1


@pytest.mark.usefixtures("ray_session")
def test_where_no_rate_teaches_the_usual_one_is_taken_and_said(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = jobs(**{"train.lr": "auto", "train.batch_size": 2})
    monkeypatch.setattr(learning_rate, "lr_range", partial(lr_range, low=1e-30, high=1e-20))
    found = finders.find(job, trainer.prepare(job, pin(job.table, job.feed)), ("lr",))
    assert found["batch_size"] == AutoValue(2, "given") and found["lr"].value == FALLBACK_LR
    assert found["lr"].reason.startswith("No learning rate made the loss fall") and found[
        "lr"
    ].reason.endswith("the usual one")


@pytest.mark.usefixtures("ray_session")
def test_what_a_search_draws_is_not_found_first(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = jobs(**AUTO)
    pinned = pin(job.table, job.feed)
    monkeypatch.setattr(batch_size, "images_per_s", lambda step, n: 1.0)
    monkeypatch.setattr(learning_rate, "find", lambda *args: pytest.fail("tried rates"))
    resolved = finders.resolve(
        job, pinned, lambda: trainer.prepare(job, pinned), drawn=("train.lr",)
    )
    assert resolved.train.batch_size == 4 and resolved.train.lr == "auto"
    assert (
        finders.resolve(
            job, pinned, lambda: pytest.fail("read"), drawn=("train.lr", "train.batch_size")
        )
        == job
    )


@pytest.mark.usefixtures("ray_session")
def test_what_was_found_for_a_part_of_a_gpu_is_not_taken_for_the_whole(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two trials on one GPU have half of its memory each; a single training may fill all of it."""
    job = jobs(**{"train.batch_size": "auto"})
    pinned, shares = pin(job.table, job.feed), []

    def find(
        job: TrainJob, data: None, wanted: tuple[str, ...], share: float
    ) -> dict[str, AutoValue]:
        shares.append(share)
        return {"batch_size": AutoValue(int(64 * share), "tried")}

    monkeypatch.setattr(finders, "find", find)
    for share in (0.5, 1.0, 0.5):
        resolved = finders.resolve(job, pinned, lambda: None, gpu_share=share)  # type: ignore[arg-type,return-value]
        assert resolved.train.batch_size == 64 * share
    assert shares == [0.5, 1.0]


@pytest.mark.usefixtures("ray_session")
def test_a_worker_of_the_cluster_can_try_in_a_process_of_its_own() -> None:
    """How it is done where the driver has no GPU."""
    tried = ray.remote(lambda: [in_process(up_to_twelve)(n) for n in (12, 13)])
    assert ray.get(tried.remote()) == [True, False]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"batch_size": "atuo"},
            r"batch_size is wrong \(got 'atuo'\)\. It is a whole number from 1 up, or auto\.$",
        ),
        (
            {"batch_size": 0},
            r"batch_size is wrong \(got 0\)\. It is a whole number from 1 up, or auto",
        ),
        ({"lr": -1}, r"lr is wrong \(got -1\)\. It is a number above 0, or auto"),
        (
            {"lr": "auto", "lr_batch": 64},
            r"lr=auto is found with the batch that it trains\. Remove lr_batch",
        ),
    ],
)
def test_what_is_neither_auto_nor_a_number_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        validate(TrainConfig, settings)


def of_pixels(name: str, side_px: int, **train: Any) -> TrainJob:
    model = {"name": name, "mode": "finetune", "pretrained": False, "side_px": side_px}
    sections = {"table": {"uri": "nowhere"}, "model": model, "augment": {"crop_area": 0.5}}
    return validate(TrainJob, sections | {"train": train})


def trying(name: str, side_px: int, gpu_share: float = 1.0) -> Callable[[int], bool]:
    job = of_pixels(name, side_px)
    objective = Objective.of(Task("single_label", ("a", "b")), np.array([0, 1]))
    return in_process(
        partial(
            batch_size.try_batch,
            job=job,
            objective=objective,
            label=np.array([0]),
            gpu_share=gpu_share,
        )
    )


def test_a_step_is_tried_in_a_process_of_its_own() -> None:
    assert trying("small_cnn", 32)(5)


def test_what_should_fit_follows_memory_pixels_and_micro_batches() -> None:
    cpu = torch.device("cpu")

    def fitting(side_px: int, share: float = 1.0, **train: Any) -> int:
        job = of_pixels("efficientnet_lite0", side_px, precision="fp32", **train)
        return batch_size.expected(job, 2, cpu, share)

    whole = fitting(224)
    # 75 MB of activations an image in float32 at 224 px.
    assert whole == pytest.approx(0.8 * usable_memory() / 75e6, rel=0.1)
    assert fitting(224, share=0.5) == pytest.approx(whole / 2, rel=0.05)
    assert fitting(448) == pytest.approx(whole / 4, rel=0.05)
    assert fitting(224, accumulate=4, batch_size=64) == pytest.approx(4 * whole, rel=0.05)
    assert fitting(224, share=1e-6) == 8  # not even the weights: tried, not believed


def test_a_small_table_takes_one_try() -> None:
    asked: list[int] = []

    def fits(images: int) -> bool:
        asked.append(images)
        return True

    assert find_batch_size(fits, start=113, limit=113) == 113 and asked == [113]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_the_largest_batch_is_found() -> None:
    fits = trying("efficientnet_lite0", 512)
    gpu = torch.device("cuda", 0)
    start = batch_size.expected(of_pixels("efficientnet_lite0", 512), 2, gpu)
    found = find_batch_size(fits, start=start, limit=65_536, within=0.2)
    assert found / 4 <= start <= 4 * found
    assert found >= 64 and fits(int(0.9 * found)) and not fits(2 * found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_half_a_gpu_half_of_it_fits() -> None:
    whole, half = (
        find_batch_size(
            trying("efficientnet_lite0", 512, share), start=256, limit=65_536, within=0.2
        )
        for share in (1.0, 0.5)
    )
    assert 0.3 * whole <= half <= 0.7 * whole


def images_at_once(monkeypatch: pytest.MonkeyPatch, module: Any, makes: str) -> list[int]:
    """Will hold how many images each forward pass has of the models that the module makes."""
    seen: list[int] = []
    made = getattr(module, makes)

    def watched(*args: Any) -> Any:
        model = made(*args)
        model.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
        return model

    monkeypatch.setattr(module, makes, watched)
    return seen


def test_rates_are_tried_with_as_many_images_at_once_as_a_worker_has(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One GPU had the batch of all."""
    job = jobs(**{"train.lr": "auto", "train.batch_size": 8, "train.workers": 2})
    seen = images_at_once(monkeypatch, learning_rate, "trainable")
    monkeypatch.setattr(learning_rate, "lr_range", partial(lr_range, steps=3))
    learning_rate.find(job, trainer.prepare(job, pin(job.table, job.feed)), 8)
    assert seen and max(seen) == 4


def test_each_micro_batch_has_an_image(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number that was found was refused, by that command and by each one after it."""
    monkeypatch.setattr(batch_size, "images_per_s", lambda step, n: 1.0)
    job = jobs(**{"train.batch_size": "auto", "train.accumulate": 16})
    pinned = pin(job.table, job.feed)
    found = finders.resolve(job, pinned, lambda: trainer.prepare(job, pinned))
    assert found.train.batch_size == 16


def test_a_batch_is_tried_in_its_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """If all of it is computed at once, a part of what fits is found."""
    seen = images_at_once(monkeypatch, batch_size, "ImageModel")
    job = of_pixels("small_cnn", 32, accumulate=4, batch_size=64)
    objective = Objective.of(Task("single_label", ("a", "b")), np.array([0, 1]))
    batch_size._random_steps(job, objective, np.array([0]))(8)
    assert seen == [2, 2, 2, 2]
