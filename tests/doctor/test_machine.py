"""Faults of the machine, planted for real: each is named, and its way out works."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from raypipe.cluster import head
from raypipe.doctor import clusters, environments, machine, packages
from raypipe.doctor.finding import Asked, Settings
from raypipe.errors import ClusterError
from raypipe.version import VERSION
from tests.doctor.conftest import ROOT, Doctor


def test_a_token_that_others_may_read(doctor: Doctor) -> None:
    token = doctor.home / ".ray" / "auth_token"
    token.chmod(0o644)
    finding = doctor.names_and_mends("token", "--only", "token")
    assert "0644" in finding["seen"]
    # The same by --fix, which says what it does.
    token.chmod(0o640)
    told = doctor("--only", "token", "--fix")
    assert told.code == 0 and token.stat().st_mode & 0o777 == 0o600
    assert f"token: chmod 600 {token}" in told.err


UNINSTALLED = """
import sys
sys.path[:] = [p for p in sys.path if "site-packages" not in p] + sys.argv[1:]
from raypipe.doctor import machine
from raypipe.registry import made_by
print(machine.python(None)[0].state, made_by.code()["raypipe"])
"""


def test_code_that_lies_on_the_path_without_being_installed(tmp_path: Path) -> None:
    """A job's folder may be all there is of raypipe; its packages are there."""
    for one in Path(sysconfig.get_path("purelib")).iterdir():
        if "raypipe" not in one.name:
            (tmp_path / one.name).symlink_to(one)
    command = [sys.executable, "-S", "-c", UNINSTALLED, str(ROOT), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout.split() == ["warn", VERSION], done.stderr[-2000:]


def test_authentication_that_is_off(doctor: Doctor) -> None:
    doctor.names_and_mends("token", "--only", "token", RAY_AUTH_MODE="disabled")


def test_a_torch_that_crashes_does_not_take_the_doctor_along(
    doctor: Doctor, tmp_path: Path
) -> None:
    package = tmp_path / "broken" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    told = doctor("--only", "libraries,text", PYTHONPATH=f"{package.parent}{os.pathsep}.")
    assert "signal 11" in told.findings["imports"]["seen"] and told.state("text") == "ok"


FACTS = {
    "version": "2.13.0",
    "cuda": "13.0",
    "gpus": 2,
    "why": "the driver is too old",
    "has_gpu": True,
    "visible": None,
    "nccl": "2.28",
    "bf16": False,
}


@pytest.mark.parametrize(
    ("change", "state", "seen"),
    [
        ({}, "ok", "nccl 2.28"),
        ({"has_gpu": False, "gpus": 0}, "ok", "no GPU here"),
        ({"cuda": None, "gpus": 0}, "fail", "this machine has a GPU"),
        ({"gpus": 0}, "fail", "too old"),
        ({"gpus": 0, "visible": ""}, "warn", "CUDA_VISIBLE_DEVICES"),
        ({"nccl": ""}, "fail", "no nccl"),
    ],
)
def test_a_torch_that_does_not_fit_its_gpu(
    change: dict[str, object], state: str, seen: str
) -> None:
    """No GPU here: the judgement alone, of facts as libraries.py reports them."""
    finding = packages.torch({**FACTS, **change})
    assert finding.state == state and seen in finding.seen


def test_bf16_where_it_is_slow() -> None:
    assert packages.bf16(FACTS, {"precision": "bf16"}).state == "warn"
    assert packages.bf16(FACTS, {}).state == "ok"
    assert packages.bf16({**FACTS, "bf16": True}, {"precision": "bf16"}).state == "ok"


def test_the_lock_of_a_compiler_that_was_killed(doctor: Doctor) -> None:
    lock = doctor.home / ".cache" / "torch_extensions" / "py311_cpu" / "deepspeed_ccl" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    # A compilation that runs has a young lock: it is left alone.
    assert doctor("--only", "locks").state("compile locks") == "ok" and lock.exists()
    old = time.time() - 3600
    os.utime(lock, (old, old))
    doctor.names_and_mends("compile locks", "--only", "locks")
    lock.touch()
    os.utime(lock, (old, old))
    assert doctor("--only", "locks", "--fix").code == 0 and not lock.exists()


def test_a_disk_that_is_full(alone: Doctor) -> None:
    full = "mount -t tmpfs -o size=8m none /mnt && head -c 9m /dev/zero > /mnt/fill; mkdir /mnt/r"
    told = alone("run.dir=/mnt/r", "--only", "disks,run", first=full)
    assert "0 MiB free in /mnt" in told.findings["disk of run.dir"]["seen"]
    assert told.state("run.dir") == told.state("disk of run.dir") == "fail"
    assert "set run.dir to another disk" in told.findings["disk of run.dir"]["way_out"]
    told = alone(f"run.dir={alone.home}/run", "--only", "disks,run", first=full)
    assert told.state("run.dir") == "ok" and told.state("disk of run.dir") != "fail"


def test_a_run_folder_that_may_not_be_written(alone: Doctor) -> None:
    read_only = "mount -t tmpfs -o ro none /mnt"
    told = alone("run.dir=/mnt/run", "--only", "run", first=read_only)
    assert "/mnt cannot be written: Read-only file system" in told.findings["run.dir"]["seen"]
    writable = f"{read_only}; mount -o remount,rw /mnt"
    assert alone("run.dir=/mnt/run", "--only", "run", first=writable).state("run.dir") == "ok"


def test_a_shared_memory_of_docker(alone: Doctor) -> None:
    small = "mount -t tmpfs -o size=64m none /dev/shm"
    words = ("cluster.object_store_mb=300", "--only", "shm")
    told = alone(*words, first=small)
    assert told.state("/dev/shm") == "fail" and "64 MiB free" in told.findings["/dev/shm"]["seen"]
    assert "--shm-size" in told.findings["/dev/shm"]["way_out"]
    enough = small.replace("64m", "400m")
    assert alone(*words, first=enough).state("/dev/shm") == "ok"


def test_an_address_that_cannot_be_served_at_is_no_port_of_another_program() -> None:
    """It was "taken by another user's process", or a mistake of raypipe's."""
    for host, why in (("192.0.2.1", "assign"), ("no-such-host.invalid", "")):
        settings = Settings.model_validate({"serve": {"host": host, "port": 8123}})
        (_, served) = machine.ports(Asked(overrides=("serve.host=x",), settings=settings))
        assert served.seen.startswith(f"{host}:8123 cannot be used: ") and why in served.seen
        assert (served.state, "taken" in served.seen) == ("fail", False)


def test_a_way_out_can_be_typed_where_a_folder_has_a_blank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rm -r /home/a b/…` removes two other things."""
    folder = tmp_path / "a b"
    folder.mkdir()
    token = folder / "auth_token"
    token.write_text("x" * 40)
    token.chmod(0o644)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    (finding,) = clusters.token(Asked())
    assert shlex.split(finding.way_out) == ["chmod", "600", str(token)]
    lock = folder / "of one" / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (0, 0))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
    (finding,) = environments.locks(Asked())
    assert shlex.split(finding.way_out) == ["rm", str(lock)]


@pytest.mark.parametrize(
    ("address", "seen", "way_out"),
    [
        ("ray://127.0.0.1:10001", "ray:// is Ray Client", "--submit http://HOST:8265"),
        ("http://127.0.0.1:8265", "no address of a cluster", "HOST:6379"),
        ("head", "no address of a cluster", "HOST:6379"),
    ],
)
def test_an_address_that_every_verb_refuses_is_not_well(
    address: str, seen: str, way_out: str
) -> None:
    """The doctor called it well, if somebody listened there or it had no port."""
    settings = Settings.model_validate({"cluster": {"address": address}})
    setting, named = clusters._wanted(Asked(settings=settings), [])
    finding = clusters._joined(setting, named, {})
    assert finding.state == "fail" and seen in finding.seen and way_out in finding.way_out
    with pytest.raises(ClusterError, match=re.escape(seen)):
        head.require(address, "cluster.address")


def test_a_host_whose_name_begins_with_http_is_asked_as_a_head() -> None:
    """It was asked as a dashboard, and so found dead."""
    address = "http-head:6379"
    told = {address: clusters.Told(address, error="nobody listens there")}
    finding = clusters._joined(f"RAY_ADDRESS={address}", address, told)
    assert finding.rule == "It names the cluster that every verb joins"


def test_a_folder_that_nobody_may_look_into_is_one_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one in another user's home the doctor said that the check was a mistake of raypipe's."""
    own = Path.is_dir

    def forbidden(path: Path) -> bool:
        if tmp_path / "theirs" in path.parents:
            raise PermissionError(13, "Permission denied")
        return own(path)

    (tmp_path / "theirs").mkdir()
    monkeypatch.setattr(Path, "is_dir", forbidden)
    assert machine.existing(tmp_path / "theirs" / "a" / "b") == tmp_path / "theirs"


@pytest.mark.parametrize(
    ("command", "state"),
    [
        (["ray::ServeReplica:raypipe-0a1b2c3d4e5f:replica", ""], "ok"),
        (["/usr/bin/python3", "-m", "http.server", "8000"], "fail"),
        (["/opt/mlflow", "server", "--port", "8000"], "fail"),
        (["/opt/raypipe/bin/python", "array.py"], "fail"),
        ([], "fail"),
    ],
)
def test_a_port_is_well_taken_by_raypipe_serve_alone(
    command: list[str], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever had "serve" in its command line was called right, and raypipe's own was not."""
    monkeypatch.setattr(machine, "_holder", lambda port: ["process 7", *command] if command else [])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finding = machine._port("p", "127.0.0.1", port, "serve.port", machine.OF_SERVER)
    assert finding.state == state


def test_the_dashboard_of_ray_is_known_by_its_script() -> None:
    assert machine.OF_DASHBOARD.search("/usr/lib/ray/dashboard/dashboard.py")
    assert not machine.OF_DASHBOARD.search("/opt/raypipe/array.py")


def test_a_sidecar_that_answers_late_is_no_mistake_of_raypipe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def late(*given: object) -> str:
        raise subprocess.TimeoutExpired("python", 60)

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    monkeypatch.setattr(environments.build, "place", lambda name: tmp_path)
    monkeypatch.setattr(environments.build, "damage", late)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    finding = environments._sidecar("fastdup", Asked())
    assert finding.state == "warn" and "no answer within 60 s" in finding.seen
    assert finding.mend is None
