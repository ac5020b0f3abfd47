"""When checkpoints are written and which are kept: `Saver` stands between the loop and the files.

By default a checkpoint is on disk when the call returns. With `train.checkpoint_async` the call
returns as soon as this rank's share is copied in memory, and a thread writes it while training goes
on. The next save waits for that thread. So memory holds one copy at most, and an error of the
thread is raised by the next save, or by `wait`.
"""

from __future__ import annotations

import logging
import math
import shutil
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch.distributed as dist
from safetensors import SafetensorError

from raypipe.errors import RaypipeError
from raypipe.train import checkpoint
from raypipe.train.loop import LoopState
from raypipe.train.parallel import Engine, Snapshot
from raypipe.train.settings import TrainConfig
from raypipe.train.stopping import StoppingConfig, unusable

log = logging.getLogger("raypipe")
T = TypeVar("T")


class Saver:
    """Writes a checkpoint of each state it is called with, and deletes those that are not needed.

    It keeps the newest, the best epoch's and the `keep_best` best.

    recent: 0 for a training. It then keeps the one before the newest, too: if the newest is damaged
    later, that is where the training goes on. And it waits until the disk has the files: 20 to
    36 ms for 42 MB were measured. A trial of a search is short, and many lie on one disk: it does
    neither, and keeps those of the last `recent` epochs, which the search may copy to other trials.

    Every rank makes one, after the process group exists, and calls it for the same states. Use it
    in a `with`.
    """

    def __init__(self, folder: Path, cfg: TrainConfig, recent: int = 0) -> None:
        self._folder = folder
        self._cfg = cfg
        self._recent = recent
        self._is_training = recent == 0
        self._attempt = _from_rank_0(uuid.uuid4().hex)
        self._writer = ThreadPoolExecutor(1, "checkpoint") if cfg.checkpoint_async else None
        self._pending: Future[None] | None = None

    def __call__(self, state: LoopState, engine: Engine) -> None:
        # One pending save at most.
        self.wait()
        # A copy: the loop changes its own state.
        copied = LoopState(**state.to_dict())
        snapshot = engine.snapshot()
        if self._writer is None:
            self._write(snapshot, copied, engine.rank, engine.world)
        else:
            self._pending = self._writer.submit(
                self._write, snapshot, copied, engine.rank, engine.world
            )

    def wait(self) -> None:
        """Wait until the last save is published. Raises the error of its writing."""
        pending = self._pending
        self._pending = None
        if pending is not None:
            pending.result()

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error of the training, an error of the writer must not hide it.
        try:
            if kind is None:
                self.wait()
        finally:
            if self._writer is not None:
                self._writer.shutdown()

    def _write(self, snapshot: Snapshot, state: LoopState, rank: int, world: int) -> None:
        folder = self._folder / checkpoint.name(state.epoch, state.step)
        try:
            flushed = self._is_training
            checkpoint.write_part(folder, snapshot, rank, self._attempt, flushed)
            # Old checkpoints go only after the new one counts.
            if rank == 0:
                timeout_s = self._cfg.timeout_s
                checkpoint.publish(folder, state, world, self._attempt, timeout_s, flushed)
                best = kept(state, self._cfg.stopping, self._cfg.keep_best)
                recent = {checkpoint.name(state.epoch - i) for i in range(self._recent)}
                before = checkpoint.before(folder) if self._is_training else None
                if before is not None:
                    recent.add(before.name)
                checkpoint.keep(self._folder, best | recent | {folder.name})
        except (OSError, SafetensorError) as e:
            # An incomplete checkpoint would only fill the disk.
            shutil.rmtree(folder, ignore_errors=True)
            fix = "Make room, or set run.dir to a disk with room"
            # A worker that is lost, or whose disk is slow: room has nothing to do with it.
            if isinstance(e, TimeoutError):
                fix = "See the log of that worker, or raise train.timeout_s if its disk is slow"
            raise RaypipeError(
                f"A checkpoint could not be written: {e}",
                got=str(folder),
                rule="Earlier ones are kept",
                fix=f"{fix}; the same command then goes on from the newest",
            ) from e


def kept(state: LoopState, rule: StoppingConfig, count: int) -> set[str]:
    """Names of the checkpoints of the `count` best epochs, and of the run's best epoch.

    The run's best epoch may be another one, because an epoch must improve it by min_delta.
    """
    ranked: list[tuple[float, int]] = []
    for epoch, metrics in enumerate(state.history):
        # Its weights are lost.
        if unusable(metrics) is not None:
            continue
        # Its weights are sound, but the metric has no value: val_r2 where all labels are equal.
        value = metrics[rule.metric]
        if math.isnan(value):
            continue
        # Sorted upwards: the best first, and of equals the earlier.
        cost = value if rule.mode == "min" else -value
        ranked.append((cost, epoch))
    ranked.sort()
    # best_epoch is -1 before there is one. That gives the name of epoch 0, which nobody saves.
    epochs = [state.best_epoch]
    epochs += [epoch for _, epoch in ranked[:count]]
    # A checkpoint's name counts finished epochs.
    return {checkpoint.name(epoch + 1) for epoch in epochs}


def newest(checkpoints: Path) -> Path | None:
    """Where to resume: the furthest complete checkpoint. Damaged ones are logged and left alone."""
    if not checkpoints.exists():
        return None
    folder, skipped = checkpoint.newest(checkpoints.glob("epoch-*"))
    for problem in skipped:
        log.warning("Skipped checkpoint %s", problem)
    return folder


def agreed_newest(checkpoints: Path) -> Path | None:
    """`newest` as rank 0 sees it, on every rank: two ranks that look might see different files."""
    name = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        folder = newest(checkpoints)
        name = folder.name if folder else None
    name = _from_rank_0(name)
    return checkpoints / name if name else None


def _from_rank_0(value: T) -> T:
    """Rank 0's value, on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
