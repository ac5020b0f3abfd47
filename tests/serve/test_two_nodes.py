"""Any node predicts: the package travels through Ray, not through a folder or by itself."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from raypipe.config import RunConfig
from raypipe.registry import promote, tracking
from raypipe.registry.tracking import RegistryConfig
from raypipe.tables import scan
from raypipe.tables.table import ImageTable, append
from tests.serve.conftest import Registered

ROOT = Path(__file__).parents[2]


def _can_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """A registry behind http, which serves artifacts itself."""
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--workers", "1"]
    command += ["--port", str(port), "--backend-store-uri", f"sqlite:///{folder}/store.db"]
    command += ["--serve-artifacts", "--artifacts-destination", str(folder / "artifacts")]
    with (folder / "log").open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            assert server.poll() is None, (folder / "log").read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5)
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.25)
        yield address
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(20)


@pytest.mark.slow
@pytest.mark.skipif(not _can_unshare(), reason="a mount namespace needs root")
def test_a_node_without_the_drivers_folders_predicts_from_a_registry_behind_http(
    registered: Registered, tmp_path: Path
) -> None:
    private = tmp_path / "private"
    private.mkdir()
    (private / "tmp").mkdir()
    columns = {
        "image_id": [f"{n:03d}" for n in range(200)],
        "image": pa.array(registered.images, pa.binary()),
    }
    append(str(tmp_path / "t"), pa.table(columns), "the 200 images")
    with mlflow_server(tmp_path) as address:
        run = RunConfig(name="mixed", dir=str(private / "run"))
        store = tracking.open_store(run, RegistryConfig(uri=address))
        with tracking.run(store, "mixed", "train", {}, None) as run_id:
            pass
        folder = Path(str(registered.package.folder))
        version = promote.register(store, run_id, folder, "mixed", {})
        promote.promote(store, version, expected=None)
        config = tmp_path / "mine.yaml"
        config.write_text(
            f"table: {{uri: {tmp_path / 't'}}}\nrun: {{name: mixed, dir: {private / 'run'}}}\n"
            f"registry: {{uri: '{address}'}}\npredict: {{out: {tmp_path / 'out'}}}\n"
        )
        command = [sys.executable, "-m", "tests.serve.private_node", str(config), str(private)]
        done = subprocess.run(
            [*command, str(free_port())],
            capture_output=True,
            text=True,
            timeout=300,
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(private / "tmp")},
        )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "the node sees [] and the driver ['run', 'tmp']" in done.stdout
    assert json.loads(done.stdout.splitlines()[-1])["images"] == 200
    assert not list(private.glob("tmp/**/MLmodel")), "what was downloaded does not stay"
    out = ImageTable(str(tmp_path / "out"))
    found = scan.rows(out, out.pin(), ["image_id", "label"]).sort_by("image_id")
    assert found["label"].to_pylist() == registered.answers.labels
