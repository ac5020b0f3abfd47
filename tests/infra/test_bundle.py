"""The Databricks bundle: every resource in every target, and what a slip of a finger does to it."""

from __future__ import annotations

import importlib.metadata
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from databricks.bundles.model_serving_endpoints import ModelServingEndpoint

from tests.infra import bundle

FILES = bundle.read()
PARSED = bundle.trees(FILES)
TARGETS = ["sit", "uat", "prod"]
KEY = re.compile(r"(?<![\w$.{/])([A-Za-z_][\w.]*)(?=:(?:\s|$))")


def filled(target: str) -> dict[str, Any]:
    tree: dict[str, Any] = bundle.fill(PARSED, target)
    return tree


@pytest.mark.parametrize("target", TARGETS)
def test_every_resource_is_valid_in_every_target(target: str) -> None:
    assert bundle.problems(FILES) == []
    tree = filled(target)
    made = {kind: set(resources) for kind, resources in tree["resources"].items()}
    assert all(made[kind] == names for kind, names in bundle.NAMED.items())
    for kind, resources in tree["resources"].items():
        for resource in resources.values():
            bundle.TYPES[kind].from_dict(resource)  # type: ignore[attr-defined]


# Slips


@dataclass(frozen=True)
class Slip:
    file: str
    line: int
    word: str
    now: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.word} -> {self.now}"


def slips(rng: random.Random) -> Iterator[Slip]:
    """One misspelling of each field, block and reference name, outside of comments and prose."""
    for file, text in FILES.items():
        at = 0
        for number, line in enumerate(text.splitlines(keepends=True), 1):
            code = re.sub(r"(^|\s)(#|--\s).*", "", line)  # of YAML and of SQL
            is_prose = re.match(r"\s*(description|build|comment): [A-Z]", code)
            words = [*KEY.finditer(code), *bundle.REFERENCE.finditer(code)] if not is_prose else ()
            for match in words:
                start, end = at + match.start(1), at + match.end(1)
                now = misspelt(match[1], rng)
                yield Slip(file, number, match[1], now, text[:start] + now + text[end:])
            at += len(line)


def misspelt(word: str, rng: random.Random) -> str:
    """A letter that is missing, stands twice, or has changed places with its neighbour."""
    places = [i for i in range(1, len(word)) if word[i].isalpha() and word[i - 1].isalpha()]
    i = rng.choice(places)
    how = rng.randrange(3)
    if how == 0 or (how == 2 and word[i] == word[i - 1]):
        return word[:i] + word[i + 1 :]
    if how == 1:
        return word[:i] + word[i] + word[i:]
    return word[: i - 1] + word[i] + word[i - 1] + word[i + 1 :]


def is_named(slip: Slip) -> bool:
    """Does a problem say the misspelt name, or the one that is missing now?"""
    said = bundle.problems({**FILES, slip.file: slip.text})
    return any(name in problem for problem in said for name in (slip.now, slip.word))


def test_thirty_misspellings_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    every = list(slips(random.Random(18)))
    assert len(every) > 600
    thirty = random.Random(7).sample(every, 30)
    missed = [str(slip) for slip in thirty if not is_named(slip)]
    with capsys.disabled():
        print(f"\n30 misspellings, {30 - len(missed)} found:", *thirty, sep="\n  ")
    assert missed == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_every_name_can_be_misspelt_and_is_found(seed: int) -> None:
    assert [str(slip) for slip in slips(random.Random(seed)) if not is_named(slip)] == []


@pytest.mark.parametrize(
    ("file", "before", "after", "said"),
    [
        # Twice: PyYAML keeps the last one and says nothing.
        (
            "resources/data.yml",
            "      max_concurrent_runs: 1\n      queue: &queue",
            "      queue: {enabled: false}\n      max_concurrent_runs: 1\n      queue: &queue",
            "'queue' stands twice",
        ),
        (
            "databricks.yml",
            "  epochs:\n",
            "  epochs:\n    description: Twice as many\n    default: 3\n  epochs:\n",
            "'epochs' stands twice",
        ),
        # Types
        ("resources/data.yml", "timeout_seconds: 64800", "timeout_seconds: soon", "soon"),
        (
            "resources/data.yml",
            "max_concurrent_runs: 1",
            "max_concurrent_runs: [1]",
            "max_concurrent_runs|list",
        ),
        (
            "resources/data.yml",
            "          - ${var.email}\n        on_duration",
            '          - ["${var.email}"]\n        on_duration',
            "on_failure",
        ),
        ("resources/data.yml", "name: raypipe-ingest", "name: {raypipe: ingest}", "name"),
        ("resources/data.yml", "description: Tag", "description: {Tag: a}\n      #", "description"),
        ("resources/data.yml", "enabled: true", "enabled: maybe", "maybe"),
        ("resources/data.yml", "level: CAN_VIEW", "level: CAN_LOOK", "CAN_LOOK"),
        ("resources/catalog.yml", "[USE_SCHEMA, SELECT]", "[USE_SCHEMAS, SELECT]", "USE_SCHEMAS"),
        ("resources/data.yml", "      tags: *tags", "      tags:", "nothing stands there"),
        (
            "resources/data.yml",
            "job_cluster_key: cpu\n          depends_on",
            "job_cluster_key: cpus\n          depends_on",
            "cpus",
        ),
        # Anchors, indentation, a second document, a file of something else
        ("resources/data.yml", "tags: *tags", "tags: *tag", "tag"),
        ("resources/data.yml", "    clean:\n      name", "   clean:\n      name", "data.yml"),
        ("resources/data.yml", "resources:\n", "---\nresources:\n---\n", "data.yml"),
        ("resources/data.yml", "resources:\n", "resource:\n", "resource"),
        # Variables
        (
            "databricks.yml",
            "  email:\n",
            "  unused:\n    description: Nobody reads this one\n    default: 1\n  email:\n",
            "variables.unused: nothing uses it",
        ),
        (
            "databricks.yml",
            "    description: Most epochs of a training run\n",
            "",
            "epochs.description",
        ),
        (
            "databricks.yml",
            "    description: URL of the workspace",
            "    default: https://adb-1.example\n    description: URL of the workspace",
            "host: it is about one company",
        ),
        (
            "databricks.yml",
            "    type: complex\n    default:\n      spark.databricks",
            "    default:\n      spark.databricks",
            "single_node_conf",
        ),
        (
            "databricks.yml",
            "default: ${var.one_gpu_node}",
            "default: ${var.training_cluster}",
            "refers to itself",
        ),
        (
            "databricks.yml",
            "      epochs: 5\n",
            "      epoch: 5\n",
            "epoch: there is no such variable",
        ),
        ("databricks.yml", "${var.storage}\n", "$ {var.storage}\n", "is no reference"),
        (
            "databricks.yml",
            "/Users/${workspace.current_user.userName}/",
            "/Users/${workspace.current_user.name}/",
            "current_user.name",
        ),
        # Targets
        ("databricks.yml", "      branch: main", "      branch: any", "uat.git.branch"),
        ("databricks.yml", "  prod:\n", "  production:\n", "are not sit, uat and prod"),
        (
            "databricks.yml",
            "    mode: development\n    default: true",
            "    mode: development",
            "not one default",
        ),
        ("databricks.yml", "/${bundle.target}\n    run_as", "\n    run_as", "root_path"),
        (
            "databricks.yml",
            "      - level: CAN_MANAGE\n",
            "      - level: CAN_VIEW\n",
            "CAN_VIEW for all resources",
        ),
        ("databricks.yml", "        files: {lifecycle", "        file: {lifecycle", "volumes.file"),
        # Tasks
        ("resources/watching.yml", 'outcome: "true"', 'outcome: "yes"', "yes is no outcome"),
        (
            "resources/watching.yml",
            "tasks.check.values.retrain",
            "tasks.chek.values.retrain",
            "tasks.chek",
        ),
        (
            "resources/watching.yml",
            "tasks.check.values.retrain",
            "tasks.check.values.drifted",
            "drifted",
        ),
        (
            "resources/training.yml",
            "{{job.run_id}}\n              - train.workers",
            "{{job.id}}\n              - train.workers",
            "job.id",
        ),
        (
            "resources/watching.yml",
            "{{job.parameters.create}}",
            "{{job.parameters.make}}",
            "parameters.make",
        ),
        (
            "resources/watching.yml",
            "        - task_key: called\n          depends_on:\n            - task_key: check",
            "        - task_key: called\n          depends_on:\n            - task_key: retrain",
            "cannot wait for retrain",
        ),
        (
            "resources/training.yml",
            "job_id: ${resources.jobs.serve.id}",
            "job_id: ${resources.jobs.server.id}",
            "server",
        ),
        (
            "resources/training.yml",
            "job_id: ${resources.jobs.serve.id}",
            "job_id: ${resources.jobs.serve.number}",
            "number",
        ),
        # Command lines
        (
            "resources/training.yml",
            "- train.epochs=${var.epochs}\n              - search",
            "- train.epoch=${var.epochs}\n              - search",
            "epoch",
        ),
        (
            "resources/training.yml",
            "- cluster.address=${var.ray_of_search}",
            "- cluster.address=",
            "address",
        ),
        ("resources/data.yml", "--side=${var.side}", "--sides=${var.side}", "--sides"),
        ("resources/data.yml", "--side=${var.side}", "--side=${var.config}", "solar.yaml"),
        ("resources/watching.yml", "--once", "--twice", "--twice"),
        ("databricks.yml", "    default: solar.yaml", "    default: lunar.yaml", "lunar.yaml"),
        ("databricks.yml", "    default: 40", "    default: many", "many"),
        ("resources/data.yml", "${workspace.file_path}/jobs/configs", "jobs/configs", "full path"),
        # Files
        ("resources/data.yml", "../../../jobs/clean.py", "../../../jobs/cleen.py", "cleen.py"),
        (
            "resources/data.yml",
            "requirements: ../requirements.txt",
            "requirements: ./requirements.txt",
            "./requirements.txt",
        ),
        (
            "resources/data.yml",
            "../../../dist/databricks/*.whl",
            "../../../dist/*.whl",
            "is not the wheel",
        ),
        ("databricks.yml", "    - ../../jobs", "    - ../../job", "../../job"),
        ("databricks.yml", "resources/*.yml", "resource/*.yml", "include"),
        # Clusters
        (
            "databricks.yml",
            "num_workers: 0\n      data_security_mode: SINGLE_USER\n      azure",
            "num_workers: 3\n      data_security_mode: SINGLE_USER\n      azure",
            "num_workers",
        ),
        (
            "databricks.yml",
            '      spark.task.resource.gpu.amount: "0" # Ray',
            '      spark.task.resource.gpu.amount: "1" # Ray',
            "gpu.amount",
        ),
        (
            "databricks.yml",
            "availability: SPOT_WITH_FALLBACK_AZURE",
            "availability: SPOT_AZURE",
            "availability",
        ),
        (
            "databricks.yml",
            "data_security_mode: SINGLE_USER # Ray on",
            "data_security_mode: USER_ISOLATION # Ray on",
            "USER_ISOLATION",
        ),
        ("databricks.yml", "RAY_AUTH_MODE: token", "RAY_AUTH_MODE: none", "RAY_AUTH_MODE"),
        ("databricks.yml", "/ray-auth-token}}", "/ray-token}}", "ray-token"),
        (
            "databricks.yml",
            '"{{secrets/${var.secret_scope}/client-secret}}"',
            "dose1234",
            "DATABRICKS_CLIENT_SECRET",
        ),
        ("resources/compute.yml", '"type": "allowlist"', '"type": "alowlist"', "alowlist"),
        (
            "resources/compute.yml",
            '"autoscale.max_workers"',
            '"autoscale.max_worker"',
            "max_worker",
        ),
        ("resources/compute.yml", '"maxValue": 60', '"maximum": 60', "autotermination"),
        ("resources/compute.yml", '"hidden": true},', '"hidden": true', "definition"),
    ],
)
def test_what_else_can_be_wrong_is_named(file: str, before: str, after: str, said: str) -> None:
    assert before in FILES[file]
    # Only the first: an anchor may carry it to others.
    wrong = {**FILES, file: FILES[file].replace(before, after, 1)}
    problems = bundle.problems(wrong)
    assert problems and re.search(said, "\n".join(problems)), problems


def test_a_variable_that_nobody_gave_is_named() -> None:
    for name in bundle.GIVEN:
        given = {k: v for k, v in bundle.GIVEN.items() if k != name}
        with pytest.raises(bundle.Wrong, match=f"required variable {name}$"):
            bundle.fill(PARSED, "prod", given)


# What stands nowhere


PLACES = [  # a host, a user, a secret; what is an example or a placeholder is none
    (
        "host",
        r"https?://(?!127\.0\.0\.1|localhost|HOST\b)[\w.-]+\.(azuredatabricks\.net|cloud\.databricks\.com|gcp\.databricks\.com)",
    ),
    ("account", r"@(?!ACCOUNT\b|account\b|\$\{)[\w-]+\.(dfs|blob)\.core\.windows\.net"),
    ("user", r"\b[\w.+-]+@(?!example\.|ACCOUNT|account|\$\{|git\b|v\d)[\w-]+\.(com|net|org|io)\b"),
    (
        "token",
        r"\b(dapi[0-9a-f]{8,}|dose[0-9a-f]{8,}|gh[pousr]_\w{10,}|github_pat_\w+|eyJ[\w-]{20,}\.)",
    ),
    ("key", r"\b(AKIA|ASIA)[0-9A-Z]{16}\b|-----BEGIN [A-Z ]*PRIVATE KEY|AccountKey=[\w+/]{20,}"),
    ("id", r"\b(?!0{8})[0-9a-f]{8}-[0-9a-f]{4}-[1-5][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}\b"),
    (
        "secret",
        r"(?i)\b(client_?secret|password|token|api_?key|access_?key)\b[\"']?\s*[:=]\s*[\"']?(?!\{\{|\$|<|\(|null|none|true|false|token\b|var\.|azurerm_|data\.|module\.|each\.|local\.|secret|\"?\"?$|[A-Z_]+\b|[a-z-]+\")[\w+/~.-]{12,}",
    ),
]
PUBLIC = {  # ids of Azure's own built-in things, the same for everybody
    "2ff814a6-3304-4ab8-85cb-cd0e6f879c1d",  # the application AzureDatabricks
    # Roles: Storage Blob Data Contributor, Storage Blob Delegator, Monitoring Metrics Publisher.
    "ba92f5b4-2d11-453d-a403-e96b0029c9fe",
    "db58b8e5-c6ad-4a2a-8342-4190687cbf4a",
    "3913510d-42f4-4e42-8a64-420c390055eb",
}


def found_in(text: str) -> list[str]:
    seen = [
        f"{kind}: {match[0]}"
        for kind, pattern in PLACES
        for match in re.finditer(pattern, text)
        if match[0] not in PUBLIC
    ]
    return seen


def test_no_host_user_or_secret_stands_in_infra() -> None:
    infra = bundle.ROOT / "infra"
    files = [path for path in infra.rglob("*") if path.is_file() and ".terraform" not in path.parts]
    assert len(files) > 8
    seen = {}
    for path in files:
        # Binary files have no place there.
        if found := found_in(path.read_text("utf-8")):
            seen[path.relative_to(infra).as_posix()] = found
    assert seen == {}


@pytest.mark.parametrize(
    "text",
    [
        "host: https://adb-1234567890123456.7.azuredatabricks.net",
        "default: abfss://tables@plantstore.dfs.core.windows.net/solar",
        "email: jane.doe@plant.com",
        "token: dapi0123456789abcdef",
        'client_secret = "Zx8Q~1234567890abcdef"',
        "application_id: 3f2504e0-4f89-41d3-9a0c-0305e82c3301",
        "AWS: AKIAIOSFODNN7EXAMPL1",
        "password: hunter2hunter2",
    ],
)
def test_the_search_finds_one(text: str) -> None:
    assert found_in(text)


# What has to go together


def test_drift_reaches_retrain_only_through_the_condition() -> None:
    jobs = filled("prod")["resources"]["jobs"]
    tasks = {task["task_key"]: task for task in jobs["drift"]["tasks"]}
    [start] = [task for task in tasks.values() if "run_job_task" in task]
    assert start["run_job_task"]["job_id"] == "${resources.jobs.retrain.id}"
    assert start["depends_on"] == [{"task_key": "called", "outcome": "true"}]
    condition = tasks["called"]["condition_task"]
    assert condition == {
        "op": "EQUAL_TO",
        "left": "{{tasks.check.values.retrain}}",
        "right": "true",
    }
    check = tasks["check"]
    assert "--exit-code" not in check["spark_python_task"]["parameters"]  # a finding is no failure
    waits = sum(
        (1 + task["max_retries"]) * task["timeout_seconds"] for task in (tasks["prepare"], check)
    )
    assert jobs["drift"]["timeout_seconds"] >= waits + jobs["retrain"]["timeout_seconds"]
    ingest = jobs["ingest"]
    waits = 2 * ingest["tasks"][0]["timeout_seconds"] + jobs["clean"]["timeout_seconds"]
    assert ingest["timeout_seconds"] * 1.5 >= waits


def test_what_starts_by_itself_is_paused_outside_of_prod() -> None:
    for target in TARGETS:
        jobs = filled(target)["resources"]["jobs"]
        assert {name for name, job in jobs.items() if "schedule" in job} == {"drift"}
        assert {name for name, job in jobs.items() if "trigger" in job} == {"predict"}
        for job in jobs.values():  # a status here would win over the target's preset
            assert "pause_status" not in {**job.get("schedule", {}), **job.get("trigger", {})}
        preset = PARSED[bundle.MAIN]["targets"][target]["presets"]["trigger_pause_status"]
        assert preset == ("UNPAUSED" if target == "prod" else "PAUSED")


def test_a_sandbox_reads_a_share_of_the_same_table_and_the_others_all() -> None:
    for target in TARGETS:
        jobs = filled(target)["resources"]["jobs"]
        for name in ("train", "tune"):
            given = jobs[name]["tasks"][0]["spark_python_task"]["parameters"]
            assert f"table.uri={bundle.GIVEN['storage']}/cells_prepared" in given
            sample = [text for text in given if text.startswith("table.sample=")]
            assert sample == ["table.sample=0.1" if target == "sit" else "table.sample=1.0"]


def test_runs_models_tables_and_files_are_where_databricks_has_them() -> None:
    jobs = filled("prod")["resources"]["jobs"]
    for job in jobs.values():
        for task in (task for task in job["tasks"] if "spark_python_task" in task):
            run = task["spark_python_task"]
            given = dict(text.split("=", 1) for text in run["parameters"] if "=" in text)
            if "registry.model" in given:
                assert given["registry.uri"] == "databricks"
                assert given["registry.registry_uri"] == "databricks-uc"
                assert given["registry.model"] == "raypipe_prod.solar.cells"
                assert given["registry.experiment"].startswith("/Users/")
                assert given["artifacts.uri"].startswith("abfss://")  # the table of moves is there
            assert given.get("run.dir", "/Volumes/x").startswith("/Volumes/")
            # A Delta commit needs a file that is put only if it is absent; a volume has none.
            tables = [given[name] for name in given if name.endswith((".uri", ".out"))]
            assert not [uri for uri in tables if uri.startswith("/")]
            if "watch.batch.uri" in given:
                assert given["watch.out"] and given["predict.out"]


def test_the_endpoint_has_limits_and_readers_and_is_no_resource_of_the_bundle() -> None:
    settings = yaml.load((bundle.FOLDER / "endpoint.yml").read_text(), bundle._Strict)
    made: Any = ModelServingEndpoint.from_dict({"name": "n", **settings})
    assert {limit.key.value for limit in made.ai_gateway.rate_limits} == {"endpoint", "user"}
    assert [level.level.value for level in made.permissions] == ["CAN_QUERY"]
    assert json.loads(json.dumps(made.as_dict())) == {"name": "n"} | settings
    assert "model_serving_endpoints" not in filled("prod")["resources"]
    # With a bundle's CAN_VIEW, viewers could read its secrets.
    assert "secret_scopes" not in filled("prod")["resources"]


def test_the_cluster_gets_the_versions_tested_here_and_its_own_torch() -> None:
    lines = [
        line
        for line in (bundle.FOLDER / "requirements.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    pins = {re.split(r"\[|==", line)[0]: line.partition("==")[2] for line in lines}
    assert pins == {name: importlib.metadata.version(name) for name in pins}
    assert not {"torch", "numpy", "pandas", "pyarrow"} & set(pins)


def test_databricks_sdk_sees_one_login_on_a_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With AZURE_CLIENT_ID beside DATABRICKS_CLIENT_ID it refuses both."""
    from databricks.sdk.config import Config

    nodes = filled("prod")["variables"]["cpu_cluster"]["spark_env_vars"]
    monkeypatch.setenv("DATABRICKS_CONFIG_FILE", str(tmp_path / "none"))
    for name, value in nodes.items():
        if name.startswith(("DATABRICKS_", "AZURE_")):
            monkeypatch.setenv(name, "x" * 8 if "{{" in value else value)
    logins = {a.auth for a in Config.attributes() if a.auth and a.env and a.env in nodes}
    assert logins == {"oauth"}


def test_the_readme_names_what_has_to_be_given() -> None:
    text = (bundle.FOLDER / "README.md").read_text()
    for name in bundle.GIVEN:
        assert f"BUNDLE_VAR_{name}" in text
    [keys] = re.findall(r"for key in ([\w -]+); do", text)
    assert set(keys.split()) == bundle.SECRET_KEYS
    for job in bundle.NAMED["jobs"]:
        assert re.search(rf"\b{job}\b", text), job


def test_only_prod_s_alert_looks_by_itself() -> None:
    """The preset trigger_pause_status reaches jobs alone."""
    for target in TARGETS:
        [alert] = filled(target)["resources"]["alerts"].values()
        wanted = "UNPAUSED" if target == "prod" else "PAUSED"
        assert alert["schedule"]["pause_status"] == wanted


def test_terraform_gives_values_of_variables_that_the_bundle_has() -> None:
    outputs = bundle.ROOT / "infra" / "terraform" / "modules" / "stage" / "outputs.tf"
    [given] = re.findall(r'output "bundle_variables" \{(.*?)\n\}', outputs.read_text(), re.DOTALL)
    names = set(re.findall(r"^    (\w+) +=", given, re.MULTILINE))
    assert names <= set(filled("prod")["variables"]) and set(bundle.GIVEN) - names == {"email"}


@pytest.mark.parametrize("target", ["uat", "prod"])
def test_the_jobs_principal_may_use_every_policy_and_pool_of_its_clusters(target: str) -> None:
    """A job's cluster is made with the rights of who runs it. The CLI hands a target's permissions
    to jobs, pools and warehouses, but to no policy (levelsMap of its apply_bundle_permissions)."""
    tree = filled(target)
    principal = bundle.GIVEN["principal"]
    given = {one["level"] for one in tree["permissions"]}
    assert given == {"CAN_MANAGE"}  # the pool's, too
    used = set()
    for job in tree["resources"]["jobs"].values():
        for one in job.get("job_clusters", ()):
            used |= set(re.findall(r"cluster_policies\.(\w+)\.id", str(one["new_cluster"])))
    assert used == {"one_node", "cpu_node"} | ({"many_nodes"} if target == "prod" else set())
    for name in used:
        allowed = tree["resources"]["cluster_policies"][name]["permissions"]
        assert {"level": "CAN_USE", "service_principal_name": principal} in allowed, name


def test_who_may_only_read_starts_no_cluster() -> None:
    policies = filled("prod")["resources"]["cluster_policies"]
    groups = {one.get("group_name") for p in policies.values() for one in p.get("permissions", ())}
    assert bundle.GIVEN["viewers"] not in groups and bundle.GIVEN["developers"] in groups


@pytest.mark.parametrize("target", TARGETS)
def test_unity_catalog_is_told_no_group_of_a_workspace_and_nothing_it_would_refuse(
    target: str,
) -> None:
    """`users` and `admins` are a workspace's. EXTERNAL_USE_SCHEMA only a catalog's owner can give.
    A version of a model takes CREATE_MODEL_VERSION, which ALL_PRIVILEGES has in it."""
    tree = bundle.fill(bundle.trees(FILES), target)
    for kind in ("schemas", "volumes", "registered_models"):
        for one in tree["resources"][kind].values():
            grants = {g["principal"]: set(g["privileges"]) for g in one["grants"]}
            assert not {"users", "admins"} & set(grants)
            assert not any("EXTERNAL_USE_SCHEMA" in privileges for privileges in grants.values())
            if kind == "registered_models":
                assert grants.pop(tree["variables"]["principal"]) == {"ALL_PRIVILEGES", "MANAGE"}
                assert list(grants.values()) == [{"EXECUTE"}]


@pytest.mark.parametrize("target", TARGETS)
def test_a_mail_of_a_long_run_has_a_rule_that_sends_it(target: str) -> None:
    for key, job in filled(target)["resources"]["jobs"].items():
        for one in (job, *job["tasks"]):
            if "on_duration_warning_threshold_exceeded" in one.get("email_notifications", {}):
                metrics = {rule["metric"] for rule in one.get("health", {}).get("rules", ())}
                assert metrics == {"RUN_DURATION_SECONDS"}, key


@pytest.mark.parametrize("target", TARGETS)
def test_the_warehouse_is_where_terraform_lets_it_reach_the_storage(target: str) -> None:
    """Serverless compute comes through private endpoints, which sit has none of."""
    file = bundle.ROOT / "infra" / "terraform" / "environments" / target / "locals.tf"
    [serverless] = re.findall(r"^ +serverless +=  ?(true|false)$", file.read_text(), re.MULTILINE)
    [warehouse] = filled(target)["resources"]["sql_warehouses"].values()
    assert warehouse["enable_serverless_compute"] is (serverless == "true")


@pytest.mark.parametrize("target", TARGETS)
def test_a_first_deployment_needs_nothing_that_it_makes_itself(target: str) -> None:
    """A trigger on a table that is not there is refused, and the bundle's own schema comes to be in
    the same deployment. In sit, the folder of the experiment is that of whoever deploys, although
    CI sets BUNDLE_VAR_principal, which wins over a target's value."""
    tree = filled(target)
    [table] = tree["resources"]["jobs"]["predict"]["trigger"]["table_update"]["table_names"]
    assert table.split(".")[1] not in {one["name"] for one in tree["resources"]["schemas"].values()}
    [experiment] = tree["resources"]["experiments"].values()
    person = "jane@example.com" if target == "sit" else bundle.GIVEN["principal"]
    assert experiment["name"].startswith(f"/Users/{person}/")


def test_ci_gives_every_variable_without_a_default() -> None:
    ci = bundle.ROOT / "infra" / "ci"
    for file in (ci / "github/deploy.yml", ci / "azure-devops/templates/deploy.yml"):
        assert set(re.findall(r"BUNDLE_VAR_(\w+)", file.read_text())) == set(bundle.GIVEN), file
