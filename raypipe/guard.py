"""Runs a verb in a child process, so that its parent can report every way in which it may end.

No `except` sees some endings: Ray ends a process that has lost its cluster from C++, the kernel
kills one that takes too much memory, and SIGTERM ends one that has no handler. The parent only
waits, forwards signals and keeps the exit code, so it survives all of them.

The protocol:

1. The parent blocks the signals in FORWARDED and SIGCHLD, makes a pipe and forks.
2. The child restores the signal mask, asks the kernel to be killed with its parent, and works.
3. The parent sleeps in sigwaitinfo. It forwards each signal to the child, but not one from the
   terminal, which the kernel sends to both. SIGCHLD: look whether the child has ended.
4. The child writes one line of JSON into the pipe before it ends: {"code": N} by `report_code`
   once its message is out, or {"lost": TEXT} by `abort`. The first line counts.
5. With a code, the parent returns it. Otherwise it prints TEXT, or the reason that it reads from
   the child's status, and ends by the same signal as the child, as shells expect.

It costs a fork before anything heavy is imported (2 ms) and no memory of its own. A process that
has threads already (a notebook, Databricks' runner) is not forked: verbs run there directly. So
they do where signals cannot be waited for (macOS).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
FROM_KERNEL = 128  # si_code of a key on the terminal; the kernel signals the child as well
AGAIN = "Run the same command again to go on."
PR_SET_PDEATHSIG = 1

_pipe: int | None = None  # in the child: the end of the pipe that it writes to


def guarded(work: Callable[[], int]) -> int:
    """Run `work` in a child process and return its exit code; print why if it ends without one.

    If a signal ended the child, it ends this process as well.
    """
    if not _can_fork():
        return work()
    # Blocked signals wait until `_wait` takes them; none can end this process unseen.
    read, write = os.pipe()
    signals = {getattr(signal, name) for name in FORWARDED} | {signal.SIGCHLD}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(read)
        _begin_child(write, mask, parent)
        return work()

    os.close(write)
    status = _wait(child, signals)
    report = _read_report(read)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if "code" in report:
        # A crash after that, while Python and Ray shut down, does not change the result.
        return int(report["code"])
    _print(report.get("lost") or _reason(status))
    if os.WIFSIGNALED(status):
        _end_by(os.WTERMSIG(status))
    return 1


def report_code(code: int) -> int:
    """In the child: all messages are out, and this is the exit code. Returns the code."""
    _send({"code": code})
    return code


def began() -> float | None:
    """`time.monotonic` when this command's process began; None in a process that is not guarded.

    That one may be a notebook, which began long before its first call.
    """
    if _pipe is None:
        return None
    # Not at the top: who only shows --help does not need it.
    import psutil  # type: ignore[import-untyped]

    age_s = time.time() - psutil.Process(os.getppid()).create_time()
    return time.monotonic() - max(0.0, age_s)


def abort(reason: str) -> None:
    """End this process at once, because what it needs is gone.

    It may be called from any thread: the main thread may wait without end for what is gone.
    """
    if _pipe is None:
        _print(reason)
    _send({"lost": reason})
    os._exit(1)


def _can_fork() -> bool:
    if threading.current_thread() is not threading.main_thread() or threading.active_count() > 1:
        return False
    return hasattr(signal, "sigwaitinfo") and "DATABRICKS_RUNTIME_VERSION" not in os.environ


def _begin_child(write: int, mask: Any, parent: int) -> None:
    """Tie the child's life to its parent's, and restore the signal mask."""
    global _pipe
    _pipe = write
    die_with(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def die_with(parent: int) -> None:
    """From now on the kernel kills this process when `parent`, its parent, has ended."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before prctl.
    if os.getppid() != parent:
        os._exit(1)


def _wait(child: int, signals: set[signal.Signals]) -> int:
    """Forward signals until the child has ended; returns its status."""
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        received = signal.sigwaitinfo(signals)
        if received.si_signo != signal.SIGCHLD and received.si_code != FROM_KERNEL:
            with suppress(ProcessLookupError):
                os.kill(child, received.si_signo)


def _end_by(number: int) -> None:
    """End this process by the signal that ended the child, if it is one that people send."""
    if number not in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL):
        return
    # SIGKILL has no handler that could be removed.
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _send(report: dict[str, Any]) -> None:
    if _pipe is not None:
        with suppress(OSError):
            os.write(_pipe, json.dumps(report).encode() + b"\n")


def _read_report(read: int) -> dict[str, Any]:
    """The child's first line, or {}.

    It does not wait for the end of the pipe: Ray's processes may hold it open.
    """
    os.set_blocking(read, False)
    # The child has ended, so its line is in the pipe already.
    with suppress(BlockingIOError):
        lines = os.read(read, 65536).decode().splitlines()
        return json.loads(lines[0]) if lines else {}
    return {}


def _reason(status: int) -> str:
    """The message for a child that ended without a report."""
    if not os.WIFSIGNALED(status):
        code = os.WEXITSTATUS(status)
        why = "Ray ends a process that has lost its Ray cluster"
        return f"The process ended with exit code {code} and without a message ({why}). {AGAIN}"
    number = signal.Signals(os.WTERMSIG(status))
    why = {
        signal.SIGKILL: ": by somebody, or by the kernel for want of memory",
        signal.SIGTERM: ": somebody asked it to end",
        signal.SIGHUP: ": its terminal is gone",
        signal.SIGABRT: ": Ray ends a process that has lost its Ray cluster",
    }.get(number, "")
    return f"The process was ended by {number.name}{why}. {AGAIN}"


def _print(text: str) -> None:
    with suppress(OSError, ValueError):
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")  # show the cursor, which a progress bar had hidden
        print(f"raypipe: {text}", file=sys.stderr, flush=True)
