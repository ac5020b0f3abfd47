"""Where a step's time goes, how fast it computes and what memory it takes. Always on: it costs 4 µs a step, 0.1 ms an epoch.

A step is cut into phases: who ends one calls `lap(phase)`, and the time since the lap before is that phase's. So they add up to
the step, and nothing is counted twice. On CUDA a lap is an event in the stream and is read when it has long happened, so the
host never waits for it; a phase is then the stream's time, and `data_s` the time in which the device stood still for data.

Means over an epoch's training steps, of this rank, in seconds a step:
data_s           waiting for the batch
augment_s        targets, augmentation, mixing
forward_s, backward_s, optimizer_s    the model and the loss; gradients; clipping, the update and EMA
other_s          between steps: checkpoints inside an epoch, progress
step_s           all of these
communication_s  the exposed part, inside backward_s: the messages of ddp were on their way (or a slower rank's were awaited),
                 and nothing was left to compute. What hides behind the backward pass costs nothing and is not counted. DDP
                 times the first 10 steps of a run and each 100th: this is the mean of those so far. For fsdp and zero, which
                 wait layer by layer, nothing is told: a profile shows it (train.profile)
gflops_per_s     achieved by this device: 2 for each multiply-add of the model, forward and backward, recomputation not counted
mfu              the same over the device's peak at this precision (Chowdhery et al. 2022, appendix B); GPUs of flops.py only
cpu_memory_mb    resident, of this process, as the epoch ends; gpu_memory_mb: the most that tensors took so far
"""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from raypipe.train.measure.flops import peak_flops

if TYPE_CHECKING:
    from raypipe.feed.feed import Batch, Feed

TELL_EVERY_S = 1.0
UNREAD = 512  # laps on CUDA before the older half is read: some 50 steps, far more than a host runs ahead


@dataclass(frozen=True)
class Position:
    """How far a run is: finished epochs, finished steps of the next and of how many, and all ranks' rate in that epoch."""

    epoch: int
    step: int
    steps: int
    images_per_s: float


Tell = Callable[[Position], None]


class Meter:
    """One rank's. `tell` hears of the position about once a second, `profiler` of each step."""

    def __init__(self, tell: Tell | None = None, profiler: Any = None) -> None:
        self.flops = 0.0  # of one image; 0: unknown
        self.communication: Callable[[], float] | None = None
        self._tell, self._profiler = tell, profiler
        self._steps = self._images = self._done = 0
        self._told = float("-inf")
        self.on(torch.device("cpu"), torch.float32, 1)

    def on(self, device: torch.device, dtype: torch.dtype, world: int) -> None:
        """Say where the steps run, before the first."""
        self._device, self._world = device, world
        self._clock: Clock = StreamClock() if device.type == "cuda" else WallClock()
        self._peak = (
            peak_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else 0.0
        )

    def lap(self, phase: str) -> None:
        """The time since the last lap was `phase`."""
        self._clock.lap(phase)

    def steps(self, feed: Feed, epoch: int, step: int) -> Iterator[Batch]:
        """The batches of the rest of an epoch; the time between them is a step."""
        started, seen = time.perf_counter(), 0
        if self._profiler is not None and not self._done:
            self._profiler.start()
        self._clock.start()
        for batch in feed.train(epoch, step):
            self.lap("data")
            yield batch
            step, seen = step + 1, seen + len(batch.labels_B)
            self._steps, self._done, self._images = (
                self._steps + 1,
                self._done + 1,
                self._images + len(batch.labels_B),
            )
            now = time.perf_counter()
            if self._tell is not None and (now - self._told > TELL_EVERY_S or step == feed.steps):
                self._told = now
                self._tell(Position(epoch, step, feed.steps, seen * self._world / (now - started)))
            if self._profiler is not None:
                self._profiler.step()
            self.lap("other")

    def close(self) -> None:
        """Write what was profiled, if the run ended before the last of those steps."""
        if self._profiler is not None and self._done:
            self._profiler.stop()

    def epoch(self) -> dict[str, float]:
        """What the steps since the last call took; see the head of this file."""
        spent, steps, images = self._clock.read(), max(1, self._steps), self._images
        self._steps = self._images = 0
        total = sum(spent.values())
        told = {f"{phase}_s": s / steps for phase, s in spent.items()} | {"step_s": total / steps}
        if self.communication is not None:
            told["communication_s"] = self.communication()
        if self.flops and total:
            rate = self.flops * images / total
            told["gflops_per_s"] = rate / 1e9
            told |= {"mfu": rate / self._peak} if self._peak else {}
        return told | memory_mb(self._device)


class Clock(Protocol):
    """start: from now on. lap: until now. read: seconds by phase since the last reading."""

    def start(self) -> None: ...
    def lap(self, phase: str) -> None: ...
    def read(self) -> dict[str, float]: ...


class WallClock:
    """For CPUs: what was called has been done."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = defaultdict(float)
        self.start()

    def start(self) -> None:
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self._spent[phase] += now - self._last
        self._last = now

    def read(self) -> dict[str, float]:
        spent, self._spent = dict(self._spent), defaultdict(float)
        return spent


class StreamClock:
    """For CUDA: an event at each lap. They are used again, and the older ones are read as the newer ones come."""

    def __init__(self, event: Callable[..., Any] = torch.cuda.Event) -> None:
        self._spent: dict[str, float] = defaultdict(float)
        self._laps: deque[tuple[str, Any]] = deque()
        self._event, self._free = event, list[Any]()

    def start(self) -> None:
        self.lap("")

    def lap(self, phase: str) -> None:
        event = self._free.pop() if self._free else self._event(enable_timing=True)
        event.record()
        self._laps.append((phase, event))
        if len(self._laps) > UNREAD:
            self._sum_up(UNREAD // 2)

    def read(self) -> dict[str, float]:
        self._sum_up(len(self._laps) - 1)
        spent, self._spent = dict(self._spent), defaultdict(float)
        return spent

    def _sum_up(self, laps: int) -> None:
        if laps > 0:
            self._laps[laps][1].synchronize()
        for _ in range(laps):
            _, before = self._laps.popleft()
            phase, after = self._laps[0]
            if phase:  # "" begins: what was before it is nobody's
                self._spent[phase] += before.elapsed_time(after) / 1000
            self._free.append(before)


def memory_mb(device: torch.device) -> dict[str, float]:
    """Of this process, and of the device where it has memory of its own."""
    told = {}
    resident = Path("/proc/self/statm")
    if resident.exists():
        told["cpu_memory_mb"] = (
            int(resident.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
        )
    if device.type == "cuda":
        told["gpu_memory_mb"] = torch.cuda.max_memory_allocated(device) / 2**20
    return told
