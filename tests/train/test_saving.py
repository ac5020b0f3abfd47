"""When checkpoints are written and which are kept; a full disk stops the run without damage."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from raypipe.errors import RaypipeError
from raypipe.train import checkpoint
from raypipe.train.checkpoint import saver
from raypipe.train.checkpoint.saver import Saver
from raypipe.train.loop import LoopState
from raypipe.train.parallel import Snapshot
from raypipe.train.parallel.snapshot import Piece
from raypipe.train.settings import TrainConfig
from raypipe.train.stopping import StoppingConfig
from raypipe.train.worker import train_rank

from .test_loop import Recorder, job, pixels


class Weight:
    """An engine of one weight, which every step changes in place."""

    rank, world = 0, 1

    def __init__(self, size: int = 1) -> None:
        self.weight = torch.zeros(size)

    def snapshot(self) -> Snapshot:
        return Snapshot({"weight": Piece.whole(self.weight)})


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("epoch-*"))


def test_written_behind_it_holds_the_step_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer is held until the weights have changed: what is written is the copy."""
    go_on, write_part = threading.Event(), checkpoint.write_part

    def waits(*args: Any) -> None:
        assert go_on.wait(10)
        write_part(*args)

    monkeypatch.setattr(checkpoint, "write_part", waits)
    engine: Any = Weight()
    with Saver(tmp_path, TrainConfig(checkpoint_async=True)) as save:
        save(LoopState(step=1), engine)
        engine.weight += 1
        assert names(tmp_path) == []
        go_on.set()
        save.wait()
        assert checkpoint.read(tmp_path / checkpoint.name(0, 1)).weights["weight"] == 0
        save(LoopState(step=2), engine)
    assert checkpoint.read(tmp_path / checkpoint.name(0, 2)).weights["weight"] == 1


def test_what_the_writer_raised_is_raised_by_the_next_save_or_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> None:
        raise OSError("no")

    monkeypatch.setattr(checkpoint, "write_part", fails)
    engine: Any = Weight()
    with Saver(tmp_path, TrainConfig(checkpoint_async=True)) as save:
        save(LoopState(step=1), engine)
        with pytest.raises(RaypipeError, match=r"A checkpoint could not be written: no"):
            save(LoopState(step=2), engine)
    with (
        pytest.raises(RaypipeError, match=r"could not be written"),
        Saver(tmp_path, TrainConfig(checkpoint_async=True)) as save,
    ):
        save(LoopState(step=1), engine)


def test_a_worker_that_wrote_nothing_is_no_full_disk(tmp_path: Path) -> None:
    engine: Any = Weight()
    engine.world = 2
    with (
        pytest.raises(RaypipeError, match=r"rank 1 wrote no part.*train\.timeout_s") as raised,
        Saver(tmp_path, TrainConfig(timeout_s=0.05)) as save,
    ):
        save(LoopState(step=1), engine)
    assert "room" not in str(raised.value) and names(tmp_path) == []


@pytest.mark.parametrize("behind", [False, True])
def test_a_run_ends_with_the_same_weights_however_it_saves(tmp_path: Path, behind: bool) -> None:
    told = Recorder(tmp_path / "whole")
    train_rank(job(epochs=2), pixels(), None, told.save, told.report)
    mine = job(epochs=2, checkpoint_steps=1, checkpoint_async=behind)
    with Saver(tmp_path / "mine", mine.train) as save:
        train_rank(mine, pixels(), None, save, told.report)
    found = checkpoint.read(tmp_path / "mine" / checkpoint.name(2))
    assert all(torch.equal(found.weights[name], weight) for name, weight in told.weights.items())


@pytest.mark.parametrize(
    ("metric", "count", "epochs"),
    [("val_accuracy", 1, {2}), ("val_accuracy", 2, {2, 4}), ("val_loss", 2, {1, 3, 2})],
)
def test_the_best_are_kept(metric: Any, count: int, epochs: set[int]) -> None:
    """Of equals the earlier; NaN never; and always the one that the run calls best."""
    accuracies, losses = [0.5, 0.9, float("nan"), 0.9], [0.1, 0.6, 0.2, 0.7]
    history = [{"val_accuracy": a, "val_loss": b} for a, b in zip(accuracies, losses, strict=True)]
    state = LoopState(epoch=4, best=0.9, best_epoch=1, history=history)
    assert saver.kept(state, StoppingConfig(metric=metric), count) == {
        checkpoint.name(epoch) for epoch in epochs
    }


def better(epoch: int) -> LoopState:
    """Each epoch is the best so far."""
    history = [{"val_accuracy": e / 10, "val_loss": 1.0} for e in range(epoch)]
    return LoopState(epoch=epoch, best=epoch / 10, best_epoch=epoch - 1, history=history)


def test_a_damaged_newest_checkpoint_costs_one_epoch_though_it_is_the_best(tmp_path: Path) -> None:
    """It was the only one, and the training began again."""
    engine: Any = Weight()
    for epoch in range(1, 5):
        # As after a restart: nothing is known but what is on the disk.
        with Saver(tmp_path, TrainConfig()) as save:
            save(better(epoch), engine)
    three, four = checkpoint.name(3), checkpoint.name(4)
    assert names(tmp_path) == [three, four]
    (tmp_path / four / "weights-00000.safetensors").write_bytes(b"torn")
    assert saver.newest(tmp_path) == tmp_path / three
    # The torn one is no checkpoint that another one could come after.
    with Saver(tmp_path, TrainConfig()) as save:
        save(better(5), engine)
    assert names(tmp_path) == [three, checkpoint.name(5)]


def test_a_trial_keeps_no_more_than_the_search_reads(tmp_path: Path) -> None:
    engine: Any = Weight()
    with Saver(tmp_path, TrainConfig(), recent=1) as save:
        for epoch in range(1, 4):
            save(better(epoch), engine)
    assert names(tmp_path) == [checkpoint.name(3)]


@pytest.mark.parametrize(("recent", "flushes"), [(0, True), (1, False)])
def test_a_manifest_comes_after_the_disk_has_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recent: int, flushes: bool
) -> None:
    """After a power cut a manifest could name files that the disk never got."""
    before: list[str] = []
    fsync = os.fsync

    def noted(handle: int) -> None:
        path = Path(f"/proc/self/fd/{handle}").readlink()
        assert not list(tmp_path.rglob(checkpoint.MANIFEST))
        before.append(path.name)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    engine: Any = Weight()
    with Saver(tmp_path, TrainConfig(), recent) as save:
        save(LoopState(step=1), engine)
    files = ["weights-00000.safetensors", "state.json", checkpoint.name(0, 1)]
    assert before == (files if flushes else [])


@pytest.mark.share
@pytest.mark.chaos
@pytest.mark.parametrize("behind", [False, True])
def test_a_full_disk_stops_the_run_and_keeps_what_was_saved(small_disk: Path, behind: bool) -> None:
    small: Any = Weight(60_000)  # 240 kB
    cfg = TrainConfig(checkpoint_async=behind)
    with Saver(small_disk, cfg) as save:
        save(LoopState(step=1), small)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(600_000))
    says = r"could not be written.*[Ss]pace.*Earlier ones are kept. Make room"
    with pytest.raises(RaypipeError, match=says) as raised, Saver(small_disk, cfg) as save:
        save(LoopState(step=2), small)
    assert "os error 28" in str(raised.value) or "Errno 28" in str(
        raised.value
    )  # ENOSPC: the fault fired
    assert saver.newest(small_disk) == small_disk / checkpoint.name(0, 1) and names(small_disk) == [
        checkpoint.name(0, 1)
    ]
    filler.unlink()
    with Saver(small_disk, cfg) as save:
        save(LoopState(step=2), small)
    assert saver.newest(small_disk) == small_disk / checkpoint.name(0, 2)


def test_a_rank_that_is_ahead_keeps_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 deleted it with the older checkpoints, and waited for it until its time was over."""
    go_on, publish = threading.Event(), checkpoint.publish

    def waits(*args: Any) -> Path:
        assert go_on.wait(10)
        return publish(*args)

    monkeypatch.setattr(checkpoint, "publish", waits)
    first, other = Weight(), Weight()
    first.world = other.world = 2
    other.rank = 1
    cfg = TrainConfig(checkpoint_async=True, timeout_s=3)
    with Saver(tmp_path, cfg) as zero, Saver(tmp_path, cfg) as one:
        one._attempt = zero._attempt
        zero(LoopState(step=1), first)
        one(LoopState(step=1), other)
        one(LoopState(step=2), other)
        one.wait()
        go_on.set()
        zero(LoopState(step=2), first)
        zero.wait()
    assert saver.newest(tmp_path) == tmp_path / checkpoint.name(0, 2)
