"""What the OpenAPI page says about each path: bodies, parameters and errors."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

DESCRIPTION = """Predictions of one image model, the champion of its registry.

Every response has the headers X-Request-Id and X-Model-Version. With a token, requests need
`Authorization: Bearer TOKEN`, except for health, readiness and this page."""


class Part(BaseModel):
    """What is wrong, the value, the rule it breaks, and the way out."""

    what: str
    got: str | None
    rule: str
    fix: str


class Error(BaseModel):
    """The body of every error."""

    error: Part
    request_id: str


class Answer(BaseModel):
    """A prediction. `score` and `scores` are those of classes; `value` is a number's."""

    request_id: str
    model: str
    label: str
    score: float | None = None
    scores: dict[str, float] | None = None
    value: float | None = None
    embedding: list[float] | None = None


class Taken(BaseModel):
    """Feedback that was taken."""

    request_id: str
    label: str


_WHY = {
    401: "The token is missing or wrong",
    404: "There is no prediction of this id, or it was not kept",
    408: "The body did not arrive in time",
    413: "The body is too large",
    415: "The body is no image, or its type is another",
    422: "The image has too many pixels or is broken, or a parameter is wrong",
    429: "Too many requests from this address; see Retry-After",
    503: "The server is full or stopping; see Retry-After",
}


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": Error, "description": _WHY[status]} for status in statuses}


def _parameter(name: str, kind: str, text: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": {"type": kind}, "description": text}


_BYTES = {"schema": {"type": "string", "format": "binary"}}
_TYPES = ("image/jpeg", "image/png", "image/webp", "application/octet-stream")
_PARAMETERS = [
    _parameter("top_k", "integer", "Only the best classes"),
    _parameter("threshold", "number", "For tags: the least score of one that is set (0.5)"),
    _parameter("embedding", "boolean", "The features, too"),
]
PREDICT: dict[str, Any] = {
    "summary": "Predict one image",
    "responses": {200: {"model": Answer}, **_errors(401, 408, 413, 415, 422, 429, 503)},
    "openapi_extra": {
        "requestBody": {"required": True, "content": dict.fromkeys(_TYPES, _BYTES)},
        "parameters": _PARAMETERS,
    },
}
_LABEL = {"description": "A name, a list of tags, or a number, as the model's task says"}
_FEEDBACK = {
    "type": "object",
    "required": ["request_id", "label"],
    "properties": {"request_id": {"type": "string"}, "label": _LABEL},
}
FEEDBACK: dict[str, Any] = {
    "summary": "Give the right label of an earlier request",
    "status_code": 202,
    "responses": {202: {"model": Taken}, **_errors(401, 404, 413, 415, 422, 429, 503)},
    "openapi_extra": {
        "requestBody": {"required": True, "content": {"application/json": {"schema": _FEEDBACK}}}
    },
}
