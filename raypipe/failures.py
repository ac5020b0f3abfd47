"""Turns any exception that ends a verb into one message for the user and an exit code."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from raypipe.errors import ClusterError, ConfigError, RaypipeError, hidden, one_line
from raypipe.timer import is_alarm

AGAIN = "Run the same command again: what was finished is kept"
# By MLflow's name for an answer, as 401, 403, 429 and 503: what it says, and the way out.
_REFUSED = {
    "UNAUTHENTICATED": ("does not know who asks", f"Renew the token. {AGAIN}"),
    "CUSTOMER_UNAUTHORIZED": ("does not know who asks", f"Renew the token. {AGAIN}"),
    "PERMISSION_DENIED": ("does not allow this", f"Ask for the permission. {AGAIN}"),
    "REQUEST_LIMIT_EXCEEDED": ("is asked too often", f"Wait. {AGAIN}"),
    "RESOURCE_LIMIT_EXCEEDED": ("is asked too often", f"Wait. {AGAIN}"),
    "RESOURCE_EXHAUSTED": ("is asked too often", f"Wait. {AGAIN}"),
    "TEMPORARILY_UNAVAILABLE": ("is not ready", f"Wait. {AGAIN}"),
}
DOCTOR = "`raypipe doctor` looks for the cause."
# The system's words, and SQLite's.
_FULL = os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), "database or disk is full"


_sigterm_came: list[bool] = []


def note_sigterm() -> None:
    """Remember from now on that SIGTERM came; what handles it stays.

    Ray's handler raises SystemExit wherever Python is, and a library may make another error of it
    (torch: a ValueError).
    """
    handler = signal.getsignal(signal.SIGTERM)
    is_main = threading.current_thread() is threading.main_thread()
    if not callable(handler) or not is_main:
        return

    def noted(number: int, frame: FrameType | None) -> None:
        _sigterm_came.append(True)
        handler(number, frame)

    signal.signal(signal.SIGTERM, noted)


@contextmanager
def on_sigterm(act: Callable[[], None]) -> Iterator[None]:
    """While the block runs, SIGTERM calls `act` and does not end the process.

    Python sets signal handlers in the main thread only; in other threads nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(number: int, frame: FrameType | None) -> None:
        act()

    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def report(error: BaseException) -> int:
    """Print on stderr why a verb ends; returns the exit code."""
    code, text = explain(error)
    with suppress(OSError, ValueError):
        print(f"raypipe: {hidden(text)}", file=sys.stderr, flush=True)
    return code


def explain(error: BaseException) -> tuple[int, str]:
    """The exit code and the message.

    An exception that is none of the known cases is a mistake of raypipe's. Its traceback is
    printed on stderr, above the message.
    """
    known = find_own(error) or of_machine(error) or _of_ray(error) or _of_mlflow(error)
    if known is not None:
        # The doctor looks at tokens, addresses, memory and disks.
        advice = f" {DOCTOR}" if isinstance(known, ClusterError) else ""
        return known.exit_code, f"{known}{advice}"
    if any(_is_ctrl_c(e) for e in chain(error)):
        return 1, "Interrupted. Run the same command again to go on."
    # Ray's handler of SIGTERM, in force since Ray was started here.
    is_end = any(isinstance(e, SystemExit) and e.code == signal.SIGTERM for e in chain(error))
    if is_end or _sigterm_came:
        return 1, f"SIGTERM asked this process to end. {AGAIN}."
    # A wrong command line, in click's words.
    if hasattr(error, "format_message") and type(error).__module__.startswith(("click", "typer")):
        return 2, f"{error.format_message()} See raypipe --help."
    # A library's message may quote an address with a password.
    print(hidden("".join(traceback.format_exception(error))), file=sys.stderr, end="")
    # Ray's own text is the worker's traceback: what it wraps says more in a line.
    inner = getattr(error, "cause", None) or error
    kind = type(inner).__name__
    advice = "This is a mistake of raypipe's: please report it with the lines above."
    return 1, f"{kind}: {one_line(inner)} {advice}"


def find_own(error: BaseException | None) -> RaypipeError | None:
    """The RaypipeError inside what Ray wrapped around it on its way from a worker."""
    for e in chain(error):
        if isinstance(e, RaypipeError):
            # Ray's dual exceptions carry the original, without the worker's traceback.
            own = getattr(e, "cause", e)
            return own if isinstance(own, RaypipeError) else e
    return None


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, its cause, the cause's cause and so on, in this process or a worker."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = getattr(error, "cause", None) or error.__cause__ or error.__context__


def _is_ctrl_c(error: BaseException) -> bool:
    # click.Abort is Ctrl-C at a prompt. An alarm is one of a budget.
    is_interrupt = isinstance(error, KeyboardInterrupt) and not is_alarm(error)
    return is_interrupt or type(error).__name__ == "Abort"


def of_machine(error: BaseException) -> RaypipeError | None:
    """An error of the machine that the user can mend: a full disk, a closed pipe, no memory."""
    for e in chain(error):
        if isinstance(e, BrokenPipeError):
            mute_stdout()
            return RaypipeError("The reader of this command's output has gone", fix=AGAIN)
        if isinstance(e, MemoryError):
            fix = "Take smaller batches or fewer workers"
            return RaypipeError("The memory is full", rule=str(e), fix=fix)
        if _says_full(e):
            return RaypipeError("The disk is full", got=one_line(e), fix=f"Make room. {AGAIN}")
        if isinstance(e, RuntimeError) and "home directory" in str(e):
            what = "This machine does not know the home folder of this user, or of a path with ~"
            return ConfigError(what, fix="Set HOME, or write the whole path")
        if isinstance(e, OSError):
            known = _of_os(e)
            if known is not None:
                return known
    return None


def _says_full(error: BaseException) -> bool:
    """Does it say in words alone that a disk is full? So do torch's file store, shutil where it
    copies a folder, and MLflow with its database in a file."""
    library = type(error).__module__.partition(".")[0]
    is_one = library in ("mlflow", "sqlalchemy", "sqlite3")
    is_one |= isinstance(error, RuntimeError | shutil.Error)
    return is_one and any(words in str(error) for words in _FULL)


def _of_os(error: OSError) -> RaypipeError | None:
    file = error.filename
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RaypipeError("The disk is full", got=file, fix=f"Make room. {AGAIN}")
    if "No usable temporary directory" in str(error):
        return RaypipeError(
            "There is no folder for temporary files",
            got=one_line(error).partition(" found in ")[2],
            rule="One of these has room, and may be written",
            fix=f"Make room, or set TMPDIR. {AGAIN}",
        )
    if error.errno == errno.EROFS:
        fix = "Set run.dir and table.uri elsewhere"
        return RaypipeError("The disk may not be written", got=file, fix=fix)
    if isinstance(error, PermissionError):
        fix, rule = "Mend its rights, or run as a user who may", error.strerror or ""
        return RaypipeError("A file may not be opened", got=file, rule=rule, fix=fix)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return RaypipeError("Too many files are open", fix="Raise `ulimit -n`")
    return None


def _of_ray(error: BaseException) -> RaypipeError | None:
    """A worker, an actor, a node or the cluster was lost, not by a mistake in the work itself."""
    # Without Ray in this process, no exception is Ray's: do not import it for this.
    exceptions = sys.modules.get("ray.exceptions")
    if exceptions is None:
        return None
    for e in chain(error):
        if isinstance(e, exceptions.ObjectStoreFullError | exceptions.OutOfDiskError):
            return RaypipeError(
                "Ray's object store is full, and so is the disk that takes what does not fit",
                rule="Its memory is /dev/shm, its disk that of Ray's temporary folder, /tmp/ray",
                fix="Make room there, or give Ray more memory: cluster.object_store_mb of a "
                f"cluster that starts here, `ray start --object-store-memory`. {AGAIN}",
            )
        if isinstance(e, exceptions.RayError) and not isinstance(e, exceptions.RayTaskError):
            lost = f"{type(e).__name__}: {one_line(e)}"
            # Ray does not say why a worker crashed. With a full /tmp/ray it cannot even log.
            crashed = isinstance(e, exceptions.WorkerCrashedError)
            cause = "Mostly its node has no memory or no disk left: `raypipe doctor` looks at both"
            return RaypipeError(
                f"The Ray cluster lost what this needs: {lost}",
                rule=cause if crashed else "",
                fix=AGAIN,
            )
    return None


def _of_mlflow(error: BaseException) -> RaypipeError | None:
    """MLflow's server does not answer, or it refuses who asks."""
    # Without MLflow in this process, no exception is MLflow's.
    mlflow, requests = (sys.modules.get(n) for n in ("mlflow.exceptions", "requests.exceptions"))
    if mlflow is None or requests is None:
        return None
    found = list(chain(error))
    # RetryError: its answers were of kind 5xx.
    lost = (requests.ConnectionError, requests.Timeout, requests.RetryError)
    ours = [e for e in found if isinstance(e, mlflow.MlflowException)]
    refused = [e for e in ours if e.error_code in _REFUSED]
    if refused:
        what, fix = _REFUSED[refused[0].error_code]
        return RaypipeError(f"MLflow's server {what}: {one_line(refused[0])}", fix=fix)
    if not ours or not any(isinstance(e, lost) for e in found):
        return None
    # "API request to http://… failed with exception …"
    reason = str(ours[0]).partition(" failed with")[0]
    return RaypipeError(
        f"MLflow's server does not answer any more: {one_line(reason)}",
        fix=f"{AGAIN}, and is logged and registered then",
    )


def mute_stdout() -> None:
    """Send stdout to /dev/null.

    Its buffer holds text that nobody can read. Python would complain about it once more at exit.
    """
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
