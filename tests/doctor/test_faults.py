"""Faults planted for real, all at once: each is named with its way out, and following it helps."""

from __future__ import annotations

import http.server
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path

import pyarrow as pa
import pytest

from raypipe.tables.table import append
from tests.doctor.conftest import Doctor

# Finding -> what it says about the planted fault.
PLANTED = {
    "packages": "simplejpeg 0.1 in",
    "torchvision": "operator torchvision::nms does not exist",
    "configuration": "Unknown config key train.precison",
    "compile locks": "lock is older",
    "java": "is Java 8",
    "memory": "cluster.object_store_mb takes",
    "open files": "up to 256",
    "sockets": "characters below",
    "text": "ANSI_X3.4-1968",
    "port of serve": "is taken by process",
    "telemetry": "RAY_USAGE_STATS_ENABLED=1",
    "variables": "AWS_ENDPOINT_ULR (did you mean AWS_ENDPOINT_URL?)",
    "token": "has mode 0644",
    "cluster": "nobody listens there",
    "table": "uses a feature this version does not read",
    "mlflow": "does not answer",
    "clock": "s ahead of MLflow",
}
# Their way out is a line for the shell, word for word.
SHELL = "compile locks", "open files", "sockets", "text", "telemetry", "variables", "token"
# Warnings: they stop no verb by themselves.
WARNED = {"java", "text", "telemetry"}
LATE_S = 3600.0


@contextmanager
def wrong_clock() -> Iterator[str]:
    """An HTTP server that is an hour behind, and no MLflow."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response_only(404)
            self.send_header("Date", formatdate(time.time() - LATE_S, usegmt=True))
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def add_metadata(folder: Path, name: str, version: str) -> Path:
    """A package's metadata in a folder of its own, as another installation leaves them."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return info


def add_java(folder: Path, version: str) -> None:
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    java.chmod(0o755)


def use_feature(table: Path, feature: str | None) -> None:
    """Add a commit by hand, as an engine of 2030 would write it; None: a table of today."""
    log = table / "_delta_log"
    features = [feature] if feature else []
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7}
    protocol |= {"readerFeatures": features, "writerFeatures": features}  # type: ignore[dict-item]
    number = len(list(log.glob("*.json")))
    (log / f"{number:020d}.json").write_text(json.dumps({"protocol": protocol}) + "\n")


def test_seventeen_faults_are_named_and_their_ways_out_work(doctor: Doctor, tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    old = tmp_path / "old"
    info = add_metadata(old, "simplejpeg", "0.1")
    companion = old / "torchvision" / "__init__.py"
    companion.parent.mkdir()
    companion.write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    for version in ("1.8.0_392", "17.0.15"):
        add_java(tmp_path / version, version)
    lock = doctor.home / ".cache/torch_extensions/py311_cpu/deepspeed_ccl/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (time.time() - LATE_S,) * 2)
    (doctor.home / ".ray" / "auth_token").chmod(0o644)
    table = tmp_path / "cells"
    append(str(table), pa.table({"image": pa.array([b"x"], pa.binary())}), "add")
    use_feature(table, "somethingOf2030")

    checks = (
        "packages,libraries,locks,java,memory,files,sockets,text,ports,telemetry,variables,token,"
        "clusters,table,mlflow,clock"
    )
    variables = {
        "PYTHONPATH": f"{old}{os.pathsep}{doctor.env.get('PYTHONPATH', '')}",
        "JAVA_HOME": str(tmp_path / "1.8.0_392"),
        "LC_ALL": "C",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONUTF8": "0",
        "RAY_USAGE_STATS_ENABLED": "1",
        "AWS_ENDPOINT_ULR": "http://127.0.0.1:1",
        "RAY_ADDRESS": "127.0.0.1:1",
        "RAY_TMPDIR": str(tmp_path / ("deep" * 20)),
    }
    few = "ulimit -S -n 256"
    with socket.create_server(("127.0.0.1", 0)) as taken, wrong_clock() as late:
        settings = {
            "run.dir": tmp_path / "run",
            "table.uri": table,
            "model.name": "torchvision:resnet18",
            "train.precison": "bf16",
            "cluster.object_store_mb": 50_000_000,
            "serve.port": taken.getsockname()[1],
            "registry.uri": late,
        }
        given = [f"{name}={value}" for name, value in settings.items()]
        planted = doctor(*given, "--only", checks, first=few, **variables)

    assert planted.code == 1
    for name, seen in PLANTED.items():
        finding = planted.findings[name]
        assert finding["state"] == ("warn" if name in WARNED else "fail"), finding
        assert seen in finding["seen"] and finding["rule"] and finding["way_out"], finding
    ways = {name: planted.findings[name]["way_out"] for name in PLANTED}

    # Now each way out, as it is written.
    first = "\n".join([few, *(ways[name] for name in SHELL)])
    assert "remove a folder that should not be on the path" in ways["packages"]
    (info / "METADATA").unlink()
    info.rmdir()
    assert "pip uninstall torchvision" in ways["torchvision"]
    companion.unlink()
    companion.parent.rmdir()
    assert "set JAVA_HOME to it" in ways["java"]
    assert "unset RAY_ADDRESS" in ways["cluster"]
    first += f"\nexport JAVA_HOME={tmp_path / '17.0.15'}\nunset RAY_ADDRESS"
    assert "Did you mean 'train.precision'?" in ways["configuration"]
    settings["train.precision"] = settings.pop("train.precison")
    for name, setting in (("memory", "cluster.object_store_mb"), ("port of serve", "serve.port")):
        settings[setting] = ways[name].rpartition(f"{setting}=")[2]
    assert "check registry.uri" in ways["mlflow"] and "NTP" in ways["clock"]
    settings["registry.uri"] = "null"
    assert "DROP FEATURE" in ways["table"]
    use_feature(table, None)

    given = [f"{name}={value}" for name, value in settings.items()]
    mended = doctor(*given, "--only", checks, first=first, **variables)
    states = {name: mended.state(name) for name in PLANTED if name != "torchvision"}
    assert set(states.values()) == {"ok"}, [mended.findings[n] for n in states]
    assert "torchvision" not in mended.findings
    # Other programs of this host may be seen too; nothing of what was planted.
    assert not {name for name in mended.findings if mended.state(name) == "fail"} & set(PLANTED)
