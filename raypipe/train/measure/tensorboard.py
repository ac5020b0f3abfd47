"""TensorBoard: writes each epoch's metrics as event files into the run's folder.

tensorboardX writes them; Ray Tune brings it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raypipe.train.loop import LoopState, Report


@contextmanager
def recorded(folder: Path, report: Report) -> Iterator[Report]:
    """A `report` that also writes event files into `folder`.

    A TensorBoard step is an epoch. quality/… holds the losses and scores, cost/… times and memory.
    Epochs that are trained again after a kill replace the earlier ones.
    """
    from tensorboardX import SummaryWriter

    writers: list[SummaryWriter] = []

    def write_and_report(metrics: dict[str, float], state: LoopState) -> None:
        if not writers:
            # Made with the first epoch: purge_step hides this and later epochs of an earlier run.
            writers.append(SummaryWriter(str(folder), purge_step=state.epoch))
        writer = writers[0]
        for name, value in metrics.items():
            group = "quality" if name.startswith(("val_", "train_")) else "cost"
            writer.add_scalar(f"{group}/{name}", value, state.epoch)
        writer.flush()
        report(metrics, state)

    try:
        yield write_and_report
    finally:
        for writer in writers:
            writer.close()
