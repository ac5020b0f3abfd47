"""TensorBoard: each epoch's metrics as event files in the run's folder, written by tensorboardX, which Ray Tune brings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raypipe.train.loop import LoopState, Report


@contextmanager
def recorded(folder: Path, report: Report) -> Iterator[Report]:
    """`report`, and the event files in `folder` too: quality/… is what was learned, cost/… what it took; a step is an epoch.

    Epochs that are trained again after a kill replace those of the run before it.
    """
    from tensorboardX import SummaryWriter

    writers: list[SummaryWriter] = []

    def both(metrics: dict[str, float], state: LoopState) -> None:
        if not writers:
            writers.append(SummaryWriter(str(folder), purge_step=state.epoch))
        for name, value in metrics.items():
            group = "quality" if name.startswith(("val_", "train_")) else "cost"
            writers[0].add_scalar(f"{group}/{name}", value, state.epoch)
        writers[0].flush()
        report(metrics, state)

    try:
        yield both
    finally:
        for writer in writers:
            writer.close()
