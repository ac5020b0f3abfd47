"""The alias moves only to a version whose files can be read and are those that were registered."""
# Starts no Ray cluster.

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from raypipe.errors import DataError
from raypipe.main import main
from raypipe.registry import fetching, moves, promote, versions
from raypipe.registry.package import Package
from raypipe.registry.store import Store
from raypipe.registry.versions import ModelVersion
from tests.registry import handmade


@pytest.fixture
def three(
    shared_store: Store, built: Package, tmp_path: Path, request: pytest.FixtureRequest
) -> Store:
    """Versions 1 to 3; version 1 is champion, after version 2 was."""
    store = replace(
        shared_store,
        model=re.sub(r"\W+", "-", request.node.name)[:80],
        moves=str(tmp_path / "moves"),
    )
    store.client.create_registered_model(store.model)
    for number in (1, 2, 3):
        handmade.version(store, handmade.model(tmp_path / str(number), built), built.seal)
    promote.promote(store, versions.require(store, 2, ""), None)
    promote.promote(store, versions.require(store, 1, ""), 2)
    return store


def lose_all(package: Path) -> None:
    shutil.rmtree(package.parent.parent)


def lose_a_file(package: Path) -> None:
    (package / "weights.safetensors").unlink()


def flip_a_byte(package: Path) -> None:
    weights = package / "weights.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def swap_the_manifest(package: Path) -> None:
    manifest = package / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()), indent=7))


DAMAGES = [
    (lose_all, "files of .*/{n} are not where MLflow keeps them.*Move run.dir back"),
    (lose_a_file, "incomplete.*weights.safetensors.*Bring the file back"),
    (flip_a_byte, "does not match its sha256.*weights.safetensors.*Bring the file back"),
    (swap_the_manifest, "not the one that was registered as .*/{n}.*Restore the package"),
]


@pytest.mark.parametrize(("damage", "says"), DAMAGES)
def test_a_version_that_nobody_can_load_is_not_put_in_use(
    three: Store, tmp_path: Path, damage: Callable[[Path], None], says: str
) -> None:
    """Promoted, it was a champion that no server, no prediction and no check could load."""
    damage(tmp_path / "3" / "artifacts" / "package")
    damage(tmp_path / "2" / "artifacts" / "package")
    third = versions.require(three, 3, "")
    told = rf"The champion is not moved to .*/{{n}}: .*{says}.*raypipe {{verb}} CONFIG"
    up = told.replace("{n}", "3").replace("{verb}", "promote")
    back = told.replace("{n}", "2").replace("{verb}", "rollback")
    with pytest.raises(promote.Unreadable, match=up):
        promote.promote(three, third, 1)
    with pytest.raises(promote.Unreadable, match=up):
        promote.plan(three, 3)
    for to in (None, 2):
        with pytest.raises(promote.Unreadable, match=back):
            promote.rollback(three, to)
        with pytest.raises(promote.Unreadable, match=back):
            promote.plan(three, to, rolls_back=True)
    assert promote.require_champion(three).version == 1
    assert len(moves.read(three).moves) == 2


def test_what_is_in_use_already_is_not_read_again(three: Store, tmp_path: Path) -> None:
    """A command that is repeated does nothing, whatever has become of the files meanwhile."""
    lose_all(tmp_path / "1" / "artifacts" / "package")
    first = versions.require(three, 1, "")
    promote.promote(three, first, None)
    assert promote.plan(three, 1)[:2] == (1, 1)
    # Away from it leads a version that is whole.
    assert promote.rollback(three) == (1, 2)
    # It is barred now, and that is said without a look at its files.
    with pytest.raises(promote.Barred, match="rolled back"):
        promote.promote(three, first, 2)


def test_a_version_without_a_seal_is_not_put_in_use(three: Store) -> None:
    three.client.delete_model_version_tag(three.model, "3", versions.SEAL)
    with pytest.raises(DataError, match=r"not moved to .*/3: .*has no seal.*set_model_version_tag"):
        promote.promote(three, versions.require(three, 3, ""), 1)


def test_the_verb_says_it_in_one_message(
    three: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lose_a_file(tmp_path / "3" / "artifacts" / "package")
    config = tmp_path / "c.yaml"
    registry = {"uri": three.address, "model": three.model, "moves": three.moves}
    tree = {"table": {"uri": "/none"}, "run": {"dir": str(tmp_path / "run")}, "registry": registry}
    config.write_text(json.dumps(tree))
    for more in ([], ["--dry-run"]):
        assert main(["promote", str(config), "--version", "3", *more]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"not moved to {three.model}/3" in said and "Traceback" not in said
        assert "weights.safetensors" in said and "raypipe promote CONFIG --version N" in said


def test_a_move_by_hand_while_the_files_are_read_stays(
    three: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A download takes minutes, and a move in MLflow makes no commit: it was written over."""
    real = fetching.fetch

    def slow(store: Store, version: ModelVersion) -> Package:
        store.client.set_registered_model_alias(store.model, store.alias, "2")
        return real(store, version)

    monkeypatch.setattr(fetching, "fetch", slow)
    with pytest.raises(promote.Lost, match="changed while version 3 was being compared"):
        promote.promote(three, versions.require(three, 3, ""), 1)
    assert promote.require_champion(three).version == 2
