"""Processes that keep and send records and kill themselves at one step. Run by test_kills.py.

python -m tests.monitor.killed_sinks FOLDER ENDPOINT FIRST LAST

For each number it forks a child that fills a spool while the service is down, then sends, and dies
before (even) or after (odd) the step NUMBER // 2. A step is a rename, a removal, a write of the
spool, or a request. A second child then delivers what is left. One JSON line a number says what was
kept, and whether the child died.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raypipe.config import RunConfig, validate
from raypipe.monitor import ingestion, sender, spool, streams
from raypipe.monitor.monitor import Monitor
from raypipe.monitor.settings import AzureMonitorConfig
from tests.ingestion_server import RULE

RECORDS = 60
LONG = "m" * 7_000
SPOOL_MB = 0.25  # holds half of them; a setting has 1 or more


def opened(folder: Path, endpoint: str, number: int, every_s: float = 60) -> Monitor:
    given = {"type": "azure_monitor", "endpoint": endpoint, "rule": RULE}
    given |= {"token_env": "RAYPIPE_TEST_TOKEN", "every_s": every_s, "within_s": 5}
    cfg = validate(AzureMonitorConfig, given).model_copy(update={"spool_mb": SPOOL_MB})
    run = RunConfig(name=f"step{number}", dir=str(folder / f"step{number}"))
    return Monitor(run, cfg, "serve")


def die_at(number: int) -> None:
    """Kill this process at its step `number // 2`."""
    steps = itertools.count()

    def with_step(work: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            is_now = next(steps) == number // 2
            if is_now and number % 2 == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            result = work(*args, **kwargs)
            if is_now:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    for name in ("rename", "replace", "unlink", "write_bytes"):
        setattr(Path, name, with_step(getattr(Path, name)))
    spool._Open.append = with_step(spool._Open.append)  # type: ignore[method-assign]
    ingestion.Ingestion.send = with_step(ingestion.Ingestion.send)  # type: ignore[method-assign]


def work(folder: Path, endpoint: str, number: int, kept: int) -> None:
    is_down = True
    real = ingestion.Ingestion.send

    def send(self: Any, *args: Any) -> None:
        if is_down:
            raise ingestion.Again("down", answered=True)
        real(self, *args)

    ingestion.Ingestion.send = send  # type: ignore[method-assign]
    die_at(number)
    monitor = opened(folder, endpoint, number, every_s=0.02)
    for record in range(RECORDS):
        monitor.note(streams.SERVING, {"RecordId": f"{number}-{record}", "Model": LONG})
        os.pwrite(kept, b"%4d" % (record + 1), 0)
    is_down = False
    monitor.close()


def in_a_child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(3)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


if __name__ == "__main__":
    where, address = Path(sys.argv[1]), sys.argv[2]
    ingestion.require()
    sender.FIRST_PAUSE_S = 0.02
    # A busy machine must not send records into memory: there would be fewer steps.
    spool._TURN_S = 60.0
    for step in range(int(sys.argv[3]), int(sys.argv[4])):
        file = os.open(where / f"kept{step}", os.O_RDWR | os.O_CREAT)
        status = in_a_child(lambda at=step, to=file: work(where, address, at, to))  # type: ignore
        again = in_a_child(lambda at=step: opened(where, address, at).close())  # type: ignore
        counted = int(os.pread(file, 4, 0) or b"0")
        os.close(file)
        died = os.WIFSIGNALED(status)
        left = [p.name for p in where.glob(f"step{step}/sinks/*/1/*-*-*.*")]
        said = {"step": step, "died": died, "kept": counted, "again": again, "left": left}
        print(json.dumps(said | {"status": status}), flush=True)
