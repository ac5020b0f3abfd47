"""Each check has a row that says whether it called for a retrain, once for each answer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from raypipe import job_commands
from raypipe.config import RunConfig, validate
from raypipe.errors import DataError
from raypipe.tables.commits import rows_once
from raypipe.tables.table import TableVersion
from raypipe.watch import calls, cycle, evidence_row, records
from raypipe.watch.check import CheckResult
from raypipe.watch.cycle import Journal
from raypipe.watch.decide import Decision
from raypipe.watch.detect import DriftReport
from raypipe.watch.settings import WatchConfig
from raypipe.watch.windows import Waiting
from raypipe.work.results.watching import Drifted, Waited
from tests import forked

NO, WAITS = Decision(False, "No drift: the champion stays"), Decision(False, "waiting for labels")
KILLED = """
import os, signal, sys
from raypipe.config import RunConfig
from raypipe.tables import commits
from raypipe.watch import calls
from raypipe.watch.decide import Decision
from raypipe.watch.settings import WatchConfig
real = commits.append_once
def dies(*given, **named):
    if sys.argv[2] == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    real(*given, **named)
    os.kill(os.getpid(), signal.SIGKILL)
commits.append_once = dies
run = RunConfig(dir=sys.argv[1])
calls.keep(run, WatchConfig(), "c1", "cells", "cells/1", Decision(False, "no"))
"""


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    return RunConfig(dir=str(tmp_path / "run"))


def keep(run: RunConfig, decision: Decision, about: str = "c1", **named: bool) -> None:
    calls.keep(run, WatchConfig(), about, "cells", "cells/1", decision, **named)


def said(run: RunConfig) -> list[tuple[str, int, str]]:
    rows = records.calls(run, WatchConfig()).rows
    return [(row["about"], row["number"], row["reason"]) for row in rows]


def test_a_rerun_adds_no_row_and_another_answer_does(run: RunConfig) -> None:
    for decision in (WAITS, WAITS, Decision(True, "labels came"), Decision(True, "labels came")):
        keep(run, decision)
    keep(run, NO, "c2")
    assert said(run) == [("c1", 1, WAITS.reason), ("c1", 2, "labels came"), ("c2", 1, NO.reason)]
    # raypipe drift looks at the same check again, and knows no labels.
    keep(run, WAITS, only_first=True)
    assert len(said(run)) == 3
    # Another model in the same folder has checks of its own.
    calls.keep(run, WatchConfig(), "c2", "other", "other/1", NO)
    assert len(said(run)) == 4


def test_many_at_once_add_each_answer_once(run: RunConfig) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: keep(run, (NO, WAITS)[n % 2]), range(4)))
    found = said(run)
    assert {reason for _, _, reason in found} == {NO.reason, WAITS.reason}
    # Threads that say the same one after another's other answer say it again, and no two have one
    # number.
    assert [number for _, number, _ in found] == list(range(1, len(found) + 1))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: keep(run, NO, "c9"), range(4)))
    assert [row for row in said(run) if row[0] == "c9"] == [("c9", 1, NO.reason)]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_before_or_after_the_commit_leaves_one_row(run: RunConfig, when: str) -> None:
    died = forked.run(KILLED, run.path, when)
    assert died.returncode == -9, died.stderr[-2000:]
    assert len(said(run)) == (when == "after")
    keep(run, Decision(False, "no"))
    assert said(run) == [("c1", 1, "no")]


def test_a_table_of_something_else_is_one_message(run: RunConfig) -> None:
    other = pa.table({"about": ["c1"], "mine": [1]})
    rows_once(str(run.path / "calls"), other.schema, {"about": "c1"}, lambda: other, "mine")
    with pytest.raises(DataError):
        keep(run, NO)


def checked(run: RunConfig, key: str, is_drift: bool) -> CheckResult:
    found = DriftReport((), 0.5, is_drift, 0.01, 100, 100, ())
    named = {"key": key, "name": "batch", "model": "cells/1", "table": f"n@v{key}"}
    row = pa.Table.from_pylist(
        [{**named, "is_drift": is_drift, "about": key, "checked_at": "2026-01-02T03:00:00+00:00"}],
        evidence_row.ROW,
    )
    rows_once(str(run.path / "drift"), evidence_row.ROW, {"key": key}, lambda: row, "drift")
    table = TableVersion("n", int(key))
    return CheckResult("batch", "cells/1", table, found, "page", ("", ""), key)


def test_a_check_alone_says_what_the_policy_says(run: RunConfig) -> None:
    watch = validate(WatchConfig, {"policy": {"k": 2, "of": 3, "cooldown": 3}})

    def answer(key: str, is_drift: bool) -> str:
        found = checked(run, key, is_drift)
        decision = calls.of_check(run, watch, "cells@champion", "cells/1", None, found)
        alone = calls.alone(run, watch, "cells@champion", decision)
        assert not alone.act, "raypipe drift trains nothing"
        assert decision.act == ("raypipe retrain begins one" in alone.reason)
        return alone.reason

    assert answer("1", False) == "No drift: the champion stays"
    assert answer("2", True).startswith("Drift in 1 of the last 2 checks")
    assert "raypipe retrain begins one" in answer("3", True)
    past = Journal(str(run.path / "retrains"), "cells@champion", None)
    past.add("x", "held", "h", {})
    past.add("x", "ended", "h", {})
    assert "the policy waits for 3" in answer("4", True)


@pytest.mark.parametrize("policy", [{"cooldown": 3}, {"daily_cap": 1}, {"budget_h": 1.0}])
def test_a_retrain_that_broke_is_called_for_again(run: RunConfig, policy: dict[str, float]) -> None:
    """It counted as an earlier one, so on Databricks, where a check starts the job of a retrain,
    nothing went on with it."""
    watch = validate(WatchConfig, {"policy": policy})
    past = Journal(str(run.path / "retrains"), "cells@champion", None)
    past.add("x", "held", "h", {"checks": 1})
    past.add("x", "trained", "h", {"device_s": 7200.0})
    past.add("x", "failed", "h", {"why": "the store was away"})
    past.add("x", "released", "h", {})
    of = run, watch, "cells@champion", "cells/1", None, checked(run, "1", True)
    assert calls.of_check(*of).act
    past.add("x", "ended", "h", {"device_s": 7200.0})
    assert not calls.of_check(*of).act


@pytest.mark.parametrize("policy", [{"cooldown": 3}, {"daily_cap": 1}])
def test_a_retrain_that_is_under_way_is_an_earlier_one(
    run: RunConfig, policy: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as broken: a check on another machine began a second one, which ended at once."""
    watch = validate(WatchConfig, {"policy": policy})
    past = Journal(str(run.path / "retrains"), "cells@champion", None)
    past.add("x", "held", "h", {"checks": 1, **cycle._process(), "kernel": "of another machine"})
    of = run, watch, "cells@champion", "cells/1", None, checked(run, "1", True)
    assert not calls.of_check(*of).act
    past.add("x", "beat", "h", {})
    assert not calls.of_check(*of).act
    # It was silent for longer than a lease.
    with monkeypatch.context() as patched:
        patched.setattr(cycle, "LEASE_S", 0.0)
        assert calls.of_check(*of).act
    # One of this machine that has ended without a word is seen at once, and goes on.
    dead = cycle._process() | {"started": 0.0, "ticks": -1}
    past.add("x", "held", "other", dead)
    assert calls.of_check(*of).act
    past.add("x", "held", "third", cycle._process())
    assert not calls.of_check(*of).act
    past.add("x", "failed", "third", {"why": "the store was away"})
    past.add("x", "released", "third", {})
    assert calls.of_check(*of).act


def test_a_retrain_that_is_under_way_is_named_and_none_begins(
    run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cooldown the answer was "raypipe retrain begins one", which ended at once."""
    past = Journal(str(run.path / "retrains"), "cells@champion", None)
    watch = WatchConfig()

    def answer() -> str:
        found = checked(run, "1", True)
        decision = calls.of_check(run, watch, "cells@champion", "cells/1", None, found)
        assert decision.act, "the policy calls for one all the same"
        return calls.alone(run, watch, "cells@champion", decision).reason

    assert answer().endswith("the policy calls for a retrain: raypipe retrain begins one")
    past.add("x", "held", "h", {"checks": 1, "who": "there process 7", **cycle._process()})
    of_one = "the policy calls for a retrain. A retrain is under way (there process 7, since "
    assert of_one in answer() and "begins one" not in answer()
    # Another model's is no obstacle.
    other = calls.alone(run, watch, "other@champion", Decision(True, "Drift, and labels: 3"))
    assert other.reason == "Drift, and the policy calls for a retrain: raypipe retrain begins one"
    past.add("x", "ended", "h", {})
    past.add("x", "released", "h", {})
    assert answer().endswith("raypipe retrain begins one")


def test_on_a_night_of_few_images_earlier_checks_call_for_a_retrain(run: RunConfig) -> None:
    """On Databricks none began: the job's condition was the drift of tonight."""
    watch = WatchConfig()
    of = run, watch, "cells@champion", "cells/1", None, None
    assert not calls.of_check(*of).act, "without any check"
    checked(run, "1", True)
    assert calls.of_check(*of).act
    waiting = Waiting(TableVersion("t", 3), 2, 5, 20)
    said = Waited(waiting, calls.of_check(*of).act).summary()
    assert job_commands.task_values(said) == {"is_drift": "false", "retrain": "true"}
    found = checked(run, "2", False)
    assert not calls.of_check(*of).act
    assert job_commands.task_values(Drifted(found, True).summary())["retrain"] == "true"
