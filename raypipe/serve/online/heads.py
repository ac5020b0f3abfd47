"""How long the head of a request may be.

uvicorn bounds it with h11, its slow parser, but not with httptools: a header of 300 MB kept a
server from everybody else for two minutes, because each piece is added to all that came before. So
what a request brings beside its body is counted, and beyond MOST_BYTES it gets 431 and the
connection closes.

uvicorn calls the names used here from outside or hands them to httptools; a test holds them.
"""

from __future__ import annotations

import json
from typing import Any

MOST_BYTES = 64 * 2**10


def protocol() -> Any:
    """What uvicorn's `http` takes: the bounded httptools, or "h11" where that is not installed."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"

    class Bounded(HttpToolsProtocol):
        """Counts what is no body: request line, headers, sizes of chunks, trailers."""

        _beside = 0
        _begins = False

        def on_message_begin(self) -> None:
            self._begins = True
            super().on_message_begin()

        def on_body(self, body: bytes) -> None:
            # Sizes of chunks are as long as the chunks themselves if these are tiny.
            self._beside -= 2 * len(body)
            super().on_body(body)

        def data_received(self, data: bytes) -> None:
            self._beside += len(data)
            super().data_received(data)
            # The piece in which a request begins may hold the end of another one: at most 256 kB.
            if self._begins:
                self._begins, self._beside = False, 0
            if self._beside > MOST_BYTES and not self.transport.is_closing():
                self._refuse()

        def _refuse(self) -> None:
            what = "The head of the request is too large"
            rule = f"At most {MOST_BYTES:,} bytes beside the body"
            error = {"what": what, "got": None, "rule": rule, "fix": ""}
            body = json.dumps({"error": error, "request_id": ""}).encode()
            head = "HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            self.transport.write(head.encode() + body)
            self.transport.close()

    return Bounded
