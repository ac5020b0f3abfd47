"""The loop without Ray: it learns, it stops, and an interrupted run ends bit for bit equal."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raypipe.config import validate
from raypipe.feed.feed import Source
from raypipe.models.tasks import Task
from raypipe.train import checkpoint
from raypipe.train.job import TrainJob
from raypipe.train.loop import LoopState
from raypipe.train.objective import Objective
from raypipe.train.parallel import Engine, ParallelConfig, Snapshot, native
from raypipe.train.parallel.engine import parameter_groups
from raypipe.train.worker import Data, train_rank, trainable

from ..pixels import memory

CLASSES = ("dark", "bright")
OBJECTIVE = Objective.of(Task("single_label", CLASSES), np.array([0, 1]))


def toy(images: int, seed: int, shuffled: bool = False) -> Source:
    """32 px noise around 90 or 160: easy to tell apart, unless the labels are shuffled."""
    rng = np.random.default_rng(seed)
    labels = np.arange(images) % 2
    pixels = rng.normal(
        np.array([90, 160])[labels][:, None, None, None], 40, (images, 32, 32, 3)
    ).clip(0, 255)
    shown = rng.permutation(labels) if shuffled else labels
    return memory(pixels.astype(np.uint8), shown)


def pixels(shuffled: bool = False) -> Data:
    return Data(CLASSES, False, toy(48, 1, shuffled), toy(20, 2, shuffled))


def features() -> Data:
    rng = np.random.default_rng(5)
    scales = rng.uniform(0.1, 50, 64)

    def samples(rows: int) -> Source:
        labels = np.arange(rows) % 2
        inputs = rng.normal(labels[:, None] * 2.0, 1.0, (rows, 64)) * scales
        return memory(inputs.astype(np.float32), labels)

    return Data(CLASSES, True, samples(60), samples(30))


def job(**train: object) -> TrainJob:
    settings = {
        "epochs": 6,
        "batch_size": 16,
        "lr": 0.01,
        "precision": "fp32",
        "stopping": {"patience": None},
    } | train
    return validate(
        TrainJob,
        {
            "table": {"uri": "unused"},
            "model": {"name": "small_cnn", "mode": "finetune", "pretrained": False, "dropout": 0.3},
            "augment": {"flip_horizontal": True, "shift": 0.1, "brightness": 0.2},
            "train": settings,
        },
    )


class Recorder:
    """Records reports, writes checkpoints, and raises after epoch `dies_after` or a step of it."""

    def __init__(self, folder: Path, dies_after: tuple[int, int] | None = None) -> None:
        self.folder, self.dies_after = folder, dies_after
        self.epochs: list[int] = []
        self.metrics: list[dict[str, float]] = []
        self.weights: dict[str, torch.Tensor] = {}

    def report(self, metrics: dict[str, float], state: LoopState) -> None:
        self.epochs.append(state.epoch)
        self.metrics.append(metrics)

    def save(self, state: LoopState, engine: Engine) -> None:
        self.snapshot = engine.snapshot()
        self.weights = {name: piece.values for name, piece in self.snapshot.weights.items()}
        checkpoint.write(
            self.folder / checkpoint.name(state.epoch, state.step), self.snapshot, state
        )
        if (state.epoch, state.step) == self.dies_after:
            raise KeyboardInterrupt("power cut")


@pytest.mark.parametrize("data", [pixels(), features()], ids=["pixels", "features"])
def test_it_learns_what_can_be_learnt_and_reports_once_an_epoch(data: Data, tmp_path: Path) -> None:
    told = Recorder(tmp_path)
    state = train_rank(job(), data, None, told.save, told.report)
    assert told.epochs == [1, 2, 3, 4, 5, 6] and state.history == told.metrics
    assert state.history[-1]["val_accuracy"] >= 0.95
    assert state.history[-1]["train_loss"] < 0.5 * state.history[0]["train_loss"]
    assert (
        state.best
        == max(m["val_accuracy"] for m in state.history)
        == state.history[state.best_epoch]["val_accuracy"]
    )


def test_it_learns_in_bf16_too(tmp_path: Path) -> None:
    told = Recorder(tmp_path)
    state = train_rank(job(precision="bf16"), pixels(), None, told.save, told.report)
    assert state.history[-1]["val_accuracy"] >= 0.95
    assert {w.dtype for name, w in told.weights.items() if "num_batches" not in name} == {
        torch.float32
    }


@pytest.mark.parametrize(("epochs_done", "steps_done"), [(1, 0), (4, 0), (0, 1), (3, 2)])
def test_a_resumed_run_ends_bit_for_bit_where_an_uninterrupted_one_does(
    tmp_path: Path, epochs_done: int, steps_done: int
) -> None:
    """Dropout, augmentation, order and schedule all go on where they were."""
    whole, cut, resumed = (
        Recorder(tmp_path / "whole"),
        Recorder(tmp_path / "cut", (epochs_done, steps_done)),
        Recorder(tmp_path / "cut"),
    )
    train_rank(job(), pixels(), None, whole.save, whole.report)
    with pytest.raises(KeyboardInterrupt, match="power cut"):
        train_rank(job(checkpoint_steps=1), pixels(), None, cut.save, cut.report)
    found, skipped = checkpoint.newest((tmp_path / "cut").glob("epoch-*"))
    assert found and not skipped
    torch.manual_seed(99)  # another process has another state of its generator
    state = train_rank(job(), pixels(), found, resumed.save, resumed.report)
    assert resumed.epochs == list(range(epochs_done + 1, 7)) and len(state.history) == 6
    assert whole.weights.keys() == resumed.weights.keys()
    assert all(torch.equal(whole.weights[name], resumed.weights[name]) for name in whole.weights)
    same = [
        [{k: v for k, v in m.items() if k.startswith(("val_", "train_"))} for m in run.metrics]
        for run in (whole, resumed)
    ]
    assert same[0][epochs_done:] == same[1]


def test_each_image_counts_once_in_the_loss_of_an_epoch_that_changes_its_workers(
    tmp_path: Path,
) -> None:
    """A checkpoint as two workers leave it, whose sums are means over both, goes on with one."""
    asked = job(epochs=1, checkpoint_steps=1)
    whole, killed, told = (Recorder(tmp_path / name) for name in ("whole", "killed", "told"))
    train_rank(asked, pixels(), None, whole.save, whole.report)
    killed.dies_after = (0, 2)
    with pytest.raises(KeyboardInterrupt):
        train_rank(asked, pixels(), None, killed.save, killed.report)
    state = checkpoint.read(killed.folder / checkpoint.name(0, 2)).state
    state.loss_sum, state.seen = state.loss_sum / 2, state.seen / 2
    folder = tmp_path / "two" / checkpoint.name(0, 2)
    for rank, share in enumerate((killed.snapshot, Snapshot(facts=killed.snapshot.facts))):
        checkpoint.write_part(folder, share, rank, "two")
    checkpoint.publish(folder, state, 2, "two", 0)
    train_rank(asked, pixels(), folder, told.save, told.report)
    ours, theirs = (of.metrics[0]["train_loss"] for of in (told, whole))
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert LoopState(loss_sum=6, seen=4).among(4, before=2) == LoopState(loss_sum=3, seen=2)


def test_a_finished_run_does_not_train_again(tmp_path: Path) -> None:
    first = Recorder(tmp_path)
    train_rank(job(epochs=2), pixels(), None, first.save, first.report)
    again = Recorder(tmp_path)
    state = train_rank(
        job(epochs=2), pixels(), tmp_path / checkpoint.name(2), again.save, again.report
    )
    assert again.epochs == [] and state.epoch == 2


def test_early_stopping_stops(tmp_path: Path) -> None:
    told = Recorder(tmp_path)
    rule = {"metric": "val_loss", "patience": 3, "min_delta": 0.05}
    state = train_rank(
        job(epochs=60, lr=1e-7, stopping=rule), pixels(shuffled=True), None, told.save, told.report
    )
    assert told.epochs[-1] == state.epoch == state.best_epoch + 4 < 60


def test_equal_seeds_give_equal_weights_and_other_seeds_others(tmp_path: Path) -> None:
    runs = [Recorder(tmp_path / str(i)) for i in range(3)]
    for told, seed in zip(runs, (1, 1, 2), strict=True):
        one = job(epochs=1)
        train_rank(
            one.model_copy(update={"run": one.run.model_copy(update={"seed": seed})}),
            pixels(),
            None,
            told.save,
            told.report,
        )
    first, again, other = (run.weights["head.linear.weight"] for run in runs)
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_clipping_bounds_the_first_step(tmp_path: Path) -> None:
    """AdamW's first step ignores the gradient's size, so clipping shows in the second moment."""
    norms = []
    for clip in (None, 1e-3):
        told = Recorder(tmp_path / str(clip))
        train_rank(
            job(epochs=1, batch_size=48, clip_norm=clip), pixels(), None, told.save, told.report
        )
        optimizer = checkpoint.read(tmp_path / str(clip) / checkpoint.name(1)).optimizer
        moments = [optimizer[key].sum() for key in optimizer if key.startswith("exp_avg_sq/")]
        norms.append(float(sum(moments) / (1 - 0.999)) ** 0.5)
    assert norms[1] == pytest.approx(1e-3, rel=0.01) and norms[0] > 10 * norms[1]


def test_weight_decay_spares_biases_and_norms() -> None:
    model = trainable(job().model, pixels(), OBJECTIVE)
    decayed, plain = parameter_groups(model, ParallelConfig(weight_decay=0.1))
    assert decayed["weight_decay"] == 0.1 and plain["weight_decay"] == 0
    assert all(p.ndim > 1 for p in decayed["params"]) and all(p.ndim == 1 for p in plain["params"])
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_copies_of_a_sample_are_changed_each_in_its_own_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weighted sampling that shows one image of 24 all the time must not show the same pixels."""
    source, seen = toy(24, 1), list[torch.Tensor]()
    weights = np.eye(1, 24)[0] + 1e-9
    rows = dataclasses.replace(source.rows, weights_N=weights)
    step = native.Single.step

    def watched(self: Any, inputs: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.extend(inputs)
        return step(self, inputs, *rest)

    monkeypatch.setattr(native.Single, "step", watched)
    data = Data(CLASSES, False, dataclasses.replace(source, rows=rows), toy(20, 2))
    train_rank(job(epochs=1, batch_size=12), data, None, lambda *_: None, lambda *_: None)
    assert len(seen) == 24
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(seen, 2))
