"""What raypipe pins can be installed on every Python that it takes, by resolution alone.

uv reads metadata only, so no interpreter of that version is needed and no torch is downloaded. Two
cores need 20 s for all of it, most of it waiting for the index.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

from raypipe.cluster.sidecars import pins, pip
from raypipe.errors import ConfigError

ROOT = Path(__file__).parents[2]
PYTHONS = "3.11", "3.12", "3.13"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = ROOT / "infra" / "constraints.txt"
# Parts of torch's CUDA build, which torch itself pins, and what every environment has.
UNPINNED = re.compile(r"(nvidia|cuda)-.*|triton|pip|setuptools")


def compiled(*words: str, python: str, stdin: str = "") -> set[str]:
    """`uv pip compile` for a Python on Linux: the packages as NAME==VERSION. Fails as uv does."""
    index = pip.settings()
    environment = dict(os.environ)
    for setting, variable in (("index-url", "UV_DEFAULT_INDEX"), ("extra-index-url", "UV_INDEX")):
        # uv reads no settings of pip; a mirror of files that pip has besides an index is too small.
        if index.get(setting, "").startswith("http"):
            environment[variable] = index[setting]
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-annotate"]
    command += ["--no-header", "--python-version", python, *words]
    done = subprocess.run(
        command, input=stdin, capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_this_project_takes_the_pythons_that_are_resolved() -> None:
    listed = {p.rpartition(" ")[2] for p in PROJECT["classifiers"] if ":: 3." in p}
    assert listed == set(PYTHONS)
    first, last = PYTHONS[0], f"3.{int(PYTHONS[-1].partition('.')[2]) + 1}"
    assert PROJECT["requires-python"] == f">={first},<{last}"


@pytest.mark.share
@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
def test_the_constraints_resolve(python: str) -> None:
    """All extras but `docs`, one of whose packages wants Python 3.11.5; the site is built by CI."""
    extras = [w for e in PROJECT["optional-dependencies"] if e != "docs" for w in ("--extra", e)]
    words = "pyproject.toml", *extras, "--constraint", str(CONSTRAINTS)
    found = compiled(*words, "--python-platform", "x86_64-unknown-linux-gnu", python=python)
    names = {line.partition("==")[0] for line in found}
    assert {"ray", "torch", "deltalake", "mlflow", "deepspeed", "onnxruntime"} <= names
    pinned = {pins_name(line) for line in CONSTRAINTS.read_text().splitlines() if "==" in line}
    free = {n for n in names if pins_name(n) not in pinned and not UNPINNED.fullmatch(n)}
    assert not free, f"pin them in {CONSTRAINTS.name}"


def pins_name(line: str) -> str:
    return re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower()


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("name", ["alibi", "fastdup"])
def test_the_sidecars_have_wheels(name: str, python: str, machine: str) -> None:
    exists = name != "fastdup" or (python != "3.13" and machine == "x86_64")
    try:
        wanted = pins.pins(name, pins.Target(python, machine))
    except ConfigError:
        assert not exists
        return
    assert exists
    words = "-", "--no-deps", "--only-binary", ":all:", "--python-platform"
    platform = f"{machine}-manylinux_2_31"
    found = compiled(*words, platform, python=python, stdin="\n".join(wanted))
    assert {pins_name(line) for line in found} == {pins_name(line) for line in wanted}


@pytest.mark.slow
def test_a_pin_without_a_wheel_is_found() -> None:
    """The check can fail: these are pins of another Python."""
    for line in ("numpy==1.26.4", "fastdup==2.54"):
        with pytest.raises(AssertionError, match="No solution found"):
            compiled("-", "--no-deps", "--only-binary", ":all:", python="3.13", stdin=line)
