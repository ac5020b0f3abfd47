"""Errors that a user can act on.

Every message has four parts: what is wrong, the value we got, the rule it breaks, and the fix. An
error may cross Ray actors, so it pickles as its four parts. An exception that is no `RaypipeError`
is our own mistake and keeps its traceback.

No message shows a credential. `hidden` removes passwords and keys from addresses in any text, and
every value that is known as a secret: of environment variables with such a name, and all that was
passed to `keep_secret`. It does so in each spelling that repr, JSON, shells and URLs give a value.
A text that is cut is hidden first: half of a secret would not be known again.
"""

from __future__ import annotations

import json
import os
import re
import traceback
from collections.abc import Callable
from difflib import SequenceMatcher
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar
from urllib.parse import quote, unquote

HIDDEN = "***"
# Characters of the shortest known secret: hiding every "true" would hide the text.
_SHORTEST = 8

# Names of settings that hold a credential. `_?` may also be a hyphen or nothing.
_NAMES = (
    "access_?key(_?id)? access_?token account_?key api_?key auth_?token awsaccesskeyid "
    "client_?secret pass(word|wd|phrase)? private_?key pwd sas sas_?token "
    "secret(_?access)?(_?key)? session_?token shared_?access_?signature sharedaccesskey sig "
    "signature ssl_?password token x_?amz_?(credential|security_?token|signature) "
    "x_?goog_?(credential|signature)"
)
_NAME = "(?:" + "|".join(_NAMES.replace("_?", "[_-]?").split()) + ")"
_SECRET_NAME = re.compile(
    rf"(?:^|.*[_\W]){_NAME}$|.*(CONNECTION_STRING|PASSWO?R?D)$", re.IGNORECASE
)

# A password may hold slashes and @, but text that begins with a port and a slash is a path with
# an @ in it.
_PORT = r"(?!\d+(?:[/?#]|$))"
# SCHEME://USER:PASSWORD@ inside a text. A scheme is short: without an end, a text of 100,000
# letters and no blank took 20 s.
_PASSWORD = re.compile(
    rf"(?P<before>[a-zA-Z][\w+.-]{{0,30}}://[^\s/:@'\"]*:){_PORT}(?P<secret>[^\s'\"]+)(?=@)"
)
# What such an address is in. Each _PASSWORD without an @ looks to the end of its run: 2,000 hosts
# without a blank between took 3 s.
_RUN = re.compile(r"[^\s'\"]++")
# The same where the whole text is one address: its password may hold blanks and quotes.
_WHOLE = re.compile(rf"^\s*[a-zA-Z][\w+.-]*://[^/:@]*:{_PORT}(?P<secret>.+)@", re.DOTALL)
# A token in the place of the user's name.
_USER = re.compile(r"(?P<before>https?://)(?P<secret>[^\s/:@'\"]+)(?=@)", re.IGNORECASE)
# NAME=VALUE in a query or a connection string, perhaps percent-encoded.
_FIELD = re.compile(
    rf"(?P<before>(?:[?&;]|%26|%3B|%3F){_NAME}(?:=|%3D))(?P<secret>(?:(?!%26|%3B)[^\s&;'\"])+)",
    re.IGNORECASE,
)
_kept: set[str] = set()

P = ParamSpec("P")
R = TypeVar("R")


def keep_secret(value: str) -> None:
    """From now on, no message of this process shows this value."""
    if len(value) >= _SHORTEST:
        _kept.add(value)


def keep_secrets_of(address: str) -> None:
    """`keep_secret` for the credentials in an address, as written and percent-decoded."""
    for pattern in (_WHOLE, _PASSWORD, _USER, _FIELD):
        for match in pattern.finditer(address):
            keep_secret(match["secret"])
            keep_secret(unquote(match["secret"]))


def is_secret_name(name: str) -> bool:
    """Does a setting of this name hold a credential?

    AWS_SECRET_ACCESS_KEY and token do; primary_key and tokens_seen do not.
    """
    return bool(_SECRET_NAME.match(name))


def holds_secret(text: str) -> bool:
    """Is this an address or a connection string with a credential in it?"""
    decoded = unquote(text)
    if "://" not in decoded and not re.match(r"[\w ]+=[^;]*;", decoded):
        return False
    return any(pattern.search(decoded) for pattern in (_WHOLE, _PASSWORD, _USER, _FIELD))


def hidden(text: str) -> str:
    """The text without credentials."""
    # The longest first: one secret may be a part of another.
    for value in sorted(_kept | _of_environment(), key=len, reverse=True):
        text = _written(value).sub(HIDDEN, text)
    if "@" in text:
        text = _RUN.sub(_before_at, text)
    return _FIELD.sub(rf"\g<before>{HIDDEN}", text)


def _before_at(run: re.Match[str]) -> str:
    """A run of _RUN without the passwords in it. Behind its last @ there is none."""
    end = run[0].rfind("@") + 1
    head = run[0][:end]
    for pattern in (_PASSWORD, _USER):
        head = pattern.sub(rf"\g<before>{HIDDEN}", head)
    return head + run[0][end:]


@lru_cache(maxsize=256)
def _written(value: str) -> re.Pattern[str]:
    r"""A value as it is, and as others write it: `it's` is also `it\'s` and `it%27s`."""
    parts = []
    for run in re.findall(r"[A-Za-z0-9]+|\\+|.", value, re.DOTALL):
        if run.isascii() and run.isalnum():
            parts.append(run)
        elif run[0] == "\\":
            # Each writer doubles backslashes. Possessive: a row of them matches in one way only.
            parts.append(r"(?:\\++|(?i:%5C)+)")
        else:
            parts.append(rf"\\*+(?i:{'|'.join(map(re.escape, _spellings(run)))})")
    return re.compile("".join(parts))


def _spellings(character: str) -> list[str]:
    """How a character that is no letter or digit is written, without backslashes before it."""
    escaped = [json.dumps(character)[1:-1], repr(character)[1:-1]]
    found = [character, quote(character, safe="", errors="replace")]
    found += [text.lstrip("\\") for text in escaped]
    return found + ["+"] * (character == " ")


def _of_environment() -> set[str]:
    """Values of environment variables whose name says that they are secret."""
    values = set()
    for name, value in os.environ.items():
        # PWD is the working directory.
        if len(value) >= _SHORTEST and name != "PWD" and is_secret_name(name):
            values.add(value)
    return values


def traced(error: BaseException) -> str:
    """The traceback of an error that nobody foresaw, without credentials: for a log."""
    return hidden("".join(traceback.format_exception(error)).rstrip())


class RaypipeError(Exception):
    """Work that failed for a reason we can name. Exit code 1."""

    exit_code = 1

    def __init__(self, what: str, *, got: Any = None, rule: str = "", fix: str = "") -> None:
        self.what = what
        self.got = got
        self.rule = rule
        self.fix = fix
        if got is not None:
            what = f"{what} (got {got!r})"
        sentences = [_sentence(part) for part in (what, rule, fix) if part]
        super().__init__(hidden(" ".join(sentences)))

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process does not know the secrets of this one: they are hidden before it leaves.
        parts = [hidden(part) for part in (self.what, self.rule, self.fix)]
        return _rebuild, (type(self), parts[0], _shown(self.got), *parts[1:])


class ConfigError(RaypipeError):
    """The configuration or the command line is wrong. Exit code 2."""

    exit_code = 2


class DataError(RaypipeError):
    """A table, a file or a label is not what the job needs. Exit code 2."""

    exit_code = 2


class Unreachable(DataError):
    """A table cannot be read or written now. Its data may be right: trying again may help."""


class FullDisk(Unreachable):
    """A disk, or its owner's share of it, has no room for what is written. Exit code 1."""

    exit_code = 1


class ClusterError(RaypipeError):
    """The cluster cannot do what was asked. Exit code 2: asking for less may work."""

    exit_code = 2


def without_secrets(work: Callable[P, R]) -> Callable[P, R]:
    """`work`, for a worker of Ray: no traceback that it raises holds a secret.

    Ray writes the traceback of a worker's error into its logs, into files of Tune, and onto its
    dashboard. An error whose traceback holds a secret, as one of a user's model may, becomes a
    RaypipeError with the hidden text. Others are raised as they are.
    """

    @wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return work(*args, **kwargs)
        except Exception as e:
            text = "".join(traceback.format_exception(e))
            if hidden(text) == text:
                raise
            # Its own message is hidden; that of its cause is not.
            own = e if isinstance(e, RaypipeError) else RaypipeError(f"{type(e).__name__}: {e}")
        raise own from None

    return run


def nearest(name: str, known: list[str]) -> str:
    """`Did you mean 'train.lr'?`, or the list of all known names if none is close.

    Of names that are equally close, it is the first one.
    """
    close = closest(name, known)
    return f"Did you mean {close!r}?" if close else f"Known: {', '.join(sorted(known))}"


def closest(name: str, known: list[str], least: float = 0.5) -> str:
    """The name that is most like it; "" if none is close. least: 1 is an equal name."""

    def likeness(one: str) -> float:
        return SequenceMatcher(None, one, name).ratio()

    close = max(known, key=likeness, default="")
    return close if likeness(close) >= least else ""


def one_line(text: object, length: int = 300) -> str:
    """The text, often an exception's, on one line of at most `length` characters, hidden."""
    return " ".join(hidden(str(text)).split())[:length]


def _sentence(text: str) -> str:
    """`text` with one full stop at its end, or its own question or exclamation mark."""
    return text if text.endswith(("?", "!")) else text.rstrip(".") + "."


class _Shown(str):
    """What `repr` showed of a value in another process, without its secrets."""

    def __repr__(self) -> str:
        return str(self)


def _shown(value: Any) -> Any:
    """The value as it may leave this process: itself, unless its text holds a secret."""
    text = repr(value)
    return value if hidden(text) == text else _Shown(hidden(text))


def _rebuild(kind: type[RaypipeError], what: str, got: Any, rule: str, fix: str) -> RaypipeError:
    return kind(what, got=got, rule=rule, fix=fix)
