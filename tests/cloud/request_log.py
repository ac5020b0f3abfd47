"""Passes HTTP requests on to a server and writes one JSON line for each: `python request_log.py
HOST PORT FILE DELAY_S`.

What a store was asked for is what a run costs there, whichever of its processes asked. A line has
the method, the path, and what came back: status, first byte, last byte and size of the object
(null where the answer names none). DELAY_S is slept before each answer: the way to a real store.

A process of its own: deltalake asks with the GIL held, and a server in the same process would never
answer.
"""

from __future__ import annotations

import http.client
import json
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HOST, PORT, LOG, DELAY_S = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4])
RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
# Headers of one connection, not of the message.
HOP = {"connection", "keep-alive", "transfer-encoding", "date", "server"}
lock = threading.Lock()
behind = threading.local()  # a connection of each thread to the server


class Relay(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open, as a store's do
    disable_nagle_algorithm = True

    def relay(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        time.sleep(DELAY_S)
        answer, content = self.ask(body)
        self.note(answer, len(content))
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in HOP | {"content-length"}:
                self.send_header(name, value)
        # The answer to HEAD names the size of what it does not send.
        own = answer.getheader("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", own or str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def ask(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        """The server's answer. It may have closed an idle connection: then once more."""
        headers = {n: v for n, v in self.headers.items() if n.lower() not in HOP}
        for last in (False, True):
            connection = behind.__dict__.setdefault(
                "connection", http.client.HTTPConnection(HOST, PORT)
            )
            try:
                connection.request(self.command, self.path, body, headers)
                answer = connection.getresponse()
                return answer, answer.read()
            except (OSError, http.client.HTTPException):
                connection.close()
                if last:
                    raise
        raise AssertionError("unreachable")

    def note(self, answer: http.client.HTTPResponse, size: int) -> None:
        part = RANGE.fullmatch(answer.getheader("Content-Range") or "")
        first, last, whole = map(int, part.groups()) if part else (0, size - 1, size)
        line = {
            "method": self.command,
            "path": self.path,
            "status": answer.status,
            "first": first,
            "last": last,
            "size": whole,
        }
        with lock, LOG.open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = relay

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the log is ours."""


if __name__ == "__main__":
    LOG.touch()
    with ThreadingHTTPServer(("127.0.0.1", 0), Relay) as server:
        server.daemon_threads = True
        print(f"Relaying on http://127.0.0.1:{server.server_address[1]}", flush=True)
        server.serve_forever()
