"""Every job of the bundle, run here: the python files and command lines that Databricks would run,
in the order of the jobs' tasks, with the bundle's own overrides. Nothing is written twice here: a
parameter that is changed in the bundle is changed in this test.

What stands in for what a workspace has:

- runs: a real MLflow server behind the double of tests/registry/unity_catalog.py, which speaks
  Databricks' and Unity Catalog's calls over HTTPS. So registry.uri is `databricks`, as in the job.
- storage: Azurite. Its address is az://, its login an account key: it knows no service principal.
- the volume: a FUSE file system that refuses what volumes refuse (volume.py).
- the endpoint: `Serving` below, a double of the REST calls that serve.py makes.
"""

from __future__ import annotations

import ctypes.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from deltalake import DeltaTable

from tests.cloud.conftest import Store, azure  # noqa: F401  (a fixture)
from tests.conftest import encode, striped
from tests.infra import bundle
from tests.registry import unity_catalog
from tests.registry.unity_catalog import Double
from tests.serve import servers

pytestmark = [pytest.mark.cloud, pytest.mark.slow, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[2]
# Everything that makes the job large, and nothing else.
SMALL: dict[str, Any] = {
    "run": {"name": "solar"},
    "table": {"uri": "overridden"},
    "cluster": {"cpus": 2, "object_store_mb": 200},
    "ingest": {
        "from": {"kind": "folder"},
        "workers": 0,
        "splits": {"train": 0.4, "val": 0.4, "test": 0.2},
    },
    "model": {"name": "small_cnn", "mode": "finetune", "pretrained": False},
    "train": {"batch_size": 16, "lr": 0.01, "precision": "fp32"},
    "search": {"space": {"train.lr": "loguniform(0.003, 0.03)"}, "grace": 1},
    "registry": {"severity_images": 0},
    "watch": {"retrain_samples": 1, "policy": {"min_images": 10}},
}


@contextmanager
def volume(folder: Path) -> Iterator[Path]:
    """A mounted volume. Installs libfuse where it is missing: a check that is skipped is none."""
    if ctypes.util.find_library("fuse3") is None and ctypes.util.find_library("fuse") is None:
        subprocess.run(["apt-get", "update", "-qq"], check=True, capture_output=True)
        install = ["apt-get", "install", "-y", "-qq", "fuse3", "libfuse2"]
        subprocess.run(install, check=True, capture_output=True)
    files, mount = folder / "volume", folder / "Volumes"
    files.mkdir(parents=True)
    mount.mkdir()
    command = [sys.executable, str(Path(__file__).with_name("volume.py")), str(files), str(mount)]
    with (folder / "volume.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until = time.monotonic() + 20
        while not os.path.ismount(mount):
            assert server.poll() is None, (folder / "volume.log").read_text()[-2000:]
            assert time.monotonic() < until, "the volume was not mounted"
            time.sleep(0.05)
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=False, capture_output=True)
        server.terminate()
        server.wait(10)


@dataclass
class Serving:
    """The calls on serving endpoints and their permissions, as Databricks' REST reference has them.

    An endpoint that was told something is updating for two looks.
    """

    endpoints: dict[str, dict[str, Any]] = field(default_factory=dict)
    rights: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    looks: dict[str, int] = field(default_factory=dict)

    def answer(self, method: str, path: str, body: Any) -> tuple[Any, int]:
        self.calls.append((method, path))
        missing = {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no such endpoint"}
        if path.startswith("/api/2.0/permissions/serving-endpoints/"):
            key = path.rpartition("/")[2]
            if method == "PATCH":
                self.rights.setdefault(key, []).extend(body["access_control_list"])
            told = [
                {
                    "group_name": entry["group_name"],
                    "all_permissions": [{"permission_level": entry["permission_level"]}],
                }
                for entry in self.rights.get(key, [])
            ]
            return {"access_control_list": told}, 200
        name, _, part = path.removeprefix("/api/2.0/serving-endpoints").strip("/").partition("/")
        if method == "POST":
            name = body["name"]
            self.endpoints[name] = {"id": f"id-of-{name}", **body}
            self.looks[name] = 2
            return self.endpoints[name], 200
        if name not in self.endpoints:
            return missing, 404
        found = self.endpoints[name]
        if method == "PUT":
            found["config" if part == "config" else "ai_gateway"] = body
            self.looks[name] = 2 if part == "config" else self.looks[name]
            return body, 200
        if method == "PATCH" and part == "tags":
            kept = {tag["key"]: tag for tag in [*found.get("tags", []), *body["add_tags"]]}
            found["tags"] = list(kept.values())
            return {"tags": found["tags"]}, 200
        self.looks[name] = max(0, self.looks[name] - 1)
        state = "IN_PROGRESS" if self.looks[name] else "NOT_UPDATING"
        return found | {"state": {"config_update": state, "ready": "READY"}}, 200


@dataclass
class Stage:
    """One stage of the bundle, and the machine that runs its jobs."""

    tree: Any
    workspace: Path
    environment: dict[str, str]
    storage: str
    options: dict[str, str]
    double: Double
    endpoint: Serving
    mount: Path
    ran: list[str] = field(default_factory=list)

    def job(self, name: str, run_id: int, *, create: str = "false") -> None:
        """Run a job as Databricks does: tasks after those that they wait for, jobs in its tasks."""
        job = self.tree["resources"]["jobs"][name]
        done: set[str] = set()
        tasks = list(job["tasks"])
        while tasks:
            [task, *_] = [
                task
                for task in tasks
                if {before["task_key"] for before in task.get("depends_on", ())} <= done
            ]
            tasks.remove(task)
            done.add(task["task_key"])
            if "run_job_task" in task:
                other = bundle.REFERENCE.fullmatch(task["run_job_task"]["job_id"])
                assert other is not None
                self.job(other[1].split(".")[2], run_id + 1000)
            elif "spark_python_task" in task:
                self.task(name, task, {"job.run_id": str(run_id), "job.parameters.create": create})

    def task(self, job: str, task: Any, values: dict[str, str]) -> None:
        run = task["spark_python_task"]
        here = bundle.FOLDER / "resources" / run["python_file"]
        file = self.workspace / here.resolve().relative_to(ROOT)
        parameters = [str(parameter) for parameter in run["parameters"]]
        for name, value in values.items():
            parameters = [text.replace(f"{{{{{name}}}}}", value) for text in parameters]
        assert not any("{{" in text or "${" in text for text in parameters), parameters
        environment = dict(self.environment)
        if not any(text.startswith("registry.uri=") for text in parameters):
            # pip builds fastdup's environment, and needs the authorities that this machine trusts.
            del environment["REQUESTS_CA_BUNDLE"]
            environment |= {k: v for k, v in os.environ.items() if k == "REQUESTS_CA_BUNDLE"}
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, str(file), *parameters],
            cwd=file.parent,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        name = f"{job}.{task['task_key']}"
        print(f"{name}: {time.monotonic() - began:.0f} s, {done.returncode}")
        assert done.returncode == 0, (
            f"{name} {parameters}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
        )
        self.ran.append(name)
        self.said = done.stdout + done.stderr

    def rows(self, table: str) -> list[dict[str, Any]]:
        found = DeltaTable(f"{self.storage}/{table}", storage_options=self.options)
        rows: list[dict[str, Any]] = found.to_pyarrow_table().to_pylist()
        return rows


def draw(folder: Path, seeds: range, cold: bool = False) -> Path:
    for seed in seeds:
        label = "cold" if cold else ("warm", "cold")[seed % 2]
        (folder / label).mkdir(parents=True, exist_ok=True)
        (folder / label / f"{seed:03d}.png").write_bytes(encode(striped(seed, label, 48)))
    return folder


@pytest.fixture(scope="module")
def stage(
    tmp_path_factory: pytest.TempPathFactory,
    azure: Store,  # noqa: F811
) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("stage")
    workspace = folder / "workspace"
    shutil.copytree(ROOT / "jobs", workspace / "jobs")
    shutil.copytree(bundle.FOLDER, workspace / "infra" / "databricks")
    (workspace / "jobs" / "configs" / "small.yaml").write_text(yaml.safe_dump(SMALL))
    photos = draw(folder / "photos", range(80))
    sqlite = f"sqlite:///{folder}/store.db"
    server = ("server", "--workers", "1", "--backend-store-uri", sqlite)
    server += ("--default-artifact-root", unity_catalog.ROOT, "--no-serve-artifacts")
    endpoint = Serving()
    with (
        volume(folder) as mount,
        servers.mlflow(*server, ready="/health", log=folder / "mlflow.log") as runs,
        unity_catalog.serving(folder / "double", runs) as double,
    ):
        double.catalog.more |= {
            "/api/2.0/serving-endpoints": endpoint.answer,
            "/api/2.0/permissions/serving-endpoints/": endpoint.answer,
        }
        storage = azure.uri("stage")
        given = bundle.GIVEN | {
            "host": double.address,
            "storage": storage,
            "photos": str(photos),
            "config": "small.yaml",
            "runs": str(mount / "runs"),
            "side": 32,
            "sample": 1.0,
            "epochs": 2,
            "trials": 2,
            "workers": 1,
            "predict_gpus": 0,  # there is none here
        }
        filled = bundle.fill(
            bundle.trees(bundle.read()), "prod", given | {"ray_of_search": "local"}
        )
        # Where the CLI would have put the files.
        text = json.dumps(filled).replace(filled["workspace"]["file_path"], str(workspace))
        tree = json.loads(text)
        double.catalog.schemas.add("raypipe_prod.solar")
        cluster = tree["variables"]["cpu_cluster"]["spark_env_vars"]
        # As the cluster has it; logins are those of the doubles.
        secrets = {name for name, value in cluster.items() if value.startswith("{{secrets/")}
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "AZURE_"))}
        environment |= {name: value for name, value in cluster.items() if name not in secrets}
        environment |= {"RAY_AUTH_TOKEN": "t" * 40, "RAYPIPE_SERVE_POLL_S": "0.1"}
        environment |= double.environment | {k.upper(): v for k, v in azure.options.items()}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        yield Stage(tree, workspace, environment, storage, azure.options, double, endpoint, mount)
        assert double.catalog.unknown == []


def test_from_photographs_to_an_endpoint(stage: Stage, tmp_path: Path) -> None:
    stage.job("ingest", 1)
    assert stage.ran == ["ingest.ingest", "clean.clean", "clean.prepare"]
    assert len(stage.rows("cells")) == 80 >= len(stage.rows("cells_prepared")) > 20

    stage.job("train", 2)
    catalog, model = stage.double.catalog, "raypipe_prod.solar.cells"
    assert set(catalog.models) == {model}
    assert catalog.models[model]["aliases"] == {"champion": 1}
    stage.job("tune", 3)
    assert sorted(catalog.versions[model]) == [1, 2]

    # An endpoint is made by hand, once. Before that nothing is.
    stage.job("serve", 4)
    assert not stage.endpoint.endpoints and "nothing to do" in stage.said
    stage.job("serve", 5, create="true")
    made = stage.endpoint.endpoints["raypipe-prod"]
    [entity] = made["config"]["served_entities"]
    assert (entity["entity_name"], entity["entity_version"]) == (model, "1")
    assert {limit["key"] for limit in made["ai_gateway"]["rate_limits"]} == {"user", "endpoint"}
    assert stage.endpoint.rights == {
        "id-of-raypipe-prod": [
            {"group_name": bundle.GIVEN["viewers"], "permission_level": "CAN_QUERY"}
        ]
    }

    # New images, all of one kind; and more labelled ones to learn from.
    arrive(stage, draw(tmp_path / "new", range(200, 260), cold=True))
    stage.job("predict", 6)
    assert len(stage.rows("predictions")) == 60
    draw(Path(stage.tree["variables"]["photos"]), range(80, 120))
    stage.job("ingest", 8)
    stage.job("drift", 9)
    assert stage.ran[-3:] == ["drift.check", "retrain.retrain", "serve.serve"]
    [check] = stage.rows("watch/drift")
    assert check["is_drift"] and check["model"].startswith(model)
    [decision] = stage.rows("watch/decisions")
    assert sorted(catalog.versions[model]) == [1, 2, 3]
    champion = catalog.models[model]["aliases"]["champion"]
    assert champion == (3 if decision["promoted"] else 1)
    [entity] = stage.endpoint.endpoints["raypipe-prod"]["config"]["served_entities"]
    assert entity["entity_version"] == str(champion)

    # In the volume are no database, no lock and no Delta table.
    left = [path for path in stage.mount.rglob("*") if path.is_file()]
    assert any(path.name == "manifest.json" for path in left)
    assert [p for p in left if p.suffix in (".db", ".lock") or "_delta_log" in p.parts] == []
    # Nor any secret.
    secrets = [stage.options["azure_storage_account_key"], unity_catalog.TOKEN, "t" * 40]
    assert [p for p in left if any(s.encode() in p.read_bytes() for s in secrets)] == []


def arrive(stage: Stage, photos: Path) -> None:
    """Unlabelled images in the table that others deliver to."""
    config = stage.workspace / "jobs" / "configs" / "small.yaml"
    deliver = [sys.executable, "-m", "raypipe", "ingest", str(config), "cluster.address=none"]
    deliver += [f"table.uri={stage.storage}/cells_incoming", f"ingest.from.images={photos}"]
    deliver += ["ingest.from.labelled=false", f"run.dir={photos.parent}/delivery"]
    done = subprocess.run(deliver, env=stage.environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
