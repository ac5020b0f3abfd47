"""Reads the Databricks bundle as the CLI does, and says what is wrong with it.

`problems(files)` fills in every target (target over default, references in rounds, whole references
keep their type), and puts each resource through Databricks' own typed model, which refuses a field
that it does not know at any depth. That model says nothing of some things, so these are checked
here: the root file, keys that stand twice, scalars that are lists, references, files, the graph of
a job's tasks, the command line of each task, and clusters against their policy.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import typer
import yaml
from databricks.bundles.core._generated import _all_resource_types
from databricks.bundles.jobs import ClusterSpec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from raypipe.cli.app import app
from raypipe.config import load
from raypipe.errors import RaypipeError
from raypipe.job import Job

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "infra" / "databricks"
MAIN = "databricks.yml"
TYPES = {kind.plural_name: kind.resource_type for kind in _all_resource_types()}
REFERENCE = re.compile(r"\$\{([^}]*)\}")
DYNAMIC = re.compile(r"\{\{([^}]*)\}\}")
# What a user has to give, as BUNDLE_VAR_host and so on.
GIVEN = {
    "host": "https://workspace.example",
    "email": "team@example.com",
    "viewers": "raypipe-readers",
    "developers": "raypipe-engineers",
    "storage": "abfss://tables@account.example/solar",
    "principal": "00000000-0000-0000-0000-000000000001",
}
# What README.md names; another name would be another resource.
NAMED = {
    "jobs": {"ingest", "clean", "train", "tune", "predict", "drift", "retrain", "serve", "tables"},
    "schemas": {"solar"},
    "volumes": {"files"},
    "registered_models": {"cells"},
    "experiments": {"runs"},
    "instance_pools": {"cpu"},
    "cluster_policies": {"development", "one_node", "many_nodes", "cpu_node"},
    "sql_warehouses": {"raypipe"},
    "alerts": {"drift"},
    "dashboards": {"raypipe"},
}
OUTPUTS = {"id"}  # of every resource, known once it is deployed
# Names that no model knows, because any would do.
FREE = {
    "tags": {"project", "stage", "custom_tags"},
    "custom_tags": {"project", "stage", "ResourceClass"},
    "spark_conf": {
        "spark.databricks.cluster.profile",
        "spark.master",
        "spark.task.resource.gpu.amount",
    },
    "spark_env_vars": {
        "RAY_AUTH_MODE",
        "RAY_AUTH_TOKEN",
        "RAY_USAGE_STATS_ENABLED",
        "MLFLOW_DISABLE_TELEMETRY",
        "DATABRICKS_RAY_ON_SPARK_AUTOSHUTDOWN_MINUTES",
        "DATABRICKS_HOST",
        "DATABRICKS_CLIENT_ID",
        "DATABRICKS_CLIENT_SECRET",
        "AZURE_STORAGE_CLIENT_ID",
        "AZURE_STORAGE_CLIENT_SECRET",
        "AZURE_STORAGE_TENANT_ID",
        "RAYPIPE_COMMIT",
    },
}
SECRET_KEYS = {
    "ray-auth-token",
    *("client-id", "client-secret"),
    *("storage-client-id", "storage-client-secret", "storage-tenant-id"),
}
Tree = Any


class Wrong(Exception):
    """One thing that is wrong with the bundle."""


# The root file, of which databricks-bundles has no model. Its fields are those of the CLI's schema.


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Git(Model):
    branch: str


class About(Model):
    name: str
    databricks_cli_version: str
    engine: Literal["direct", "terraform"]


class Sync(Model):
    paths: list[str]


class File(Model):
    source: str


class Artifact(Model):
    type: Literal["whl"]
    path: str
    build: str
    files: list[File]


class Variable(Model):
    description: str = Field(min_length=10)
    type: Literal["complex"] | None = None
    default: Any = None


class Presets(Model):
    trigger_pause_status: Literal["PAUSED", "UNPAUSED"]


class Workspace(Model):
    root_path: str


class RunAs(Model):
    service_principal_name: str


class Permission(Model):
    level: Literal["CAN_MANAGE", "CAN_VIEW", "CAN_RUN"]
    service_principal_name: str | None = None
    group_name: str | None = None


class Target(Model):
    mode: Literal["development", "production"]
    default: bool = False
    presets: Presets
    variables: dict[str, Any]
    git: Git | None = None
    workspace: Workspace | None = None
    run_as: RunAs | None = None
    permissions: list[Permission] = []
    resources: dict[str, dict[str, dict[str, Any]]] = {}


class Main(Model):
    bundle: About
    include: list[str]
    sync: Sync
    artifacts: dict[Literal["raypipe"], Artifact]
    variables: dict[str, Variable]
    targets: dict[str, Target]


class Included(Model):
    resources: dict[str, dict[str, dict[str, Any]]]


class _Strict(yaml.SafeLoader):
    """YAML in which no key stands twice: PyYAML would keep the last one, and say nothing."""


def _mapping(loader: _Strict, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        name = loader.construct_object(key, deep=True)
        if not isinstance(name, str | int):
            raise Wrong(f"line {key.start_mark.line + 1}: {name!r} is no name")
        if name in seen:
            raise Wrong(f"line {key.start_mark.line + 1}: {name!r} stands twice")
        seen.add(name)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Strict.add_constructor("tag:yaml.org,2002:map", _mapping)


def read(folder: Path = FOLDER) -> dict[str, str]:
    """The texts of the bundle's files by their paths in its folder."""
    paths = [folder / MAIN, *sorted(folder.glob("resources/*.yml"))]
    return {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in paths}


def trees(files: Mapping[str, str]) -> dict[str, Tree]:
    found = {}
    for name, text in files.items():
        try:
            found[name] = yaml.load(text, _Strict)  # a SafeLoader
        except Wrong as e:
            raise Wrong(f"{name}: {e}") from e
        except yaml.YAMLError as e:
            raise Wrong(f"{name}: {' '.join(str(e).split())}") from e
    return found


def problems(files: Mapping[str, str]) -> list[str]:
    """What is wrong, one line each; nothing if all is well."""
    try:
        parsed = trees(files)
        for name, tree in parsed.items():
            _fits(name, tree, Main if name == MAIN else Included)
    except Wrong as e:
        return [str(e)]
    found = [*_of_variables(parsed), *_of_targets(parsed[MAIN])]
    for target in parsed[MAIN]["targets"]:
        try:
            filled = fill(parsed, target)
            found += [f"{target}: {said}" for said in _of_target(filled, parsed)]
        except Wrong as e:
            found.append(f"{target}: {e}")
        except (KeyError, TypeError, AttributeError, IndexError) as e:
            # A field that everything else needs.
            found.append(f"{target}: {type(e).__name__}: {e}")
    return list(dict.fromkeys(found))


def _fits(name: str, tree: Tree, kind: type[Model]) -> None:
    try:
        kind.model_validate(tree)
    except ValidationError as e:
        first = e.errors()[0]
        at = ".".join(map(str, first["loc"]))
        raise Wrong(f"{name}: {at}: {first['msg']}") from e
    for path, value in leaves(tree):
        if value is None:
            raise Wrong(f"{name}: {path}: nothing stands there")


def leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that holds no others, with its path. An empty list is none of them."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            yield from leaves(value, f"{path}.{number}")
    else:
        yield path, tree


def _of_variables(parsed: Mapping[str, Tree]) -> Iterator[str]:
    variables = parsed[MAIN]["variables"]
    texts = [value for tree in parsed.values() for _, value in leaves(tree)]
    used = {name for text in texts for name in REFERENCE.findall(str(text))}
    for name, spec in variables.items():
        if f"var.{name}" not in used:
            yield f"variables.{name}: nothing uses it"
        is_complex = isinstance(spec.get("default"), dict)
        # One that stands for another complex variable is complex, too.
        other = REFERENCE.fullmatch(str(spec.get("default", "")))
        if other and other[1].startswith("var."):
            same = variables.get(other[1].removeprefix("var."), {})
            is_complex = same.get("type") == "complex"
        if is_complex != (spec.get("type") == "complex"):
            yield f"variables.{name}: a mapping has type: complex, and nothing else has"
        if "default" not in spec and name not in GIVEN:
            yield f"variables.{name}: it has no default, and README.md does not ask for it"
        if "default" in spec and name in GIVEN:
            yield f"variables.{name}: it is about one company, and has a default"


def _of_targets(main: Tree) -> Iterator[str]:
    if set(main["targets"]) != {"sit", "uat", "prod"}:
        yield f"targets: {sorted(main['targets'])} are not sit, uat and prod"
    if sum(target.get("default", False) for target in main["targets"].values()) != 1:
        yield "targets: not one default"
    for name, target in main["targets"].items():
        for variable in set(target["variables"]) - set(main["variables"]):
            yield f"targets.{name}.variables.{variable}: there is no such variable"
        if target["mode"] == "development":
            continue
        if (target.get("git") or {}).get("branch") != "main":
            yield f"targets.{name}.git.branch: a deployment from any branch would pass"
        root = (target.get("workspace") or {}).get("root_path", "")
        if "${bundle.target}" not in root or "${var.principal}" not in root:
            yield f"targets.{name}.workspace.root_path: not one copy per stage"
        if not target.get("run_as") or not target.get("permissions"):
            yield f"targets.{name}: no run_as or no permissions"
        for permission in target.get("permissions", ()):
            # CAN_VIEW of a bundle is READ of its secret scopes: whoever sees a job reads secrets.
            if permission["level"] != "CAN_MANAGE":
                yield f"targets.{name}.permissions: {permission['level']} for all resources"


# One target


def fill(parsed: Mapping[str, Tree], target: str, given: Mapping[str, Any] = GIVEN) -> Tree:
    """The bundle as it is in `target`: all includes, with every reference in place.

    given: variables from outside, which win. What is known only after a deployment, as a job's id,
    stays a reference. Raises Wrong for a reference to nothing.
    """
    main = parsed[MAIN]
    tree: dict[str, Any] = {"resources": {}}
    for name, included in parsed.items():
        for kind, resources in included.get("resources", {}).items() if name != MAIN else ():
            for key, resource in resources.items():
                place = tree["resources"].setdefault(kind, {})
                if key in place:
                    raise Wrong(f"{name}: resources.{kind}.{key} stands in two files")
                place[key] = resource
    own = main["targets"][target]
    values = {
        name: spec["default"] for name, spec in main["variables"].items() if "default" in spec
    }
    tree["variables"] = values | own["variables"] | dict(given)
    for name in set(main["variables"]) - set(tree["variables"]):
        raise Wrong(f"no value assigned to required variable {name}")
    for kind, resources in own.get("resources", {}).items():
        for key, changes in resources.items():
            if key not in tree["resources"].get(kind, {}):
                raise Wrong(f"targets.{target}.resources.{kind}.{key}: there is no such resource")
            tree["resources"][kind][key] = tree["resources"][kind][key] | changes
    for place in ("workspace", "run_as", "permissions"):
        tree[place] = own.get(place)
    tree["bundle"] = main["bundle"] | {"target": target, "git": {"commit": "0" * 40}}
    user = {"userName": "jane@example.com", "short_name": "jane", "domain_friendly_name": "jane"}
    root = f"/Workspace/Users/jane@example.com/.bundle/raypipe/{target}"
    facts = {"root_path": root, "file_path": f"{root}/files", "current_user": user}
    tree["workspace"] = facts | (own.get("workspace") or {})
    # Values that another one wins over are read, too: elsewhere they count.
    _filled({"variables": values, "targets": {target: own["variables"]}}, tree, ())
    return _filled(tree, tree, ())


def _filled(node: Tree, tree: Tree, on_the_way: tuple[str, ...], at: str = "") -> Tree:
    if isinstance(node, dict):
        return {k: _filled(v, tree, on_the_way, f"{at}.{k}".lstrip(".")) for k, v in node.items()}
    if isinstance(node, list):
        return [_filled(v, tree, on_the_way, f"{at}.{i}") for i, v in enumerate(node)]
    if isinstance(node, str) and re.search(
        r"\$\s+\{|\$\w+\}|(?<!\$)(?<!\{)\{(var|resources|bundle)\.", node
    ):
        raise Wrong(f"{at}: {node} is no reference")
    if not isinstance(node, str) or "${" not in node:
        return node
    whole = REFERENCE.fullmatch(node)
    parts: list[str] = []
    end = 0
    for match in REFERENCE.finditer(node):
        if match[1] in on_the_way:
            raise Wrong(f"{at}: ${{{match[1]}}} refers to itself")
        found = _looked_up(match[1], tree, at)
        value = found if found is None else _filled(found, tree, (*on_the_way, match[1]), at)
        if whole:
            return node if value is None else value
        if isinstance(value, dict | list):
            raise Wrong(f"{at}: ${{{match[1]}}} is no text")
        parts += [node[end : match.start()], match[0] if value is None else str(value)]
        end = match.end()
    rest = node[end:]
    if "${" in rest or any("${" in part for part in parts[::2]):
        raise Wrong(f"{at}: {node} is no reference")
    return "".join([*parts, rest])


def _looked_up(name: str, tree: Tree, at: str) -> Any:
    """What a reference means; None if only a deployment knows."""
    first, *steps = name.split(".")
    if first not in ("var", "bundle", "workspace", "resources"):
        raise Wrong(f"{at}: ${{{name}}}: there is no {first}")
    node = tree["variables" if first == "var" else first]
    for number, step in enumerate(steps):
        if not isinstance(node, dict) or step not in node:
            of_resource = first == "resources" and number == 2 and len(steps) == 3
            if of_resource and step in OUTPUTS:
                return None
            raise Wrong(f"{at}: ${{{name}}}: there is no {step}")
        node = node[step]
    if first in ("var", "bundle", "workspace") and not steps:
        raise Wrong(f"{at}: ${{{name}}} names nothing")
    return node


def _of_target(tree: Tree, parsed: Mapping[str, Tree]) -> Iterator[str]:
    yield from _of_files(parsed)
    for kind, names in NAMED.items():
        for key in names ^ set(tree["resources"].get(kind, {})):
            yield f"resources.{kind}.{key}: it is named in README.md and not here, or the reverse"
    for kind, resources in tree["resources"].items():
        if kind not in TYPES:
            yield f"resources.{kind}: there is no such type"
            continue
        for key, resource in resources.items():
            at = f"resources.{kind}.{key}"
            try:
                model = TYPES[kind].from_dict(resource)  # type: ignore[attr-defined]
                yield from _of_scalars(resource, model.as_dict(), at)
            except (ValueError, TypeError, AttributeError) as e:
                yield f"{at}: {e}"
                continue
            yield from _of_free_names(resource, at)
            if kind == "jobs":
                yield from _of_job(key, resource, tree)
            if kind == "cluster_policies":
                yield from _of_policy(resource, at)
    for name, value in tree["variables"].items():
        # Clusters that no job of this target uses.
        if isinstance(value, dict) and "spark_version" in value:
            try:
                made = ClusterSpec.from_dict(value)  # type: ignore[arg-type]
                yield from _of_scalars(value, made.as_dict(), f"variables.{name}")
            except (ValueError, TypeError) as e:
                yield f"variables.{name}: {e}"
            yield from _of_free_names(value, f"variables.{name}")
            yield from _of_cluster(value, tree, f"variables.{name}")


def _of_scalars(given: Tree, made: Tree, at: str) -> Iterator[str]:
    """The model makes a text of anything; so would it of a list or a mapping."""
    if isinstance(given, dict | list) and not isinstance(made, dict | list):
        if given:
            yield f"{at}: {given!r} is no {type(made).__name__}"
    elif isinstance(given, bool) and isinstance(made, str):
        yield f"{at}: {given!r} is no text"
    elif isinstance(given, dict):
        for key, value in given.items():
            yield from _of_scalars(value, (made or {}).get(key), f"{at}.{key}")
    elif isinstance(given, list):
        for number, value in enumerate(given):
            yield from _of_scalars(value, made[number], f"{at}.{number}")


def _of_free_names(node: Tree, at: str) -> Iterator[str]:
    if isinstance(node, list):
        for number, value in enumerate(node):
            yield from _of_free_names(value, f"{at}.{number}")
    for key, value in node.items() if isinstance(node, dict) else ():
        if key in FREE and isinstance(value, dict):
            for name in set(value) - FREE[key]:
                yield f"{at}.{key}.{name}: this name is not known"
        if key in FREE and isinstance(value, list):  # tags of an endpoint or a warehouse
            for name in {entry.get("key") for entry in value} - FREE["custom_tags"]:
                yield f"{at}.{key}.{name}: this name is not known"
        yield from _of_free_names(value, f"{at}.{key}")


# Jobs

KINDS_OF_TASK = "spark_python_task", "condition_task", "run_job_task", "sql_task"


def _of_job(key: str, job: Tree, tree: Tree) -> Iterator[str]:
    at = f"resources.jobs.{key}"
    tasks = {task["task_key"]: task for task in job["tasks"]}
    clusters = {cluster["job_cluster_key"]: cluster for cluster in job.get("job_clusters", ())}
    if len(tasks) != len(job["tasks"]) or len(clusters) != len(job.get("job_clusters", ())):
        yield f"{at}: a key stands twice"
    used = {task.get("job_cluster_key") for task in job["tasks"]} - {None}
    for name in used ^ set(clusters):
        yield f"{at}: the cluster {name} is used and not there, or there and not used"
    for name in ("queue", "timeout_seconds", "email_notifications", "max_concurrent_runs"):
        if not job.get(name):
            yield f"{at}: it has no {name}"
    if not (job.get("permissions") or [{}])[0].get("group_name"):
        yield f"{at}: it has no permissions"
    for cluster in clusters.values():
        yield from _of_cluster(cluster["new_cluster"], tree, f"{at}.{cluster['job_cluster_key']}")
    for name, task in tasks.items():
        kinds = [kind for kind in KINDS_OF_TASK if kind in task]
        if len(kinds) != 1:
            yield f"{at}.{name}: it is {kinds or 'no task'}"
        for before in task.get("depends_on", ()):
            if before["task_key"] not in tasks or _reaches(tasks, before["task_key"], name):
                yield f"{at}.{name}: it cannot wait for {before['task_key']}"
            is_condition = "condition_task" in tasks.get(before["task_key"], {})
            if ("outcome" in before) != is_condition:
                yield f"{at}.{name}: only a condition has an outcome"
            elif is_condition and before["outcome"] not in ("true", "false"):
                yield f"{at}.{name}: {before['outcome']} is no outcome"
        if "spark_python_task" in task:
            yield from (f"{at}.{name}: {said}" for said in _of_command(task, job, clusters))
        if "sql_task" in task:
            yield from (f"{at}.{name}: {said}" for said in _of_query(task["sql_task"]))
    for path, value in leaves(job["tasks"]):
        for inner in DYNAMIC.findall(str(value)):
            if not _is_dynamic(inner, tasks, job):
                yield f"{at}.tasks.{path}: {{{{{inner}}}}} is no value of a run"


def _of_query(task: Tree) -> Iterator[str]:
    """Its parameters are those that the query's file asks for."""
    text = (FOLDER / "sql" / Path(task["file"]["path"]).name).read_text("utf-8")
    # Names in comments are explanations.
    code = "\n".join(line.partition("--")[0] for line in text.splitlines())
    for name in sorted(set(re.findall(r":(\w+)", code)) ^ set(task.get("parameters", {}))):
        yield f"the parameter {name} is asked for and not given, or the reverse"


def _reaches(tasks: Mapping[str, Tree], start: str, goal: str, seen: tuple[str, ...] = ()) -> bool:
    """Does `start` wait for `goal`?"""
    if start == goal:
        return True
    befores = [before["task_key"] for before in tasks.get(start, {}).get("depends_on", ())]
    return any(_reaches(tasks, b, goal, (*seen, start)) for b in befores if b not in seen)


def _is_dynamic(inner: str, tasks: Mapping[str, Tree], job: Tree) -> bool:
    if inner == "job.run_id":
        return True
    if match := re.fullmatch(r"job\.parameters\.(\w+)", inner):
        return match[1] in {parameter["name"] for parameter in job.get("parameters", ())}
    match = re.fullmatch(r"tasks\.(\w+)\.values\.(?:is_drift|retrain)", inner)
    # Only jobs/drift.py sets one.
    return bool(match) and tasks.get(match[1], {}).get("spark_python_task", {}).get(  # type: ignore[index]
        "python_file", ""
    ).endswith("jobs/drift.py")


def _of_command(task: Tree, job: Tree, clusters: Mapping[str, Tree]) -> Iterator[str]:
    """Is this a command line that the entry point takes?"""
    run = task["spark_python_task"]
    if task.get("job_cluster_key") not in clusters or not task.get("libraries"):
        yield "no cluster or no libraries"
    verb = Path(run["python_file"]).stem
    arguments = [str(parameter) for parameter in run["parameters"]]
    config = arguments[0]
    if not re.fullmatch(r"/Workspace/\S+/files/jobs/configs/[\w.]+", config):
        yield f"{config}: a task starts in its own file's folder, so the config has a full path"
    here = ROOT / "jobs" / "configs" / Path(config).name
    overrides = [argument for argument in arguments if re.match(r"[a-z_]+[.\w]*=", argument)]
    overrides = [DYNAMIC.sub("7", override) for override in overrides]
    yield from _of_config(here, tuple(overrides))
    if Path(run["python_file"]).parent.name == "jobs":
        yield from _of_verb(verb, (str(here), *arguments[1:]))


@cache
def _of_config(config: Path, overrides: tuple[str, ...]) -> tuple[str, ...]:
    try:
        load(Job, config, list(overrides))
    except RaypipeError as e:
        return (str(e),)
    return ()


@cache
def _of_verb(verb: str, arguments: tuple[str, ...]) -> tuple[str, ...]:
    if verb not in _commands():
        return (f"raypipe has no verb {verb}",)
    try:
        _commands()[verb].make_context(verb, list(arguments), resilient_parsing=False)
    except Exception as e:
        return (f"raypipe {verb} {shlex.join(arguments)}: {e}",)
    return ()


@cache
def _commands() -> dict[str, Any]:
    """The verbs as click commands."""
    from raypipe import main  # noqa: F401  (it registers all verbs)

    group: Any = typer.main.get_command(app)
    found = dict(group.commands)
    found["prepare"] = group.commands["table"].commands["prepare"]
    return found


# Clusters and policies

OPERATORS = {
    "fixed": {"value"},
    "allowlist": {"values"},
    "range": {"minValue", "maxValue"},
}
MORE = {"hidden", "defaultValue", "isOptional"}
CLUSTER_FIELDS = {field.name for field in dataclasses.fields(ClusterSpec)}
POLICY_ONLY = {"cluster_type"}  # what no cluster has


def _of_policy(policy: Tree, at: str) -> Iterator[str]:
    try:
        rules = json.loads(policy["definition"])
    except (KeyError, TypeError, ValueError) as e:
        yield f"{at}.definition: {e}"
        return
    for path, rule in rules.items():
        head, *rest = path.split(".", 1)
        if head not in CLUSTER_FIELDS | POLICY_ONLY:
            yield f"{at}.definition: {path} is no attribute of a cluster"
        elif head in FREE and rest[0] not in FREE[head]:
            yield f"{at}.definition: {path}: this name is not known"
        elif head not in FREE and rest and not _is_field(head, rest[0]):
            yield f"{at}.definition: {path} is no attribute of a cluster"
        kind = rule.get("type")
        wanted = OPERATORS.get(kind)
        if wanted is None:
            yield f"{at}.definition: {path}: {kind} is no kind of rule"
        elif not wanted <= set(rule) <= wanted | MORE | {"type"}:
            yield f"{at}.definition: {path}: {sorted(rule)}"


def _is_field(head: str, name: str) -> bool:
    try:
        ClusterSpec.from_dict({head: {name: None}})  # type: ignore[arg-type, misc]
    except (ValueError, TypeError):
        return False
    return True


def _of_cluster(cluster: Tree, tree: Tree, at: str) -> Iterator[str]:
    """Does it obey its policy, and can Ray run on it?"""
    name = re.fullmatch(
        r"\$\{resources\.cluster_policies\.(\w+)\.id\}", cluster.get("policy_id", "")
    )
    if name is None:
        yield f"{at}: it has no policy"
        return
    try:
        rules = json.loads(tree["resources"]["cluster_policies"][name[1]]["definition"])
    except ValueError:
        return  # said of the policy
    flat = dict(_settings(cluster)) | {"cluster_type": "job"}
    for path, rule in rules.items():
        if path not in flat:
            yield f"{at}: its policy {name[1]} wants {path}"
        elif not _obeys(flat[path], rule):
            yield f"{at}: {path}={flat[path]!r}, which the policy {name[1]} refuses: {rule}"
    conf = cluster.get("spark_conf", {})
    has_gpus = "-gpu-" in cluster.get("spark_version", "")
    if has_gpus and conf.get("spark.task.resource.gpu.amount") != "0":
        yield f"{at}: Spark's tasks would take GPUs from Ray"
    if cluster.get("num_workers") == 0 and conf.get("spark.master") != "local[*]":
        yield f"{at}: no workers, and not a single node"
    if "RAY_AUTH_TOKEN" not in cluster.get("spark_env_vars", {}):
        yield f"{at}: Ray has no token"
    for key, value in cluster.get("spark_env_vars", {}).items():
        secret = re.fullmatch(r"\{\{secrets/[\w.-]+/([\w-]+)\}\}", str(value))
        is_secret = key.endswith(("TOKEN", "CLIENT_ID", "CLIENT_SECRET", "TENANT_ID"))
        if is_secret != bool(secret) or (secret and secret[1] not in SECRET_KEYS):
            yield f"{at}.spark_env_vars.{key}: {value}"


def _settings(cluster: Tree) -> Iterator[tuple[str, Any]]:
    for key, value in cluster.items():
        if isinstance(value, dict):
            for name, inner in value.items():
                yield f"{key}.{name}", inner
        else:
            yield key, value


def _obeys(value: Any, rule: Mapping[str, Any]) -> bool:
    if rule["type"] == "fixed":
        return bool(value == rule["value"])
    if rule["type"] == "allowlist":
        return value in rule["values"]
    return bool(rule["minValue"] <= int(value) <= rule["maxValue"])


# Files


def _of_files(parsed: Mapping[str, Tree]) -> Iterator[str]:
    """Paths are relative to the file that they stand in."""
    [wheel] = [
        (FOLDER / file["source"]).resolve()
        for artifact in parsed[MAIN]["artifacts"].values()
        for file in artifact["files"]
    ]
    for name, tree in parsed.items():
        here = (FOLDER / name).parent
        for path, value in leaves(tree):
            last = path.rpartition(".")[2]
            if last == "whl" and (here / value).resolve() != wheel:
                yield f"{name}: {path}: {value} is not the wheel that is built"
            is_path = last in ("python_file", "requirements", "file_path")
            if is_path and "${" not in str(value) and not (here / value).is_file():
                yield f"{name}: {path}: there is no file {value}"
            inside = re.fullmatch(r"\$\{workspace\.file_path\}/([\w./-]+)", str(value))
            if inside and not (ROOT / inside[1]).is_file():
                yield f"{name}: {path}: there is no file {inside[1]}"
    for place in (*parsed[MAIN]["sync"]["paths"],):
        if not (FOLDER / place).is_dir():
            yield f"{MAIN}: sync.paths: there is no folder {place}"
    for pattern in parsed[MAIN]["include"]:
        found = {path.relative_to(FOLDER).as_posix() for path in FOLDER.glob(pattern)}
        if not found or found != set(parsed) - {MAIN}:
            yield f"{MAIN}: include: {pattern} names {sorted(found)}"
    for artifact in parsed[MAIN]["artifacts"].values():
        if not (FOLDER / artifact["path"] / "pyproject.toml").is_file():
            yield f"{MAIN}: artifacts: {artifact['path']} has no pyproject.toml"
        if str(wheel.parent.relative_to(ROOT)) not in artifact["build"]:
            yield f"{MAIN}: artifacts: it builds elsewhere than {wheel.parent}"
