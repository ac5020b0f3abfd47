"""Whole trainings with a solver: reported, kept, resumed, packaged, exported, predicted with."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raypipe.config import replace
from raypipe.errors import ConfigError, RaypipeError
from raypipe.models.heads import Head, KernelHead
from raypipe.models.zoo import ImageModel
from raypipe.registry import packing
from raypipe.registry.export import Sample, export
from raypipe.registry.package import Package, Reference
from raypipe.train import trainer, worker
from raypipe.train.job import TrainJob, TrainResult
from raypipe.train.loop import LoopState
from raypipe.train.stopping import FITTED

from ..pixels import decoded
from .conftest import Jobs

FROZEN = {
    "model.name": "efficientnet_lite0",
    "model.mode": "frozen",
    "model.pretrained": True,
    "model.side_px": 32,
}
KERNEL = FROZEN | {"model.head": "kernel", "model.landmarks": 20, "train.solver": "closed"}


def test_a_kernel_head_is_trained_packaged_exported_and_predicts(
    jobs: Jobs, ray_session: str, tmp_path: Path
) -> None:
    job = jobs(**KERNEL)
    told: list[int] = []

    def progress(metrics: dict[str, float], state: LoopState) -> None:
        told.append(state.epoch)

    result = trainer.run(job, progress=progress)
    assert told == [1] and result.stopped == FITTED and len(result.history) == 1
    assert result.metrics["val_accuracy"] >= 0.9
    assert 0 < result.metrics["train_loss"] < 0.7

    # The saved model says what the training reported.
    model = trainer.assemble(job, result)
    assert (
        isinstance(model, ImageModel)
        and isinstance(model.head, KernelHead)
        and len(model.head.landmarks) == 20
    )
    pixels_NHWC, labels, _ = decoded(job)
    _, scores_NC = model.predict(pixels_NHWC)
    right = float((scores_NC.argmax(1) == labels).mean())
    assert right == pytest.approx(result.metrics["val_accuracy"], abs=1e-6)
    loss = -np.log(scores_NC[np.arange(len(labels)), labels]).mean()
    assert loss == pytest.approx(result.metrics["val_loss"], rel=1e-3)

    # So does its package, and what is exported of it.
    features_ND, _ = model.predict(pixels_NHWC[:4])
    reference = Reference(features_ND, scores_NC[:4], ("a", "b", "c", "d"))
    folder = packing.build(tmp_path / "p", model, job.model, result.classes, reference, {})
    packed = Package(folder)
    np.testing.assert_allclose(packed.predict_pixels(pixels_NHWC).scores_NC, scores_NC, atol=1e-4)
    pytest.importorskip("onnxruntime", reason="raypipe[onnx]")
    sample = Sample(pixels_NHWC, (None,) * len(pixels_NHWC), "validation")
    for form in ("onnx", "torchscript"):
        assert export(packed, form, tmp_path / form, sample).apart < 1e-4  # type: ignore[arg-type]


def test_a_fit_that_was_killed_is_made_again_and_a_finished_one_is_not(
    jobs: Jobs, ray_session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = jobs(**FROZEN, **{"train.solver": "lbfgs"})

    def dies(*given: object, **more: object) -> LoopState:
        raise KeyboardInterrupt("power cut")

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(worker, "fitted", dies)
        trainer.run(job)

    def reports(metrics: dict[str, float], state: LoopState) -> None:
        # The epoch is saved by now.
        raise KeyboardInterrupt("power cut")

    with pytest.raises(KeyboardInterrupt):
        trainer.run(job, progress=reports)
    monkeypatch.setattr(worker, "_solve", lambda *given: pytest.fail("fitted again"))
    result = trainer.run(job)
    assert len(result.history) == 1 and result.metrics["val_accuracy"] >= 0.9
    assert float(head_of(job, result).linear.weight.abs().sum()) > 0


def head_of(job: TrainJob, result: TrainResult) -> Head:
    model = trainer.assemble(job, result)
    assert isinstance(model, ImageModel)
    return model.head


def test_sampling_weighs_images(jobs: Jobs, ray_session: str) -> None:
    """A closed fit with balanced sampling is another one than without."""
    plain = jobs(**FROZEN, **{"train.solver": "closed"})
    balanced = replace(plain, {"feed.sampling": "balanced"})
    heads = [head_of(job, trainer.run(job)) for job in (plain, balanced)]
    first, second = (head.linear.weight.detach() for head in heads)
    assert first.shape == second.shape and torch.isfinite(second).all()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"train.solver": "steps", "model.head": "kernel"},
            "with train.solver=steps.*closed or lbfgs",
        ),
        (
            {"model.mode": "finetune", "train.solver": "steps", "model.head": "kernel"},
            "trains the backbone. Set model.head=linear",
        ),
        ({"model.mode": "finetune"}, "trains the backbone. Set train.solver=steps"),
        ({"train.focal_gamma": 2.0}, "has no focal_gamma"),
        ({"train.lr": "auto"}, "no train.lr=auto"),
        ({"train.start_from": "somewhere"}, "Set train.start_from=null"),
        ({"by_epoch": {1: {"train.lr": 0.1}}}, "no epochs that by_epoch"),
        (
            {"model.task": "multi_label", "train.class_weights": "balanced"},
            "class_weights of tags",
        ),
    ],
)
def test_what_a_solver_cannot_honour_is_refused_by_name(
    changes: dict[str, object], says: str
) -> None:
    job = TrainJob.model_validate({"table": {"uri": "nowhere"}, "train": {"solver": "closed"}})
    with pytest.raises(ConfigError, match=says):
        replace(job, changes)


def test_keys_of_trainings_by_steps_are_as_before(jobs: Jobs) -> None:
    """Landmarks play no part in a linear head's training."""
    from raypipe.feed.dataset import pin

    job = jobs(**FROZEN)
    version = pin(job.table, job.feed).version
    other = replace(job, {"model.landmarks": 7})
    assert job.training_key(version) == other.training_key(version)
    solved = replace(job, {"train.solver": "closed"})
    kernel = replace(job, {"train.solver": "closed", "model.head": "kernel"})
    smaller = replace(kernel, {"model.landmarks": 7})
    keys = {one.training_key(version) for one in (job, solved, kernel, smaller)}
    assert len(keys) == 4


@pytest.mark.parametrize("limit", [{"target": 0.5}, {"seconds": 1e-3}])
def test_no_rule_ends_what_was_fitted_at_once(
    limit: dict[str, float], jobs: Jobs, ray_session: str
) -> None:
    """Six heads that reached the target counted as 114 epochs that were saved."""
    job = jobs(**KERNEL, **{f"train.stopping.{name}": value for name, value in limit.items()})
    assert trainer.run(job).stopped == FITTED


def test_a_signal_while_a_head_is_fitted_ends_the_training(
    jobs: Jobs, ray_session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was swallowed: what followed went on, and registered a version."""
    real = worker.solving.fit

    def fit(*given: Any) -> None:
        real(*given)
        signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(worker.solving, "fit", fit)
        with pytest.raises(RaypipeError, match=r"Stopped on request.*What was fitted is saved"):
            trainer.run(jobs(**KERNEL))
    monkeypatch.setattr(worker.solving, "fit", lambda *given: pytest.fail("fitted again"))
    assert trainer.run(jobs(**KERNEL)).stopped == FITTED
