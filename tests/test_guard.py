"""Whatever ends a verb, there is one message, and the exit code or the signal is the verb's."""

from __future__ import annotations

import errno
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from mlflow.exceptions import MlflowException
from torch.distributed import DistStoreError

from raypipe import failures
from raypipe.cli import app
from raypipe.errors import ClusterError, ConfigError
from raypipe.failures import DOCTOR, explain
from raypipe.main import main
from raypipe.timer import OutOfTime, interrupted

BEGIN = "import os, signal, sys, time\nfrom raypipe import guard\n"
RUN = "\nsys.exit(guard.guarded(lambda: guard.report_code(work())))"


def begun(work: str) -> subprocess.Popen[str]:
    script = f"{BEGIN}{work}{RUN}"
    return subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("os._exit(1)", 1, "exit code 1 and without a message"),
        ("os._exit(0)", 1, "exit code 0 and without a message"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, "SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, "SIGTERM"),
        ("os.abort()", 1, "SIGABRT"),
        ("guard.abort('The head is gone.')", 1, "The head is gone."),
    ],
)
def test_a_process_that_could_not_speak_is_spoken_for(how: str, code: int, words: str) -> None:
    process = begun(f"def work():\n    {how}")
    _, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert err.count("raypipe: ") == 1 and words in err, err


@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_a_process_that_ended_well_keeps_its_code_and_gets_no_message(code: int) -> None:
    process = begun(f"def work(): return {code}")
    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == code


def test_a_crash_after_the_last_word_changes_nothing() -> None:
    process = begun("import atexit\ndef work():\n    atexit.register(os.abort)\n    return 3")
    _, err = process.communicate(timeout=30)
    assert (process.returncode, "raypipe: " in err) == (3, False)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_signals_reach_the_work(name: str) -> None:
    work = f"""
def work():
    signal.signal(signal.{name}, lambda *_: sys.exit(guard.report_code(5)))
    print("ready", flush=True)
    # In naps: a signal between Python's last look and the sleep is seen after the sleep.
    for _ in range(1000):
        time.sleep(0.02)
"""
    process = begun(work)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(getattr(signal, name))
    process.communicate(timeout=30)
    assert process.returncode == 5


def test_the_work_ends_when_its_parent_is_killed() -> None:
    process = begun("def work():\n    print(os.getpid(), flush=True)\n    time.sleep(60)")
    assert process.stdout is not None
    worker = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.communicate(timeout=30)
    worker.wait(timeout=10)


def test_a_verb_whose_reader_has_gone_says_so() -> None:
    command = f"{sys.executable} -m raypipe --help | true; echo ${{PIPESTATUS[0]}}"
    slow = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    code = int(slow.stdout)
    assert (code == 0) == (slow.stderr == ""), slow.stderr
    assert slow.stderr.count("\n") <= 1 and "Traceback" not in slow.stderr


@pytest.mark.parametrize("module", ["raypipe", "raypipe.main"])
def test_a_verb_on_a_full_disk_says_so(module: str) -> None:
    """`python -m raypipe.main` did nothing, and ended with 0."""
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", module, "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert "disk is full" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/data/x"),
            "The disk is full (got '/data/x')",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "may not be opened (got '/x')"),
        (MemoryError("12 GB"), "The memory is full. 12 GB."),
        (DistStoreError("No space left on device"), "The disk is full"),
        (shutil.Error([("a", "b", "[Errno 28] No space left on device")]), "The disk is full"),
        (MlflowException("Disk quota exceeded: 'model'"), "The disk is full"),
        (sqlite3.OperationalError("database or disk is full"), "The disk is full"),
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
            "There is no folder for temporary files (got \"['/tmp']\")",
        ),
        (KeyboardInterrupt(), "Interrupted. Run the same command again"),
        # What Ray's handler raises.
        (SystemExit(15), "SIGTERM asked this process to end. Run the same command again"),
    ],
)
def test_what_the_machine_refuses_is_one_sentence(
    error: BaseException, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        raise RuntimeError("while doing something") from error
    except RuntimeError as e:
        code, text = explain(e)
    assert (code, words in text) == (1, True), text
    assert capfd.readouterr().err == ""


def test_ctrl_c_ends_a_verb_with_its_message(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Typer turns it into exit code 130, and said nothing."""

    def pressed(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "run_verb", pressed)
    assert main(["tune", "--table", "cells"]) == 1
    said = "raypipe: Interrupted. Run the same command again to go on.\n"
    assert capfd.readouterr().err == said


def test_our_own_mistake_shows_its_lines_and_one_message(capfd: pytest.CaptureFixture[str]) -> None:
    try:
        raise KeyError("no such thing")
    except KeyError as e:
        code, text = explain(e)
    assert code == 1 and "mistake of raypipe's" in text and "no such thing" in text
    assert "Traceback" in capfd.readouterr().err


def test_an_alarm_of_a_budget_is_no_ctrl_c(capfd: pytest.CaptureFixture[str]) -> None:
    """A mistake while somebody cleaned up after it was "Interrupted", without a line."""
    with pytest.raises(KeyError) as raised, interrupted(0.05, lambda: OutOfTime("it is over")):
        try:
            threading.Event().wait(5)
        finally:
            raise KeyError("no such thing")
    code, text = explain(raised.value)
    assert code == 1 and "mistake of raypipe's" in text and "no such thing" in text
    assert "Traceback" in capfd.readouterr().err


def test_a_ray_cluster_that_lost_something_is_no_mistake_of_ours() -> None:
    from ray.exceptions import NodeDiedError, RayTaskError

    code, text = explain(NodeDiedError("node 12 is gone"))
    assert code == 1 and "NodeDiedError" in text and "node 12 is gone" in text
    inside = RayTaskError("f", "a traceback", OSError(errno.ENOSPC, "full"))
    assert "disk is full" in explain(inside)[1]


def test_a_full_object_store_has_its_own_way_out() -> None:
    from ray.exceptions import (
        ObjectStoreFullError,
        OutOfDiskError,
        RayTaskError,
        WorkerCrashedError,
    )

    for error in (ObjectStoreFullError("no room"), OutOfDiskError("no room")):
        code, text = explain(RayTaskError("f", "a traceback", error))
        assert code == 1 and "object store is full" in text
        assert "/dev/shm" in text and "cluster.object_store_mb" in text
    # Workers crash where the disk is full to the last byte; only nodes can say so.
    code, text = explain(WorkerCrashedError())
    assert code == 1 and "no disk left: `raypipe doctor`" in text


def test_an_mlflow_server_that_died_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    from mlflow import MlflowClient

    dead = "http://127.0.0.1:9"
    with pytest.raises(Exception, match="Max retries exceeded") as raised:
        MlflowClient(dead, dead).search_registered_models()
    code, text = explain(raised.value)
    assert code == 1 and text.startswith("MLflow's server does not answer any more: API request")
    assert dead in text and "Run the same command again" in text and "mistake" not in text


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("UNAUTHENTICATED", "does not know who asks"),
        ("401", "does not know who asks"),
        ("PERMISSION_DENIED", "does not allow this: PERMISSION_DENIED: no USE CATALOG on 'main'"),
        ("403", "does not allow this"),
        ("REQUEST_LIMIT_EXCEEDED", "is asked too often"),
        ("429", "is asked too often"),
        ("TEMPORARILY_UNAVAILABLE", "is not ready"),
    ],
)
def test_an_mlflow_server_that_refuses_is_no_mistake_of_ours(
    code: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    from mlflow.exceptions import RestException

    said = {"error_code": code, "message": "no USE CATALOG on 'main'"}
    exit_code, text = explain(RestException(said))
    assert exit_code == 1 and words in text and "Run the same command again" in text
    assert "mistake" not in text and capfd.readouterr().err == ""
    with pytest.raises(AssertionError, match="mistake of raypipe's"):
        bug = explain(RestException({"error_code": "INVALID_STATE", "message": "x"}))[1]
        assert "mistake" not in bug, bug


def test_a_mistake_in_a_worker_is_named_without_the_text_of_ray(
    capfd: pytest.CaptureFixture[str],
) -> None:
    from ray.exceptions import RayTaskError

    wrapped = RayTaskError("f", "a long traceback", KeyError("no such thing"))
    code, text = explain(wrapped.as_instanceof_cause())
    assert code == 1 and text.startswith("KeyError: 'no such thing' This is a mistake")
    assert "a long traceback" in capfd.readouterr().err


def test_an_error_that_a_library_made_of_sigterm_is_no_mistake_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray's handler raises SystemExit wherever Python is: of torch it came back as a ValueError."""
    monkeypatch.setattr(failures, "_sigterm_came", [])
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
    try:
        failures.note_sigterm()
        assert "mistake" in explain(ValueError("no shape"))[1]
        with pytest.raises(SystemExit, match="15"):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    capsys.readouterr()
    code, text = explain(ValueError("could not determine the shape of object"))
    assert code == 1 and text.startswith("SIGTERM asked this process to end. Run the same command")
    assert capsys.readouterr().err == ""
    assert explain(ConfigError("no such file"))[0] == 2


def test_after_an_error_of_the_cluster_the_doctor_is_named() -> None:
    error = ClusterError("Cannot join", fix="Start one")
    assert explain(error) == (2, f"Cannot join. Start one. {DOCTOR}")
    assert DOCTOR not in explain(ConfigError("Wrong"))[1]


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_outputs_are_no_mistake_of_raypipe(closed: str) -> None:
    """The work was done, and then the command ended with 1 and a traceback."""
    command = f"{sys.executable} -m raypipe config train {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stdout + done.stderr) == (0, False)
