"""Which versions a replica says that it serves, when they change."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raypipe.config import RunConfig, validate
from raypipe.errors import DataError, RaypipeError
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.registry import tracking
from raypipe.registry.package import Package, Reference
from raypipe.registry.packing import build
from raypipe.registry.tracking import RegistryConfig
from raypipe.registry.versions import ModelVersion
from raypipe.serve.online import batching, metrics, models, server
from raypipe.serve.online.app import _Handlers
from raypipe.serve.online.batching import Outcome
from raypipe.serve.online.models import Models, Role, Target
from raypipe.serve.online.registry import Registry
from raypipe.serve.online.request_log import Entry, Keeper, now
from raypipe.serve.online.settings import ServeConfig

SHOWN = """
from raypipe.serve.online.metrics import Metrics
made = Metrics()
for now in ({"champion": "m/1", "challenger": "m/2"}, {"champion": "m/2"}, {"champion": "m/1"}):
    made.show(now)
    lines = made.text().decode().splitlines()
    shown = [line for line in lines if line.startswith("raypipe_model_serving{")]
    print(*sorted(line.split('"')[1] for line in shown if line.endswith(" 1.0")))
"""


def test_versions_that_are_not_in_use_any_more_are_not_shown_as_if(tmp_path: Path) -> None:
    """prometheus_client clears nothing where processes add up: each version that had ever been
    served stayed at 1."""
    done = subprocess.run(
        [sys.executable, "-c", SHOWN],
        env={metrics.FOLDER: str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # The challenger became champion, and was rolled back.
    assert done.stdout.splitlines() == ["m/1 m/2", "m/2", "m/1"]


class Shelf:
    """Versions of one package, and which one each role should be."""

    def __init__(self, package: Package) -> None:
        self.package = package
        self.wanted: dict[Role, Target] = {}

    def targets(self) -> Mapping[Role, Target]:
        return self.wanted

    def files(self, role: Role, version: str) -> Mapping[str, bytes]:
        return dict(self.package.files) if version != "m/9" else {}


def test_a_challenger_that_leaves_and_a_problem_that_is_over_are_told(tmp_path: Path) -> None:
    """Only versions that were loaded or refused were: what had ended went on in the console's
    reports and in the metrics."""
    cfg = ModelConfig(name="small_cnn", mode="finetune", pretrained=False, side_px=32)
    empty = Reference(np.empty((0, 1)), np.empty((0, 1)), ())
    made = Package(build(tmp_path, ImageModel(cfg, 2), cfg, ("a", "b"), empty, {}))
    shelf, told = Shelf(made), list[tuple[str, str]]()
    models = Models(
        shelf, "single_label", ("champion", "challenger"), 1.0, lambda *one: told.append(one)
    )

    def look(role: Role, version: str | None) -> list[tuple[str, str]]:
        told.clear()
        shelf.wanted = {role: Target(version, made.seal)}
        models.look(role)
        return list(told)

    assert look("champion", "m/1") == [("m/1", "loaded")] and look("champion", "m/1") == []
    assert look("champion", "m/9") == [("m/9", "refused")]
    assert look("champion", "m/1") == [("m/1", "stays")] and models.problem("champion") is None
    assert look("challenger", "m/2") == [("m/2", "loaded")]
    assert look("challenger", None) == [("m/2", "left")] and look("challenger", None) == []


class Refusing(Shelf):
    """A registry whose one version cannot be loaded, or which does not answer."""

    def __init__(self, error: Exception) -> None:
        self.error, self.wanted = error, {}

    def files(self, role: Role, version: str) -> Mapping[str, bytes]:
        raise self.error


def ready(models: Models, keeper: object = None) -> dict[str, Any]:
    batcher = SimpleNamespace(plan="one at a time", hangs=lambda seconds: False)
    parts = SimpleNamespace(
        models=models, batcher=batcher, keeper=keeper, room=SimpleNamespace(closed=False)
    )
    answer = asyncio.run(_Handlers(parts).ready())  # type: ignore[arg-type]
    return dict(json.loads(bytes(answer.body)))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            DataError("It is not the one registered as m/9", got="/home/me/my runs/p, 1a", fix="X"),
            "It is not the one registered as m/9 (got …). X.",
        ),
        (
            DataError("This version is of another task", got="m/9 has model.task=regression"),
            "This version is of another task (got 'm/9 has model.task=regression').",
        ),
        (OSError(2, "No such file", r"C:\runs\w"), "[Errno 2] No such file: …"),
        (
            RaypipeError(
                "No answer of https://store.inner:9000/models or store.inner:9000: "
                "HTTPConnectionPool(host='store.inner', port=9000): Failed to resolve 'store.inner'"
            ),
            "No answer of … or …: HTTPConnectionPool(…, port=9000): Failed to resolve ….",
        ),
    ],
)
def test_who_has_no_token_is_told_why_a_version_is_not_served_and_no_path(
    error: Exception, expected: str
) -> None:
    """/ready asks for no token, and named folders and hosts of the registry."""
    shelf = Refusing(error)
    models = Models(shelf, "single_label", ("champion",), 1.0, lambda *one: None)
    shelf.wanted = {"champion": Target("m/9", "a seal")}
    models.look("champion")
    told = {"version": "m/9", "why": expected}
    assert ready(models)["problems"] == {"champion": told}

    said = "the registry does not answer: HTTPConnectionPool(host='store.inner', port=5000)"
    shelf.wanted = {"champion": Target(None, problem=said)}
    models.look("champion")
    told = {"version": None, "why": "the registry does not answer"}
    assert ready(models, SimpleNamespace(problem=""))["problems"] == {"champion": told}
    problem = models.problem("champion")
    assert problem is not None and problem.why == said, "the log and the console tell it whole"
    full = SimpleNamespace(problem="No space left on device: /home/me/requests")
    assert ready(models, full)["request_log"] == "No space left on device: …"
    assert ready(models)["request_log"] == "off"


def test_a_replica_that_was_replaced_is_not_heard_for_ever(tmp_path: Path) -> None:
    """After a promotion the console told its version and the new one, in turns, every second."""
    time, said, told = [0.0], list[str](), {"champion": ["m/1"]}
    run = RunConfig(name="m", dir=str(tmp_path))
    registry = Registry(run, RegistryConfig(), ServeConfig(follow_s=2), lambda: time[0])

    def heard(**reports: dict[str, str]) -> list[str]:
        said.clear()
        for replica, report in reports.items():
            registry.targets(replica, report)
        server._tell(registry.reports(), told, said.append)
        return list(said)

    assert heard(old={"champion": "m/1"}) == []
    time[0] += 40
    assert heard(new={"champion": "m/2", "challenger": "m/3"}) == [
        "champion: m/2",
        "challenger: m/3",
    ]
    assert heard(new={"champion": "m/2", "challenger": "m/3"}) == []
    assert heard(new={"champion": "m/2"}) == ["challenger: none"]
    assert heard(new={"champion": "m/2"}) == []


class FullDisk:
    """A request log that nobody can write."""

    def add(self, images: object, answers: object) -> None:
        raise OSError("No space left on device")


def test_what_a_server_could_not_keep_is_told_at_its_end(
    caplog: pytest.LogCaptureFixture, heard: None
) -> None:
    """It was warned of once, perhaps days before, and nobody heard that it was lost in the end."""
    counted = list[tuple[str, int]]()
    keeper = Keeper(FullDisk(), 60.0, lambda *one: counted.append(one))  # type: ignore[arg-type]
    outcome = Outcome("m/1", "champion", ("a", "b"), label="a")
    for number in range(3):
        keeper.note(Entry(f"{number:032x}", b"no image", "champion", outcome, 0.1, now()))
    keeper.close()
    assert counted == [("dropped", 3)]
    assert "3 answers and 0 labels were not written" in caplog.text and "No space" in caplog.text


def test_without_a_challenger_no_shadow_fails() -> None:
    """Each shadowed request counted as a failed prediction of a model that did not exist."""
    cfg = validate(ServeConfig, {"challenger": {"share": 1.0, "shadow": True}})

    def is_shadowed(challenger: object) -> bool:
        of_role: Any = SimpleNamespace(of=lambda role: challenger)
        parts: Any = SimpleNamespace(cfg=cfg, models=of_role)
        return _Handlers(parts)._is_shadowed("f" * 32)

    assert is_shadowed(object()) and not is_shadowed(None)


def test_a_model_that_divides_by_contrast_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was registered, promoted and predicted with, and serve refused it for plain grey."""

    class Divides(Package):
        def predict_pixels(self, pixels_NHWC: np.ndarray) -> Any:
            if not np.ptp(pixels_NHWC):
                raise DataError("not finite")
            return super().predict_pixels(pixels_NHWC)

    cfg = ModelConfig(name="small_cnn", mode="finetune", pretrained=False, side_px=32)
    empty = Reference(np.empty((0, 1)), np.empty((0, 1)), ())
    made = Divides(build(tmp_path, ImageModel(cfg, 2), cfg, ("a", "b"), empty, {}))
    monkeypatch.setattr(models, "Package", Divides)
    assert models.load(made.files, Target("m/1", made.seal)).version == "m/1"
    assert all(batching.measure(made, 1, 2).rates)


def test_what_the_registrys_actor_gets_has_no_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its current folder is that of `ray start`, and another store's champion answered."""
    monkeypatch.chdir(tmp_path)
    there = tracking.absolute(RegistryConfig(uri="sqlite:///store/m.db", moves="moves"))
    assert there.uri == f"sqlite:///{tmp_path}/store/m.db" and there.moves == str(
        tmp_path / "moves"
    )
    whole = RegistryConfig(uri="sqlite:////s/m.db?timeout=5", moves="s3://b/moves")
    assert tracking.absolute(whole) == whole
    monkeypatch.setenv("WHOLE", "sqlite:///file:/s/m.db?uri=true&password=secret")
    unseen = RegistryConfig(uri="env:WHOLE")
    assert tracking.absolute(unseen) == unseen, "what may hold a password stays in its variable"
    # SQLite's own address, and a folder whose name an address would read as another one.
    here = tmp_path / "100%41 ?"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("STORE", "sqlite:///b%20c.db")
    names = ("sqlite:///a.db", "sqlite:///file:a%20b.db?mode=rwc&uri=true", "env:STORE")
    for name, file in zip(names, ("a.db", "a b.db", "b c.db"), strict=True):
        made = tracking.absolute(RegistryConfig(uri=name, registry_uri=name))
        monkeypatch.chdir("/")
        assert made.uri is not None and made.uri == made.registry_uri
        assert tracking.file_of(made.uri) == here / file
        assert made.uri.partition("?")[2] == name.partition("?")[2]
        monkeypatch.chdir(here)
    monkeypatch.chdir(tmp_path)
    cfg = validate(ServeConfig, {"cpus": 1, "keep": 0, "requests": "log"})
    checked = server.Checked(ModelVersion("m", 1, "x", {}), "single_label", None)
    made = server._setup(checked, RunConfig(name="m", dir="runs/m"), cfg, 8000)
    assert made.requests == str(tmp_path / "log")
    # A folder in which nobody will write a table may have any name.
    nothing = validate(ServeConfig, {"cpus": 1, "keep": 0})
    server._setup(checked, RunConfig(name="m", dir="runs/[a]"), nothing, 8000)
