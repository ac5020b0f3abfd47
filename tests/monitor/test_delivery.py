"""Records arrive at a service that speaks the documented protocol, through Azure's own client."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from raypipe.config import RunConfig, validate
from raypipe.errors import ConfigError
from raypipe.monitor import recorder, sender, streams
from raypipe.monitor.ingestion import retry_after_s
from raypipe.monitor.monitor import Monitor
from raypipe.monitor.settings import AzureMonitorConfig
from raypipe.monitor.spool import Spool
from tests.ingestion_server import RULE, TOKEN, Answer, Running, running

SERVING = streams.SERVING
ON_ITS_WAY = 256  # records of a kilobyte in one request, where spool_mb is 1


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYPIPE_TEST_TOKEN", TOKEN)
    monkeypatch.setattr(sender, "FIRST_PAUSE_S", 0.05)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    with running(tmp_path) as made:
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(made.ca))
        yield made
        assert not made.service.wrong


@dataclass
class Case:
    """A run's folder and its sink."""

    folder: Path
    endpoint: str

    def cfg(self, **more: Any) -> AzureMonitorConfig:
        given = {"type": "azure_monitor", "endpoint": self.endpoint, "rule": RULE}
        given |= {"token_env": "RAYPIPE_TEST_TOKEN", "every_s": 0.05, "within_s": 5}
        return validate(AzureMonitorConfig, given | more)

    @property
    def run(self) -> RunConfig:
        return RunConfig(name="solar", dir=str(self.folder / "run"))

    def spool(self) -> Path:
        return self.cfg().folder(self.run) / "1"

    def waiting(self) -> list[str]:
        return sorted(p.name for p in self.spool().glob("*-*-*.*"))

    @contextmanager
    def opened(self, **more: Any) -> Iterator[Monitor]:
        monitor = Monitor(self.run, self.cfg(**more), "serve")
        try:
            yield monitor
        finally:
            monitor.close()


@pytest.fixture
def case(tmp_path: Path, server: Running) -> Case:
    return Case(tmp_path, server.endpoint)


def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def note(monitor: Monitor, number: int, **more: Any) -> None:
    monitor.note(SERVING, {"RecordId": f"r{number}", "Requests": number, **more})


def test_records_arrive_whole_and_in_order(case: Case, server: Running) -> None:
    with case.opened() as monitor:
        for number in range(50):
            note(monitor, number, Model="ü/1", LatencyMeanMs=float("nan"))
        monitor.note(streams.DRIFT, {"Kind": "check", "Drifted": True, "Facts": {"a": [1, None]}})
    taken = server.service.of(SERVING)
    assert [r["Requests"] for r in taken] == list(range(50))
    assert taken[0].keys() >= set(streams.COMMON) and taken[0]["LatencyMeanMs"] is None
    assert [r["Sequence"] for r in taken] == list(range(1, 51))
    assert server.service.of(streams.DRIFT)[0]["RunName"] == "solar"
    # One request may hold many records.
    assert len(server.service.asked) < 20 and not case.waiting()


@pytest.mark.parametrize(
    "script",
    [
        [Answer(429, "1")],
        [Answer(503, "1")],
        [Answer(500), Answer(502), Answer(504)],
        [Answer(hangs_up=True), Answer(takes=True, hangs_up=True), Answer(500, takes=True)],
        [Answer(204, pause_s=0.5), Answer(408)],
        [Answer(503, cut=True), Answer(500, cut=True, takes=True)],
        [Answer(503, code={"a": 1})],
    ],
)
def test_a_service_in_trouble_gets_every_record(
    case: Case, server: Running, script: list[Answer]
) -> None:
    server.service.script = list(script)
    with case.opened() as monitor:
        for number in range(20):
            note(monitor, number)
    assert {r["Requests"] for r in server.service.of(SERVING)} == set(range(20))
    assert not case.waiting() and not server.service.dropped()
    statuses = [status for _, status in server.service.asked]
    if script[0].retry_after:
        assert statuses[0] == script[0].status
        assert server.service.asked[1][0] - server.service.asked[0][0] >= 1.0


def test_the_end_does_not_wait_for_a_long_retry_after(case: Case, server: Running) -> None:
    server.service.always = Answer(429, "300")
    began = time.monotonic()
    with case.opened(within_s=5) as monitor:
        note(monitor, 1)
    assert time.monotonic() - began < 3 and len(server.service.asked) == 1
    server.service.always = None
    with case.opened():
        pass
    assert [r["RecordId"] for r in server.service.of(SERVING)] == ["r1"]


@pytest.mark.parametrize("pause_s", [1.5])
def test_the_end_does_not_wait_for_a_slow_service(
    case: Case, server: Running, pause_s: float
) -> None:
    server.service.always = Answer(pause_s=pause_s, takes=True)
    with case.opened(within_s=0.3) as monitor:
        began = time.monotonic()
        note(monitor, 1)
        # A training goes on meanwhile.
        assert time.monotonic() - began < 0.2
        began = time.monotonic()
    assert time.monotonic() - began < 1.4
    server.service.always = None
    # The thread of the first is still waiting for its answer, and has the turn.
    with case.opened():
        pass
    assert server.service.ids(SERVING)["r1"] >= 1 and not case.waiting()


def test_a_service_that_was_down_gets_it_from_the_next_run(tmp_path: Path, caplog: Any) -> None:
    with running(tmp_path) as made:
        endpoint, ca = made.endpoint, made.ca
    os.environ["REQUESTS_CA_BUNDLE"] = str(ca)
    case = Case(tmp_path, endpoint)
    try:
        with case.opened(within_s=0.5) as monitor:
            for number in range(5):
                note(monitor, number)
        assert len(case.waiting()) >= 1
        assert sum("wait in" in r.message for r in caplog.records) == 1
        with running(tmp_path, port=int(endpoint.rpartition(":")[2])) as made:
            with case.opened():
                pass
            assert len(made.service.of(SERVING)) == 5
        assert not case.waiting()
    finally:
        del os.environ["REQUESTS_CA_BUNDLE"]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"token": "another"}, "401: the token is expired"),
        ({"rule": "dcr-another"}, "404, NotFound: there is no rule"),
        ({"always": Answer(403)}, "Monitoring Metrics Publisher"),
        ({"schema": {}}, "the rule has no stream Custom-RaypipeServing_CL"),
        ({"refuses": lambda record: True}, "400, InvalidRecord for all records"),
    ],
)
def test_what_somebody_must_change_is_named_once_and_nothing_is_lost(
    case: Case, server: Running, caplog: Any, broken: dict[str, Any], said: str
) -> None:
    right = {name: getattr(server.service, name) for name in broken}
    for name, value in broken.items():
        setattr(server.service, name, value)
    with case.opened() as monitor:
        for number in range(10):
            note(monitor, number)
            time.sleep(0.02)
    assert sum(said in r.getMessage() for r in caplog.records) == 1, caplog.text
    assert TOKEN not in caplog.text and not server.service.of(SERVING)
    # It is asked again after minutes, not all the time.
    assert len(server.service.asked) < 40
    for name, value in right.items():
        setattr(server.service, name, value)
    with case.opened():
        pass
    assert len(server.service.of(SERVING)) == 10 and not case.waiting()


def test_no_token_is_named_and_a_newer_one_delivers(
    case: Case, server: Running, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAYPIPE_TEST_TOKEN")
    with case.opened() as monitor:
        note(monitor, 1)
    assert "RAYPIPE_TEST_TOKEN is not set" in caplog.text
    monkeypatch.setenv("RAYPIPE_TEST_TOKEN", TOKEN)
    with case.opened():
        pass
    assert len(server.service.of(SERVING)) == 1


def test_without_a_login_the_credentials_are_one_warning(
    case: Case, server: Running, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The real DefaultAzureCredential; on a machine without an account it finds nothing.
    monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "EnvironmentCredential")
    with case.opened(token_env=None) as monitor:
        note(monitor, 1)
    warned = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warned) == 1 and "there is no token" in warned[0]
    assert case.waiting() and not server.service.asked


def test_one_record_that_is_refused_holds_up_no_other(
    case: Case, server: Running, caplog: Any
) -> None:
    server.service.refuses = lambda record: record.get("Requests") in (0, 1, 2, 3, 17)
    with case.opened(every_s=60) as monitor:
        # The first delivery is over.
        time.sleep(0.1)
        for number in range(40):
            note(monitor, number)
    assert len(server.service.of(SERVING)) == 35 and not case.waiting()
    assert server.service.dropped() == {(SERVING, "refused"): 5}
    assert "5 records, which are dropped and counted" in caplog.text


def test_a_refused_record_in_a_segment_of_its_own_holds_up_no_other(
    case: Case, server: Running, caplog: Any
) -> None:
    """As those that an older version left, of a type that the rule does not take any more."""
    server.service.refuses = lambda record: record.get("Requests", 9) < 6
    for number in range(6):
        with case.opened(within_s=0.5) as monitor:
            note(monitor, number)
    assert len(case.waiting()) == 6 and not server.service.dropped()
    assert "for all records of RaypipeServing_CL" in caplog.text
    server.service.asked.clear()
    with case.opened() as monitor:
        note(monitor, 6)
        note(monitor, 7)
    assert {r["Requests"] for r in server.service.of(SERVING)} == {6, 7}
    assert server.service.dropped() == {(SERVING, "refused"): 6} and not case.waiting()


def test_413_is_sent_in_halves(case: Case, server: Running) -> None:
    server.service.most_bytes = 5000
    with case.opened() as monitor:
        for number in range(60):
            note(monitor, number)
    assert len(server.service.of(SERVING)) == 60 and not server.service.dropped()


def test_a_record_over_a_megabyte_is_cut_or_counted(
    case: Case, server: Running, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with case.opened() as monitor:
        monitor.note(streams.DRIFT, {"Text": "x" * 2_000_000, "Facts": {"y": "z" * 2_000_000}})
        monkeypatch.setattr(streams, "MOST_OF_RECORD", 2000)
        note(monitor, 1, Model="m" * 3000)
    assert server.service.of(streams.DRIFT)[0]["Facts"] == {"cut_bytes": 2_000_008}
    assert server.service.dropped() == {(SERVING, "too_big"): 1}
    assert "dropped and counted" in caplog.text


def test_megabytes_are_cut_into_requests_that_are_small_enough(case: Case, server: Running) -> None:
    with case.opened(every_s=60) as monitor:
        time.sleep(0.1)
        for number in range(100):
            note(monitor, number, Model="ü" * 20_000)
    # most_bytes of the service is 1 MB: a larger request would have been refused.
    assert len(server.service.of(SERVING)) == 100
    assert all(status == 204 for _, status in server.service.asked)


def test_a_full_spool_drops_the_oldest_and_counts_them_exactly(
    case: Case, server: Running, caplog: Any
) -> None:
    server.service.always = Answer(503)
    most = 0
    with case.opened(spool_mb=1, within_s=0.3) as monitor:
        for number in range(4000):
            note(monitor, number, Model="m" * 1000)
            if number % 50 == 0:
                most = max(most, disk(case.spool()))
        most = max(most, disk(case.spool()))
    assert most <= 2**20
    assert most > 0.6 * 2**20, "it drops before it has to"
    server.service.always = None
    with case.opened():
        pass
    arrived = {r["Requests"] for r in server.service.of(SERVING)}
    dropped = server.service.dropped()[SERVING, "full"]
    assert dropped + len(arrived) == 4000 and len(arrived) > 500
    # The oldest go, but for a request that is on its way: it may have arrived.
    assert len(set(range(dropped, 4000)) - arrived) <= ON_ITS_WAY
    assert sum("records were dropped" in r.getMessage() for r in caplog.records) == 1
    # Told once, and not again by the next run.
    told = server.service.ids(streams.DROPPED)
    with case.opened():
        pass
    assert server.service.ids(streams.DROPPED) == told


def test_what_may_have_arrived_is_not_counted_as_dropped(case: Case, server: Running) -> None:
    """The answer to a request that was taken is lost; the next is refused; the spool overflows."""
    server.service.script = [Answer(takes=True, hangs_up=True)]
    server.service.always = Answer(503)
    with case.opened(spool_mb=1, within_s=0.2) as monitor:
        for number in range(5):
            note(monitor, number)
        until(lambda: len(server.service.asked) >= 3)
        for number in range(5, 1500):
            note(monitor, number, Model="m" * 1000)
    server.service.always = None
    with case.opened():
        pass
    arrived = len(server.service.of(SERVING))
    dropped = server.service.dropped()[SERVING, "full"]
    assert arrived + dropped == 1500 and server.service.ids(SERVING)["r0"] == 2


def disk(folder: Path) -> int:
    """Bytes of all files in a folder, in whole blocks.

    Not `st_blocks`: a fragmented file has blocks of the file system's own, which nobody can plan.
    """
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += -(-path.stat().st_size // 4096) * 4096
    return total


def test_a_spool_that_is_read_only_costs_one_warning_and_no_record(
    case: Case, server: Running, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write anywhere: a file where the folder should be stops it as well.
    case.cfg().folder(case.run).parent.mkdir(parents=True)
    case.cfg().folder(case.run).write_text("in the way")
    with case.opened() as monitor:
        for number in range(10):
            note(monitor, number)
    assert {r["Requests"] for r in server.service.of(SERVING)} == set(range(10))
    said = [r.getMessage() for r in caplog.records]
    assert sum("the spool cannot be" in text for text in said) <= 2
    # The service is down as well: what is lost is counted in the log.
    server.service.always = Answer(503)
    monkeypatch.setattr(recorder, "MOST_IN_MEMORY", 5000)
    with case.opened(within_s=0.3) as monitor:
        for number in range(100):
            note(monitor, number)
    assert "were not delivered and are lost" in caplog.text


def test_memory_that_overflows_is_counted(
    case: Case, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.cfg().folder(case.run).parent.mkdir(parents=True)
    case.cfg().folder(case.run).write_text("in the way")
    monkeypatch.setattr(recorder, "MOST_IN_MEMORY", 5000)
    server.service.script = [Answer(503)]
    with case.opened(every_s=60) as monitor:
        time.sleep(0.1)
        for number in range(100):
            note(monitor, number)
    arrived = len(server.service.of(SERVING))
    assert 0 < arrived < 100
    assert server.service.dropped() == {(SERVING, "full"): 100 - arrived}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk(case: Case, server: Running, tmp_path: Path) -> None:
    full = Path("/dev/full")
    assert full.exists()
    # A segment on a full disk: its write fails, and leaves no half line.
    monitor = Monitor(case.run, case.cfg(every_s=60), "serve")
    time.sleep(0.1)
    note(monitor, 1)
    spool: Spool = monitor._recorder.spool
    own = spool._open[SERVING]
    real, own._fd = own._fd, os.open(full, os.O_WRONLY)
    note(monitor, 2)
    os.close(real)
    note(monitor, 3)
    monitor.close()
    assert {r["Requests"] for r in server.service.of(SERVING)} == {1, 2, 3}


def test_the_clock_goes_back(case: Case, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    server.service.always = Answer(503)
    real = time.time_ns
    with case.opened(within_s=0.2, spool_mb=1) as monitor:
        for number in range(3000):
            if number == 1500:
                monkeypatch.setattr(time, "time_ns", lambda: real() - 10**15)
            note(monitor, number, Model="m" * 1000)
    server.service.always = None
    with case.opened():
        pass
    arrived = [r["Requests"] for r in server.service.of(SERVING)]
    # The oldest were dropped, not those with the smallest time.
    assert len(set(range(3000 - len(arrived), 3000)) - set(arrived)) <= ON_ITS_WAY
    sequence = [r["Sequence"] for r in server.service.of(SERVING)]
    assert sequence == sorted(sequence)


def test_a_spool_of_another_version_is_delivered_as_it_is(case: Case, server: Running) -> None:
    folder = case.spool()
    folder.mkdir(parents=True)
    old = {"TimeGenerated": "2025-01-01T00:00:00Z", "RecordId": "old", "RunId": "r"}
    lines = [json.dumps(old), "\x00\x00", "[1]", json.dumps(old | {"RecordId": "new"}), '{"torn": ']
    (folder / f"{1:020d}-{'a' * 12}-{SERVING}.ready").write_text("\n".join(lines))
    (folder / f"{2:020d}-{'b' * 12}-{SERVING}.open").write_text(json.dumps(old | {"RunId": "x"}))
    (folder / "dropped.json").write_text("{ torn")
    (folder / "what.is.this").write_text("")
    with case.opened():
        pass
    assert {r["RecordId"] for r in server.service.of(SERVING)} == {"old", "new"}
    assert server.service.dropped() == {(SERVING, "unreadable"): 2}
    assert not case.waiting()


@pytest.mark.parametrize(
    ("value", "seconds"), [("7", 7), ("0.5", 0.5), ("-3", 0), ("soon", 0), ("", 0), ("9e9", 3600)]
)
def test_retry_after(value: str, seconds: float) -> None:
    assert retry_after_s({"Retry-After": value}) == seconds
    assert retry_after_s({"retry-after-ms": "1500"}) == 1.5
    at = datetime.now(timezone.utc) + timedelta(seconds=60)
    assert 55 < retry_after_s({"Retry-After": format_datetime(at)}) <= 60


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"endpoint": "http://host"}, "https://HOST"),
        ({"rule": "/subscriptions/x"}, "immutable id"),
        ({"spool": "abfss://a@b/c"}, "folder of this machine"),
        ({"spool_mb": 0.1}, "greater than or equal"),
        ({"streams": {"drift": "Drift"}}, "Custom-NAME"),
    ],
)
def test_settings_are_checked(tmp_path: Path, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Case(tmp_path, "https://host").cfg(**wrong)


def test_a_missing_package_is_one_clear_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "azure.monitor.ingestion", None)
    case = Case(tmp_path, "https://host")
    with pytest.raises(ConfigError, match=r"pip install 'raypipe\[azure\]'"):
        Monitor(case.run, case.cfg(), "train")


def test_a_mistake_of_ours_does_not_fail_the_run(case: Case, server: Running, caplog: Any) -> None:
    with case.opened() as monitor:
        monitor.note(SERVING, {"NoSuchColumn": 1})
        monitor.note(SERVING, {"NoSuchColumn": 1})
        note(monitor, 1)
    assert sum("no column 'NoSuchColumn'" in r.getMessage() for r in caplog.records) == 1
    assert len(server.service.of(SERVING)) == 1


def test_a_service_without_answers_at_all(case: Case, server: Running) -> None:
    # The address answers, and speaks no HTTPS that we trust.
    os.environ.pop("REQUESTS_CA_BUNDLE")
    with case.opened(within_s=0.5) as monitor:
        note(monitor, 1)
    assert case.waiting() and not server.service.asked


def test_records_after_the_spool_was_deleted_arrive(case: Case, server: Running) -> None:
    with case.opened(every_s=60) as monitor:
        time.sleep(0.2)
        note(monitor, 1)
        # `rm -r` by somebody who wants the disk back.
        shutil.rmtree(case.spool())
        note(monitor, 2)
        note(monitor, 3)
    assert {r["Requests"] for r in server.service.of(SERVING)} >= {2, 3}


def test_a_fork_has_ids_of_its_own(case: Case, server: Running) -> None:
    with case.opened(every_s=60) as monitor:
        monitor.note(SERVING, {"Requests": 1})
        pid = os.fork()
        if pid == 0:
            monitor.note(SERVING, {"Requests": 2})
            os._exit(0)
        os.waitpid(pid, 0)
        monitor.note(SERVING, {"Requests": 3})
    # Each once: two of one id would be one.
    assert sorted(r["Requests"] for r in server.service.of(SERVING)) == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("endpoint", "http://host"),
        ("endpoint", "https://host/dataCollectionRules/dcr-1/streams/Custom-X"),
        ("endpoint", "https://host:abc"),
        ("endpoint", "https://ho st"),
        ("endpoint", " https://host"),
        ("endpoint", "https://host\n"),
        ("token_env", ""),
        ("token_env", "A=B"),
        ("token_env", "eyJhbGciOi.the.token"),
    ],
)
def test_settings_that_could_not_work_are_refused_first(name: str, value: str) -> None:
    given = {"type": "azure_monitor", "endpoint": "https://host", "rule": RULE, name: value}
    with pytest.raises(ConfigError, match=name) as raised:
        validate(AzureMonitorConfig, given)
    # Somebody has put the token where its variable's name belongs.
    assert "eyJ" not in str(raised.value)


@pytest.mark.parametrize("host", ["https://host", "https://[::1]:8443", "https://10.0.0.1:443/"])
def test_addresses_that_are_taken(host: str) -> None:
    given = {"type": "azure_monitor", "endpoint": host, "rule": RULE}
    assert validate(AzureMonitorConfig, given).endpoint == host.rstrip("/")


@pytest.mark.parametrize("value", ["\u00b2", "-1", "1e9", "", "1" * 50])
def test_odd_pauses_are_none(value: str) -> None:
    assert retry_after_s({"retry-after-ms": value}) == 0.0
    assert retry_after_s({"retry-after-ms": "999999999"}) == 3600.0
