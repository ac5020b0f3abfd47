"""The lease of a retrain: one holder at a time, and none for ever."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from raypipe.errors import DataError
from raypipe.watch import cycle
from raypipe.watch.cycle import Busy, Held, Journal, LeaseLost, hold
from tests import forked

HOLDER = """
import os, sys, time
from raypipe.watch import cycle
with cycle.hold(cycle.Journal(sys.argv[1], "cells", None), "c") as held:
    print(type(held).__name__, flush=True)
    until = time.monotonic() + float(sys.argv[2])
    while time.monotonic() < until and not os.path.exists(sys.argv[1] + ".stop"):
        time.sleep(0.05)
"""


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "retrains")


def journal(place: str, scope: str = "cells") -> Journal:
    return Journal(place, scope, None)


def other_process(place: str, seconds: float) -> forked.Process:
    process = forked.start(HOLDER, place, seconds)
    assert process.stdout.readline() == "Held\n"
    return process


def beats(place: str) -> int:
    return [event.event for event in journal(place).events].count("beat")


def wait_for_beats(place: str, count: int) -> None:
    until = time.monotonic() + 30
    while beats(place) < count:
        assert time.monotonic() < until, f"{beats(place)} of {count} beats"
        time.sleep(0.05)


def test_states_are_kept_with_what_came_of_them(place: str) -> None:
    with hold(journal(place), "c") as held:
        assert isinstance(held, Held)
        assert journal(place).data("c", "trained") is None
        held.reached("trained", challenger="cells/2")
    with hold(journal(place), "c") as again, hold(journal(place, "other"), "c") as other:
        assert isinstance(again, Held) and isinstance(other, Held)
        assert journal(place).data("c", "trained") == {"challenger": "cells/2"}
        other_model = journal(place, "other")
        assert other_model.data("c", "trained") is None, "another model in the same table"
    events = [event.event for event in journal(place).events]
    assert events == ["held", "trained", "released", "held", "released"]


def test_the_second_at_once_leaves_it_to_the_first(place: str) -> None:
    process = other_process(place, 60)
    try:
        began = time.monotonic()
        with hold(journal(place), "c") as held:
            assert isinstance(held, Busy) and str(process.pid) in held.who
            assert "under way" in str(held)
        assert time.monotonic() - began < 30, "the machine says at once that it lives"
    finally:
        process.kill()
        process.wait()


def test_a_killed_holder_is_followed_at_once(place: str) -> None:
    process = other_process(place, 60)
    process.kill()
    process.wait()
    said: list[str] = []
    began = time.monotonic()
    with hold(journal(place), "c", said.append) as held:
        assert isinstance(held, Held)
    assert time.monotonic() - began < 30 and "ended without giving" in said[0]


def test_on_another_machine_silence_decides(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes cannot be seen from here, and its clock is of no account."""
    monkeypatch.setattr(cycle, "LEASE_S", 2.5)
    far = {"who": "far process 1", "kernel": "another", "pid": 1, "started": 0.0}
    assert journal(place).add("c", "held", "far", far)
    stop = threading.Event()

    def beat() -> None:
        mine = journal(place)
        while not stop.wait(0.3):
            mine.refresh()
            mine.add("c", "beat", "far", {})

    thread = threading.Thread(target=beat)
    thread.start()
    with hold(journal(place), "c") as held:
        assert isinstance(held, Busy) and held.who == "far process 1"
    stop.set()
    thread.join()
    began = time.monotonic()
    with hold(journal(place), "c") as held:
        assert isinstance(held, Held)
        assert time.monotonic() - began > 2.4


def test_who_slept_through_its_lease_writes_nothing_more(place: str) -> None:
    slow = journal(place)
    with pytest.raises(LeaseLost, match="taken over"), hold(slow, "c") as held:
        assert isinstance(held, Held)
        rival = journal(place)
        assert rival.add("c", "held", "rival", {"who": "rival"})
        held.reached("compared")
    events = [(event.event, event.holder == "rival") for event in journal(place).events]
    assert events == [("held", False), ("held", True)]


def test_beats_show_life(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cycle, "LEASE_S", 0.4)
    with hold(journal(place), "c"):
        wait_for_beats(place, 3)


def test_what_broke_is_kept_and_gives_the_lease_back(place: str) -> None:
    with pytest.raises(ValueError, match="no disk"), hold(journal(place), "c"):
        raise ValueError("no disk")
    last = journal(place).events
    assert [event.event for event in last] == ["held", "failed", "released"]
    assert last[1].data == {"why": "no disk"}


def test_of_four_at_once_one_holds(place: str) -> None:
    started = [forked.start(HOLDER, place, 60) for _ in range(4)]
    said = [process.stdout.readline().strip() for process in started]
    Path(place + ".stop").touch()
    assert [process.wait(60) for process in started] == [0, 0, 0, 0]
    assert sorted(said) == ["Busy", "Busy", "Busy", "Held"]


def test_a_number_of_a_process_may_belong_to_another_by_now(place: str) -> None:
    process = other_process(place, 60)
    held = journal(place).held
    assert held is not None
    data = {**held.data, "pid": os.getpid()}
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert cycle._is_alive(held.data) is False and cycle._is_alive(data) is False


def test_a_lease_that_could_not_be_given_back_does_not_last_as_long_as_its_process(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook lives on after its retrain broke, and its store was away."""
    monkeypatch.setattr(cycle, "LEASE_S", 1.0)
    add = Journal.add

    def away(self: Journal, cycle: str, event: str, *more: object) -> bool:
        if event in ("failed", "released"):
            raise OSError("the store is away")
        return add(self, cycle, event, *more)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", away)
        with pytest.raises(ValueError, match="broke"), hold(journal(place), "c"):
            raise ValueError("broke")
    time.sleep(1.1)
    with hold(journal(place), "c") as held:
        assert isinstance(held, Held)


def test_a_stopped_holder_is_followed_and_writes_nothing_when_it_wakes(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cycle, "LEASE_S", 1.0)
    process = other_process(place, 1)
    try:
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.1)
        with hold(journal(place), "c") as held:
            assert isinstance(held, Held)
            process.send_signal(signal.SIGCONT)
            assert process.wait(30) == 1, "LeaseLost"
            held.reached("trained")
    finally:
        process.kill()
        process.wait()
    events = [event.event for event in journal(place).events if event.event != "beat"]
    assert events == ["held", "held", "trained", "released"]


def test_a_table_that_is_away_for_a_moment_is_no_lost_lease(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was said that another process had taken the retrain over, and the beats ended."""
    monkeypatch.setattr(cycle, "LEASE_S", 0.4)
    elsewhere = Path(place + " elsewhere")
    with hold(journal(place), "c") as held:
        assert isinstance(held, Held)
        Path(place).rename(elsewhere)
        time.sleep(0.5)
        with pytest.raises(DataError, match=r"no longer a table.*store cannot be reached"):
            held._journal.refresh()
        elsewhere.rename(place)
        wait_for_beats(place, beats(place) + 1)
        held.reached("trained")
    events = [event.event for event in journal(place).events if event.event != "beat"]
    assert events == ["held", "trained", "released"]


def test_a_machine_whose_clock_was_set_still_sees_that_a_process_lives() -> None:
    """Linux counts a process's start from the boot, whose time moves with the clock: after a step
    of two seconds a living holder was taken for dead, and a second retrain began beside it."""
    mine = cycle._process()
    before_the_step = mine | {"started": float(mine["started"]) - 3600}
    assert cycle._is_alive(mine) is True and cycle._is_alive(before_the_step) is True
    # The number of this process was another one's, and that one is gone.
    assert cycle._is_alive(mine | {"ticks": int(mine["ticks"]) - 1}) is False
    # Of an older raypipe.
    older = {name: value for name, value in mine.items() if name != "ticks"}
    assert cycle._is_alive(older) is True
    assert cycle._is_alive(older | {"started": float(mine["started"]) - 3600}) is False
