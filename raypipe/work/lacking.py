"""What the registered model of a search lacks because time was short, for the result of the search.

The version's package says so, and not the clock of this call. A rerun ends with the version that an
earlier call registered, and would plan another end than that call did. And where a host becomes
slow, shifted copies are ended for which time was planned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raypipe.config import RunConfig
from raypipe.registry.package import seal_of
from raypipe.registry.runs import KEY
from raypipe.registry.tracking import LEAST_COPIED
from raypipe.registry.versions import ModelVersion
from raypipe.search.ledger import Ledger
from raypipe.train import shifted


def note(version: ModelVersion, run: RunConfig, ledger: Ledger) -> None:
    """Add what this version lacks to the notes. run: its folder has the package."""
    folder = run.path / "packages" / version.tags.get(KEY, "")
    ledger.notes += lacks(_info(folder, version.seal), ledger)


def lacks(info: Mapping[str, Any], ledger: Ledger) -> list[str]:
    """info: package.json; {}: nothing is known, so nothing is said."""
    found = []
    most = info.get("config", {}).get("registry", {}).get("judged_images")
    largest = max(ledger.forecast.splits, default=0)
    # Without a budget the user has set it, and the model's card says it.
    if ledger.budget_s is not None and most is not None and most < largest:
        judged = f"At most {most:,} images of a split judge the model"
        found.append(f"{judged} (the largest has {largest:,})")
    severity = info.get("severity", {})
    why, copied = severity.get("why_not", ""), severity.get("copied", 0)
    # Any other reason is none of time: too few images, or a task that has no such estimate.
    is_cut = why == shifted.NO_TIME or 0 < copied < LEAST_COPIED
    forecast = ledger.forecast
    if why and is_cut and (forecast.shifted or forecast.shifted_again):
        found.append(f"No estimate of accuracy in drift checks: {why}")
    return found


def _info(folder: Path, seal: str | None) -> dict[str, Any]:
    """package.json of the package with this seal; {} if the folder has another one, or none.

    Another registry may have got a package of the same model since, built in the same folder.
    """
    try:
        if seal_of(folder) != seal:
            return {}
        info: dict[str, Any] = json.loads((folder / "package.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return info
