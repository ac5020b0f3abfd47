"""What raypipe tells Azure Monitor: streams, columns and types. The one source of both sides.

A stream is a custom table of Log Analytics, and `Custom-NAME` in the data collection rule.
Terraform reads infra/terraform/modules/monitoring/streams.json, which
`python -m raypipe.cli.reference` makes from this file. A record is checked against it before it is
kept: what is sent is what the rule declares.

Types are those of a rule's stream: datetime string int long real boolean dynamic guid. JSON has
neither NaN nor infinities: they become null. A field holds at most 64 KB in Log Analytics. A longer
text is cut here, and a longer object becomes {"cut_bytes": N}.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from raypipe.errors import hidden

FILE = Path("infra/terraform/modules/monitoring/streams.json")
Type = Literal["datetime", "string", "int", "long", "real", "boolean", "dynamic", "guid"]
MOST_OF_FIELD = 60_000  # bytes; the service's limit is 64 KB
MOST_OF_RECORD = 900_000  # bytes; a request has at most 1 MB

# Each record has these. Read one record once: `summarize arg_max(TimeGenerated, *) by RecordId`.
COMMON: dict[str, Type] = {
    "TimeGenerated": "datetime",  # UTC, by the clock of the process
    "RecordId": "string",  # a record that is sent again keeps it
    "RunId": "string",  # joins the records of one piece of work
    "RunName": "string",  # run.name
    "Verb": "string",  # train, tune, retrain, drift, serve
    "Process": "string",  # one process of a verb
    "Sequence": "long",  # counts in the process: the order, whatever the clock does
    "RaypipeVersion": "string",
}

TRAINING, DRIFT = "RaypipeTraining_CL", "RaypipeDrift_CL"
SERVING, DROPPED = "RaypipeServing_CL", "RaypipeDropped_CL"

STREAMS: dict[str, dict[str, Type]] = {
    # One record an epoch, and one a report of a search.
    TRAINING: {
        **COMMON,
        "Kind": "string",  # epoch, trial, finished
        "Model": "string",  # model.name
        "Mode": "string",  # model.mode
        "Trial": "string",  # of a search
        "Epoch": "int",  # finished epochs
        "Epochs": "int",  # train.epochs
        "TrainLoss": "real",
        "ValLoss": "real",
        "Metric": "string",  # train.stopping.metric
        "MetricValue": "real",
        "ImagesPerSecond": "real",
        "Seconds": "real",  # in the training loop so far
        "Workers": "int",
        "Stopped": "string",  # why it ended before its last epoch
        "Metrics": "dynamic",  # all metrics of the epoch by name
    },
    # One record an event of a drift check and the retrain after it (watch/events.py).
    DRIFT: {
        **COMMON,
        "Kind": "string",  # check, missed, decision, retrain, promotion, heartbeat
        "Text": "string",  # the event in a line
        "Name": "string",  # of the batch that was checked
        "Model": "string",  # NAME/N of the champion
        "Drifted": "boolean",
        "PValue": "real",
        "Images": "long",
        "Accuracy": "real",  # estimated without labels
        "Act": "boolean",  # what was decided
        "State": "string",  # of a retrain
        "Facts": "dynamic",  # all facts of the event
    },
    # One record an interval, a replica and a model version.
    SERVING: {
        **COMMON,
        "Model": "string",  # NAME/N of the champion
        "Replica": "string",
        "Seconds": "real",  # of the interval
        "Requests": "long",  # answered, with errors
        "Errors": "long",  # status 500 and above
        "Refused": "long",  # status 400 to 499
        "Images": "long",  # predicted
        "LatencyMeanMs": "real",
        "LatencyP50Ms": "real",
        "LatencyP95Ms": "real",
        "LatencyP99Ms": "real",
        "LatencyMaxMs": "real",
        "Statuses": "dynamic",  # responses by status
    },
    # How many records of a stream never left a spool. The counts only grow: the largest by Spool,
    # Stream and Reason is how many were dropped.
    DROPPED: {
        **COMMON,
        "Spool": "string",
        "Stream": "string",
        "Reason": "string",  # full, too_big, refused, unreadable
        "Records": "long",  # since the spool exists
        "Bytes": "long",
        "MayHaveArrived": "long",  # of Records: a request that held them had no answer
        "First": "datetime",  # when the first was dropped
        "Last": "datetime",
    },
}


def as_json() -> str:
    """The file that Terraform reads."""
    made = {}
    for stream, columns in STREAMS.items():
        made[stream] = {"columns": [{"name": n, "type": t} for n, t in columns.items()]}
    return json.dumps(made, indent=1) + "\n"


def line(stream: str, values: Mapping[str, Any]) -> bytes:
    """A record as one line of JSON, with its line break.

    Columns without a value are left out. Raises ValueError for a stream or a column that is not
    declared and for a value of another type: those are mistakes of ours. Raises TooBig beyond
    MOST_OF_RECORD.
    """
    columns = STREAMS.get(stream)
    if columns is None:
        raise ValueError(f"No stream {stream!r}")
    record = {}
    for name, value in values.items():
        if name not in columns:
            raise ValueError(f"{stream} has no column {name!r}")
        if value is None:
            continue
        record[name] = _value(f"{stream}.{name}", columns[name], value)
    for name in ("TimeGenerated", "RecordId", "RunId"):
        if record.get(name) in (None, ""):
            raise ValueError(f"A record of {stream} has no {name}")
    text = _hidden(record)
    try:
        encoded = text.encode() + b"\n"
    except UnicodeEncodeError:
        # Half of a surrogate pair is no UTF-8. Its escape in JSON would be refused by strict
        # parsers, so it is sent as the text \\udXXX.
        encoded = _HALF.sub(_as_text, text).encode() + b"\n"
    if len(encoded) > MOST_OF_RECORD:
        raise TooBig(f"A record of {stream} has {len(encoded)} bytes")
    return encoded


_HALF = re.compile("[\ud800-\udfff]")


def _as_text(half: re.Match[str]) -> str:
    return rf"\\u{ord(half[0]):04x}"


def _hidden(record: dict[str, Any]) -> str:
    """The record as JSON without credentials."""
    text = _dumped(record)
    # Once for the whole: it looks through the environment each time (0.2 ms).
    if hidden(text) == text:
        return text
    # A credential may be a column's name, or take a quote or a part of a number with it: so each
    # text alone. A record without its time or its id would be lost.
    kept = {name: record[name] for name in ("TimeGenerated", "RecordId") if name in record}
    return _dumped({name: each_hidden(value) for name, value in record.items()} | kept)


def each_hidden(value: Any) -> Any:
    """A value of JSON whose texts and names hold no credentials, each looked at alone."""
    if isinstance(value, dict):
        return {hidden(key): each_hidden(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [each_hidden(inner) for inner in value]
    return hidden(value) if isinstance(value, str) else value


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class TooBig(Exception):
    """A record that no request can hold."""


def _value(where: str, kind: Type, value: Any) -> Any:
    """The value as JSON of this type; None for NaN and infinities."""
    value = _plain(value)
    if value is None:
        return None
    if kind == "dynamic":
        size = len(_dumped(value).encode("utf-8", "replace"))
        return value if size <= MOST_OF_FIELD else {"cut_bytes": size}
    if kind == "datetime" and isinstance(value, str):
        return value
    if kind in ("string", "guid") and isinstance(value, str):
        return _cut(value)
    if kind == "boolean" and isinstance(value, bool):
        return value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind == "real" and is_number:
        return float(value)
    if kind in ("int", "long") and is_number and float(value).is_integer():
        most = 2**31 if kind == "int" else 2**63
        if -most <= int(value) < most:
            return int(value)
    raise ValueError(f"{where} is {kind}, and no {type(value).__name__}")


def _cut(text: str) -> str:
    # Most texts are short, and a character has at most 4 bytes.
    if len(text) * 4 <= MOST_OF_FIELD:
        return text
    # Half of a secret would not be known again.
    encoded = hidden(text).encode("utf-8", "backslashreplace")
    if len(encoded) <= MOST_OF_FIELD:
        return encoded.decode()
    return encoded[: MOST_OF_FIELD - 3].decode("utf-8", "ignore") + "…"


def _plain(value: Any) -> Any:
    """The value of JSON that stands for this one, at any depth."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(inner) for inner in value]
    if isinstance(value, datetime):
        return moment(value)
    # Numbers and arrays of numpy and torch.
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value)


def moment(at: datetime) -> str:
    """A time as Log Analytics reads it: UTC, with microseconds. A naive time is taken for UTC."""
    at = at.replace(tzinfo=timezone.utc) if at.tzinfo is None else at.astimezone(timezone.utc)
    return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
