"""Which packages a sidecar is made of, by Python and machine.

`NAME.txt` beside this file is a requirements file: pins, some with a marker (PEP 508). pip
evaluates markers for the Python that it runs in, under --python-version too. So they are evaluated
here.

The first pin is the package that the sidecar is for. Where its marker is false, there is no such
sidecar: fastdup has no wheel for Python 3.13.
"""

from __future__ import annotations

import hashlib
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from raypipe.errors import ConfigError, nearest

LISTS = Path(__file__).parent
# What a user can do where a sidecar does not exist.
WITHOUT = {
    "fastdup": "Run `raypipe clean` under Python 3.11 or 3.12 on Linux with an x86-64 CPU: a table "
    "is the same for every Python. Without cleaning, ingest leaves out broken images and exact "
    "copies, and keeps near-duplicates in one split"
}


@dataclass(frozen=True)
class Target:
    """What a sidecar is for. python: a minor version, as 3.12. machine: as x86_64."""

    python: str
    machine: str

    def __str__(self) -> str:
        return f"Python {self.python} on {self.machine}"


def here() -> Target:
    """The Python and the machine of this process."""
    return Target(f"{sys.version_info.major}.{sys.version_info.minor}", platform.machine())


def names() -> list[str]:
    """All sidecars."""
    return sorted(file.stem for file in LISTS.glob("*.txt"))


def pins(name: str, target: Target) -> list[str]:
    """`package==version` of everything in the sidecar.

    Raises ConfigError for an unknown sidecar, and for one that the target cannot have.
    """
    from packaging.requirements import Requirement

    if name not in names():
        raise ConfigError("There is no such sidecar", got=name, fix=nearest(name, names()))
    environment = _environment(target)
    text = (LISTS / f"{name}.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = []
    for index, line in enumerate(lines):
        wanted = Requirement(line)
        if wanted.marker is None or wanted.marker.evaluate(environment):
            found.append(f"{wanted.name}{wanted.specifier}")
        elif index == 0:
            raise ConfigError(
                f"{wanted.name} has no release for {target}",
                rule=f"{wanted.name}{wanted.specifier} needs {wanted.marker}",
                fix=WITHOUT.get(name, ""),
            )
    return found


def digest(wanted: list[str]) -> str:
    """The hash of a sidecar's pins: another archive, or another raypipe, may have others."""
    return hashlib.sha256("\n".join(wanted).encode()).hexdigest()


def parse_python(text: str) -> str:
    """`3.12` or `3.12.4` as a minor version. Raises ConfigError."""
    found = re.fullmatch(r"(3\.\d{1,2})(\.\d+)?", text.strip())
    if not found:
        raise ConfigError(
            "This is no version of Python", got=text, rule="It is a minor version, as 3.12"
        )
    return found[1]


def _environment(target: Target) -> dict[str, str]:
    """The values of markers. The sidecars of a cluster run on Linux; here, on what this is."""
    if target == here():
        return {}
    return {
        "python_version": target.python,
        "python_full_version": f"{target.python}.0",
        "platform_machine": target.machine,
        "platform_system": "Linux",
        "sys_platform": "linux",
        "os_name": "posix",
    }
