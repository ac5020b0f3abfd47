"""The HTTP interface: a FastAPI app over the parts of one replica.

POST /predict      the bytes of one image; label, scores, model version and request id
POST /feedback     the right label of an earlier request
GET  /             a page to drop an image on
GET  /health       the process lives; /ready: a model is loaded, and what it follows
GET  /metrics      Prometheus
GET  /docs         OpenAPI
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response

from raypipe.images.decode import BadImage
from raypipe.serve.online import body as body_bytes
from raypipe.serve.online import feedback, openapi
from raypipe.serve.online.batching import Batcher, Outcome
from raypipe.serve.online.front import in_header
from raypipe.serve.online.limits import Refused, Room
from raypipe.serve.online.metrics import CONTENT_TYPE, Metrics
from raypipe.serve.online.models import Models, Role, without_places
from raypipe.serve.online.query import Wanted
from raypipe.serve.online.request_log import (
    Entry,
    Keeper,
    has_prediction,
    is_challenged,
    is_kept,
    now,
    of_no_prediction,
)
from raypipe.serve.online.settings import ServeConfig

log = logging.getLogger("raypipe")
PLAIN_BYTES = ("", "application/octet-stream")
# Reasons of BadImage that say it is no image at all.
NOT_AN_IMAGE = ("not_an_image", "empty")
PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
PAGE_POLICY += "img-src blob: data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'"


@dataclass(frozen=True)
class Parts:
    """What a replica has. predicted: called with the version and the seconds of each answer."""

    cfg: ServeConfig
    models: Models
    batcher: Batcher
    keeper: Keeper | None
    metrics: Metrics
    room: Room
    predicted: Callable[[str, float], None]


def build(parts: Parts) -> FastAPI:
    """The app. Errors are raised as Refused; front.py answers them."""
    app = FastAPI(
        title="raypipe",
        description=openapi.DESCRIPTION,
        docs_url="/docs",
        redoc_url=None,
        exception_handlers={
            Refused: _leave_to_front,
            HTTPException: _refuse_http,
            Exception: _leave_to_front,
        },
    )
    handlers = _Handlers(parts)
    app.post("/predict", **openapi.PREDICT)(handlers.predict)
    app.post("/feedback", **openapi.FEEDBACK)(handlers.feedback)
    app.get("/", include_in_schema=False)(handlers.page)
    app.get("/health", summary="Does the process live?")(handlers.health)
    app.get("/ready", summary="Is a model loaded?")(handlers.ready)
    app.get("/metrics", summary="For Prometheus")(handlers.metrics)
    return app


class _Handlers:
    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.page_html = files(__package__).joinpath("page.html").read_text("utf-8")

    async def predict(self, request: Request) -> Response:
        began = time.perf_counter()
        cfg = self.parts.cfg
        wanted = Wanted.read(request.query_params)
        _require_image_type(request)
        size = body_bytes.announced(request, cfg.max_bytes)
        request_id = request.state.request_id
        # Room for the body is taken before a byte of it is read.
        with self.parts.room.hold(size):
            data = await body_bytes.read(request, cfg.max_bytes, cfg.timeout_s)
            role = self._role(request_id)
            outcome = await self._outcome(role, data)
        _require_prediction(outcome, request_id)
        # Counted and kept; the request log never waits for a disk here.
        seconds = time.perf_counter() - began
        self._note(request_id, data, outcome.by, outcome, seconds)
        if self._is_shadowed(request_id):
            self._show_shadow(request_id, data)
        body = wanted.body(outcome, request_id)
        return Response(
            json.dumps(body, ensure_ascii=False),
            media_type="application/json",
            headers={"x-model-version": in_header(outcome.version)},
        )

    async def feedback(self, request: Request) -> Response:
        cfg, keeper = self.parts.cfg, self.parts.keeper
        given = await feedback.read(request, cfg.timeout_s)
        # The id itself says whether its request was kept: nothing is looked up.
        if not has_prediction(given.request_id):
            raise Refused(
                404,
                "There is no prediction of this id",
                got=given.request_id,
                rule="Its request was refused, or asked for something else",
                fix="Give the request_id of an answer of /predict",
            )
        if keeper is None or not is_kept(given.request_id, cfg.keep):
            raise Refused(
                404,
                "This request was not kept",
                got=given.request_id,
                rule=f"The server keeps {cfg.keep:.0%} of the requests (serve.keep)",
            )
        task = self.parts.models.task
        served = self.parts.models.of("champion")
        known = None if served is None or cfg.new_labels else served.package.classes
        label = feedback.label_of(given, task, known)
        if not keeper.feedback(given.request_id, label, task):
            raise Refused(503, "The request log is full", headers={"Retry-After": "10"})
        return JSONResponse({"request_id": given.request_id, "label": label}, 202)

    async def page(self) -> Response:
        headers = {"content-security-policy": PAGE_POLICY, "x-content-type-options": "nosniff"}
        return HTMLResponse(self.page_html, headers=headers)

    async def health(self) -> Response:
        alive = self.parts.batcher.alive()
        return JSONResponse({"alive": alive}, 200 if alive else 503)

    async def ready(self) -> Response:
        models = self.parts.models
        roles: tuple[Role, ...] = ("champion", "challenger")
        served: dict[str, str] = {}
        for role in roles:
            at = models.of(role)
            if at is not None:
                served[role] = at.version
        # Why a role is not at its target, as a version that did not load.
        problems = {}
        for role in roles:
            problem = models.problem(role)
            if problem is not None:
                problems[role] = {"version": problem.version or None, "why": problem.said}
        if "challenger" in served and self._challenger_hangs():
            why = "it does not answer any more; the champion answers for it"
            problems["challenger"] = {"version": served["challenger"], "why": why}
        ready = "champion" in served and not self.parts.room.closed
        body: dict[str, Any] = {
            "ready": ready,
            **served,
            "problems": problems,
            "batching": str(self.parts.batcher.plan),
            "request_log": self._request_log(),
        }
        return JSONResponse(body, 200 if ready else 503)

    def _request_log(self) -> str:
        keeper = self.parts.keeper
        if keeper is None:
            return "off"
        return without_places(keeper.problem) or "ok"

    async def metrics(self) -> Response:
        text = await asyncio.to_thread(self.parts.metrics.text)
        return Response(text, media_type=CONTENT_TYPE)

    def _role(self, request_id: str) -> Role:
        challenger = self.parts.cfg.challenger
        if challenger is None or challenger.shadow or self.parts.models.of("challenger") is None:
            return "champion"
        if not is_challenged(request_id, challenger.share) or self._challenger_hangs():
            return "champion"
        return "challenger"

    def _challenger_hangs(self) -> bool:
        return self.parts.batcher.hangs(self.parts.cfg.timeout_s / 2)

    def _is_shadowed(self, request_id: str) -> bool:
        challenger = self.parts.cfg.challenger
        if challenger is None or not challenger.shadow:
            return False
        if self.parts.models.of("challenger") is None:
            return False
        return is_challenged(request_id, challenger.share)

    async def _outcome(self, role: Role, data: bytes) -> Outcome:
        timeout_s = self.parts.cfg.timeout_s
        # The champion answers for a challenger that takes half of the time: it may hang.
        if role == "challenger":
            with suppress(asyncio.TimeoutError):
                return await self._from("challenger", data, timeout_s / 2)
            timeout_s /= 2
        try:
            return await self._from("champion", data, timeout_s)
        except asyncio.TimeoutError:
            raise Refused(
                503,
                "The prediction took too long",
                rule=f"serve.timeout_s is {self.parts.cfg.timeout_s:g}",
                fix="Send it again later",
                headers={"Retry-After": "1"},
            ) from None

    async def _from(self, role: Role, data: bytes, timeout_s: float) -> Outcome:
        future = self.parts.batcher.submit(role, data, asyncio.get_running_loop())
        # A client that gives up cancels this, and its image is not predicted.
        return await asyncio.wait_for(future, timeout_s)

    def _note(
        self, request_id: str, data: bytes, role: str, outcome: Outcome, seconds: float
    ) -> None:
        """Count a prediction, and keep it if its id says so."""
        metrics = self.parts.metrics
        metrics.predictions.labels(outcome.version, role).inc()
        metrics.batch.observe(outcome.batch)
        if role != "shadow":
            metrics.seconds.labels(outcome.version).observe(seconds)
            self.parts.predicted(outcome.version, seconds)
        if self.parts.keeper is not None and is_kept(request_id, self.parts.cfg.keep):
            self.parts.keeper.note(Entry(request_id, data, role, outcome, seconds, now()))

    def _show_shadow(self, request_id: str, data: bytes) -> None:
        began = time.perf_counter()

        def done(outcome: Outcome) -> None:
            # On a worker thread, when the client has its answer.
            if outcome.label is None:
                self.parts.metrics.shadow_failures.inc()
                return
            self._note(request_id, data, "shadow", outcome, time.perf_counter() - began)

        dropped = self.parts.batcher.shadow(data, done)
        if dropped:
            self.parts.metrics.shadow_failures.inc(dropped)


def _require_image_type(request: Request) -> None:
    # Without a type the bytes are looked at; with another one the client means something else.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in PLAIN_BYTES and not kind.startswith("image/"):
        raise Refused(
            415,
            "The body is the bytes of one image",
            got=kind,
            rule="Its Content-Type is image/… or application/octet-stream",
            fix="curl -H 'Content-Type: image/jpeg' --data-binary @photo.jpg URL/predict",
        )


def _require_prediction(outcome: Outcome, request_id: str) -> None:
    """Raise Refused for an image that is bad (415, 422) and for a model that failed (500)."""
    if outcome.bad is not None:
        raise _bad_image(outcome.bad)
    if outcome.label is None:
        # The reason is for the log only: it may name files of the server.
        log.warning(
            "Request %s got 500: %s failed on its image: %s",
            of_no_prediction(request_id),
            outcome.version,
            outcome.failed,
        )
        raise Refused(
            500,
            "The model could not predict this image",
            got=outcome.version,
            fix="Tell whoever runs the server",
        )


def _bad_image(bad: BadImage) -> Refused:
    if bad.reason in NOT_AN_IMAGE:
        return Refused(415, "This is no image that can be read", got=bad.detail, fix=bad.fix)
    return Refused(422, f"This image is refused: {bad.reason}", got=bad.detail, fix=bad.fix)


class _Silent(Response):
    """A response that sends nothing: front.py answers."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        return


async def _leave_to_front(request: Request, error: Exception) -> Response:
    """front.py reads the rest of the body before it answers with the error."""
    if isinstance(error, Refused):
        request.state.refused = error
    return _Silent()


async def _refuse_http(request: Request, error: Exception) -> Response:
    """What FastAPI itself refuses: an unknown path, another method."""
    assert isinstance(error, HTTPException)
    request.state.refused = Refused(
        error.status_code,
        str(error.detail),
        got=f"{request.method} {request.url.path[:200]}",
        fix="See /docs",
        headers=dict(error.headers or {}),
    )
    return _Silent()
