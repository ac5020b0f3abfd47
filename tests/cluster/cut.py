"""A TCP proxy on loopback whose connections can be cut, and which then refuses new ones."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Proxy:
    """Passes on what comes to `port` to a target on loopback, while it is open.

    refuses: a connection that sends this ends there.
    """

    def __init__(self, target: int, refuses: bytes = b"") -> None:
        self._target, self._refuses = target, refuses
        self._open: list[socket.socket] = []
        self.count = 0
        self.listen()

    def listen(self, port: int = 0) -> None:
        """Take connections, on the same port as before where it is given."""
        self._server = socket.create_server(("127.0.0.1", port))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._server,), daemon=True).start()

    def cut(self) -> None:
        """End all connections, and take no more."""
        for each in (self._server, *self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._open.clear()

    def _accept(self, server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                near, _ = server.accept()
                self.count += 1
                far = socket.create_connection(("127.0.0.1", self._target))
                self._open += [near, far]
                for a, b in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(a, b), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if self._refuses and self._refuses in data:
                    source.shutdown(socket.SHUT_RDWR)
                    return
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
