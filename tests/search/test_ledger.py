"""The ledger of a benchmark: it goes on where it stopped, and a killed cell leaves nothing half."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import ledger as ledgers
from benchmarks import solar_seeds
from benchmarks.ledger import MOST_BUSY, Cell, Ledger, busy_share, without_places

CELL = Cell("digits", "random", 1, 2.0)
MODULE = "tests.search.a_cell"


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits seconds to see how busy the machine is."""
    monkeypatch.setattr(ledgers, "WATCH_S", 0.01)


def test_a_measured_cell_is_read_and_not_measured_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    line = ledger.measure(CELL, MODULE, {"how": "well"}, 60)
    assert (line["val"], line["task"], line["seed"]) == (0.5, "digits", 1)
    assert {"commit", "config", "machine", "date", "busy_before", "seconds", "valid"} <= set(line)
    assert ledger.measure(CELL, MODULE, {"how": "well"}, 60) == line
    assert len(ledger.lines()) == 1


def test_a_line_of_another_configuration_is_not_this_one(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    first = ledger.measure(CELL, MODULE, {"how": "well"}, 60)
    other = ledger.measure(CELL, MODULE, {"how": "well", "epochs": 9}, 60)
    assert first["config"] != other["config"] and len(ledger.lines()) == 2
    assert ledger.done(lambda line: line["config"] == first["config"]) == {CELL.key: first}
    assert ledger.done(lambda line: False) == {} and ledger.done() == {CELL.key: other}


def test_a_cell_is_valid_if_the_cpus_were_free_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    #         user nice system idle iowait irq softirq steal
    before = [100, 0, 100, 1000, 50, 0, 0, 0]
    assert busy_share(before, [130, 0, 110, 1340, 110, 0, 0, 10]) == pytest.approx(50 / 450)
    assert busy_share(before, before) == 1, "a clock that stands says nothing good"
    ledger = Ledger(tmp_path / "ledger.jsonl")
    monkeypatch.setattr(ledgers, "busy_for", lambda seconds: MOST_BUSY + 0.01)
    busy = ledger.measure(CELL, MODULE, {"how": "well"}, 60)
    assert not busy["valid"] and busy["why_not_valid"].startswith("16% of the CPUs")
    monkeypatch.setattr(ledgers, "busy_for", lambda seconds: MOST_BUSY)
    free = ledger.measure(CELL, MODULE, {"how": "well", "again": True}, 60)
    assert free["valid"] and "why_not_valid" not in free


def test_a_cell_that_dies_has_a_line_that_says_so_and_is_tried_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    died = ledger.measure(CELL, MODULE, {"how": "die"}, 60)
    assert "exit code -9" in died["error"] and not died["valid"] and "val" not in died
    assert ledger.done() == {}
    assert ledger.measure(CELL, MODULE, {"how": "well"}, 60)["val"] == 0.5


def test_a_cell_that_hangs_is_ended(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    assert "killed after 5 s" in ledger.measure(CELL, MODULE, {"how": "hang"}, 5)["error"]
    pid = (tmp_path / "ledger" / CELL.name / "pid").read_text()
    assert not Path("/proc", pid).exists()


def test_a_half_line_is_cut_and_the_cell_measured_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    whole = {"task": "a", "method": "b", "seed": 1, "budget_s": 1.0}
    ledger.file.write_text(json.dumps(whole) + '\n{"task": "dig')
    assert len(ledger.lines()) == 1
    with ledger.owned():
        ledger.measure(CELL, MODULE, {"how": "well"}, 60)
    assert [line["task"] for line in ledger.lines()] == ["a", "digits"]


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    with Ledger(file).owned(), pytest.raises(SystemExit, match="Another run"), Ledger(file).owned():
        pass


def test_a_killed_benchmark_takes_its_cell_with_it(tmp_path: Path) -> None:
    file = tmp_path / "ledger.jsonl"
    code = (
        "import sys; from pathlib import Path; from benchmarks.ledger import Cell, Ledger; "
        f"Ledger(Path(sys.argv[1])).measure({CELL!r}, {MODULE!r}, dict(how='hang'), 600)"
    )
    benchmark = subprocess.Popen([sys.executable, "-c", code, str(file)])
    note = tmp_path / "ledger" / CELL.name / "pid"
    wait_until(lambda: note.exists() and note.read_text())
    benchmark.kill()
    benchmark.wait()
    wait_until(lambda: not Path("/proc", note.read_text()).exists() or is_dead(note.read_text()))
    assert Ledger(file).lines() == []


def test_a_failed_cell_says_why_in_one_line_until_it_is_measured(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", tmp_path / "work")
    line = ledger.measure(CELL, MODULE, {"how": "raise"}, 60)
    assert line["error"] == "exit code 1: DataError: Nothing is there (got '.../deep'). Look again."
    assert ledger.failed() == [f"{CELL.name}: {line['error']}"]
    # What the process printed later is not the reason.
    assert "Ray says goodbye" in (tmp_path / "work" / CELL.name / "log").read_text()
    ledger.measure(CELL, MODULE, {"how": "well"}, 60)
    assert ledger.failed() == []


def test_a_line_names_no_folder_of_this_machine() -> None:
    told = {"by": "/home/me/runs/x.json", "at": "file:///tmp/a/b", "model": "timm:a/b", "n": "2/3"}
    kept = json.loads(without_places(json.dumps(told)))
    assert kept == {"by": ".../x.json", "at": "file://.../b", "model": "timm:a/b", "n": "2/3"}


def wait_until(reached: object) -> None:
    until = time.monotonic() + 60
    while not reached():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.05)


def is_dead(pid: str) -> bool:
    """A zombie: whoever adopted it has not yet asked for it."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_frozen_file_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("a")
    ledger = Ledger(tmp_path / "ledger.jsonl")
    said = solar_seeds.frozen(file, ["x=1"], ledger)["sha256"]
    ledger.file.write_text(json.dumps({"frozen": said}) + "\n")
    assert solar_seeds.frozen(file, ["x=1"], ledger)["sha256"] == said
    with pytest.raises(SystemExit, match="begun with another file"):
        solar_seeds.frozen(file, ["x=2"], ledger)


def test_certain_cells_are_told_apart() -> None:
    cells = [["a", 0.0, True], ["b", 1.0, False], ["c", 0.333, True], ["d", 1.0, True]]
    assert solar_seeds.share(cells) == 0.75
    assert solar_seeds.share(solar_seeds.certain(cells)) == 0.6667
    line = {"cells": cells, "seed": 11, "tune_s": 1200.0, "budget_s": 1200, "valid": True}
    line |= {"commit": "abc", "test": 0.75}
    told = solar_seeds.summary([line], {"a", "b"})
    assert told["test"]["mean"] == 0.75 and told["certain"]["cells"] == 3
    assert told["fresh"] == {"cells": 2, "mean": 1.0, "median": 1.0, "worst": 1.0}


def test_a_seed_that_ended_early_is_told_and_means_are_by_commit() -> None:
    cells = [["a", 0.0, True]]
    lines = [
        {"cells": cells, "seed": seed, "tune_s": tune_s, "budget_s": 1200, "commit": commit}
        | {"test": test, "valid": True}
        for seed, tune_s, commit, test in (
            (11, 1079.3, "a", 0.90),
            (20, 1231.0, "a", 0.88),
            (12, 1170.0, "b", 0.92),
        )
    ]
    told = solar_seeds.summary(lines, set())
    assert told["not_within_30_s"] == [11, 20] and told["not_valid"] == []
    assert told["by_commit"] == {"a": {"seeds": 2, "mean": 0.89}, "b": {"seeds": 1, "mean": 0.92}}
