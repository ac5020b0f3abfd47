"""The application that KubeRay's RayService deploys, by Ray Serve's own config file and builder."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from raypipe.errors import ConfigError
from raypipe.work.ray_service import app
from tests.serve.conftest import Registered
from tests.serve.servers import free_port

MANIFEST = Path(__file__).parents[2] / "infra" / "ray" / "kuberay" / "serve.yaml"


@pytest.fixture
def config(registered: Registered, tmp_path: Path) -> Path:
    tree = {
        "run": {"name": "mixed", "dir": str(registered.store.folder.parent)},
        "table": {"uri": str(tmp_path / "none")},
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


@pytest.fixture
def deployed(ray_session: str, config: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """serveConfigV2 of the manifest, with free ports, deployed as KubeRay's operator does it: by
    Ray Serve's controller, which builds the application in a task of its own.
    """
    from ray import serve
    from ray.serve._private.api import serve_start
    from ray.serve.schema import ServeDeploySchema

    manifest = yaml.safe_load(MANIFEST.read_text("utf-8"))
    tree = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    port, proxy = free_port(), free_port()
    small = {"run.dir": None, "serve.host": "127.0.0.1", "serve.port": port}
    small |= {"serve.replicas": 1, "serve.cpus": 1, "serve.keep": 0}
    (described,) = tree["applications"]
    names = {override.partition("=")[0] for override in described["args"]["overrides"]}
    assert names <= set(small)
    overrides = [f"{name}={value}" for name, value in small.items() if value is not None]
    described["args"] = {"config": str(config), "overrides": overrides}
    tree["http_options"] = {"host": "127.0.0.1", "port": proxy}
    schema = ServeDeploySchema(**tree)
    client = serve_start(http_options=tree["http_options"])
    client.deploy_apps(schema)
    yield port, {"proxy": proxy}
    serve.shutdown()


def test_it_answers_as_raypipe_serve_does(
    deployed: tuple[int, dict[str, Any]], registered: Registered
) -> None:
    from ray import serve

    port, found = deployed
    until = time.monotonic() + 120
    while (status := serve.status().applications["raypipe"]).status != "RUNNING":
        assert status.status != "DEPLOY_FAILED" and time.monotonic() < until, status
        time.sleep(0.2)
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/predict",
        registered.images[0],
        {"Content-Type": "application/octet-stream"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert json.load(answer)["label"] == registered.answers.labels[0]
    # What the manifest's readiness probe asks, and what says whether Ray Serve lives.
    for url in (f"http://127.0.0.1:{port}/ready", f"http://127.0.0.1:{found['proxy']}/-/healthz"):
        with urllib.request.urlopen(url, timeout=30) as answer:
            assert answer.status == 200


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ({}, "config is missing"),
        ({"confg": "x"}, "confg"),
        ({"overrides": ["serve.prt=1"]}, "serve.prt"),
        ({"overrides": ["serve.port=0"]}, "has to be known"),
        ({"overrides": ["serve.host=0.0.0.0"]}, "token"),
    ],
)
def test_arguments_are_checked_before_anything_starts(
    args: dict[str, Any], match: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAYPIPE_SERVE_TOKEN", raising=False)
    given = args if not args or "confg" in args else {"config": str(config), **args}
    with pytest.raises(ConfigError, match=match):
        app(given)
