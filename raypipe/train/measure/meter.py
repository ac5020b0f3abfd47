"""Where a step's time goes, how fast it computes and what memory it takes.

The meter is always on: it costs 4 µs a step and 0.1 ms an epoch.

A step is cut into phases. Call `lap(phase)` when a phase ends: the time since the last lap counts
to it. So the phases add up to the step, and nothing is counted twice. On CUDA a lap is an event in
the stream. It is read long after it has happened, so the host never waits for it; a phase is then
the stream's time, and `data_s` the time in which the device waited for data.

`Meter.epoch` returns means over an epoch's training steps, of this rank, in seconds a step:
data_s           waiting for the batch
augment_s        targets, augmentation, mixing
forward_s, backward_s, optimizer_s    the model and the loss; gradients; clipping, the update and
                                      EMA
other_s          between steps: checkpoints inside an epoch, progress
step_s           the sum of these
communication_s  the exposed part of ddp's messages, inside backward_s: the rank waited for them, or
                 for a slower rank, with nothing left to compute. What overlaps with the backward
                 pass costs nothing and is not counted. DDP times the first 10 steps of a run and
                 each 100th; this is the mean of those so far. fsdp and zero wait layer by layer and
                 have no such number; a profile shows it (train.profile)
gflops_per_s     achieved by this device: 2 for each multiply-add of the model, forward and
                 backward, without recomputation
mfu              gflops_per_s over the device's peak at this precision (Chowdhery et al. 2022,
                 appendix B); GPUs of flops.py
cpu_memory_mb    resident memory of this process at the epoch's end
gpu_memory_mb    the most that tensors took so far
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

REPORT_EVERY_S = 1.0
# Unread laps on CUDA before the older half is read: some 50 steps, far more than a host runs ahead.
UNREAD = 512


@dataclass(frozen=True)
class Position:
    """How far a run is."""

    epoch: int
    """Finished epochs."""
    step: int
    """Finished steps of the next epoch."""
    steps: int
    """All steps of that epoch."""
    images_per_s: float
    """Rate of all ranks in that epoch."""


ReportPosition = Callable[[Position], None]


class Meter:
    """Measures one rank, reports its position about once a second, and steps the profiler."""

    def __init__(self, report_position: ReportPosition | None = None, profiler: Any = None) -> None:
        self.flops = 0.0  # of one image; 0: unknown
        self.communication: Callable[[], float] | None = None  # set by ddp
        self._report_position = report_position
        self._profiler = profiler
        self._reported_at = float("-inf")
        # Steps and images since the last call of `epoch`.
        self._steps = 0
        self._images = 0
        self._has_stepped = False
        self.on(torch.device("cpu"), torch.float32, 1)

    def on(self, device: torch.device, dtype: torch.dtype, world: int) -> None:
        """Say where the steps run. Call it before the first one."""
        self._device = device
        self._world = world
        if device.type == "cuda":
            self._clock: Clock = StreamClock()
            self._peak_flops = peak_flops(torch.cuda.get_device_name(device), dtype)
        else:
            self._clock = WallClock()
            self._peak_flops = 0.0

    def lap(self, phase: str) -> None:
        """`phase` ends now."""
        self._clock.lap(phase)

    def steps(self, feed: Feed, epoch: int, step: int) -> Iterator[Batch]:
        """The batches of the rest of an epoch; the time between two of them is a step."""
        started = time.perf_counter()
        seen = 0
        # One profiler runs through all epochs and stages.
        if self._profiler is not None and not self._has_stepped:
            self._profiler.start()
        self._clock.start()
        for batch in feed.train(epoch, step):
            self.lap("data")
            yield batch
            # The step is done.
            images = len(batch.labels_B)
            step += 1
            seen += images
            self._steps += 1
            self._images += images
            self._has_stepped = True
            # Report about once a second, and always at the epoch's end.
            now = time.perf_counter()
            due = now - self._reported_at > REPORT_EVERY_S or step == feed.steps
            if self._report_position is not None and due:
                self._reported_at = now
                rate = seen * self._world / (now - started)
                self._report_position(Position(epoch, step, feed.steps, rate))
            if self._profiler is not None:
                self._profiler.step()
            self.lap("other")

    def close(self) -> None:
        """Write the profile, if the run ended before the last step that was asked for."""
        if self._profiler is not None and self._has_stepped:
            self._profiler.stop()

    def epoch(self) -> dict[str, float]:
        """What the steps since the last call took; the top of this file lists the names."""
        # An epoch that was resumed at its end has no step.
        spent = self._clock.read()
        steps = max(1, self._steps)
        images = self._images
        self._steps = 0
        self._images = 0
        # All phases together are the time of the steps.
        total_s = sum(spent.values())
        metrics = {f"{phase}_s": seconds / steps for phase, seconds in spent.items()}
        metrics["step_s"] = total_s / steps
        if self.communication is not None:
            metrics["communication_s"] = self.communication()
        # Where FLOPs are unknown, there are no rates; where the peak is unknown, there is no mfu.
        if self.flops and total_s:
            rate = self.flops * images / total_s
            metrics["gflops_per_s"] = rate / 1e9
            if self._peak_flops:
                metrics["mfu"] = rate / self._peak_flops
        return metrics | memory_mb(self._device)


class Clock(Protocol):
    """start: the first phase begins. lap: a phase ends. read: seconds by phase since last read."""

    def start(self) -> None: ...
    def lap(self, phase: str) -> None: ...
    def read(self) -> dict[str, float]: ...


class WallClock:
    """For CPUs: a call that returned has done its work."""

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
        spent = dict(self._spent)
        self._spent = defaultdict(float)
        return spent


class StreamClock:
    """For CUDA: records an event at each lap.

    It reads the older events when newer ones come, and uses them again.
    """

    def __init__(self, event: Callable[..., Any] = torch.cuda.Event) -> None:
        self._spent: dict[str, float] = defaultdict(float)
        self._laps: deque[tuple[str, Any]] = deque()
        self._event = event
        self._free: list[Any] = []

    def start(self) -> None:
        # The empty phase: the time before it counts to no phase.
        self.lap("")

    def lap(self, phase: str) -> None:
        # Events that were read are used again.
        event = self._free.pop() if self._free else self._event(enable_timing=True)
        event.record()
        self._laps.append((phase, event))
        if len(self._laps) > UNREAD:
            self._add_up(UNREAD // 2)

    def read(self) -> dict[str, float]:
        self._add_up(len(self._laps) - 1)
        spent = dict(self._spent)
        self._spent = defaultdict(float)
        return spent

    def _add_up(self, laps: int) -> None:
        """Read the oldest `laps` laps, and free their events."""
        # The newest of them: the older ones have then happened too.
        if laps > 0:
            _, newest = self._laps[laps]
            newest.synchronize()
        for _ in range(laps):
            _, before = self._laps.popleft()
            phase, after = self._laps[0]
            # Milliseconds between two events, in the device's own clock.
            if phase:
                self._spent[phase] += before.elapsed_time(after) / 1000
            self._free.append(before)


def memory_mb(device: torch.device) -> dict[str, float]:
    """Memory of this process, and of the device if it has memory of its own."""
    metrics = {}
    statm = Path("/proc/self/statm")
    if statm.exists():
        resident_pages = int(statm.read_text().split()[1])
        metrics["cpu_memory_mb"] = resident_pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    if device.type == "cuda":
        metrics["gpu_memory_mb"] = torch.cuda.max_memory_allocated(device) / 2**20
    return metrics
