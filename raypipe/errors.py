"""Errors a user can act on.

Every message has four parts: what is wrong, the value we got, the rule it breaks, and the way out. They cross Ray actors,
so each one pickles from its four parts. Anything that is not a `RaypipeError` is our own mistake and keeps its traceback.

No message shows a credential. `hidden` takes out passwords and keys of addresses, whoever wrote the text, and every value that
is known to be a secret: of environment variables whose name says so, and what was passed to `keep_secret`.
"""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from typing import Any
from urllib.parse import unquote

HIDDEN = "***"
_SHORTEST = 8  # of a known secret: hiding every "true" would hide the text
_NAMES = (
    "access_?key(_?id)? access_?token account_?key api_?key auth_?token awsaccesskeyid client_?secret pass(word|wd|phrase)? "
    "private_?key pwd sas sas_?token secret(_?access)?(_?key)? session_?token shared_?access_?signature sharedaccesskey sig "
    "signature ssl_?password token x_?amz_?(credential|security_?token|signature) x_?goog_?(credential|signature)"
)
_NAME = "(?:" + "|".join(_NAMES.replace("_?", "[_-]?").split()) + ")"
_SECRET_NAME = re.compile(
    rf"(?:^|.*[_\W]){_NAME}$|.*(CONNECTION_STRING|PASSWO?R?D)$", re.IGNORECASE
)
# A password may hold slashes and @, but what begins with a port and a slash is a path with an @ in it.
_PORT = r"(?!\d+(?:[/?#]|$))"
_PASSWORD = re.compile(
    rf"(?P<before>[a-zA-Z][\w+.-]*://[^\s/:@'\"]*:){_PORT}(?P<secret>[^\s'\"]+)(?=@)"
)
_WHOLE = re.compile(
    rf"^\s*[a-zA-Z][\w+.-]*://[^/:@]*:{_PORT}(?P<secret>.+)@", re.DOTALL
)  # blanks and quotes too
_USER = re.compile(
    r"(?P<before>https?://)(?P<secret>[^\s/:@'\"]+)(?=@)", re.IGNORECASE
)  # a token in the place of a name
_FIELD = re.compile(
    rf"(?P<before>(?:[?&;]|%26|%3B|%3F){_NAME}(?:=|%3D))(?P<secret>(?:(?!%26|%3B)[^\s&;'\"])+)",
    re.IGNORECASE,
)
_kept: set[str] = set()


def keep_secret(value: str) -> None:
    """From now on no message of this process shows this value."""
    if len(value) >= _SHORTEST:
        _kept.add(value)


def keep_secrets_of(address: str) -> None:
    """The same for the credentials in an address, as they stand there and decoded."""
    for pattern in (_WHOLE, _PASSWORD, _USER, _FIELD):
        for found in pattern.finditer(address):
            keep_secret(found["secret"])
            keep_secret(unquote(found["secret"]))


def is_secret_name(name: str) -> bool:
    """Does a setting of this name hold a credential? AWS_SECRET_ACCESS_KEY and token do, primary_key and tokens_seen do not."""
    return bool(_SECRET_NAME.match(name))


def holds_secret(text: str) -> bool:
    """Is this an address or a connection string with a credential in it?"""
    found = unquote(text)
    if "://" not in found and not re.match(r"[\w ]+=[^;]*;", found):
        return False
    return any(pattern.search(found) for pattern in (_WHOLE, _PASSWORD, _USER, _FIELD))


def hidden(text: str) -> str:
    """The text without credentials."""
    for value in sorted(_kept | _of_environment(), key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    for pattern in (_PASSWORD, _USER, _FIELD):
        text = pattern.sub(rf"\g<before>{HIDDEN}", text)
    return text


def _of_environment() -> set[str]:
    return {
        v
        for name, v in os.environ.items()
        if len(v) >= _SHORTEST and name != "PWD" and is_secret_name(name)
    }


class RaypipeError(Exception):
    """Work that failed for a reason we can name. Exit code 1."""

    exit_code = 1

    def __init__(self, what: str, *, got: Any = None, rule: str = "", fix: str = "") -> None:
        self.what, self.got, self.rule, self.fix = what, got, rule, fix
        got_text = "" if got is None else f" (got {got!r})"
        parts = (what + got_text, rule, fix)
        super().__init__(
            hidden(
                " ".join(p if p.endswith(("?", "!")) else p.rstrip(".") + "." for p in parts if p)
            )
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.what, self.got, self.rule, self.fix)


class ConfigError(RaypipeError):
    """The configuration or the command line is wrong. Exit code 2."""

    exit_code = 2


class DataError(RaypipeError):
    """A table, a file or a label is not what the job needs. Exit code 2."""

    exit_code = 2


class ClusterError(RaypipeError):
    """The cluster cannot do what was asked. Exit code 2 when asking for less would work, so users can act on it."""

    exit_code = 2


def nearest(name: str, known: list[str]) -> str:
    """`Did you mean 'train.lr'?`, or the list of what exists when nothing is close."""
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(sorted(known))}"


def _rebuild(kind: type[RaypipeError], what: str, got: Any, rule: str, fix: str) -> RaypipeError:
    return kind(what, got=got, rule=rule, fix=fix)
