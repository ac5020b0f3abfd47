"""Passes connections on to a server and writes how many bytes came back: `python relay.py HOST PORT
COUNT_FILE`.

A process of its own: deltalake 1.6 asks for a file's size with the GIL held, and a relay in the
same process never answers.
"""

from __future__ import annotations

import socket
import socketserver
import sys
import threading
from contextlib import suppress
from pathlib import Path

HOST, PORT, COUNT = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
lock, moved_bytes = threading.Lock(), 0


def count(data: bytes) -> None:
    global moved_bytes
    with lock:
        moved_bytes += len(data)
        COUNT.write_text(str(moved_bytes))


def forward(source: socket.socket, sink: socket.socket, counted: bool) -> None:
    with suppress(OSError):
        while data := source.recv(65_536):
            if counted:
                count(data)
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


class Relay(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with socket.create_connection((HOST, PORT)) as behind:
            threading.Thread(
                target=forward, args=(self.request, behind, False), daemon=True
            ).start()
            forward(behind, self.request, True)


if __name__ == "__main__":
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Relay) as server:
        server.daemon_threads = True
        print(f"Relaying on http://127.0.0.1:{server.server_address[1]}", flush=True)
        server.serve_forever()
