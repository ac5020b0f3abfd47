"""Rules inside the loop: the reason is stored, time goes on after a resume, ranks stop together."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raypipe.train import checkpoint, loop
from raypipe.train.loop import LoopState
from raypipe.train.worker import train_rank

from . import ranks
from .test_loop import Recorder, features, job

DATA = features()
NEVER = {"patience": None}


def run(folder: Path, resume: Path | None = None, **train: Any) -> tuple[LoopState, Recorder]:
    told = Recorder(folder)
    return train_rank(
        job(**{"stopping": NEVER} | train), DATA, resume, told.save, told.report
    ), told


def test_the_reason_is_kept_with_the_run_and_a_resume_goes_no_further(tmp_path: Path) -> None:
    state, told = run(tmp_path, epochs=60, stopping={"patience": None, "target": 0.9})
    reached = state.history[-1]["val_accuracy"]
    assert (
        state.stopped == f"val_accuracy {reached:.4g} reached the target 0.9"
        and state.epoch == len(told.epochs) < 60
    )
    last = tmp_path / checkpoint.name(state.epoch)
    assert checkpoint.read(last).state == state
    again, told = run(tmp_path, last, epochs=60, stopping={"patience": None, "target": 0.9})
    assert again == state and told.epochs == []


@pytest.mark.parametrize(("patience", "stopped"), [(1, True), (2, False), (None, False)])
def test_a_run_that_trains_to_its_end_was_not_stopped(
    tmp_path: Path, patience: int | None, stopped: bool
) -> None:
    state, _ = run(
        tmp_path, epochs=3, stopping={"patience": patience, "min_delta": 2.0}
    )  # only the first epoch improves
    assert (
        bool(state.stopped) == stopped
        and state.epoch == 3 - stopped
        and 0 < state.seconds == state.worker_s
    )


def test_time_goes_on_counting_over_a_resume(tmp_path: Path) -> None:
    state, told = run(tmp_path, epochs=2)
    state.seconds = state.worker_s = 5000.0  # as if these two epochs had taken that long
    late = checkpoint.write(tmp_path / "late", told.snapshot, state)
    state, told = run(tmp_path, late, epochs=60, stopping=NEVER | {"seconds": 6000})
    assert told.epochs == [3] and 5000 < state.seconds < 5100
    assert state.stopped == "one more epoch would pass the budget of 6,000 s (5,000 spent)"


def test_time_inside_an_epoch_is_saved_too(tmp_path: Path) -> None:
    state, _ = run(tmp_path, epochs=1, batch_size=20, checkpoint_steps=1)
    seconds = [checkpoint.read(tmp_path / checkpoint.name(0, i)).state.seconds for i in (1, 2)]
    assert 0 < seconds[0] < seconds[1] < state.seconds


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    state, _ = run(tmp_path, epochs=60, lr=1e30)
    assert state.epoch < 5 and f"epoch {state.epoch} is unusable: train_loss is " in str(
        state.stopped
    )
    state, _ = run(tmp_path, epochs=6, lr=1e30, stopping=NEVER | {"nan_guard": False})
    assert state.epoch == 6 and state.stopped is None


@pytest.mark.parametrize("schedule", ["cosine", "one_cycle", "step", "constant"])
def test_the_only_step_of_a_run_trains(tmp_path: Path, schedule: str) -> None:
    """A cosine's factor was 0 in the first step."""
    weights = [
        run(tmp_path, epochs=1, batch_size=60, lr=lr, schedule=schedule)[1].weights
        for lr in (1e-2, 2e-2)
    ]
    first, second = (found["linear.weight"].abs().mean() for found in weights)
    assert second > 1.5 * first > 0  # a head starts at 0


def test_a_rate_meant_for_a_smaller_batch_is_scaled(tmp_path: Path) -> None:
    def weights(**train: Any) -> dict[str, torch.Tensor]:
        return run(tmp_path, epochs=1, batch_size=20, **train)[1].weights

    plain = weights(lr=0.02)
    for same in (weights(lr=0.01, lr_batch=5), weights(lr=0.005, lr_batch=5, lr_scaling="linear")):
        assert all(torch.equal(plain[k], same[k]) for k in plain)


def rank(me: int, folder: str, limit_s: float) -> None:
    """Rank 1's clock goes twice as fast, so that left to itself it would stop first."""
    real, started = time.perf_counter, time.perf_counter()
    loop.time = SimpleNamespace(perf_counter=lambda: (1 + me) * real())  # type: ignore[assignment]
    cfg = job(epochs=500, strategy="ddp", stopping=NEVER | {"seconds": limit_s}, batch_size=30)
    state = train_rank(cfg, DATA, None, lambda *_: None, lambda *_: None)
    told = state.to_dict() | {"own_s": (1 + me) * (real() - started)}
    Path(folder, f"rank-{me}.json").write_text(json.dumps(told))


def test_ranks_with_other_clocks_and_losses_stop_for_one_reason_after_one_epoch(
    tmp_path: Path,
) -> None:
    limit_s = 1.5
    ranks.start(rank, (str(tmp_path), limit_s), 2)
    slow, fast = (json.loads((tmp_path / f"rank-{me}.json").read_text()) for me in range(2))
    assert fast["own_s"] > 1.5 * slow["own_s"] and fast["own_s"] > limit_s  # the fault was there
    assert slow["stopped"] == fast["stopped"] and "budget of 1.5 s" in slow["stopped"]
    assert 0 < slow["epoch"] == fast["epoch"] < 500
    for key in ("seconds", "worker_s", "best", "best_epoch"):
        assert slow[key] == fast[key]
    assert slow["worker_s"] == pytest.approx(2 * slow["seconds"])
    assert [m["train_loss"] for m in slow["history"]] == [m["train_loss"] for m in fast["history"]]
