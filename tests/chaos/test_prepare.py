"""`raypipe table prepare` is killed at each of its steps and run again: the table is the one of an
undisturbed run, each row once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from raypipe.tables.prepare.staged import BEGUN, FOLDER
from raypipe.tables.table import append
from tests.tables.prepared_rows import rows_of

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("ray_session")]
ROOT = Path(__file__).parents[2]
RAYPIPE = [sys.executable, "-m", "raypipe"]
SIDE = ["--side", "48", "--json"]
ROWS, MORE = 1200, 300
STEPS = {
    "before the first part": ("raypipe.tables.prepare.workers:stream", "before"),
    "after the first part": ("raypipe.tables.prepare.workers:result", "after"),
    "before the commit": ("raypipe.tables.prepare.run:commit", "before"),
    "after the empty table": ("raypipe.tables.prepare.commit:_empty", "after"),
    "after the record": ("raypipe.tables.prepare.commit:set_property", "after"),
    "after the commit": ("raypipe.tables.prepare.run:commit", "after"),
}


def rows(images: list[bytes], first: int, count: int) -> pa.Table:
    numbers = range(first, first + count)
    chosen = [images[n % len(images)] for n in numbers]
    return pa.table({"nr": list(numbers), "image": pa.array(chosen, pa.binary())})


@pytest.fixture(scope="module")
def src(two_hundred: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> str:
    """1,200 rows in five files: five parts."""
    uri = str(tmp_path_factory.mktemp("source") / "src")
    for first in range(0, ROWS, 240):
        append(uri, rows(two_hundred, first, 240), f"from {first}")
    return uri


@pytest.fixture(scope="module")
def undisturbed(src: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    dst = tmp_path_factory.mktemp("undisturbed") / "dst"
    assert told(src, dst)["made"] == ROWS
    found = rows_of(dst)
    assert [row["nr"] for row in found] == list(range(ROWS))
    return found


def told(src: str, dst: Path) -> dict[str, Any]:
    command = [*RAYPIPE, "table", "prepare", src, str(dst), *SIDE]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def killed_at(step: str, src: str, dst: Path) -> None:
    command = [sys.executable, "-m", "tests.chaos.killed_at", *STEPS[step]]
    command += ["table", "prepare", src, str(dst), *SIDE]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == -signal.SIGKILL, (step, done.stderr)


@pytest.mark.parametrize("step", STEPS)
def test_a_step_is_killed_and_the_next_run_ends_as_an_undisturbed_one(
    step: str, src: str, undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    dst = tmp_path / "dst"
    killed_at(step, src, dst)
    # A reader sees all rows or none.
    seen = rows_of(dst) if DeltaTable.is_deltatable(str(dst)) else []
    assert len(seen) == (ROWS if step == "after the commit" else 0)
    done = told(src, dst)
    assert done["rows"] == ROWS
    if step == "before the commit":
        assert (done["files"], done["shared"]) == (5, 5), "finished parts are not made again"
    assert rows_of(dst) == undisturbed
    assert not (dst / FOLDER).exists() or step == "after the commit"
    assert told(src, dst)["made"] == 0


@pytest.mark.parametrize("step", ["after the first part", "after the record", "after the commit"])
def test_what_is_added_is_added_once(step: str, two_hundred: list[bytes], tmp_path: Path) -> None:
    """The same with a table that has rows already."""
    src, dst = str(tmp_path / "src"), tmp_path / "dst"
    append(src, rows(two_hundred, 0, 100), "first")
    assert told(src, dst)["made"] == 100
    for first in range(100, 100 + MORE, 100):
        append(src, rows(two_hundred, first, 100), "more")
    killed_at(step, src, dst)
    told(src, dst)
    assert [row["nr"] for row in rows_of(dst)] == list(range(100 + MORE))
    whole = tmp_path / "whole"
    told(src, whole)
    assert rows_of(dst) == rows_of(whole)


def test_notes_that_a_kill_left_half_cleared_are_no_harm(
    src: str, undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    dst = tmp_path / "dst"
    killed_at("before the commit", src, dst)
    (begun,) = (dst / FOLDER).glob(f"*/{BEGUN}")
    begun.unlink()
    assert told(src, dst)["rows"] == ROWS
    assert rows_of(dst) == undisturbed


def test_two_at_once_of_which_one_is_killed(
    src: str, undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    dst = tmp_path / "dst"
    command = [*RAYPIPE, "table", "prepare", src, str(dst), *SIDE]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    two = [subprocess.Popen(command, cwd=ROOT, **quiet) for _ in range(2)]
    try:
        until = time.monotonic() + 60
        while not list(dst.glob("part-*")):
            assert time.monotonic() < until
            time.sleep(0.02)
        for child in psutil.Process(two[0].pid).children():
            child.kill()
        assert two[0].wait(30) != 0 and two[1].wait(120) == 0
    finally:
        for process in two:
            process.kill()
    assert rows_of(dst) == undisturbed


def test_a_worker_that_dies_in_the_middle_of_a_file(
    src: str, undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Ray makes the part again; the torn file is named by no commit."""
    dst = tmp_path / "dst"
    command = [*RAYPIPE, "table", "prepare", src, str(dst), *SIDE]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + 60
        while not (victims := writers(dst)):
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.005)
        os.kill(victims[0], signal.SIGKILL)
        assert process.stdout is not None
        # Ray says that it lost a worker, but not on stdout.
        assert json.loads(process.stdout.read())["rows"] == ROWS
    assert rows_of(dst) == undisturbed
    assert len(list(dst.glob("part-*"))) > len(DeltaTable(str(dst)).file_uris())


def writers(dst: Path) -> list[int]:
    """Processes of tasks that have a file of the table open."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if not " ".join(process.info["cmdline"] or []).startswith("ray::make"):
            continue
        try:
            files = [file.path for file in process.open_files()]
        except psutil.Error:
            continue
        if any(path.startswith(f"{dst}/part-") for path in files):
            found.append(process.pid)
    return found
