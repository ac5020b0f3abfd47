"""torch's profiler over a few steps, on request: `train.profile=step:10-13` writes a Chrome trace a rank into the run's folder.

Open it at ui.perfetto.dev. The step before the first is recorded and thrown away, for recording starts slowly; the others run
at full speed. A step of EfficientNet-Lite0 is 4 MB of trace.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule


def steps_of(text: str) -> tuple[int, int]:
    """The first and the last step, both included, that `step:FIRST-LAST` says. ValueError for anything else."""
    found = re.fullmatch(r"step:(\d+)-(\d+)", text)
    if found is None or int(found[1]) > int(found[2]):
        raise ValueError(
            "a profile is step:FIRST-LAST, as in step:10-13. The first step this process trains is 0"
        )
    return int(found[1]), int(found[2])


def profiler(text: str, folder: Path, rank: int) -> Any:
    """A profiler, not started, that writes FOLDER/steps-FIRST-LAST-rank-RANK.json after the last of its steps."""
    first, last = steps_of(text)
    skipped = max(0, first - 1)

    def write(recorded: profile) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(folder / f"steps-{first}-{last}-rank-{rank}.json"))

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    when = schedule(wait=skipped, warmup=first - skipped, active=last - first + 1, repeat=1)
    return profile(activities=activities, schedule=when, on_trace_ready=write)
