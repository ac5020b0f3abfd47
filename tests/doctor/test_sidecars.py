"""Sidecars that are hidden, missing or damaged, and one that `--fix` builds again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import PIL
import pytest

from raypipe.cluster import sidecar
from tests.doctor.conftest import Doctor


def test_a_path_that_hides_the_packages_of_a_sidecar(doctor: Doctor, tmp_path: Path) -> None:
    package = tmp_path / "mine" / "PIL"
    package.parent.mkdir()
    package.symlink_to(Path(PIL.__file__).parent)
    path = f"{doctor.env.get('PYTHONPATH', '.')}{os.pathsep}{package.parent}"
    told = doctor("--only", "fastdup", PYTHONPATH=path)
    finding = told.findings["sidecar fastdup"]
    assert finding["state"] == "fail" and f"PYTHONPATH holds {package}" in finding["seen"]
    assert finding["way_out"].endswith("leave that folder out of it")
    # Left out: there it is not built yet, because the test has a home of its own.
    told = doctor("--only", "fastdup")
    assert told.state("sidecar fastdup") == "warn" and told.code == 0
    assert told.findings["sidecar fastdup"]["way_out"] == "raypipe sidecars"


@pytest.mark.slow
def test_a_damaged_sidecar_is_built_again(doctor: Doctor, tmp_path: Path) -> None:
    built = sidecar.ensure("fastdup").parent.parent
    folder = tmp_path / "cache" / "sidecars" / built.name
    # Files are linked, not copied: the damage is a file that is missing from one of the two.
    shutil.copytree(built, folder, symlinks=True, copy_function=os.link)
    words, home = ("--only", "fastdup"), {"RAYPIPE_HOME": str(tmp_path / "cache")}
    assert doctor(*words, **home).state("sidecar fastdup") == "ok"
    (package,) = folder.glob("lib/python*/site-packages/fastdup/__init__.py")
    package.unlink()
    told = doctor(*words, **home)
    assert told.code == 1 and "damaged" in told.findings["sidecar fastdup"]["seen"]
    told = doctor(*words, "--fix", **home)
    assert told.code == 0 and told.state("sidecar fastdup") == "ok"
    assert f"removes {folder} and builds it again" in told.err
    assert sidecar.damage("fastdup", 60) == ""
