"""`doctor(…)`: the real command in a process of its own, with a home of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# The tests' own environment says what raypipe wants; each test begins without.
OWN = ("RAY_", "MLFLOW_", "AWS_", "AZURE_", "GOOGLE_", "XDG_", "TORCH_", "RAYPIPE_", "JAVA_")


@dataclass(frozen=True)
class Told:
    """What one run of the doctor said. code: its exit code. err: what people see."""

    code: int
    err: str
    findings: dict[str, dict[str, Any]]

    def state(self, name: str) -> str:
        return str(self.findings[name]["state"])


@dataclass(frozen=True)
class Doctor:
    """`doctor(*arguments, first="a shell line", NAME="value")`."""

    home: Path
    env: dict[str, str] = field(default_factory=dict)
    wrapper: tuple[str, ...] = ()

    def __call__(self, *arguments: object, first: str = "", **variables: str) -> Told:
        words = " ".join(f"'{word}'" for word in arguments)
        shell = f"{first}\nexec '{sys.executable}' -m raypipe doctor --json {words}"
        done = subprocess.run(
            [*self.wrapper, "bash", "-c", shell],
            env={**self.env, **variables},
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=120,
            check=False,
        )
        assert done.stdout.strip(), done.stderr
        summary = json.loads(done.stdout.splitlines()[-1])
        findings = {finding["name"]: finding for finding in summary["findings"]}
        assert (done.returncode == 1) == bool(summary["failed"]), done.stderr
        return Told(done.returncode, done.stderr, findings)

    def names_and_mends(
        self, name: str, *arguments: object, state: str = "fail", **variables: str
    ) -> dict[str, Any]:
        """The finding `name` about a planted fault. Its way out, run word for word, makes it ok."""
        planted = self(*arguments, **variables)
        finding = planted.findings[name]
        assert finding["state"] == state, finding
        assert finding["rule"] and finding["way_out"], finding
        mended = self(*arguments, first=finding["way_out"], **variables)
        assert mended.state(name) == "ok", (finding, mended.findings[name])
        return finding


def environment(home: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(OWN)}
    return {**inherited, "HOME": str(home), **(more or {})}


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    home = tmp_path / "home"
    (home / ".ray").mkdir(parents=True)
    token = home / ".ray" / "auth_token"
    token.write_text("f" * 64)
    token.chmod(0o600)
    return Doctor(home, environment(home))


@pytest.fixture
def alone(doctor: Doctor) -> Doctor:
    """The same in a mount namespace of its own, where a test may mount small disks."""
    wrapper = ("unshare", "--mount", "--")
    try:
        subprocess.run([*wrapper, "mount", "-t", "tmpfs", "none", "/mnt"], check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("this user may not mount")
    return Doctor(doctor.home, doctor.env, wrapper)
