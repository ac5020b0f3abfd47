"""A registry or a table that is away for a night, and models whose names are not ASCII."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.registry.package import Package, Reference
from raypipe.registry.packing import build
from raypipe.serve import stream
from raypipe.serve.batch import Calls
from raypipe.serve.online import app, batching, metrics, server
from raypipe.serve.online.batching import Batcher
from raypipe.serve.online.front import Front
from raypipe.serve.online.limits import Rates, Room
from raypipe.serve.online.metrics import Metrics
from raypipe.serve.online.models import Models, Role, Target
from raypipe.serve.online.settings import ServeConfig


class Shelf:
    """One package, and what the registry says of the champion."""

    def __init__(self, package: Package) -> None:
        self.package = package
        self.kept = dict(package.files)
        self.target = Target("m/1", package.seal)

    def targets(self) -> Mapping[Role, Target]:
        return {"champion": self.target}

    def files(self, role: Role, version: str) -> Mapping[str, bytes]:
        return self.kept


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    cfg = ModelConfig(name="small_cnn", mode="finetune", pretrained=False, side_px=32)
    empty = Reference(np.empty((0, 1)), np.empty((0, 1)), ())
    folder = build(tmp_path / "p", ImageModel(cfg, 2), cfg, ("a", "b"), empty, {})
    return Shelf(Package(folder))


def followed(shelf: Shelf) -> Models:
    return Models(shelf, "single_label", ("champion",), 1.0, lambda version, result: None)


@pytest.mark.parametrize("problem", ["no answer", ""])
def test_a_registry_that_was_away_for_an_hour_is_followed_again(shelf: Shelf, problem: str) -> None:
    """After 1,025 looks, half an hour, the pause was no float any more: the thread ended."""
    models = followed(shelf)
    models.look("champion")
    shelf.target = Target(None, problem=problem)
    for _ in range(1100):
        models.look("champion")
    assert models.problem("champion") is not None
    shelf.target = Target("m/2", shelf.package.seal)
    models.look("champion")
    served = models.of("champion")
    assert served is not None and served.version == "m/2"


def test_a_table_that_is_away_for_a_day_does_not_end_a_stream() -> None:
    """2.0 ** 1024 is no float: after 17 hours of tries the stream ended in an OverflowError."""
    said: list[str] = []
    one = object.__new__(stream._Stream)
    one._failures, one._said, one._calls = 0, "", Calls(say=said.append)
    pauses = [one.failed(OSError("away")) for _ in range(1100)]
    assert pauses[0] == 2 and set(pauses[6:]) == {stream.MOST_RETRY_S} and len(said) == 1


def test_replicas_that_differ_are_told_once() -> None:
    """While one replica could not load the new version, both were told in turns, every second."""
    told, said = {"champion": ["m/1"]}, list[str]()

    def heard(**reports: dict[str, str]) -> list[str]:
        said.clear()
        server._tell(reports, told, said.append)
        return list(said)

    stuck = {"champion": "m/1", "champion problem": "m/2 is not served: its disk is full"}
    differ = {"one": stuck, "other": {"champion": "m/2"}}
    assert heard(**differ) == [
        "champion: m/2",
        "champion problem: m/2 is not served: its disk is full; m/1 stays",
    ]
    assert heard(**differ) == heard(**differ) == []
    # Back by a rollback, and forward again.
    both = {"champion": "m/1"}
    assert heard(one=both, other=both) == ["champion: m/1"]
    assert heard(one={"champion": "m/2"}, other=both) == ["champion: m/2"]
    assert heard(one={"champion": "m/2"}, other={"champion": "m/2"}) == []


def test_a_model_with_a_name_in_other_letters_answers(
    shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header holds Latin-1 at most: each prediction of the model 螺丝 got 500."""
    monkeypatch.setenv(metrics.FOLDER, str(tmp_path))
    shelf.target = Target("螺丝 100%/1", shelf.package.seal)
    models = followed(shelf)
    models.look("champion")
    cfg = ServeConfig()
    batcher = Batcher(models, batching.off(), 1, cfg.max_pixels)
    parts = app.Parts(cfg, models, batcher, None, Metrics(), Room(9, 2**30), lambda v, s: None)
    counted: list[tuple[str, int]] = []
    front = Front(
        app.build(parts),
        Rates(None),
        None,
        lambda: "螺丝 100%/1",
        lambda path, status: counted.append((path, status)),
    )
    picture = io.BytesIO()
    Image.new("RGB", (40, 40)).save(picture, "png")
    try:
        for path, body in (("/predict", picture.getvalue()), ("/predict", b"no image")):
            headers, answer = asyncio.run(_asked(front, path, body))
            assert headers[b"x-model-version"] == b"%E8%9E%BA%E4%B8%9D 100%25/1"
    finally:
        batcher.close()
    assert counted == [("/predict", 200), ("/predict", 415)]
    assert "error" in answer


async def _asked(front: Front, path: str, body: bytes) -> tuple[dict[bytes, bytes], dict[str, Any]]:
    """The headers of the answer, and its body."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(b"content-length", str(len(body)).encode())],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    await front(scope, receive, send)
    return dict(sent[0]["headers"]), json.loads(sent[1]["body"])


def test_each_replica_keeps_the_number_of_its_running_requests_up_to_date() -> None:
    """It was set by whichever replica answered /metrics: the sum of a node had numbers of others
    from long ago."""
    told: list[float] = []
    room = Room(9, 100, told.append)
    with room.hold(10), room.hold(20):
        assert told == [1, 2]
    assert told == [1, 2, 1, 0]


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no JavaScript here")
def test_the_page_shows_the_best_of_classes_that_are_numbers() -> None:
    """JavaScript keeps keys like 7 in the order of numbers: of 2,000 classes the page showed the
    bars of 0 to 9, and not the class that it named."""
    page = Path(app.__file__).with_name("page.html").read_text("utf-8")
    [ranked] = [line for line in page.splitlines() if line.startswith("const ranked")]
    scores = {"1900": 0.9, "7": 0.06, "a": 0.04} | {str(n): 0.0 for n in range(6)}
    script = f"{ranked} console.log(JSON.stringify(ranked({json.dumps(scores)}).slice(0, 3)))"
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [["1900", 0.9], ["7", 0.06], ["a", 0.04]]


def test_a_mistake_of_ours_is_logged_without_credentials(
    caplog: pytest.LogCaptureFixture, heard: None
) -> None:
    async def fails(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("no answer of postgresql://me:canary-12345@host/mlflow")

    front = Front(fails, Rates(None), None, lambda: "m/1", lambda path, status: None)
    _, answer = asyncio.run(_asked(front, "/predict", b""))
    assert answer["error"]["what"] == "The server made a mistake"
    assert "Traceback" in caplog.text and "canary-12345" not in caplog.text
