"""The loop, left alone: thirty nights as a scheduler starts them; and killed at every step."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tests.chaos import nights
from tests.chaos.nights import World

pytestmark = [pytest.mark.chaos, pytest.mark.slow]
CHECK, RETRAIN = "raypipe.watch.check:", "raypipe.watch.retrain:"
STEPS = {
    "a window is opened": ("raypipe.watch.window_log:Log.add", "after"),
    "it is predicted": (f"{CHECK}_predict", "after"),
    "its evidence is kept": (f"{CHECK}rows_once", "after"),
    "its check is noted": ("raypipe.watch.windows:Windows.checked", "after"),
    "why it began is kept": ("raypipe.watch.calls:keep", "after"),
    "the lease is taken": ("raypipe.watch.cycle:_take", "after"),
    "a challenger is trained": ("raypipe.watch.challenge:trainer.run", "after"),
    "it is registered": ("raypipe.watch.challenge:publish", "after"),
    "that is noted": ("raypipe.watch.cycle:Held.reached", "after"),
    "both are compared": ("raypipe.watch.judging:judge", "after"),
    "the decision is kept": (f"{RETRAIN}rows_once", "after"),
    "it is about to be carried out": ("raypipe.watch.retrained:carry_out", "before"),
    "the move is committed": ("raypipe.registry.moves:append", "after"),
    "it is carried out": ("raypipe.watch.retrained:carry_out", "after"),
    "the lease is given back": ("raypipe.watch.cycle:Held.close", "after"),
}


@pytest.fixture(scope="module")
def grown(ray_session: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[World, Path]:
    """A world with one night of new pictures and labels for such, and a copy of it."""
    folder = tmp_path_factory.mktemp("killed")
    made = nights.world(folder / "world", ray_session)
    made.night("new", 60, 1)
    made.images("new", 240, 10_000)
    shutil.copytree(made.root, folder / "saved")
    return made, folder / "saved"


@pytest.fixture(scope="module")
def undisturbed(grown: tuple[World, Path]) -> dict[str, Any]:
    made, saved = grown
    nights.run_twice(made)
    found = nights.state(made)
    assert found["champion"] == 2 and found["versions"] == 2
    nights.again(saved, made.root)
    assert made.versions() == 1
    return found


@pytest.mark.parametrize("step", STEPS)
def test_a_kill_at_any_step_changes_nothing(
    step: str, grown: tuple[World, Path], undisturbed: dict[str, Any]
) -> None:
    made, saved = grown
    nights.again(saved, made.root)
    made.killed("retrain", *STEPS[step])
    nights.run_twice(made)
    assert nights.state(made) == undisturbed
    assert made.checked() == made.arrived()


def test_two_retrains_at_once_are_one(
    grown: tuple[World, Path], undisturbed: dict[str, Any]
) -> None:
    made, saved = grown
    nights.again(saved, made.root)
    both = [made.begin("jobs/retrain.py", str(made.config), "--json") for _ in range(2)]
    results = [nights.ended(process) for process in both]
    assert [code for code, *_ in results] == [0, 0], [err for *_, err in results]
    nights.run_twice(made)
    assert nights.state(made) == undisturbed


@pytest.mark.timeout(1800)  # six minutes on two quiet cores
def test_thirty_nights(ray_session: str, tmp_path: Path) -> None:
    made = nights.world(tmp_path / "world", ray_session)
    results: list[dict[str, Any]] = []
    reasons: list[str] = []
    for number in range(1, 31):
        made.night("old" if number < 15 else "new", 5 if number == 12 else 60, number)
        if number == 20:
            made.images("new", 240, 10_000)
        if number == 10:
            table = DeltaTable(str(made.root / "nightly"))
            table.optimize.compact()
            table.vacuum(0, dry_run=False, enforce_retention_duration=False)

        if number in (8, 16, 23):
            made.killed("drift", *list(STEPS.values())[number % 4])
        if number in (5, 18):
            arguments = ["jobs/drift.py", str(made.config), "--json", "--exit-code"]
            both = [nights.ended(made.begin(*arguments)) for _ in range(1)]
            both += [nights.ended(p) for p in [made.begin(*arguments) for _ in range(2)]]
            assert len({(code, result["p_value"]) for code, result, _ in both}) == 1, both
            code, result, err = both[0]
        else:
            code, result, err = made.job("drift", "--exit-code")
        assert code == (3 if result["is_drift"] else 0), err
        results.append(result)
        if code == 3:
            code, done, err = made.job("retrain")
            assert code == 0, err
            reasons.append(done["reason"])

    assert len(results) == 30
    assert "waiting" in results[11] and results[12]["window"] == 12
    assert all(result["is_drift"] for result in results[14:20])
    assert not any(result["is_drift"] for result in results[:14])
    ended = [row for row in made.rows("retrains") if row["event"] == "ended"]
    assert len(ended) == 1, reasons
    assert (made.champion(), made.versions()) == (2, 2)
    windows = Counter(row["window"] for row in made.rows("windows") if row["event"] == "checked")
    assert windows == Counter(range(1, 30))
    assert made.checked() == made.arrived(), "each image was in one window"
    evidence = Counter(row["window"] for row in made.rows("drift"))
    assert set(evidence) == set(range(1, 30))
    answers = Counter((row["about"], row["number"]) for row in made.rows("calls"))
    assert set(answers.values()) == {1}, "none is doubled"
    assert {row["key"] for row in made.rows("drift")} <= {about for about, _ in answers}
