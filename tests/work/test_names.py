"""The name and the folder of a run without a config file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from raypipe.work import find
from raypipe.work.names import run_of


@pytest.mark.parametrize("content", ["", "{", "[]", "table: cells", "table: {uri: 3}"])
def test_a_damaged_config_of_an_earlier_run_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    """It was a traceback, before anything else, in each command for that table."""
    monkeypatch.chdir(tmp_path)
    for key, text in (("abc", content), ("def", "table: {uri: other/cells}")):
        folder = tmp_path / "runs" / "cells" / "search" / key
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(text)
    assert run_of("other/cells") == {"name": "cells", "dir": "runs/cells"}
    assert run_of("tables/cells")["dir"].startswith("runs/cells-")


SEARCHING = """
import sys
from raypipe.work.names import run_of
print(run_of(sys.argv[1])["dir"], flush=True)
sys.stdin.read()
"""


def searching(table: str, where: Path) -> tuple[subprocess.Popen[str], str]:
    """A process that uses this table until its input ends, and the folder that it got."""
    process = subprocess.Popen(
        [sys.executable, "-c", SEARCHING, table],
        cwd=where,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_of_two_tables_of_one_name_the_second_has_a_folder_of_its_own_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within seconds of each other, nothing is in the folder yet: both searched into runs/cells."""
    monkeypatch.chdir(tmp_path)
    first, folder = searching("tables/cells", tmp_path)
    assert folder == "runs/cells"
    own = run_of("other/cells")
    assert own["dir"].startswith("runs/cells-") and own["dir"] == f"runs/{own['name']}"
    again, same = searching("tables/cells", tmp_path)
    assert same == "runs/cells", "the same table twice is one piece of work"
    for process in (first, again):
        process.communicate()
    assert not list(tmp_path.iterdir()), "a claim writes nothing into the user's folder"
    # The first one has failed before it had written anything: its name is free again. But what the
    # second has begun goes on in its own folder.
    (tmp_path / own["dir"]).mkdir(parents=True)
    assert run_of("other/cells") == own
    assert run_of("third/cells") == {"name": "cells", "dir": "runs/cells"}


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("models:/team@line 1@champion", ("team@line 1", "champion", None)),
        ("models:/team@line 1/3", ("team@line 1", None, "3")),
        ("models:/Kühe@best", ("Kühe", "best", None)),
        ("models:/cells@@best", ("cells@", "best", None)),
        ("models:/cells", None),
        ("models:/@best", None),
        ("models:/a/b@best", None),
    ],
)
def test_a_model_is_found_by_any_name_that_can_be_registered(
    model: str, parts: tuple[str | None, ...] | None
) -> None:
    found = find.MODEL.fullmatch(model)
    assert (found and found.group("name", "alias", "version")) == parts
