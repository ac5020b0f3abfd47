"""What one node does: CPU, memory, disk, network, GPUs, read from the kernel and from NVML.

The names are those of MLflow's system metrics, so that its pages show them in the same place.
MLflow's own monitors are not used: they count the host where a container may use a part of it,
count what a machine tells itself over loopback as network, and take a second to import on each
node.

CPU and memory are shares of what the container may use, if it may use less than the host. Disks and
network are the host's, or the container's where it has its own. GPUs are those of
CUDA_VISIBLE_DEVICES, by their numbers on the host. What cannot be read is left out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from raypipe.cluster import container

MB = 1e6
CPU = "cpu_utilization_percentage"
MEMORY = "system_memory_usage_megabytes"
SECONDS = "seconds"  # that a reading is about
COST = "cost_s"  # CPU seconds that the reading took


@dataclass(frozen=True)
class Size:
    """What a node may use. `of`: is that the container's limit, or the whole host?"""

    cpus: float
    cpu_of: str
    memory_mb: float
    memory_of: str


class NodeReader:
    """Reads this node; each reading is about the time since the one before."""

    def __init__(self) -> None:
        # Ray brings psutil, where it is not installed.
        import ray  # noqa: F401

        usable = container.usable_cpus()
        self._cpu_limit = container.cpu_limit()
        if self._cpu_limit and self._cpu_limit.most >= len(usable):
            self._cpu_limit = None
        self._memory_limit = container.memory_limit()
        if self._memory_limit and self._memory_limit.most >= container.host_memory():
            self._memory_limit = None
        self._usable = usable
        self._gpus = _Gpus()
        self._last: dict[str, float] = {}
        self._last_at = 0.0
        self.read()

    def size(self) -> Size:
        is_part = self._cpu_limit is not None or len(self._usable) < (os.cpu_count() or 1)
        return Size(
            cpus=self._cpu_limit.most if self._cpu_limit else float(len(self._usable)),
            cpu_of="container" if is_part else "host",
            memory_mb=container.usable_memory() / MB,
            memory_of="container" if self._memory_limit else "host",
        )

    def read(self) -> dict[str, float]:
        """Values by name. Counters are what came since the last reading; the first has none."""
        began, spent = time.monotonic(), time.thread_time()
        values: dict[str, float] = {SECONDS: began - self._last_at}
        now = self._counters()
        moved = {name: now[name] - self._last[name] for name in now if name in self._last}
        self._last, self._last_at = now, began
        busy, possible = moved.pop("busy_s", None), moved.pop("possible_s", 0.0)
        if busy is not None and possible > 0:
            values[CPU] = 100 * min(1.0, max(0.0, busy / possible))
        # A network card that left takes its count with it.
        values |= {name: max(0.0, count) for name, count in moved.items()}
        for part in (self._memory, _disk, self._gpus.read):
            # Whatever this node cannot tell is left out: a training must not fail by it.
            with suppress(Exception):
                values |= part()
        values[COST] = time.thread_time() - spent
        return values

    def _counters(self) -> dict[str, float]:
        """What only grows: CPU seconds, bytes that moved."""
        found: dict[str, float] = {}
        parts: list[Callable[[], dict[str, float]]] = [self._cpu, _moved_by_network, _moved_by_disk]
        for part in parts:
            with suppress(Exception):
                found |= part()
        return found

    def _cpu(self) -> dict[str, float]:
        if self._cpu_limit is not None:
            used_s = container.cpu_used_s(self._cpu_limit.group)
            if used_s is None:
                return {}
            return {"busy_s": used_s, "possible_s": time.monotonic() * self._cpu_limit.most}
        import psutil  # type: ignore[import-untyped]

        possible = idle = 0.0
        for number, times in enumerate(psutil.cpu_times(percpu=True)):
            if number in self._usable:
                # Linux counts guests as user time already.
                possible += (
                    sum(times) - getattr(times, "guest", 0) - getattr(times, "guest_nice", 0)
                )
                idle += times.idle + getattr(times, "iowait", 0)
        return {"busy_s": possible - idle, "possible_s": possible}

    def _memory(self) -> dict[str, float]:
        if self._memory_limit is not None:
            used = container.memory_used(self._memory_limit.group)
            if used is None:
                return {}
            most = self._memory_limit.most
        else:
            import psutil

            memory = psutil.virtual_memory()
            used, most = memory.total - memory.available, memory.total
        return {MEMORY: used / MB, "system_memory_usage_percentage": 100 * used / most}


def _disk() -> dict[str, float]:
    """Room on the root file system, as MLflow has it."""
    import psutil

    usage = psutil.disk_usage(os.sep)
    return {
        "disk_usage_percentage": usage.percent,
        "disk_usage_megabytes": usage.used / MB,
        "disk_available_megabytes": usage.free / MB,
    }


def _moved_by_network() -> dict[str, float]:
    """Without loopback, over which the processes of one machine talk."""
    import psutil

    cards = psutil.net_io_counters(pernic=True)
    outside = [counts for name, counts in cards.items() if not name.startswith("lo")]
    return {
        "network_receive_megabytes": sum(counts.bytes_recv for counts in outside) / MB,
        "network_transmit_megabytes": sum(counts.bytes_sent for counts in outside) / MB,
    }


def _moved_by_disk() -> dict[str, float]:
    import psutil

    counts = psutil.disk_io_counters()
    if counts is None:
        return {}
    return {
        "disk_read_megabytes": counts.read_bytes / MB,
        "disk_write_megabytes": counts.write_bytes / MB,
    }


class _Gpus:
    """The GPUs of this node as NVML counts them; none without a driver or nvidia-ml-py."""

    def __init__(self) -> None:
        self._handles: dict[int, Any] = {}
        try:
            import pynvml  # type: ignore[import-untyped]

            pynvml.nvmlInit()
            self._nvml = pynvml
            for number in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(number)
                if is_visible(number, str(pynvml.nvmlDeviceGetUUID(handle))):
                    self._handles[number] = handle
        except Exception:
            self._handles = {}

    def read(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for number, handle in self._handles.items():
            for part in (self._utilization, self._memory, self._power):
                # A part of a GPU (MIG) tells its memory alone.
                with suppress(Exception):
                    values |= {f"gpu_{number}_{name}": v for name, v in part(handle).items()}
        return values

    def _utilization(self, handle: Any) -> dict[str, float]:
        rates = self._nvml.nvmlDeviceGetUtilizationRates(handle)
        return {"utilization_percentage": float(rates.gpu)}

    def _memory(self, handle: Any) -> dict[str, float]:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        return {
            "memory_usage_percentage": 100 * memory.used / memory.total,
            "memory_usage_megabytes": memory.used / MB,
        }

    def _power(self, handle: Any) -> dict[str, float]:
        # Milliwatts.
        power = self._nvml.nvmlDeviceGetPowerUsage(handle)
        most = self._nvml.nvmlDeviceGetEnforcedPowerLimit(handle)
        return {"power_usage_watts": power / 1000, "power_usage_percentage": 100 * power / most}


def is_visible(number: int, uuid: str, visible: str | None = None) -> bool:
    """Does CUDA_VISIBLE_DEVICES (or `visible`) name this GPU, by its number or its UUID?

    Without the variable, all GPUs are visible.
    """
    if visible is None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return True
    names = [name.strip() for name in visible.split(",")]
    return str(number) in names or any(name and uuid.startswith(name) for name in names)
