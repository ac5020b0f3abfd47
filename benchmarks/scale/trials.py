"""Claim: with 1,000 trials, raypipe's share of a report is a few milliseconds, and what they keep
on disk does not grow with the trials that ended.

ASHA and PASHA, 27 epochs, eight trials at a time, as simulated.py says. PASHA's curves never cross,
so that its cap stays low and it compares the most pairs. ms_per_report is what raypipe's scheduler,
monitor and stopping rule take for one report, the deletion of checkpoints included, Tune's own work
not. most_gb and end_gb: the checkpoints of all trials, if they were of ViT-L; at the end, before
result.json is written. kept_gb: after it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.scale.simulated import Search, stored_gb


def measure(temporary: str, sizes: dict[str, int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, noise in (("asha", 0.002), ("pasha", 0.0)):
        search = Search(Path(temporary) / name, sizes["trials"], name, noise)
        seconds = search.run()
        found[name] = {
            "trials": sizes["trials"],
            "reports": search.reports,
            "seconds": seconds,
            "ms_per_report": seconds / search.reports * 1000,
            "most_gb": search.most_gb,
            "end_gb": stored_gb(search.folder),
        }
        search.clear(search.ranked())
        found[name]["kept_gb"] = stored_gb(search.folder)
    return found
