"""Writes the dashboard and the alert from the queries beside this file.

python infra/databricks/sql/write.py           writes dashboard.lvdash.json, and alerts.yml's query
python infra/databricks/sql/write.py --check   says what is not up to date, and exits with 1

So each query is written down once. It takes the names of tables as parameters, IDENTIFIER(:drift).
On the dashboard their defaults are bare names; dataset_catalog and dataset_schema of
../resources/dashboards.yml complete them for each stage. Parameters of an alert are in private
preview, so its query has the names in the place of the parameters.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DASHBOARD = HERE / "dashboard.lvdash.json"
ALERTS = HERE.parent / "resources" / "alerts.yml"
PARAMETER = re.compile(r"(?<![:\w]):(\w+)\b")

# Of the dashboard; a person may change any of them there.
DEFAULTS = {
    "drift": "drift",
    "calls": "calls",
    "decisions": "decisions",
    "windows": "windows",
    "predictions": "predictions",
    "hours": "26",
    "days": "30",
    "project": "raypipe",
    "usage": "system.billing.usage",
    "prices": "system.billing.list_prices",
}
# Of the alert. Backticks: a catalog may have a - in its name.
PLACE = "'`${var.catalog}`.`${resources.schemas.solar.name}`.drift'"
ALERT = {"drift": PLACE, "hours": "26"}

DATASETS = {
    "drift_alert": "Drift in the last hours",
    "drift": "Drift checks",
    "drift_evidence": "Tests of the newest checks",
    "windows": "Windows",
    "calls": "Retrain or not",
    "decisions": "Champion against challenger",
    "predictions": "Newest predictions",
    "predictions_by_version": "Predictions by version",
    "spend": "Spend",
}


def main() -> int:
    wanted = {
        DASHBOARD: json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n",
        ALERTS: alerts(ALERTS.read_text("utf-8")),
    }
    if "--check" in sys.argv[1:]:
        old = [path for path, text in wanted.items() if not _is(path, text)]
        for path in old:
            print(f"{path.name} is not what the queries say: run {Path(__file__).name}")
        return 1 if old else 0
    for path, text in wanted.items():
        path.write_text(text, "utf-8")
    return 0


def _is(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text("utf-8") == text


def query(name: str) -> str:
    return (HERE / f"{name}.sql").read_text("utf-8")


def parameters(text: str) -> list[str]:
    """The names of the parameters of a query, without those in comments."""
    code = re.sub(r"--.*", "", text)
    return list(dict.fromkeys(PARAMETER.findall(re.sub(r"'[^']*'", "''", code))))


def alerts(text: str) -> str:
    """alerts.yml with the alert's query as it is now."""
    code = re.sub(r"^--.*\n", "", query("drift_alert"), flags=re.M)
    for name in parameters(code):
        code = re.sub(rf":{name}\b", lambda _, name=name: ALERT[name], code)
    lines = "".join(f"        {line}".rstrip() + "\n" for line in code.splitlines())
    made, count = re.subn(
        r"(      query_text: \|\n)(?:        .*\n|\n)*", lambda m: m[1] + lines, text
    )
    if count != 1:
        raise SystemExit(f"{ALERTS.name} has {count} places for a query, not one")
    return made


# The dashboard


def dashboard() -> dict[str, Any]:
    return {
        "datasets": [_dataset(name, title) for name, title in DATASETS.items()],
        "pages": [
            {
                "name": "models",
                "displayName": "Drift and predictions",
                "pageType": "PAGE_TYPE_CANVAS",
                "layout": [
                    _counter((0, 0, 2, 3), "drift_alert", "drifted", "Drifted in the last hours"),
                    _counter((2, 0, 2, 3), "drift_alert", "newest_check", "Newest check"),
                    _counter((4, 0, 2, 3), "predictions", "SUM(images)", "Images predicted"),
                    _line(
                        (0, 3, 6, 6),
                        "drift",
                        (
                            "checked_at",
                            ["accuracy", "accuracy_low", "accuracy_high", "measured_accuracy"],
                            "name",
                        ),
                        "Accuracy of each checked set of images, estimated and measured",
                    ),
                    _table(
                        (0, 9, 6, 6),
                        "drift",
                        "checked_at name model verdict p_value alpha batch_images accuracy loss "
                        "no_estimate labelled measured_accuracy measured_low measured_high "
                        "measured_error",
                        "Drift checks",
                    ),
                    _table(
                        (0, 15, 6, 5),
                        "drift_evidence",
                        "name model detector looks_at statistic p_value threshold is_drift detail",
                        "Tests of the newest checks",
                    ),
                    _table(
                        (0, 20, 6, 4),
                        "windows",
                        "name watched_table event window_number images to_version at hours_ago",
                        "How far the checks have come",
                    ),
                    _bar(
                        (0, 24, 3, 6),
                        "predictions",
                        ("shown_label", "SUM(images)", "model"),
                        "Newest predictions by label",
                    ),
                    _bar(
                        (3, 24, 3, 6),
                        "predictions_by_version",
                        ("version", "SUM(images)", "made_by"),
                        "Images predicted with each version",
                    ),
                ],
            },
            {
                "name": "retrains",
                "displayName": "Retrains",
                "pageType": "PAGE_TYPE_CANVAS",
                "layout": [
                    _table(
                        (0, 0, 6, 6),
                        "calls",
                        "decided_at name champion answer reason",
                        "What each check led to",
                    ),
                    _table(
                        (0, 6, 6, 8),
                        "decisions",
                        "decided_at champion challenger passed_gate slice images champion_result "
                        "challenger_result won lost p_value reason",
                        "Champion against challenger",
                    ),
                ],
            },
            # A page of its own: who may not read system tables sees the others all the same.
            {
                "name": "cost",
                "displayName": "Cost",
                "pageType": "PAGE_TYPE_CANVAS",
                "layout": [
                    _bar(
                        (0, 0, 6, 6),
                        "spend",
                        ("usage_date", "SUM(list_cost)", "product"),
                        "List cost by day, without the machines",
                    ),
                    _table(
                        (0, 6, 6, 8),
                        "spend",
                        "usage_date stage product sku_name quantity usage_unit list_cost "
                        "currency_code quantity_without_price",
                        "Spend",
                    ),
                ],
            },
        ],
    }


def _dataset(name: str, title: str) -> dict[str, Any]:
    text = query(name)
    given = []
    for one in parameters(text):
        values = {"dataType": "STRING", "values": [{"value": DEFAULTS[one]}]}
        given.append(
            {
                "displayName": one,
                "keyword": one,
                "dataType": "STRING",
                "defaultSelection": {"values": values},
            }
        )
    lines = text.splitlines(keepends=True)
    return {"name": name, "displayName": title, "queryLines": lines, "parameters": given}


def _widget(
    place: tuple[int, int, int, int],
    dataset: str,
    fields: list[str],
    spec: dict[str, Any],
    title: str,
) -> dict[str, Any]:
    """place: (x, y, width, height) on a grid of 6 columns. fields: columns, or SUM(column)."""
    is_sum = any("(" in field for field in fields)
    asked = {
        "datasetName": dataset,
        "fields": [{"name": _name(one), "expression": _expression(one)} for one in fields],
        "disaggregated": not is_sum,
    }
    name = re.sub(r"\W+", "-", title.lower())
    return {
        "widget": {
            "name": name,
            "queries": [{"name": "main_query", "query": asked}],
            "spec": spec | {"frame": {"showTitle": True, "title": title}},
        },
        "position": dict(zip(("x", "y", "width", "height"), place, strict=True)),
    }


def _name(field: str) -> str:
    return field.lower() if "(" in field else field


def _expression(field: str) -> str:
    return re.sub(r"^(\w+\()?(\w+)", r"\1`\2`", field)


def _counter(
    place: tuple[int, int, int, int], dataset: str, field: str, title: str
) -> dict[str, Any]:
    value = {"fieldName": _name(field), "displayName": title}
    spec = {"version": 2, "widgetType": "counter", "encodings": {"value": value}}
    return _widget(place, dataset, [field], spec, title)


def _table(
    place: tuple[int, int, int, int], dataset: str, columns: str, title: str
) -> dict[str, Any]:
    names = columns.split()
    shown = [{"fieldName": name, "displayName": name.replace("_", " ")} for name in names]
    spec = {"version": 2, "widgetType": "table", "encodings": {"columns": shown}}
    return _widget(place, dataset, names, spec, title)


def _bar(
    place: tuple[int, int, int, int], dataset: str, axes: tuple[str, str, str], title: str
) -> dict[str, Any]:
    x, y, colour = axes
    kind = "temporal" if x.endswith("date") else "categorical"
    encodings = {
        "x": {"fieldName": x, "scale": {"type": kind}, "displayName": x.replace("_", " ")},
        "y": {"fieldName": _name(y), "scale": {"type": "quantitative"}, "displayName": _name(y)},
        "color": {"fieldName": colour, "scale": {"type": "categorical"}, "displayName": colour},
    }
    spec = {"version": 3, "widgetType": "bar", "encodings": encodings}
    return _widget(place, dataset, [x, y, colour], spec, title)


def _line(
    place: tuple[int, int, int, int],
    dataset: str,
    axes: tuple[str, list[str], str],
    title: str,
) -> dict[str, Any]:
    """One line for each of several columns. The last axis is in the tooltip only."""
    x, many, label = axes
    lines = [{"fieldName": one, "displayName": one.replace("_", " ")} for one in many]
    encodings = {
        "x": {"fieldName": x, "scale": {"type": "temporal"}, "displayName": x.replace("_", " ")},
        "y": {"scale": {"type": "quantitative"}, "fields": lines},
        "extra": [{"fieldName": label, "displayName": label}],
    }
    spec = {"version": 3, "widgetType": "line", "encodings": encodings}
    return _widget(place, dataset, [x, *many, label], spec, title)


if __name__ == "__main__":
    raise SystemExit(main())
