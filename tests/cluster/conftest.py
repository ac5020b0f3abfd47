"""A small table with a champion, and the environment of a terminal of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.cluster import tiny_sidecar
from tests.cluster.joined import Joined, joined


@pytest.fixture(scope="session")
def job(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table and a champion, so that every verb gets as far as the cluster."""
    from raypipe.main import main

    folder = tmp_path_factory.mktemp("lost")
    path = folder / "job.yaml"
    table = {"uri": str(folder / "table")}
    path.write_text(
        yaml.safe_dump(
            {
                "run": {"name": "lost", "dir": str(folder / "run")},
                "table": table,
                "ingest": {"from": {"images": str(photos), "labels": str(photos / "labels.csv")}},
                "model": {
                    "name": "small_cnn",
                    "mode": "finetune",
                    "pretrained": False,
                    "side_px": 32,
                },
                "train": {"epochs": 1, "batch_size": 16},
                "watch": {"batch": table},
            }
        )
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "raypipe.cluster.connect.close", lambda: None
        )  # the session's cluster is not this verb's to stop
        assert main(["ingest", str(path), "ingest.name=photos"]) == 0
        assert main(["train", str(path), "cluster.address=none"]) == 0
    return path


@pytest.fixture(scope="session")
def own_cluster(ray_session: str) -> Joined:
    """What a process saw that started a cluster of its own beside the session's."""
    return joined()


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sidecar `tiny` that is built in a second; see tiny_sidecar.py."""
    return tiny_sidecar.install(tmp_path, monkeypatch)
