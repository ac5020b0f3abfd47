"""Spark on this machine for tests: its environment, and which processes are a test's.

What a test starts inherits a mark in its environment, by which it is found again, whoever has
become its parent. Ray's workers and agents overwrite theirs with their titles: they are found while
they have parents.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from raypipe.cluster import spark_session
from raypipe.cluster.watch import lives
from raypipe.errors import ClusterError

ROOT = Path(__file__).parents[1]
MASTER = "local-cluster[2,2,2048]"
MARK = "RAYPIPE_TEST_MARK"


def require_spark() -> Any:
    """pyspark; skips a module's tests where it or its Java is missing."""
    pyspark = pytest.importorskip("pyspark", reason="pip install 'raypipe[spark]'")
    try:
        spark_session.require_java()
    except ClusterError as e:
        pytest.skip(str(e), allow_module_level=True)
    # Else Spark starts the `python3` of PATH: another one, where no environment is activated.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return pyspark


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "SPARK_HOME")}
    bin = Path(sys.executable).parent
    return kept | {
        "PATH": f"{bin}{os.pathsep}{kept['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_SUBMIT_ARGS": f"--master {MASTER} --conf spark.log.level=OFF pyspark-shell",
        "RAY_AUTH_MODE": "token",
        **more,
    }


def marked(mark: str) -> set[psutil.Process]:
    """All processes that live and carry the mark, and what lives below them."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found |= {process, *process.children(recursive=True)}
    return set(filter(lives, found))


def seconds_until_gone(mark: str, limit_s: float, known: Iterable[psutil.Process] = ()) -> float:
    """known: more processes, which may have lost mark and parents."""
    began = time.monotonic()
    while left := marked(mark) | set(filter(lives, known)):
        if time.monotonic() - began > limit_s:
            raise AssertionError([process.as_dict(["pid", "cmdline"]) for process in left])
        time.sleep(0.2)
    return time.monotonic() - began


def executor_of(pid: int) -> psutil.Process:
    """The Spark executor, a Java process, that a process descends from."""
    for process in psutil.Process(pid).parents():
        if any("CoarseGrainedExecutorBackend" in word for word in process.cmdline()):
            return process
    raise AssertionError(f"{pid} has no executor")


def verb(
    *arguments: str, master: str = MASTER, cwd: Path = ROOT, **more: str
) -> tuple[int, str, str, str]:
    """A verb that starts Spark itself. Returns its exit code, stdout, stderr and its mark."""
    mark = uuid.uuid4().hex
    given = f"--master {master} pyspark-shell"
    done = subprocess.run(
        [sys.executable, "-m", "raypipe", *arguments],
        env=environment(**{MARK: mark, "PYSPARK_SUBMIT_ARGS": given, **more}),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
    )
    return done.returncode, done.stdout, done.stderr, mark


def one_message(err: str, said: str) -> bool:
    """One line of raypipe's holds it, and nobody's traceback is shown."""
    lines = [line for line in err.splitlines() if line.startswith("raypipe:")]
    assert len(lines) == 1 and "Traceback" not in err, err
    assert re.search(said, lines[0]), lines
    return True
