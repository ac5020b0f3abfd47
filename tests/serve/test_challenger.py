"""A challenger sees the share of the requests that was asked for, and its failures reach nobody."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from raypipe.config import RunConfig, validate
from raypipe.models.zoo import ImageModel
from raypipe.registry import packing
from raypipe.registry.package import Reference
from raypipe.registry.tracking import RegistryConfig
from raypipe.registry.versions import ModelVersion
from raypipe.serve.online import server
from raypipe.serve.online.server import Server
from raypipe.serve.online.settings import ServeConfig
from raypipe.tables import scan
from raypipe.tables.table import ImageTable
from tests.serve.conftest import CFG, CLASSES, Registered

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_session")]
REQUESTS = 2000
SHARE = 0.1
THREE_SIGMA = 3 * (REQUESTS * SHARE * (1 - SHARE)) ** 0.5  # 40


@dataclass(frozen=True)
class Seen:
    """What clients saw: how many answers by status and by model, and each answer's seconds."""

    statuses: Counter[int]
    models: Counter[str]
    seconds: list[float]


def send(running: Server, images: list[bytes], requests: int = REQUESTS) -> Seen:
    seen = Seen(Counter(), Counter(), [])
    lock = threading.Lock()

    def one(number: int) -> None:
        began = time.monotonic()
        request = urllib.request.Request(f"{running.address}/predict", images[number % len(images)])
        request.add_header("Content-Type", "image/png")
        with urllib.request.urlopen(request, timeout=30) as answer:
            body = json.loads(answer.read())
        with lock:
            seen.statuses[answer.status] += 1
            seen.models[body["model"]] += 1
            seen.seconds.append(time.monotonic() - began)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(requests)))
    return seen


@contextmanager
def serving(registered: Registered, folder: Path, shadow: bool) -> Iterator[Server]:
    cfg = validate(
        ServeConfig,
        {
            "port": 0,
            "cpus": 1,
            "requests": str(folder / "requests"),
            "follow_s": 0.2,
            "flush_s": 0.3,
            "challenger": {"share": SHARE, "shadow": shadow},
        },
    )
    run = RunConfig(name="mixed", dir=str(registered.store.folder.parent))
    with server.running(run, RegistryConfig(), cfg) as made:
        yield made


def challenge(registered: Registered, version: ModelVersion) -> None:
    store = registered.store
    store.client.set_registered_model_alias(store.model, "challenger", str(version.version))


def overflowing(registered: Registered, folder: Path) -> ModelVersion:
    """A version that loads, and whose scores are finite for a grey image and for few others."""
    model = ImageModel(CFG, len(CLASSES)).eval()
    model.load_state_dict(registered.package.model.state_dict())
    with torch.no_grad():
        grey = model.embed(torch.full((1, CFG.pixels, CFG.pixels, 3), 128, dtype=torch.uint8))
        model.head.standardise_by(grey[0], torch.full_like(grey[0], 1e-3))
        weight = model.head.linear.weight
        weight.div_(weight.abs().max()).mul_(3e38)
    reference = Reference(np.zeros((4, 64)), np.full((4, 3), 1 / 3), tuple("wxyz"))
    built = packing.build(folder / "overflowing", model, CFG, CLASSES, reference, {})
    return registered.another("overflowing", built)


def metrics(running: Server) -> dict[str, Any]:
    text = urllib.request.urlopen(f"{running.address}/metrics", timeout=10).read().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def by_model_and_role(running: Server) -> Counter[tuple[str, str]]:
    counted: Counter[tuple[str, str]] = Counter()
    for sample in metrics(running)["raypipe_predictions"].samples:
        if sample.name.endswith("_total"):
            counted[sample.labels["model"], sample.labels["role"]] += int(sample.value)
    return +counted


def logged(running: Server) -> Counter[tuple[str, str]]:
    table = ImageTable(f"{running.requests}/answers")
    rows = scan.rows(table, table.pin(), ["model", "role"]).to_pylist()
    return Counter((row["model"], row["role"]) for row in rows)


def wait_until(says: Any, seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not says():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.2)


def ready(running: Server) -> dict[str, Any]:
    with urllib.request.urlopen(f"{running.address}/ready", timeout=10) as answer:
        body: dict[str, Any] = json.loads(answer.read())
    return body


def test_a_tenth_is_answered_by_the_challenger_and_its_failures_by_the_champion(
    registered: Registered, tmp_path: Path
) -> None:
    champion = str(registered.version)
    second = registered.another("second")
    challenge(registered, second)
    with serving(registered, tmp_path, shadow=False) as running:
        wait_until(lambda: ready(running).get("challenger") == str(second))
        seen = send(running, registered.images)
        assert seen.statuses == {200: REQUESTS}
        assert set(seen.models) == {champion, str(second)}
        assert abs(seen.models[str(second)] - SHARE * REQUESTS) <= THREE_SIGMA
        wait_until(lambda: logged(running).total() == REQUESTS)
        assert logged(running) == by_model_and_role(running)
        assert logged(running)[str(second), "challenger"] == seen.models[str(second)]

        # The champion answers what the challenger cannot.
        third = overflowing(registered, tmp_path)
        challenge(registered, third)
        wait_until(lambda: ready(running).get("challenger") == str(third))
        broken = send(running, registered.images, 400)
        assert broken.statuses == {200: 400} and broken.models[champion] > 380
        print("answered", seen.models, "with a broken challenger", broken.models)


def test_a_shadow_only_counts_and_harms_nobody(registered: Registered, tmp_path: Path) -> None:
    champion = str(registered.version)
    second = registered.another("shadow")
    challenge(registered, second)
    with serving(registered, tmp_path, shadow=True) as running:
        wait_until(lambda: ready(running).get("challenger") == str(second))
        seen = send(running, registered.images)
        assert seen.statuses == {200: REQUESTS} and seen.models == {champion: REQUESTS}
        wait_until(lambda: logged(running)[champion, "champion"] == REQUESTS)
        wait_until(lambda: logged(running) == by_model_and_role(running))
        shown = logged(running)[str(second), "shadow"]
        failed = metrics(running)["raypipe_shadow_failures"].samples[0].value
        assert abs(shown + failed - SHARE * REQUESTS) <= THREE_SIGMA and failed == 0

        third = overflowing(registered, tmp_path)
        challenge(registered, third)
        wait_until(lambda: ready(running).get("challenger") == str(third))
        broken = send(running, registered.images, 400)
        assert broken.statuses == {200: 400} and broken.models == {champion: 400}
        wait_until(lambda: metrics(running)["raypipe_shadow_failures"].samples[0].value > 5)
        slower = np.median(broken.seconds) / np.median(seen.seconds)
        print("shadows", shown, "median with a broken shadow ÷ before", round(slower, 2))
