"""Machines on this one: Linux namespaces with a network, a temporary folder, processes and a name
of their own.

    with Lan(shared) as lan:
        one = lan.machine("one")
        two = lan.machine("two")
        one.run("ray", "start", "--head", …)

A machine sees nothing of another one's /tmp, /dev/shm, home and processes, and nothing of the
driver's that runs the tests. The folder `shared` is the same everywhere. The machines reach each
other over a bridge, at 10.77.0.0/24, which exists in these namespaces alone; no route leads out.

What ends them: the kernel ends all processes of a machine with its first one, and the first one
with the process that made the `Lan`, however that ends. Network and mounts go with the processes.

It needs root. `missing()` says what else is not here.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import psutil

ROOT = Path(__file__).parents[1]
NETWORK = "10.77.0."
HOME = "/tmp/home"
TOOLS = "ip", "unshare", "nsenter"
PR_SET_PDEATHSIG = 1
UP_S = 20.0

# The first process of a machine: it hides what it must not see, and then reaps orphans.
FIRST = r"""
set -e
mount --bind "$SHARED" /mnt
mount -t tmpfs -o mode=1777 tmpfs /tmp
mkdir -p "$SHARED"
mount --move /mnt "$SHARED"
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mkdir -p -m 700 "$HOME/.ray"
(umask 077; printf %s "$TOKEN" > "$HOME/.ray/auth_token")
unset TOKEN
echo "$HOSTS" > /tmp/hosts
mount --bind /tmp/hosts /etc/hosts
hostname "$NAME"
ip link set lo up
touch /tmp/up
while true; do sleep 1000; done
"""


def missing() -> str:
    """Why there can be no machines here; "": there can."""
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"no {', '.join(absent)}"
    inside = "ip link add name br0 type bridge"
    try_it = ["unshare", "--net", "--mount", "--pid", "--fork", "sh", "-c", inside]
    done = subprocess.run(try_it, capture_output=True, text=True)
    return done.stderr.strip()


@dataclass
class Machine:
    """name: of the host. address: on the bridge. pid: of its first process, as it is seen here."""

    name: str
    address: str
    pid: int
    _shell: subprocess.Popen[bytes] = field(repr=False)

    def path(self, inside: str) -> Path:
        """A path of the machine, as this process can read it."""
        return Path(f"/proc/{self.pid}/root{inside}")

    def command(self, *words: str) -> list[str]:
        """Runs `words` in the machine."""
        enter = ["nsenter", f"--target={self.pid}", "--net", "--mount", "--pid", "--ipc", "--uts"]
        return [*enter, f"--wdns={HOME}", "--", *words]

    def popen(
        self, *words: str, env: Mapping[str, str] | None = None, log: Path | None = None
    ) -> subprocess.Popen[str]:
        """Start a command in the machine; its output goes to `log`, or is piped."""
        out = subprocess.PIPE if log is None else log.open("wb")
        err = subprocess.PIPE if log is None else subprocess.STDOUT
        environment = self.environment() | (env or {})
        return subprocess.Popen(
            self.command(*words),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            text=True,
            env=environment,
        )

    def run(
        self, *words: str, env: Mapping[str, str] | None = None, timeout_s: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the machine; returns its exit code and output."""
        process = self.popen(*words, env=env)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            _kill_below(process)
            out, err = process.communicate()
            raise AssertionError(f"{words} took {timeout_s:.0f} s\n{out}\n{err}") from None
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def environment(self) -> dict[str, str]:
        """Of a user who has logged in: nothing of the tests' own environment."""
        path = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
        own = {"HOME": HOME, "PATH": path, "PYTHONPATH": str(ROOT), "LANG": "C.UTF-8"}
        return own | {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}

    def listens(self, port: int, wait_s: float = 60.0) -> None:
        """Wait until a server of this machine listens on the port."""
        probe = f"until (exec 3<>/dev/tcp/{self.address}/{port}) 2>/dev/null; do sleep 0.1; done"
        self.run("bash", "-c", probe, timeout_s=wait_s)

    def processes(self) -> list[psutil.Process]:
        """All processes of the machine but the first one and what it waits for."""
        space = Path(f"/proc/{self.pid}/ns/pid").readlink()
        found = []
        for process in psutil.process_iter():
            try:
                own = Path(f"/proc/{process.pid}/ns/pid").readlink() == space
            except OSError:
                continue
            is_first = process.pid == self.pid or process.name() == "sleep"
            if own and not is_first and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    def unplug(self) -> None:
        """Nothing leaves or reaches the machine any more, and nobody is told."""
        subprocess.run(self.command("ip", "link", "set", "eth0", "down"), check=True)

    def kill(self) -> None:
        """SIGKILL for all of its processes at once."""
        with_it = psutil.Process(self.pid)
        with_it.kill()
        self._shell.wait(30)


class Lan:
    """A network with machines. shared: a folder that is the same on all of them."""

    def __init__(self, shared: Path) -> None:
        self._shared = shared
        self._token = secrets.token_hex(32)
        self._machines: list[Machine] = []
        self._names: list[str] = []

    def __enter__(self) -> Lan:
        self.store = self._boot("store", 1)
        _in(self.store, "ip", "link", "add", "br0", "type", "bridge")
        _in(self.store, "ip", "addr", "add", f"{self.store.address}/24", "dev", "br0")
        _in(self.store, "ip", "link", "set", "br0", "up")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for machine in self._machines:
            if machine._shell.poll() is None:
                machine.kill()

    def machine(self, name: str) -> Machine:
        """A machine of this name, on the network."""
        number = 10 + len(self._machines)
        found = self._boot(name, number)
        cable = f"to-{name}"
        pair = ("type", "veth", "peer", "name", "eth0", "netns", str(found.pid))
        subprocess.run(
            ["nsenter", f"--target={self.store.pid}", "--net", "ip", "link", "add", cable, *pair],
            check=True,
        )
        _in(self.store, "ip", "link", "set", cable, "master", "br0", "up")
        _in(found, "ip", "addr", "add", f"{found.address}/24", "dev", "eth0")
        _in(found, "ip", "link", "set", "eth0", "up")
        return found

    def _boot(self, name: str, number: int) -> Machine:
        address = f"{NETWORK}{number}"
        spaces = ["--net", "--mount", "--pid", "--ipc", "--uts", "--mount-proc"]
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": HOME,
            "NAME": name,
            "SHARED": str(self._shared),
            "TOKEN": self._token,
            "HOSTS": f"127.0.0.1 localhost\n{address} {name}",
        }
        shell = subprocess.Popen(
            ["unshare", *spaces, "--fork", "--kill-child", "bash", "-c", FIRST],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            preexec_fn=_die_with_parent,
        )
        until = time.monotonic() + UP_S
        while True:
            below = psutil.Process(shell.pid).children()
            if below and Path(f"/proc/{below[0].pid}/root/tmp/up").exists():
                break
            if shell.poll() is not None or time.monotonic() > until:
                shell.kill()
                raise AssertionError(f"{name} does not start: {shell.communicate()[1]!r}")
            time.sleep(0.02)
        found = Machine(name, address, below[0].pid, shell)
        self._machines.append(found)
        return found


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _in(machine: Machine, *words: str) -> None:
    done = machine.run(*words, timeout_s=20)
    assert done.returncode == 0, f"{words}: {done.stderr}"


def _kill_below(process: subprocess.Popen[str]) -> None:
    """End a command in a machine: nsenter passes no signal on."""
    for below in psutil.Process(process.pid).children(recursive=True):
        below.kill()
    process.kill()
