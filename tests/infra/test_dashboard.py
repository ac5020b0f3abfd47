"""The dashboard and the alert are what the queries say, and Databricks' own models accept them.

What the queries return is in test_sql.py, with the marker spark.
"""

from __future__ import annotations

import copy
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from databricks.bundles.alerts import Alert
from databricks.bundles.dashboards import Dashboard
from databricks.bundles.jobs import Job

BUNDLE = Path(__file__).parents[2] / "infra" / "databricks"
SQL = BUNDLE / "sql"
QUERIES = sorted(SQL.glob("*.sql"))
ALERTS = yaml.safe_load((BUNDLE / "resources" / "alerts.yml").read_text("utf-8"))
DASHBOARDS = yaml.safe_load((BUNDLE / "resources" / "dashboards.yml").read_text("utf-8"))
FILE = json.loads((SQL / "dashboard.lvdash.json").read_text("utf-8"))
COLUMNS = 6  # of the grid of a dashboard


def test_each_query_is_written_once() -> None:
    done = subprocess.run(
        [sys.executable, str(SQL / "write.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_query_that_changed_is_named(tmp_path: Path) -> None:
    """The check looks at the files, not at its own memory of them."""
    for file in [*QUERIES, SQL / "write.py", SQL / "dashboard.lvdash.json"]:
        (tmp_path / "sql").mkdir(exist_ok=True)
        (tmp_path / "sql" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "resources").mkdir()
    alerts = (BUNDLE / "resources" / "alerts.yml").read_text("utf-8")
    (tmp_path / "resources" / "alerts.yml").write_text(alerts, "utf-8")
    changed = tmp_path / "sql" / "drift_alert.sql"
    changed.write_text(changed.read_text("utf-8").replace("AND is_drift", ""), "utf-8")
    command = [sys.executable, str(tmp_path / "sql" / "write.py")]
    done = subprocess.run([*command, "--check"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "dashboard.lvdash.json" in done.stdout and "alerts.yml" in done.stdout
    assert subprocess.run(command).returncode == 0
    assert subprocess.run([*command, "--check"]).returncode == 0


@pytest.mark.parametrize("path", QUERIES, ids=lambda path: path.stem)
def test_a_query_says_what_it_takes(path: Path) -> None:
    """The comment at the top explains each parameter, and no table is named but by one."""
    text = path.read_text("utf-8")
    code = re.sub(r"--.*", "", text)
    used = set(re.findall(r"(?<![:\w']):(\w+)", re.sub(r"'[^']*'", "''", code)))
    told = set(re.findall(r"^-- :(\w+) ", text, re.M))
    assert used == told
    assert re.search(r"(?i)\b(FROM|JOIN)\s+(system|raypipe\w*|[a-z_]+\.)", code) is None
    assert set(re.findall(r"IDENTIFIER\(:(\w+)\)", code)) <= used


def problems(file: dict[str, Any]) -> list[str]:
    """What is wrong with a dashboard: names that nothing has, unknown keys, overlaps."""
    found: list[str] = []
    keys = {
        "": {"datasets", "pages"},
        "dataset": {"name", "displayName", "queryLines", "parameters"},
        "parameter": {"displayName", "keyword", "dataType", "defaultSelection"},
        "page": {"name", "displayName", "pageType", "layout"},
        "item": {"widget", "position"},
        "position": {"x", "y", "width", "height"},
        "widget": {"name", "queries", "spec"},
        "query": {"datasetName", "fields", "disaggregated"},
        "spec": {"version", "widgetType", "encodings", "frame"},
    }
    versions = {"counter": 2, "table": 2, "bar": 3, "line": 3}
    encodings = {
        "counter": {"value"},
        "table": {"columns"},
        "bar": {"x", "y", "color"},
        "line": {"x", "y", "extra"},
    }

    def has(kind: str, node: dict[str, Any]) -> bool:
        wrong = keys[kind] ^ set(node)
        found.extend(f"{kind or 'dashboard'}: {name}" for name in sorted(wrong))
        return not wrong

    if not has("", file):
        return found
    sets: dict[str, set[str]] = {}  # words of the query, which its columns are among
    used: set[str] = set()
    for dataset in file["datasets"]:
        if not has("dataset", dataset):
            continue
        code = re.sub(r"--.*", "", "".join(dataset["queryLines"]))
        sets[dataset["name"]] = set(re.findall(r"\w+", code))
        asked = set(re.findall(r"(?<![:\w']):(\w+)", re.sub(r"'[^']*'", "''", code)))
        given = {p["keyword"] for p in dataset["parameters"] if has("parameter", p)}
        found += [f"parameter: {name}" for name in sorted(asked ^ given)]
    for page in file["pages"]:
        taken: set[tuple[int, int]] = set()
        for item in page["layout"] if has("page", page) else ():
            if not has("item", item) or not has("position", item["position"]):
                continue
            place, widget = item["position"], item["widget"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["width"])
                for y in range(place["y"], place["y"] + place["height"])
            }
            if cells & taken or any(x >= COLUMNS for x, _ in cells):
                found.append(f"position: {widget['name']}")
            taken |= cells
            if not has("widget", widget) or not has("spec", widget["spec"]):
                continue
            query, spec = widget["queries"][0]["query"], widget["spec"]
            if not has("query", query):
                continue
            if query["datasetName"] not in sets:
                found.append(f"dataset: {query['datasetName']}")
            used.add(query["datasetName"])
            kind = spec["widgetType"]
            if versions.get(kind) != spec["version"]:
                found.append(f"widget type: {kind} {spec['version']}")
                continue
            found += [f"encoding: {n}" for n in sorted(encodings[kind] ^ set(spec["encodings"]))]
            fields = {field["name"] for field in query["fields"]}
            columns = {c for f in query["fields"] for c in re.findall("`(.*?)`", f["expression"])}
            words = sets.get(query["datasetName"], set())
            found += [f"column: {name}" for name in sorted(columns - words)]
            shown = set(_named(spec["encodings"]))
            found += [f"field: {name}" for name in sorted(fields ^ shown)]
    return found + [f"unused: {name}" for name in sorted(set(sets) - used)]


def _named(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("fieldName"), str):
            yield node["fieldName"]
        node = list(node.values())
    if isinstance(node, list):
        for one in node:
            yield from _named(one)


def test_the_dashboard_holds_together() -> None:
    assert problems(FILE) == []


def test_the_alert_and_the_dashboard_are_typed_and_name_what_they_need() -> None:
    alert: Any = Alert.from_dict(ALERTS["resources"]["alerts"]["drift"])
    assert alert.evaluation.source.name == "drifted"
    assert alert.evaluation.threshold.value.double_value == 0
    assert alert.evaluation.comparison_operator.value == "GREATER_THAN"
    assert ":drift" not in alert.query_text and ":hours" not in alert.query_text
    assert "${var.catalog}" in alert.query_text
    for dashboard in DASHBOARDS["resources"]["dashboards"].values():
        made: Any = Dashboard.from_dict(dashboard)
        assert (BUNDLE / "resources" / made.file_path).resolve() == SQL / "dashboard.lvdash.json"
        assert made.dataset_catalog and made.dataset_schema


def test_the_job_that_registers_tables_names_all_that_the_dashboard_reads() -> None:
    file = yaml.safe_load((BUNDLE / "resources" / "tables.yml").read_text("utf-8"))
    job: Any = Job.from_dict(file["resources"]["jobs"]["tables"])
    asked = {p["keyword"] for one in FILE["datasets"] for p in one["parameters"]}
    names = asked & {"drift", "windows", "calls", "decisions", "predictions"}
    assert {task.task_key for task in job.tasks} == names
    for task in job.tasks:
        name, run = task.task_key, task.sql_task
        path = (BUNDLE / "resources" / run.file.path).resolve()
        assert set(run.parameters) == set(re.findall(r":(\w+)", _code(path.read_text("utf-8"))))
        place = "`${var.catalog}`.`${resources.schemas.solar.name}`"
        assert run.parameters["table"] == f"{place}.{name}"
        # Below watch.out or predict.out, as the jobs set them.
        below = name if name == "predictions" else f"watch/{name}"
        assert run.parameters["folder"] == f"${{var.storage}}/{below}"


def _code(text: str) -> str:
    return re.sub(r"--.*", "", text)


def _misspelt(word: str, rng: random.Random) -> str:
    place = rng.randrange(1, len(word) + 1)
    return word[:place] + rng.choice("qxzj") + word[place:]


def _places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all keys, and of all texts that name something else."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield (*path, key, None)
            if key in ("datasetName", "fieldName", "keyword", "widgetType", "expression"):
                yield (*path, key)
            yield from _places(value, (*path, key))
    elif isinstance(node, list):
        for number, one in enumerate(node):
            yield from _places(one, (*path, number))


# Free texts, or keys below them, that nothing refers to.
FREE = {"displayName", "title", "showTitle", "frame", "scale", "type", "values", "value", "query"}
FREE |= {"dataType", "defaultSelection", "name", "main_query", "fields"}


def test_thirty_misspellings_of_the_dashboard_are_found() -> None:
    rng = random.Random(18)
    places = [p for p in _places(FILE) if not any(step in FREE for step in p[-2:] if step)]
    missed = []
    for path in rng.sample(places, 30):
        file = copy.deepcopy(FILE)
        node: Any = file
        *steps, last = path if path[-1] is not None else path[:-1]
        for step in steps:
            node = node[step]
        if path[-1] is None:
            word = _misspelt(last, rng)
            node[word] = node.pop(last)
        else:
            word = node[last] = _misspelt(node[last].strip("`"), rng)
            if last == "expression":
                node[last] = f"`{word}`"
        try:
            found = problems(file)
        except (KeyError, TypeError, IndexError) as e:
            found = [repr(e)]
        if not found:
            missed.append((path, word))
    assert missed == []


@pytest.mark.parametrize("seed", range(10))
def test_a_misspelt_key_of_the_alert_is_refused(seed: int) -> None:
    rng = random.Random(seed)
    tree = copy.deepcopy(ALERTS["resources"]["alerts"]["drift"])
    places = [path[:-1] for path in _places(tree) if path[-1] is None]
    *steps, last = rng.choice(places)
    node: Any = tree
    for step in steps:
        node = node[step]
    word = _misspelt(last, rng)
    node[word] = node.pop(last)
    with pytest.raises(ValueError, match=word):
        Alert.from_dict(tree)
