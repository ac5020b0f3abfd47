"""A sidecar is built once, whole or not at all; the password of a private index stays unseen."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from raypipe.cluster.sidecars import build, pins, pip
from raypipe.cluster.sidecars.build import Source
from raypipe.errors import ConfigError, FullDisk, RaypipeError
from tests.canaries import CommandLines
from tests.cluster.private_index import PASSWORD, QUOTED, Private
from tests.cluster.tiny_sidecar import left, wheel


@pytest.fixture
def commands(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What is run from now on."""
    seen: list[list[str]] = []
    real = pip.run

    def run(command: list[str], *more: Any) -> None:
        seen.append(command)
        real(command, *more)

    monkeypatch.setattr(pip, "run", run)
    return seen


def test_two_callers_build_once(commands: list[list[str]]) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(build.ensure, ["tiny", "tiny"])
    assert first == second == build.ensure("tiny")
    assert sum("venv" in command for command in commands) == 1
    says = "import sys, tinypkg; print(sys.prefix, tinypkg.VERSION)"
    told = subprocess.run([first, "-c", says], capture_output=True, text=True, check=True).stdout
    assert told.split() == [str(first.parent.parent), "1.0"]


def test_a_half_built_one_is_not_used(commands: list[list[str]], tiny: Path) -> None:
    whole = build.ensure("tiny")
    folder = whole.parent.parent
    folder.rename(folder.with_name(folder.name + ".partial"))
    assert build.interpreter("tiny") is None
    assert build.ensure("tiny") == whole
    assert sum("venv" in command for command in commands) == 2
    assert left(tiny) == [folder.name]


def test_a_killed_build_leaves_nothing_that_stays(tiny: Path) -> None:
    """SIGKILL while pip installs; the next builder waits for no lock and clears what was left."""
    slow = f"""
import time
from pathlib import Path
from raypipe.cluster.sidecars import build, pins, pip
pins.LISTS = Path({str(pins.LISTS)!r})
build.PROBES = {{"tiny": "pass"}}
real = pip.run
pip.run = lambda c, *m: (real(c, *m), print("at", c[1:3], flush=True), time.sleep(60))
build.ensure("tiny")
"""
    process = subprocess.Popen([sys.executable, "-c", slow], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and "venv" in process.stdout.readline()
    process.kill()
    process.wait()
    assert [name for name in left(tiny) if name.endswith(".partial")]
    assert build.ensure("tiny").exists()
    assert left(tiny) == [build.place("tiny").name]


def test_one_whose_base_python_is_gone_is_built_again(tiny: Path) -> None:
    python = build.ensure("tiny")
    (python.parent / python.readlink()).unlink()
    assert not python.exists()
    assert build.ensure("tiny").exists()


def test_other_pins_are_another_sidecar_and_a_comment_is_none(tiny: Path, tmp_path: Path) -> None:
    before = build.place("tiny")
    listed = pins.LISTS / "tiny.txt"
    listed.write_text("# another comment\ntinypkg==1.0\n")
    assert build.place("tiny") == before
    listed.write_text("tinypkg==2.0\n")
    assert build.place("tiny") != before
    wheel(tmp_path / "wheels", "tinypkg", "2.0")
    assert build.ensure("tiny").parent.parent != before


def test_a_failed_pip_shows_its_last_lines_and_leaves_nothing(tiny: Path) -> None:
    (pins.LISTS / "tiny.txt").write_text("nowhere==1.0\n")
    says = r"(?s)sidecar tiny cannot be built.*nowhere==1\.0.*PIP_INDEX_URL.*RAYPIPE_SIDECARS"
    with pytest.raises(RaypipeError, match=says):
        build.ensure("tiny")
    assert left(tiny) == []


def test_a_probe_that_fails_is_no_sidecar(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "PROBES", {"tiny": "import not_there"})
    with pytest.raises(RaypipeError, match=r"(?s)cannot be built.*not_there"):
        build.ensure("tiny")
    assert left(tiny) == []


def test_a_full_disk_is_said_and_leaves_nothing(
    tiny: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPIPE_HOME", str(small_disk))
    filler = small_disk / "filler"
    filler.write_bytes(bytes(2**20 - 24_000))
    with pytest.raises(FullDisk, match=r"sidecar tiny cannot be built.*Make room") as caught:
        build.ensure("tiny")
    assert caught.value.exit_code == 1
    assert left(small_disk / "sidecars") == []
    filler.unlink()
    assert build.ensure("tiny").exists()


def test_packages_on_the_python_path_are_not_taken_for_its_own(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "others"
    pip.pip(["install", "--quiet", "--target", str(other), "tinypkg==1.0"])
    monkeypatch.setenv("PYTHONPATH", str(other))
    sites = list(build.ensure("tiny").parent.parent.glob("lib/python3*/site-packages/tinypkg.py"))
    assert len(sites) == 1


# --- a Python that a sidecar does not have


def test_fastdup_is_refused_where_it_does_not_exist() -> None:
    for target in (pins.Target("3.13", "x86_64"), pins.Target("3.12", "aarch64")):
        says = rf"fastdup has no release for Python {target.python} on {target.machine}.*ingest"
        with pytest.raises(ConfigError, match=says):
            pins.pins("fastdup", target)
    assert pins.pins("fastdup", pins.Target("3.12", "x86_64"))[0] == "fastdup==2.54"
    newer = pins.pins("alibi", pins.Target("3.13", "x86_64"))
    assert "numpy==2.1.3" in newer and "numpy==1.26.4" not in newer
    assert "alibi-detect==0.11.4" in newer


def test_clean_is_refused_before_it_reads_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    from raypipe.tables.clean import CleanConfig, clean
    from raypipe.tables.table import TableConfig

    monkeypatch.setattr(build, "here", lambda: pins.Target("3.13", "x86_64"))
    with pytest.raises(ConfigError, match=r"fastdup has no release for Python 3\.13"):
        clean(TableConfig(uri="/no/table/here"), CleanConfig())


def test_an_unknown_sidecar_is_named() -> None:
    with pytest.raises(RaypipeError, match=r"no such sidecar.*'alibbi'.*Did you mean 'alibi'"):
        build.ensure("alibbi")


# --- a private index


@pytest.fixture
def private(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, type[Private]]]:
    """HOST:PORT of an index with tinypkg behind a password; nothing else tells pip of any."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    (tmp_path / "pip.conf").write_text("[global]\n")
    wheel(tmp_path / "root" / "simple" / "tinypkg", "tinypkg")
    handler = type("Handler", (Private,), {"seen": [], "root": str(tmp_path / "root")})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}", handler
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("how", ["variable", "file", "driver"])
def test_a_private_index_works_and_its_password_stays_where_it_was(
    how: str,
    private: tuple[str, type[Private]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    host, handler = private
    address = f"http://me:{QUOTED}@{host}/simple"
    source = Source()
    if how == "variable":
        monkeypatch.setenv("PIP_INDEX_URL", address)
    elif how == "file":
        (tmp_path / "pip.conf").write_text(f"[global]\nindex-url = {address}\n")
    else:
        monkeypatch.setenv("PIP_INDEX_URL", address)
        source = Source(index=pip.index())
        monkeypatch.delenv("PIP_INDEX_URL")
        assert pip.index() == {}
    lines = CommandLines()
    with caplog.at_level(logging.DEBUG), lines:
        assert build.ensure("tiny", source).exists()
    assert ("/simple/tinypkg/", 200) in handler.seen
    assert lines.seen and not lines.holding(PASSWORD, QUOTED)
    for text in (caplog.text, repr(source), str(build.home().joinpath("x"))):
        assert PASSWORD not in text and QUOTED not in text


@pytest.mark.parametrize("how", ["variable", "file", "driver"])
def test_a_refusing_index_does_not_make_the_message_show_the_password(
    how: str, private: tuple[str, type[Private]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, handler = private
    wrong = "another-canary%2Fhere"
    address = f"http://me:{wrong}@{host}/simple"
    source = Source(index={"PIP_INDEX_URL": address}) if how == "driver" else Source()
    if how == "variable":
        monkeypatch.setenv("PIP_INDEX_URL", address)
    elif how == "file":
        (tmp_path / "pip.conf").write_text(f"[global]\nindex-url = {address}\n")
    with pytest.raises(RaypipeError, match=r"(?s)sidecar tiny cannot be built.*PIP_INDEX_URL") as e:
        build.ensure("tiny", source)
    assert ("/simple/tinypkg/", 401) in handler.seen
    for text in (str(e.value), e.value.what, repr(e.value.__reduce__())):
        assert "another-canary" not in text


def test_a_node_with_an_index_of_its_own_keeps_it(
    private: tuple[str, type[Private]], monkeypatch: pytest.MonkeyPatch
) -> None:
    host, _ = private
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:{QUOTED}@{host}/simple")
    assert build.ensure("tiny", Source(index={"PIP_INDEX_URL": "http://127.0.0.1:9/"})).exists()


def test_addresses_of_files_do_not_travel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "file:///here/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://a/simple file:///b https://c/simple")
    assert pip.index() == {"PIP_EXTRA_INDEX_URL": "https://a/simple https://c/simple"}
