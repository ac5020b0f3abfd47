"""A cell of a ledger in a process of its own, for test_ledger.py: succeeds, dies or hangs."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from benchmarks.ledger import asked_of, write_result

asked = asked_of(Path(sys.argv[2]))
folder = Path(asked["folder"])
(folder / "pid").write_text(str(os.getpid()))
how = asked["config"]["how"]
if how == "die":
    (folder / "result.json").write_text('{"val": ')  # half of a result
    os.kill(os.getpid(), signal.SIGKILL)
if how == "hang":
    time.sleep(600)
write_result(folder, {"val": 0.5, "test": 0.4, "curve": [[1.0, 0.5]]})
