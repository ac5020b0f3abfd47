"""Verbs as jobs of the cluster of this test session: what travels, how they end, who follows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlparse

import pytest
import yaml

from raypipe import submitted
from raypipe.cluster import luggage
from raypipe.cluster.jobs import Jobs, JobState, Lost, dashboard, from_environment
from raypipe.cluster.jobs import _state as of_ray
from raypipe.cluster.submit import Command, code_of, follow, submit
from raypipe.cluster.submit import _Output as Output
from raypipe.errors import ClusterError, ConfigError, RaypipeError

from ..conftest import Cli
from .cut import Proxy

pytestmark = pytest.mark.usefixtures("ray_session")
PYTHON = "import time, sys; print('begins', flush=True)"


@pytest.fixture
def jobs(ray_session: str) -> Jobs:
    return Jobs(ray_session)


def started(jobs: Jobs, code: str) -> str:
    return jobs.submit("train", f'python -c "{PYTHON}; {code}"', {})


def raypipe(
    *arguments: str, cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command, as a user's terminal runs it: without RAY_ADDRESS, in a folder of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), **(env or {})}
    return subprocess.run(
        [sys.executable, "-m", "raypipe", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
        env=environment,
    )


def test_the_exit_code_and_the_output_of_a_job_come_back(
    jobs: Jobs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the answer to the submission was lost: it is not made twice."""
    said: list[str] = []
    # Both at once, as each takes seconds to start.
    killed = started(jobs, "import os; os.kill(os.getpid(), 9)")
    before = len(jobs.listed())
    real = jobs._client.submit_job

    def cut_after(**given: Any) -> str:
        real(**given)
        raise ConnectionError("the answer is lost")

    with monkeypatch.context() as lost:
        lost.setattr(jobs._client, "submit_job", cut_after)
        job = started(jobs, "sys.exit(3)")
    assert len(jobs.listed()) == before + 1
    assert follow(jobs, job, False, said.append) == 3
    # Ray's own line about the entrypoint may come after the job's first.
    assert capsys.readouterr().out.splitlines().count("begins") == 1
    assert said[-1] == f"Job {job} ended with exit code 3"
    # What is no code of a verb is none, as that of a signal.
    with pytest.raises(RaypipeError, match="ended as FAILED without an exit code"):
        follow(jobs, killed, False, said.append)
    listed = next(state for state in jobs.listed() if state.job == killed)
    assert (listed.verb, listed.code, listed.status) == ("train", None, "FAILED")


@pytest.mark.parametrize(
    ("status", "exit_code", "code"),
    [("FAILED", 1, 1), ("FAILED", 2, 2), ("FAILED", 127, None), ("STOPPED", 1, None)],
)
def test_a_code_is_a_verbs_if_the_job_ended_by_itself(
    status: str, exit_code: int, code: int | None
) -> None:
    """The same of what Ray says of a job, without one."""
    told = dict.fromkeys(("submission_id", "metadata", "entrypoint", "message"), None)
    info = SimpleNamespace(
        **told, status=status, driver_exit_code=exit_code, start_time=0, end_time=0
    )
    assert of_ray(info).code == code


def test_under_json_stdout_has_the_last_object_alone(
    jobs: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ['{"a": 1}', "[1]", "{odd", "text", '{"b": {}}']
    job = started(jobs, ";".join(f"print({line!r})".replace('"', '\\"') for line in lines))
    assert follow(jobs, job, True, print) == 0
    out, err = capsys.readouterr()
    assert out == '{"b": {}}\n'
    assert err.splitlines()[-5:] == ["begins", "[1]", "{odd", "text", '{"a": 1}']
    without = Output(as_json=True)
    without.take("begins\n[1]\n")
    with pytest.raises(RaypipeError, match="its JSON line did not arrive"):
        without.end(0)
    # A verb that failed has none, and its own code says so.
    without.end(2)
    assert capsys.readouterr().out == ""


# Ten lines, ten more once each file is there, then the end.
LINES = """
import itertools, os, sys, time
for part, number in itertools.product(range(3), range(10)):
    while part and not os.path.exists(f'{sys.argv[1]}/{part}'):
        time.sleep(0.05)
    print(10 * part + number, flush=True)
sys.exit(3)
"""


def test_a_job_is_found_again_after_the_connection_was_cut(jobs: Jobs, tmp_path: Path) -> None:
    """Twice, in the middle of its output: each line is shown once, in order."""
    proxy = Proxy(urlparse(jobs.address).port or 0)
    cut = Jobs(f"http://127.0.0.1:{proxy.port}")
    (tmp_path / "lines.py").write_text(LINES)
    job = cut.submit("train", f"python {tmp_path}/lines.py {tmp_path}", {})
    shown: list[str] = []
    said: list[str] = []
    ended: list[JobState] = []
    thread = threading.Thread(
        target=lambda: ended.append(cut.follow(job, shown.append, said.append))
    )
    thread.start()
    for part in (1, 2):
        wait_for(lambda last=f"{10 * part - 1}\n": last in "".join(shown), said)
        proxy.cut()
        wait_for(lambda count=part: sum("is lost" in line for line in said) == count, said)
        # These lines come while nobody listens.
        (tmp_path / str(part)).touch()
        proxy.listen(proxy.port)
    thread.join(60)
    assert [state.code for state in ended] == [3]
    # Ray's own lines about the job may come anywhere between these.
    numbers = [line for line in "".join(shown).splitlines() if line.isdigit()]
    assert numbers == [*map(str, range(30))]
    lost = [line for line in said if "is lost" in line]
    again = [line for line in said if "Connected again" in line]
    assert len(again) == len(lost) == 2, said


def test_a_job_behind_a_proxy_without_websockets_shows_its_output_when_it_has_ended(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its log was asked for again and again; under --json a job that succeeded ended with 1."""
    monkeypatch.setattr("raypipe.cluster.jobs.POLL_S", 0.5)
    proxy = Proxy(urlparse(jobs.address).port or 0, refuses=b"/logs/tail")
    behind = Jobs(f"http://127.0.0.1:{proxy.port}")
    job = started(behind, "time.sleep(2); print('{}')")
    said: list[str] = []
    assert follow(behind, job, True, said.append) == 0
    told = capsys.readouterr()
    assert told.out == "{}\n" and "begins\n" in told.err
    assert [line for line in said if "was cut off" in line] == said[:1] == said
    proxy.cut()


def wait_for(happens: Callable[[], bool], said: list[str]) -> None:
    until = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < until, said
        time.sleep(0.05)


def test_a_cluster_that_stays_away_is_one_message(jobs: Jobs) -> None:
    proxy = Proxy(urlparse(jobs.address).port or 0)
    cut = Jobs(f"http://127.0.0.1:{proxy.port}", patience_s=1)
    job = started(cut, "time.sleep(60)")
    threading.Timer(0.3, proxy.cut).start()
    with pytest.raises(RaypipeError, match="has not answered for 1 s") as gone:
        cut.follow(job, print, print)
    assert f"--follow {job}" in str(gone.value)
    assert jobs.stop(job).status == "STOPPED"
    # Again is harmless, and a job of another name is one message.
    assert jobs.stop(job).status == "STOPPED"
    with pytest.raises(ConfigError, match=f"no job 'x'.*{job[:14]}"):
        jobs.stop("x")
    with pytest.raises(RaypipeError, match="was stopped"):
        code_of(jobs.state(job), jobs.address)


def test_a_job_that_does_not_end_in_time_is_said(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """It was exit code 1, and no message."""
    job, stop = started(jobs, "time.sleep(60)"), Jobs.stop
    monkeypatch.setattr(Jobs, "stop", lambda self, name: stop(self, name, wait_s=0))
    code, out, err = cli("jobs", jobs.address, "--stop", job, "--json")
    assert (code, json.loads(out)["job"]) == (1, job)
    assert err.count("raypipe: ") == 1 and f"raypipe: The job {job} has not ended yet" in err


def test_a_reader_that_has_gone_is_no_lost_connection(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was followed again and again until the job ended."""
    job = started(jobs, "print(1, flush=True); time.sleep(60)")

    def gone(text: str) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("raypipe.cluster.submit._Output.take", lambda self, text: gone(text))
    monkeypatch.setattr("raypipe.failures.mute_stdout", lambda: None)
    with pytest.raises(RaypipeError, match=f"written: Broken pipe.*{job} continues.*--stop"):
        follow(jobs, job, False, print)
    assert not jobs.state(job).has_ended
    jobs.stop(job)


def test_a_reader_of_json_that_has_gone_is_told_how_the_job_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It said "run the same command again", which submits a second job."""

    def gone(self: Output, code: int) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(Output, "end", gone)
    monkeypatch.setattr("raypipe.failures.mute_stdout", lambda: None)
    done = SimpleNamespace(job="raypipe-x", code=0, status="SUCCEEDED", message="")
    following: Any = SimpleNamespace(address="http://h:8265", follow=lambda *given: done)
    with pytest.raises(RaypipeError, match=r"Broken pipe.*exit code 0.*--json shows it again"):
        follow(following, "raypipe-x", True, print)


def test_sigterm_leaves_the_job_as_ctrl_c_does() -> None:
    """It said "run the same command again", which submits a second job."""

    def ended(job: str, *given: object) -> JobState:
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("it went on")

    following: Any = SimpleNamespace(address="http://h:8265", follow=ended)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RaypipeError, match=r"raypipe-x continues without this command.*--stop"):
        follow(following, "raypipe-x", False, print)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_cluster_that_goes_away_is_one_message_to_who_does_not_wait(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    def lost(self: Jobs, job: str) -> JobState:
        raise Lost("it has gone")

    monkeypatch.setattr(Jobs, "state", lost)
    code, _, err = cli("jobs", jobs.address, "--follow", "raypipe-x")
    assert code != 0 and err.count("raypipe: ") == 1 and "it has gone" in err
    assert "mistake of raypipe" not in err


def test_a_folder_that_the_jobs_user_may_not_enter_is_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(submitted.os, "chdir", refuse)
    assert submitted.arguments([str(tmp_path), "-", "tune"]) == ["tune"]


@pytest.mark.parametrize(
    "address", ["auto", "ray://127.0.0.1:10001", "spark", "http://", "ftp://x:1", "host"]
)
def test_what_is_no_dashboard_is_one_message(address: str) -> None:
    with pytest.raises(ConfigError, match="no address of a dashboard"):
        dashboard(address)


def test_a_head_whose_name_begins_with_http_is_no_dashboard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`raypipe jobs` asked the head of RAY_ADDRESS, not the gateway that is named beside it."""
    monkeypatch.setenv("RAY_ADDRESS", "http-head:6379")
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://gateway:8265")
    assert from_environment() == "http://gateway:8265"
    monkeypatch.setenv("RAY_ADDRESS", "https://head:8265")
    assert from_environment() == "https://head:8265"


def test_dead_addresses_are_one_message_soon() -> None:
    began = time.monotonic()
    for address in ("http://127.0.0.1:9", "127.0.0.1:9"):
        with pytest.raises(ClusterError, match="answer"):
            Jobs(address)
    assert time.monotonic() - began < 20


def test_only_what_is_needed_travels_and_once(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.env").write_text("KEY=1")
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "one.bin").write_bytes(b"x" * 1000)
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "a.txt").write_text("a")
    (tmp_path / "mine.yaml").write_text("table: {uri: t}\n")
    config, modules = Path("mine.yaml"), {"pkg/net.py": b"1"}
    bring = luggage.below_here(["lists"])
    with luggage.packed(config, modules, bring) as (folder, inside):
        assert inside == "job/mine.yaml"
        found = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}
    others = {name for name in found if not name.startswith("raypipe/")}
    assert others == {"job/mine.yaml", "pkg/net.py", "lists/a.txt"}
    assert "raypipe/main.py" in found and "raypipe/report/report.html.j2" in found
    assert not any("__pycache__" in name for name in found)
    for wrong in ("nothing", "../..", "/etc"):
        with pytest.raises(ConfigError, match="cannot travel"):
            luggage.below_here([wrong])
    monkeypatch.setattr(luggage, "MOST_BYTES", 10)
    with (
        pytest.raises(ConfigError, match="Too much would travel"),
        luggage.packed(None, {}, {"big": tmp_path / "big"}),
    ):
        pass

    uploads: list[str] = []
    real = jobs._client._upload_package
    client = type(jobs._client)
    monkeypatch.setattr(
        client.__mro__[1],
        "_upload_package",
        lambda self, uri, *a, **k: (uploads.append(uri), real(uri, *a, **k)),
    )
    # A verb that ends at once. Of the first submission, only the upload.
    command = Command("nothing", None, [str(time.time())])
    with monkeypatch.context() as uploaded:
        upload = client._upload_working_dir_if_needed
        uploaded.setattr(Jobs, "submit", lambda self, *given: upload(self._client, given[-1]))
        submit(jobs.address, command, print)
    found_jobs, job = submit(jobs.address, command, print)
    assert code_of(found_jobs.follow(job, print, print), jobs.address) == 2
    assert len(set(uploads)) == len(uploads) <= 1


def test_paths_mean_what_they_mean_where_it_was_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, here = tmp_path / "copy", tmp_path / "here"
    copy.mkdir(), here.mkdir()
    monkeypatch.chdir(copy)
    given = submitted.arguments([str(here), "job/a.yaml", "train", "x=1"])
    assert given == ["train", str(copy / "job/a.yaml"), "x=1"] and Path.cwd() == here
    # Another machine has no such folder, and a verb needs no configuration.
    monkeypatch.chdir(copy)
    assert submitted.arguments(["/no/such/folder", "-", "tune"]) == ["tune"]
    assert Path.cwd() == copy
    ray = "/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1/runs"
    with pytest.raises(ConfigError, match=r"run\.dir is inside the folder that Ray copied"):
        luggage.require_lasting({"table.uri": "s3://b/t", "run.dir": ray})


OTHER = """
import ray, sys
ray.init(address="local", num_cpus=1, object_store_memory=10**8, include_dashboard=False)
print("up", ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=["dead", pytest.param("alive", marks=pytest.mark.slow)])
def another(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of another cluster of this host, which was started last."""
    if request.param == "dead":
        yield "127.0.0.1:9"
        return
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with subprocess.Popen(
        [sys.executable, "-c", OTHER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as other:
        assert other.stdout is not None and other.stdin is not None
        words: list[str] = []
        while words[:1] != ["up"]:
            assert other.poll() is None
            words = other.stdout.readline().split()
        yield words[1]
        other.stdin.close()


def test_a_job_joins_its_own_cluster_and_not_the_one_started_last(
    jobs: Jobs, another: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray may name any cluster of the host, another terminal's: here it always names that one."""
    look = "from raypipe.cluster.connect import ClusterConfig, connect; import os, ray; "
    look += "named = os.environ['RAY_ADDRESS']; connect(ClusterConfig()); "
    look += "print('look', named, ray.get_runtime_context().gcs_address, os.environ['RAY_ADDRESS'])"
    env = {"env_vars": {"PYTHONPATH": str(Path(__file__).parents[2])}}
    command = f'RAY_ADDRESS={another} python -c "{look}"'
    assert follow(jobs, jobs.submit("train", command, env), False, print) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    (found,) = [words[1:] for words in lines if words[:1] == ["look"]]
    own = os.environ["RAY_ADDRESS"]
    assert another != own and found == [another, own, own]


@pytest.mark.slow
def test_a_cluster_whose_path_has_another_python_runs_verbs_with_its_own(
    jobs: Jobs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ray start` by its full path: the PATH's python has none of raypipe's packages."""
    bare = tmp_path / "bin" / "python"
    bare.parent.mkdir()
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    code = str(Path(submitted.__file__).parents[1])
    path = f"{bare.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {"env_vars": {"PATH": path, "PYTHONPATH": code}}
    job = jobs.submit("config", "python -m raypipe.submitted / - config train", environment)
    assert follow(jobs, job, False, print) == 0
    assert "batch_size" in capsys.readouterr().out
    # Outside of a cluster there is no other Python: one message.
    alone = subprocess.run(
        [bare, "-m", "raypipe.submitted", "/", "-", "config"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": code},
    )
    assert alone.returncode == 2 and alone.stdout == ""
    assert alone.stderr.count("\n") == 1 and "it has no ray and no typer" in alone.stderr


@pytest.mark.slow
@pytest.mark.share
def test_a_verb_runs_there_as_it_does_here(
    ray_session: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """A terminal in another folder, relative paths, a `file:` model beside the configuration."""
    (tmp_path / "nets_that_travel").mkdir()
    (tmp_path / "nets_that_travel" / "small.py").write_text(
        "from torch import nn\n\n\ndef net(pretrained: bool) -> nn.Module:\n"
        "    return nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())\n"
    )
    config = {
        "run": {"name": "there", "dir": "runs/there"},
        "table": {"uri": "tables/there"},
        "ingest": {"from": {"images": str(photos), "labels": str(photos / "labels.csv")}},
        "model": {"name": "file:nets_that_travel.small:net", "mode": "finetune", "side_px": 32},
        "train": {"epochs": 1, "batch_size": 16},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
    there = ["mine.yaml", "--submit", ray_session, "--json"]
    env = {"PYTHONPATH": f"{Path(__file__).parents[2]}{os.pathsep}{tmp_path}"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS")
    code, _, err = cli("ingest", "mine.yaml", "ingest.workers=0")
    assert code == 0, err
    code, out, err = cli("train", *there)
    assert code == 0, out + err
    assert isinstance(json.loads(out), dict)
    assert (tmp_path / "tables" / "there" / "_delta_log").is_dir()
    assert list((tmp_path / "runs" / "there").iterdir())
    # Detached, then found again from another terminal.
    code, out, err = cli("predict", *there, "--detach")
    assert code == 0, err
    job = json.loads(out)["job"]
    before = len(Jobs(ray_session).listed())
    # Without the token nothing starts, while that one runs. Ray reads the token once a process.
    refused = [
        (["train", *there], {"RAY_AUTH_TOKEN": "0" * 64}),
        (["jobs", ray_session, "--json"], {"RAY_AUTH_MODE": "disabled"}),
    ]
    with ThreadPoolExecutor() as pool:
        for done in pool.map(
            lambda each: raypipe(*each[0], cwd=tmp_path, env=env | each[1]), refused
        ):
            assert done.returncode == 2 and "auth_token" in done.stderr, done.stderr
            assert "Traceback" not in done.stderr and not done.stdout
    code, out, err = cli("jobs", ray_session, "--follow", job, "--json")
    assert code == 0 and json.loads(out)["images"] > 0, err
    code, out, err = cli("jobs", ray_session, "--json")
    listed = json.loads(out)["jobs"]
    assert [each["verb"] for each in listed[:2]] == ["predict", "train"] and len(listed) == before


@pytest.mark.parametrize(
    "config, threads",
    [
        ({}, "None"),
        ({"runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}, "1"),
        ({"runtime_env": None}, "None"),
        (None, "1"),
    ],
)
def test_a_job_trains_with_all_threads_unless_somebody_limits_them(
    config: dict[str, object] | None, threads: str
) -> None:
    """Ray gives a job's process one thread. None: no job, so the limit is the user's own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("RAY_JOB_CONFIG_JSON_ENV_VAR", None)
    if config is not None:
        environment["RAY_JOB_CONFIG_JSON_ENV_VAR"] = json.dumps(config)
    code = (
        "import os; from raypipe.cluster.connect import prepare_environment; "
        "prepare_environment(); print(os.environ.get('OMP_NUM_THREADS'))"
    )
    ran = [sys.executable, "-c", code]
    done = subprocess.run(ran, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == threads
