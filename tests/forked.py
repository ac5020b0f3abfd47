"""Processes of raypipe's code that begin at once, for tests that need another process.

`python -c "from raypipe…"` takes two to five seconds of CPU for imports. Here one server of each
process of tests imports once what most of them need, and forks for each call: the new process has
these modules, and the environment, the folder, the arguments and the standard streams of whoever
asked. It begins as `python -c CODE ARGUMENTS` does, and may be killed like any other.

Not for tests of what is imported, nor for code that uses Ray: Ray reads its switches once a
process.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
IMPORTED = (
    *("mlflow.store.model_registry.sqlalchemy_store", "mlflow.store.tracking.sqlalchemy_store"),
    *("raypipe.registry.follow", "raypipe.registry.promote", "raypipe.registry.mlflow_model"),
    *("raypipe.watch.calls", "raypipe.watch.cycle", "raypipe.watch.sinks"),
    *("raypipe.train.trainer", "raypipe.train.unseen", "databricks.sdk", "pytest"),
)
# `python SCRIPT ARGUMENTS`
SCRIPT = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
_server: list[Server] = []


class Process:
    """What tests use of a subprocess.Popen."""

    def __init__(self, channel: socket.socket, stdout: IO[str], stderr: IO[str]) -> None:
        self.stdout, self.stderr = stdout, stderr
        self.returncode: int | None = None
        # Two lines come through it: the number of the process, and how it ended.
        self._channel = channel
        self.pid = self._number()

    def _number(self) -> int:
        line = b""
        while not line.endswith(b"\n"):
            read = self._channel.recv(1)
            assert read, "the server of forked processes has ended"
            line += read
        return int(line)

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.001)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._channel.settimeout(timeout)
            try:
                self.returncode = self._number()
            except TimeoutError:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0) from None
            self._channel.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Its output, which must be shorter than a pipe holds."""
        self.wait(timeout)
        with self.stdout, self.stderr:
            return self.stdout.read(), self.stderr.read()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """A process that forks: `Process` for each `start`."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="forked-")
        self._address = str(Path(self._folder.name) / "socket")
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(self._address)
            listening.listen(50)
            command = [sys.executable, "-m", "tests.forked", str(listening.fileno())]
            self._process = subprocess.Popen(
                command, cwd=ROOT, pass_fds=[listening.fileno()], stdin=subprocess.PIPE
            )

    def start(
        self, code: str, arguments: Sequence[str], env: Mapping[str, str], folder: str
    ) -> Process:
        channel = socket.socket(socket.AF_UNIX)
        channel.connect(self._address)
        out, err = os.pipe(), os.pipe()
        given = json.dumps((code, list(arguments), dict(env), folder)).encode()
        socket.send_fds(channel, [len(given).to_bytes(8, "big")], [out[1], err[1]])
        channel.sendall(given)
        os.close(out[1])
        os.close(err[1])
        return Process(channel, os.fdopen(out[0]), os.fdopen(err[0]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def start(
    code: str, *arguments: object, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Process:
    """Begin `python -c CODE ARGUMENTS` with raypipe's modules loaded."""
    if not _server:
        _server.append(Server())
        atexit.register(_server[0].close)
    words = [str(each) for each in arguments]
    return _server[0].start(code, words, os.environ if env is None else env, str(cwd or Path.cwd()))


def run(
    code: str,
    *arguments: object,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """The same until its end. Its output must be shorter than a pipe holds."""
    process = start(code, *arguments, env=env, cwd=cwd)
    out, err = process.communicate(timeout)
    return subprocess.CompletedProcess(["-c"], process.wait(), out, err)


# --- in the server


def _serve(listening: socket.socket) -> None:
    # The processes that wait for the forked ones end on their own.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # Standard input ends with the process of the tests.
    while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
        channel, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _fork_and_wait(channel)
            os._exit(0)
        channel.close()


def _fork_and_wait(channel: socket.socket) -> None:
    """Begin what was asked for, tell its number, and how it ended."""
    size, streams, _, _ = socket.recv_fds(channel, 8, 2)
    given = b""
    while len(given) < int.from_bytes(size, "big"):
        given += channel.recv(2**20)
    pid = os.fork()
    if pid == 0:
        channel.close()
        _become(*json.loads(given), streams)
    for stream in streams:
        os.close(stream)
    channel.sendall(f"{pid}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(OSError):
        channel.sendall(f"{code}\n".encode())


def _become(
    code: str, arguments: list[str], env: dict[str, str], folder: str, streams: list[int]
) -> None:
    """Run the code as a process of its own would, to its end."""
    for number, stream in enumerate([os.open(os.devnull, os.O_RDONLY), *streams]):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["-c", *arguments]
    sys.path[0] = folder
    status = 0
    try:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        # What the interpreter does at its end, which never comes: the caller is the server's code.
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    from raypipe.cluster import connect
    from tests.forked_workers import load

    connect.prepare_environment()
    load(IMPORTED)
    # Or each forked process would print it again.
    sys.stdout.flush()
    _serve(socket.socket(fileno=int(sys.argv[1])))
