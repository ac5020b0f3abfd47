"""What an exception that nobody caught means to the user: one message, whatever it was."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress

from raypipe.errors import RaypipeError, hidden

AGAIN = "Run the same command again: what was finished is kept"


def report(error: BaseException) -> int:
    """Print why a verb ends, in one message on stderr; returns the exit code."""
    code, text = said(error)
    with suppress(OSError, ValueError):
        print(f"raypipe: {hidden(text)}", file=sys.stderr, flush=True)
    return code


def said(error: BaseException) -> tuple[int, str]:
    """The exit code and the message. Our own mistakes keep their traceback, above the message."""
    known = find_own(error) or _of_machine(error) or _of_ray(error)
    if known is not None:
        return known.exit_code, str(known)
    if any(isinstance(e, KeyboardInterrupt) or type(e).__name__ == "Abort" for e in chain(error)):
        return 1, "Interrupted. Run the same command again to go on."
    if hasattr(error, "format_message") and type(error).__module__.startswith(("click", "typer")):
        return 2, f"{error.format_message()} See raypipe --help."
    # What a library says may be an address with a password.
    print(hidden("".join(traceback.format_exception(error))), file=sys.stderr, end="")
    kind, words = type(error).__name__, " ".join(str(error).split())[:300]
    return (
        1,
        f"{kind}: {words} This is a mistake of raypipe's: please report it with the lines above.",
    )


def find_own(error: BaseException | None) -> RaypipeError | None:
    """The RaypipeError inside what Ray wrapped around it on its way from a worker."""
    for e in chain(error):
        if isinstance(e, RaypipeError):
            own = getattr(
                e, "cause", e
            )  # Ray's dual exceptions carry the original, without the worker's traceback
            return own if isinstance(own, RaypipeError) else e
    return None


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those that it came from, in this process or a worker."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = getattr(error, "cause", None) or error.__cause__ or error.__context__


def _of_machine(error: BaseException) -> RaypipeError | None:
    """A full disk, a closed pipe, a forbidden file, no memory: the machine's, and the user can help."""
    for e in chain(error):
        got = getattr(e, "filename", None)
        if isinstance(e, BrokenPipeError):
            _mute()
            return RaypipeError("Whoever read this command's output has gone", fix=AGAIN)
        if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT):
            return RaypipeError("The disk is full", got=got, fix=f"Make room. {AGAIN}")
        if isinstance(e, OSError) and e.errno == errno.EROFS:
            return RaypipeError(
                "The disk may not be written", got=got, fix="Set run.dir and table.uri elsewhere"
            )
        if isinstance(e, PermissionError):
            return RaypipeError("A file may not be opened", got=got, rule=e.strerror or "")
        if isinstance(e, OSError) and e.errno in (errno.EMFILE, errno.ENFILE):
            return RaypipeError("Too many files are open", fix="Raise `ulimit -n`")
        if isinstance(e, MemoryError):
            return RaypipeError(
                "The memory is full", rule=str(e), fix="Take smaller batches or fewer workers"
            )
    return None


def _of_ray(error: BaseException) -> RaypipeError | None:
    """A worker, an actor, a node or the cluster that was lost, and not by a mistake in the work itself."""
    exceptions = sys.modules.get("ray.exceptions")
    if exceptions is None:
        return None
    for e in chain(error):
        if isinstance(e, exceptions.RayError) and not isinstance(e, exceptions.RayTaskError):
            words = " ".join(str(e).split())[:300]
            return RaypipeError(
                f"The Ray cluster lost what this needs: {type(e).__name__}: {words}", fix=AGAIN
            )
    return None


def _mute() -> None:
    """What is still in stdout's buffer has no reader: Python would complain once more when it ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
