"""All ranks hear a notice in the same step, soon after one of them was told, and ask each other about once a second."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from raypipe.train import checkpoint
from raypipe.train.notice import Notice, on_sigterm
from raypipe.train.rank import train_rank

from .test_loop import Recorder, job, pixels

STEP_S = 0.02


def ranks(rank: int, folder: Path) -> None:
    """Rank 1 is told after half a second; each rank notes in which step it heard, and how often it was asked."""
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2, timeout=timedelta(seconds=30))
    asked: list[int] = []
    started = time.monotonic()

    def told() -> bool:
        asked.append(0)
        return rank == 1 and time.monotonic() - started > 0.5

    notice = Notice(told, torch.device("cpu"), 2, every_s=0.1)
    step = 0
    while not notice():
        step += 1
        time.sleep(STEP_S * (1 + rank))  # one of them is slower
    assert notice()
    (folder / f"rank-{rank}").write_text(f"{step} {len(asked)} {time.monotonic() - started}")
    dist.destroy_process_group()


def test_all_ranks_hear_in_the_same_step(tmp_path: Path) -> None:
    mp.spawn(ranks, (tmp_path,), nprocs=2)
    (step, asked, seconds), other = ((float(v) for v in (tmp_path / f"rank-{r}").read_text().split()) for r in (0, 1))
    assert next(iter(other)) == step and seconds > 0.5
    assert asked < 0.6 * step, "it asks about every 0.1 s, not after each step of 0.04 s"


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
    assert state.finished(3) and all(torch.equal(whole.weights[name], second.weights[name]) for name in whole.weights)
