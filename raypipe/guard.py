"""No verb ends without a word: the work runs in a child process, and its parent says what the child could not.

Ray ends a process that has lost its Ray cluster from C++, the kernel ends one that takes too much
memory, and SIGTERM ends one that does not listen: no `except` sees any of that. The parent does
nothing but wait, hand signals on and keep the exit code, so it outlives all of them. It costs a
fork before anything heavy is imported (2 ms) and no memory of its own.

A process that has threads already (a notebook, Databricks' runner) is not forked: verbs run there
as they are. So they do where signals cannot be waited for (macOS).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

HANDED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
FROM_KERNEL = 128  # si_code: a key on the terminal, which the child has heard as well
AGAIN = "Run the same command again to go on."
PR_SET_PDEATHSIG = 1

_pipe: int | None = None  # the child's way to its parent


def guarded(work: Callable[[], int]) -> int:
    """Run `work` in a child process and return its exit code; when it ends without one, say why.

    A child that a signal ended takes this process along by the same signal, as shells expect.
    """
    if not _can_fork():
        return work()
    read, write = os.pipe()
    numbers = {getattr(signal, name) for name in HANDED_ON} | {signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(read)
        _begin(write, before, parent)
        return work()
    os.close(write)
    status = _wait(child, numbers)
    told = _told(read)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if "code" in told:  # what breaks while Python and Ray take themselves down is nobody's result
        return int(told["code"])
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    _say(told.get("lost") or _reason(status))
    if number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL):
        signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
        os.kill(os.getpid(), number)
    return 1


def ended(code: int) -> int:
    """The child's last word: whatever there was to say has been said. Returns the code."""
    _tell({"code": code})
    return code


def lost(what: str) -> None:
    """End this process at once, because what it needs is gone and the main thread may wait for it for ever."""
    if _pipe is None:
        _say(what)
    _tell({"lost": what})
    os._exit(1)


def _can_fork() -> bool:
    here = threading.current_thread() is threading.main_thread() and threading.active_count() == 1
    return (
        here and hasattr(signal, "sigwaitinfo") and "DATABRICKS_RUNTIME_VERSION" not in os.environ
    )


def _begin(write: int, mask: Any, parent: int) -> None:
    """In the child: it ends with its parent, and has the signal mask that its parent had."""
    global _pipe
    _pipe = write
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _wait(child: int, numbers: set[signal.Signals]) -> int:
    """Hand signals on until the child has ended; returns its status."""
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        heard = signal.sigwaitinfo(numbers)
        if heard.si_signo != signal.SIGCHLD and heard.si_code != FROM_KERNEL:
            with suppress(ProcessLookupError):
                os.kill(child, heard.si_signo)


def _tell(what: dict[str, Any]) -> None:
    if _pipe is not None:
        with suppress(OSError):
            os.write(_pipe, json.dumps(what).encode() + b"\n")


def _told(read: int) -> dict[str, Any]:
    """The child's first word. Ray's processes may hold the pipe open, so nobody waits for its end."""
    os.set_blocking(read, False)
    with suppress(BlockingIOError):
        lines = os.read(read, 65536).decode().splitlines()
        return json.loads(lines[0]) if lines else {}
    return {}


def _reason(status: int) -> str:
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


def _say(text: str) -> None:
    with suppress(OSError, ValueError):
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")  # a moving bar had hidden the cursor
        print(f"raypipe: {text}", file=sys.stderr, flush=True)
