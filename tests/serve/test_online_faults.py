"""Faults beside a server: two on one request log, a kill before the log is written, NaN."""

from __future__ import annotations

import io
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from raypipe.config import RunConfig, validate
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.registry import packing
from raypipe.registry.package import Reference
from raypipe.registry.tracking import RegistryConfig
from raypipe.serve.online import server
from raypipe.serve.online.server import Server
from raypipe.serve.online.settings import ServeConfig
from raypipe.tables import scan
from raypipe.tables.ingest import IngestConfig, ingest
from raypipe.tables.table import ImageTable, TableConfig
from tests.serve.conftest import CLASSES, Registered

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_session")]


@contextmanager
def serving(registered: Registered, requests: Path, **settings: Any) -> Iterator[Server]:
    given = {"port": 0, "cpus": 1, "requests": str(requests), "flush_s": 0.3, **settings}
    run = RunConfig(name="mixed", dir=str(registered.store.folder.parent))
    with server.running(run, RegistryConfig(), validate(ServeConfig, given)) as made:
        yield made


def ask(running: Server, path: str, data: bytes, kind: str = "image/png") -> tuple[int, Any]:
    request = urllib.request.Request(running.address + path, data, {"Content-Type": kind})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as e:
        return e.code, json.loads(e.read())


def tell(running: Server, request: str, label: str) -> int:
    body = json.dumps({"request_id": request, "label": label}).encode()
    return ask(running, "/feedback", body, "application/json")[0]


def rows(folder: Path, column: str) -> list[str]:
    if not ImageTable.exists(str(folder)):
        return []
    table = ImageTable(str(folder))
    return scan.rows(table, table.pin(), [column])[column].to_pylist()


def wait_until(is_so: Callable[[], bool], seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.2)


def test_two_servers_write_one_log_without_losing_or_doubling_a_row(
    registered: Registered, tmp_path: Path
) -> None:
    """The same images go to both, and labels to the server that did not answer."""
    log = tmp_path / "requests"
    images = registered.images[:100]
    often = {"flush_s": 0.1}
    with serving(registered, log, **often) as first, serving(registered, log, **often) as second:
        both = (first, second)

        def one(number: int) -> str:
            status, body = ask(both[number % 2], "/predict", images[number // 2])
            assert status == 200
            assert tell(both[1 - number % 2], body["request_id"], "b") == 202
            return str(body["request_id"])

        with ThreadPoolExecutor(8) as pool:
            asked = Counter(pool.map(one, range(2 * len(images))))
    assert len(asked) == 200
    assert Counter(rows(log / "answers", "request_id")) == asked
    assert Counter(rows(log / "feedback", "request_id")) == asked
    ids = rows(log / "images", "image_id")
    assert len(ids) == len(set(ids)) == len(set(images))
    # More than one commit each, or nobody raced.
    assert ImageTable(str(log / "answers")).newest().version >= 4
    source = {"kind": "feedback", "images": str(log)}
    cfg = validate(IngestConfig, {"from": source, "splits": {"train": 1.0}})
    assert ingest(TableConfig(uri=str(tmp_path / "t")), cfg).accepted == len(ids)


def test_a_kill_before_the_log_is_written_loses_what_waited_and_nothing_else(
    registered: Registered, tmp_path: Path
) -> None:
    log = tmp_path / "requests"
    # Nothing is written by itself: 1,000 rows or a stop would.
    with serving(registered, log, flush_s=3600) as running:
        kept = [ask(running, "/predict", image)[1]["request_id"] for image in registered.images[:9]]
    assert rows(log / "answers", "request_id") == kept
    with serving(registered, log, flush_s=3600) as running:
        for image in registered.images[9:30]:
            assert ask(running, "/predict", image)[0] == 200
        pid = running.replica.status.remote().result(timeout_s=30)["pid"]
        os.kill(pid, signal.SIGKILL)

        def answers() -> bool:
            try:
                return ask(running, "/predict", registered.images[0])[0] == 200
            except (urllib.error.URLError, ConnectionError):
                return False

        # Ray Serve starts another replica, whose log goes on.
        wait_until(answers, 120)
        assert running.replica.status.remote().result(timeout_s=30)["pid"] != pid
        assert rows(log / "answers", "request_id") == kept
    written = rows(log / "answers", "request_id")
    assert written[:9] == kept and len(set(written)) == len(written) >= 10
    assert len(rows(log / "images", "image_id")) == 9


def test_one_image_that_gives_nan_gets_500_and_the_others_their_answers(
    registered: Registered, tmp_path: Path
) -> None:
    options = {"how": "nan"}
    name = "file:tests.serve.odd_models:net"
    cfg = ModelConfig(name=name, options=options, pretrained=False, mode="finetune", side_px=32)
    model = ImageModel(cfg, len(CLASSES)).eval()
    reference = Reference(np.zeros((4, 3)), np.full((4, 3), 1 / 3), tuple("wxyz"))
    folder = packing.build(tmp_path / "odd", model, cfg, CLASSES, reference, {})
    version = registered.another("odd-online", folder)
    white = io.BytesIO()
    Image.new("RGB", (40, 40), "white").save(white, "PNG")
    sent = [white.getvalue() if n % 10 == 3 else registered.images[n] for n in range(100)]
    log = tmp_path / "requests"
    batches = {"batching": "on", "batch_size": 16, "batch_wait_ms": 50}
    with (
        serving(registered, log, version=version.version, **batches) as running,
        ThreadPoolExecutor(32) as pool,
    ):
        answers = list(pool.map(lambda image: ask(running, "/predict", image), sent))
    for number, (status, body) in enumerate(answers):
        assert status == (500 if number % 10 == 3 else 200), body
        if status == 500:
            assert body["error"]["what"] == "The model could not predict this image"
            assert body["error"]["got"] == str(version)
    # What was not answered is not in the log.
    good = {body["request_id"] for status, body in answers if status == 200}
    assert set(rows(log / "answers", "request_id")) == good and len(good) == 90
