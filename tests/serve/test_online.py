"""One real server for all: answers as the package's, limits, a token, promotions under load."""

from __future__ import annotations

import io
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from raypipe.config import RunConfig, validate
from raypipe.errors import ConfigError, DataError
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.monitor.recorder import Keeping
from raypipe.monitor.spool import Spool
from raypipe.registry import packing
from raypipe.registry.package import Reference
from raypipe.registry.store import Store
from raypipe.registry.tracking import RegistryConfig
from raypipe.registry.versions import ModelVersion
from raypipe.serve.online import server
from raypipe.serve.online.server import Server
from raypipe.serve.online.settings import ServeConfig
from raypipe.tables import scan
from raypipe.tables.ingest import IngestConfig, ingest
from raypipe.tables.table import ImageTable, TableConfig

from .conftest import CLASSES, Registered, flip_a_byte

TOKEN = "a-token-that-nobody-guesses"


@dataclass(frozen=True)
class Answer:
    status: int
    body: dict[str, Any]


def ask(
    running: Server, path: str, data: bytes | None = None, kind: str = "image/png", **headers: str
) -> Answer:
    sent = {"Content-Type": kind, "Authorization": f"Bearer {TOKEN}"} | headers
    request = urllib.request.Request(running.address + path, data, sent)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return Answer(answer.status, json.loads(answer.read()))
    except urllib.error.HTTPError as e:
        return Answer(e.code, json.loads(e.read()))


@pytest.fixture(scope="module")
def run(registered: Registered) -> RunConfig:
    return RunConfig(name="mixed", dir=str(registered.store.folder.parent))


@pytest.fixture(scope="module")
def running(
    ray_session: str,
    registered: Registered,
    run: RunConfig,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("online")
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    cfg = validate(
        ServeConfig,
        {
            "port": 0,
            "cpus": 1,
            "token_file": str(token),
            "requests": str(folder / "requests"),
            "max_bytes": 2_000_000,
            "follow_s": 0.2,
            "flush_s": 0.5,
        },
    )
    keeping = Keeping(folder / "spool", 2**20, "r", "mixed", "serve")
    with server.running(run, RegistryConfig(), cfg, (keeping,)) as made:
        yield made
    # A replica that ends with grace leaves its counts for the process that sends them.
    spool = Spool(folder / "spool", 2**20)
    records = [json.loads(line) for s in spool.segments() for line in s.lines()[0]]
    statuses = sum((Counter(r["Statuses"]) for r in records), Counter[str]())
    assert statuses["200"] >= 200 and statuses.total() == sum(r["Requests"] for r in records)
    assert {r["RunId"] for r in records} == {"r"} and all(r["Model"] for r in records)


def test_the_same_answer_as_the_package_and_the_version_in_it(
    running: Server, registered: Registered
) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda image: ask(running, "/predict", image), registered.images))
    assert {answer.status for answer in answers} == {200}
    assert [answer.body["label"] for answer in answers] == registered.answers.labels
    classes = registered.package.classes
    scores = [[answer.body["scores"][name] for name in classes] for answer in answers]
    np.testing.assert_allclose(scores, registered.answers.scores_NC, atol=1e-4)
    assert {answer.body["model"] for answer in answers} == {str(registered.version)}
    assert len({answer.body["request_id"] for answer in answers}) == 200


def large_png() -> bytes:
    out = io.BytesIO()
    Image.new("1", (12_000, 10_000)).save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize(
    ("case", "status"),
    [
        ("noise", 413),
        ("text", 415),
        ("not an image", 415),
        ("nothing", 415),
        ("120 megapixels", 422),
        ("animated", 415),
        ("no token", 401),
        ("another token", 401),
        ("unknown path", 404),
    ],
)
def test_what_is_refused_has_its_status_and_one_clear_body(
    running: Server, registered: Registered, case: str, status: int
) -> None:
    image = registered.images[0]
    gif = io.BytesIO()
    frames = [Image.new("RGB", (9, 9), (i, 0, 0)) for i in range(200)]
    frames[0].save(gif, "GIF", save_all=True, append_images=frames[1:])
    made = {
        "noise": lambda: ask(running, "/predict", np.random.default_rng(0).bytes(20_000_000)),
        "text": lambda: ask(running, "/predict", b"hello", "text/plain"),
        "not an image": lambda: ask(running, "/predict", b"hello"),
        "nothing": lambda: ask(running, "/predict", b""),
        "120 megapixels": lambda: ask(running, "/predict", large_png()),
        "animated": lambda: ask(running, "/predict", gif.getvalue()),
        "no token": lambda: ask(running, "/predict", image, Authorization=""),
        "another token": lambda: ask(running, "/predict", image, Authorization="Bearer 123"),
        "unknown path": lambda: ask(running, "/nothing"),
    }
    answer = made[case]()
    assert answer.status == status, answer
    error = answer.body["error"]
    assert error["what"] and set(error) == {"what", "got", "rule", "fix"}
    assert "Traceback" not in json.dumps(answer.body)
    # Its label would wait for an answer that never comes.
    body = json.dumps({"request_id": answer.body["request_id"], "label": "b"}).encode()
    told = ask(running, "/feedback", body, "application/json")
    assert (told.status, told.body["error"]["what"]) == (404, "There is no prediction of this id")
    assert ask(running, "/predict", image).status == 200, "the server is up"


def test_two_hundred_at_once_and_clients_that_hang_up_harm_nobody(
    running: Server, registered: Registered
) -> None:
    with ThreadPoolExecutor(200) as pool:
        wanted = [pool.submit(ask, running, "/predict", image) for image in registered.images]
        answers = [each.result() for each in wanted]
    assert {answer.status for answer in answers} <= {200, 503}
    assert sum(answer.status == 200 for answer in answers) >= 150
    # Half a body, and then the line is cut.
    place = urlparse(running.address)
    for _ in range(30):
        with socket.create_connection((place.hostname, place.port), timeout=10) as line:
            head = f"POST /predict HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
            head += "Content-Type: image/png\r\nContent-Length: 90000\r\n\r\n"
            line.sendall(head.encode() + b"x" * 1000)
    assert ask(running, "/predict", registered.images[0]).status == 200
    assert ask(running, "/ready").body["ready"]


def point_at(store: Store, version: ModelVersion) -> None:
    store.client.set_registered_model_alias(store.model, store.alias, str(version.version))


def wait_for_refusal(running: Server, version: ModelVersion) -> dict[str, Any]:
    """What /ready says once this version is refused; a moment before it may name an earlier one."""
    deadline = time.monotonic() + 60
    while True:
        ready = ask(running, "/ready").body
        if ready["problems"].get("champion", {}).get("version") == str(version):
            return ready
        assert time.monotonic() < deadline, ready
        time.sleep(0.2)


def wait_for_answer_of(running: Server, version: ModelVersion, image: bytes) -> None:
    deadline = time.monotonic() + 60
    while ask(running, "/predict", image).body.get("model") != str(version):
        assert time.monotonic() < deadline, f"{version} never answered"
        time.sleep(0.2)


@pytest.mark.parametrize("moves", [6, pytest.param(120, marks=pytest.mark.slow)])
def test_promotions_while_clients_ask_lose_no_request_and_corrupt_ones_change_nothing(
    running: Server, registered: Registered, moves: int
) -> None:
    """Every sixth move, or third, points at a version whose weights were altered."""
    store, first = registered.store, registered.version
    second = registered.another(f"second {moves}")
    broken = registered.another(f"broken {moves}")
    order = (
        (second, broken, first) if moves == 6 else (second, first, second, first, second, broken)
    )
    flip_a_byte(registered.weights_of(broken))
    stop = threading.Event()
    statuses: Counter[int] = Counter()
    models: Counter[str] = Counter()

    def client(number: int) -> None:
        while not stop.is_set():
            answer = ask(running, "/predict", registered.images[number])
            statuses[answer.status] += 1
            models[answer.body.get("model", "none")] += 1

    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(client, number) for number in range(8)]
        try:
            for i in range(moves):
                point_at(store, order[i % len(order)])
                time.sleep(0.8)
                if i < len(order) and order[i] is not broken:
                    wait_for_answer_of(running, order[i], registered.images[8])
            point_at(store, broken)
            ready = wait_for_refusal(running, broken)
        finally:
            point_at(store, first)
            stop.set()
        for each in clients:
            each.result()
    assert ready["ready"] and ready["champion"] in (str(first), str(second))
    why = ready["problems"]["champion"]["why"]
    assert "altered" in why and "ray::" not in why
    print(f"{moves} moves: {dict(statuses)}, {dict(models)}")
    assert set(statuses) == {200} and sum(statuses.values()) > 10 * moves
    assert set(models) == {str(first), str(second)}, "every answer names the version that gave it"


def test_a_promoted_version_of_another_task_is_refused_and_the_old_one_stays(
    running: Server, registered: Registered, tmp_path: Path
) -> None:
    store = registered.store
    cfg = ModelConfig(name="small_cnn", pretrained=False, mode="finetune", task="regression")
    model = ImageModel(cfg, 1).eval()
    reference = Reference(np.zeros((4, 64)), np.zeros((4, 1)), tuple("wxyz"))
    folder = packing.build(tmp_path / "number", model, cfg, ("value",), reference, {})
    number = registered.another("number", folder)
    point_at(store, number)
    try:
        refused = wait_for_refusal(running, number)
        assert "another task" in refused["problems"]["champion"]["why"]
        answer = ask(running, "/predict", registered.images[0]).body
        assert answer["label"] in CLASSES and answer["model"] != str(number)
    finally:
        point_at(store, registered.version)


@pytest.mark.parametrize("head", ["X-Long: " + "x" * 600_000, "X-Many: y\r\n" * 60_000])
def test_a_head_that_is_too_large_gets_431_and_keeps_nobody_waiting(
    running: Server, registered: Registered, head: str
) -> None:
    host, port = running.address.removeprefix("http://").split(":")
    began = time.monotonic()
    said = b""
    # A server that closes before it has read everything may cut its own answer off.
    for _ in range(5):
        with (
            suppress(ConnectionError),
            socket.create_connection((host, int(port)), timeout=20) as line,
        ):
            line.sendall(f"POST /predict HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode())
            said = said or line.recv(1000)
    assert b" 431 " in said.splitlines()[0]
    assert ask(running, "/predict", registered.images[0]).status == 200
    assert time.monotonic() - began < 15


def test_feedback_and_the_log_and_the_metrics_agree(
    running: Server, registered: Registered
) -> None:
    answer = ask(running, "/predict", registered.images[5])
    body = {"request_id": answer.body["request_id"], "label": "b"}
    for _ in range(2):
        told = ask(running, "/feedback", json.dumps(body).encode(), "application/json")
        assert told.status == 202 and told.body["label"] == "b"
    wrong = ask(running, "/feedback", b'{"request_id": "x", "label": "b"}', "application/json")
    assert wrong.status == 422

    root = Path(running.requests)
    deadline = time.monotonic() + 60
    counted = -1.0
    logged = 0
    while counted != logged and time.monotonic() < deadline:
        time.sleep(1)
        request = urllib.request.Request(
            running.address + "/metrics", headers={"Authorization": f"Bearer {TOKEN}"}
        )
        text = urllib.request.urlopen(request, timeout=10).read().decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        samples = families["raypipe_predictions"].samples
        counted = sum(s.value for s in samples if s.name.endswith("_total"))
        logged = len(rows(root / "answers", ["request_id"]))
    assert counted == logged > 200
    # An image that was sent often is stored once.
    hashes = [row["sha256"] for row in rows(root / "images", ["sha256"])]
    assert len(hashes) == len(set(hashes)) <= 200
    feedback = rows(root / "feedback", ["request_id", "label"])
    assert {row["request_id"]: row["label"] for row in feedback} == {body["request_id"]: "b"}


def rows(folder: Path, columns: list[str]) -> list[dict[str, Any]]:
    table = ImageTable(str(folder))
    return scan.rows(table, table.pin(), columns).to_pylist()


def test_fifty_requests_ten_of_them_told_twice_are_fifty_labelled_rows(
    running: Server, registered: Registered, tmp_path: Path
) -> None:
    said: dict[str, str] = {}
    requests: set[str] = set()
    for number, image in enumerate(registered.images[:50]):
        answer = ask(running, "/predict", image).body
        # Never what the model said.
        right = next(name for name in CLASSES if name != answer["label"])
        said[sha256(image).hexdigest()] = right
        requests.add(answer["request_id"])
        body = json.dumps({"request_id": answer["request_id"], "label": right}).encode()
        for _ in range(2 if number < 10 else 1):
            assert ask(running, "/feedback", body, "application/json").status == 202
    told = Path(running.requests) / "feedback"
    deadline = time.monotonic() + 60
    while sum(row["request_id"] in requests for row in rows(told, ["request_id"])) < 60:
        assert time.monotonic() < deadline, "the log was not written"
        time.sleep(0.2)

    source = {"kind": "feedback", "images": running.requests}
    cfg = validate(IngestConfig, {"from": source, "splits": {"train": 1.0}})
    table = TableConfig(uri=str(tmp_path / "t"))
    done = ingest(table, cfg)
    assert done.accepted == len(said) == 50
    found = rows(tmp_path / "t", ["image_id", "label"])
    assert len(found) == 50 and {row["image_id"]: row["label"] for row in found} == said
    again = ingest(table, cfg)
    assert (again.accepted, again.relabelled, again.version) == (0, 0, done.version)


def test_feedback_with_a_class_that_the_model_does_not_know_is_refused(
    running: Server, registered: Registered
) -> None:
    answer = ask(running, "/predict", registered.images[0]).body
    body = {"request_id": answer["request_id"], "label": "aa"}
    told = ask(running, "/feedback", json.dumps(body).encode(), "application/json")
    assert told.status == 422 and "no such class" in told.body["error"]["what"]
    assert "'a'" in told.body["error"]["rule"]


def test_what_cannot_be_served_is_refused_before_anything_starts(
    registered: Registered, run: RunConfig, running: Server, tmp_path: Path
) -> None:
    port = int(running.address.rpartition(":")[2])
    loose = tmp_path / "token"
    loose.write_text(TOKEN)
    loose.chmod(0o644)
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"port": port}, ConfigError, "port cannot be used"),
        ({"host": "0.0.0.0", "port": 0}, ConfigError, "token"),
        ({"token_file": str(loose), "port": 0}, ConfigError, "token"),
        ({"version": 99, "port": 0}, DataError, "has no version 99"),
    ]
    for settings, kind, says in cases:
        with pytest.raises(kind, match=says):
            server.check(run, RegistryConfig(), validate(ServeConfig, settings))
    with pytest.raises(DataError, match="There is no nobody"):
        server.check(run, RegistryConfig(alias="nobody"), ServeConfig(port=0))


def test_of_two_servers_that_start_at_once_one_gets_the_port() -> None:
    """Both looked at a free port, and both listened: one address answered with two models."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        cfg = ServeConfig(port=free.getsockname()[1])
    with server._reserved(cfg):
        with (
            pytest.raises(ConfigError, match="another raypipe serve has it"),
            server._reserved(cfg),
        ):
            raise AssertionError("it was not refused")
        with server._reserved(ServeConfig(port=0)), server._reserved(ServeConfig(port=0)):
            pass
    with server._reserved(cfg):
        pass


def test_two_servers_on_one_cluster_do_not_know_each_other(
    registered: Registered, run: RunConfig, running: Server
) -> None:
    image = registered.images[0]
    quick = validate(ServeConfig, {"port": 0, "cpus": 1, "keep": 0, "batching": "off"})
    with server.running(run, RegistryConfig(), quick) as second:
        assert second.address != running.address
        assert ask(second, "/predict", image).status == 200
        assert ask(running, "/predict", image).status == 200
    # The end of one is not the end of Ray Serve.
    assert ask(running, "/predict", image).status == 200


def test_feedback_keeps_the_type_of_a_label(running: Server, registered: Registered) -> None:
    """true was the class 1, and 9007199254740993 the class 9007199254740992."""
    request = ask(running, "/predict", registered.images[0]).body["request_id"]

    def told(label: str) -> tuple[int, str]:
        body = f'{{"request_id": "{request}", "label": {label}}}'.encode()
        answer = ask(running, "/feedback", body, "application/json")
        return answer.status, str(answer.body["error"]["got"])

    assert told("true") == (422, "true")
    assert told("9007199254740993") == (422, "9007199254740993")
    for odd in ("NaN", "1e999", '["a"]', '{"a": 1}', "null", '" "', '"\\ud800"', "9" * 5000):
        assert told(odd)[0] == 422, odd


def test_a_head_without_end_is_refused_and_a_body_in_crumbs_is_taken(
    running: Server, registered: Registered
) -> None:
    place = urlparse(running.address)

    def sent(*parts: bytes) -> bytes:
        with socket.create_connection((place.hostname, place.port), timeout=10) as line:
            with suppress(ConnectionError):
                for part in parts:
                    line.sendall(part)
            try:
                return line.recv(100)
            except ConnectionError:
                return b"closed"

    head = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\n"
    head += f"Authorization: Bearer {TOKEN}\r\n".encode()
    for end in (b"X: ", b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nX: "):
        answer = sent(head + end, *[b"a" * 2**20] * 20)
        assert answer == b"closed" or b" 431 " in answer
    # 16 bytes a chunk, and two requests on one connection.
    image = registered.images[0]
    chunks = [image[n : n + 16] for n in range(0, len(image), 16)]
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    whole = head + b"Transfer-Encoding: chunked\r\n\r\n" + body
    assert b" 200 " in sent(whole) and b" 200 " in sent(whole * 3)
    assert ask(running, "/predict", image).status == 200
