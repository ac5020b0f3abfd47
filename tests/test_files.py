"""Files that are replaced in one step. Folders that one process owns: the second waits, and a
killed owner holds nobody up.
"""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from raypipe.files import in_name, is_there, owned, write_atomic

OWNER = """
import sys, time
from pathlib import Path
from raypipe.files import owned
with owned(Path(sys.argv[1])):
    done = Path(sys.argv[1], "done")
    print("owned after", done.read_text() if done.exists() else "nobody", flush=True)
    time.sleep(float(sys.argv[3]))
    done.write_text(sys.argv[2])
"""


@pytest.mark.parametrize("text", ["run.name=" + "x" * 300, "a\0b", "no/such"])
def test_a_text_that_can_be_no_file_names_none(text: str, tmp_path: Path) -> None:
    assert not is_there(text) and is_there(str(tmp_path))


def start(folder: Path, name: str, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", OWNER, str(folder), name, str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_second_process_waits_for_the_first(tmp_path: Path) -> None:
    first = start(tmp_path / "run", "first", 1.0)
    assert first_line(first) == "owned after nobody"
    second = start(tmp_path / "run", "second", 0.0)
    # The first one had finished its work before the second one began.
    assert first_line(second) == "owned after first"
    assert first.wait(30) == 0 and second.wait(30) == 0
    assert (tmp_path / "run" / "done").read_text() == "second"


def test_a_killed_owner_holds_nobody_up(tmp_path: Path) -> None:
    first = start(tmp_path / "run", "first", 60.0)
    assert first_line(first) == "owned after nobody"
    first.kill()
    first.wait(30)
    began = time.monotonic()
    with owned(tmp_path / "run"):
        assert time.monotonic() - began < 5
    assert not (tmp_path / "run" / "done").exists()


def test_a_folder_can_be_owned_again_after_an_error(tmp_path: Path) -> None:
    for _ in range(2):
        try:
            with owned(tmp_path / "run"):
                raise ValueError
        except ValueError:
            pass


def test_many_may_write_one_file_at_once(tmp_path: Path) -> None:
    """Two drift checks of one window draw one page."""
    file = tmp_path / "page.html"
    texts = [letter * 200_000 for letter in "abcd"]
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(write_atomic, file, text) for text in texts * 25]:
            done.result()
    assert file.read_text() in texts
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    "text", ["../../x", "a/b", "x" * 300, "é" * 300, "a\0b", "<b>", "a\nb", "..", ".", ""]
)
def test_any_text_is_part_of_a_file_name(text: str, tmp_path: Path) -> None:
    """watch.name and the name of a model are anything; a report must land in its folder."""
    file = tmp_path / f"drift-{in_name(text)}-0123456789abcdef.html"
    write_atomic(file, "page")
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_plain_names_stay_and_others_do_not_meet() -> None:
    assert in_name("night_2.größe-1") == "night_2.größe-1"
    assert len({in_name(text) for text in ("a/b", "a-b", "a b", "x" * 300, "x" * 301)}) == 5
