"""The list of every look at a test split: benchmarks/looks.csv.

A look is a test score that somebody saw. It is written down before the score is computed, so one
that was killed half way counts too. docs/evaluation.md has the rules; `python -m benchmarks.looks`
prints how often each split was seen.
"""

from __future__ import annotations

import csv
import datetime
import os
import subprocess
from collections import Counter
from pathlib import Path

FILE = Path(__file__).with_name("looks.csv")
COLUMNS = ("date", "commit", "data", "split", "looks", "by", "why")


def note(data: str, split: str, by: str, why: str, file: Path = FILE) -> None:
    """Add one look.

    data: the task. split: what names it for good, like `seed 3, 1a2b3c`. by: the command. why: in a
    few words.
    """
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    with file.open("a", newline="", encoding="utf-8") as out:
        csv.writer(out).writerow([today, commit(), data, split, 1, by, why])
        out.flush()
        os.fsync(out.fileno())


def read(file: Path = FILE) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def counts(file: Path = FILE) -> Counter[tuple[str, str]]:
    """Looks by (data, split). "2+" is at least two: older looks were not counted when they were."""
    found: Counter[tuple[str, str]] = Counter()
    for line in read(file):
        found[line["data"], line["split"]] += int(line["looks"].rstrip("+"))
    return found


def commit() -> str:
    """The commit of this checkout, with a + if files differ; "" without git.

    What a measurement itself writes (this list, ledgers) makes no difference.
    """
    known = _git("rev-parse", "--short=7", "HEAD")
    if known.returncode:
        return ""
    written = (":(top,exclude)benchmarks/looks.csv", ":(top,exclude)benchmarks/results")
    differs = _git("diff", "--quiet", "HEAD", "--", ":/", *written).returncode
    return known.stdout.strip() + "+" * bool(differs)


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    command = ["git", *words]
    return subprocess.run(command, cwd=FILE.parent, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    for (data, split), looks in sorted(counts().items()):
        print(f"{looks:3}  {data}: {split}")
