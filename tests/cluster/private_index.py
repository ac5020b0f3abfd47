"""A package index behind a password, on loopback."""

from __future__ import annotations

import base64
from http.server import SimpleHTTPRequestHandler
from typing import Any

PASSWORD = "canary/of the index"
QUOTED = "canary%2Fof%20the%20index"


class Private(SimpleHTTPRequestHandler):
    """A package index that asks for a password; it remembers what was asked."""

    seen: list[tuple[str, int]]
    root: str

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, directory=self.root)

    def do_GET(self) -> None:
        wanted = base64.b64encode(f"me:{PASSWORD}".encode()).decode()
        if self.headers.get("Authorization") != f"Basic {wanted}":
            self.seen.append((self.path, 401))
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="wheels"')
            self.end_headers()
            return
        self.seen.append((self.path, 200))
        super().do_GET()

    def log_message(self, *args: Any) -> None:
        pass
