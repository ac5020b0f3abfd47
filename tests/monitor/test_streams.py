"""The schema: one source, types of Log Analytics, and values that JSON does not have."""

from __future__ import annotations

import json
import math
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypipe.monitor import streams

BASE: dict[str, Any] = {
    "TimeGenerated": datetime(2026, 1, 2, tzinfo=timezone.utc),
    "RecordId": "a",
    "RunId": "b",
}
# https://learn.microsoft.com/azure/azure-monitor/logs/create-custom-table: reserved or refused.
RESERVED = {"_resourceid", "id", "_subscriptionid", "tenantid", "type", "uniqueid", "title"}


def made(stream: str = streams.TRAINING, **values: Any) -> dict[str, Any]:
    line = streams.line(stream, BASE | values)
    assert line.endswith(b"\n") and line.count(b"\n") == 1

    def no(name: str) -> None:
        raise AssertionError(name)

    return dict(json.loads(line, parse_constant=no))


def test_terraforms_file_is_the_schema() -> None:
    read = json.loads(streams.FILE.read_text())
    assert {s: {c["name"]: c["type"] for c in t["columns"]} for s, t in read.items()} == (
        streams.STREAMS
    )


@pytest.mark.parametrize("stream", streams.STREAMS)
def test_names_and_types_are_those_of_log_analytics(stream: str) -> None:
    kinds = {"datetime", "string", "int", "long", "real", "boolean", "dynamic", "guid"}
    assert stream.endswith("_CL") and set(streams.STREAMS[stream].values()) <= kinds
    assert streams.STREAMS[stream]["TimeGenerated"] == "datetime"
    for name in streams.STREAMS[stream]:
        assert re.fullmatch(r"[A-Za-z]\w{0,44}", name) and name.lower() not in RESERVED


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_json_has_no_nan(value: float) -> None:
    record = made(ValLoss=value, Metrics={"a": value, "b": [value, 1.5]})
    assert record.get("ValLoss") is None
    assert record["Metrics"] == {"a": None, "b": [None, 1.5]}


def test_values_become_those_of_the_column() -> None:
    record = made(Epoch=np.int64(3), ValLoss=2, Model="ü\ud800\n", Metrics={1: np.float32(0.5)})
    assert record["Epoch"] == 3 and record["ValLoss"] == 2.0
    assert record["Metrics"] == {"1": 0.5} and record["Model"].startswith("ü")
    assert record["TimeGenerated"] == "2026-01-02T00:00:00.000000Z"


@pytest.mark.parametrize(
    ("stream", "values", "said"),
    [
        (streams.TRAINING, {"Epok": 1}, "no column 'Epok'"),
        ("Nowhere_CL", {}, "No stream 'Nowhere_CL'"),
        (streams.TRAINING, {"Epoch": "3"}, "Epoch is int"),
        (streams.TRAINING, {"Epoch": True}, "Epoch is int"),
        (streams.TRAINING, {"Epoch": 2**31}, "Epoch is int"),
        (streams.TRAINING, {"ValLoss": "low"}, "ValLoss is real"),
        (streams.DRIFT, {"Drifted": 1}, "Drifted is boolean"),
        (streams.TRAINING, {"RunId": ""}, "has no RunId"),
    ],
)
def test_a_record_that_is_not_declared_is_our_mistake(
    stream: str, values: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        streams.line(stream, BASE | values)


def test_what_no_field_holds_is_cut() -> None:
    record = made(Stopped="ä" * 10**6, Metrics={"a": "x" * 10**6})
    assert len(record["Stopped"].encode()) <= 64_000 and record["Stopped"].endswith("…")
    assert set(record["Metrics"]) == {"cut_bytes"}


def test_a_record_over_a_request_is_too_big(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MOST_OF_RECORD", 1000)
    with pytest.raises(streams.TooBig, match="bytes"):
        made(Stopped="x" * 2000)


def test_no_secret_is_sent() -> None:
    assert "hunter2hunter2" not in str(made(Stopped="https://u:hunter2hunter2@host/x"))


@pytest.mark.parametrize("secret", ["TrainLoss", "RecordId", "2026-01-02", "TimeGenerated"])
def test_a_secret_that_is_like_a_column_or_a_time_costs_no_record(
    secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DB_PASSWORD", secret)
    record = made(TrainLoss=0.5, Stopped=f"with {secret}")
    assert record["TrainLoss"] == 0.5 and record["RecordId"] == "a"
    assert record["TimeGenerated"].startswith("2026-01-02T") and secret not in record["Stopped"]


def test_half_of_a_pair_is_text_that_strict_parsers_take() -> None:
    record = made(Stopped="a\ud800b\\\udfff", Metrics={"\udc80": "\0"})
    assert record["Stopped"] == r"a\ud800b\\udfff" and record["Metrics"] == {r"\udc80": "\0"}
    json.dumps(record, ensure_ascii=False).encode()


def test_arrays_of_numpy_are_lists() -> None:
    values = {"a": np.arange(3), "b": np.array([[1.5, np.nan]]), "c": np.bool_(True)}
    assert made(Metrics=values)["Metrics"] == {"a": [0, 1, 2], "b": [[1.5, None]], "c": True}


def test_the_queries_of_the_docs_name_columns_that_exist() -> None:
    page = Path("docs/watching.md").read_text(encoding="utf-8")
    queries = re.findall(r"```kusto\n\s*(\w+)(.*?)```", page, re.DOTALL)
    assert len(queries) == 2
    for stream, query in queries:
        for name in re.findall(r"[A-Z]\w+", query):
            assert name in streams.STREAMS[stream], name
