"""Checks that hang, crash or raise are findings; the others go on."""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from raypipe.cluster import sidecar
from raypipe.cluster.sidecars import pins
from raypipe.doctor.checks import CHECKS, chosen
from raypipe.doctor.finding import Asked, Check, Finding, Mend, ok
from raypipe.doctor.process import Died, ask
from raypipe.doctor.run import examine, mend
from raypipe.errors import ConfigError, DataError, RaypipeError
from tests.doctor.conftest import Doctor


def fine(asked: Asked) -> Sequence[Finding]:
    return [ok("fine", "as it should be")]


def test_a_check_that_hangs_ends_at_its_limit_and_delays_nobody() -> None:
    released = threading.Event()

    def hang(asked: Asked) -> Sequence[Finding]:
        released.wait(60)
        return [ok("hangs", "too late")]

    checks = [Check("hangs", hang, 0.3), Check("busy", hang, 0.3, late="warn"), Check("f", fine)]
    ticks: list[tuple[int, int]] = []
    began = time.monotonic()
    found = examine(checks, Asked(), lambda done, total: ticks.append((done, total)))
    assert time.monotonic() - began < 5
    released.set()
    assert list(found) == ["hangs", "busy", "f"] and found["f"] == fine(Asked())
    (late,) = found["hangs"]
    assert late.state == "fail" and "no answer within 0 s" in late.seen
    assert "raypipe doctor --only hangs" in late.way_out
    assert found["busy"][0].state == "warn"
    # Without the configuration the check would be refused.
    of_config = Asked(overrides=("table.uri=x",))
    (late,) = examine([Check("table", lambda asked: time.sleep(1) or [], 0.1)], of_config)["table"]
    assert "raypipe doctor CONFIG --only table" in late.way_out
    assert ticks[0] == (1, 3)


def test_a_check_that_raises_is_a_finding() -> None:
    def raises(asked: Asked) -> Sequence[Finding]:
        raise DataError("Too short", got=3, rule="At least 4", fix="Write more")

    def breaks(asked: Asked) -> Sequence[Finding]:
        raise KeyError("ours")

    found = examine([Check("a", raises), Check("b", breaks), Check("c", fine)], Asked())
    assert found["a"] == [Finding("a", "fail", "Too short (got 3)", "At least 4", "Write more")]
    assert "KeyError" in found["b"][0].seen and found["b"][0].state == "fail"
    assert found["c"][0].state == "ok"


def test_what_the_machine_lacks_is_no_mistake_of_raypipes() -> None:
    """Without HOME, and on a full disk, users were asked to report it. A file of somebody else's
    had no way out."""

    def homeless(asked: Asked) -> Sequence[Finding]:
        raise RuntimeError("Could not determine home directory.")

    def full(asked: Asked) -> Sequence[Finding]:
        raise OSError(errno.ENOSPC, "No space left on device")

    def theirs(asked: Asked) -> Sequence[Finding]:
        raise PermissionError(errno.EACCES, "Permission denied", "/x")

    found = examine([Check("a", homeless), Check("b", full), Check("c", theirs)], Asked())
    (home,), (disk,), (file,) = found["a"], found["b"], found["c"]
    assert home.state == disk.state == "fail" and home.way_out.startswith("Set HOME")
    assert "does not know the home folder" in home.seen and "The disk is full" in disk.seen
    assert "A file may not be opened (got '/x')" in file.seen
    assert (file.state, file.way_out) == ("fail", "Mend its rights, or run as a user who may")


def test_a_way_out_is_taken_and_looked_at_again() -> None:
    state = {"mended": False, "looks": 0}

    def look(asked: Asked) -> Sequence[Finding]:
        state["looks"] += 1
        if state["mended"]:
            return fine(asked)
        repair = Mend("mends it", lambda: state.update(mended=True))
        return [Finding("x", "fail", "broken", "whole", "mend it", repair)]

    def refuse(asked: Asked) -> Sequence[Finding]:
        def fails() -> None:
            raise OSError("no rights")

        return [Finding("y", "fail", "broken", "whole", "mend it", Mend("tries", fails))]

    said: list[str] = []
    checks = [Check("x", look), Check("y", refuse), Check("f", fine)]
    found = mend(examine(checks, Asked()), checks, Asked(), said.append)
    assert found["x"] == fine(Asked()) and state["looks"] == 2
    assert found["y"][0].seen == "broken; --fix failed: no rights"
    assert said == ["x: mends it", "y: tries"] and list(found) == ["x", "y", "f"]


def test_a_process_that_dies_or_hangs_says_so() -> None:
    with pytest.raises(Died, match="killed by signal 6"):
        ask("os:abort", 20)
    began = time.monotonic()
    with pytest.raises(Died, match="no answer within 1 s"):
        ask("signal:pause", 1)
    assert time.monotonic() - began < 10
    with pytest.raises(Died, match="AttributeError"):
        ask("os:no_such_function", 20)
    with pytest.raises(RaypipeError, match="no such sidecar"):
        ask("raypipe.cluster.sidecar:ensure", 20, name="nobody")


def test_every_check_has_a_name_and_an_unknown_one_is_refused() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS) >= 15
    assert {check.name for check in CHECKS if check.of_config}.isdisjoint(
        check.name for check in chosen(None, has_config=False)
    )
    assert [check.name for check in chosen("token, disks", has_config=False)] == ["token", "disks"]
    # Of two of one name, one was waited for without end.
    assert [check.name for check in chosen("disks,token,disks", False)] == ["disks", "token"]
    with pytest.raises(ConfigError, match="Did you mean 'token'"):
        chosen("tokn", has_config=False)
    with pytest.raises(ConfigError, match="raypipe doctor CONFIG --only table"):
        chosen("table", has_config=False)


@pytest.mark.slow
def test_all_checks_of_this_machine_take_seconds(tmp_path: Path) -> None:
    """At most 20 s of CPU, with all its processes, and 40 s by the clock; sidecars are there."""
    for name in pins.names():
        sidecar.ensure(name)
    here = Doctor(tmp_path, dict(os.environ))
    used, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    told = here("jobs/configs/solar.yaml", f"run.dir={tmp_path}", f"table.uri={tmp_path}/cells")
    after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - began
    cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    assert len(told.findings) >= 25
    assert cpu < 20 and seconds < 40, (cpu, seconds)


def test_people_see_what_is_wrong_in_an_aligned_list(doctor: Doctor) -> None:
    (doctor.home / ".ray" / "auth_token").chmod(0o644)
    told = doctor("--only", "token,text", RAY_AUTH_TOKEN="")
    lines = [line for line in told.err.splitlines() if line[:2] != "0:"]
    assert [line.split()[0] for line in lines] == ["fail", "rule", "way", "ok"]
    assert lines[0].index("/") == lines[1].index("Whoever") == lines[2].index("chmod")
    assert "1 failed: token" in told.err
