"""How fast files go to a store elsewhere: noted with each upload, for the plan of a later search.

    run.dir/mlflow/uploads.json     by place: MB a second of the last upload

A search uploads nothing before its model, so it measures no rate of its own in time. What registers
or copies a package notes one (versions.py, artifacts/bundle.py).
"""

from __future__ import annotations

import json
import logging
import math
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from raypipe.config import to_json
from raypipe.errors import one_line
from raypipe.files import write_atomic
from raypipe.registry.store import Store

log = logging.getLogger("raypipe")
FILE = "uploads.json"
# Of less, the seconds are those of answers, which are planned apart.
LEAST_MB = 1.0
LEAST_RATE = 0.001  # MB a second, to which rates are rounded
_HERE = ("localhost", "127.0.0.1", "::1")


def place_of(location: str, server: str = "") -> str:
    """A store elsewhere, without paths and passwords; "" for a disk of this machine.

    server: MLflow's address, which passes on what goes to mlflow-artifacts.
    """
    try:
        parts = urlsplit(location)
        host = parts.hostname or ""
        if parts.scheme == "mlflow-artifacts" and not host:
            host = urlsplit(server).hostname or ""
    except ValueError:
        return ""
    if parts.scheme in ("", "file") or host in _HERE:
        return ""
    return f"{parts.scheme}://{host}"


def place(store: Store) -> str:
    """Where packages of this store's runs go, as `place_of`; "" if nobody can say it."""
    try:
        experiment = store.client.get_experiment(store.experiment_id)
        return place_of(str(experiment.artifact_location), store.address)
    # An estimate ends no search: whoever needs the store says what is wrong.
    except Exception as e:
        log.info("Where MLflow keeps packages is not known: %s", one_line(e))
        return ""


def mb_of(folder: Path) -> float:
    """MB (10^6 bytes) of the files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


def note(folder: Path, place: str, mb: float, seconds: float) -> None:
    """So much went to this place in so many seconds. folder: `mlflow` of the run."""
    if not place or mb < LEAST_MB or not seconds > 0:
        return
    # What cannot be noted is guessed again.
    with suppress(OSError):
        write_atomic(
            folder / FILE,
            to_json(_noted(folder) | {place: max(LEAST_RATE, round(mb / seconds, 3))}),
        )


def mb_per_s(folder: Path, place: str) -> float | None:
    """What was noted of this place; None: nothing."""
    rate = _noted(folder).get(place)
    # Nobody has written others: by them an upload would take no time, or for ever.
    return rate if isinstance(rate, float) and LEAST_RATE <= rate < math.inf else None


def _noted(folder: Path) -> dict[str, float]:
    try:
        read = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}
