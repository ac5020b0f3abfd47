"""What `cluster.bring` names travels, or is refused in one message."""

from __future__ import annotations

import os
from pathlib import Path
from zipfile import ZipFile

import pytest
from ray._private.runtime_env.packaging import create_package

from raypipe.cluster import luggage
from raypipe.errors import ConfigError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    (folder / "lists").mkdir(parents=True)
    (folder / "lists" / "a.txt").write_text("a")
    (folder / "lists" / "b.txt").write_text("b")
    monkeypatch.chdir(folder)
    return folder


def brought(*names: str) -> set[str]:
    with luggage.packed(None, {}, luggage.below_here(list(names))) as (folder, _):
        found = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}
        assert "raypipe/main.py" in found
    return {name for name in found if not name.startswith("raypipe/")}


def test_a_folder_and_a_part_of_it_travel_in_any_order(here: Path) -> None:
    """The folder second, or the current folder, was a FileExistsError with its traceback."""
    both = {"lists/a.txt", "lists/b.txt"}
    assert brought("lists", "lists/a.txt") == brought("lists/a.txt", "lists") == both
    assert brought(".") == both


def test_what_is_called_raypipe_here_does_not_stand_for_it_there(here: Path) -> None:
    (here / "raypipe").mkdir()
    (here / "raypipe" / "main.py").write_text("raise SystemExit('another one')")
    with luggage.packed(None, {}, luggage.below_here(["raypipe"])) as (folder, _):
        assert "another one" not in (folder / "raypipe" / "main.py").read_text()


def test_a_link_travels_under_its_own_name(here: Path) -> None:
    """The configuration says `latest`; what came was called `lists`."""
    (here / "latest").symlink_to("lists")
    (here / "first.txt").symlink_to("lists/a.txt")
    assert brought("latest", "first.txt") == {"latest/a.txt", "latest/b.txt", "first.txt"}
    (here / "outside").symlink_to("/etc")
    with pytest.raises(ConfigError, match="cannot travel"):
        luggage.below_here(["outside"])


def test_what_links_lead_to_counts_and_a_circle_is_refused(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link to a data set had no bytes, and all of it was copied into /tmp."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "one.bin").write_bytes(b"x" * 1000)
    link = here / "lists" / "data"
    link.symlink_to(tmp_path / "data")
    monkeypatch.setattr(luggage, "MOST_BYTES", 500)
    with pytest.raises(ConfigError, match="Too much would travel"):
        brought("lists")
    link.unlink()
    link.symlink_to("..")
    with pytest.raises(ConfigError, match="leads into its own folder"):
        brought("lists")
    # One that leads nowhere has nothing to bring.
    link.unlink()
    link.symlink_to("gone")
    assert brought("lists") == {"lists/a.txt", "lists/b.txt"}


def test_what_cannot_be_copied_is_one_message(here: Path) -> None:
    os.mkfifo(here / "lists" / "pipe")
    with pytest.raises(ConfigError, match=r"cannot travel with the job: .*named pipe"):
        brought("lists")


def test_what_git_ignores_travels_and_secrets_do_not(here: Path, tmp_path: Path) -> None:
    """Ray left out what .gitignore names, also of raypipe itself: `models/` took raypipe.models."""
    (here / ".gitignore").write_text("lists/\nmodels/\n")
    (here / "lists").mkdir(exist_ok=True)
    (here / "lists" / "a.txt").write_text("x")
    (here / ".env").write_text("TOKEN=x")
    with luggage.packed(None, {}, luggage.below_here(["."])) as (folder, _):
        create_package(str(folder), tmp_path / "a.zip", include_gitignore=True)
    names = set(ZipFile(tmp_path / "a.zip").namelist())
    assert {"lists/a.txt", "raypipe/models/zoo.py"} <= names, sorted(names)[:9]
    assert not [name for name in names if name.endswith((".env", ".gitignore"))]
