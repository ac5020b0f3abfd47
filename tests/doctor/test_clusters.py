"""Faults around real Ray clusters: another token, another Ray, a private cluster, two at once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.doctor.conftest import Doctor, environment

OTHERS = "other clusters"


@contextmanager
def begun(home: Path, dashboard_port: int = 0) -> Iterator[tuple[str, Path]]:
    """A cluster of `ray start` with the token of `home`: its address and temporary folder."""
    # A short name: the paths of Ray's sockets may have 107 characters.
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="rd", ignore_cleanup_errors=True) as name:
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port", "0"]
        start += ["--num-cpus", "1", "--object-store-memory", str(100 * 2**20)]
        start += ["--disable-usage-stats", "--include-dashboard", str(bool(dashboard_port)).lower()]
        start += ["--dashboard-port", str(dashboard_port)] if dashboard_port else []
        (Path(name) / "ray").mkdir()
        own = environment(home, {"RAY_TMPDIR": name, "RAY_AUTH_MODE": "token"})
        try:
            subprocess.run(start, env=own, check=True, capture_output=True, timeout=90)
            yield (Path(name) / "ray" / "ray_current_cluster").read_text(), Path(name)
        finally:
            started = [
                process
                for process in psutil.process_iter(["cmdline"])
                if any(name in word for word in process.info["cmdline"] or [])
            ]
            for process in started:
                process.kill()
            psutil.wait_procs(started, timeout=10)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_cluster_that_belongs_to_a_program(ray_session: str, doctor: Doctor) -> None:
    """The session's cluster ends with these tests. Whoever joins it ends too."""
    theirs = Path.home() / ".ray" / "auth_token"
    own = doctor.home / ".ray" / "auth_token"
    own.write_text(theirs.read_text())
    # Where no `ray start` of other people leaves its record.
    doctor.env["RAY_TMPDIR"] = str(doctor.home)
    told = doctor("--only", "clusters", RAY_ADDRESS=ray_session)
    finding = told.findings["cluster"]
    assert finding["state"] == "fail" and "is private" in finding["seen"]
    assert finding["way_out"].startswith("unset RAY_ADDRESS")
    told = doctor("--only", "clusters", first="unset RAY_ADDRESS", RAY_ADDRESS=ray_session)
    # Other people may have clusters on this host; this one is left alone.
    assert told.state("cluster") == "ok" and ray_session not in str(told.findings)
    assert "of other programs, which are left alone" in told.findings[OTHERS]["seen"]


@pytest.mark.slow
def test_clusters_with_another_token_other_versions_and_a_second_one(
    doctor: Doctor, tmp_path: Path
) -> None:
    port = free_port()
    with begun(doctor.home, port) as (address, folder):
        near = replace(doctor, env={**doctor.env, "RAY_TMPDIR": str(folder)})
        # A shell in which Ray's own commands would be refused.
        finding = near.names_and_mends("cluster", "--only", "clusters", state="warn")
        assert address in finding["seen"]
        near.env["RAY_AUTH_MODE"] = "token"

        # Another token, or none because authentication is off here: the cluster refuses.
        other = tmp_path / "other" / ".ray" / "auth_token"
        other.parent.mkdir(parents=True)
        other.write_text("0" * 64)
        other.chmod(0o600)
        dashboard = f"http://127.0.0.1:{port}"
        for named in ({}, {"RAY_ADDRESS": address}, {"RAY_ADDRESS": dashboard}):
            told = near("--only", "clusters", HOME=str(other.parents[1]), **named)
            assert "refuses this token" in told.findings["cluster"]["seen"], told.findings
            assert "~/.ray/auth_token" in told.findings["cluster"]["way_out"]
        told = near("--only", "clusters", HOME=str(tmp_path))
        assert "refuses this token" in told.findings["cluster"]["seen"], told.findings
        told = near("--only", "clusters,token", RAY_AUTH_MODE="disabled")
        assert told.state("cluster") == told.state("token") == "fail"
        # The way out: the head's token, here.
        other.write_text((doctor.home / ".ray" / "auth_token").read_text())
        for named in ({"RAY_ADDRESS": address}, {"RAY_ADDRESS": dashboard}):
            told = near("--only", "clusters,token", HOME=str(other.parents[1]), **named)
            assert told.state("cluster") == told.state("token") == "ok", told.findings

        # Another Ray here than there.
        info = tmp_path / "old" / "ray-2.55.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.55.0\n")
        path = f"{info.parent}{os.pathsep}{doctor.env.get('PYTHONPATH', '')}"
        told = near("--only", "clusters", PYTHONPATH=path)
        assert "here are 2.55.0 and" in told.findings["cluster"]["seen"]
        assert told.findings["cluster"]["way_out"].startswith("Install ray==")

        with begun(doctor.home) as (second, _):
            told = near("--only", "clusters")
            finding = told.findings[OTHERS]
            assert finding["state"] == "fail" and second in finding["seen"]
            way_out = finding["way_out"].partition(", or")[0]
            assert way_out == f"export RAY_ADDRESS={address}"
            assert near("--only", "clusters", first=way_out).state(OTHERS) == "ok"
    # Killed, it leaves its record: a verb starts its own, and an address that names it is dead.
    told = near("--only", "clusters", RAY_ADDRESS=address)
    assert "nobody listens there" in told.findings["cluster"]["seen"]
