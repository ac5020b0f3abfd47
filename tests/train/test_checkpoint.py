"""A checkpoint is complete or does not count: damaged and missing files are skipped and named."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from raypipe.errors import DataError
from raypipe.train import checkpoint
from raypipe.train.loop import LoopState
from raypipe.train.parallel import Snapshot
from raypipe.train.parallel.snapshot import Piece, cut

FILES = ("weights-00000.safetensors", "optimizer-00000.safetensors", "state.json")


def state(epoch: int) -> LoopState:
    return LoopState(epoch=epoch, best=0.5, best_epoch=0, history=[{"val_accuracy": 0.5}] * epoch)


def snapshot(epoch: int) -> Snapshot:
    weights = {
        "a": Piece.whole(torch.full((3, 4), float(epoch))),
        "b": Piece.whole(torch.arange(5)),
    }
    return Snapshot(weights, {"exp_avg/a": Piece.whole(torch.ones(3, 4))}, {"averaged": epoch})


def write(folder: Path, epoch: int) -> Path:
    return checkpoint.write(folder, snapshot(epoch), state(epoch))


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    return [write(tmp_path / f"epoch-{e:04d}", e + 1) for e in range(3)]


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    found = checkpoint.read(write(tmp_path / "one", 7))
    assert found.state == state(7) and found.facts == {"averaged": 7}
    assert {name: t.tolist() for name, t in found.weights.items()} == {
        "a": [[7.0] * 4] * 3,
        "b": [0, 1, 2, 3, 4],
    }
    assert list(found.optimizer) == ["exp_avg/a"] and "exp_avg/b" not in found.optimizer


def test_what_one_rank_saved_any_reader_of_safetensors_reads(tmp_path: Path) -> None:
    weights = load_file(write(tmp_path / "one", 7) / "weights-00000.safetensors")
    assert weights["a"].shape == (3, 4) and float(weights["a"].mean()) == 7


@settings(deadline=None, max_examples=30)
@given(
    shape=st.lists(st.integers(1, 5), max_size=3), world=st.integers(1, 4), seed=st.integers(0, 99)
)
def test_the_pieces_of_any_number_of_ranks_make_the_whole(
    shape: list[int], world: int, seed: int
) -> None:
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    size = -(-whole.numel() // world)  # equal shares, the last ones padded or empty
    with tempfile.TemporaryDirectory() as scratch:
        for rank in range(world):
            piece = Piece.part(cut(whole, rank * size, size), rank * size, tuple(shape))
            checkpoint.write_part(Path(scratch), Snapshot({"a": piece}), rank, "now")
        found = checkpoint.read(checkpoint.publish(Path(scratch), state(1), world, "now", 0))
        assert torch.equal(found.weights["a"], whole)


def test_a_rank_that_wrote_nothing_leaves_no_checkpoint(tmp_path: Path) -> None:
    """Nor does what it left in the folder when the same step was saved before."""
    for attempt, ranks in (("before", (0, 1)), ("now", (0,))):
        for rank in ranks:
            checkpoint.write_part(tmp_path / "one", snapshot(1), rank, attempt)
    with pytest.raises(TimeoutError, match="rank 1 wrote no part of one"):
        checkpoint.publish(tmp_path / "one", state(1), 2, "now", 0.1)
    assert checkpoint.newest([tmp_path / "one"])[0] is None
    checkpoint.write_part(tmp_path / "one", snapshot(1), 1, "now")
    assert checkpoint.newest([checkpoint.publish(tmp_path / "one", state(1), 2, "now", 0)])[0]


def test_the_newest_is_the_one_with_most_epochs(three: list[Path]) -> None:
    assert checkpoint.newest(reversed(three)) == (three[-1], [])
    assert checkpoint.newest([]) == (None, [])


def test_ten_thousand_epochs_are_more_than_9999(tmp_path: Path) -> None:
    """By name 10000 comes before 9999, and a resume lost all epochs since then."""
    at = [(9999, 0), (10_000, 0), (10_000, 7)]
    folders = [write(tmp_path / checkpoint.name(epoch, step), 1) for epoch, step in at]
    assert checkpoint.newest(folders) == (folders[-1], [])
    assert [checkpoint.place(folder) for folder in folders] == at


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-3]), "is missing or cut short"),
        (lambda path: path.unlink(), "is missing or cut short"),
        (
            lambda path: path.write_bytes(
                bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]
            ),
            "does not match its sha256",
        ),
    ],
    ids=["truncated", "gone", "one bit flipped"],
)
def test_a_damaged_one_is_skipped_and_named(
    three: list[Path], name: str, damage: object, says: str
) -> None:
    damage(three[-1] / name)  # type: ignore[operator]
    found, skipped = checkpoint.newest(three)
    assert found == three[1]
    assert skipped == [f"epoch-0002: {name} {says}"]
    with pytest.raises(ValueError, match=f"epoch-0002: {name} {says}"):
        checkpoint.read(three[-1])


def test_a_model_is_read_without_the_optimizer_of_its_training(three: list[Path]) -> None:
    """Two thirds of a checkpoint, which nobody reads when the training has ended."""
    folder = three[-1]
    whole = checkpoint.read(folder)
    for name in FILES:
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        if name.startswith("optimizer"):
            read = checkpoint.read_model(folder)
            assert read.state == whole.state and read.weights.keys() == whole.weights.keys()
        else:
            with pytest.raises(DataError, match=rf"{name} does not match.*Remove .*{folder.name},"):
                checkpoint.read_model(folder)
        (folder / name).write_bytes(before)
    # The way out names what says that the training has ended, and no file of the user's.
    (folder.parent / "result.json").touch()
    (folder / checkpoint.MANIFEST).unlink()
    with pytest.raises(DataError, match=rf"Remove .*{folder.name}, and run"):
        checkpoint.read_model(folder)
    (folder.parent / "config.yaml").touch()
    with pytest.raises(DataError, match=r"no readable manifest.*Remove \S*result\.json, and run"):
        checkpoint.read_model(folder)


@pytest.mark.parametrize("manifest", ["", "{", "[]", '{"epoch": 3}'])
def test_a_damaged_manifest_is_no_checkpoint(three: list[Path], manifest: str) -> None:
    (three[-1] / checkpoint.MANIFEST).write_text(manifest)
    found, skipped = checkpoint.newest(three)
    assert found == three[1] and len(skipped) == 1 and "no readable manifest" in skipped[0]


@pytest.mark.parametrize("dies_in", ["save_file", "json.dumps", "_sha256"])
def test_a_kill_between_files_leaves_no_checkpoint_and_the_next_write_mends_it(
    three: list[Path], monkeypatch: pytest.MonkeyPatch, dies_in: str
) -> None:
    folder, fired = three[0].with_name("epoch-0003"), []

    def kill(*args: object, **kwargs: object) -> None:
        fired.append(dies_in)
        raise KeyboardInterrupt("killed")

    with monkeypatch.context() as patched:
        patched.setattr(f"raypipe.train.checkpoint.{dies_in}", kill)
        with pytest.raises(KeyboardInterrupt, match="killed"):
            write(folder, 4)
    assert fired
    assert checkpoint.newest([*three, folder]) == (
        three[-1],
        ["epoch-0003: no readable manifest (FileNotFoundError)"],
    )
    assert checkpoint.newest([*three, write(folder, 4)]) == (folder, [])


def test_a_kill_while_the_manifest_is_written_does_not_spoil_the_next_one(
    three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, fired = three[0].with_name("epoch-0003"), []

    def kill(self: Path, target: Path) -> None:
        fired.append(target)
        raise KeyboardInterrupt("killed")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", kill)
        with pytest.raises(KeyboardInterrupt, match="killed"):
            write(folder, 4)
    assert fired == [folder / "part-00000.json"]
    assert checkpoint.newest([*three, folder])[0] == three[-1]
    assert checkpoint.newest([*three, write(folder, 4)]) == (folder, [])


def test_writing_over_an_old_one_never_mixes_the_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "epoch-0000", 1)
    monkeypatch.setattr(checkpoint, "_sha256", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError, match="division"):
        write(folder, 2)
    monkeypatch.undo()
    assert checkpoint.verify(folder) is not None


def test_only_the_named_epochs_are_kept(three: list[Path]) -> None:
    checkpoint.keep(three[0].parent, {"epoch-0000", "epoch-0002"})
    assert sorted(p.name for p in three[0].parent.iterdir()) == ["epoch-0000", "epoch-0002"]


def altered(path: Path) -> None:
    """One bit of the last tensor."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def test_what_changes_after_it_was_verified_is_not_loaded(tmp_path: Path) -> None:
    """The file changes between the check and the use: the tensor that is used is the hashed one."""
    folder = write(tmp_path / "epoch-0000", 1)
    before = {name: tensor.clone() for name, tensor in checkpoint.read(folder).weights.items()}
    opened = checkpoint.read(folder)
    altered(folder / "weights-00000.safetensors")
    with pytest.raises(
        DataError,
        match=r"not what its manifest says: .*sha256.*Nothing altered is loaded"
        r".*checkpoint before it",
    ):
        dict(opened.weights)
    whole = checkpoint.read(write(tmp_path / "epoch-0001", 1), verified=True)
    kept = dict(whole.weights)
    altered(tmp_path / "epoch-0001" / "weights-00000.safetensors")
    assert kept.keys() == before.keys() and all(
        torch.equal(kept[name], before[name]) for name in kept
    )


@pytest.mark.parametrize("file", ["weights-00000.safetensors", "state.json"])
def test_a_checkpoint_of_format_1_is_read_and_held_to_its_hashes(file: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "epoch-0000", 1)
    now = dict(checkpoint.read(folder).weights)
    manifest = json.loads((folder / checkpoint.MANIFEST).read_text())
    assert manifest.pop("format") == checkpoint.FORMAT
    del manifest["tensors"]
    (folder / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    then = dict(checkpoint.read(folder).weights)
    assert then.keys() == now.keys() and all(torch.equal(then[name], now[name]) for name in now)
    altered(folder / file)
    with pytest.raises(DataError, match="not what its manifest says"):
        dict(checkpoint.read(folder, verified=True).weights)


def test_steps_of_an_average_are_no_trainings(tmp_path: Path) -> None:
    """The card of one training said "mean of the weights of 1,840 trials"."""
    cases: tuple[tuple[str, dict[str, Any], int], ...] = (
        ("ema", {"scaler": {}, "averaged": 500}, 1),
        ("soup", {checkpoint.AVERAGED: 3}, 3),
        ("one", {}, 1),
    )
    for name, facts, expected in cases:
        checkpoint.write(tmp_path / name, Snapshot(facts=facts), LoopState())
        assert checkpoint.averaged(tmp_path / name) == expected
