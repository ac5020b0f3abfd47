"""Try something that may run out of memory, in a process of its own.

A CUDA context that has run out of memory keeps its fragments, and the kernel kills a process that
outgrows the host's memory. A new process has neither problem. Starting one costs some seconds
(importing torch), so `find_batch_size` asks rarely.

The process reports by its exit code: 0: it fits; 3: memory ran out; SIGKILL: the kernel killed it;
4: another error, whose text comes through a pipe.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from raypipe.errors import RaypipeError, one_line

_FITS, _TOO_LARGE, _FAILED = 0, 3, 4


def in_process(work: Callable[[int], None], timeout_s: float = 120.0) -> Callable[[int], bool]:
    """`fits` for find_batch_size: does `work(batch_size)` fit into memory? A new process tries it.

    `work` must be picklable. False when memory ran out, also when the kernel killed the process for
    it. Raises RaypipeError when it failed for another reason or did not end in time: a smaller
    batch would not help.
    """

    def fits(batch_size: int) -> bool:
        # Not a fork, which would share the parent's CUDA context.
        context = multiprocessing.get_context("spawn")
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(work, batch_size, send), daemon=True)
        process.start()
        send.close()
        process.join(timeout_s)
        # It did not end in time.
        if process.is_alive():
            process.kill()
            process.join()
            raise RaypipeError(
                "The probe did not end",
                got=f"batch of {batch_size}",
                rule=f"It has {timeout_s:g} s",
            )
        # It ended by itself: its exit code says how.
        if process.exitcode == _FITS:
            return True
        if process.exitcode in (_TOO_LARGE, -signal.SIGKILL):
            return False
        if process.exitcode == _FAILED and receive.poll():
            reason = receive.recv()
        else:
            reason = f"exit code {process.exitcode}"
        raise RaypipeError(f"The probe failed: {reason}", got=f"batch of {batch_size}")

    return fits


def _run(work: Callable[[int], None], batch_size: int, send: Connection) -> None:
    try:
        work(batch_size)
    except Exception as e:
        if ran_out(e):
            raise SystemExit(_TOO_LARGE) from None
        send.send(one_line(f"{type(e).__name__}: {e}", 400))
        raise SystemExit(_FAILED) from None


def ran_out(error: BaseException) -> bool:
    """Did memory run out? On a CPU torch raises a RuntimeError that says so."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return "can't allocate memory" in str(error)
