"""`make clean` takes what can be made again, and nothing of a user's."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parents[1] / "Makefile"


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_clean_deletes_no_run_of_a_users(tmp_path: Path) -> None:
    """It deleted runs/, where tables and models are."""
    made = [".mypy_cache/x", "docs/_build/x", "dist/databricks/x", "runs/solar/.quickstart"]
    theirs = ["runs/mine/tables/x", "docs/x", "dist/x", "runs/solar.yaml"]
    for name in (*made, *theirs):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    command = ["make", "--file", str(MAKEFILE), "--directory", str(tmp_path), "clean"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    left = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert left == set(theirs) and not (tmp_path / "runs/solar").exists()

    # A folder of that name that no quickstart has made.
    (tmp_path / "runs/solar/tables").mkdir(parents=True)
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert (tmp_path / "runs/solar/tables").exists()
