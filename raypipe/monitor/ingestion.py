"""One request to the Logs Ingestion API, by Azure's own client. Only this file knows azure-*.

    POST ENDPOINT/dataCollectionRules/RULE/streams/STREAM?api-version=2023-01-01

The body is a JSON array, gzip, at most 1 MB before that. 204: taken. The client's own retries are
off: the sender decides when, because it also decides what is dropped meanwhile.
"""

from __future__ import annotations

import gzip
import importlib.util
import io
import logging
import os
import re
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from raypipe.errors import ConfigError, keep_secret, one_line
from raypipe.monitor.settings import AzureMonitorConfig
from raypipe.monitor.within import within

MOST_OF_REQUEST = 1_000_000  # bytes before gzip
REQUEST_S = 30.0  # for one request, with its token
_TRY_AGAIN = {408, 425, 429, 500, 502, 503, 504}
# Of these nobody knows what was done before: the records may be there.
_MAY_HAVE_TAKEN = {500, 502, 504}
# Of the national clouds, by the end of the host's name.
_SCOPES = {".azure.us": "https://monitor.azure.us//.default"}
_SCOPES[".azure.cn"] = "https://monitor.azure.cn//.default"
_SCOPE = "https://monitor.azure.com//.default"


class Again(Exception):
    """Not now. after_s: what the server asks to wait. answered: nothing was taken, for sure."""

    def __init__(self, why: str, after_s: float = 0.0, answered: bool = False) -> None:
        super().__init__(why)
        self.after_s, self.answered = after_s, answered


class Problem(Exception):
    """Nothing will be taken until somebody changes something. kind: what to warn of once."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


class Refused(Exception):
    """The server does not take these records; fewer or others it may."""


def require() -> None:
    """Raise ConfigError if the packages of the extra `azure` are missing.

    They are looked for and not imported: the sender's thread does that, not the start of a verb.
    """
    for name in ("azure.identity", "azure.monitor.ingestion"):
        try:
            found = importlib.util.find_spec(name) is not None
        except ImportError:
            found = False
        if not found:
            raise ConfigError(
                "A sink of type azure_monitor needs packages that are not installed",
                got=name,
                fix="pip install 'raypipe[azure]'",
            )


class Ingestion:
    """Sends to one rule. Not for several threads at once."""

    def __init__(self, cfg: AzureMonitorConfig) -> None:
        self._cfg = cfg
        self._made: Any = None
        self.cpu_s = 0.0  # of the threads that waited for answers

    def send(self, stream: str, lines: Sequence[bytes], seconds: float) -> None:
        """Send records, JSON objects each, within `seconds`. Raises Again, Problem or Refused."""
        body = gzip.compress(b"[" + b",".join(lines) + b"]", 6, mtime=0)

        def post() -> None:
            try:
                self._post(stream, body, seconds)
            finally:
                self.cpu_s += time.thread_time()

        try:
            within(seconds, post)
        except TimeoutError as e:
            # That thread still holds its connection.
            self._made = None
            raise Again(f"it does not answer within {seconds:.0f} s") from e

    def _post(self, stream: str, body: bytes, seconds: float) -> None:
        from azure.core import exceptions

        try:
            if self._made is None:
                self._made = self._client()
            self._made.upload(
                self._cfg.rule,
                self._cfg.streams.of(stream),
                io.BytesIO(body),
                connection_timeout=min(10.0, seconds),
                read_timeout=seconds,
            )
        except exceptions.ClientAuthenticationError as e:
            # Raised by who asks for a token, too: the login has ended, or there never was one.
            if e.status_code == 401:
                why = "it answered 401: the token is expired or not for Azure Monitor"
            else:
                why = f"there is no token: {one_line(e.message, 200)}"
            raise Problem("token", why) from None
        except exceptions.HttpResponseError as e:
            raise _said(self._cfg, stream, e) from None
        except exceptions.ServiceRequestError as e:
            # Nothing was sent.
            raise Again(f"it is not reached ({_cause(e)})", answered=True) from None
        except exceptions.AzureError as e:
            raise Again(f"it does not answer ({_cause(e)})") from None

    def _client(self) -> Any:
        from azure.monitor.ingestion import LogsIngestionClient

        for name in ("azure", "msal"):
            # They tell of each failed request, and of each way to log in that was not there.
            if logging.getLogger(name).level == logging.NOTSET:
                logging.getLogger(name).setLevel(logging.CRITICAL)
        host = str(urlsplit(self._cfg.endpoint).hostname)
        scope = next((s for end, s in _SCOPES.items() if host.endswith(end)), _SCOPE)
        return LogsIngestionClient(
            self._cfg.endpoint,
            self._credential(),
            credential_scopes=[scope],
            retry_total=0,
            permit_redirects=False,
        )

    def _credential(self) -> Any:
        if self._cfg.token_env is not None:
            return _Token(self._cfg.token_env)
        from azure.identity import DefaultAzureCredential

        return DefaultAzureCredential()


class _Token:
    """A credential whose token is in the environment, read anew each time it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def get_token(self, *scopes: str, **options: Any) -> Any:
        from azure.core.credentials import AccessToken

        token = os.environ.get(self._name, "").strip()
        if not token:
            raise Problem("token", f"the environment variable {self._name} is not set")
        keep_secret(token)
        # It is asked for again at once: somebody may set a newer one.
        return AccessToken(token, int(time.time()) + 1)


def _said(cfg: AzureMonitorConfig, stream: str, error: Any) -> Exception:
    """What an answer that is no 204 means."""
    status = int(error.status_code or 0)
    if not status:
        # The connection ended within the answer.
        return Again("its answer is cut off")
    code = getattr(getattr(error, "error", None), "code", None)
    code = code if isinstance(code, str) else None
    said = f"it answered {status}" + (f", {one_line(code, 60)}" if code else "")
    if status in _TRY_AGAIN:
        headers = getattr(error.response, "headers", {})
        answered = status not in _MAY_HAVE_TAKEN
        return Again(said, retry_after_s(headers), answered)
    if status == 403:
        fix = "give this identity the role Monitoring Metrics Publisher on the rule"
        return Problem("permission", f"{said}: {fix}, and wait up to 30 minutes")
    if status == 404:
        return Problem("rule", f"{said}: there is no rule {cfg.rule} at this endpoint")
    if status == 400 and code and "stream" in code.lower():
        return Problem("stream", f"{said}: the rule has no stream {cfg.streams.of(stream)}")
    if status in (400, 413, 422):
        return Refused(said)
    return Problem("answer", said)


def retry_after_s(headers: Any) -> float:
    """Seconds that an answer asks to wait, 0 if it does not say; a date counts from now."""
    for name, unit_s in (("retry-after-ms", 1e-3), ("x-ms-retry-after-ms", 1e-3)):
        value = headers.get(name)
        if value is not None and re.fullmatch(r"\s*\d{1,9}\s*", value, re.ASCII):
            return min(3600.0, int(value) * unit_s)
    value = (headers.get("Retry-After") or "").strip()
    try:
        return min(3600.0, max(0.0, float(value)))
    except ValueError:
        pass
    try:
        at = parsedate_to_datetime(value)
    except (TypeError, ValueError):
        return 0.0
    at = at if at.tzinfo else at.replace(tzinfo=timezone.utc)
    return min(3600.0, max(0.0, (at - datetime.now(timezone.utc)).total_seconds()))


def _cause(error: Any) -> str:
    inner = getattr(error, "inner_exception", None) or error
    return type(inner).__name__
