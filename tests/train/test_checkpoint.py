"""A checkpoint is whole or it is none: whatever is torn, flipped or missing is skipped and named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raypipe.train import checkpoint
from raypipe.train.loop import LoopState

FILES = ("weights.safetensors", "optimizer.pt", "state.json")


def state(epoch: int) -> LoopState:
    return LoopState(epoch=epoch, best=0.5, best_epoch=0, history=[{"val_accuracy": 0.5}] * epoch)


def write(folder: Path, epoch: int) -> Path:
    weights = {"a": torch.full((3, 4), float(epoch)), "b": torch.arange(5)}
    return checkpoint.write(folder, weights, {"state": {0: {"step": torch.tensor(epoch)}}, "param_groups": []}, state(epoch))


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    return [write(tmp_path / f"epoch-{e:04d}", e + 1) for e in range(3)]


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    weights, optimizer_state, found = checkpoint.read(write(tmp_path / "one", 7))
    assert found == state(7)
    assert torch.equal(weights["a"], torch.full((3, 4), 7.0)) and torch.equal(weights["b"], torch.arange(5))
    assert optimizer_state["state"][0]["step"] == 7


def test_the_newest_is_the_one_with_most_epochs(three: list[Path]) -> None:
    assert checkpoint.newest(reversed(three)) == (three[-1], [])
    assert checkpoint.newest([]) == (None, [])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-3]), "is missing or cut short"),
        (lambda path: path.unlink(), "is missing or cut short"),
        (lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]), "does not match its sha256"),
    ],
    ids=["truncated", "gone", "one bit flipped"],
)
def test_a_damaged_one_is_skipped_and_named(three: list[Path], name: str, damage: object, says: str) -> None:
    damage(three[-1] / name)  # type: ignore[operator]
    found, skipped = checkpoint.newest(three)
    assert found == three[1]
    assert skipped == [f"epoch-0002: {name} {says}"]
    with pytest.raises(ValueError, match=f"epoch-0002: {name} {says}"):
        checkpoint.read(three[-1])


@pytest.mark.parametrize("manifest", ["", "{", "[]", '{"epoch": 3}'])
def test_a_damaged_manifest_is_no_checkpoint(three: list[Path], manifest: str) -> None:
    (three[-1] / checkpoint.MANIFEST).write_text(manifest)
    found, skipped = checkpoint.newest(three)
    assert found == three[1] and len(skipped) == 1 and "no readable manifest" in skipped[0]


@pytest.mark.parametrize("dies_in", ["torch.save", "json.dumps", "_sha256"])
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
    assert fired and (folder / "weights.safetensors").exists()
    assert checkpoint.newest([*three, folder]) == (three[-1], ["epoch-0003: no readable manifest (FileNotFoundError)"])
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
    assert fired == [folder / checkpoint.MANIFEST]
    assert checkpoint.newest([*three, folder])[0] == three[-1]
    assert checkpoint.newest([*three, write(folder, 4)]) == (folder, [])


def test_writing_over_an_old_one_never_mixes_the_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "epoch-0000", 1)
    monkeypatch.setattr(checkpoint, "_sha256", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError, match="division"):
        write(folder, 2)
    monkeypatch.undo()
    assert checkpoint.verify(folder) is not None


def test_only_the_named_epochs_are_kept(three: list[Path]) -> None:
    checkpoint.keep(three[0].parent, {"epoch-0000", "epoch-0002"})
    assert sorted(p.name for p in three[0].parent.iterdir()) == ["epoch-0000", "epoch-0002"]


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    """optimizer.pt could hold code; it is read with weights_only, whatever its manifest says."""

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return print, ("pwned",)

    folder = checkpoint.write(tmp_path / "one", {"a": torch.zeros(1)}, {"evil": Evil()}, state(1))
    assert checkpoint.verify(folder) is None
    with pytest.raises(Exception, match=r"(?i)weights_only"):
        checkpoint.read(folder)
