"""Events as signed requests to an address. Nothing here raises into the work that it tells of.

An event is written as a note in the run's folder first, and deleted when the receiver has
answered 2xx. So an event outlives a kill and a receiver that does not answer: the next run in this
folder delivers the notes that are left, oldest first. A run asks such a receiver no more.

    run.dir/sinks/HASH/TIME-ID.json            an event to deliver to the webhook with this address
    run.dir/sinks/HASH/TIME-ID.refused2.json   the same, after two runs in which it was refused
    run.dir/sinks/HASH/lock                    held by the process that delivers

A receiver may refuse one event for ever, or fail on it each time. A run sends such notes after all
others, each once, and only if the receiver has taken another event. After MOST_RUNS such runs the
event is dropped. So they hold up no other event, and a receiver that takes nothing for weeks loses
none by this.

A request follows https://www.standardwebhooks.com, for which many languages have a library:

    webhook-id: ID                 the event's id; a second one of the same id is the same event
    webhook-timestamp: SECONDS     when it was sent; refuse one that is minutes old
    webhook-signature: v1,BASE64   HMAC-SHA256 of "ID.SECONDS.BODY" under the secret

An address may hold a secret in its path, as Slack's do: messages have its host alone.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import os
import re
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urljoin, urlsplit

import requests
from filelock import Timeout
from pydantic import Field, model_validator
from typing_extensions import Self

from raypipe.config import RunConfig, Section, to_json
from raypipe.errors import ConfigError, hidden, keep_secret, keep_secrets_of
from raypipe.files import file_lock, write_atomic
from raypipe.monitor.streams import each_hidden
from raypipe.monitor.within import within
from raypipe.watch.events import Event

log = logging.getLogger("raypipe")
MOST_NOTES = 1000  # of one webhook; those that were refused go first, then the oldest
MOST_REFUSED = 3  # new events in a row, refused or failed on: then it is the receiver
MOST_RUNS = 10  # in which an event is refused; in one run as many are refused again
FIRST_PAUSE_S = 0.5
# Answers after which a second try may help: too early, too many, and the server's own trouble.
_TRY_AGAIN = {408, 425, 429, 500, 502, 503, 504}
# Answers about this event: another one may be taken.
_OF_EVENT = {400, 413, 422}
_KNOWN = 409  # the receiver has this id already
_KEEP_METHOD = {307, 308}  # redirects that keep the method and the body
_MOST_REDIRECTS = 3
_SHORTEST = 16  # characters of a secret
_REFUSED = re.compile(r"\.refused(\d+)\.json")


class WebhookConfig(Section):
    """Events as signed JSON, sent to an address."""

    type: Literal["webhook"]
    """POST, signed as standardwebhooks.com says."""
    url: str
    """https://HOST/PATH. `env:NAME`: the address in the environment variable NAME, which may hold
    a secret as no other address may."""
    secret_env: str | None = None
    """The environment variable with the secret that signs, of 16 characters or more. One that
    begins with whsec_ is read as base64."""
    secret_file: str | None = None
    """A file with the secret, instead of a variable; blanks around it do not count."""
    within_s: float = Field(default=20.0, gt=0, le=300)
    """Seconds that one event may take, with all tries. After that it is kept for the next run."""

    @model_validator(mode="after")
    def _one_secret(self) -> Self:
        if (self.secret_env is None) == (self.secret_file is None):
            raise ValueError("a webhook has either a secret_env or a secret_file")
        return self


def opened(run: RunConfig, cfg: WebhookConfig) -> Webhook:
    """Raises ConfigError for an address or a secret that is not there."""
    url = _of_environment(cfg.url.removeprefix("env:")) if cfg.url.startswith("env:") else cfg.url
    keep_secrets_of(url)
    try:
        parts = urlsplit(url)
        if url != cfg.url:
            # It is not in the configuration because it is secret, perhaps all of its path.
            keep_secret(parts.path)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        # What was meant as an address may be a secret.
        raise ConfigError(
            "A webhook has no usable address",
            got=cfg.url if cfg.url.startswith("env:") else None,
            rule="It is https://HOST/PATH",
            fix="Set watch.sinks' url",
        )
    if cfg.secret_env is not None:
        secret, named = _of_environment(cfg.secret_env), cfg.secret_env
    else:
        named = str(cfg.secret_file)
        try:
            secret = Path(named).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(
                "The secret of a webhook cannot be read",
                got=f"{named}: {type(e).__name__}",
                fix="Set watch.sinks' secret_file, or secret_env",
            ) from None
    keep_secret(secret)
    key = secret.encode()
    if secret.startswith("whsec_"):
        with suppress(ValueError):
            key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    if len(secret) < _SHORTEST or not key:
        raise ConfigError(
            "The secret of a webhook is too short",
            got=f"{len(secret)} characters in {named}",
            rule=f"It has {_SHORTEST} or more, so that nobody guesses it",
            fix="openssl rand -hex 32 makes one",
        )
    digest = hashlib.sha256(url.encode()).hexdigest()[:16]
    return Webhook(url, key, run.path / "sinks" / digest, cfg.within_s)


def _of_environment(name: str) -> str:
    value = os.environ.get(name, "").strip()
    if not value:
        raise ConfigError(
            f"The environment variable {name} is not set",
            rule="A sink of watch.sinks takes its address or its secret from it",
            fix=f"export {name}=…",
        )
    return value


def signature(secret: bytes, id: str, seconds: int, body: bytes) -> str:
    """The value of the header webhook-signature."""
    signed = f"{id}.{seconds}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(secret, signed, "sha256")).decode()


class _Again(Exception):
    """The try failed and another may help. after_s: what the server asks to wait. answered: it is
    alive, and may fail on this event alone."""

    def __init__(self, why: str, after_s: float = 0.0, answered: bool = False) -> None:
        super().__init__(why)
        self.after_s, self.answered = after_s, answered


class _Refused(Exception):
    """The try failed, and the same again would fail too. of_event: another may fare better."""

    def __init__(self, why: str, of_event: bool = False) -> None:
        super().__init__(why)
        self.of_event = of_event


class Webhook:
    """Signed requests to one address. within_s: of one event, with all tries."""

    def __init__(self, url: str, secret: bytes, folder: Path, within_s: float) -> None:
        self._url, self._secret, self._folder = url, secret, folder
        self._within_s = within_s
        self._is_dead = self._has_warned = False
        # Of this run: has the receiver taken an event, which ones has it refused, and how many may
        # it refuse that earlier runs have left.
        self._has_taken = False
        self._refused: set[str] = set()
        self._again = MOST_RUNS
        self._failed = 0  # new events in a row that it has failed on

    def _signed_in(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        """With the address's own password, if it has one: requests would take one of ~/.netrc."""
        parts = urlsplit(self._url)
        if parts.username or parts.password:
            pair = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
            basic = base64.b64encode(pair.encode()).decode()
            request.headers["Authorization"] = f"Basic {basic}"
        return request

    def send(self, event: Event) -> None:
        """Keep the event as a note, and deliver all notes; never raises."""
        until = time.monotonic() + self._within_s
        # Each text alone: a secret of digits would tear a number, and no receiver could read it.
        whole = json.loads(to_json(event.as_json()))
        body = to_json(each_hidden(whole) | {name: whole[name] for name in ("id", "kind")})
        try:
            self._keep(event.id, body)
        except OSError as e:
            self._send_unkept(event.id, body.encode(), until, e)
            return
        # A receiver that is dead is not waited for again and again by one run.
        if self._is_dead:
            return
        try:
            self._deliver(until)
        except OSError as e:
            self._warn(f"its notes cannot be read or deleted ({_reason(e)})")

    def _send_unkept(self, id: str, body: bytes, until: float, error: OSError) -> None:
        """Of a full or read-only disk the receiver should hear all the more. Notes of earlier runs
        wait until the folder can be written again."""
        reason = f"its notes cannot be kept ({_reason(error)})"
        try:
            if self._is_dead:
                raise _Again("it did not answer before")
            self._send(id, body, until)
        except (_Again, _Refused) as e:
            self._is_dead = True
            self._warn(reason, f"{e}, so this event is lost. Look at {self._folder}")
            return
        self._warn(reason, f"Events are sent all the same, once. Look at {self._folder}")

    def _keep(self, id: str, body: str) -> None:
        # The clock may go back: names order the notes well enough, and ids tell them apart.
        name = f"{time.time_ns():020d}-{id}-{uuid.uuid4().hex[:6]}.json"
        write_atomic(self._folder / name, body)
        # The oldest of those that were refused most often come first.
        notes = sorted(self._notes(), key=_refusals, reverse=True)
        for old in notes[:-MOST_NOTES]:
            old.unlink(missing_ok=True)
        if len(notes) > MOST_NOTES:
            which = "a refused one" if _refusals(notes[0]) else "the oldest"
            self._warn(f"more than {MOST_NOTES} events wait: {which} was dropped")

    def _notes(self) -> list[Path]:
        """Those first that were never refused, or least often; of these the oldest."""
        return sorted(self._folder.glob("*.json"), key=lambda note: (_refusals(note), note.name))

    def _deliver(self, until: float) -> None:
        """Deliver what waits. Another process that delivers takes these notes, too, or leaves them
        to the next event."""
        try:
            with file_lock(self._folder / "lock").acquire(
                timeout=max(0.0, until - time.monotonic())
            ):
                self._deliver_all(until)
        except Timeout:
            log.debug("Another process delivers the events of %s", self._host)

    def _deliver_all(self, until: float) -> None:
        """As `_deliver`, by the process that holds the lock."""
        refused = 0
        for note in self._notes():
            # After a long outage the rest waits for the next event.
            if time.monotonic() >= until:
                return
            was_refused = _refusals(note) > 0
            if was_refused and not self._is_sent_again(note):
                continue
            try:
                self._has_taken |= self._deliver_one(note, until)
                refused = self._failed = 0
            except (_Again, _Refused) as e:
                of_event = isinstance(e, _Refused) and e.of_event
                has_failed = isinstance(e, _Again) and e.answered
                if of_event or has_failed:
                    self._put_behind(note, str(e))
                else:
                    self._warn(str(e))
                if has_failed and not was_refused:
                    # Its time is over: what else waits goes with the next event.
                    self._failed += 1
                    self._is_dead = self._failed == MOST_REFUSED
                    return
                if was_refused and of_event:
                    self._again -= 1
                elif was_refused:
                    # It may have taken all the time. The next event says how it goes on.
                    self._again = 0
                    return
                else:
                    refused += 1
                    if not of_event or refused == MOST_REFUSED:
                        self._is_dead = True
                        return

    def _is_sent_again(self, note: Path) -> bool:
        """Does this run send a note that was refused before?"""
        return self._has_taken and self._again > 0 and _name(note) not in self._refused

    def _put_behind(self, note: Path, why: str) -> None:
        """Note that this run has sent the event in vain; after MOST_RUNS runs drop it."""
        self._refused.add(_name(note))
        runs = _refusals(note) + 1
        if runs < MOST_RUNS:
            self._warn(why)
            note.rename(note.with_name(f"{_name(note)}.refused{runs}.json"))
            return
        event = _name(note).partition("-")[2].rpartition("-")[0]
        log.warning(
            "The webhook at %s: %s, to %s in %d runs. This event is dropped",
            self._host,
            hidden(why),
            event,
            runs,
        )
        note.unlink(missing_ok=True)

    def _deliver_one(self, note: Path, until: float) -> bool:
        """Was it taken? False for a note that cannot be sent. Raises _Again or _Refused for one
        that stays."""
        try:
            body = note.read_bytes()
            id = str(json.loads(body)["id"])
        except FileNotFoundError:
            return False
        except (ValueError, KeyError, TypeError):
            # Torn by a full disk: it can never be sent.
            note.unlink(missing_ok=True)
            return False
        self._send(id, body, until)
        note.unlink(missing_ok=True)
        return True

    def _send(self, id: str, body: bytes, until: float) -> None:
        """As many tries as the time allows. Raises _Again or _Refused if none was taken."""
        pause_s = FIRST_PAUSE_S
        has_answered = False
        while True:
            try:
                self._post_in_time(id, body, until)
                return
            except _Again as e:
                # The last try may have had no time for an answer.
                e.answered = has_answered = has_answered or e.answered
                wait_s = max(pause_s, e.after_s)
                if time.monotonic() + wait_s >= until:
                    raise
                time.sleep(wait_s)
                pause_s *= 2

    def _post_in_time(self, id: str, body: bytes, until: float) -> None:
        try:
            within(until - time.monotonic(), lambda: self._post(id, body, until))
        except TimeoutError as e:
            raise _Again(str(e)) from None

    def _post(self, id: str, body: bytes, until: float) -> None:
        """One try, with redirects inside the same host. Raises _Again or _Refused."""
        url = self._url
        for _ in range(_MOST_REDIRECTS + 1):
            answer = self._answer(url, id, body, until)
            status, location = answer.status_code, answer.headers.get("Location")
            if status not in _KEEP_METHOD or location is None:
                break
            try:
                url = urljoin(url, location)
                same = _origin(url) == _origin(self._url)
            except ValueError:  # no address at all
                same = False
            if not same:
                raise _Refused("it redirects to another host, which is refused")
        if 200 <= status < 300 or status == _KNOWN:
            return
        if status in _TRY_AGAIN:
            after_s = _seconds(answer.headers.get("Retry-After"))
            raise _Again(f"it answered {status}", after_s, answered=status >= 500)
        raise _Refused(f"it answered {status}", status in _OF_EVENT)

    def _answer(self, url: str, id: str, body: bytes, until: float) -> requests.Response:
        # Signed at each try: a receiver refuses a time that is long ago.
        seconds = int(time.time())
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "raypipe",
            "webhook-id": id,
            "webhook-timestamp": str(seconds),
            "webhook-signature": signature(self._secret, id, seconds, body),
        }
        left_s = max(0.1, until - time.monotonic())
        try:
            # The answer's body is never read: it may have no end.
            with requests.post(
                url,
                body,
                headers=headers,
                auth=self._signed_in,
                timeout=left_s,
                allow_redirects=False,
                stream=True,
            ) as answer:
                return answer
        except (requests.Timeout, requests.ConnectionError) as e:
            raise _Again(f"it does not answer ({type(e).__name__})") from None
        except (requests.RequestException, ValueError) as e:
            raise _Refused(f"the request failed ({type(e).__name__})") from None

    @property
    def _host(self) -> str:
        return str(urlsplit(self._url).hostname)

    def _warn(self, why: str, then: str = "") -> None:
        """One warning a run. then: what becomes of the event; "": it waits as a note."""
        if not self._has_warned:
            then = then or f"Events wait in {self._folder} for the next run"
            log.warning("The webhook at %s: %s. %s", self._host, hidden(why), hidden(then))
        self._has_warned = True


def _name(note: Path) -> str:
    """TIME-ID of a note, however often it was refused."""
    return note.name.partition(".")[0]


def _refusals(note: Path) -> int:
    """In how many runs the event was refused."""
    found = _REFUSED.search(note.name)
    return int(found[1]) if found else 0


def _reason(error: OSError) -> str:
    """The system's words, as `No space left on device`."""
    return error.strerror or type(error).__name__


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname, port


def _seconds(retry_after: str | None) -> float:
    """Seconds of a header Retry-After; 0 without one. Dates are taken for none."""
    try:
        return max(0.0, float(retry_after or 0))
    except ValueError:
        return 0.0
