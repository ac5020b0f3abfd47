"""`make clean` takes what was built, and nothing of a user's."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parents[1] / "Makefile"


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_clean_deletes_no_run_of_a_users(tmp_path: Path) -> None:
    """It deleted runs/, where tables and models are; later those of the quickstart alone, where
    people try out more.
    """
    made = [".mypy_cache/x", "docs/_build/x", "dist/databricks/x"]
    theirs = ["runs/mine/tables/x", "runs/solar/.quickstart", "runs/solar/train/x", "dist/x"]
    for name in (*made, *theirs):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    command = ["make", "--file", str(MAKEFILE), "--directory", str(tmp_path), "clean"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    left = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert left == set(theirs)
