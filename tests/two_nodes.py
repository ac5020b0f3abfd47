"""A Ray cluster of two machines (machines.py), with an MLflow server and S3 on a third.

    with TwoNodes(tmp_path) as nodes:
        nodes.join()
        nodes.raypipe("train", "train.workers=2")

Machine `one` has the head and a CPU, and the verbs run there. `two` has a CPU and joins with
`join()`. They share the folder of the test alone. `registry` and `s3` are reachable from both.

Who did what is proven by a model of the test's own, noted_model.py: it writes the name of its
machine each time it is built and each time it sees images.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from tests.machines import Lan, Machine

GCS, DASHBOARD, MLFLOW, S3 = 6379, 8265, 5000, 9000
MEMORY = 200 * 2**20  # of an object store, in bytes
S3_KEY = "machines-of-the-test"


def write(file: Path, **sections: Any) -> Path:
    """A configuration."""
    file.write_text(yaml.safe_dump(sections))
    return file


class TwoNodes:
    """folder: shared by all machines. cpus: of each node."""

    def __init__(self, folder: Path, cpus: int = 1, memory: int = MEMORY) -> None:
        self.folder = folder
        self._size = [f"--num-cpus={cpus}", f"--object-store-memory={memory}"]
        self._lan = Lan(folder)
        self.two: Machine | None = None

    def __enter__(self) -> TwoNodes:
        self._lan.__enter__()
        try:
            self.one = self._lan.machine("one")
            head = ["--head", f"--port={GCS}", "--dashboard-host=127.0.0.1"]
            self._ray_start(self.one, *head)
        except BaseException:
            self._lan.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lan.__exit__(kind, error, trace)

    @property
    def store(self) -> Machine:
        """The third machine, which is no node."""
        return self._lan.store

    @property
    def address(self) -> str:
        return f"{self.one.address}:{GCS}"

    def join(self, name: str = "two") -> Machine:
        """A second machine joins the cluster."""
        self.two = self._lan.machine(name)
        self._ray_start(self.two, f"--address={self.address}")
        return self.two

    def start_mlflow(self) -> str:
        """Start `mlflow server` on the third machine; its address. `store.listens` waits for it."""
        store = self.store
        home = self.folder / "mlflow"
        home.mkdir()
        arguments = ["--backend-store-uri", f"sqlite:///{home}/store.db", "--serve-artifacts"]
        arguments += ["--artifacts-destination", str(home / "artifacts"), "--workers", "1"]
        where = ["--host", store.address, "--port", str(MLFLOW)]
        quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # as tests/serve/servers.py
        store.popen("mlflow", "server", *arguments, *where, env=quiet, log=home / "log")
        return f"http://{store.address}:{MLFLOW}"

    def start_s3(self) -> dict[str, str]:
        """Start moto on the third machine, with a bucket `images`; the options that open it."""
        store = self.store
        store.popen("moto_server", "-H", store.address, "-p", str(S3), log=self.folder / "s3.log")
        store.listens(S3)
        endpoint = f"http://{store.address}:{S3}"
        made = store.run("curl", "-sf", "-X", "PUT", f"{endpoint}/images")
        assert made.returncode == 0, made
        return {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "ours",
            "AWS_SECRET_ACCESS_KEY": S3_KEY,
        }

    def write(self, name: str, **sections: Any) -> Path:
        """A configuration, which all machines see."""
        return write(self.folder / name, **sections)

    def popen(
        self, *words: object, env: Mapping[str, str] | None = None, log: Path | None = None
    ) -> subprocess.Popen[str]:
        """Start `raypipe WORDS` on machine one."""
        command = ["raypipe", *map(str, words)]
        return self.one.popen(
            *command, env={"RAY_ADDRESS": self.address} | dict(env or {}), log=log
        )

    def run(self, *words: object, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run `raypipe WORDS` on machine one; returns its exit code and output."""
        env = {"RAY_ADDRESS": self.address} | more.pop("env", {})
        return self.one.run("raypipe", *map(str, words), env=env, **more)

    def told(self, *words: object, **more: Any) -> dict[str, Any]:
        """What `raypipe WORDS --json` says, which must succeed."""
        done = self.run(*words, "--json", **more)
        assert done.returncode == 0, done.stderr[-6000:] + done.stdout[-1000:]
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    def _ray_start(self, machine: Machine, *how: str) -> None:
        own = [f"--node-ip-address={machine.address}", "--disable-usage-stats", *self._size]
        # This environment's, whatever PATH says.
        command = str(Path(sys.executable).parent / "ray")
        done = machine.run(command, "start", *how, *own, timeout_s=90)
        assert done.returncode == 0, done.stderr + done.stdout


class Notes:
    """What noted_model.py wrote: which machines did what."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def machines(self, what: str) -> set[str]:
        """The machines that did it. what: `built`, `trained` or `predicted`."""
        return {file.name.split("-")[1] for file in self.folder.glob(f"{what}-*")}

    def clear(self) -> None:
        for file in self.folder.iterdir():
            file.unlink()
