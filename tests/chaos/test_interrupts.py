"""A search that gets Ctrl-C, or the signal that SLURM sends before it preempts, goes on later.

Ray Tune took both for the end of the search, which was registered with the trials that had begun.
"""

from __future__ import annotations

import collections
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from raypipe.config import dump, replace
from raypipe.job import Job
from tests.chaos import kill_search

pytestmark = pytest.mark.chaos
TRIALS, EPOCHS = 5, 3


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interrupted")
    kill_search.table(folder)
    return folder


def job_of(home: Path, name: str) -> Job:
    """Two trials at a time, whose epochs take a second."""
    job = kill_search.job_of("asha", home, home / name, alone=False)
    changes = {
        "search.scheduler": "none",
        "search.samples": TRIALS,
        "train.epochs": EPOCHS,
        "model.options": {"notes": str(home / name / "steps"), "step_s": 0.2},
    }
    return replace(job, changes)


def tune(job: Job, terminal: int) -> subprocess.Popen[str]:
    """The command in a session of its own, on this terminal."""
    job.run.path.mkdir(parents=True, exist_ok=True)
    file = job.run.path / "job.yaml"
    file.write_text(dump(job))
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.Popen(
        [sys.executable, "-m", "raypipe", "tune", str(file), "--json"],
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
        preexec_fn=as_from_a_terminal,
    )


def as_from_a_terminal() -> None:
    # From now on its keys are signals to this session.
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # A shell that starts these tests in the background has both ignored.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def epochs(job: Job) -> list[Path]:
    return list(job.run.path.glob("search/*/trials/*/*/epoch-*/manifest.json"))


@pytest.mark.parametrize("how", ["Ctrl-C", "Ctrl-C twice", "SIGUSR1"])
def test_a_search_that_gets_a_signal_goes_on_with_the_same_command(home: Path, how: str) -> None:
    job = job_of(home, how.replace(" ", "-"))
    keys, terminal = pty.openpty()
    process = tune(job, terminal)
    until = time.monotonic() + 120
    # The first two trials have begun, and there are others.
    while len(epochs(job)) < 3 and process.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    if how == "SIGUSR1":
        process.send_signal(signal.SIGUSR1)
    else:
        os.write(keys, b"\x03" * (2 if how == "Ctrl-C twice" else 1))
    _, err = process.communicate(timeout=60)
    last = err.splitlines()[-1]
    if how == "SIGUSR1":
        assert last.startswith("raypipe: Stopped on request (got 'SIGUSR1')"), err
    else:
        assert last == "raypipe: Interrupted. Run the same command again to go on.", err
    assert process.returncode == 1 and "Traceback" not in err and len(err.splitlines()) < 20, err
    (folder,) = job.run.path.glob("search/*")
    assert not [*folder.glob("result.json"), *folder.glob("report.html")], "nothing is finished"

    again = tune(job, terminal)
    out, err = again.communicate(timeout=200)
    assert again.returncode == 0, err
    told: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert told["trials"] == TRIALS and told["model"].endswith("/1")
    trials = json.loads((folder / "result.json").read_text())["trials"]
    assert [trial["epochs"] for trial in trials] == [EPOCHS] * TRIALS
    # The two that ran may have lost the epoch that they were in, and nothing else.
    steps = collections.Counter((job.run.path / "steps").read_text().split())
    an_epoch = min(steps.values()) // EPOCHS
    assert len(steps) == TRIALS and an_epoch >= 1
    assert sum(steps.values()) <= (TRIALS * EPOCHS + 2) * an_epoch
    os.close(keys)
    os.close(terminal)
