"""When checkpoints are written and which are kept: `Saver` stands between the loop's `save` and the files.

Written in the step (the default), a checkpoint is there when `save` returns. Written behind (`train.checkpoint_async`), `save`
returns once a copy of this rank's share is taken, and training goes on while a thread writes it; the next save waits for it,
so there is one copy in memory at most, and an error of the thread is raised there.
"""

from __future__ import annotations

import logging
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
    """Publishes a checkpoint of each state it is given and keeps the newest, the best epoch's and the `keep_best` best, and
    those of the last `recent` epochs, which a search may hand to other trials.

    Every rank makes one, after the process group exists, and calls it for the same states; use it in a `with`.
    """

    def __init__(self, folder: Path, cfg: TrainConfig, recent: int = 0) -> None:
        self._folder, self._cfg, self._recent, self._attempt = (
            folder,
            cfg,
            recent,
            _agreed(uuid.uuid4().hex),
        )
        self._behind = ThreadPoolExecutor(1, "checkpoint") if cfg.checkpoint_async else None
        self._pending: Future[None] | None = None

    def __call__(self, state: LoopState, engine: Engine) -> None:
        self.wait()
        written = LoopState(**state.to_dict())  # the loop changes its own
        if self._behind is None:
            self._write(engine.snapshot(), written, engine.rank, engine.world)
        else:
            self._pending = self._behind.submit(
                self._write, engine.snapshot(), written, engine.rank, engine.world
            )

    def wait(self) -> None:
        """Until what was begun is published. Raises what its writing raised."""
        pending, self._pending = self._pending, None
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
        try:
            if kind is None:
                self.wait()
        finally:
            if self._behind is not None:
                self._behind.shutdown()

    def _write(self, snapshot: Snapshot, state: LoopState, rank: int, world: int) -> None:
        name = checkpoint.name(state.epoch, state.step)
        try:
            checkpoint.write_part(self._folder / name, snapshot, rank, self._attempt)
            if rank == 0:
                checkpoint.publish(
                    self._folder / name, state, world, self._attempt, self._cfg.timeout_s
                )
                recent = {checkpoint.name(state.epoch - i) for i in range(self._recent)}
                checkpoint.keep(
                    self._folder,
                    kept(state, self._cfg.stopping, self._cfg.keep_best) | recent | {name},
                )
        except (OSError, SafetensorError) as e:
            shutil.rmtree(
                self._folder / name, ignore_errors=True
            )  # what was written of it would only fill the disk
            raise RaypipeError(
                f"A checkpoint could not be written: {e}",
                got=str(self._folder / name),
                rule="Earlier ones are kept",
                fix="Make room, or set run.dir to where there is; the same command then goes on from the newest",
            ) from e


def kept(state: LoopState, rule: StoppingConfig, count: int) -> set[str]:
    """The checkpoints of the `count` best epochs so far, and of the one the run calls best (min_delta may make it another)."""
    usable = [
        (metrics, epoch) for epoch, metrics in enumerate(state.history) if unusable(metrics) is None
    ]
    values = [(metrics[rule.metric], epoch) for metrics, epoch in usable]
    ranked = sorted(
        (v for v in values if v[0] == v[0]),
        key=lambda v: (v[0] if rule.mode == "min" else -v[0], v[1]),
    )
    return {
        checkpoint.name(epoch + 1)
        for epoch in (state.best_epoch, *(epoch for _, epoch in ranked[:count]))
    }


def newest(checkpoints: Path) -> Path | None:
    """Where to resume: the furthest checkpoint that verifies. What is torn is named and left alone."""
    found, skipped = (
        checkpoint.newest(checkpoints.glob("epoch-*")) if checkpoints.exists() else (None, [])
    )
    for problem in skipped:
        log.warning("Skipped checkpoint %s", problem)
    return found


def agreed_newest(checkpoints: Path) -> Path | None:
    """`newest` as rank 0 finds it, on every rank: two that looked for themselves might not find the same."""
    alone = not dist.is_initialized() or dist.get_rank() == 0
    found = newest(checkpoints) if alone else None
    name = _agreed(found.name if found else None)
    return checkpoints / name if name else None


def _agreed(mine: T) -> T:
    """Rank 0's."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return mine
    both = [mine]
    dist.broadcast_object_list(both, src=0)
    return both[0]
