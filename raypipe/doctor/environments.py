"""Checks of what raypipe starts beside itself: sidecars, compiled operators, Java for Spark."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from raypipe import torch_cache
from raypipe.cluster import sidecar
from raypipe.doctor.finding import Asked, Finding, Mend, State, ok, skipped
from raypipe.errors import one_line

IMPORT_S = 60.0
# pyspark 4 needs it.
JAVA = 17
# Their versions are the sidecars' own; on PYTHONPATH the core's would come first.
PINNED = "numpy", "PIL", "pandas"


def fastdup(asked: Asked) -> Sequence[Finding]:
    """Does the sidecar of fastdup work?"""
    return [_sidecar("fastdup")]


def alibi(asked: Asked) -> Sequence[Finding]:
    """Does the sidecar of Alibi Detect work?"""
    return [_sidecar("alibi")]


def _sidecar(name: str) -> Finding:
    folder = sidecar.place(name)
    called = f"sidecar {name}"
    # Ray hands PYTHONPATH on to the sidecar's worker.
    shadowed = [
        f"{entry}/{each}" for entry in _python_path() for each in PINNED if _in(entry, each)
    ]
    if shadowed:
        rule = "PYTHONPATH comes before the sidecar's own packages, which are older on purpose"
        way_out = "unset PYTHONPATH, or leave that folder out of it"
        return Finding(called, "fail", f"PYTHONPATH holds {shadowed[0]}", rule, way_out)
    if not (folder / "bin" / "python").exists():
        rule = "It is built at first use, which takes half a minute and a package index"
        mend = Mend(f"builds it in {folder}", lambda: sidecar.ensure(name))
        return Finding(called, "warn", f"not built yet: {folder}", rule, "raypipe sidecars", mend)
    # The import that proved it when it was built.
    problem = sidecar.damage(name, IMPORT_S)
    if not problem:
        return ok(called, str(folder))

    def rebuild() -> None:
        shutil.rmtree(folder)
        sidecar.ensure(name)

    rule = "It was whole when it was built: a package in it was removed or changed since"
    mend = Mend(f"removes {folder} and builds it again", rebuild)
    way_out = f"rm -r {folder}; raypipe sidecars"
    return Finding(called, "fail", f"damaged: {problem}", rule, way_out, mend)


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
    way_out = "rm " + " ".join(map(str, dead))
    return [Finding("compile locks", "fail", seen, rule, way_out, mend)]


def java(asked: Asked) -> Sequence[Finding]:
    """Is there a Java that Spark takes, where Spark is installed?"""
    wanted = asked.settings.cluster.address == "spark"
    if importlib.util.find_spec("pyspark") is None:
        if wanted and "DATABRICKS_RUNTIME_VERSION" not in os.environ:
            way_out = "pip install 'raypipe[spark]'"
            rule = "cluster.address=spark starts Ray on Spark's executors"
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
