"""jobs/*.py and the installed commands are the verbs, with their exit codes, from any folder."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from raypipe import job_commands

tomllib = pytest.importorskip("tomllib")
ROOT = Path(__file__).parents[1]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
JOBS = sorted(path.stem for path in (ROOT / "jobs").glob("*.py"))


def test_every_job_is_installed_and_every_command_is_a_job() -> None:
    assert sorted(SCRIPTS) == ["raypipe", *(f"raypipe-{job}" for job in JOBS)]
    for job in JOBS:
        entry = EntryPoint(f"raypipe-{job}", SCRIPTS[f"raypipe-{job}"], "console_scripts")
        assert entry.load() is getattr(job_commands, job)


@pytest.mark.parametrize("job", JOBS)
def test_a_job_is_its_verb(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr(job_commands, "entry", given.append)
    monkeypatch.delenv("DATABRICKS_RUNTIME_VERSION", raising=False)
    monkeypatch.setattr(sys, "argv", ["x", "a.yaml", "train.lr=1"])
    getattr(job_commands, job)()
    verb = ["table", "prepare"] if job == "prepare" else [job]
    assert given == [[*verb, "a.yaml", "train.lr=1"]]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["train", "nowhere.yaml"], 2, "No such config file"),
        (["prepare", "nowhere", "out"], 2, "raypipe: "),
        (["tune", "--help"], 0, ""),
    ],
)
def test_exit_codes_from_a_folder_without_the_checkout(
    arguments: list[str], code: int, said: str, tmp_path: Path
) -> None:
    """As the script that pip installs does it."""
    job, *rest = arguments
    start = f"import sys; from raypipe.job_commands import {job}; sys.exit({job}())"
    command = [sys.executable, "-c", start, *rest]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == code and said in done.stderr
    assert "Traceback" not in done.stderr and not list(tmp_path.iterdir())


def test_an_error_on_databricks_is_a_message_and_shows_no_password(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The traceback of the task quoted MLflow's address as it is."""

    def failed(*given: object) -> NoReturn:
        raise ValueError("no answer of http://me:geheim-1234@mlflow:5000")

    runtime = SimpleNamespace(dbutils=None, is_local_implementation=False)
    monkeypatch.setitem(sys.modules, "databricks.sdk.runtime", runtime)
    monkeypatch.setattr("raypipe.cli.app.run_verb", failed)
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "17.3")
    monkeypatch.setattr(sys, "argv", ["x", "a.yaml"])
    with pytest.raises(SystemExit, match="1"):
        job_commands.drift()
    said = capfd.readouterr().err
    assert said.count("raypipe: ValueError") == 1 and "geheim" not in said
