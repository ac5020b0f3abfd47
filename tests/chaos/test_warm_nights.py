"""A retrain from the champion's weights, replaying some old rows, killed at each of its own steps.

The steps that all retrains have are killed in test_nights.py.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from raypipe.registry import fetching, promote
from tests.chaos import nights
from tests.chaos.nights import World

pytestmark = [pytest.mark.chaos, pytest.mark.slow]
WARM = "  retrain_from: champion\n  replay: 1\n"
STEPS = {
    "one file of the champion's is placed": ("raypipe.watch.begin:write_atomic", "after"),
    "the champion is placed": ("raypipe.watch.begin:_placed", "after"),
    "the old rows are chosen": ("raypipe.watch.begin:_replayed", "after"),
    "an epoch is trained": ("raypipe.watch.challenge:decide.headline", "after"),
    "a challenger is trained": ("raypipe.watch.challenge:trainer.run", "after"),
    "it is registered": ("raypipe.watch.challenge:publish", "after"),
    "both are compared": ("raypipe.watch.judging:judge", "after"),
    "the move is committed": ("raypipe.registry.moves:append", "after"),
}


@pytest.fixture(scope="module")
def grown(ray_session: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[World, Path]:
    folder = tmp_path_factory.mktemp("warm")
    made = nights.world(folder / "world", ray_session, WARM)
    made.night("new", 60, 1)
    made.images("new", 120, 10_000)
    shutil.copytree(made.root, folder / "saved")
    return made, folder / "saved"


@pytest.fixture(scope="module")
def undisturbed(grown: tuple[World, Path]) -> dict[str, Any]:
    made, saved = grown
    nights.run_twice(made)
    found = state(made)
    assert found["champion"] == 2 and found["versions"] == 2
    assert found["start"]["weights"] == "those of cells/1"
    assert found["start"]["replay"]["replayed"] == found["start"]["replay"]["new"] == 60
    nights.again(saved, made.root)
    assert made.versions() == 1
    return found


def state(made: World) -> dict[str, Any]:
    """As of any retrain; and what the challenger says of its weights and rows."""
    package = fetching.fetch(made.store, promote.require_champion(made.store))
    return nights.state(made) | {"start": package.info["made"]["start"]}


@pytest.mark.parametrize("step", STEPS)
def test_a_kill_at_any_step_of_a_warm_retrain_changes_nothing(
    step: str, grown: tuple[World, Path], undisturbed: dict[str, Any]
) -> None:
    made, saved = grown
    nights.again(saved, made.root)
    made.killed("retrain", *STEPS[step])
    nights.run_twice(made)
    assert state(made) == undisturbed
    assert made.checked() == made.arrived()


@pytest.mark.share
def test_what_a_killed_group_of_workers_has_left_does_not_matter(
    grown: tuple[World, Path], undisturbed: dict[str, Any]
) -> None:
    """A file that says that all workers are there, and halves of what a training writes."""
    made, saved = grown
    nights.again(saved, made.root)
    text = made.config.read_text()
    made.config.write_text(text.replace("  replay: 1\n", "  replay: 1\n  retrain_workers: 2\n"))
    groups = Path(tempfile.gettempdir())
    before = set(groups.glob("raypipe-group-*"))
    made.killed("retrain", *STEPS["an epoch is trained"])
    left = set(groups.glob("raypipe-group-*")) - before
    assert left, "the workers shared a file, and died with their driver"
    run = made.root / "run"
    halves = [file for file in run.rglob("*.safetensors") if "mlflow" not in file.parts]
    assert halves, "weights of the champion, or of an epoch"
    for file in halves:
        file.with_name(f"{file.name}.0123abcd.partial").write_bytes(file.read_bytes()[:100])
    nights.run_twice(made)
    assert state(made) == undisturbed
    # What is left is a few bytes. It is not removed here: it may be another process's group.
