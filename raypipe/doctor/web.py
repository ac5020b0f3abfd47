"""One small HTTP request: does a server answer, with which status, and what time is it there?"""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from raypipe.errors import one_line

LIMIT_S = 5.0


@dataclass(frozen=True)
class Answer:
    """status: 0 without an answer; `error` says why. skew_s: how far this clock is ahead."""

    status: int
    skew_s: float | None = None
    error: str = ""


def get(url: str, headers: Mapping[str, str] | None = None) -> Answer:
    """Ask for `url`. Proxies of the environment count, but not for this host itself."""
    request = urllib.request.Request(url, headers=dict(headers or {}))
    before = time.time()
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return Answer(answer.status, _skew(answer.headers.get("Date"), before))
    except urllib.error.HTTPError as e:
        # 403 without credentials is an answer too, and it has the time.
        return Answer(e.code, _skew(e.headers.get("Date"), before))
    except (OSError, http.client.HTTPException, ValueError) as e:
        return Answer(0, error=one_line(getattr(e, "reason", None) or e, 100))


def _skew(date: str | None, before: float) -> float | None:
    """Seconds by which this clock is ahead of a Date header, which has no fractions."""
    if date is None:
        return None
    try:
        there = parsedate_to_datetime(date).timestamp() + 0.5
    except (TypeError, ValueError):
        return None
    return (before + time.time()) / 2 - there
