"""TensorBoard: writes each epoch's metrics as event files into the run's folder.

tensorboardX writes them; Ray Tune brings it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar


class Counted(Protocol):
    """A state of training that knows how many epochs are finished, as LoopState does."""

    epoch: int


State = TypeVar("State", bound=Counted)
# Called after each epoch with its metrics. The loop owns the state's type, and imports this room.
Report = Callable[[dict[str, float], State], None]


@contextmanager
def recorded(folder: Path, report: Report[State]) -> Iterator[Report[State]]:
    """A `report` that also writes event files into `folder`.

    A TensorBoard step is an epoch. quality/… holds the losses and scores, cost/… times and memory.
    Epochs that are trained again after a kill replace the earlier ones.
    """
    from tensorboardX import SummaryWriter

    writers: list[SummaryWriter] = []

    def write_and_report(metrics: dict[str, float], state: State) -> None:
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
