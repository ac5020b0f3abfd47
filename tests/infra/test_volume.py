"""Run folders in a volume of Unity Catalog: no locks, no appending, no sparse files."""

from __future__ import annotations

import errno
import fcntl
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from filelock import Timeout

from raypipe import files
from raypipe.search.schedulers import mutations
from raypipe.train.checkpoint import _save_pieces
from raypipe.train.checkpoint.tensors import Piece
from tests.infra.test_bundle_runs import volume

pytestmark = pytest.mark.cloud


@pytest.fixture(scope="module")
def mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with volume(tmp_path_factory.mktemp("volume")) as mount:
        yield mount


def test_it_refuses_what_a_volume_refuses(mount: Path) -> None:
    file = mount / "a"
    file.write_text("whole")
    for mode in ("a", "r+"):
        with pytest.raises(OSError) as error, file.open(mode) as opened:
            opened.write("more")
            opened.flush()
        assert error.value.errno == errno.EOPNOTSUPP
    with pytest.raises(OSError), file.open() as opened:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert file.rename(mount / "b").read_text() == "whole"


def test_a_lock_there_is_this_machines_and_holds_others_off(mount: Path) -> None:
    path = mount / "runs" / "lock"
    assert not files.has_locks(path.parent) and files.has_locks(Path("/tmp"))
    own = files.file_lock(path)
    assert not Path(own.lock_file).is_relative_to(mount)
    with own, pytest.raises(Timeout):
        files.file_lock(path).acquire(timeout=0.05)
    # In another process, too; and a killed one leaves nothing behind.
    code = (
        "import os, sys; from pathlib import Path; from raypipe import files\n"
        f"own = files.file_lock(Path({str(path)!r}))\n"
        "own.acquire(timeout=0); print('held', flush=True)\n"
        "sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(Timeout):
            files.file_lock(path).acquire(timeout=0.05)
    finally:
        other.kill()
        other.wait()
    with files.file_lock(path).acquire(timeout=5):
        pass
    with files.owned(mount / "owned"):
        assert [p.name for p in (mount / "owned").iterdir()] == []


def test_checkpoints_and_records_are_written_there(mount: Path) -> None:
    values = torch.arange(300_000.0)
    piece = Piece(values=values, start=0, shape=(300_000,))
    _save_pieces(mount / "part.safetensors", {"w": piece})
    from safetensors.torch import load_file

    assert torch.equal(load_file(mount / "part.safetensors")["w"], values)
    for number in range(3):
        mutations.append(mount, {"trial": number, "epoch": 2})
    assert [found["trial"] for found in mutations.read(mount)] == [0, 1, 2]
    first = (mount / mutations.LOG).read_text().splitlines()[0]
    assert json.loads(first) == {"trial": 0, "epoch": 2}
