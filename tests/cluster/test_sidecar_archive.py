"""Nodes without internet build from an archive, or say in one message why it does not fit."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raypipe.cluster import sidecar
from raypipe.cluster.sidecars import archive, build, pins
from raypipe.cluster.sidecars.build import Source
from raypipe.cluster.sidecars.pack import Packed, pack
from raypipe.errors import ConfigError, DataError, RaypipeError
from tests.cluster import tiny_sidecar
from tests.cluster.tiny_sidecar import left, wheel
from tests.conftest import Cli

WHEEL = "wheels/tinypkg-1.0-py3-none-any.whl"


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Packed, bytes]:
    """The archive of `tiny`, packed by pip, and its bytes."""
    folder = tmp_path_factory.mktemp("packed")
    with pytest.MonkeyPatch.context() as patched:
        tiny_sidecar.install(folder, patched)
        found = pack(str(folder / "sidecars.zip"), pins.here())
    return found, Path(found.address).read_bytes()


@pytest.fixture
def packed(
    once: tuple[Packed, bytes], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Packed:
    """A copy of it; from here on pip finds nothing anywhere else."""
    copy = tmp_path / "sidecars.zip"
    copy.write_bytes(once[1])
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "empty"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    return dataclasses.replace(once[0], address=str(copy))


def rewritten(file: Path, change: Callable[[dict[str, bytes]], object]) -> None:
    """The archive again, with its files changed; whoever may write to the store can do this."""
    with zipfile.ZipFile(file) as old:
        files = {name: old.read(name) for name in old.namelist()}
    change(files)
    with zipfile.ZipFile(file, "w") as new:
        for name, content in files.items():
            new.writestr(zipfile.ZipInfo(name), content)


def manifest(inside: dict[str, bytes], **changes: Any) -> None:
    tree = json.loads(inside["manifest.json"]) | changes
    inside["manifest.json"] = json.dumps(tree, indent=1, sort_keys=True).encode()


def refused(packed: Packed, says: str, kind: type[RaypipeError] = DataError) -> None:
    """One message, and nothing left of a build."""
    with pytest.raises(kind, match=says) as caught:
        build.ensure("tiny", Source(packed.address))
    assert caught.value.exit_code == 2
    assert [name for name in left(build.home()) if name.startswith("tiny")] == []


def test_a_node_builds_from_it_alone_and_once(packed: Packed, tmp_path: Path) -> None:
    assert packed.sidecars == ["tiny"] and packed.wheels == 1 and not packed.missing
    interpreter = build.ensure("tiny", Source(packed.pinned))
    says = "import tinypkg; print(tinypkg.VERSION)"
    told = subprocess.run([interpreter, "-c", says], capture_output=True, text=True, check=True)
    assert told.stdout == "1.0\n"
    assert [name for name in left(build.home()) if "pack" not in name] == [build.place("tiny").name]
    # It is kept by content: the archive is not asked again.
    Path(packed.address).unlink()
    assert build.ensure("tiny", Source(packed.pinned)) == interpreter


def test_the_same_pins_are_the_same_bytes(tiny: Path, tmp_path: Path) -> None:
    first = pack(str(tmp_path / "a.zip"), pins.here())
    second = pack(str(tmp_path / "deep" / "b.zip"), pins.here())
    assert Path(first.address).read_bytes() == Path(second.address).read_bytes()
    assert first.sha256 == second.sha256
    with zipfile.ZipFile(first.address) as file:
        assert file.namelist() == ["manifest.json", "tiny.txt", WHEEL]
        assert hashlib.sha256(file.read("manifest.json")).hexdigest() == first.sha256


def test_people_can_install_it_by_hand(packed: Packed, tmp_path: Path) -> None:
    with zipfile.ZipFile(packed.address) as file:
        file.extractall(tmp_path / "out")
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--find-links", "wheels"]
    command += ["--no-deps", "--require-hashes", "--target", "here", "-r", "tiny.txt"]
    subprocess.run(command, cwd=tmp_path / "out", check=True, capture_output=True)
    assert (tmp_path / "out" / "here" / "tinypkg.py").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda f: f.update({WHEEL: f[WHEEL][:-1] + b"!"}), f"not whole: {WHEEL} is not the file"),
        (lambda f: f.update({WHEEL: f[WHEEL] + b"!"}), f"not whole: {WHEEL} is not the file"),
        (lambda f: f.update({WHEEL: f[WHEEL][:-1]}), f"not whole: {WHEEL} is not the file"),
        (lambda f: f.pop(WHEEL), f"not whole: {WHEEL} is missing in it"),
        (lambda f: f.pop("tiny.txt"), "not whole: tiny.txt is missing in it"),
        (lambda f: f.update({"tiny.txt": b"--index-url http://x"}), "tiny.txt is not the file"),
        (lambda f: f.pop("manifest.json"), "not whole: it has no manifest"),
        (lambda f: f.update({"manifest.json": b"{"}), "manifest cannot be read"),
        (lambda f: f.update({"manifest.json": b"[]"}), "manifest cannot be read"),
        (lambda f: f.update({"manifest.json": b"[" * 99_999}), "manifest cannot be read"),
        (lambda f: f.update({"manifest.json": b" " * 2**21}), "manifest is too long"),
        (lambda f: manifest(f, format=2), "format that this raypipe does not know"),
        (lambda f: manifest(f, files={}), "its manifest names"),
        (
            lambda f: manifest(f, python="3.9"),
            r"is for Python 3\.9 on .*, and this is Python",
        ),
        (lambda f: manifest(f, machine="sparc"), "is for Python .* on sparc"),
        (lambda f: manifest(f, sidecars={}), "is without tiny.*holds none"),
        (
            lambda f: manifest(f, sidecars={"tiny": {"pins": "0", "files": []}}),
            "other versions of tiny than this raypipe wants",
        ),
    ],
)
def test_what_does_not_fit_is_one_message(
    change: Callable[[dict[str, bytes]], object], says: str, packed: Packed
) -> None:
    rewritten(Path(packed.address), change)
    refused(packed, f"(?s){says}.*raypipe sidecars pack")


def test_a_path_that_leads_out_of_the_folder_is_refused(packed: Packed, tmp_path: Path) -> None:
    def lead_out(files: dict[str, bytes]) -> None:
        tree = json.loads(files["manifest.json"])
        for path in ("../../evil", "/tmp/evil", "wheels/../../../evil", "wheels/a/b"):
            tree["sidecars"]["tiny"]["files"] = [path]
            tree["files"][path] = {"sha256": hashlib.sha256(b"x").hexdigest(), "bytes": 1}
            files[path] = b"x"
        manifest(files, **tree)

    rewritten(Path(packed.address), lead_out)
    refused(packed, "its manifest names 'wheels/a/b'")
    assert not list(tmp_path.rglob("evil"))


def test_a_half_written_archive_is_none(packed: Packed) -> None:
    file = Path(packed.address)
    whole = file.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        refused(packed, "not whole: half-written, or damaged")
    file.write_bytes(b"\0" * len(whole))
    refused(packed, "not whole: half-written, or damaged")
    file.unlink()
    refused(packed, "no archive of sidecars on this node.*Every node reads it.*--out")
    file.mkdir()
    refused(packed, "archive of sidecars cannot be read.*directory")


def test_any_flipped_byte_is_found_or_harmless(packed: Packed) -> None:
    """Never an exception of a library, and never another sidecar than the one that was packed."""
    file = Path(packed.address)
    whole = file.read_bytes()
    outcomes = set()
    index = whole.index(b"PK\x01\x02")  # what it says of its files: there each bit counts
    flips = [(at, 0x5A) for at in range(0, len(whole), 7)]
    flips += [(at, 1 << bit) for at in range(index, len(whole)) for bit in range(8)]
    for at, bits in flips:
        file.write_bytes(whole[:at] + bytes([whole[at] ^ bits]) + whole[at + 1 :])
        folder = build.home() / "extracted"
        try:
            with archive.opened(packed.address) as found:
                found.require("tiny", pins.here())
                found.extract("tiny", folder)
            with zipfile.ZipFile(folder / WHEEL) as extracted:
                assert extracted.read("tinypkg.py") == b"VERSION = '1.0'\n"
            outcomes.add("harmless")
        except RaypipeError:
            outcomes.add("found")
    assert outcomes == {"found", "harmless"}


def test_a_hash_in_the_address_finds_an_exchanged_archive(packed: Packed, tmp_path: Path) -> None:
    """Somebody who may write to the store puts another wheel in, with hashes that fit it."""
    other = wheel(tmp_path / "evil", "tinypkg").read_bytes() + b"\0"

    def exchange(files: dict[str, bytes]) -> None:
        tree = json.loads(files["manifest.json"])
        files[WHEEL] = other
        hashed = hashlib.sha256(other).hexdigest()
        tree["files"][WHEEL] = {"sha256": hashed, "bytes": len(other)}
        files["tiny.txt"] = f"tinypkg==1.0 --hash=sha256:{hashed}\n".encode()
        listed = hashlib.sha256(files["tiny.txt"]).hexdigest()
        tree["files"]["tiny.txt"] = {"sha256": listed, "bytes": len(files["tiny.txt"])}
        manifest(files, **tree)

    rewritten(Path(packed.address), exchange)
    with pytest.raises(DataError, match=r"another one than its address names.*Find out who"):
        build.ensure("tiny", Source(packed.pinned))
    # Without the hash nobody can know.
    assert build.ensure("tiny", Source(packed.address)).exists()


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("https://host/x.zip", "no address of an archive"),
        ("", "no address of an archive"),
        ("s3://bucket/", "no address of an archive"),
        ("s3://me:canary-9f8e7d@bucket/x.zip", "holds a credential"),
        ("/x.zip#sha256=12", "Behind # stands the hash"),
        ("/x.zip#md5=12", "Behind # stands the hash"),
    ],
)
def test_an_address_that_is_none(address: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        archive.check(address)
    assert "canary" not in str(caught.value)


def test_the_settings_name_it_and_the_environment_does(
    packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(build.ARCHIVE, packed.pinned)
    try:
        sidecar.take_from(None)
        assert sidecar._told == [Source(packed.pinned)]
        sidecar.take_from("/other.zip")
        assert sidecar._told == [Source("/other.zip")]
        monkeypatch.delenv(build.ARCHIVE)
        sidecar.take_from(None)
        assert sidecar._told == []
        # The node's own environment names one, and the driver's does not.
        monkeypatch.setenv(build.ARCHIVE, packed.pinned)
        assert sidecar.ensure("tiny").exists()
    finally:
        sidecar._told.clear()


# --- packing


def packer(out: Path, more: str = "") -> subprocess.Popen[str]:
    code = f"""
import time
from pathlib import Path
from raypipe.cluster.sidecars import pack, pins
pins.LISTS = Path({str(pins.LISTS)!r})
{more}
print("begins", flush=True)
print(pack.pack({str(out)!r}, pins.here()).sha256, flush=True)
"""
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_two_packers_of_one_archive_make_it_whole(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "sidecars.zip"
    said = [process.communicate(timeout=100)[0] for process in (packer(out), packer(out))]
    assert said[0] == said[1] and len(said[0].split()[-1]) == 64
    assert build.ensure("tiny", Source(f"{out}#sha256={said[0].split()[-1]}")).exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_packer_leaves_the_old_archive(
    number: int, packed: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Path(packed.address)
    before = file.read_bytes()
    waits = "real = pack._zip\npack._zip = lambda *a: (real(*a), print('zipped', flush=True),"
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    process = packer(file, f"{waits} time.sleep(60))")
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["begins\n", "zipped\n"]
    process.send_signal(number)
    process.wait(30)
    assert file.read_bytes() == before
    assert sorted(p.name for p in tmp_path.glob("*sidecars*")) == ["sidecars.zip"]
    # The next packer clears what the dead one left, and waits for nobody.
    assert pack(str(file), pins.here()).sha256 == packed.sha256
    assert list(build.home().glob("pack-*/work")) == []


def test_a_full_disk_keeps_the_old_archive(
    tiny: Path, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = small_disk / "sidecars.zip"
    out.write_bytes(b"old")
    (small_disk / "filler").write_bytes(bytes(2**20 - 4_096))
    with pytest.raises(RaypipeError, match=r"the disk is full.*Make room") as caught:
        pack(str(out), pins.here())
    assert caught.value.exit_code == 1
    assert out.read_bytes() == b"old"
    assert sorted(p.name for p in small_disk.iterdir()) == ["filler", "sidecars.zip"]
    # Where the wheels are collected is full.
    monkeypatch.setenv("RAYPIPE_HOME", str(small_disk))
    with pytest.raises(RaypipeError, match=r"(?s)disk is full|No space left"):
        pack(str(tmp_path / "x.zip"), pins.here())
    assert not (tmp_path / "x.zip").exists()


def test_a_target_that_cannot_be_written(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RaypipeError, match=r"cannot be written.*Check that this user may write"):
        pack(str(tmp_path / "file" / "x.zip"), pins.here())
    with pytest.raises(ConfigError, match="hash of an archive is known when it is packed"):
        pack(str(tmp_path / f"x.zip#sha256={'1' * 64}"), pins.here())


def test_the_command_line(tiny: Path, tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "sidecars.zip"
    code, stdout, err = cli("sidecars", "pack", "--out", out, "--json")
    assert code == 0, err
    told = json.loads(stdout)
    assert told["sidecars"] == ["tiny"] and told["address"] == f"{out}#sha256={told['sha256']}"
    code, stdout, err = cli("sidecars", "--json")
    assert (code, list(json.loads(stdout)["sidecars"])) == (0, ["tiny"])
    for words, says in (
        (["--python", "3"], "no version of Python"),
        (["--python", "two"], "no version of Python"),
        (["--machine", "sparc"], "no wheels for such a machine"),
        (["--only", "fastdub"], "no such sidecar"),
        (["--out", "https://host/x.zip"], "no address of an archive"),
    ):
        code, _, err = cli("sidecars", "pack", *words)
        assert code == 2 and says in err and "Traceback" not in err
    (pins.LISTS / "tiny.txt").write_text("nowhere==1.0\n")
    code, _, err = cli("sidecars", "pack", "--out", out)
    assert code == 1 and "cannot be downloaded" in err and "PIP_INDEX_URL" in err
    assert "Traceback" not in err and zipfile.is_zipfile(out)


def test_another_python_and_machine(tiny: Path, tmp_path: Path, cli: Cli) -> None:
    """Wheels of the target, not of this interpreter; a pin's marker is evaluated for it too."""
    for tag in ("cp313-cp313-manylinux_2_17_aarch64", "cp311-cp311-manylinux_2_17_x86_64"):
        wheel(tmp_path / "wheels", "native", tag=tag)
    (pins.LISTS / "tiny.txt").write_text(
        "tinypkg==1.0\nnative==1.0; python_version >= '3.13'\nnone==1.0; python_version < '3.13'\n"
    )
    out = tmp_path / "other.zip"
    words = "--python", "3.13", "--machine", "aarch64"
    code, _, err = cli("sidecars", "pack", "--out", out, *words)
    assert code == 0, err
    with zipfile.ZipFile(out) as file:
        native = "wheels/native-1.0-cp313-cp313-manylinux_2_17_aarch64.whl"
        assert file.namelist() == ["manifest.json", "tiny.txt", native, WHEEL]
    code, _, err = cli("sidecars", "pack", "--out", out, "--python", "3.13")
    assert code == 1 and "native==1.0" in err and "Python 3.13 on x86_64" in err


def test_an_archive_that_is_read_while_it_is_packed_again(packed: Packed, tmp_path: Path) -> None:
    """A reader sees the old one or the new one, whole."""
    file, stop = Path(packed.address), threading.Event()
    content = file.read_bytes()

    def replace() -> None:
        from raypipe import stores

        copy = tmp_path / "copy"
        copy.write_bytes(content)
        while not stop.is_set():
            stores.put(copy, str(file))

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            with archive.opened(packed.pinned) as found:
                found.extract("tiny", tmp_path / "seen")
    finally:
        stop.set()
        thread.join()
