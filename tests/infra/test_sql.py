"""The queries of infra/databricks/sql on tables made by hand: what no story leaves, and worse.

raypipe's own Python is the measure: `watch.history` says which checks count, `serve.links` which
rows a prediction has. The tables of real checks are in test_sql_story.py.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from raypipe.config import RunConfig
from raypipe.serve import batch
from raypipe.serve.predicted_rows import SCHEMA as PREDICTED
from raypipe.tables.table import append
from raypipe.watch import calls, decisions, evidence_row, feedback, history, window_log
from raypipe.watch.settings import WatchConfig
from tests.infra import delta_views
from tests.infra.delta_views import SQL, rows

pytestmark = pytest.mark.spark
BUNDLE = SQL.parent
NOW = datetime.now(UTC)
View = Callable[..., str]

# The columns of Databricks' system tables as it documents them (admin/system-tables).
USAGE = """record_id STRING, account_id STRING, workspace_id STRING, sku_name STRING, cloud STRING,
  usage_start_time TIMESTAMP, usage_end_time TIMESTAMP, usage_date DATE, custom_tags
  MAP<STRING, STRING>, usage_unit STRING, usage_quantity DECIMAL(38, 18), usage_metadata
  STRUCT<cluster_id: STRING, job_id: STRING, warehouse_id: STRING, job_run_id: STRING,
  endpoint_name: STRING>, identity_metadata STRUCT<run_as: STRING, owned_by: STRING,
  created_by: STRING>, record_type STRING, ingestion_date DATE, billing_origin_product
  STRING, product_features STRUCT<is_serverless: BOOLEAN>, usage_type STRING"""
PRICES = """price_start_time TIMESTAMP, price_end_time TIMESTAMP, account_id STRING,
  sku_name STRING,
  cloud STRING, currency_code STRING, usage_unit STRING, pricing STRUCT<default: DECIMAL(38,
  18), promotional: STRUCT<default: DECIMAL(38, 18)>, effective_list: STRUCT<default:
  DECIMAL(38, 18)>>"""
AUDIT = """account_id STRING, workspace_id STRING, version STRING, event_time TIMESTAMP, event_date
  DATE, source_ip_address STRING, user_agent STRING, session_id STRING, user_identity
  STRUCT<email: STRING, subject_name: STRING>, service_name STRING, action_name STRING,
  request_id STRING, request_params MAP<STRING, STRING>, response STRUCT<status_code: INT,
  error_message: STRING, result: STRING>, audit_level STRING, event_id STRING"""


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    # Not UTC on purpose: no query may depend on the session's zone.
    with delta_views.session(tmp_path_factory.mktemp("warehouse"), "Pacific/Auckland") as session:
        yield session


@pytest.fixture
def view(spark: Any, tmp_path: Path) -> View:
    """`view(rows, schema)` -> the name of a view of them."""

    def made(given: list[dict[str, Any]], schema: pa.Schema, name: str = "") -> str:
        name = name or f"v{uuid.uuid4().hex[:8]}"
        file = tmp_path / f"{uuid.uuid4().hex}.parquet"
        pq.write_table(pa.Table.from_pylist(given, schema), file)
        spark.read.parquet(str(file)).createOrReplaceTempView(f"`{name}`")
        return name

    return made


def checked(key: str, hours_ago: float = 1.0, **more: Any) -> dict[str, Any]:
    at = (NOW - timedelta(hours=hours_ago)).isoformat()
    row = {"key": key, "name": "batch", "model": "cells/1", "table": "/t@v1", "checked_at": at}
    row |= {"evidence": "[]", "is_drift": False, "p_value": 0.5, "alpha": 0.01, "about": f"a{key}"}
    return row | {"batch_images": 100, "reference_images": 200, "engine": "exact"} | more


def fires(spark: Any, name: str, hours: int = 26) -> bool:
    """Does alerts.yml's condition hold on the result of its query?"""
    [row] = rows(spark, "drift_alert", {"drift": name, "hours": hours})
    file = yaml.safe_load((BUNDLE / "resources" / "alerts.yml").read_text("utf-8"))
    rule = file["resources"]["alerts"]["drift"]["evaluation"]
    assert rule["comparison_operator"] == "GREATER_THAN"
    return bool(row[rule["source"]["name"]] > rule["threshold"]["value"]["double_value"])


def test_the_alert_fires_on_drift_that_is_new(spark: Any, view: View) -> None:
    def of(*given: dict[str, Any]) -> bool:
        return fires(spark, view(list(given), evidence_row.ROW))

    assert not of(), "an empty table"
    assert not of(checked("1"))
    assert of(checked("1", is_drift=True))
    assert of(checked("1"), checked("2", is_drift=True)), "one of two nights"
    assert not of(checked("1", 40, is_drift=True)), "two days ago"
    assert not of(checked("1", 25, is_drift=None)), "nobody said drift"
    # The same images again, with other settings: the later answer counts.
    assert not of(checked("1", 3, is_drift=True, about="w"), checked("2", 1, about="w"))
    assert of(checked("1", 3, about="w"), checked("2", 1, is_drift=True, about="w"))
    # Of another model, or under another name, it is another question.
    assert of(checked("1", 3, is_drift=True, about="w"), checked("2", about="w", model="cells/2"))
    assert of(checked("1", 3, is_drift=True, about="w"), checked("2", about="w", name="other"))
    # A clock that goes wrong: a time to come is new, a text that is no time is old.
    assert of(checked("1", -9999, is_drift=True))
    bad = checked("1", checked_at="yesterday", is_drift=True)
    assert not of(bad) and of(bad, checked("2", is_drift=True))
    # Other zones are other texts of the same time.
    at = (NOW - timedelta(hours=25.5)).astimezone().isoformat().replace("+00:00", "Z")
    assert of(checked("1", checked_at=at, is_drift=True))
    at = (NOW - timedelta(hours=30)).astimezone(ZoneInfo("Pacific/Kiritimati")).isoformat()
    assert not of(checked("1", checked_at=at, is_drift=True))


def test_the_alert_of_the_bundle_is_the_query_on_the_stage_s_table(spark: Any, view: View) -> None:
    """The text of alerts.yml, filled in as the CLI fills it, with a name that needs backticks."""
    file = yaml.safe_load((BUNDLE / "resources" / "alerts.yml").read_text("utf-8"))
    text = file["resources"]["alerts"]["drift"]["query_text"]
    place = re.search(r"IDENTIFIER\('(.*)'\)", text)
    assert place is not None
    assert place[1] == "`${var.catalog}`.`${resources.schemas.solar.name}`.drift"
    # Spark here has one catalog; a view has no other part.
    name = view([checked("1", is_drift=True, name='it\'s "here"')], evidence_row.ROW, "odd-name")
    [row] = spark.sql(text.replace(place[1], f"`{name}`")).collect()
    assert (row["drifted"], row["what"]) == (1, 'it\'s "here" of cells/1')


def test_checks_are_those_that_count(spark: Any, tmp_path: Path) -> None:
    """Against watch.history.checks, which a policy looks at, on a Delta table."""
    run = RunConfig(dir=str(tmp_path / "run"))
    nights = [
        checked("1", 9, about=None, window=None),
        checked("2", 8, about=None, window=None, is_drift=True),  # the same version again
        checked("3", 7, about=None, window=1, table="/t@v2@v3"),
        checked("4", 6, about=None, window=1, table="/t@v2@v4", is_drift=True),
        checked("5", 5, about="", window=2),
        checked("6", 4, about="x", window=2, is_drift=True),
        checked("7", 3, about="x", window=3),
        checked("8", 2, about="y", model="cells/2"),
        checked("9", 2, about="y", name="other", is_drift=True),
    ]
    for row in nights:
        append(str(run.path / "drift"), pa.Table.from_pylist([row], evidence_row.ROW), "check")
    name = delta_views.view(spark, run.path / "drift", tmp_path)
    found = rows(spark, "drift", {"drift": name})
    for model in ("cells/1", "cells/2"):
        wanted = history.checks(run, WatchConfig(name="batch"), model, None)
        mine = [r for r in reversed(found) if (r["name"], r["model"]) == ("batch", model)]
        assert [r["is_drift"] for r in mine] == [one.is_drift for one in wanted]
    assert [r["key"] for r in found] == ["8", "9", "7", "5", "4", "2"]


def test_what_is_not_known_is_null_and_never_a_number(spark: Any, view: View) -> None:
    given = [
        checked("1", 1, p_value=None, is_drift=None, alpha=None),
        checked("2", 2, accuracy=0.8, accuracy_low=0.7, accuracy_high=0.9, accuracy_known=0.95),
        checked("3", 3, accuracy=float("nan"), accuracy_low=0.1, accuracy_high=1.0),
        checked("4", 4, no_estimate="too far away", table='/it\'s "a" tâble@v1'),
    ]
    found = {r["key"]: r for r in rows(spark, "drift", {"drift": view(given, evidence_row.ROW)})}
    assert (found["1"]["p_value"], found["1"]["is_drift"], found["1"]["loss"]) == (
        None,
        False,
        None,
    )
    assert found["2"]["loss"] == pytest.approx(0.15) and found["2"]["no_estimate"] is None
    for key, why in (("1", "older raypipe"), ("3", "older raypipe"), ("4", "too far away")):
        assert found[key]["accuracy"] is None and why in found[key]["no_estimate"]
    assert found["4"]["checked_table"] == '/it\'s "a" tâble@v1'


def test_what_labels_say_is_shown_as_the_code_reads_it(spark: Any, view: View) -> None:
    """Beside the estimate: measured accuracy, or the error of a number; nothing without labels."""
    share = {"labelled": 40, "measured_as": feedback.ACCURACY}
    error = {"labelled": 40, "measured_as": feedback.ERROR}
    given = [
        checked("1", 1, **share, measured=0.6, measured_low=0.5, measured_high=0.7),
        checked("2", 2, **error, measured=12.5, measured_low=11.0, measured_high=14.0),
        checked("3", 3),
        checked("4", 4, **share, measured=float("nan")),
        checked("5", 5, **share, measured=1.2),
        checked("6", 6, **share | {"labelled": 0}, measured=0.9),
        checked("7", 7, **error, measured=float("inf")),
        checked("8", 8, **error, measured=float("nan")),
        checked("9", 9, **share, measured=0.0, measured_low=-1.0, measured_high=float("nan")),
    ]
    found = {r["key"]: r for r in rows(spark, "drift", {"drift": view(given, evidence_row.ROW)})}
    for row in given:
        said, shown = feedback.of_row(row), found[row["key"]]
        if said.measured == float("inf"):  # of_row has it; a chart can do nothing with it
            said = feedback.NOTHING
        has = said.measured is not None
        assert shown["measured_accuracy"] == (said.measured if said.is_share else None), row
        assert shown["measured_error"] == (None if said.is_share else said.measured), row
        assert shown["labelled"] == (said.labelled if has else None), row
        for side in ("low", "high") if said.is_share else ():
            assert shown[f"measured_{side}"] == getattr(said, side), row
    assert found["1"]["measured_accuracy"] == 0.6 and found["2"]["measured_error"] == 12.5


def test_a_table_of_an_older_raypipe_lacks_columns(spark: Any, view: View) -> None:
    """The first ones had no window, no estimate and no format."""
    old = {"window", "about", "seal", "promised", "since", "format", "no_estimate"}
    old |= {
        name
        for name in evidence_row.ROW.names
        if name.startswith(("accuracy", "measured", "labelled"))
    }
    schema = pa.schema([field for field in evidence_row.ROW if field.name not in old])
    given = [
        {k: v for k, v in checked(key, 1, is_drift=True).items() if k not in old} for key in "12"
    ]
    name = view(given, schema)
    [row] = rows(spark, "drift", {"drift": name})  # both are of one version of the table
    assert row["no_estimate"] == "the check was made by an older raypipe"
    assert fires(spark, name)
    assert rows(spark, "drift_evidence", {"drift": name}) == []


def test_empty_tables_give_no_rows(spark: Any, view: View) -> None:
    tables = {
        "drift": evidence_row.ROW,
        "calls": calls.ROW,
        "decisions": decisions.ROW,
        "windows": window_log.SCHEMA,
        "predictions": PREDICTED,
    }
    given = {name: view([], schema) for name, schema in tables.items()}
    for query in ("drift", "drift_evidence", "predictions", "predictions_by_version", *tables):
        asked = {name: table for name, table in given.items() if query.startswith(name)}
        assert rows(spark, query, asked) == [], query


def predicted(key: str, rows_: list[tuple[str, str | None]], **more: Any) -> list[dict[str, Any]]:
    """Rows (image, label) of one part; label None: broken; "gone": not there any more."""
    same = {"key": key, "line": "l", "version": 1, "state": f"s{key}", "part": "0-9", "format": 5}
    same |= {"rows": len(rows_), "base": None, "model": "cells/1", "table": f"/t@v{key}"}
    made = []
    for image, label in rows_:
        row: dict[str, Any] = {**same, "image_id": image, "sha256": f"h{image}", **more}
        if label == "gone":
            row |= {"gone": True, "error": "gone: not in the table any more"}
        elif label is None:
            row |= {"error": "not an image"}
        else:
            row |= {"label": label, "scores": [0.75, 0.25], "classes": ["a", "b"]}
        made.append(row)
    return made


def test_a_prediction_has_the_rows_that_raypipe_reads(spark: Any, tmp_path: Path) -> None:
    first = predicted("1", [("i1", "a"), ("i1", "a"), ("i2", "b"), ("i3", None)], version=1)
    second = predicted("2", [("i1", "gone"), ("i4", "b"), ("i5", "b")], version=2, base="1")
    # Not finished: one of two rows is there. And one whose base is not.
    half = predicted("3", [("i6", "a")], version=3, base="2", rows=2)
    above = predicted("4", [("i7", "a")], version=4, base="3")
    lost = predicted("5", [("i8", "a")], version=9, base="never")
    other = predicted("6", [("j1", "a")], line="m", model="o'ther/1", version=1)
    # The window of a drift check: images of the second, once more.
    window = predicted("7", [("i4", "b"), ("i5", "b")], line="7", version=2)
    uri = tmp_path / "predictions"
    given = [first, second, half, above, lost, other, window]
    for part in given:
        append(str(uri), pa.Table.from_pylist(part, PREDICTED), "predict")
    name = delta_views.view(spark, uri, tmp_path)
    found = rows(spark, "predictions", {"predictions": name})
    for key in ("2", "6"):
        read = batch.read_rows(str(uri), key, ["label"])["label"].to_pylist()
        mine = {row["label"]: row["images"] for row in found if row["key"] == key}
        assert mine == {label: read.count(label) for label in set(read)}
    assert {row["key"] for row in found} == {"2", "6"}, "the newest that are finished"
    by_version = rows(spark, "predictions_by_version", {"predictions": name})
    assert sorted(
        (r["key"], r["images"], r["broken"], r["went"], r["is_finished"]) for r in by_version
    ) == [
        ("1", 4, 1, 0, True),
        ("2", 2, 0, 1, True),
        ("3", 1, 0, 0, False),
        ("4", 1, 0, 0, True),
        ("5", 1, 0, 0, True),
        ("6", 1, 0, 0, True),
        ("7", 2, 0, 0, True),
    ]


def test_a_long_chain_of_nights_is_followed(spark: Any, view: View) -> None:
    """More than Spark's and Databricks' usual 100 levels of recursion."""
    given: list[dict[str, Any]] = []
    for n in range(150):
        base = str(n - 1) if n else None
        given += predicted(str(n), [(f"i{n}", "a")], version=n, base=base)
    [row] = rows(spark, "predictions", {"predictions": view(given, PREDICTED)})
    assert (row["key"], row["images"]) == ("149", 150)


def test_a_table_gets_a_name_and_keeps_its_files(spark: Any, tmp_path: Path) -> None:
    """register.sql, with Parquet in the place of Delta."""
    folder = tmp_path / "it's here"
    pq.write_table(pa.table({"x": [1]}), tmp_path / "one.parquet")
    spark.read.parquet(str(tmp_path / "one.parquet")).write.parquet(str(folder))
    text = (SQL / "register.sql").read_text("utf-8")
    assert "USING DELTA" in text
    text, name = text.replace("USING DELTA", "USING PARQUET"), f"t{uuid.uuid4().hex[:8]}"
    for _ in range(2):
        spark.sql(text, args={"table": f"spark_catalog.default.`{name}`", "folder": str(folder)})
    assert spark.sql(f"SELECT x FROM default.{name}").collect()[0]["x"] == 1
    spark.sql(f"DROP TABLE default.{name}")
    assert list(folder.glob("*.parquet")), "the files are not Spark's to delete"


def test_the_last_answer_of_a_check_counts(spark: Any, view: View) -> None:
    def row(number: int, act: bool | None, **more: Any) -> dict[str, Any]:
        at = NOW.isoformat()
        named = {"key": f"k{number}", "about": "c1", "model": "cells", "champion": "cells/1"}
        return {**named, "name": "batch", "number": number, "act": act, "decided_at": at, **more}

    given = [row(1, False), row(3, True, reason="labels"), row(2, None), row(1, None, model="o")]
    found = rows(spark, "calls", {"calls": view(given, calls.ROW)})
    assert {(r["model"], r["act"], r["answer"]) for r in found} == {
        ("cells", True, "retrain"),
        ("o", False, "no retrain"),
    }


def test_a_comparison_that_cannot_be_read_is_a_row_without_numbers(spark: Any, view: View) -> None:
    given = []
    for key, slices in (("1", None), ("2", "nonsense"), ("3", '{"slices": [], "union": null}')):
        row = {"key": key, "champion": "c/1", "challenger": "c/2", "slices": slices}
        given.append(row | {"promoted": None, "decided_at": "2026-11-25T03:00:00+00:00"})
    one = {"slice": "it's", "images": 4, "champion": 0.5, "challenger": 0.75, "won": 2, "lost": 1}
    text = json.dumps({"slices": [one | {"p_value": None}], "union": one | {"p_value": 0.5}})
    given.append(given[0] | {"key": "4", "slices": text})
    found = rows(spark, "decisions", {"decisions": view(given, decisions.ROW)})
    assert [(r["key"], r["slice"], r["images"]) for r in found] == [
        ("1", None, None),
        ("2", None, None),
        ("3", None, None),
        ("4", "all", 4),
        ("4", "it's", 4),
    ]
    assert not any(r["passed_gate"] for r in found)


def test_windows_of_two_lines(spark: Any, view: View) -> None:
    now = datetime.now(UTC)  # this module was read long before, in a run of everything

    def entry(line: str, number: int, event: str, hours: float) -> dict[str, Any]:
        at = now - timedelta(hours=hours)
        row = {"line": line, "number": number, "event": event, "window": number, "at": at}
        return row | {"name": "batch", "table": f"/{line}", "version": number, "images": 20}

    given = [entry("a", 1, "opened", 30), entry("a", 2, "checked", 29), entry("a", 3, "waiting", 5)]
    given += [entry("b", 1, "opened", 50.04)]
    found = rows(spark, "windows", {"windows": view(given, window_log.SCHEMA)})
    # Compared with the clock of Spark, some seconds later.
    assert [(r["watched_table"], r["event"], r["checked_windows"]) for r in found] == [
        ("/a", "waiting", 1),
        ("/b", "opened", 0),
    ]
    assert [r["hours_ago"] for r in found] == [
        pytest.approx(5, abs=0.2),
        pytest.approx(50, abs=0.2),
    ]


@pytest.fixture
def system(spark: Any) -> dict[str, str]:
    """Small tables with the documented columns of Databricks' system tables."""
    today = NOW.replace(hour=12, minute=0, second=0, microsecond=0) - timedelta(days=1)

    def usage(number: int, quantity: str, **more: Any) -> dict[str, Any]:
        row = {"record_id": str(number), "sku_name": "JOBS", "cloud": "AZURE", "usage_unit": "DBU"}
        row |= {"usage_start_time": today, "usage_end_time": today + timedelta(hours=1)}
        row |= {"custom_tags": {"project": "raypipe", "stage": "prod"}, "usage_quantity": quantity}
        row |= {"usage_date": today.date(), "billing_origin_product": "JOBS"}
        row |= {"record_type": "ORIGINAL"} | more
        return row

    used = [
        usage(1, "10"),
        usage(2, "-10", record_type="RETRACTION"),
        usage(3, "8", record_type="RESTATEMENT"),
        usage(4, "5", sku_name="NEW"),  # no price yet
        usage(5, "99", custom_tags={"project": "other"}),
        usage(6, "99", custom_tags=None),
        usage(7, "99", usage_date=(today - timedelta(days=90)).date()),
        usage(8, "2", custom_tags={"project": "raypipe"}),
    ]
    price = {"sku_name": "JOBS", "cloud": "AZURE", "usage_unit": "DBU", "currency_code": "USD"}
    started = today - timedelta(days=100)

    def priced(amount: str, start: datetime, end: datetime | None, **more: Any) -> dict[str, Any]:
        cost = {"default": amount, "effective_list": {"default": amount}}
        return price | {"price_start_time": start, "price_end_time": end, "pricing": cost} | more

    prices = [
        priced("9", started, today - timedelta(days=1)),  # an earlier price
        priced("0.5", today - timedelta(days=1), None),
        priced("7", started, None, cloud="AWS"),
    ]

    def asked(number: int, action: str, status: int, **params: str) -> dict[str, Any]:
        row = {"event_id": str(number), "event_time": today, "event_date": today.date()}
        row |= {"service_name": "unityCatalog", "action_name": action, "request_params": params}
        row |= {"user_identity": {"email": "someone"}, "response": {"status_code": status}}
        return row

    cells = "raypipe_prod.solar.cells"
    audit = [
        asked(
            1,
            "setRegisteredModelAlias",
            200,
            full_name_arg=cells,
            alias="champion",
            version_num="3",
        ),
        asked(2, "getTable", 403, full_name_arg="raypipe_prod.solar.drift"),
        asked(3, "getTable", 200, full_name_arg="raypipe_prod.solar.drift"),
        asked(4, "deleteTable", 200, full_name_arg="raypipeXprod.solar.drift"),
        asked(5, "deleteTable", 200, full_name_arg="raypipe_prod.solar2.drift"),
        asked(6, "createTable", 200, catalog_name="raypipe_prod", schema_name="solar", name="x"),
        asked(7, "updatePermissions", 200, securable_full_name="raypipe_prod.solar"),
    ]
    audit.append(asked(8, "login", 200) | {"service_name": "accounts"})

    def numbers(node: Any) -> Any:
        """Decimals, as Spark wants them, in the place of texts of numbers."""
        if isinstance(node, dict):
            money = {"default", "usage_quantity"}
            return {
                k: Decimal(v) if k in money and v is not None and isinstance(v, str) else numbers(v)
                for k, v in node.items()
            }
        return node

    for name, given, schema in (
        ("usage", used, USAGE),
        ("prices", prices, PRICES),
        ("audit", audit, AUDIT),
    ):
        frame = spark.createDataFrame([numbers(row) for row in given], schema)
        frame.createOrReplaceTempView(f"system_{name}")
    return {name: f"system_{name}" for name in ("usage", "prices", "audit")}


def test_spend_counts_corrections_and_says_what_has_no_price(
    spark: Any, system: dict[str, str]
) -> None:
    given = {"usage": system["usage"], "prices": system["prices"], "project": "raypipe", "days": 30}
    found = {(r["stage"], r["sku_name"]): r for r in rows(spark, "spend", given)}
    assert found.keys() == {("prod", "JOBS"), ("prod", "NEW"), ("no stage", "JOBS")}
    jobs, new = found["prod", "JOBS"], found["prod", "NEW"]
    assert (float(jobs["quantity"]), float(jobs["list_cost"])) == (8, 4)
    assert (float(new["quantity_without_price"]), new["list_cost"]) == (5, None)
    assert float(found["no stage", "JOBS"]["list_cost"]) == 1
    assert rows(spark, "spend", given | {"project": "it's' OR '1'='1"}) == []


def test_audit_names_changes_and_refusals_in_the_schema(spark: Any, system: dict[str, str]) -> None:
    given = {"audit": system["audit"], "catalog": "raypipe_prod", "schema": "solar", "days": 7}
    found = {r["event_id"]: r for r in rows(spark, "audit", given)}
    assert found.keys() == {"1", "2", "6", "7"}
    assert (found["1"]["alias"], found["1"]["version"], found["1"]["who"]) == (
        "champion",
        "3",
        "someone",
    )
    assert [number for number, row in found.items() if row["is_refused"]] == ["2"]
    # A month ago is out of the range, and a catalog of another name has nothing.
    assert rows(spark, "audit", given | {"catalog": "raypipe_%"}) == []


def test_each_widget_of_the_dashboard_gets_what_it_asks_for(
    spark: Any, view: View, system: dict[str, str]
) -> None:
    """The query that a widget sends: its fields over its dataset, grouped where it sums."""
    at = NOW.isoformat()
    tables: dict[str, str] = {
        "drift": view([checked("1")], evidence_row.ROW),
        "predictions": view(predicted("1", [("i1", "a")]), PREDICTED),
        "calls": view(
            [{"key": "k", "about": "1", "model": "m", "number": 1, "decided_at": at}], calls.ROW
        ),
        "decisions": view([{"key": "k", "slices": "{}", "decided_at": at}], decisions.ROW),
        "windows": view([{"line": "l", "number": 1, "at": NOW}], window_log.SCHEMA),
        **system,
    }
    file = json.loads((SQL / "dashboard.lvdash.json").read_text("utf-8"))
    datasets = {one["name"]: one for one in file["datasets"]}
    widgets = [item["widget"] for page in file["pages"] for item in page["layout"]]
    assert len(widgets) > 10
    for widget in widgets:
        asked = widget["queries"][0]["query"]
        dataset = datasets[asked["datasetName"]]
        given = {}
        for one in dataset["parameters"]:
            default = one["defaultSelection"]["values"]["values"][0]["value"]
            given[one["keyword"]] = tables.get(one["keyword"], default)
        fields = [f"{f['expression']} AS `{f['name']}`" for f in asked["fields"]]
        group = [f["expression"] for f in asked["fields"] if "(" not in f["expression"]]
        text = f"SELECT {', '.join(fields)} FROM (\n{''.join(dataset['queryLines'])})"
        if not asked["disaggregated"] and group:
            text += f" GROUP BY {', '.join(group)}"
        found = spark.sql(text, args=given).collect()
        if asked["datasetName"] != "drift_evidence":  # the check above has no tests
            assert found, widget["name"]
