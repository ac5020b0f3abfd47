"""Events to a real HTTP server on loopback: signed, tried again, kept, never in the way."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from raypipe.config import RunConfig, validate
from raypipe.errors import ConfigError
from raypipe.watch import events, sinks
from raypipe.watch.events import Event
from raypipe.watch.settings import WatchConfig
from raypipe.watch.sinks import Sinks, webhook
from tests import forked

ROOT = Path(__file__).parents[2]
SECRET = "a-secret-of-the-webhook-0123"
PATH = "/services/T000/B000/pathlikeaslackpath"

pytestmark = pytest.mark.usefixtures("heard")


@dataclass
class Receiver:
    """A server that keeps what it gets, and answers `answers` first, then 200."""

    url: str = ""
    got: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    answers: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    act: Callable[[BaseHTTPRequestHandler], None] | None = None

    def ids(self) -> list[str]:
        return [headers["webhook-id"] for _, headers, _ in self.got]

    def kinds(self) -> list[str]:
        return [json.loads(body)["kind"] for _, _, body in self.got]


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    monkeypatch.setattr(webhook, "FIRST_PAUSE_S", 0.05)
    made = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *given: object) -> None:
            pass

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            made.got.append((self.path, headers, body))
            if made.act is not None:
                return made.act(self)
            status, more = made.answers.pop(0) if made.answers else (200, {})
            self.send_response(status)
            for name, value in more.items():
                self.send_header(name, value)
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    made.url = f"http://127.0.0.1:{server.server_address[1]}{PATH}"
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


def opened(folder: Path, url: str, **more: object) -> Sinks:
    settings = {"type": "webhook", "url": url, "secret_env": "HOOK_SECRET", "within_s": 3}
    cfg = validate(WatchConfig, {"sinks": [settings | more]})
    return sinks.opened(RunConfig(dir=str(folder)), cfg.sinks)


def check(number: int = 1) -> Event:
    return Event("check", f"run{number}", "poly drifts", {"is_drift": True, "p_value": 1e-5})


def notes(folder: Path) -> list[Path]:
    return sorted((folder / "sinks").rglob("*.json"))


def verified(headers: dict[str, str], body: bytes, secret: bytes, now: float) -> bool:
    """As a receiver does it, by the words of standardwebhooks.com alone."""
    if abs(now - int(headers["webhook-timestamp"])) > 300:
        return False
    text = headers["webhook-id"].encode() + b"." + headers["webhook-timestamp"].encode() + b"."
    mac = base64.b64encode(hmac.new(secret, text + body, hashlib.sha256).digest()).decode()
    return any(
        hmac.compare_digest(mac, one.removeprefix("v1,"))
        for one in headers["webhook-signature"].split()
    )


def test_an_event_is_signed_json(receiver: Receiver, tmp_path: Path) -> None:
    opened(tmp_path, receiver.url).send(check())
    [(path, headers, body)] = receiver.got
    assert path == PATH and headers["content-type"] == "application/json"
    assert verified(headers, body, SECRET.encode(), time.time())
    assert not verified(headers, body, SECRET.encode(), time.time() + 3600), "a replay"
    assert not verified(headers, body + b" ", SECRET.encode(), time.time())
    assert not verified(headers, body, b"another", time.time())
    # The receiver that the documentation shows.
    page = (ROOT / "docs" / "watching.md").read_text()
    shown: dict = {}
    _, first, rest = page.partition("import base64")
    exec(first + rest.partition("```")[0], shown)
    accepts = shown["is_from_raypipe"]
    assert accepts(headers, body, SECRET)
    assert not accepts(headers, body, "another") and not accepts(headers, b"{}", SECRET)
    told = json.loads(body)
    assert (told["kind"], told["run"], told["text"]) == ("check", "run1", "poly drifts")
    assert told["facts"] == {"is_drift": True, "p_value": 1e-5} and told["format"] == 1
    assert told["id"] == headers["webhook-id"] == check().id, "the same event, the same id"
    assert "authorization" not in headers and not notes(tmp_path)


def test_a_secret_that_looks_like_a_part_of_a_number_tears_no_event(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note was no JSON any more, and was dropped without a word."""
    monkeypatch.setenv("DB_PASSWORD", "12345678")
    one = Event("check", "run1", "by 12345678", {"p_value": 0.12345678, "named": ["12345678"]})
    opened(tmp_path, receiver.url).send(one)
    [(_, _, body)] = receiver.got
    told = json.loads(body)
    assert told["facts"] == {"p_value": 0.12345678, "named": ["***"]} and told["text"] == "by ***"
    assert told["id"] == one.id and not notes(tmp_path)


def test_ids_are_of_content_and_a_heartbeat_is_of_its_time() -> None:
    first, later = check(), Event("check", "run1", "otherwise said", check().facts, at="2001")
    assert first.id == later.id != check(2).id
    beats = [events.heartbeat("run1", "drift") for _ in range(2)]
    assert beats[0].id != beats[1].id, "two nights with the same rows are two signs of life"
    lost = events.missed("r", "2 checks since v3").as_json()
    assert json.loads(json.dumps(lost))["facts"] == {"missed": "2 checks since v3"}


def test_a_secret_as_the_standard_writes_it_and_one_in_a_file(
    receiver: Receiver, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    file.write_text("whsec_" + base64.b64encode(b"sixteen raw bytes").decode() + "\n")
    opened(tmp_path, receiver.url, secret_env=None, secret_file=str(file)).send(check())
    _, headers, body = receiver.got[0]
    assert verified(headers, body, b"sixteen raw bytes", time.time())


def test_what_is_tried_again(receiver: Receiver, tmp_path: Path, caplog: object) -> None:
    receiver.answers = [(500, {}), (500, {})]
    opened(tmp_path, receiver.url).send(check())
    assert len(receiver.got) == 3 and len(set(receiver.ids())) == 1
    assert not notes(tmp_path) and not caplog.records


def test_what_a_server_asks_to_wait(receiver: Receiver, tmp_path: Path) -> None:
    receiver.answers = [(429, {"Retry-After": "1"})]
    began = time.monotonic()
    opened(tmp_path, receiver.url).send(check())
    assert len(receiver.got) == 2 and time.monotonic() - began >= 1
    # Longer than there is time: it is kept, and nobody waits.
    receiver.answers = [(503, {"Retry-After": "9999999"})]
    began = time.monotonic()
    opened(tmp_path, receiver.url).send(check(2))
    assert time.monotonic() - began < 2 and len(notes(tmp_path)) == 1


def test_a_dead_webhook_is_one_warning_and_its_events_come_later(
    receiver: Receiver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.answers = [(401, {})]
    dead = opened(tmp_path, receiver.url)
    for number in range(3):
        dead.send(check(number))
    assert len(receiver.got) == 1, "one run asks a dead receiver once"
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "The webhook at 127.0.0.1: it answered 401" in caplog.text
    assert len(notes(tmp_path)) == 3
    # The next run delivers them first, in their order.
    opened(tmp_path, receiver.url).send(events.heartbeat("run9", "drift"))
    runs = [json.loads(body)["run"] for _, _, body in receiver.got[1:]]
    assert runs == ["run0", "run1", "run2", "run9"] and not notes(tmp_path)


@pytest.mark.parametrize("status", [400, 413, 422, 500])
def test_an_event_that_is_refused_for_ever_holds_up_no_other(
    receiver: Receiver, tmp_path: Path, status: int
) -> None:
    def act(handler: BaseHTTPRequestHandler) -> None:
        is_bad = json.loads(receiver.got[-1][2])["run"] == "run1"
        handler.send_response(status if is_bad else 200)
        handler.end_headers()

    receiver.act = act
    for night in range(1, 5):
        opened(tmp_path, receiver.url, within_s=0.2).send(check(night))
    waits = [json.loads(note.read_bytes())["run"] for note in notes(tmp_path)]
    came = {json.loads(body)["run"] for _, _, body in receiver.got}
    # One that the receiver fails on takes all the time of its night.
    assert "run1" in waits and len(waits) <= 2 and came >= {"run2", "run3"}
    receiver.act = None
    opened(tmp_path, receiver.url).send(check(5))
    assert not notes(tmp_path)


@pytest.mark.parametrize("bad", ["heartbeat", "check"])
@pytest.mark.parametrize(("status", "nights"), [(422, 12), (500, 4)])
def test_events_that_are_refused_delay_no_alarm(
    receiver: Receiver,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    status: int,
    nights: int,
    bad: str,
) -> None:
    """Three refused heartbeats a night went first, and an alarm came 17 nights late. After a 5xx
    all other events of a night came with the next one."""

    def act(handler: BaseHTTPRequestHandler) -> None:
        is_bad = json.loads(receiver.got[-1][2])["kind"] == bad
        handler.send_response(status if is_bad else 200)
        handler.end_headers()

    receiver.act = act
    for night in range(nights):
        receiver.got.clear()
        one_run = opened(tmp_path, receiver.url, within_s=0.5)
        one_run.send(check(night), events.heartbeat(f"run{night}", "drift"))
        came = [json.loads(body) for _, _, body in receiver.got]
        assert [one["run"] for one in came if one["kind"] != bad] == [f"run{night}"]
        assert status == 500 or len(came) == len(set(receiver.ids())), "each once a run"
    # Only after many runs in which other events were taken a refused one is dropped.
    waiting = min(nights, webhook.MOST_RUNS - 1)
    assert len(notes(tmp_path)) == waiting
    assert caplog.text.count("in 10 runs. This event is dropped") == nights - waiting


def test_an_outage_costs_a_run_the_time_of_a_few_events(receiver: Receiver, tmp_path: Path) -> None:
    receiver.answers = [(500, {})] * 100
    one_run = opened(tmp_path, receiver.url, within_s=0.5)
    for number in range(5):
        one_run.send(check(number))
    assert len(set(receiver.ids())) == webhook.MOST_REFUSED and len(notes(tmp_path)) == 5


def test_a_receiver_that_refuses_all_for_weeks_loses_none(
    receiver: Receiver, tmp_path: Path
) -> None:
    receiver.answers = [(422, {})] * 12
    for night in range(12):
        opened(tmp_path, receiver.url).send(check(night))
    assert len(receiver.got) == len(notes(tmp_path)) == 12
    opened(tmp_path, receiver.url).send(check(12))
    assert not notes(tmp_path)
    assert {json.loads(body)["run"] for _, _, body in receiver.got} == {
        f"run{n}" for n in range(13)
    }


def test_an_event_that_the_receiver_knows_is_delivered(
    receiver: Receiver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.answers = [(409, {})]
    opened(tmp_path, receiver.url).send(check())
    assert len(receiver.got) == 1 and not notes(tmp_path) and not caplog.records


def test_a_receiver_that_refuses_all_events_is_asked_a_few_times(
    receiver: Receiver, tmp_path: Path
) -> None:
    receiver.answers = [(401, {})] * 8
    for night in range(8):
        opened(tmp_path, receiver.url).send(check(night))
    receiver.got.clear()
    receiver.answers = [(422, {})] * 100
    one_run = opened(tmp_path, receiver.url)
    for night in range(8, 10):
        one_run.send(check(night))
    assert len(receiver.got) == webhook.MOST_REFUSED and len(notes(tmp_path)) == 10


@pytest.mark.parametrize("how", ["silent", "drips", "ends"])
def test_a_server_that_never_answers_costs_the_time_it_was_given(
    how: str, receiver: Receiver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop = threading.Event()

    def act(handler: BaseHTTPRequestHandler) -> None:
        if how == "ends":
            return handler.connection.close()
        while not stop.wait(0.1):
            if how == "drips":  # each byte begins the timeout of a socket anew
                handler.wfile.write(b"H")
                handler.wfile.flush()

    receiver.act = act
    began = time.monotonic()
    opened(tmp_path, receiver.url, within_s=1).send(check())
    assert time.monotonic() - began < 2.5
    stop.set()
    assert len(caplog.records) == 1 and "does not answer" in caplog.text
    assert len(notes(tmp_path)) == 1


def test_an_answer_without_an_end_is_an_answer(receiver: Receiver, tmp_path: Path) -> None:
    stop = threading.Event()

    def act(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not stop.wait(0.05):
            handler.wfile.write(b"x" * 1000)

    receiver.act = act
    opened(tmp_path, receiver.url).send(check())
    stop.set()
    assert len(receiver.got) == 1 and not notes(tmp_path)


def test_redirects(receiver: Receiver, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    receiver.answers = [(308, {"Location": "/moved"})]
    opened(tmp_path, receiver.url).send(check())
    assert [path for path, _, _ in receiver.got] == [PATH, "/moved"], "inside the same host"
    port = receiver.url.split(":")[2].partition("/")[0]
    # Another host, another port, another scheme; and 302, which would make a GET of it.
    elsewhere = [f"http://localhost:{port}/x", "http://127.0.0.1:1/x", f"https://127.0.0.1:{port}"]
    for number, location in enumerate(
        [*elsewhere, "//evil.example/x", "http://[", "http://127.0.0.1:x", "/moved"]
    ):
        receiver.got.clear()
        caplog.clear()
        receiver.answers = [(302 if location == "/moved" else 307, {"Location": location})]
        opened(tmp_path / str(number), receiver.url).send(check())
        assert len(receiver.got) == 1, location
        assert len(notes(tmp_path / str(number))) == 1 and len(caplog.records) == 1
        assert "evil" not in caplog.text and "The webhook at 127.0.0.1" in caplog.text
    receiver.answers = [(307, {"Location": "/again"})] * 9
    opened(tmp_path / "loop", receiver.url).send(check())
    assert len(notes(tmp_path / "loop")) == 1


def test_no_secret_is_said(
    receiver: Receiver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    password = "pass-w0rd-of-the-address"
    url = receiver.url.replace("://", f"://me:{password}@")
    with pytest.raises(ConfigError, match=r"holds a credential.*\*\*\*") as refused:
        opened(tmp_path, url)
    assert password not in str(refused.value)
    # From the environment it may come. A password of another file is not sent.
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password of-netrc\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOOK", url)
    with caplog.at_level(logging.DEBUG):
        for answer in (500, 404, 302):
            receiver.answers = [(answer, {"Location": url})] * 20
            within = {"within_s": 0.3}
            opened(tmp_path / str(answer), "env:HOOK", **within).send(
                Event("check", "r", f"said {password} and {SECRET}")
            )
        monkeypatch.setenv("HOOK", url.replace("127.0.0.1", "nowhere.invalid"))
        opened(tmp_path / "gone", "env:HOOK", within_s=0.3).send(check())
    written = "".join(p.read_text() for p in tmp_path.rglob("*") if p.is_file())
    said = "\n".join(r.getMessage() for r in caplog.records if r.name == "raypipe")
    assert said and receiver.got
    for text in (written, said, *(b.decode() for _, _, b in receiver.got)):
        assert password not in text and SECRET not in text and "pathlikeaslackpath" not in text
    basic = base64.b64encode(f"me:{password}".encode()).decode()
    assert {headers["authorization"] for _, headers, _ in receiver.got} == {f"Basic {basic}"}
    opened(tmp_path, receiver.url).send(check())
    assert "authorization" not in receiver.got[-1][1]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"secret_env": None}, "either a secret_env or a secret_file"),
        ({"secret_file": "x"}, "either a secret_env or a secret_file"),
        ({"secret_env": "NOT_SET"}, "variable NOT_SET is not set"),
        ({"secret_env": "SHORT"}, "secret of a webhook is too short .got '4 characters in SHORT'"),
        ({"secret_env": None, "secret_file": "/none/there"}, "cannot be read.*FileNotFoundError"),
        ({"url": "ftp://host/x"}, "webhook has no usable address"),
        ({"url": "https:///x"}, "webhook has no usable address"),
        ({"url": "https://host:port/x"}, "webhook has no usable address"),
        ({"url": "env:NOT_SET"}, "variable NOT_SET is not set"),
        ({"within_s": 0}, "within_s"),
        ({"type": "telegram"}, "sinks"),
    ],
)
def test_settings_that_are_wrong_end_the_run_before_its_work(
    given: dict[str, object], says: str, receiver: Receiver, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("SHORT", "abcd")
    with pytest.raises(ConfigError, match=says):
        opened(tmp_path, **({"url": receiver.url} | given))


def test_a_sink_that_raises_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    got = []

    class Broken:
        def send(self, event: Event) -> None:
            raise RuntimeError("https://host/secret")

    class Kept:
        def send(self, event: Event) -> None:
            got.append(event)

    both = Sinks([Broken(), Kept()])
    both.send(check(1), check(2))
    assert len(got) == 2 and len(caplog.records) == 1
    assert "RuntimeError" in caplog.text and "secret" not in caplog.text


def test_notes_that_cannot_be_kept_or_read(
    receiver: Receiver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "sinks").write_text("a file where the folder should be")
    opened(tmp_path / "full", receiver.url).send(check())
    assert len(caplog.records) == 1 and "cannot be kept" in caplog.text
    receiver.answers = [(404, {})]
    opened(tmp_path, receiver.url).send(check())
    notes(tmp_path)[0].write_text("{torn")
    opened(tmp_path, receiver.url).send(check(2))
    assert receiver.kinds() == ["check"] * 3 and not notes(tmp_path)


def of_root(command: str, folder: Path, url: str, name: str = "x") -> subprocess.CompletedProcess:
    """A run whose folder is a file system of its own; `command` makes it full or read-only."""
    code = (
        "import sys; from tests.watch.test_sinks import *\n"
        "logging.basicConfig(format='%(message)s')\n"
        "tell = opened(Path(sys.argv[1]), sys.argv[2], within_s=3)\n"
        "for n in range(3): tell.send(check(f'{sys.argv[3]}-{n}'))\n"
    )
    run = [sys.executable, "-c", code, str(folder), url, name]
    inside = f'mount -t tmpfs -o size=16k none {folder} && {command} && exec "$@"'
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", inside, "sh", *run],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


NO_MOUNTS = subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0


@pytest.mark.skipif(NO_MOUNTS, reason="a mount namespace needs root")
@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("head -c 1m /dev/zero > FOLDER/fill 2>/dev/null; true", "No space left on device"),
        ("mount -o remount,ro FOLDER", "Read-only file system"),
    ],
)
def test_events_of_a_full_or_read_only_folder_are_sent_at_once(
    command: str, reason: str, receiver: Receiver, tmp_path: Path
) -> None:
    command = command.replace("FOLDER", str(tmp_path))
    done = of_root(command, tmp_path, receiver.url)
    assert done.returncode == 0, done.stderr
    assert [json.loads(body)["run"] for _, _, body in receiver.got] == [
        f"runx-{n}" for n in (0, 1, 2)
    ]
    [line] = done.stderr.splitlines()
    assert reason in line and "sent all the same" in line and str(tmp_path) in line
    # And where nobody listens, no one is told that an event waits.
    receiver.answers = [(404, {})] * 3
    lost = of_root(command, tmp_path, receiver.url)
    assert lost.returncode == 0 and len(receiver.got) == 4, "a dead receiver is asked once"
    [line] = lost.stderr.splitlines()
    assert reason in line and "this event is lost" in line and "wait in" not in line


def test_a_process_that_is_killed_while_it_delivers_holds_up_no_other(
    receiver: Receiver, tmp_path: Path
) -> None:
    """What it had begun to send comes a second time, under the same id."""
    hangs = threading.Event()

    def act(handler: BaseHTTPRequestHandler) -> None:
        if len(receiver.got) == 3:
            hangs.set()
            time.sleep(5)
            return
        handler.send_response(200)
        handler.end_headers()

    receiver.act = act
    code = (
        "import sys; from tests.watch.test_sinks import *\n"
        "tell = opened(Path(sys.argv[1]), sys.argv[2], within_s=20)\n"
        "for n in range(int(sys.argv[4])): tell.send(check(f'{sys.argv[3]}-{n}'))\n"
    )
    first = forked.start(code, tmp_path, receiver.url, "a", 9)
    assert hangs.wait(30)
    other = forked.start(code, tmp_path, receiver.url, "b", 3)
    time.sleep(0.5)  # it waits for the lock by now, or comes later: both are well
    first.kill()
    assert first.wait(10) < 0 and other.wait(60) == 0
    runs = [json.loads(body)["run"] for _, _, body in receiver.got]
    assert runs.count("runa-2") == 2 and {f"runb-{n}" for n in range(3)} <= set(runs)
    assert {f"runa-{n}" for n in range(3)} <= set(runs) and not notes(tmp_path)
    assert len(set(receiver.ids())) == len(set(runs)), "one id an event"
    assert not list((tmp_path / "sinks").rglob("*.partial"))


def test_no_more_notes_than_the_bound(
    receiver: Receiver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(webhook, "MOST_NOTES", 3)
    receiver.answers = [(404, {})] * 9
    for number in range(5):
        opened(tmp_path, receiver.url).send(check(number))
    assert [json.loads(n.read_text())["run"] for n in notes(tmp_path)] == ["run2", "run3", "run4"]
    assert "oldest was dropped" in caplog.text


def test_above_the_bound_a_refused_event_goes_before_one_that_waits(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "MOST_NOTES", 3)
    receiver.answers = [(422, {})] + [(401, {})] * 9
    for number in range(4):
        opened(tmp_path, receiver.url).send(check(number))
    waiting = [json.loads(note.read_text())["run"] for note in notes(tmp_path)]
    assert waiting == ["run1", "run2", "run3"]


def test_two_processes_at_once_deliver_all(receiver: Receiver, tmp_path: Path) -> None:
    def act(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(0.03)  # so that the other process sees the same notes
        handler.send_response(200)
        handler.end_headers()

    receiver.act = act
    code = (
        "import sys; from tests.watch.test_sinks import *\n"
        "folder, url, name = Path(sys.argv[1]), *sys.argv[2:]\n"
        "tell = opened(folder, url, within_s=20)\n"
        "(folder / name).touch()\n"
        "while not (folder / 'a').exists() or not (folder / 'b').exists(): time.sleep(0.001)\n"
        "for n in range(10): tell.send(check(f'{name}-{n}'))\n"
    )
    both = [forked.start(code, tmp_path, receiver.url, name) for name in "ab"]
    assert [process.wait(60) for process in both] == [0, 0]
    runs = [json.loads(body)["run"] for _, _, body in receiver.got]
    assert set(runs) == {f"run{name}-{n}" for name in "ab" for n in range(10)}
    assert len(runs) == 20, "none twice"
    assert not notes(tmp_path)


def test_the_log_has_a_line_of_each_event(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, receiver: Receiver
) -> None:
    opened(tmp_path, receiver.url)  # so that the secret is known
    cfg = validate(WatchConfig, {"sinks": [{"type": "log"}]})
    with caplog.at_level(logging.INFO, "raypipe"):
        sinks.opened(RunConfig(dir=str(tmp_path)), cfg.sinks).send(
            Event("retrain", "run1", "%s", {"key": SECRET, "loss": float("nan")})
        )
    assert caplog.messages == ['retrain run1: %s {"key": "***", "loss": null}']
    assert not list(tmp_path.iterdir())
