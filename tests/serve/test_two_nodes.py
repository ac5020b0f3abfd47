"""Any node predicts: the package travels through Ray, not through a folder or by itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pyarrow as pa
import pytest

from raypipe.config import RunConfig
from raypipe.registry import promote, runs, versions
from raypipe.registry.store import open_store
from raypipe.registry.tracking import RegistryConfig
from raypipe.tables import scan
from raypipe.tables.table import ImageTable, append
from tests.serve import servers
from tests.serve.conftest import Registered

ROOT = Path(__file__).parents[2]


def _can_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


def mlflow_server(folder: Path) -> AbstractContextManager[str]:
    """A registry behind http, which serves artifacts itself."""
    store = ("--backend-store-uri", f"sqlite:///{folder}/store.db")
    artifacts = ("--serve-artifacts", "--artifacts-destination", str(folder / "artifacts"))
    arguments = ("server", "--workers", "1", *store, *artifacts)
    return servers.mlflow(*arguments, ready="/health", log=folder / "log")


@pytest.mark.share
@pytest.mark.slow
@pytest.mark.skipif(not _can_unshare(), reason="a mount namespace needs root")
def test_a_node_without_the_drivers_folders_predicts_from_a_registry_behind_http(
    registered: Registered, own_ray: dict[str, str], tmp_path: Path
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
        store = open_store(run, RegistryConfig(uri=address))
        with runs.run(store, "mixed", "train", {}, None) as run_id:
            pass
        folder = Path(str(registered.package.folder))
        version = versions.register(store, run_id, folder, "mixed", {})
        promote.promote(store, version, expected=None)
        config = tmp_path / "mine.yaml"
        config.write_text(
            f"table: {{uri: {tmp_path / 't'}}}\nrun: {{name: mixed, dir: {private / 'run'}}}\n"
            f"registry: {{uri: '{address}'}}\npredict: {{out: {tmp_path / 'out'}}}\n"
        )
        command = [sys.executable, "-m", "tests.serve.private_node", str(config), str(private)]
        done = subprocess.run(
            [*command, str(servers.free_port())],
            capture_output=True,
            text=True,
            timeout=300,
            cwd=ROOT,
            env=os.environ | own_ray | {"TMPDIR": str(private / "tmp")},
        )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "the node sees [] and the driver ['run', 'tmp']" in done.stdout
    assert json.loads(done.stdout.splitlines()[-1])["images"] == 200
    assert not list(private.glob("tmp/**/MLmodel")), "what was downloaded does not stay"
    out = ImageTable(str(tmp_path / "out"))
    found = scan.rows(out, out.pin(), ["image_id", "label"]).sort_by("image_id")
    assert found["label"].to_pylist() == registered.answers.labels
