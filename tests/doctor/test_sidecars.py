"""Sidecars that are hidden, missing or damaged, and one that `--fix` builds again."""

from __future__ import annotations

import os
import shlex
import shutil
import zipfile
from pathlib import Path

import PIL
import pytest

from raypipe.cluster import sidecar
from raypipe.cluster.sidecars import build, pins
from raypipe.cluster.sidecars.archive import MANIFEST
from raypipe.cluster.sidecars.manifest import Manifest
from raypipe.doctor import environments
from raypipe.doctor.finding import Asked, Settings
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


@pytest.mark.parametrize(
    "settings",
    [
        Settings(cluster={"address": "spark"}),
        Settings(train={"launcher": "torch_distributor"}),
    ],
)
def test_what_spark_needs_is_a_failure_where_the_configuration_wants_spark(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    (wanted,) = environments.java(Asked(settings=settings))
    (unasked,) = environments.java(Asked())
    assert wanted.state == "fail" and unasked.state in ("warn", "skipped")


def archive_of(file: Path, target: pins.Target) -> str:
    """An archive of the sidecars as far as the doctor looks: it reads no wheel."""
    hashes = {n: pins.digest(pins.pins(n, target)) for n in ("alibi", "fastdup")}
    with zipfile.ZipFile(file, "w") as out:
        told = Manifest(target, hashes, {name: [] for name in hashes}, {})
        out.writestr(MANIFEST, told.to_json())
    return str(file)


def test_an_archive_that_nodes_take_is_looked_at(doctor: Doctor, tmp_path: Path) -> None:
    words = "--only", "fastdup,alibi"
    fits = archive_of(tmp_path / "fits.zip", pins.here())
    told = doctor(*words, RAYPIPE_SIDECARS=fits)
    for name in ("sidecar fastdup", "sidecar alibi"):
        assert told.state(name) == "warn" and told.findings[name]["can_fix"]
        assert f"the archive {fits}, which fits" in told.findings[name]["rule"]
    # The configuration names another one than the environment.
    other = archive_of(tmp_path / "other.zip", pins.Target("3.10", "x86_64"))
    told = doctor(f"cluster.sidecars={other}", *words, RAYPIPE_SIDECARS=fits)
    assert told.code == 1 and told.state("sidecar alibi") == "fail"
    finding = told.findings["sidecar fastdup"]
    assert "is for Python 3.10" in finding["seen"] and "sidecars pack" in finding["way_out"]
    told = doctor(f"cluster.sidecars={fits}", *words)
    way_out = told.findings["sidecar alibi"]["way_out"]
    assert way_out == f"RAYPIPE_SIDECARS={shlex.quote(str(fits))} raypipe sidecars"
    # A store that is not there, within the doctor's time.
    dead = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ALLOW_HTTP": "true"}
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "canary-in-the-store"}
    told = doctor(*words, RAYPIPE_SIDECARS="s3://plant/x.zip", **dead, **keys)
    finding = told.findings["sidecar alibi"]
    assert finding["state"] == "fail" and "cannot be read" in finding["seen"]
    assert "Check the address and the network" in finding["way_out"]
    assert "canary" not in told.err + str(told.findings)


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
    assert build.damage("fastdup", 60) == ""
