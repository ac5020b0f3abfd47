"""A decision that a killed run has left behind, of which something was deleted since."""

from __future__ import annotations

from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest

from raypipe.config import RunConfig, validate
from raypipe.registry import fetching, promote, versions
from raypipe.registry.package import Package
from raypipe.registry.store import Store, open_store
from raypipe.registry.tracking import RegistryConfig
from raypipe.search.settings import SearchConfig
from raypipe.tables.table import TableVersion, append
from raypipe.train.job import TrainJob
from raypipe.watch import decisions, retrain, retrained
from raypipe.watch.check import CheckResult
from raypipe.watch.cycle import Journal, hold
from raypipe.watch.decide import Decision, GateConfig
from raypipe.watch.detect import DriftReport
from raypipe.watch.settings import WatchConfig
from tests.chaos.test_nights import STEPS
from tests.registry import handmade
from tests.registry.conftest import built, model

WATCH = WatchConfig()


__all__ = ["built", "model"]  # the fixtures


@pytest.fixture
def left(tmp_path: Path, built: Package) -> tuple[RunConfig, Store, Journal]:
    """Compared, and killed before it was carried out."""
    run = RunConfig(name="m", dir=str(tmp_path / "run"))
    store = open_store(run, RegistryConfig(model="m"))
    store.client.create_registered_model("m")
    for number in range(2):
        handmade.version(store, handmade.model(tmp_path / f"model {number}", built), built.seal)
    parts = ("m/1", "m/2", "t@v1")
    row = decisions.as_row("d", parts, (), None, Decision(True, "better"))
    append(WATCH.place(run, "decisions"), row, "gate")
    journal = Journal(WATCH.place(run, "retrains"), "m@champion", None)
    with hold(journal, "c") as held:
        kept = {"training": "t", "device_s": 1.0, "evidence": {"decision": "d", "check": None}}
        held.reached("compared", **kept)  # type: ignore[union-attr]
    return run, store, journal


def _tag(store: Store) -> str | None:
    """What the challenger says of its comparison."""
    found: str | None = store.client.get_model_version("m", "2").tags.get(versions.DECISION)
    return found


@pytest.mark.parametrize("gone", ["version", "decision"])
def test_what_cannot_be_carried_out_does_not_stop_all_that_follow(
    left: tuple[RunConfig, Store, Journal], gone: str
) -> None:
    run, store, journal = left
    if gone == "version":
        store.client.delete_model_version("m", "2")
    else:
        Path(WATCH.place(run, "decisions")).rename(run.path / "elsewhere")
    said: list[str] = []
    retrained.finish(store, run, WATCH, journal, said.append)
    assert "not carried out" in said[-1] and "deleted" in said[-1]
    events = journal.events
    retrained.finish(store, run, WATCH, journal, said.append)
    assert journal.events == events and len(said) == 2, "once"


def test_a_version_of_the_same_number_in_another_registry_is_not_promoted(
    left: tuple[RunConfig, Store, Journal], built: Package
) -> None:
    """A kill, a store that is made again, and a rerun: its version 2, which nobody had compared,
    became champion."""
    run, store, journal = left
    store.client.set_registered_model_alias("m", "champion", "1")
    parts = ("m/1", "m/2", "t@v1")
    for key, second, ends in (("theirs", "another seal", 1), ("mine", built.seal, 2)):
        seals = (built.seal, second)
        row = decisions.as_row(key, parts, (), None, Decision(True, "better"), seals=seals)
        append(WATCH.place(run, "decisions"), row, "gate")
        kept = dict(journal.data("c", "compared") or {})
        with hold(journal, key) as held:
            evidence = {"decision": key, "check": None}
            held.reached("compared", **kept | {"evidence": evidence})  # type: ignore[union-attr]
        said: list[str] = []
        retrained.finish(store, run, WATCH, journal, said.append)
        # The retrain that goes on with the same rows asks what it had decided.
        done = retrained.decided(store, run, WATCH, journal.data(key, "ended"))
        assert (done is None) == (ends == 1)
        assert int(store.client.get_model_version_by_alias("m", "champion").version) == ends
        assert ("m/2 is another package" in said[-1]) == (ends == 1)
        assert journal.data(key, "ended") is not None


def test_a_challenger_whose_files_were_lost_does_not_stop_all_that_follow(
    left: tuple[RunConfig, Store, Journal], tmp_path: Path
) -> None:
    """It is not promoted, and that is said once."""
    run, store, journal = left
    store.client.set_registered_model_alias("m", "champion", "1")
    next(tmp_path.glob("model 1/artifacts/package/weights*")).unlink()
    said: list[str] = []
    done = retrained.finish(store, run, WATCH, journal, said.append)
    assert done is not None and not done.decision.act
    assert "not moved to m/2" in said[-1] and "weights.safetensors" in said[-1]
    assert _tag(store) is None, "it was tagged as promoted"
    assert int(store.client.get_model_version_by_alias("m", "champion").version) == 1
    assert journal.data("c", "ended") is not None
    assert retrained.finish(store, run, WATCH, journal, said.append) is None


def test_a_challenger_whose_store_is_away_is_asked_for_again(
    left: tuple[RunConfig, Store, Journal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage of a minute would have ended the decision for good."""
    run, store, journal = left
    store.client.set_registered_model_alias("m", "champion", "1")

    def away(*_: object) -> Package:
        raise fetching.Away("away")

    with monkeypatch.context() as patched:
        patched.setattr(fetching, "fetch", away)
        with pytest.raises(promote.Unreadable, match="not moved to m/2: away"):
            retrained.finish(store, run, WATCH, journal, lambda _: None)
    assert journal.data("c", "ended") is None
    assert _tag(store) is None
    done = retrained.finish(store, run, WATCH, journal, lambda _: None)
    assert done is not None and done.decision.act
    assert _tag(store) == "d promoted"


@pytest.mark.parametrize("step", STEPS)
def test_the_steps_at_which_slow_tests_kill_a_night_are_there(step: str) -> None:
    module, _, name = STEPS[step][0].partition(":")
    assert callable(attrgetter(name)(import_module(module)))


def test_a_decision_by_other_limits_is_not_carried_out(
    left: tuple[RunConfig, Store, Journal],
) -> None:
    """A kill, tighter limits, and a rerun: what the old limits had decided was promoted."""
    run, store, journal = left
    store.client.set_registered_model_alias("m", "champion", "1")
    kept = dict(journal.data("c", "compared") or {}) | {"gate": "loose"}
    # What was moved before the kill stays moved.
    for cycle, now, ends in (("c1", "strict", 1), ("c2", "loose", 2), ("c3", "strict", 2)):
        with hold(journal, cycle) as held:
            held.reached("compared", **kept)  # type: ignore[union-attr]
        said: list[str] = []
        retrained.finish(store, run, WATCH, journal, said.append, now)
        assert int(store.client.get_model_version_by_alias("m", "champion").version) == ends
        assert ("settings of the gate have changed" in said[-1]) == (ends == 1)
        assert journal.data(cycle, "ended") is not None


def test_drift_of_the_champion_before_calls_for_no_retrain_of_the_new_one(
    left: tuple[RunConfig, Store, Journal],
) -> None:
    """The check before a retrain is of m/1. Then the decision that was left makes m/2 champion: it
    inherited the alarm, and with labels of that night a retrain of it began."""
    run, store, _ = left
    store.client.set_registered_model_alias("m", "champion", "1")
    found = DriftReport((), 1e-4, True, 0.05, 500, 200, ())
    checked = CheckResult(
        "batch", "m/1", TableVersion("/t", 1), found, "p.html", ("/p", "k"), "abc"
    )
    job = validate(TrainJob, {"run": run.model_dump(), "table": {"uri": str(run.path / "none")}})
    cfg = retrain.RetrainConfigs(SearchConfig(), WATCH, GateConfig())
    done = retrain.retrain(store, job, cfg, checked, say=lambda text: None)
    assert (str(done.champion), done.challenger, done.decision.act) == ("m/2", None, False)
    assert done.decision.reason == "m/2 has become champion meanwhile: the check is of m/1"
    # Nobody else tells of the promotion: the killed run could not.
    assert done.left is not None and done.left.decision == Decision(True, "better")
    assert retrain.retrain(store, job, cfg, checked, say=lambda text: None).left is None, "once"
