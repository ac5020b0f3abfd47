"""Builds a sidecar on this node: a virtual environment of pinned wheels, layered over the core.

The wheels come from an archive (`archive.py`), where one is named, else from the package index that
pip knows. With an archive pip sees no index and no setting of the node: what is built depends on
the archive alone.

A sidecar lives in `$RAYPIPE_HOME/sidecars` (default `~/.cache/raypipe/sidecars`). Its folder's name
holds a hash of its pins, the Python version and the core's location: wherever its wheels came from,
it is built once. A folder gets that name only when it is complete. Cost, measured on 2 cores from a
local index: fastdup 20 s and 0.7 GB, alibi 24 s and 0.5 GB.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from raypipe import stores
from raypipe.cluster.sidecars import pip
from raypipe.cluster.sidecars.pins import here, pins
from raypipe.errors import FullDisk, RaypipeError

LOG = logging.getLogger("raypipe")
BUILD_LIMIT_S = 1800
# Where nodes take the archive, unless cluster.sidecars says so.
ARCHIVE = "RAYPIPE_SIDECARS"

# The import that each sidecar is for; it proves that the sidecar works. Alibi Detect 0.11.4 needs
# pydantic 1, with which Ray 2.60 refuses to run. So it gets the copy of version 1 inside the core's
# pydantic 2. It also wants a function that scipy removed in 1.12, which Python 3.13 has.
PROBES = {
    "fastdup": "import fastdup",
    "alibi": "import scipy.stats; vars(scipy.stats).setdefault('binom_test', None);"
    "import pydantic.v1.fields, sys; m = sys.modules; m['pydantic'] = m['pydantic.v1'];"
    "m['pydantic.fields'] = m['pydantic.v1.fields']; import alibi_detect.cd",
}

# Set before the worker's first import. At import, fastdup starts Sentry and asks the package index
# for newer versions; transformers, which Alibi Detect imports, may ask a model hub. Sidecars
# compute on the CPU and leave GPUs alone.
QUIET = {
    "SENTRY_OPT_OUT": "1",
    "FASTDUP_PRODUCTION": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "MPLBACKEND": "Agg",
    "CUDA_VISIBLE_DEVICES": "",
}
_INSTALL = "install", "--no-deps", "--no-compile", "--only-binary", ":all:"


@dataclass(frozen=True)
class Source:
    """Where the wheels come from.

    archive: its address; "": the one that the node's own environment names, else an index. index:
    pip's variables, for a node that has no index of its own; they may hold a password.
    """

    archive: str = ""
    index: Mapping[str, str] = field(default_factory=dict, repr=False)


def home() -> Path:
    """The folder of all sidecars of this node."""
    cache = Path(os.environ.get("RAYPIPE_HOME") or Path.home() / ".cache" / "raypipe")
    return cache.expanduser().absolute() / "sidecars"


def place(name: str) -> Path:
    """The folder of sidecar `name` on this node, whether it is there or not.

    Raises ConfigError if there is no such sidecar, or none for this Python.
    """
    inputs = [*pins(name, here()), platform.python_version(), platform.machine(), *_core_sites()]
    digest = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:12]
    return home() / f"{name}-{digest}"


def interpreter(name: str) -> Path | None:
    """The interpreter of sidecar `name`; None if it has to be built. Raises as `place` does."""
    found = place(name) / "bin" / "python"
    # `exists` follows the link, so it is False too if the base Python has been removed.
    return found if found.exists() else None


def ensure(name: str, source: Source | None = None) -> Path:
    """The interpreter of sidecar `name` on this node; the sidecar is built if it is missing.

    Raises as `place` does, and RaypipeError if it cannot be built.
    """
    target = place(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.with_name(f"{target.name}.lock")
    found = interpreter(name)
    if found:
        return found
    try:
        with FileLock(lock, timeout=BUILD_LIMIT_S):
            # Another process may have built it while this one waited.
            return interpreter(name) or _build(name, target, source or Source())
    except Timeout:
        raise RaypipeError(
            f"Another process has been building the sidecar {name} for {BUILD_LIMIT_S} s",
            fix=f"Look for a hanging pip, then remove {lock.name} in {target.parent}",
        ) from None


def damage(name: str, limit_s: float) -> str:
    """Why the built sidecar `name` does not work, or "". It is tried as after its building.

    Raises subprocess.TimeoutExpired.
    """
    try:
        pip.run([str(place(name) / "bin" / "python"), "-c", PROBES[name]], QUIET, limit_s)
    except pip.Failed as e:
        return pip.tail(str(e), 1)
    return ""


def _build(name: str, target: Path, source: Source) -> Path:
    """Build the sidecar in `TARGET.partial`, test it, and rename it to `target`."""
    started = time.monotonic()
    archive = source.archive or os.environ.get(ARCHIVE, "")
    origin = "its archive" if archive else "the package index"
    LOG.info("building the sidecar %s from %s: about half a minute, once per node", name, origin)
    partial = target.with_name(target.name + ".partial")
    wheels = target.with_name(target.name + ".wheels")
    # Leftovers of a killed build, or a sidecar whose base Python has been removed.
    _clear(partial, wheels, target)
    try:
        if archive:
            arguments, settings = _from_archive(name, archive, wheels), pip.NO_FILES
        else:
            arguments, settings = pins(name, here()), _index(source)
        python = str(partial / "bin" / "python")
        with _explained(name, bool(archive)):
            pip.run([sys.executable, "-m", "venv", "--without-pip", str(partial)])
            pip.pip(["--python", python, *_INSTALL, *arguments], settings)
            # After pip, which would take the core's packages for the sidecar's own.
            _layer(partial)
            # One import proves that the pins work here, and compiles the modules in use: 4-7 s.
            # pip would compile all files, in 15 s.
            pip.run([python, "-c", PROBES[name]], QUIET)
        # bin/python and pyvenv.cfg name the base Python, so they still work after the move.
        # Scripts in bin would not.
        partial.rename(target)
    finally:
        _clear(partial, wheels)
    LOG.info("built the sidecar %s in %.0f s", name, time.monotonic() - started)
    return target / "bin" / "python"


def _clear(*folders: Path) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _from_archive(name: str, address: str, folder: Path) -> list[str]:
    """Take the sidecar's wheels out of the archive; returns what pip installs them by."""
    # Not at the top: a sidecar's own worker, which imports this file, needs no archive.
    from raypipe.cluster.sidecars import archive
    from raypipe.cluster.sidecars.manifest import WHEELS

    with archive.opened(address) as found:
        found.require(name, here())
        found.extract(name, folder)
    wheels = str(folder / WHEELS)
    offline = [pip.ALONE, "--no-index", "--find-links", wheels]
    return [*offline, "--require-hashes", "-r", str(folder / f"{name}.txt")]


def _index(source: Source) -> dict[str, str]:
    """The driver's index, where this node has none of its own."""
    return dict(source.index) if source.index and not pip.index() else {}


def _layer(folder: Path) -> None:
    """Show the core's packages behind the sidecar's own."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    own_sites = folder / "lib" / version / "site-packages"
    # addsitedir also reads editable installs.
    lines = [f"import site; site.addsitedir({path!r})\n" for path in _core_sites()]
    (own_sites / "_core.pth").write_text("".join(lines), encoding="utf-8")


def _core_sites() -> list[str]:
    """The folders of the core's installed packages."""
    folders = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    return [folder for folder in folders if Path(folder).is_dir()]


@contextmanager
def _explained(name: str, is_archive: bool) -> Iterator[None]:
    """Turn a failed process, or a full disk, into one message."""
    try:
        yield
    except (pip.Failed, OSError) as e:
        if stores.is_full(e):
            rule = f"It takes up to 1 GB in {home()}"
            fix = f"{stores.MAKE_ROOM} (RAYPIPE_HOME)"
            raise FullDisk(f"The sidecar {name} cannot be built", rule=rule, fix=fix) from None
        if isinstance(e, OSError):
            raise
        fix = (
            "The archive is whole. See that this node has glibc 2.31, and a disk with 1 GB"
            if is_archive
            else "pip must be installed and reach a package index: set PIP_INDEX_URL to your "
            f"mirror, or {ARCHIVE} to an archive of `raypipe sidecars pack`; and see that the "
            "disk has 1 GB"
        )
        raise RaypipeError(f"The sidecar {name} cannot be built:\n{e}", fix=fix) from None
