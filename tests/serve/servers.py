"""Starts MLflow's servers on loopback, and ends them with all of their processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raypipe.registry import made_whole


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def mlflow(*arguments: str, ready: str, log: Path) -> Iterator[str]:
    """The address of `mlflow ARGUMENTS`, once its path `ready` answers."""
    for address in arguments:
        # The server would make its tables step by step.
        if address.startswith("sqlite:///"):
            made_whole.make_whole(address)
    port = free_port()
    command = [sys.executable, "-m", "mlflow", *arguments]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    # Its jobs are seven processes more, of 240 MB each, that nothing here asks for.
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with log.open("wb") as out:
        server = subprocess.Popen(
            command, env=environment, stdout=out, stderr=out, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            assert server.poll() is None, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{address}{ready}", timeout=5)
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
        yield address
    finally:
        # The server and its own processes, which are a group.
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
