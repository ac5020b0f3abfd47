"""All ranks leave in the same step, soon after one was told to; they ask about once a second."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import torch

from raypipe.failures import on_sigterm
from raypipe.train import checkpoint
from raypipe.train import preemption as notices
from raypipe.train.worker import train_rank

from . import ranks
from .test_loop import Recorder, job, pixels

STEP_S = 0.01


def two(rank: int, folder: Path) -> None:
    """Rank 1 has twice as slow steps and must leave after 0.5 s; both note when they ask."""
    step, asked = 0, list[int]()
    clock = SimpleNamespace(perf_counter=lambda: step * STEP_S * (1 + rank))

    def told() -> bool:
        asked.append(step)
        return rank == 1 and clock.perf_counter() > 0.5

    notices.time = clock  # type: ignore[assignment]
    notice = notices.Notice(told, torch.device("cpu"), 2, every_s=0.1)
    while not notice():
        step += 1
    assert notice()
    (folder / f"rank-{rank}.json").write_text(json.dumps([step, asked]))


def test_all_ranks_hear_in_the_same_step(tmp_path: Path) -> None:
    ranks.start(two, (tmp_path,), 2)
    (step, asked), other = (
        json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)
    )
    assert [step, asked] == other
    assert 26 <= step <= 31, "told after its 25th step of 0.02 s, and asked again within 0.1 s"
    assert len(asked) < step / 3, "asked about every 0.1 s of the slower rank, not after each step"


def test_a_run_that_is_told_saves_its_step_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole, first, second = (Recorder(tmp_path / name) for name in ("whole", "cut", "cut"))
    train_rank(job(epochs=3), pixels(), None, whole.save, whole.report)
    with on_sigterm(lambda: heard.append(True)):
        heard: list[bool] = []
        before = lambda metrics, state: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
        state = train_rank(job(epochs=3), pixels(), None, first.save, before, lambda: bool(heard))
    assert heard and not state.finished(3) and (state.epoch, state.step) > (1, 0)
    found = tmp_path / "cut" / checkpoint.name(state.epoch, state.step)
    assert checkpoint.verify(found) is None
    state = train_rank(job(epochs=3), pixels(), found, second.save, second.report)
    assert state.finished(3) and all(
        torch.equal(whole.weights[name], second.weights[name]) for name in whole.weights
    )


def test_a_run_that_is_told_in_its_validation_leaves_it_and_repeats_it(tmp_path: Path) -> None:
    """It looked at all images first: 1,500 of them take one thread twenty seconds."""
    whole, first, second = (Recorder(tmp_path / name) for name in ("whole", "cut", "cut"))
    train_rank(job(epochs=2), pixels(), None, whole.save, whole.report)
    asked: list[int] = []

    def told() -> bool:
        asked.append(len(asked))
        return len(asked) > 6  # twice three steps, and the first one of two batches

    state = train_rank(job(epochs=2), pixels(), None, first.save, first.report, told)
    # Of the first epoch it looks at all images: there is no other answer yet.
    assert (state.epoch, state.step) == (1, 3) and first.epochs == [1] and len(asked) == 7
    found = tmp_path / "cut" / checkpoint.name(1, 3)
    state = train_rank(job(epochs=2), pixels(), found, second.save, second.report)
    assert state.finished(2) and second.epochs == [2]
    for name in ("train_loss", "val_loss"):
        assert second.metrics[-1][name] == whole.metrics[-1][name]
    assert all(torch.equal(whole.weights[name], second.weights[name]) for name in whole.weights)
