"""The evidence of a drift check as a row of the table `drift`."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

import pyarrow as pa

from raypipe.config import to_json
from raypipe.tables.table import TableVersion
from raypipe.watch import feedback, foreign_row, severity
from raypipe.watch.detect import DriftReport, Evidence
from raypipe.watch.domains import Part
from raypipe.watch.windows import Window

# Of a row of evidence; a key of format 1 named fewer things, so its rows are not looked at and the
# check is made again.
FORMAT = 2
ROW = pa.schema(
    [
        (n, pa.string())
        for n in (
            "key",
            "name",
            "model",
            "table",
            "checked_at",
            "evidence",
            "unusual",
            "engine",
            "notes",
            "parts",
        )
    ]
    + [
        ("is_drift", pa.bool_()),
        ("p_value", pa.float64()),
        ("alpha", pa.float64()),
        ("reference_images", pa.int64()),
        ("batch_images", pa.int64()),
        ("format", pa.int32()),
        # Its number; null for a batch that was named by its version.
        ("window", pa.int64()),
        # What was looked at: the key of the window, or of the prediction. The number of a window is
        # no name: the windows of another table, or of one made again, have the same numbers.
        ("about", pa.string()),
        # Of the champion's package. Its name and number are no name: a registry may be made again.
        ("seal", pa.string()),
        # Was alpha a share of watch.horizon?
        ("promised", pa.bool_()),
        ("since", pa.int64()),
        # 0 to 1; null without an estimate, and in rows of an older raypipe. accuracy_known: on
        # validation images of the mixture of domains that the batch resembles.
        ("accuracy", pa.float64()),
        ("accuracy_low", pa.float64()),
        ("accuracy_high", pa.float64()),
        ("accuracy_known", pa.float64()),
        ("no_estimate", pa.string()),
        # Of labels that came (feedback.py); null where none did, and in rows of an older raypipe.
        ("labelled", pa.int64()),
        ("measured_as", pa.string()),
        *(
            (name, pa.float64())
            for name in (
                "measured",
                "measured_low",
                "measured_high",
                "measured_known",
                "sure",
                "sure_known",
            )
        ),
    ]
)


def now() -> datetime:
    return datetime.now(timezone.utc)


def as_row(
    key: str,
    name: str,
    model: str,
    version: TableVersion,
    found: DriftReport,
    window: Window | None = None,
    promised: bool = False,
    about: str = "",
    seal: str | None = None,
) -> dict[str, Any]:
    whole = asdict(found)
    del whole["severity"], whole["feedback"]
    as_text = {name: to_json(whole.pop(name)) for name in ("evidence", "unusual", "notes", "parts")}
    return {
        **whole,
        **as_text,
        **severity.as_row(found.severity),
        **feedback.as_row(found.feedback),
        "key": key,
        "name": name,
        "model": model,
        "table": str(version),
        "checked_at": now().isoformat(),
        "format": FORMAT,
        "window": window.number if window is not None and window.number else None,
        "since": window.since if window is not None else None,
        "promised": promised,
        "about": about,
        "seal": seal,
    }


def of_row(row: dict[str, Any]) -> DriftReport:
    """The report in a row that `as_row` wrote. Raises DataError for another row."""
    with foreign_row.refused("drift checks", "check", row):
        evidence = tuple(Evidence(**e) for e in json.loads(row["evidence"]))
        unusual = tuple((int(i), float(d)) for i, d in json.loads(row["unusual"]))
        notes = tuple(json.loads(row["notes"]))
        parts = tuple(Part(**part) for part in json.loads(row["parts"]))
        if type(row["is_drift"]) is not bool or not isinstance(row["p_value"], float):
            raise ValueError("no verdict")
    return DriftReport(
        evidence,
        row["p_value"],
        row["is_drift"],
        row["alpha"],
        row["reference_images"],
        row["batch_images"],
        unusual,
        row["engine"],
        notes,
        parts,
        severity.of_row(row),
        feedback.of_row(row),
    )
