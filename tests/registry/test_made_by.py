"""The code that made a version is named by its commit only where the commit holds it."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from raypipe.registry import made_by


def checkout(root: Path, tracked: bool) -> ModuleType:
    """made_by of a package of its own, inside somebody's checkout."""

    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *words], cwd=root, check=True, capture_output=True)

    folder = root / "venv" / "raypipe" / "registry"
    folder.mkdir(parents=True)
    shutil.copy(made_by.__file__, folder / "made_by.py")
    (root / "mine.py").write_text("1")
    git("init", "-q")
    git("add", "." if tracked else "mine.py")
    git("commit", "-qm", "mine")
    spec = importlib.util.spec_from_file_location("copied", folder / "made_by.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYPIPE_COMMIT", raising=False)


def test_an_installed_raypipe_is_no_part_of_the_checkout_around_it(tmp_path: Path) -> None:
    code = checkout(tmp_path, tracked=False).code()
    assert code["commit"] is None and code["dirty"] is None and len(code["sha256"]) == 64


@pytest.mark.parametrize(
    "change", [None, "registry/made_by.py", "registry/new.py", "../../mine.py"]
)
def test_a_changed_file_of_the_package_makes_it_dirty(tmp_path: Path, change: str | None) -> None:
    module = checkout(tmp_path, tracked=True)
    if change:
        path = tmp_path / "venv" / "raypipe" / change
        path.write_text((path.read_text() if path.exists() else "") + "\n# changed")
    code = module.code()
    assert len(code["commit"]) == 40
    # A file beside the package is none of its code.
    assert code["dirty"] == (change is not None and "mine" not in change)


def test_other_code_has_another_hash(tmp_path: Path) -> None:
    first = checkout(tmp_path / "a", tracked=True)
    second = checkout(tmp_path / "b", tracked=True)
    (tmp_path / "b" / "venv" / "raypipe" / "more.py").write_text("1")
    assert first.code()["sha256"] != second.code()["sha256"]


def test_a_commit_that_was_named_says_nothing_of_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = checkout(tmp_path, tracked=True)
    monkeypatch.setenv("RAYPIPE_COMMIT", "c0ffee")
    assert (module.code()["commit"], module.code()["dirty"]) == ("c0ffee", None)


def test_this_machine_and_its_packages_are_named() -> None:
    machine = made_by.machine()
    assert machine["cpus"] >= 1 and machine["memory_mb"] > 100 and machine["python"]
    assert made_by.packages()["numpy"]
