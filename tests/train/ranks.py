"""Processes that form a gloo group, for tests of what several ranks do together.

They are forked from a server that has imported torch once, so no test waits for that import again.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

MEETING_S = 60.0


def start(
    work: Callable[..., None], arguments: tuple[Any, ...], world: int, limit_s: float = 300.0
) -> None:
    """Run `work(rank, *arguments)` in each of `world` processes of a gloo group.

    Raises a rank's exception. Raises TimeoutError, with every rank's stack, if they take longer
    than `limit_s`. Ranks that do not meet within a minute are started again, twice: the meeting is
    torch's part. In CI two ranks once hung for ten minutes without a word; the cause is unknown.
    """
    multiprocessing.set_forkserver_preload(["torch", "raypipe.train.worker"])
    for last in (False, False, True):
        with tempfile.TemporaryDirectory() as folder:
            given = (work, arguments, world, limit_s, folder, dict(os.environ))
            ranks = mp.start_processes(  # type: ignore[no-untyped-call]
                _rank, given, world, join=False, start_method="forkserver"
            )
            started = time.monotonic()
            while not ranks.join(timeout=1):
                waited_s = time.monotonic() - started
                met = all(Path(folder, f"met-{rank}").exists() for rank in range(world))
                if waited_s < (limit_s if met else MEETING_S):
                    continue
                _stop(ranks.processes)
                if met or last:
                    stacks = [f"rank {rank}\n{_stack(folder, rank)}" for rank in range(world)]
                    what = "did not end" if met else "did not meet"
                    raise TimeoutError(
                        "\n".join([f"{world} ranks {what} in {waited_s:.0f} s", *stacks])
                    )
                break
            else:
                return


def _rank(
    rank: int,
    work: Callable[..., None],
    arguments: tuple[Any, ...],
    world: int,
    limit_s: float,
    folder: str,
    environment: dict[str, str],
) -> None:
    # Not stderr: it is the server's, which another test may have started.
    # The file stays open as long as the rank lives.
    stack = Path(folder, f"stack-{rank}").open("w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, stack)
    os.environ.clear()  # the server's is of the time when it started
    os.environ.update(environment)
    torch.set_num_threads(1)
    # gloo's own patience counts for the meeting too: on a busy host ranks are born far apart.
    timeout = timedelta(seconds=max(limit_s, MEETING_S))
    dist.init_process_group(
        "gloo", f"file://{folder}/meeting", rank=rank, world_size=world, timeout=timeout
    )
    Path(folder, f"met-{rank}").touch()
    work(rank, *arguments)
    dist.destroy_process_group()


def _stack(folder: str, rank: int) -> str:
    path = Path(folder, f"stack-{rank}")
    return path.read_text() if path.exists() else "never began"


def _stop(processes: list[Any]) -> None:
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(1)  # they write their stacks
    for process in processes:
        process.kill()
        process.join()
