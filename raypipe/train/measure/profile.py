"""torch's profiler over a few steps.

`train.profile=step:10-13` writes one Chrome trace per rank into the run's folder. Open a trace at
ui.perfetto.dev. The step before the first is recorded and thrown away, because recording starts
slowly; the other steps run at full speed. A step of EfficientNet-Lite0 is 4 MB of trace.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule


def steps_of(text: str) -> tuple[int, int]:
    """The first and the last step of `step:FIRST-LAST`, both included.

    Raises ValueError for any other text.
    """
    match = re.fullmatch(r"step:(\d+)-(\d+)", text)
    if match is None or int(match[1]) > int(match[2]):
        raise ValueError(
            "a profile is step:FIRST-LAST, as in step:10-13. "
            "The first step this process trains is 0"
        )
    return int(match[1]), int(match[2])


def profiler(text: str, folder: Path, rank: int) -> Any:
    """A profiler, not started. After its last step it writes a trace into `folder`."""
    # The step before the first one is the profiler's warm-up.
    first, last = steps_of(text)
    skipped = max(0, first - 1)

    def write(recorded: profile) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(folder / f"steps-{first}-{last}-rank-{rank}.json"))

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    # Step 0 has no step before it, and then there is no warm-up.
    when = schedule(wait=skipped, warmup=first - skipped, active=last - first + 1, repeat=1)
    return profile(activities=activities, schedule=when, on_trace_ready=write)
