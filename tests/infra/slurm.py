"""A SLURM cluster of this machine: slurmctld, two slurmd, munged, each a child of this process.

    with Slurm(folder) as slurm:
        job = slurm.submit("train", config)
        assert slurm.ended(job, 300) == ("COMPLETED", 0)

All files lie in `folder`, all ports on loopback. Both nodes are this host, so they share its /tmp.
Debian's package slurm-wlm is installed if it is missing.
"""

from __future__ import annotations

import getpass
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

SCRIPT = Path(__file__).parents[2] / "infra" / "ray" / "slurm" / "raypipe.sh"
DAEMONS = ("munged", "slurmctld", "slurmd")
NODES = ("odd-node.1", "odd-node.2")  # a dot and a dash, which lists of nodes have meanings near
CPUS = 4  # of a node, as it says; this machine may have fewer


def install() -> None:
    """slurm-wlm and munge, from Debian. Fails if they cannot be installed."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    if all(shutil.which(name, path=path) for name in DAEMONS):
        return
    sudo = [] if os.geteuid() == 0 else ["sudo", "-n"]
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (
        ["update", "-qq"],
        ["install", "-y", "-qq", "--no-install-recommends", "slurm-wlm", "munge"],
    ):
        done = subprocess.run([*sudo, "apt-get", *words], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-500:]


def _ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    for each in held:
        each.bind(("127.0.0.1", 0))
    found = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return found


class Slurm:
    """folder: of all its files; jobs run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environment = Path(sys.executable).parents[1]
        self.env = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": os.environ["HOME"],
            "LANG": "C.UTF-8",
            "SLURM_CONF": str(folder / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
            "RAYPIPE_ENV": str(environment),
        }
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Slurm:
        install()
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text(self._config())
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(256))
        try:
            munge = [
                f"--{name}-file={self.folder}/munge.{name}"
                for name in ("key", "pid", "log", "seed")
            ]
            self._start(
                "munged", *munge, f"--socket={self.folder}/munge.sock", "--force", "--foreground"
            )
            self._start("slurmctld", "-D", "-c")
            for node in NODES:
                self._start("slurmd", "-D", "-N", node)
            self._wait_until_idle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for daemon in reversed(self._daemons.values()):
            daemon.send_signal(signal.SIGCONT)
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _config(self) -> str:
        host, user = socket.gethostname(), getpass.getuser()
        control, *ports = _ports(3)
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS}"
            for node, port in zip(NODES, ports, strict=True)
        )
        # No cgroups, no accounting: what a container has. config_overrides: CPUs as they say.
        return f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={self.folder}/munge.sock
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool-%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""

    def _start(self, program: str, *words: str) -> None:
        name = f"{program}-{words[-1]}"
        log = (self.folder / f"{name}.out").open("wb")
        self._daemons[name] = subprocess.Popen(
            [program, *words], env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        time.sleep(0.3)  # munged makes its socket

    def _wait_until_idle(self) -> None:
        until = time.monotonic() + 60
        while self.run("sinfo", "-h", "-o", "%T %D").split() != ["idle", str(len(NODES))]:
            assert all(daemon.poll() is None for daemon in self._daemons.values()), self._said()
            assert time.monotonic() < until, self._said()
            time.sleep(0.3)

    def _said(self) -> str:
        return "\n".join(path.read_text()[-800:] for path in self.folder.glob("*.out"))

    @contextmanager
    def stopped(self, node: str) -> Iterator[None]:
        """A node that answers nobody, as long as the block runs."""
        daemon = self._daemons[f"slurmd-{node}"]
        daemon.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            daemon.send_signal(signal.SIGCONT)

    def run(self, *words: str) -> str:
        """A command of SLURM; its output."""
        done = subprocess.run(words, env=self.env, cwd=self.folder, capture_output=True, text=True)
        return done.stdout + done.stderr

    def submit(self, *words: str, options: tuple[str, ...] = (), **env: str | None) -> str:
        """`sbatch OPTIONS raypipe.sh WORDS`; the job's number. env: None unsets a variable."""
        whole = {key: value for key, value in (self.env | env).items() if value is not None}
        done = subprocess.run(
            ["sbatch", "--parsable", *options, str(SCRIPT), *words],
            env=whole,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    def log(self, job: str) -> str:
        """What the job has printed; nothing yet if it has not begun."""
        path = self.folder / f"raypipe-{job}.log"
        return path.read_text("utf-8", "replace") if path.exists() else ""

    def wait_for(self, job: str, text: str, limit_s: float) -> None:
        """Until the job's log has `text`."""
        until = time.monotonic() + limit_s
        while not re.search(text, self.log(job)):
            assert time.monotonic() < until, self.log(job)[-3000:]
            time.sleep(0.2)

    def ended(self, job: str, limit_s: float) -> tuple[str, int]:
        """Wait for its end; its state and exit code."""
        until = time.monotonic() + limit_s
        while True:
            shown = self.run("scontrol", "show", "job", job)
            found = re.search(r"JobState=(\w+).*?ExitCode=(\d+):", shown, re.DOTALL)
            assert found, shown
            if found[1] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
                return found[1], int(found[2])
            assert time.monotonic() < until, f"{shown}\n{self.log(job)[-3000:]}"
            time.sleep(0.3)


def left_of(job: str) -> list[str]:
    """Processes and folders that a job left: none, if it ended well."""
    mark = f"/tmp/raypipe-{job}-"
    found = [str(path) for path in Path("/tmp").glob(f"raypipe-{job}-*")]
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            inside = environment.get("SLURM_JOB_ID") == job or any(
                mark in word for word in process.cmdline()
            )
        except psutil.Error:
            continue
        if inside and process.status() != psutil.STATUS_ZOMBIE:
            found.append(" ".join(process.cmdline())[:200])
    return found
