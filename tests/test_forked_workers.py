"""Workers of the tests' cluster are forks, and as good as others."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from . import forked_workers


class Worker:
    def told(self) -> dict[str, Any]:
        return {
            "is_fork": Path(f"/proc/{os.getppid()}/comm").read_text().strip() != "raylet",
            "server": os.environ[forked_workers.SERVER],
            "pid": os.getpid(),
            "drawn": float(np.random.random()),
            "ended": subprocess.run([sys.executable, "-c", "raise SystemExit(3)"]).returncode,
            "hears_of_children": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
            "folder": str(Path.cwd()),
            "address": os.environ["RAY_ADDRESS"],
        }


@pytest.mark.usefixtures("ray_session")
def test_workers_are_forks_that_share_nothing(tmp_path: Path) -> None:
    kind = ray.remote(num_cpus=0)(Worker)
    began = time.monotonic()
    server = Path(ray.get(kind.remote().told.remote())["server"])
    while not server.exists():
        assert time.monotonic() - began < 60, Path(f"{server}.log").read_text()
        time.sleep(0.1)
    # At most two processes were waiting for work.
    actors = [kind.remote() for _ in range(5)]
    told = ray.get([actor.told.remote() for actor in actors])
    forks = [one for one in told if one["is_fork"]]
    assert len(forks) >= 3
    for name in ("pid", "drawn"):
        assert len({one[name] for one in told}) == 5
    for one in forks:
        assert one["ended"] == 3 and one["hears_of_children"]
        assert one["folder"] == str(Path.cwd()) and one["address"] == os.environ["RAY_ADDRESS"]
    # What has an environment of its own imports what that has.
    own = kind.options(runtime_env={"env_vars": {"PYTHONPATH": str(tmp_path)}}).remote()
    assert not ray.get(own.told.remote())["is_fork"]


def test_a_folder_may_have_a_long_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket's path has at most 107 characters; a long TMPDIR has more."""
    path = tmp_path / ("long" * 40) / "forks"
    path.parent.mkdir()
    monkeypatch.setenv(forked_workers.SERVER, str(path))
    assert not forked_workers.asked(), "nobody listens yet"

    def answer() -> None:
        asking, _ = server.accept()
        with asking:
            _, files, _, _ = socket.recv_fds(asking, forked_workers.MOST_BYTES, 3)
            asking.send(b"y")
        for file in files:
            os.close(file)

    with forked_workers.listening(path) as server, ThreadPoolExecutor() as threads:
        server.settimeout(10)
        answered = threads.submit(answer)
        assert forked_workers.asked()
        answered.result()
