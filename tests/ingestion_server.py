"""The Logs Ingestion API as its documentation describes it, over HTTPS on loopback.

https://learn.microsoft.com/azure/azure-monitor/logs/logs-ingestion-api-overview

    POST /dataCollectionRules/RULE/streams/STREAM?api-version=2023-01-01
    Authorization: Bearer TOKEN, Content-Encoding: gzip, a JSON array of at most 1 MB

It answers 204, or an error with {"error": {"code", "message"}}. It refuses what the service would
take and lose: columns that the stream does not declare and values of another type. So the schema of
both sides is compared with each record that is sent.

`script` says what the next requests get: a status, a status with Retry-After, or a pause. It also
runs alone, for processes that are killed: python -m tests.ingestion_server FOLDER [STATUS]
"""

from __future__ import annotations

import gzip
import json
import re
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import trustme

RULE, TOKEN = "dcr-00000000000000000000000000000001", "a-token-of-the-tests-alone"
SCHEMA = Path(__file__).parents[1] / "infra/terraform/modules/monitoring/streams.json"
_PATH = re.compile(r"/dataCollectionRules/([^/]+)/streams/([^/]+)")
_KINDS: dict[str, Callable[[Any], bool]] = {
    "datetime": lambda v: isinstance(v, str) and datetime.fromisoformat(v).tzinfo is not None,
    "string": lambda v: isinstance(v, str) and len(v.encode()) <= 64 * 1024,
    "guid": lambda v: isinstance(v, str),
    "int": lambda v: type(v) is int and -(2**31) <= v < 2**31,
    "long": lambda v: type(v) is int and -(2**63) <= v < 2**63,
    "real": lambda v: type(v) in (int, float),
    "boolean": lambda v: type(v) is bool,
    "dynamic": lambda v: len(json.dumps(v)) <= 64 * 1024,
}


@dataclass(frozen=True)
class Answer:
    """What one request gets. takes: it is taken all the same, and the answer is lost."""

    status: int = 204
    retry_after: str | None = None
    pause_s: float = 0.0
    takes: bool = False
    hangs_up: bool = False
    cut: bool = False
    """The connection ends within the answer."""
    code: Any = None
    """In place of the error's own."""


@dataclass
class Service:
    """What has arrived, and what the next requests get."""

    script: list[Answer] = field(default_factory=list)
    always: Answer | None = None
    draw: Callable[[], Answer] | None = None
    """Makes the answer to each request."""
    records: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    asked: list[tuple[float, int]] = field(default_factory=list)
    """When each request came, and its answer."""
    wrong: list[str] = field(default_factory=list)
    """What no client of ours may send."""
    refuses: Callable[[dict[str, Any]], bool] = lambda record: False
    rule: str = RULE
    token: str = TOKEN
    most_bytes: int = 1_000_000
    file: Path | None = None
    turn: threading.Lock = field(default_factory=threading.Lock)
    schema: dict[str, Any] = field(default_factory=lambda: json.loads(SCHEMA.read_text()))

    def of(self, stream: str) -> list[dict[str, Any]]:
        """The records of a stream, each once: the newest of an id."""
        return list({r["RecordId"]: r for name, r in self.records if name == stream}.values())

    def ids(self, stream: str) -> Counter[str]:
        return Counter(r["RecordId"] for name, r in self.records if name == stream)

    def dropped(self) -> dict[tuple[str, str], int]:
        """How many records are said to be dropped, by stream and reason."""
        most: dict[tuple[str, str, str], int] = {}
        for record in self.of("RaypipeDropped_CL"):
            key = (record["Spool"], record["Stream"], record["Reason"])
            most[key] = max(most.get(key, 0), record["Records"])
        found: Counter[tuple[str, str]] = Counter()
        for (_, stream, reason), records in most.items():
            found[stream, reason] += records
        return dict(found)

    def take(self, stream: str, records: list[dict[str, Any]]) -> None:
        with self.turn:
            self.records += [(stream, record) for record in records]
            if self.file is not None:
                with self.file.open("a") as out:
                    out.writelines(json.dumps([stream, r]) + "\n" for r in records)

    def judge(self, stream: str, records: Any) -> tuple[int, str]:
        columns = {c["name"]: c["type"] for c in self.schema[stream]["columns"]}
        if not isinstance(records, list):
            return 400, "InvalidRequestContent"
        for record in records:
            if self.refuses(record):
                return 400, "InvalidRecord"
            for name, value in record.items():
                if name not in columns:
                    self.wrong.append(f"{stream} has no column {name}")
                elif value is not None and not _KINDS[columns[name]](value):
                    self.wrong.append(f"{stream}.{name} is no {columns[name]}: {value!r}"[:200])
        return 204, ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    service: Service

    def do_POST(self) -> None:
        service = self.service
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with service.turn:
            drawn = service.draw() if service.draw else service.always or Answer()
            answer = service.script.pop(0) if service.script else drawn
        time.sleep(answer.pause_s)
        if answer.hangs_up and not answer.takes:
            self.close_connection = True
            return
        status, code = answer.status, "Scripted"
        if status == 204 or answer.takes:
            found, code = self._look(body)
            status = found if status == 204 else status
        service.asked.append((time.monotonic(), status))
        if answer.hangs_up:
            self.close_connection = True
            return
        content = b"" if status == 204 else json.dumps(_error(answer.code or code)).encode()
        self.send_response(status)
        if answer.retry_after is not None:
            self.send_header("Retry-After", answer.retry_after)
        if content:
            self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content) + 100 * answer.cut))
        self.end_headers()
        self.close_connection = answer.cut
        self.wfile.write(content)

    def _look(self, body: bytes) -> tuple[int, str]:
        service, url = self.service, urlsplit(self.path)
        match = _PATH.fullmatch(url.path)
        if match is None or parse_qs(url.query).get("api-version") != ["2023-01-01"]:
            service.wrong.append(self.path)
            return 400, "InvalidRequest"
        if self.headers.get("Authorization") != f"Bearer {service.token}":
            return 401, "InvalidToken"
        if match[1] != service.rule:
            return 404, "NotFound"
        stream = match[2].removeprefix("Custom-")
        if stream not in service.schema:
            return 400, "InvalidStream"
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if len(body) > service.most_bytes:
            return 413, "ContentLengthLimitExceeded"

        def no(name: str) -> None:
            raise ValueError(name)

        try:
            records = json.loads(body, parse_constant=no)
        except ValueError:
            service.wrong.append("no JSON")
            return 400, "InvalidJson"
        status, code = service.judge(stream, records)
        if status == 204:
            service.take(stream, records)
        return status, code

    def log_message(self, *_: Any) -> None: ...


def _error(code: Any) -> dict[str, Any]:
    return {"error": {"code": code, "message": f"{code}, as the documentation says"}}


@dataclass(frozen=True)
class Running:
    """A service that listens. ca: the file with its authority, for REQUESTS_CA_BUNDLE."""

    service: Service
    endpoint: str
    ca: Path


@contextmanager
def running(folder: Path, service: Service | None = None, port: int = 0) -> Iterator[Running]:
    service = service or Service()
    authority = trustme.CA()
    ca = folder / "ca.pem"
    if not ca.exists():
        authority.cert_pem.write_to_path(ca)
        (folder / "ca.key").write_bytes(authority.private_key_pem.bytes())
    # A server that starts again has the same authority.
    authority = trustme.CA.from_pem(ca.read_bytes(), (folder / "ca.key").read_bytes())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    handler = type("Handler", (_Handler,), {"service": service})
    server = ThreadingHTTPServer(("127.0.0.1", port), handler, bind_and_activate=False)
    server.allow_reuse_address = True
    server.request_queue_size = 64
    server.server_bind()
    server.server_activate()
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield Running(service, f"https://127.0.0.1:{server.server_address[1]}", ca)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":
    where = Path(sys.argv[1])
    answer = Answer(int(sys.argv[2])) if len(sys.argv) > 2 else None
    with running(where, Service(file=where / "taken.jsonl", always=answer)) as made:
        print(made.endpoint, flush=True)
        sys.stdin.read()
