"""Runs checks at the same time, and takes the ways out that are safe."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from raypipe.doctor.finding import Asked, Check, Finding, of_error
from raypipe.errors import RaypipeError, one_line
from raypipe.failures import of_machine

# Most checks wait for a disk, a network or a process. More at a time would only share the CPUs.
AT_ONCE = 8
Found = dict[str, Sequence[Finding]]
OWN_MISTAKE = "This is a mistake of raypipe's: please report it"


def examine(
    checks: Sequence[Check], asked: Asked, tick: Callable[[int, int], None] | None = None
) -> Found:
    """The findings of each check by its name, in the order of `checks`.

    tick: called with the numbers of ended checks and of all. A check that is over its limit is
    left behind in its thread, which ends with this process.
    """
    ended: queue.SimpleQueue[tuple[Check, Sequence[Finding]]] = queue.SimpleQueue()
    found: dict[str, Sequence[Finding]] = {}
    deadlines: dict[str, float] = {}
    # Those with a long limit begin first, or all would wait for them in the end.
    waiting = sorted(checks, key=lambda check: -check.limit_s)
    while len(found) < len(checks):
        while waiting and len(deadlines) < AT_ONCE:
            check = waiting.pop(0)
            deadlines[check.name] = time.monotonic() + check.limit_s
            _start(check, asked, ended)

        # Who is over the limit is recorded here. No thread can be stopped from outside.
        for check in checks:
            if time.monotonic() > deadlines.get(check.name, float("inf")):
                del deadlines[check.name]
                found[check.name] = [_late(check, asked)]
        try:
            check, findings = ended.get(timeout=0.2)
        except queue.Empty:
            continue
        # Whoever was late may still answer.
        if check.name in deadlines:
            del deadlines[check.name]
            found[check.name] = findings
        if tick is not None:
            tick(len(found), len(checks))
    return {check.name: found[check.name] for check in checks}


def mend(found: Found, checks: Sequence[Check], asked: Asked, say: Callable[[str], None]) -> Found:
    """Take every way out that is safe, saying each, and look there again.

    A finding whose way out failed says why.
    """
    failed: dict[str, str] = {}
    mended = []
    for check in checks:
        for finding in found[check.name]:
            if finding.mend is None:
                continue
            say(f"{finding.name}: {finding.mend.says}")
            mended.append(check)
            try:
                finding.mend.do()
            except Exception as e:
                failed[finding.name] = one_line(e)

    # One check may have had several findings.
    again = examine(list(dict.fromkeys(mended)), asked)
    for name, findings in again.items():
        again[name] = [_with_failure(finding, failed) for finding in findings]
    return {**found, **again}


def _with_failure(finding: Finding, failed: dict[str, str]) -> Finding:
    if finding.name not in failed:
        return finding
    return replace(finding, seen=f"{finding.seen}; --fix failed: {failed[finding.name]}")


def _start(
    check: Check, asked: Asked, ended: queue.SimpleQueue[tuple[Check, Sequence[Finding]]]
) -> None:
    def look() -> None:
        ended.put((check, _look(check, asked)))

    threading.Thread(target=look, name=f"doctor-{check.name}", daemon=True).start()


def _look(check: Check, asked: Asked) -> Sequence[Finding]:
    # A check that breaks must not take the others with it.
    try:
        return check.look(asked)
    except RaypipeError as e:
        return [of_error(check.name, e)]
    except Exception as e:
        known = of_machine(e)
        if known is not None:
            return [of_error(check.name, known)]
        seen = f"The check itself failed: {type(e).__name__}: {one_line(e)}"
        return [Finding(check.name, "fail", seen, OWN_MISTAKE, "Look at the rest meanwhile")]


def _late(check: Check, asked: Asked) -> Finding:
    config = "CONFIG " if asked.has_config else ""
    return Finding(
        check.name,
        check.late,
        f"no answer within {check.limit_s:.0f} s",
        "A healthy machine that is not busy answers in less",
        f"Try it alone: raypipe doctor {config}--only {check.name}",
    )
