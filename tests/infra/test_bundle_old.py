"""What can be proved about infra/ without a workspace or a cluster.

The bundle is filled in as the Databricks CLI would fill it (target over default, whole references
keep their type) and every job then goes through Databricks' own typed model, which refuses a field
it does not know at any depth. The Ray environment goes through Ray's own validation and packer.
"""

from __future__ import annotations

import importlib.metadata
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from databricks.bundles.core import Variable
from databricks.bundles.jobs import Job
from ray._private.runtime_env.packaging import create_package
from ray.runtime_env import RuntimeEnv

from raypipe.config import field_names
from raypipe.job import Job as RaypipeJob

ROOT = Path(__file__).parents[1]
BUNDLE = ROOT / "infra" / "databricks"
ROOT_FILE = yaml.safe_load((BUNDLE / "databricks.yml").read_text())
RESOURCE_FILES = {
    path: yaml.safe_load(path.read_text()) for path in sorted(BUNDLE.glob("resources/*.yml"))
}
JOBS: dict[str, Any] = {
    key: job for tree in RESOURCE_FILES.values() for key, job in tree["resources"]["jobs"].items()
}
TARGETS: dict[str, Any] = ROOT_FILE["targets"]
FROM_OUTSIDE = {  # BUNDLE_VAR_host and so on
    "host": "https://workspace.example",
    "email": "team@example.com",
    "storage": "abfss://tables@account.example/solar",
}
DEFAULTS = {
    name: spec.get("default") for name, spec in ROOT_FILE["variables"].items()
} | FROM_OUTSIDE
REFERENCE = re.compile(r"\$\{([\w.]+)\}")
OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_]+)+=\S+")


def fill(node: Any, target: str) -> Any:
    """`node` with the variables of `target` in place; ${bundle.…}, ${workspace.…} and
    ${resources.…} stay for the CLI.
    """
    if isinstance(node, dict):
        return {key: fill(value, target) for key, value in node.items()}
    if isinstance(node, list):
        return [fill(value, target) for value in node]
    for name in REFERENCE.findall(node) if isinstance(node, str) else ():
        if name.startswith("var."):
            value = fill(
                (DEFAULTS | TARGETS[target]["variables"])[name.removeprefix("var.")], target
            )
            if (
                node == f"${{{name}}}"
            ):  # a whole reference keeps its type: a number, or a whole cluster
                return value
            node = node.replace(f"${{{name}}}", str(value))
    return node


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", JOBS)
def test_a_job_is_valid_in_every_target(name: str, target: str) -> None:
    tree = fill(JOBS[name], target)
    job: Any = Job.from_dict(tree)
    assert (job.max_concurrent_runs, job.queue.enabled) == (1, True)
    assert job.timeout_seconds > 0
    assert job.email_notifications.on_failure == [FROM_OUTSIDE["email"]]
    clusters = {cluster.job_cluster_key for cluster in job.job_clusters}
    for task in (task for task in job.tasks if task.spark_python_task):
        assert task.job_cluster_key in clusters
        config, *overrides = task.spark_python_task.parameters
        assert config.startswith(
            "${workspace.file_path}/jobs/configs/"
        )  # a task's working folder is its own file's
        assert all(OVERRIDE.fullmatch(override) for override in overrides), overrides
        assert {override.partition("=")[0] for override in overrides} <= set(
            field_names(RaypipeJob)
        )
    for cluster in (item["new_cluster"] for item in tree["job_clusters"]):
        assert isinstance(cluster["num_workers"], int)
        assert "-gpu-ml-" in cluster["spark_version"]
        assert cluster["data_security_mode"] == "SINGLE_USER"
        assert cluster["spark_env_vars"]["RAY_AUTH_MODE"] == "token"
        for key, value in cluster["spark_env_vars"].items():
            assert value.startswith("{{secrets/") == key.endswith(
                ("TOKEN", "CLIENT_ID", "CLIENT_SECRET")
            )


@pytest.mark.parametrize(
    "path", ["Job.tag", "Task.tasks.0.task_kye", "ClusterSpec.job_clusters.0.new_cluster.workers"]
)
def test_a_misspelt_field_is_refused(path: str) -> None:
    owner, *steps, field = path.split(".")
    job = node = fill(JOBS["train"], "sit")
    for step in steps:
        node = node[int(step) if step.isdigit() else step]
    node[field] = "x"
    with pytest.raises(ValueError, match=f"Unexpected field '{field}' for class {owner}"):
        Job.from_dict(job)


def test_every_reference_is_declared_and_every_variable_is_used() -> None:
    used = set(REFERENCE.findall(yaml.safe_dump([ROOT_FILE, *RESOURCE_FILES.values()])))
    variables = {name for name in used if name.startswith("var.")}
    assert variables == {f"var.{name}" for name in ROOT_FILE["variables"]}
    from_the_cli = {"bundle.name", "bundle.target", "bundle.git.commit", "workspace.file_path"}
    assert used - variables == from_the_cli | {"resources.jobs.retrain.id"}
    assert {name for name, spec in ROOT_FILE["variables"].items() if "default" not in spec} == set(
        FROM_OUTSIDE
    )


def test_targets_override_only_what_exists() -> None:
    assert set(TARGETS) == {"sit", "uat", "prod"}
    for name, target in TARGETS.items():
        assert set(target["variables"]) <= set(ROOT_FILE["variables"])
        assert set(target.get("resources", {}).get("jobs", {})) <= set(JOBS)
        assert target["mode"] == ("development" if name == "sit" else "production")
        assert target["presets"]["trigger_pause_status"] == (
            "UNPAUSED" if name == "prod" else "PAUSED"
        )
        if target["mode"] == "production":
            assert target["run_as"] == {"service_principal_name": "${var.service_principal}"}
            assert (
                "${bundle.target}" in target["workspace"]["root_path"]
            )  # uat and prod may share a workspace


def test_drift_reaches_retrain_only_through_the_condition() -> None:
    drift: Any = Job.from_dict(fill(JOBS["drift"], "prod"))
    retrain: Any = Job.from_dict(fill(JOBS["retrain"], "prod"))
    tasks = {task.task_key: task for task in drift.tasks}
    [start] = [task for task in drift.tasks if task.run_job_task]
    assert start.run_job_task.job_id == Variable(path="resources.jobs.retrain.id", type=int)
    [gate] = start.depends_on
    assert gate.outcome == "true"
    condition = tasks[gate.task_key].condition_task
    check = tasks[tasks[gate.task_key].depends_on[0].task_key]
    assert condition.left == f"{{{{tasks.{check.task_key}.values.is_drift}}}}"
    assert (condition.op.value, condition.right) == ("EQUAL_TO", "true")
    assert "--exit-code" not in check.spark_python_task.parameters  # a finding is no failure
    assert (
        drift.timeout_seconds
        >= (1 + check.max_retries) * check.timeout_seconds + retrain.timeout_seconds
    )
    assert (
        drift.schedule.pause_status is None
    )  # PAUSED or UNPAUSED here would win over the target's preset


def test_local_files_exist() -> None:
    named = [
        (path, re.findall(r"(?:python_file|requirements): (\S+)", path.read_text()))
        for path in RESOURCE_FILES
    ]
    assert all(files for _, files in named)
    assert [
        file for path, files in named for file in files if not (path.parent / file).is_file()
    ] == []
    assert (ROOT / "jobs" / "configs" / DEFAULTS["config"]).is_file()


def test_the_cluster_gets_the_versions_tested_here_and_its_own_torch() -> None:
    lines = [
        line
        for line in (BUNDLE / "requirements.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    pins = {re.split(r"\[|==", line)[0]: line.partition("==")[2] for line in lines}
    assert pins == {name: importlib.metadata.version(name) for name in pins}
    assert not {"torch", "numpy", "pandas", "pyarrow"} & set(pins)


def test_ray_accepts_the_runtime_env_and_packs_only_the_code(tmp_path: Path) -> None:
    env = yaml.safe_load((ROOT / "infra" / "ray" / "runtime_env.yaml").read_text())
    assert set(env) <= RuntimeEnv.known_fields  # RuntimeEnv lets an unknown key pass
    assert RuntimeEnv(**env)["env_vars"]["RAY_AUTH_MODE"] == "token"
    with pytest.raises(TypeError, match="env_vars"):
        RuntimeEnv(**env | {"env_vars": {"RAY_USAGE_STATS_ENABLED": 0}})
    wanted = ["jobs/train.py", "raypipe/watch/runs.py", "infra/ray/README.md"]
    unwanted = [
        ".git/HEAD",
        ".venv/bin/python",
        "runs/a.pt",
        "mlflow.db",
        "raypipe/__pycache__/x.pyc",
        "dist/a.whl",
    ]
    for file in wanted + unwanted:
        (tmp_path / "tree" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / file).touch()
    for name, excludes, expected in (
        ("some", env["excludes"], wanted),
        ("all", [], wanted + unwanted),
    ):
        create_package(
            str(tmp_path / "tree"),
            tmp_path / f"{name}.zip",
            include_gitignore=True,
            excludes=excludes,
        )
        packed = zipfile.ZipFile(tmp_path / f"{name}.zip").namelist()
        assert sorted(file for file in packed if not file.endswith("/")) == sorted(expected)
