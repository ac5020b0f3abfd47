"""A sidecar of one small wheel, built by the real pip without an index: `tiny`, of `tinypkg`."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

import pytest

from raypipe.cluster.sidecars import build, pins

LIST = "# comment\ntinypkg==1.0\ntinyold==1.0; python_version < '3.0'\n"


def wheel(folder: Path, name: str, version: str = "1.0", tag: str = "py3-none-any") -> Path:
    """A wheel with one module that says its version."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    lines = []
    for path, text in files.items():
        hashed = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode()
        lines.append(f"{path},sha256={hashed.rstrip('=')},{len(text)}\n")
    files[f"{info}/RECORD"] = "".join([*lines, f"{info}/RECORD,,\n"])
    target = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(target, "w") as archive:
        for path, text in files.items():
            archive.writestr(zipfile.ZipInfo(path), text)
    return target


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The real builder without 600 MB of wheels, with a home of its own; returns that home."""
    lists = folder / "lists"
    lists.mkdir()
    (lists / "tiny.txt").write_text(LIST)
    wheel(folder / "wheels", "tinypkg")
    monkeypatch.setenv("RAYPIPE_HOME", str(folder / "home"))
    monkeypatch.delenv(build.ARCHIVE, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder / "wheels"))
    monkeypatch.setattr(pins, "LISTS", lists)
    monkeypatch.setattr(build, "PROBES", {"tiny": "import tinypkg, ray"})
    return folder / "home" / "sidecars"


def left(home: Path) -> list[str]:
    """What lies in the folder of sidecars besides locks."""
    return sorted(path.name for path in home.iterdir() if path.suffix != ".lock")
