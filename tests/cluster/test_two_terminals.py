"""Two verbs at once on one host with `cluster.address=auto`: one ends, the other continues."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.chaos]
ROOT = Path(__file__).parents[2]
SMALL = ["cluster.cpus=1", "cluster.object_store_mb=100"]
SEARCH = ["search.samples=1", "search.space.train.lr=grid(0.01, 0.02)", "train.epochs=2"]


class Terminal:
    """`raypipe VERB JOB …` in a process of its own, which sees no cluster but what lies open."""

    def __init__(self, verb: str, job: Path, *more: str) -> None:
        self.verb, self.began = verb, time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "raypipe", verb, str(job), "--json", *SMALL, *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"},
        )

    def wait_for(self, words: str) -> None:
        """Read messages up to the one with `words`."""
        assert self.process.stderr is not None
        read = ""
        for line in self.process.stderr:
            read += line
            if words in line:
                return
        raise AssertionError(f"{self.verb} never said {words!r}:\n{read}")

    def result(self) -> dict[str, Any]:
        out, err = self.process.communicate(timeout=240)
        assert self.process.returncode == 0, f"{self.verb}: {err}"
        print(f"{self.verb}: {time.monotonic() - self.began:.0f} s")
        return dict(json.loads(out.splitlines()[-1]))


def test_a_killed_search_and_a_finished_cleaning_harm_nobody(job: Path) -> None:
    # 1. The search, which started first, is killed while the cleaning runs.
    search = Terminal("tune", job, *SEARCH)
    search.wait_for("Ray cluster at")
    cleaning = Terminal("clean", job)
    cleaning.wait_for("Ray cluster at")
    assert search.process.poll() is None
    search.process.kill()
    search.process.communicate(timeout=30)
    cleaned = cleaning.result()
    assert cleaned["images"] == 60

    # 2. The same search goes on; a cleaning beside it finishes first.
    search = Terminal("tune", job, *SEARCH)
    search.wait_for("Ray cluster at")
    again = Terminal("clean", job, "clean.tag=again")
    assert again.result()["dropped"] == cleaned["dropped"]
    found = search.result()
    assert found["trials"] == 2 and found["best"]["train.lr"] in (0.01, 0.02)
