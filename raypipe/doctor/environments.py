"""Checks of what raypipe starts beside itself: sidecars, compiled operators, Java for Spark."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from raypipe import torch_cache
from raypipe.cluster import sidecar
from raypipe.cluster.sidecars import build
from raypipe.doctor.finding import Asked, Finding, Mend, State, of_error, ok, skipped
from raypipe.doctor.process import Died, ask
from raypipe.errors import RaypipeError, one_line

IMPORT_S = 60.0
ARCHIVE_S = 30.0
# pyspark 4 needs it.
JAVA = 17
# Their versions are the sidecars' own; on PYTHONPATH the core's would come first.
PINNED = "numpy", "PIL", "pandas"


def fastdup(asked: Asked) -> Sequence[Finding]:
    """Does the sidecar of fastdup work?"""
    return [_sidecar("fastdup", asked)]


def alibi(asked: Asked) -> Sequence[Finding]:
    """Does the sidecar of Alibi Detect work?"""
    return [_sidecar("alibi", asked)]


def _sidecar(name: str, asked: Asked) -> Finding:
    called = f"sidecar {name}"
    try:
        folder = build.place(name)
    except RaypipeError as e:
        # What does not need it works.
        return of_error(called, e, "warn")
    # Ray hands PYTHONPATH on to the sidecar's worker.
    shadowed = [
        f"{entry}/{each}" for entry in _python_path() for each in PINNED if _in(entry, each)
    ]
    if shadowed:
        rule = "PYTHONPATH comes before the sidecar's own packages, which are older on purpose"
        way_out = "unset PYTHONPATH, or leave that folder out of it"
        return Finding(called, "fail", f"PYTHONPATH holds {shadowed[0]}", rule, way_out)
    if not (folder / "bin" / "python").exists():
        return _not_built(called, name, folder, asked)
    # The import that proved it when it was built.
    try:
        problem = build.damage(name, IMPORT_S)
    except subprocess.TimeoutExpired:
        rule = "It is imported as after its building, which takes seconds"
        seen = f"no answer within {IMPORT_S:g} s, from {folder}"
        return Finding(called, "warn", seen, rule, "Look again when this machine is less busy")
    if not problem:
        return ok(called, str(folder))

    def rebuild() -> None:
        shutil.rmtree(folder)
        _ensure(name, asked)

    rule = "It was whole when it was built: a package in it was removed or changed since"
    mend = Mend(f"removes {folder} and builds it again", rebuild)
    way_out = f"rm -r {shlex.quote(str(folder))}; {_command(asked)}"
    return Finding(called, "fail", f"damaged: {problem}", rule, way_out, mend)


def _not_built(called: str, name: str, folder: Path, asked: Asked) -> Finding:
    """It is built at first use, if its archive or an index gives out the wheels."""
    address = _archive(asked)
    try:
        if address:
            ask("raypipe.cluster.sidecars.archive:look", ARCHIVE_S, address=address, name=name)
    except RaypipeError as e:
        return of_error(called, e)
    except Died as e:
        rule = "The wheels come from the archive that cluster.sidecars or RAYPIPE_SIDECARS names"
        way_out = "Check its address, the network, and the credentials in the environment"
        return Finding(called, "fail", f"{address}: {e}", rule, way_out)
    source = f"the archive {address}, which fits" if address else "a package index"
    rule = f"It is built at first use, in half a minute, from {source}"
    mend = Mend(f"builds it in {folder}", lambda: _ensure(name, asked))
    return Finding(called, "warn", f"not built yet: {folder}", rule, _command(asked), mend)


def _archive(asked: Asked) -> str:
    return asked.settings.cluster.sidecars or os.environ.get(build.ARCHIVE, "")


def _ensure(name: str, asked: Asked) -> None:
    sidecar.take_from(asked.settings.cluster.sidecars)
    sidecar.ensure(name)


def _command(asked: Asked) -> str:
    """What builds the sidecars from the archive of the configuration, too."""
    address = asked.settings.cluster.sidecars
    return (
        f"{build.ARCHIVE}={shlex.quote(address)} raypipe sidecars"
        if address
        else "raypipe sidecars"
    )


def _python_path() -> list[str]:
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _in(entry: str, package: str) -> bool:
    return (Path(entry) / package / "__init__.py").exists()


def locks(asked: Asked) -> Sequence[Finding]:
    """Would the compilation of an operator wait for a process that is dead?"""
    dead = torch_cache.dead_locks()
    if not dead:
        return [ok("compile locks", "no lock of a dead process")]

    def remove() -> None:
        for lock in dead:
            lock.unlink(missing_ok=True)

    rule = (
        f"A compilation ends within {torch_cache.COMPILES_WITHIN_S / 60:.0f} minutes: this one was "
        "killed, and every later one waits for it without end"
    )
    mend = Mend("removes " + " ".join(map(str, dead)), remove)
    seen = f"{dead[0]} is older" + (f", and {len(dead) - 1} more" if len(dead) > 1 else "")
    way_out = f"rm {shlex.join(map(str, dead))}"
    return [Finding("compile locks", "fail", seen, rule, way_out, mend)]


def java(asked: Asked) -> Sequence[Finding]:
    """Is there a Java that Spark takes, where Spark is installed?"""
    launcher = asked.settings.train.get("launcher", "ray")
    wanted = asked.settings.cluster.address == "spark" or launcher != "ray"
    if importlib.util.find_spec("pyspark") is None:
        if wanted and "DATABRICKS_RUNTIME_VERSION" not in os.environ:
            way_out = "pip install 'raypipe[spark]'"
            rule = "cluster.address=spark and train.launcher=torch_distributor run on Spark"
            return [Finding("java", "fail", "pyspark is not installed", rule, way_out)]
        return [skipped("java", "pyspark is not installed")]
    state: State = "fail" if wanted else "warn"
    rule = f"Spark 4 needs Java {JAVA}"
    way_out = f"Install a JDK {JAVA} (Debian: openjdk-{JAVA}-jre-headless), and set JAVA_HOME to it"
    command = _java()
    if command is None:
        return [Finding("java", state, "no java on the PATH", rule, way_out)]
    said = _version_of(command)
    # Java 8 calls itself 1.8.
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    if found and int(found[1]) >= JAVA:
        return [ok("java", f"Java {found[1]} at {command}")]
    seen = f"{command} is Java {found[1]}" if found else f"{command} says {one_line(said, 80)!r}"
    return [Finding("java", state, seen, rule, way_out)]


def _java() -> str | None:
    """The java that Spark starts: JAVA_HOME's, else the one on the PATH."""
    home = os.environ.get("JAVA_HOME")
    return str(Path(home) / "bin" / "java") if home else shutil.which("java")


def _version_of(command: str) -> str:
    try:
        told = subprocess.run(
            [command, "-version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return str(e)
    return told.stderr + told.stdout
