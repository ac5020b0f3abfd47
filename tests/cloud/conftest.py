"""Object stores on loopback, each a real server on a free port: moto for S3, Azurite for Azure Blob
and ADLS.

Azurite comes from npm once, into the cache. Each server is stopped by its process id.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path

import pytest

# The first that lists from a given name on, which writing a third version asks for (object_store
# 0.13).
AZURITE = "3.37.0"
STARTS_S, INSTALLS_S = 60, 300
S3_SECRET, ACCOUNT = secrets.token_urlsafe(24), "plantstore"
ACCOUNT_KEY = base64.b64encode(secrets.token_bytes(48)).decode()


@dataclass(frozen=True)
class Store:
    """A bucket or container: `uri("cells")` is an address in it, `options` open it, and `secret` is
    one of them.
    """

    root: str
    options: dict[str, str]
    endpoint_option: str
    secret: str

    def uri(self, name: str) -> str:
        return f"{self.root}/{name}-{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    pytest.importorskip("moto.server", reason="moto is in the extra `dev`")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with served(
        command, r"Running on (http://127\.0\.0\.1:\d+)", tmp_path_factory.mktemp("moto")
    ) as endpoint:
        put(f"{endpoint}/images", {})
        options = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "ours",
            "AWS_SECRET_ACCESS_KEY": S3_SECRET,
        }
        yield Store("s3://images", options, "AWS_ENDPOINT_URL", S3_SECRET)


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    command = [
        str(_azurite()),
        "--blobHost",
        "127.0.0.1",
        "--blobPort",
        "0",
        "--inMemoryPersistence",
        "--silent",
    ]
    command += ["--skipApiVersionCheck", "--disableTelemetry"]
    ready, account = (
        r"successfully listens on (http://127\.0\.0\.1:\d+)",
        {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{ACCOUNT_KEY}"},
    )
    with served(command, ready, tmp_path_factory.mktemp("azurite"), account) as endpoint:
        _make_container(f"{endpoint}/{ACCOUNT}", "images")
        options = {
            "azure_storage_account_name": ACCOUNT,
            "azure_storage_account_key": ACCOUNT_KEY,
            "azure_storage_endpoint": f"{endpoint}/{ACCOUNT}",
            "azure_allow_http": "true",
        }
        yield Store("az://images", options, "azure_storage_endpoint", ACCOUNT_KEY)


@pytest.fixture(params=["s3", "azure"])
def store(request: pytest.FixtureRequest) -> Store:
    found: Store = request.getfixturevalue(request.param)
    return found


@contextmanager
def served(
    command: list[str], ready: str, folder: Path, env: dict[str, str] | None = None
) -> Iterator[str]:
    """The address that a server prints once it listens; the server lives as long as the block."""
    log = folder / "server.log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + STARTS_S
        while not (found := re.search(ready, log.read_text())):
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{Path(command[0]).name} did not start: {log.read_text()[-500:]}")
            time.sleep(0.1)
        yield found[1]
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@contextmanager
def relayed(endpoint: str, folder: Path) -> Iterator[tuple[str, Callable[[], int]]]:
    """The address of a relay to `endpoint`, and how many bytes it has passed back; when the block
    ends it is gone.
    """
    host, _, port = endpoint.removeprefix("http://").partition(":")
    moved = folder / "moved"
    command = [sys.executable, str(Path(__file__).with_name("relay.py")), host, port, str(moved)]
    with served(command, r"Relaying on (http://127\.0\.0\.1:\d+)", folder) as address:
        yield address, lambda: int(moved.read_text())


@contextmanager
def logged(endpoint: str, folder: Path, delay_s: float = 0) -> Iterator[tuple[str, Path]]:
    """The address of a relay to `endpoint`, and the file of the requests that it passed on
    (request_log.py). Each answer comes `delay_s` later.
    """
    host, _, port = endpoint.removeprefix("http://").partition(":")
    log = folder / "requests.jsonl"
    script = str(Path(__file__).with_name("request_log.py"))
    command = [sys.executable, script, host, port, str(log), str(delay_s)]
    with served(command, r"Relaying on (http://127\.0\.0\.1:\d+)", folder) as address:
        yield address, log


def _azurite() -> Path:
    npm = shutil.which("npm")
    if not npm or not shutil.which("node"):
        pytest.skip("Azurite is a package of npm, which is not installed here")
    home = Path.home() / ".cache" / "raypipe" / f"azurite-{AZURITE}"
    if not home.exists():
        partial = home.with_name(f"{home.name}.{uuid.uuid4().hex[:8]}")
        install = [
            npm,
            "install",
            "--prefix",
            str(partial),
            "--no-audit",
            "--no-fund",
            "--ignore-scripts",
            f"azurite@{AZURITE}",
        ]
        done = subprocess.run(
            install, capture_output=True, text=True, timeout=INSTALLS_S, check=False
        )
        if done.returncode:
            shutil.rmtree(partial, ignore_errors=True)
            pytest.skip(f"npm does not install azurite@{AZURITE}: {done.stderr.strip()[-300:]}")
        partial.replace(home)
    return home / "node_modules" / ".bin" / "azurite-blob"


def _make_container(endpoint: str, name: str) -> None:
    """Signed as Azure's REST reference has it (authorize-with-shared-key); the path of an emulator
    starts with the account.
    """
    date, version = formatdate(usegmt=True), "2021-08-06"
    signed = (
        "PUT"
        + "\n" * 12
        + f"x-ms-date:{date}\nx-ms-version:{version}\n"
        + f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    )
    signature = base64.b64encode(
        hmac.digest(base64.b64decode(ACCOUNT_KEY), signed.encode(), hashlib.sha256)
    ).decode()
    headers = {
        "x-ms-date": date,
        "x-ms-version": version,
        "Authorization": f"SharedKey {ACCOUNT}:{signature}",
    }
    put(f"{endpoint}/{name}?restype=container", headers | {"Content-Length": "0"})


def put(url: str, headers: dict[str, str]) -> None:
    with urllib.request.urlopen(
        urllib.request.Request(url, method="PUT", headers=headers), timeout=10
    ):
        pass
