"""Errors a user can act on.

Every message has four parts: what is wrong, the value we got, the rule it breaks, and the way out. They cross Ray actors,
so each one pickles from its four parts. Anything that is not a `RaypipeError` is our own mistake and keeps its traceback.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any


class RaypipeError(Exception):
    """Work that failed for a reason we can name. Exit code 1."""

    exit_code = 1

    def __init__(self, what: str, *, got: Any = None, rule: str = "", fix: str = "") -> None:
        self.what, self.got, self.rule, self.fix = what, got, rule, fix
        got_text = "" if got is None else f" (got {got!r})"
        parts = (what + got_text, rule, fix)
        super().__init__(" ".join(p if p.endswith(("?", "!")) else p.rstrip(".") + "." for p in parts if p))

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
