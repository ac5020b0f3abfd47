"""The list of looks at test splits, and that benchmarks add to it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from benchmarks import looks

# Words of a benchmark that reads the score of a test split, or has one computed: a registration and
# `raypipe tune` predict it.
READS = re.compile(
    r'feed\.val": "test"|feed\.test|test_(accuracy|metrics)|\.test\(\)|"test": test\('
    r"|unseen\.test\(|\bpublish\(|\bscored\(|judged test rows"
    r'|raypipe\("tune"|"raypipe", "tune"|\["tune"'
)
# Those that do not note it themselves: why not.
OTHERWISE = {
    "quickstart.py": "the gate's test part, once a seed: its records are in the list",
    "budget.py": "raypipe tune computes the scores and nobody sees them: lines by hand, per record",
    "limits.py": "the same",
    "costs.py": "its images are drawn at random: there is nothing to learn from their test split",
    "scored.py": "it hands the score to equal_time.py",
}


def test_a_benchmark_that_reads_a_test_split_notes_it() -> None:
    readers = {}
    for file in looks.FILE.parent.glob("*.py"):
        text = file.read_text(encoding="utf-8")
        if READS.search(text):
            readers[file.name] = text
    known = {"equal_time.py", "first_answer.py", "solar_seeds.py", *OTHERWISE}
    assert known <= set(readers), "the words above do not find what reads a test split"
    silent = {name for name, text in readers.items() if "looks.note(" not in text}
    assert silent == set(OTHERWISE)


def test_a_look_is_a_line_and_older_ones_count_at_least(tmp_path: Path) -> None:
    file = tmp_path / "looks.csv"
    file.write_text(",".join(looks.COLUMNS) + "\n2026-01-01,,digits,seed 1,2+,x,y\n")
    looks.note("digits", "seed 1", "python -m x", "a, b", file)
    looks.note("digits", "seed 2", "python -m x", "a", file)
    assert looks.counts(file) == {("digits", "seed 1"): 3, ("digits", "seed 2"): 1}
    assert looks.read(file)[1]["why"] == "a, b"


def test_what_a_measurement_writes_makes_no_other_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = ["benchmarks/looks.csv", "benchmarks/results/ledgers/a.jsonl"]
    for name in (*written, "code.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.com"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(looks, "FILE", tmp_path / "benchmarks" / "looks.csv")
    clean = looks.commit()
    assert re.fullmatch("[0-9a-f]{7,}", clean)
    for name in written:
        (tmp_path / name).write_text("a line\n")
    assert looks.commit() == clean
    (tmp_path / "code.py").write_text("pass\n")
    assert looks.commit() == f"{clean}+"


def test_every_line_of_the_list_can_be_read() -> None:
    assert looks.counts().total() > 80
    assert all(line["by"] and line["why"] for line in looks.read())
