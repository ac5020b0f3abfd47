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


def test_a_killed_search_and_a_finished_cleaning_harm_nobody(job: Path, tmp_path: Path) -> None:
    # The search trains when this file is there.
    go = tmp_path / "go"
    held = [*SEARCH, "model.name=file:tests.cluster.held_model:net", f"model.options.until={go}"]

    # 1. The search, which started first, is killed while the cleaning runs.
    search = Terminal("tune", job, *held)
    search.wait_for("Ray cluster at")
    cleaning = Terminal("clean", job)
    cleaning.wait_for("Ray cluster at")
    assert search.process.poll() is None
    search.process.kill()
    search.process.communicate(timeout=30)
    cleaned = cleaning.result()
    assert cleaned["images"] == 60

    # 2. The same search goes on; a cleaning beside it finishes first.
    search = Terminal("tune", job, *held)
    search.wait_for("Ray cluster at")
    again = Terminal("clean", job, "clean.tag=again")
    assert again.result()["dropped"] == cleaned["dropped"]
    assert search.process.poll() is None, "the search has ended before the cleaning"
    go.touch()
    found = search.result()
    assert found["trials"] == 2 and found["best"]["train.lr"] in (0.01, 0.02)


TRAINING = ["train.epochs=4", "train.lr=0.01"]
# Long enough for the second terminal to start in the meantime.
LONG = ["train.epochs=900", "train.lr=0.001", "train.stopping.patience=null"]


def test_the_same_training_in_two_terminals_runs_once(job: Path) -> None:
    first = Terminal("train", job, *TRAINING)
    second = Terminal("train", job, *TRAINING)
    logs, told = [], []
    for terminal in (first, second):
        out, err = terminal.process.communicate(timeout=240)
        assert terminal.process.returncode == 0, err
        logs.append(err)
        told.append(json.loads(out.splitlines()[-1]))
    assert told[0]["model"] == told[1]["model"] and told[0]["metrics"] == told[1]["metrics"]
    # Every epoch was trained in one of the two only.
    assert "".join(logs).count("epoch   4 of 4") == 1
    assert "finished already" in "".join(logs)


@pytest.mark.share
def test_the_second_terminal_goes_on_where_the_first_was_killed(job: Path) -> None:
    first = Terminal("train", job, *LONG)
    first.wait_for("epoch   1 of 900")
    second = Terminal("train", job, *LONG)
    second.wait_for("Another process works on the same")
    first.process.kill()
    first.process.communicate(timeout=30)
    out, err = second.process.communicate(timeout=240)
    assert second.process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["epochs"] == 900
    assert "epoch   1 of 900" not in err and "epoch 900 of 900" in err


def test_the_same_search_in_two_terminals_has_one_refit(job: Path) -> None:
    """Each planned one, by the time that it had itself."""
    asked = [*SEARCH, "search.refit={train.epochs: 3}", "search.budget_s=600"]
    terminals = [Terminal("tune", job, *asked) for _ in range(2)]
    logs, told = [], []
    for terminal in terminals:
        out, err = terminal.process.communicate(timeout=240)
        assert terminal.process.returncode == 0, err
        logs.append(err)
        told.append(json.loads(out.splitlines()[-1]))
    assert told[0]["model"] == told[1]["model"]
    # The second one says so, and not once for the search and once for the refit.
    assert "".join(logs).count("Another process works on the same") == 1
    assert "".join(logs).count("epoch   3 ") == 1
