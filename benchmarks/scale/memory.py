"""The memory of this process, in MB."""

from __future__ import annotations

import gc
from pathlib import Path


def peak_mb(reset: bool = False) -> float:
    """The most that was resident so far. reset: from now on; returns what is resident now."""
    if reset:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
    return _status_mb("VmRSS" if reset else "VmHWM")


def _status_mb(field: str) -> float:
    for line in Path("/proc/self/status").read_text("utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"/proc/self/status has no {field}")
