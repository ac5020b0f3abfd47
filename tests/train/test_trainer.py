"""Whole runs on a real cluster: 1 or 2 workers, cache or stream, killed or not."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from raypipe.config import load, replace
from raypipe.errors import ClusterError, ConfigError, DataError, RaypipeError
from raypipe.feed.dataset import pin
from raypipe.models.zoo import ImageModel
from raypipe.train import checkpoint, trainer, unseen
from raypipe.train.checkpoint.saver import newest
from raypipe.train.job import TrainJob, TrainResult
from raypipe.train.loop import LoopState

from ..pixels import decoded
from .conftest import Jobs

pytestmark = pytest.mark.usefixtures("ray_session")


def judged(job: TrainJob, result: TrainResult) -> tuple[float, float]:
    """(loss, accuracy) of the saved model on the validation split, recomputed."""
    model: ImageModel = trainer.assemble(job, result)
    pixels_NHWC, labels, _ = decoded(job)
    with torch.no_grad():
        logits_NC, labels_N = model(torch.from_numpy(pixels_NHWC)), torch.from_numpy(labels)
    return float(cross_entropy(logits_NC, labels_N)), float(
        (logits_NC.argmax(1) == labels_N).float().mean()
    )


def check_result(job: TrainJob, result: TrainResult) -> None:
    """The checkpoint is complete and of the best epoch; its model scores what the run reported."""
    assert (
        len(result.history) == job.train.epochs
        and result.metrics == result.history[result.best_epoch]
    )
    assert result.metrics["val_accuracy"] == max(m["val_accuracy"] for m in result.history)
    assert checkpoint.verify(Path(result.checkpoint)) is None
    loss, accuracy = judged(job, result)
    assert accuracy == pytest.approx(result.metrics["val_accuracy"], abs=1e-6)
    assert loss == pytest.approx(result.metrics["val_loss"], rel=1e-3)


def test_one_worker_trains_in_this_process_and_is_not_asked_twice(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, told = jobs(**{"train.epochs": 6}), []

    def progress(metrics: dict[str, float], state: LoopState) -> None:
        told.append(state.epoch)

    result = trainer.run(job, progress=progress)
    assert told == [1, 2, 3, 4, 5, 6]
    check_result(job, result)
    assert result.metrics["val_accuracy"] >= 0.9
    assert load(TrainJob, job.run.path / "train" / result.key / "config.yaml") == job
    monkeypatch.setattr(trainer, "prepare", lambda *args: pytest.fail("trained again"))
    again = trainer.run(job)
    assert replace_seconds(again) == replace_seconds(result)


def replace_seconds(result: TrainResult) -> dict[str, object]:
    return vars(result) | {"seconds": 0}


def test_an_interrupted_run_goes_on_from_its_newest_whole_checkpoint(
    jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="raypipe")
    job, told = jobs(**{"train.epochs": 5}), []

    def dies(metrics: dict[str, float], state: LoopState) -> None:
        told.append(state.epoch)
        if state.epoch == 3:
            raise KeyboardInterrupt("power cut")

    with pytest.raises(KeyboardInterrupt, match="power cut"):
        trainer.run(job, progress=dies)
    folder = job.run.path / "train" / job.training_key(pin(job.table, job.feed).version)
    torn = folder / "checkpoints" / checkpoint.name(3) / "weights-00000.safetensors"
    torn.write_bytes(torn.read_bytes()[:100])
    result = trainer.run(job, progress=lambda metrics, state: told.append(state.epoch))
    # 3 is torn, and 2 is kept, whichever is the best.
    assert told == [1, 2, 3, 3, 4, 5]
    assert (
        "epoch-0003-step-0000000: weights-00000.safetensors is missing or cut short" in caplog.text
    )
    assert len(result.history) == 5


def test_a_training_ends_though_its_best_checkpoint_is_damaged(
    jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """It failed with "Set run.dir", whatever one did: the newest epoch was whole, and nothing was
    trained again.
    """
    caplog.set_level(logging.WARNING, logger="raypipe")
    # No epoch is better by more than 1: the first one is the best, and the newest another one.
    job = jobs(**{"train.epochs": 4, "train.keep_best": 4, "train.stopping.min_delta": 1.0})
    result = trainer.run(job)
    checkpoints = Path(result.checkpoint).parent
    assert result.best_epoch == 0

    def damage(epoch: int, kind: str = "weights") -> None:
        file = checkpoints / checkpoint.name(epoch + 1) / f"{kind}-00000.safetensors"
        *content, last = file.read_bytes()
        file.write_bytes(bytes([*content, last ^ 1]))

    # The message names the way out, and it leads there.
    damage(0)
    with pytest.raises(DataError, match=r"Remove \S+/result\.json, and run the same"):
        trainer.assemble(job, result)
    (checkpoints.parent / "result.json").unlink()
    again = trainer.run(job)
    assert again.best_epoch == 1 and again.metrics == result.history[1]
    assert "The weights of the best epoch (1) are damaged (epoch-0001-" in caplog.text
    assert "The result is epoch 2" in caplog.text
    trainer.assemble(job, again)
    # Nobody reads the optimizer of a training that has ended.
    damage(1, "optimizer")
    (checkpoints.parent / "result.json").unlink()
    assert trainer.run(job).best_epoch == 1

    # All are damaged after the last epoch.
    for epoch in (1, 2, 3):
        damage(epoch)
    state = LoopState(epoch=4, history=list(result.history), best_epoch=0)
    with pytest.raises(RaypipeError, match=r"no other epoch's are whole.*Remove .*checkpoints"):
        trainer._best_whole(job, checkpoints, state)


def test_a_run_killed_mid_epoch_on_two_workers_goes_on_with_one_at_the_next_sample(
    jobs: Jobs, tmp_path: Path
) -> None:
    """Ids in the workers' logs: those before the checkpoint and those after it make one epoch."""
    settings = {
        "train.epochs": 3,
        "train.batch_size": 4,
        "train.checkpoint_steps": 2,
        "train.max_failures": 0,
    }
    whole = jobs(**settings, **{"feed.trace": str(tmp_path / "whole")})
    trainer.run(whole)
    job = jobs(
        **settings,
        **{"feed.trace": str(tmp_path / "two"), "train.workers": 2, "train.timeout_s": 15},
    )
    job = replace(job, {"run.dir": str(tmp_path / "killed")})
    folder = job.run.path / "train" / job.training_key(pin(job.table, job.feed).version)
    killer = Killer(folder, steps=1)
    killer.start()
    with pytest.raises(RaypipeError, match="Training failed on a worker"):
        trainer.run(job)
    killer.join()
    at = newest(folder / "checkpoints")
    assert killer.killed and at is not None
    state = json.loads((at / "state.json").read_text())
    trainer.run(replace(job, {"train.workers": 1, "feed.trace": str(tmp_path / "one")}))
    expected, before, after = (traced(tmp_path / run) for run in ("whole", "two", "one"))
    resumed = (state["epoch"], state["step"])
    assert min(after) == resumed > (0, 0), "the kill came before the first checkpoint"
    assert {t: ids for t, ids in before.items() if t < resumed} | after == expected
    assert all(before[t] == expected[t] for t in before)


def traced(folder: Path) -> dict[tuple[int, int], list[str]]:
    """Global batches by (epoch, step): the ranks' samples, joined by their places in the stream."""
    lines = [
        json.loads(line) for f in folder.glob("*.jsonl") for line in f.read_text().splitlines()
    ]
    batches: dict[tuple[int, int], dict[int, list[tuple[int, str]]]] = {}
    for line in lines:
        placed = list(zip(line["positions"], line["ids"], strict=True))
        batches.setdefault((line["epoch"], line["step"]), {})[line["rank"]] = placed
    worlds = {(line["epoch"], line["step"]): line["world"] for line in lines}
    return {
        t: [i for _, i in sorted(itertools.chain.from_iterable(ranks.values()))]
        for t, ranks in batches.items()
        if len(ranks) == worlds[t]  # a killed rank may not have come to its last batch
    }


@pytest.mark.slow
@pytest.mark.share
def test_frozen_training_is_the_same_with_one_worker_and_with_two(jobs: Jobs) -> None:
    frozen = {
        "model.name": "efficientnet_lite0",
        "model.mode": "frozen",
        "model.pretrained": True,
        "model.side_px": 32,
    }
    job = jobs(**frozen, **{"model.dropout": 0.0, "train.epochs": 5, "train.batch_size": 12})
    alone = trainer.run(job)
    together = trainer.run(replace(job, {"train.workers": 2, "run.dir": job.run.dir + "-2"}))
    for result in (alone, together):
        check_result(job, result)
    assert alone.key == together.key  # how many share the work does not change what is learned
    for one, two in zip(alone.history, together.history, strict=True):
        assert two["val_loss"] == pytest.approx(one["val_loss"], rel=1e-3, abs=1e-4)
    assert alone.metrics["val_accuracy"] >= 0.8


def test_two_workers_train_one_model_and_a_kill_does_not_start_them_over(jobs: Jobs) -> None:
    """SIGKILL to one worker after some checkpoints. Measured rates tell runs apart."""
    job = jobs(**{"train.workers": 2, "train.epochs": 12, "train.timeout_s": 15})
    folder = job.run.path / "train" / job.training_key(pin(job.table, job.feed).version)
    killer = Killer(folder)
    killer.start()
    result = trainer.run(job)
    killer.join()
    assert killer.killed and 4 <= len(killer.before) < 12, (
        "the fault did not fire while the run was going on"
    )
    check_result(job, result)
    assert result.metrics["val_accuracy"] >= 0.9
    kept = (
        len(killer.before) - 2
    )  # Ray counts a checkpoint an interval or two after its files are there
    assert list(result.history[:kept]) == killer.before[:kept] != [], (
        "these epochs were trained again"
    )


class Killer(threading.Thread):
    """Wait for epoch 4's checkpoint in `folder`, or one inside an epoch, and kill one worker."""

    def __init__(self, folder: Path, steps: int | None = None) -> None:
        super().__init__(daemon=True)
        self.folder, self.steps, self.killed = folder, steps, 0
        self.before: list[dict[str, float]] = []

    def states(self) -> list[Path]:
        with contextlib.suppress(OSError):  # a folder was removed while it was listed
            return list(self.folder.rglob("state.json"))
        return []

    def run(self) -> None:
        from ray.util.state import list_actors

        pids: list[int] = []
        inside = False
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not self.killed:
            if len(pids) < 2:
                alive = list_actors(filters=[("state", "=", "ALIVE")], detail=True)
                pids = [
                    actor.pid
                    for actor in alive
                    if "RayTrainWorker" in actor.class_name and actor.pid
                ]
            for path in self.states():
                with contextlib.suppress(OSError, ValueError):  # half written, or removed meanwhile
                    state = json.loads(path.read_text())
                    self.before = max(self.before, state["history"], key=len)
                    inside = inside or (state["step"] > 0 and state["epoch"] > 0)
            if pids and (inside if self.steps else len(self.before) >= 4):
                os.kill(pids[-1], signal.SIGKILL)
                self.killed = pids[-1]
            time.sleep(0.01)


def test_more_workers_than_cpus_are_refused_at_once(jobs: Jobs) -> None:
    with pytest.raises(
        ClusterError,
        match=r"More workers.*got 'train\.workers=64'.*It has 2 CPUs.*Set train\.workers=2",
    ):
        trainer.run(jobs(**{"train.workers": 64}))


def test_a_diverged_run_says_so(jobs: Jobs) -> None:
    rule = {"metric": "val_loss", "patience": None}
    with pytest.raises(RaypipeError, match=r"Training diverged.*val_loss.*Lower train\.lr"):
        trainer.run(jobs(**{"train.lr": 1e30, "train.stopping": rule}))


def test_zero3_on_one_worker_is_refused(jobs: Jobs) -> None:
    with pytest.raises(ConfigError, match=r"zero3 shards a model over several workers"):
        trainer.run(jobs(**{"train.strategy": "zero3"}))


def test_the_reference_is_the_validation_split_as_the_model_sees_it(
    jobs: Jobs, tmp_path: Path
) -> None:
    job = jobs(**{"train.epochs": 1})
    result = trainer.run(job)
    pinned = pin(job.table, job.feed)
    for carrier in ("cache", "offload", "threads"):
        found = unseen.reference(
            replace(job, {"feed.carrier": carrier}),
            trainer.assemble(job, result),
            pinned,
            tmp_path / "kept",
        ).reference
        inputs, _, ids = decoded(job)
        assert found.ids == ids
        features, scores = trainer.assemble(job, result).predict(inputs)
        np.testing.assert_allclose(found.features_ND, features, atol=1e-4)
        np.testing.assert_allclose(found.scores_NC, scores, atol=1e-4)
    assert not (tmp_path / "kept").exists(), "of the test split it says nothing"


def test_the_test_split_is_judged_as_the_package_predicts_if_the_table_has_one(
    jobs: Jobs,
) -> None:
    job = jobs(**{"train.epochs": 2, "model.views": 4})
    result = trainer.run(job)
    assert unseen.test(trainer.plan(job), result) == {}
    job = replace(job, {"feed.test": "val", "run.dir": f"{job.run.path}-tested"})
    result = trainer.run(job)
    pixels_NHWC, labels, _ = decoded(job)
    scores = trainer.assemble(job, result).predict(pixels_NHWC)[1]
    found = unseen.test(trainer.plan(job), result)
    assert found.keys() == {"test_accuracy", "test_balanced_accuracy"}
    assert found["test_accuracy"] == pytest.approx(float((scores.argmax(1) == labels).mean()))
    assert unseen.test(trainer.plan(job), result) == found


def test_a_training_starts_from_given_weights_and_refuses_another_models(
    jobs: Jobs, tmp_path: Path
) -> None:
    first = trainer.run(jobs(**{"train.epochs": 3}))
    given = {"train.epochs": 1, "train.start_from": first.checkpoint}
    second = trainer.run(
        jobs(**given, **{"train.lr": 1e-9, "train.weight_decay": 0.0, "model.side_px": 48})
    )
    assert second.key != first.key
    ours, theirs = (trainer.assemble(jobs(), result).state_dict() for result in (second, first))
    learned = [
        name
        for name in ours
        if not name.endswith(("running_mean", "running_var", "num_batches_tracked"))
    ]
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in learned)
    fresh = ImageModel(jobs().model, 2).state_dict()
    assert not torch.allclose(ours["head.linear.weight"], fresh["head.linear.weight"], atol=1e-3)
    with pytest.raises(
        ConfigError,
        match=r"train\.start_from holds the weights of another model.*size mismatch|Missing key",
    ):
        trainer.run(jobs(**given, **{"model.name": "efficientnet_lite0", "model.side_px": 32}))
    with pytest.raises(
        ConfigError, match=r"checkpoint of train\.start_from is incomplete: no readable manifest"
    ):
        trainer.run(jobs(**given | {"train.start_from": str(tmp_path)}))
