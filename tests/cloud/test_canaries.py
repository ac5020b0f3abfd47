"""Secrets in every place where a user puts one, over a whole story on a cluster; then all that was
written, answered or shown is searched for them.

The table is on S3 (moto), the runs on MLflow's own server with its own passwords, the cluster asks
for a token, and every verb is submitted. About four minutes on two cores.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pytest
import yaml
from pyarrow.fs import FileSelector, PyFileSystem

from raypipe.cluster.sidecars import build
from tests.canaries import CommandLines, files, leaks, opened
from tests.cloud.canary_cluster import Dashboard, cluster, guarded_mlflow
from tests.cloud.conftest import Store
from tests.conftest import encode, striped
from tests.serve.servers import free_port

pytestmark = [pytest.mark.cloud, pytest.mark.slow]
# With what has to be escaped in URLs and JSON, and what base64 and shells change.
SECRETS = {
    "AWS_ACCESS_KEY_ID": "CNRY0AWS0KEY0ID77",
    "AWS_SECRET_ACCESS_KEY": "cnry/aws+secret/Key=91",
    "AWS_SESSION_TOKEN": "cnry/aws+session/Token=52==",
    "AZURE_STORAGE_ACCOUNT_KEY": "Y25yeS1henVyZS1hY2NvdW50LWtleQ==",
    "GOOGLE_SERVICE_ACCOUNT_KEY": '{"private_key": "cnry-google"}',
    "HF_TOKEN": "hf_cnryHuggingFace88",
    "PGPASSWORD": "cnry postgres 'quoted' 31",
    "DATABRICKS_TOKEN": "dapicnry0123456789",
    "RAYPIPE_SERVE_TOKEN": "cnry-of-the-server-44-x",
    "RAY_AUTH_TOKEN": "c0ffee77" * 8,
}
MLFLOW = 'cnry:mlflow/pass"word 63'
WRONG = 'cnry:wrong/pass"word 29'
INDEX = "cnry of/the index 17"
OPTION = "cnry/in the+options=48"
OTHERS = {"MLflow": MLFLOW, "wrong MLflow": WRONG, "index": INDEX, "option": OPTION}
# Options of the store that are no secrets.
OPEN = "AWS_ENDPOINT_URL", "AWS_ALLOW_HTTP", "AWS_REGION"

Variables = dict[str, str | None]


@dataclass
class Place:
    """Where all of it happens. said: what commands printed, by what was asked."""

    folder: Path
    job: Path
    dashboard: Dashboard
    env: dict[str, str]
    said: dict[str, bytes] = field(default_factory=dict)

    def run(self, *words: object, env: Variables | None = None, local: bool = False) -> int:
        """`raypipe WORDS` in a terminal, as a job of the cluster or in that terminal.

        env: what this terminal has instead; None: it lacks the variable.
        """
        changed = {**self.env, **(env or {})}
        arguments = [str(word) for word in words]
        if not local:
            arguments += ["--submit", self.dashboard.address]
        done = subprocess.run(
            [sys.executable, "-m", "raypipe", *arguments],
            cwd=self.folder,
            env={name: value for name, value in changed.items() if value is not None},
            capture_output=True,
            timeout=400,
        )
        key = f"the output of {' '.join(map(str, words))} ({len(self.said)})"
        self.said[key] = done.stdout + done.stderr
        return done.returncode

    def good(self, *words: object, **how: Any) -> None:
        code = self.run(*words, **how)
        assert code == 0, list(self.said.values())[-1].decode()[-3000:]


@pytest.mark.timeout(1800)
def test_no_secret_is_written_answered_or_shown(s3: Store, tmp_path: Path) -> None:
    pytest.importorskip("flask_wtf", reason="Flask-WTF is in the extra `dev`")
    # They are built before the environment names a package index that answers nobody.
    for name in ("fastdup", "alibi"):
        build.ensure(name)
    source = planted(s3)
    kept, operator = tmp_path / "kept", tmp_path / "operator"
    with guarded_mlflow(kept / "mlflow", operator, MLFLOW) as tracking, CommandLines() as commands:
        variables = of_the_nodes(s3, tracking, kept)
        with cluster(variables, SECRETS["RAY_AUTH_TOKEN"]) as dashboard:
            job = written(kept / "job.yaml", s3, source, kept)
            place = Place(kept, job, dashboard, variables)
            told(place)
            by_options(place, s3, operator)
            refusals(place, tracking)
            served(place)
            found = place.said | dashboard.answers() | files(kept, dashboard.folder)
    found |= commands.as_texts() | in_store(s3)
    assert len(found) > 100 and {"mlflow.db", "config.yaml", "package.json", "manifest.json"} <= {
        Path(name).name for name in found
    }
    assert any("quarantine" in name for name in found)
    sent = [name for name in found if name.startswith("s3://images/artifacts")]
    assert any(name.endswith(".log") for name in sent) and any("/package/" in n for n in sent)
    assert leaks({**SECRETS, **OTHERS}, found) == []


def of_the_nodes(s3: Store, tracking: str, folder: Path) -> dict[str, str]:
    """The environment of the cluster and of the terminal: each credential that they may have."""
    home = folder / "home"
    home.mkdir()
    host = tracking.removeprefix("http://")
    return {
        **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
        **{name: s3.options[name] for name in OPEN},
        **SECRETS,
        "OUR_MLFLOW": f"http://admin:{quote(MLFLOW, safe='')}@{host}",
        "MLFLOW_TRACKING_USERNAME": "admin",
        "MLFLOW_TRACKING_PASSWORD": MLFLOW,
        "PIP_INDEX_URL": f"http://me:{quote(INDEX, safe='')}@127.0.0.1:9/simple",
        "PIP_RETRIES": "0",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        # A job runs `python`.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        # What libraries write into the home folder is searched as well.
        "HOME": str(home),
        "RAYPIPE_HOME": str(build.home().parent),
    }


def planted(s3: Store) -> str:
    """A table of photographs on S3, one of them broken; returns its address."""
    from raypipe.tables.table import append

    images = [encode(striped(seed, ("warm", "cold")[seed % 2])) for seed in range(60)]
    rows = pa.table(
        {
            "id": [f"{i:02d}" for i in range(61)],
            "image": pa.array([*images, b"no image"], pa.large_binary()),
            "label": [("warm", "cold")[i % 2] for i in range(61)],
        }
    )
    return append(s3.uri("source"), rows, "test", s3.options).uri


def written(path: Path, s3: Store, source: str, folder: Path) -> Path:
    table = s3.uri("canary")
    tree = {
        "run": {"name": "canary", "dir": str(folder / "run")},
        "table": {"uri": table},
        "artifacts": {"uri": s3.uri("artifacts")},
        "registry": {"uri": "env:OUR_MLFLOW"},
        "ingest": {
            "from": {"kind": "delta", "images": source},
            "splits": {"train": 0.3, "val": 0.4, "test": 0.3},
        },
        "model": {"name": "small_cnn", "mode": "finetune", "pretrained": False},
        "train": {"epochs": 1, "batch_size": 16, "lr": 0.01, "precision": "fp32"},
        "search": {"samples": 2, "space": {"train.lr": "loguniform(3e-3, 3e-2)"}},
        "watch": {"batch": {"uri": table}, "force": True, "retrain_samples": 1},
    }
    path.write_text(yaml.safe_dump(tree))
    return path


def told(place: Place) -> None:
    """The story, every verb of it a job."""
    place.good("ingest", place.job, "--json")
    for verb in ("clean", "tune", "train", "predict", "drift", "retrain"):
        place.good(verb, place.job, "--json")
    # Two workers of Ray Train; and the verbs that only look.
    place.good("train", place.job, "train.workers=2", "run.seed=8", "run.name=two", "--json")
    place.good("train", place.job, "--dry-run")
    place.good("table", "history", place.job, local=True)
    place.good("jobs", place.dashboard.address, local=True)
    place.run("doctor", place.job, local=True)


def by_options(place: Place, s3: Store, operator: Path) -> None:
    """A terminal whose configuration, and not its environment, has the keys of the store."""
    tree = yaml.safe_load(place.job.read_text())
    options = s3.options | {"AWS_SECRET_ACCESS_KEY": OPTION}
    for section in (tree["table"], tree["artifacts"], tree["watch"]["batch"]):
        section["storage_options"] = options
    job = operator / "job.yaml"
    job.write_text(yaml.safe_dump(tree))
    keys = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"
    env: Variables = dict.fromkeys(keys)
    here = ["cluster.address=none", "run.seed=9", "run.name=options"]
    place.good("train", job, *here, "--json", env=env, local=True)
    # With --submit it would travel: it is refused. So is a store that is not there.
    assert place.run("train", job, env=env) == 2
    missing = "artifacts.uri=s3://nobody/x"
    assert place.run("train", job, *here, missing, env=env, local=True) == 2


def refusals(place: Place, tracking: str) -> None:
    """Verbs that fail: their messages quote what was refused."""
    train = "train", place.job
    talkative(place.folder)
    bad = "model.name=file:talkative:build"
    dead = ["table.storage_options={AWS_ENDPOINT_URL: 'http://127.0.0.1:9', max_retries: '0'}"]
    # On the cluster, and on its workers.
    for words in (
        [*train, "table.uri=s3://nobody/cells"],
        [*train, bad, "train.workers=2"],
        ["tune", place.job, bad],
    ):
        assert place.run(*words) != 0, words
    for words in (
        [*train, *dead],
        ["ingest", place.job, "ingest.from.images=s3://nobody/cells"],
        ["predict", place.job, "registry.alias=nobody"],
        [*train, "registry.uri=http://127.0.0.1:9"],
        [*train, bad],
    ):
        assert place.run(*words, "cluster.address=none", local=True) != 0, words
    # In the terminal itself, with credentials that the server refuses.
    wrong: Variables = {"MLFLOW_TRACKING_PASSWORD": WRONG}
    assert place.run(*train, f"registry.uri={tracking}", env=wrong) == 0  # the nodes have theirs
    for more in ([f"registry.uri={tracking}"], []):
        address = f"http://admin:{quote(WRONG, safe='')}@{tracking.removeprefix('http://')}"
        env = wrong | {"OUR_MLFLOW": address}
        assert place.run(*train, "cluster.address=none", *more, env=env, local=True) != 0
    # A token that the cluster refuses.
    assert place.run(*train, env={"RAY_AUTH_TOKEN": "ba5eba11" * 8}) != 0
    assert place.run("doctor", place.job, "--only", "table,mlflow", env=wrong, local=True) in (0, 1)
    # A sidecar that cannot be built from the private index.
    home = {"RAYPIPE_HOME": str(place.folder / "home")}
    assert place.run("sidecars", env=home, local=True) == 1


def talkative(folder: Path) -> None:
    """A user's model whose error in the first step quotes a credential."""
    (folder / "talkative.py").write_text(
        """import os
from torch import nn

class Net(nn.Sequential):
    def forward(self, images_BCHW):
        if self.training and not images_BCHW.is_meta:
            raise RuntimeError("no login with " + os.environ["AWS_SECRET_ACCESS_KEY"])
        return super().forward(images_BCHW)

def build(pretrained) -> nn.Module:
    return Net(nn.Conv2d(3, 8, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
"""
    )


def served(place: Place) -> None:
    """A server, asked with its token and with a wrong one."""
    port = free_port()
    command = [sys.executable, "-m", "raypipe", "serve", str(place.job), f"serve.port={port}"]
    log = place.folder / "serve.log"
    env = place.env | {"RAY_ADDRESS": gcs(place.dashboard)}
    with log.open("wb") as out:
        server = subprocess.Popen(command, cwd=place.folder, env=env, stdout=out, stderr=out)
    try:
        image = encode(striped(1, "cold"))
        token = SECRETS["RAYPIPE_SERVE_TOKEN"]
        until = time.monotonic() + 120
        while asked(port, token, image)[0] != 200:
            assert server.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
            time.sleep(1)
        for given, body in (("no-such-token-at-all", image), (token, b"no image")):
            code, answer = asked(port, given, body)
            assert code in (401, 415, 422, 400)
            place.said[f"the server's answer {code}"] = answer
        for path in ("/metrics", "/openapi.json", "/"):
            place.said[f"the server's {path}"] = asked(port, token, None, path)[1]
        place.said |= {f"while serving: {k}": v for k, v in place.dashboard.answers().items()}
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def gcs(dashboard: Dashboard) -> str:
    return (dashboard.folder / "ray" / "ray_current_cluster").read_text()


def asked(port: int, token: str, body: bytes | None, path: str = "/predict") -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "image/png"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read()
    except OSError:
        return 0, b""


def in_store(s3: Store) -> dict[str, bytes]:
    """Every object that the story wrote to S3."""
    from deltalake.fs import DeltaStorageHandler

    store = PyFileSystem(DeltaStorageHandler("s3://images", s3.options))
    found: dict[str, bytes] = {}
    for info in store.get_file_info(FileSelector("", recursive=True)):
        if info.is_file and not info.path.startswith("source"):
            with store.open_input_file(info.path) as file:
                found |= opened(f"s3://images/{info.path}", file.read())
    return found


def test_a_planted_leak_is_found(tmp_path: Path) -> None:
    """The search itself can fail: each form in each kind of file is seen."""
    import base64
    import gzip

    import pyarrow.parquet as pq

    secret = SECRETS["AWS_SECRET_ACCESS_KEY"]
    basic = base64.b64encode(f"admin:{MLFLOW}".encode())
    (tmp_path / "a.json").write_text(json.dumps({"x": f"http://me:{quote(secret, safe='')}@h"}))
    (tmp_path / "b.log").write_bytes(b"Authorization: Basic " + basic)
    (tmp_path / "c.gz").write_bytes(gzip.compress(secret.encode()))
    rows = pa.table({"error": [f"refused {secret}"], "image": pa.array([b"x"], pa.large_binary())})
    pq.write_table(rows, tmp_path / "d.parquet", compression="zstd")
    (tmp_path / "e.txt").write_text(json.dumps(MLFLOW))
    found = leaks({"key": secret, "MLflow": MLFLOW}, files(tmp_path))
    assert {Path(line.split(" in ")[1].split(" ")[0]).name[0] for line in found} == set("abcde")
