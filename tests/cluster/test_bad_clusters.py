"""Clusters on which a verb cannot work: each is one message with a way out, and nothing stays.

Each runs on a machine of its own (tests/machines.py), where no other cluster is.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from raypipe.config import validate
from raypipe.tables.ingest import IngestConfig, ingest
from raypipe.tables.table import TableConfig
from tests import machines
from tests.machines import Lan, Machine
from tests.two_nodes import write

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(machines.missing()), reason="no machines here: it needs root"),
]
SMALL = ["--num-cpus=1", f"--object-store-memory={100 * 2**20}", "--disable-usage-stats"]


@pytest.fixture(scope="module")
def shared(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    table = TableConfig(uri=str(folder / "table"))
    source = {"images": str(photos), "labels": str(photos / "labels.csv")}
    ingest(table, validate(IngestConfig, {"from": source, "splits": {"train": 0.6, "val": 0.4}}))
    train = {"epochs": 1, "batch_size": 8, "workers": [1, 2]}
    model = {"name": "small_cnn", "mode": "finetune", "pretrained": False, "side_px": 32}
    run = {"dir": str(folder / "run")}
    write(folder / "job.yaml", run=run, table=table.model_dump(), model=model, train=train)
    return folder


@pytest.fixture
def machine(shared: Path) -> Iterator[Machine]:
    with Lan(shared) as lan:
        yield lan.machine("alone")


def started(machine: Machine, *how: str, **env: str) -> None:
    done = machine.run("ray", "start", *how, *SMALL, env=env, timeout_s=90)
    assert done.returncode == 0, done.stderr


def refused(
    machine: Machine, shared: Path, *words: str, code: int = 2, **env: str
) -> tuple[str, float]:
    """The one message of `raypipe train`, and the seconds until it came."""
    began = time.monotonic()
    done: subprocess.CompletedProcess[str] = machine.run(
        "raypipe", "train", str(shared / "job.yaml"), *words, env=env, timeout_s=120
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("raypipe: ")]
    assert (done.returncode, len(said)) == (code, 1), done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    assert not of_verbs(machine, shared)
    return said[0], time.monotonic() - began


def of_verbs(machine: Machine, shared: Path) -> list[str]:
    """The command lines of processes that work for a job of these tests."""
    found = []
    for process in machine.processes():
        with suppress(psutil.Error):
            found.append(" ".join(process.cmdline()))
    return [line for line in found if f"{shared}/job.yaml" in line]


HEAD = ("--head", "--port=6379")


def test_authentication_on_one_side_alone(machine: Machine, shared: Path) -> None:
    started(machine, *HEAD, "--include-dashboard=false")
    there = {"RAY_ADDRESS": f"{machine.address}:6379"}
    wrong: list[dict[str, str]] = [
        {"RAY_AUTH_MODE": "disabled"},
        {"RAY_AUTH_TOKEN": "0" * 64},
        {"HOME": "/tmp/nobody"},
    ]
    for more in wrong:
        said, took = refused(machine, shared, **there, **more)
        assert "RAY_AUTH_MODE=token" in said and "auth_token" in said
        assert "0" * 64 not in said
        assert took < 20


def test_two_clusters_of_one_user(machine: Machine, shared: Path) -> None:
    """The one that was started last is joined, or the one that is named; neither is disturbed."""
    started(machine, *HEAD, "--include-dashboard=false")
    second = ("--head", "--port=6380", "--include-dashboard=false")
    started(machine, *second)
    for number, address in enumerate(("", f"{machine.address}:6379")):
        job = (str(shared / "job.yaml"), f"run.dir={shared}/two-{number}", "train.workers=1")
        done = machine.run("raypipe", "train", *job, env={"RAY_ADDRESS": address})
        assert done.returncode == 0, done.stderr
        assert f"Ray cluster at {address or f'{machine.address}:6380'} " in done.stderr
    heads = [p for p in machine.processes() if p.name() == "gcs_server"]
    assert len(heads) == 2


def test_an_environment_that_cannot_be_made(machine: Machine, shared: Path) -> None:
    """Packages that no node can install. Here no index is in reach."""
    started(machine, *HEAD, "--dashboard-host=127.0.0.1")
    folder = shared / "with-environment"
    (folder / "infra" / "ray").mkdir(parents=True)
    environment = "pip: [no-such-package-of-raypipe]\nenv_vars: {PIP_NO_INDEX: '1'}\n"
    (folder / "infra" / "ray" / "runtime_env.yaml").write_text(environment)
    words = f"raypipe train {shared}/job.yaml --submit http://127.0.0.1:8265"
    done = machine.run("bash", "-c", f"cd {folder} && {words}", timeout_s=200)
    said = [line for line in done.stderr.splitlines() if line.startswith("raypipe: ")]
    assert (done.returncode, len(said)) == (1, 1), done.stderr + done.stdout
    assert "cannot make the environment" in said[0] and "no-such-package-of-raypipe" in said[0]
    assert "infra/ray/runtime_env.yaml" in said[0] and "Traceback" not in done.stderr
