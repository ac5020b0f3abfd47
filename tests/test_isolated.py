"""The namespace of isolated.py: packets to other machines are seen, with who sent them, and go
nowhere; loopback works.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TRIES = """
import socket
server = socket.create_server(("127.0.0.1", 0))
socket.create_connection(server.getsockname(), 2)
asks = b"\\1\\1\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0\\7example\\3org\\0\\0\\1\\0\\1"
out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
out.sendto(asks, ("192.0.2.53", 53))
try:
    socket.create_connection(("192.0.2.7", 443), 0.5)
except OSError as e:
    print(type(e).__name__)
"""


def isolated(report: Path, *more: str) -> tuple[str, dict[str, object]]:
    command = [sys.executable, "-m", "tests.isolated", str(report), *more]
    done = subprocess.run(
        [*command, sys.executable, "-c", TRIES],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    if "PermissionError" in done.stderr or "unshare" in done.stderr:
        pytest.skip("this user may not make a network namespace")
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(report.read_text())


def test_tries_are_seen_and_dropped(tmp_path: Path) -> None:
    out, report = isolated(tmp_path / "report.json")
    assert out == "TimeoutError\n" and report["code"] == 0
    tries = report["tries"]
    assert isinstance(tries, list)
    assert [(t["to"], t["port"], t["protocol"], t["asked"]) for t in tries] == [
        ("192.0.2.53", 53, "udp", "example.org"),
        ("192.0.2.7", 443, "tcp", ""),
    ]
    assert "socket.create_server" in tries[1]["who"]


def test_without_a_route_they_are_refused_at_once(tmp_path: Path) -> None:
    changed = TRIES.replace('out.sendto(asks, ("192.0.2.53", 53))', "")
    assert changed != TRIES
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.isolated", str(report), "--no-route", sys.executable]
    done = subprocess.run(
        [*command, "-c", changed], capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )
    if "PermissionError" in done.stderr:
        pytest.skip("this user may not make a network namespace")
    assert done.stdout == "OSError\n"
    assert json.loads(report.read_text())["tries"] == []
