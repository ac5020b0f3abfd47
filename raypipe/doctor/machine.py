"""Checks of this machine: Python, memory, disks, limits, ports, what is sent home."""

from __future__ import annotations

import errno
import importlib.metadata
import locale
import os
import platform
import re
import resource
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from raypipe.cluster import container
from raypipe.doctor.finding import Asked, Finding, ok
from raypipe.errors import one_line

GIB = 2**30
# Two workers that train a small model, Ray and the driver took 3.4 GiB.
LEAST_MEMORY, GOOD_MEMORY = 2 * GIB, 4 * GIB
LEAST_DISK, GOOD_DISK = 1 * GIB, 5 * GIB
# Docker's default is 64 MiB.
GOOD_SHM = 1 * GIB
# Ray takes so much of the memory for its object store, if nobody says how much.
OF_MEMORY = 0.3
LEAST_FILES, GOOD_FILES = 1024, 4096
# Linux takes at most 107 characters as the path of a socket. Ray's are RAY_TMPDIR/ray/, then these.
LONGEST_SOCKET = 107
OWN_PART = "/ray/session_2026-11-24_16-55-29_123456_1234567/sockets/plasma_store"
DASHBOARD = 8265
# What stands in the command line of Ray's dashboard, and of a replica of raypipe serve.
OF_DASHBOARD = re.compile(r"/ray/dashboard/dashboard\.py$")
OF_SERVER = re.compile(r"^ray::ServeReplica:raypipe-\w+:replica")
# Raypipe sets these where they are missing; a value of the user's own wins.
TELEMETRY = {
    "RAY_USAGE_STATS_ENABLED": ("0", "false"),
    "MLFLOW_DISABLE_TELEMETRY": ("true", "1"),
    "HF_HUB_DISABLE_TELEMETRY": ("1", "true", "yes", "on"),
}


def python(asked: Asked) -> Sequence[Finding]:
    """Is this a Python that raypipe's package takes?"""
    # Not at the top: only this check and `packages` need it.
    from packaging.specifiers import SpecifierSet

    version = platform.python_version()
    try:
        bounds = importlib.metadata.metadata("raypipe")["Requires-Python"] or ""
    except importlib.metadata.PackageNotFoundError:
        # The code lies on the path, as a job's folder does, and no package says what it needs.
        rule = "Which Python and packages raypipe needs stands in its installed package"
        way_out = "make install, or python -m pip install raypipe"
        return [Finding("python", "warn", f"{version}; raypipe is not installed", rule, way_out)]
    if version in SpecifierSet(bounds, prereleases=True):
        return [ok("python", f"{version} on {platform.machine()}")]
    rule = f"raypipe is made for Python {bounds}"
    way_out = "Make an environment of another Python: make PYTHON=python3.11 install"
    return [Finding("python", "fail", version, rule, way_out)]


def text(asked: Asked) -> Sequence[Finding]:
    """Do files and names hold any letter?"""
    encoding = locale.getpreferredencoding(False)
    if encoding.lower().replace("-", "") == "utf8":
        return [ok("text", encoding)]
    rule = "Labels and paths hold letters that this encoding lacks; libraries open files with it"
    return [Finding("text", "warn", encoding, rule, "export PYTHONUTF8=1")]


def memory(asked: Asked) -> Sequence[Finding]:
    """Is there enough memory, and may this container use it?"""
    host, most = container.host_memory(), container.usable_memory()
    seen = f"{_gib(most)} of memory"
    if most < host:
        seen = f"the container may use {_gib(most)} of the host's {_gib(host)}"
    # Ray would start, and the kernel would kill its workers later.
    wanted = (asked.settings.cluster.object_store_mb or 0) * 2**20
    if wanted > most / 2:
        rule = "Half of the memory is for the workers"
        way_out = f"Set cluster.object_store_mb={int(most * OF_MEMORY / 2**20)}"
        seen += f", and cluster.object_store_mb takes {_gib(wanted)}"
        return [Finding("memory", "fail", seen, rule, way_out)]
    if most >= GOOD_MEMORY:
        return [ok("memory", seen)]
    rule = f"Ray, a driver and two workers take about {_gib(GOOD_MEMORY)}"
    way_out = "Raise the container's limit (docker run --memory 8g; resources.limits.memory)"
    if most == host:
        way_out = "Set cluster.cpus=1 and a small train.batch_size, or use a larger machine"
    return [Finding("memory", "fail" if most < LEAST_MEMORY else "warn", seen, rule, way_out)]


def shared_memory(asked: Asked) -> Sequence[Finding]:
    """Does Ray's object store fit into /dev/shm?"""
    folder = Path("/dev/shm")
    if not folder.exists():
        return [ok("/dev/shm", "this system has none; Ray uses its temporary folder")]
    free = shutil.disk_usage(folder).free
    set_mb = asked.settings.cluster.object_store_mb
    wanted = set_mb * 2**20 if set_mb else GOOD_SHM
    seen = f"{_gib(free)} free"
    if free >= wanted:
        return [ok("/dev/shm", seen)]
    if set_mb:
        seen += f", and cluster.object_store_mb={set_mb}"
    rule = "Ray keeps its object store there; what does not fit goes to a disk, which is slow"
    way_out = (
        "docker run --shm-size=4g (a volume of medium Memory at /dev/shm in Kubernetes), "
        f"or set cluster.object_store_mb={max(80, int(free * 0.8 / 2**20))}"
    )
    return [Finding("/dev/shm", "fail" if set_mb else "warn", seen, rule, way_out)]


def disks(asked: Asked) -> Sequence[Finding]:
    """Is there room where Ray, the sidecars and the run write?"""
    places = {
        "Ray's temporary folder": ray_folder(),
        "the cache of raypipe": Path(os.environ.get("RAYPIPE_HOME") or Path.home() / ".cache"),
    }
    if asked.has_config:
        places["run.dir"] = asked.settings.run.path
    return [_disk(name, existing(place)) for name, place in places.items()]


def _disk(name: str, folder: Path) -> Finding:
    usage = shutil.disk_usage(folder)
    seen = f"{_gib(usage.free)} free in {folder}"
    name = f"disk of {name}"
    if usage.free >= GOOD_DISK and usage.free > usage.total * 0.05:
        return ok(name, seen)
    way_out = "Make room there, or set run.dir to another disk"
    if name.endswith("temporary folder"):
        way_out = "Make room there, or set RAY_TMPDIR to another disk"
    elif name.endswith("raypipe"):
        way_out = "Make room there, or set RAYPIPE_HOME to another disk"
    if usage.free < LEAST_DISK:
        rule = f"A run needs {_gib(LEAST_DISK)} at least: checkpoints, logs, sidecars"
        return Finding(name, "fail", seen, rule, way_out)
    rule = f"{_gib(GOOD_DISK)} are comfortable, and Ray writes nothing to a disk that is 95 % full"
    return Finding(name, "warn", seen, rule, way_out)


def ray_folder() -> Path:
    """Where Ray keeps its sessions: the same rule as Ray's own, without importing it."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp")


def existing(folder: Path) -> Path:
    """The folder itself or the nearest one above it that exists."""
    folder = folder.expanduser().absolute()
    return next(each for each in (folder, *folder.parents) if _is_folder(each))


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False  # we may not look, or no file can have this name


def sockets(asked: Asked) -> Sequence[Finding]:
    """Is the path of Ray's sockets short enough?"""
    length = len(str(ray_folder())) + len(OWN_PART)
    if length <= LONGEST_SOCKET:
        return [ok("sockets", f"{length} characters in the longest path")]
    rule = f"A socket's path has at most {LONGEST_SOCKET} characters: Ray does not start"
    seen = f"{length} characters below {ray_folder()}"
    return [Finding("sockets", "fail", seen, rule, "export RAY_TMPDIR=/tmp")]


def open_files(asked: Asked) -> Sequence[Finding]:
    """May processes open as many files as Ray does?"""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= GOOD_FILES or soft == resource.RLIM_INFINITY:
        return [ok("open files", f"up to {soft:,}" if soft >= 0 else "no limit")]
    rule = "Ray opens a connection to each worker and each node"
    enough = f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}"
    seen = f"up to {soft:,}"
    if soft < LEAST_FILES:
        return [Finding("open files", "fail", seen, rule, enough)]
    return [Finding("open files", "warn", seen, rule, enough)]


def telemetry(asked: Asked, environment: Mapping[str, str] | None = None) -> Sequence[Finding]:
    """Do libraries report home from here?"""
    environment = os.environ if environment is None else environment
    on = []
    for name, off in TELEMETRY.items():
        value = environment.get(name)
        if value is not None and value.lower() not in off:
            on.append(f"{name}={value}")
    if not on:
        return [ok("telemetry", "off")]
    rule = "raypipe turns it off, but keeps a value that you set yourself"
    way_out = "unset " + " ".join(each.partition("=")[0] for each in on)
    return [Finding("telemetry", "warn", ", ".join(on), rule, way_out)]


def ports(asked: Asked) -> Sequence[Finding]:
    """Are the ports of Ray's dashboard and of `raypipe serve` free?"""
    serve = asked.settings.serve
    setting = "ray start --dashboard-port"
    dashboard = _port("port of the dashboard", "127.0.0.1", DASHBOARD, setting, OF_DASHBOARD)
    served = _port("port of serve", serve.host, serve.port, "serve.port", OF_SERVER)
    # Ray's dashboard takes the next free port. Without a configuration nobody is about to serve.
    return [_at_most_warn(dashboard), served if asked.has_config else _at_most_warn(served)]


def _at_most_warn(finding: Finding) -> Finding:
    return replace(finding, state="warn") if finding.state == "fail" else finding


def _port(name: str, host: str, port: int, setting: str, expected: re.Pattern[str]) -> Finding:
    """expected: found in a word of the command line of those who may have the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as tried:
        # As servers do: connections that were closed a moment ago do not count.
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
            return ok(name, f"{port} is free")
        except OSError as e:
            why = one_line(e.strerror or e)
            is_taken = e.errno == errno.EADDRINUSE
    if not is_taken:
        # A port below 1024, or an address of another machine.
        rule = "A server listens at an address of its own machine, at a port that its user may take"
        way_out = f"Choose another one: {setting}=…, or the host"
        return Finding(name, "fail", f"{host}:{port} cannot be used: {why}", rule, way_out)
    command = _holder(port)
    # Its id, program and script. Later words may hold secrets of that program.
    holder = " ".join(Path(word).name for word in command[:3]) or "another user's process"
    if any(expected.search(word) for word in command):
        return ok(name, f"{port} is taken by {holder}")
    rule = f"Whoever asks for {host}:{port} reaches that program ({why})"
    way_out = f"Stop it, or choose another port: {setting}={_free_port(host)}"
    return Finding(name, "fail", f"{port} is taken by {holder}", rule, way_out)


def _holder(port: int) -> list[str]:
    """The process that listens on a port: its id and its command line; [] if it is hidden."""
    import psutil  # type: ignore[import-untyped]

    try:
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN
            if listens and connection.laddr.port == port and connection.pid:
                return [f"process {connection.pid}", *psutil.Process(connection.pid).cmdline()]
    except psutil.Error:
        pass
    return []


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as tried:
        tried.bind((host, 0))
        return int(tried.getsockname()[1])


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:,.0f} MiB"
