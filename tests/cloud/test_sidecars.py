"""A Ray node without a package index takes the real wheels of Alibi Detect from object storage; and
one without any setting of pip takes the driver's private index, whose password is seen nowhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from raypipe.cluster.sidecars import archive, build, pins
from raypipe.cluster.sidecars.build import Source
from raypipe.cluster.sidecars.pack import Packed, pack
from raypipe.errors import RaypipeError
from tests.cluster.private_index import PASSWORD, QUOTED, Private
from tests.cluster.tiny_sidecar import install, left
from tests.serve.servers import free_port

from .conftest import Store

pytestmark = pytest.mark.cloud
ROOT = Path(__file__).parents[2]


def reach(store: Store, patch: pytest.MonkeyPatch) -> None:
    """The store's options in the environment, where nodes have them."""
    for name, value in store.options.items():
        patch.setenv(name.upper(), value)


# --- a small sidecar, in this process


def test_an_archive_in_a_store_is_packed_read_and_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = install(tmp_path, monkeypatch)
    reach(store, monkeypatch)
    address = store.uri("sidecars") + ".zip"
    packed = pack(address, pins.here())
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    assert build.ensure("tiny", Source(packed.pinned)).exists()

    def refused(source: str, says: str) -> None:
        monkeypatch.setenv("RAYPIPE_HOME", str(tmp_path / "other"))
        with pytest.raises(RaypipeError, match=says) as caught:
            build.ensure("tiny", Source(source))
        assert caught.value.exit_code == 2 and store.secret not in repr(caught.value.__reduce__())
        assert left(tmp_path / "other" / "sidecars") == []

    refused(store.uri("none") + ".zip", "no archive of sidecars.*sidecars pack --out")
    refused(f"{address}#sha256={'0' * 64}", "another one than its address names")
    # Half of it, as a copy that was cut off.
    whole = read(address)
    half = tmp_path / "half.zip"
    half.write_bytes(whole[: len(whole) // 2])
    from raypipe import stores

    stores.put(half, store.uri("half"))
    dead = {name: "http://127.0.0.1:9" for name in store.options if "endpoint" in name.lower()}
    for name, value in dead.items():
        monkeypatch.setenv(name.upper(), value)
    refused(address, r"cannot be read: the store cannot be reached.*network")
    assert len(left(home)) >= 1


def read(address: str) -> bytes:
    from raypipe import stores

    with stores.opened(address) as file:
        return file.read()


# --- the real one, on a Ray node with a home and an environment of its own


@pytest.fixture(scope="module")
def packed(s3: Store) -> Iterator[Packed]:
    with pytest.MonkeyPatch.context() as patch:
        reach(s3, patch)
        yield pack(s3.uri("alibi") + ".zip", pins.here(), ["alibi"])


def on_a_node(address: str, variables: dict[str, str], of_driver: dict[str, str]) -> dict[str, Any]:
    """What archive_node.py says."""
    command = [sys.executable, "-m", "tests.cloud.archive_node", str(free_port()), address]
    done = subprocess.run(
        [*command, json.dumps(variables)],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | of_driver,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.stdout.strip(), done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


NO_INDEX = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0"}


@pytest.mark.slow
def test_a_node_without_an_index_builds_from_the_store(
    packed: Packed, s3: Store, own_ray: dict[str, str], tmp_path: Path
) -> None:
    home, decoy = tmp_path / "node", tmp_path / "decoy"
    decoy.mkdir()
    (decoy / "of_the_node.py").write_text("")
    keys = {name: value for name, value in s3.options.items() if name.startswith("AWS_")}
    variables = NO_INDEX | keys | {"RAYPIPE_HOME": str(home), "PYTHONPATH": str(decoy)}
    driver = own_ray | {"RAYPIPE_HOME": str(tmp_path / "driver")}
    told = on_a_node(packed.pinned, variables, driver)
    assert told["prefix"].startswith(str(home)) and told["numpy"].startswith("1.")
    assert left(home / "sidecars") == [Path(told["prefix"]).name]
    assert not (tmp_path / "driver" / "sidecars").exists()
    # Only the node's environment names it; and what was built is not built again.
    variables |= {build.ARCHIVE: "s3://images/gone.zip"}
    assert on_a_node("", variables, driver)["prefix"] == told["prefix"]
    # Another home: there is nothing at that address.
    told = on_a_node("", variables | {"RAYPIPE_HOME": str(tmp_path / "new")}, driver)
    assert "There is no archive of sidecars" in told["error"]
    # The store is there, and refuses this node.
    told = on_a_node(packed.pinned, NO_INDEX | {"RAYPIPE_HOME": str(tmp_path / "new")}, driver)
    assert "archive of sidecars cannot be read" in told["error"]


@contextmanager
def private_index(packed: Packed, folder: Path) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """An index behind a password with the archive's wheels; what it was asked for."""
    with archive.opened(packed.address) as opened:
        opened.extract("alibi", folder / "out")
    for wheel in (folder / "out" / "wheels").iterdir():
        project = wheel.name.partition("-")[0].lower().replace("_", "-").replace(".", "-")
        (folder / "root" / "simple" / project).mkdir(parents=True, exist_ok=True)
        wheel.rename(folder / "root" / "simple" / project / wheel.name)
    seen: list[tuple[str, int]] = []
    handler = type("Handler", (Private,), {"seen": seen, "root": str(folder / "root")})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
def test_a_node_takes_the_drivers_private_index_and_shows_it_nowhere(
    packed: Packed, s3: Store, own_ray: dict[str, str], tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        reach(s3, patch)
        with private_index(packed, tmp_path) as (host, seen):
            bare = {"RAYPIPE_HOME": str(tmp_path / "node"), "PIP_CONFIG_FILE": os.devnull}
            good = f"http://me:{QUOTED}@{host}/simple"
            wrong = f"http://me:canary-that-is-wrong@{host}/simple"
            of_driver = own_ray | {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
            refused = on_a_node("", bare, {**of_driver, "PIP_INDEX_URL": wrong})
            assert (401 in {code for _, code in seen}) and "cannot be built" in refused["error"]
            assert "canary" not in refused["error"] + refused["raw"]
            told = on_a_node("", bare, {**of_driver, "PIP_INDEX_URL": good})
    assert told["prefix"].startswith(str(tmp_path / "node"))
    assert ("/simple/alibi-detect/", 200) in seen
    for session in (refused["session"], told["session"]):
        files = [file for file in Path(session).rglob("*") if file.is_file()]
        assert len(files) > 10
        for file in files:
            text = file.read_bytes()
            assert PASSWORD.encode() not in text, file
            assert QUOTED.encode() not in text and b"canary-that-is-wrong" not in text, file


def test_the_archive_has_what_pip_needs(packed: Packed, s3: Store) -> None:
    with pytest.MonkeyPatch.context() as patch:
        reach(s3, patch)
        with archive.opened(packed.address) as found:
            names = found.zip.namelist()
            assert found.manifest.files.keys() == {"alibi"}
            assert all(i.compress_type == zipfile.ZIP_STORED for i in found.zip.infolist())
    assert sum(name.endswith(".whl") for name in names) == len(pins.pins("alibi", pins.here()))
