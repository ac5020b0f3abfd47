"""A cell of a ledger in a process of its own, for test_ledger.py: it succeeds or fails."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from pathlib import Path

from benchmarks.ledger import Line, run_cell
from raypipe.errors import DataError


def measured(asked: Line) -> Line:
    folder = Path(asked["folder"])
    (folder / "pid").write_text(str(os.getpid()))
    how = asked["config"]["how"]
    if how == "raise":
        atexit.register(print, "Ray says goodbye")
        raise DataError("Nothing is there", got="/some/where/deep", fix="Look\nagain")
    if how == "die":
        (folder / "result.json").write_text('{"val": ')  # half of a result
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        time.sleep(600)
    return {"val": 0.5, "test": 0.4, "curve": [[1.0, 0.5]]}


run_cell(Path(sys.argv[2]), measured)
