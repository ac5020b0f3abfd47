"""What stands before the app on every request: an id, the token, the rate, and the form of errors.

It is plain ASGI, not a FastAPI middleware: those cost as much as the rest of the request together.
Every response has the headers X-Request-Id and X-Model-Version. Every error has this body:

    {"error": {"what": …, "got": …, "rule": …, "fix": …}, "request_id": …}

A client that is refused while it still sends gets its answer only if somebody reads what it sends.
So a refused body is read and thrown away, up to DRAIN_BYTES; beyond that the connection closes.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import quote

from starlette.requests import ClientDisconnect

from raypipe.errors import hidden, traced
from raypipe.serve.online import token
from raypipe.serve.online.limits import Rates, Refused
from raypipe.serve.online.request_log import new_id, of_no_prediction

log = logging.getLogger("raypipe")
DRAIN_BYTES = 64 * 2**20
DRAIN_S = 10.0
# These say nothing about the model: probes and the page that asks for the token.
OPEN = frozenset({"/", "/health", "/ready", "/docs", "/openapi.json"})
HUNG_UP = 499  # counted, never sent
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Front:
    """An ASGI app around the app."""

    def __init__(
        self,
        app: App,
        rates: Rates,
        token_digest: str | None,
        version: Callable[[], str],
        count: Callable[[str, int], None],
    ) -> None:
        """version: the champion's, for the header. count: called with path and status."""
        self._app = app
        self._rates = rates
        self._digest = token_digest
        self._version = version
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = _Request(scope, receive, send, self._version)
        # Whatever happens, the client gets one answer and the request is counted once.
        try:
            self._admit(scope)
            await self._app(scope, request.receive, request.send)
            # The app leaves its refusals here: only this class knows what is still unread.
            refused = scope["state"].get("refused")
            if refused is not None:
                await request.refuse(refused)
        except Refused as refused:
            await request.refuse(refused)
        except ClientDisconnect:
            request.status = HUNG_UP
        except Exception as e:
            # Our own mistake: the traceback goes to the log, never to the client.
            log.error("Request %s failed: %s", of_no_prediction(request.id), traced(e))
            await request.refuse(Refused(500, "The server made a mistake", fix="See its log"))
        self._count(_known(scope), request.status)

    def _admit(self, scope: Scope) -> None:
        """Raise Refused for a wrong token (401) and for too many requests (429)."""
        client = (scope.get("client") or ("",))[0]
        if scope["path"] not in OPEN:
            self._rates.take(client)
            if self._digest is not None and not token.matches(_authorization(scope), self._digest):
                raise Refused(
                    401,
                    "The token is missing or wrong",
                    rule="Each request has a header Authorization: Bearer TOKEN",
                    fix="Ask whoever runs the server for the token",
                    headers={"WWW-Authenticate": "Bearer"},
                )


class _Request:
    """One request on its way: its id, whether its body was read, and the status of its answer."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, version: Callable[[], str]
    ) -> None:
        self.id = new_id()
        self.status = 0
        self._receive, self._send, self._version = receive, send, version
        self._all_read = False
        self._predicts = scope["path"] == "/predict"
        scope.setdefault("state", {})["request_id"] = self.id

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            self._all_read = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = list(message.get("headers", []))
            is_prediction = self._predicts and self.status == 200
            sent_id = self.id if is_prediction else of_no_prediction(self.id)
            headers.append((b"x-request-id", sent_id.encode()))
            # An answer of the challenger says so itself.
            if not any(name == b"x-model-version" for name, _ in headers):
                headers.append((b"x-model-version", in_header(self._version()).encode()))
            message = {**message, "headers": headers}
        await self._send(message)

    async def refuse(self, refused: Refused) -> None:
        """Answer with an error, if nothing has been answered yet."""
        if self.status:
            return
        # A client that still sends would not read the answer.
        closes = not await self._drain()
        # What the client sent may hold its token.
        parts = dict(refused.parts)
        parts["got"] = None if parts["got"] is None else hidden(str(parts["got"]))
        sent_id = of_no_prediction(self.id)
        body = json.dumps({"error": parts, "request_id": sent_id}, ensure_ascii=False).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        headers |= {"connection": "close"} if closes else {}
        headers |= refused.headers
        encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        start = {"type": "http.response.start", "status": refused.status, "headers": encoded}
        await self.send(start)
        await self.send({"type": "http.response.body", "body": body})

    async def _drain(self) -> bool:
        """Read the rest of the body and throw it away; False if it is too much."""
        if self._all_read:
            return True
        try:
            return await asyncio.wait_for(self._read_rest(), DRAIN_S)
        except asyncio.TimeoutError:
            return False

    async def _read_rest(self) -> bool:
        left = DRAIN_BYTES
        while left > 0 and not self._all_read:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                return False
            left -= len(message.get("body", b""))
        return self._all_read


def in_header(version: str) -> str:
    """A model's version as a header may hold it: what is not printable ASCII, and %, as %XX."""
    return quote(version, safe=_PRINTABLE)


def _authorization(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"authorization":
            return str(value.decode("latin-1"))
    return ""


def _known(scope: Scope) -> str:
    """The path for counting; one name for all that do not exist, so that metrics stay bounded."""
    path = scope["path"]
    known = path in OPEN or path in ("/predict", "/feedback", "/metrics")
    return path if known else "other"
