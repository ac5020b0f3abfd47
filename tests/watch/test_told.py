"""Results as events: one run joins them, and each says what happened."""

from __future__ import annotations

from raypipe.registry.versions import ModelVersion
from raypipe.tables.table import TableVersion
from raypipe.watch.check import CheckResult
from raypipe.watch.decide import Decision
from raypipe.watch.detect import DriftReport
from raypipe.watch.retrained import RetrainResult
from raypipe.watch.windows import Waiting, Window
from raypipe.work import told

TABLE = TableVersion("/cells", 5)
OLD, NEW = (ModelVersion("cells", n, "models:/m", {}) for n in (1, 2))


def checked(missed: str = "", number: int = 3) -> CheckResult:
    report = DriftReport((), 1e-4, True, 0.05, 500, 200, ())
    window = Window(number, 4, TABLE, "state", None, 200, "w", missed=missed)
    return CheckResult("night", "cells/1", TABLE, report, "p.html", ("/p", "k"), "abc", window)


def test_a_check_and_what_was_missed() -> None:
    run, [lost, done] = told.of_check(checked("2 checks"))
    assert run == lost.run == done.run == "abc"
    assert (lost.kind, lost.facts) == ("missed", {"missed": "2 checks"})
    assert done.kind == "check" and done.facts["is_drift"] and "night drifts" in done.text
    assert done.facts["window"] == str(checked().window)
    assert [e.kind for e in told.of_check(checked())[1]] == ["check"]


def test_a_run_that_waits_has_a_run_and_tells_of_no_check() -> None:
    first, second = (Waiting(TABLE, 3, n, 50) for n in (7, 8))
    assert told.of_check(first)[1] == [] and told.of_check(first)[0] == told.of_check(first)[0]
    assert told.of_check(first)[0] != told.of_check(second)[0]
    # "0 images came: they are checked with those that come next" was what a quiet night said.
    assert "No image of" in str(Waiting(TABLE, 3, 0, 50)) and "1 image of" in str(
        Waiting(TABLE, 3, 1, 50)
    )
    late = Waiting(TABLE, 3, 7, 50, "1 check")
    assert [e.kind for e in told.of_check(late)[1]] == ["missed"]


def test_a_retrain() -> None:
    kept = RetrainResult(OLD, NEW, Decision(False, "not better"), ())
    assert [e.kind for e in told.of_retrain("abc", kept, OLD)] == ["decision", "retrain"]
    none = RetrainResult(OLD, None, Decision(False, "no drift"), ())
    decision, state = told.of_retrain("abc", none, OLD)
    assert decision.text == "no drift" and decision.facts["challenger"] is None
    assert state.facts["state"] == "finished"
    won = RetrainResult(OLD, NEW, Decision(True, "better"), (), key="t")
    _, moved, state = told.of_retrain("abc", won, NEW)
    assert moved.kind == "promotion"
    assert moved.facts == {"model": "cells", "version_from": 1, "version_to": 2}
    assert state.facts["training"] == "t"
    assert {e.run for e in told.of_retrain("abc", won, NEW)} == {"abc"}


def test_what_a_killed_run_has_left_and_another_one_carried_out() -> None:
    """The alias moved, and no receiver ever heard of it."""
    left = RetrainResult(OLD, NEW, Decision(True, "better"), (), key="t")
    done = RetrainResult(NEW, None, Decision(False, "the check is of cells/1"), (), left=left)
    decided, moved, then, state = told.of_retrain("abc", done, NEW)
    assert (decided.text, moved.text) == ("better", "cells/2 replaces cells/1")
    assert moved.facts == {"model": "cells", "version_from": 1, "version_to": 2}
    assert then.text == "the check is of cells/1" and state.facts["state"] == "finished"


def test_another_answer_about_the_same_check_is_another_event() -> None:
    """A receiver drops an event whose id it knows: it never heard why a retrain did not begin."""
    reasons = ("waiting for labels", "2 retrains within a day", "waiting for labels")
    done = [RetrainResult(OLD, None, Decision(False, reason), ()) for reason in reasons]
    first, other, again = (told.of_retrain("abc", one, OLD)[0].id for one in done)
    assert first == again != other


def test_a_retrain_without_a_check_has_a_run_of_its_own() -> None:
    assert told.run_of(checked(), OLD, TABLE) == "abc"
    forced = told.run_of(None, OLD, TABLE)
    assert forced == told.run_of(None, OLD, TABLE) != told.run_of(None, NEW, TABLE)
