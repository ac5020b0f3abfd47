"""A ledger of a benchmark: one JSON line a cell, and the next run goes on where this one stopped.

A cell is one measurement: a task, a method, a seed and a budget. It runs in a process of its own
and group, so that a kill of either leaves no half line and no process, and one cell's memory is not
the next one's. Its line has, beside what the process returned: commit, hash of the configuration,
machine, date, seconds, load average before and after, how busy the CPUs were before it, and whether
it is valid; if it is not, `why_not_valid`. A failed cell has a line too, with `error`: why, in one
line. It is tried again by the next run. So is a cell whose line has another configuration.

A load average still holds the cell before, minutes after its end. So what decides whether a cell
begins on a quiet machine is the share of the CPUs that is taken in the WATCH_S before it.

Ledgers lie in LEDGERS and are committed, so that a result outlives the machine that measured it. So
a line names no folder of that machine. Cells work in a folder that git ignores.

Two runs at once would disturb each other's times: the second one stops with a message.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import looks
from raypipe.errors import one_line

Line = dict[str, Any]
Counts = Callable[[Line], bool]
KEYS = ("task", "method", "seed", "budget_s")
WATCH_S = 3.0
# Of all CPUs, in these seconds. Above it a cell's time is not that of a quiet machine.
MOST_BUSY = 0.15
LEDGERS = Path(__file__).with_name("results") / "ledgers"
_WHY = "why"  # in a cell's folder: why it failed
_PLACES = re.compile(r"(?<![\w.])/(?:[\w.@+=-]+/)+")


def every(line: Line) -> bool:
    return True


@dataclass(frozen=True)
class Cell:
    task: str
    method: str
    seed: int
    budget_s: float

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in KEYS)

    @property
    def name(self) -> str:
        return f"{self.task}-{self.method}-{self.seed}-{self.budget_s:g}s"


class Ledger:
    """The cells that a benchmark has measured, in `file`.

    work: where cells have their folders; None: in one beside the file, with its name.
    """

    def __init__(self, file: Path, work: Path | None = None) -> None:
        self.file = file.absolute()
        self.work = (work or file.with_suffix("")).absolute()

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Raises SystemExit if another process owns the ledger."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("ab") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SystemExit(f"Another run writes {self.file}: wait for its end") from None
            self._cut_half_line()
            yield

    def lines(self) -> list[Line]:
        """Every line, failed cells too; a half line at the end is left out."""
        if not self.file.exists():
            return []
        whole = self.file.read_bytes().rpartition(b"\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def done(self, counts: Counts = every) -> dict[tuple[Any, ...], Line]:
        """The newest line of each cell that did not fail. counts: which lines are looked at."""
        found = {}
        for line in self.lines():
            if counts(line) and not line.get("error"):
                found[tuple(line[name] for name in KEYS)] = line
        return found

    def failed(self, counts: Counts = every) -> list[str]:
        """Each cell that has failed and was not measured since: its name, and why."""
        done, found = self.done(counts), {}
        for line in self.lines():
            cell = Cell(*(line[name] for name in KEYS))
            if counts(line) and line.get("error") and cell.key not in done:
                found[cell] = f"{cell.name}: {line['error']}"
        return list(found.values())

    def measure(self, cell: Cell, module: str, config: Mapping[str, Any], limit_s: float) -> Line:
        """The cell's line: read, if `config` was the same, or measured now.

        `python -m module --cell FILE` measures it. The process gets a file with the cell, `config`
        and an empty folder, and leaves its result as result.json there (see `run_cell`). It is
        killed after `limit_s`.
        """
        hashed = hash_of(config)
        known = self.done(lambda line: line.get("config") == hashed).get(cell.key)
        if known is not None:
            return known
        folder = self.work / cell.name
        shutil.rmtree(folder, ignore_errors=True)  # what a killed run left
        folder.mkdir(parents=True)
        asked = {name: getattr(cell, name) for name in KEYS}
        asked_file = folder / "cell.json"
        asked_file.write_text(json.dumps(asked | {"config": dict(config), "folder": str(folder)}))
        load, busy = os.getloadavg()[0], busy_for(WATCH_S)
        began = time.monotonic()
        error = _ran([sys.executable, "-m", module, "--cell", str(asked_file)], folder, limit_s)
        seconds = time.monotonic() - began
        result = folder / "result.json"
        line = asked | {
            "commit": looks.commit(),
            "config": hashed,
            "machine": f"{os.cpu_count()} x {_processor()}",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "busy_before": round(busy, 3),
            "load_before": round(load, 2),
            "load_after": round(os.getloadavg()[0], 2),
            "seconds": round(seconds, 1),
            "valid": busy <= MOST_BUSY,
        }
        if busy > MOST_BUSY:
            line["why_not_valid"] = f"{busy:.0%} of the CPUs were busy before it began"
        if error is None and result.exists():
            line |= json.loads(without_places(result.read_text()))
            shutil.rmtree(folder)  # gigabytes of checkpoints else
        else:
            why = without_places(error or "no result")
            line |= {"valid": False, "why_not_valid": "it failed", "error": why}
        self._append(line)
        return line

    def _append(self, line: Line) -> None:
        with self.file.open("ab") as out:
            out.write(json.dumps(line).encode() + b"\n")
            out.flush()
            os.fsync(out.fileno())

    def _cut_half_line(self) -> None:
        if self.file.exists():
            content = self.file.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            if whole != content:
                with self.file.open("r+b") as out:
                    out.truncate(len(whole))


def _ran(command: list[str], folder: Path, limit_s: float) -> str | None:
    """In a line what went wrong; None if the process ended well. Nothing of its group is left."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        _end_group(process)
    if code == 0:
        return None
    how = f"killed after {limit_s:g} s" if code is None else f"exit code {code}"
    return f"{how}: {_why(folder)}"


def _why(folder: Path) -> str:
    """What the process said of its failure; of a killed one, what its log says last."""
    if (folder / _WHY).exists():
        return (folder / _WHY).read_text()
    said = (folder / "log").read_text(errors="replace").strip().splitlines()
    return one_line(said[-1]) if said else "it said nothing"


def without_places(text: str) -> str:
    """The text with `.../NAME` for each absolute path: a committed line names no machine's folder.

    JSON stays JSON.
    """
    return _PLACES.sub(".../", text)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def busy_for(seconds: float) -> float:
    """The part of all CPUs that was taken for so many seconds from now on."""
    before = _cpu_times()
    time.sleep(seconds)
    return busy_share(before, _cpu_times())


def busy_share(before: Sequence[int], after: Sequence[int]) -> float:
    """Between two readings of the first line of /proc/stat: user, nice, system, idle, iowait, …

    Waiting for a disk is idle; what another virtual machine took (steal) is busy.
    """
    passed = [late - early for early, late in zip(before, after, strict=True)]
    return 1 - sum(passed[3:5]) / max(1, sum(passed))


def _cpu_times() -> list[int]:
    """user, nice, system, idle, iowait, irq, softirq, steal. Guests are in user and nice."""
    line = Path("/proc/stat").read_text().splitlines()[0]
    return [int(ticks) for ticks in line.split()[1:9]]


def hash_of(config: Mapping[str, Any]) -> str:
    text = json.dumps(config, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def add_arguments(parser: argparse.ArgumentParser, name: str, budget_s: float) -> None:
    """What every benchmark with a ledger takes. name: its own. budget_s: of a cell."""
    parser.add_argument("--budget-s", type=float, default=budget_s)
    parser.add_argument("--ledger", type=Path, default=LEDGERS / f"{name}.jsonl")
    parser.add_argument("--work", type=Path, default=Path("runs", name), help="tables and cells")
    parser.add_argument("--cells", type=int, default=10**6, help="measure so many, then stop")
    parser.add_argument("--json", action="store_true", help="accepted for uniformity")
    parser.add_argument("--cell", type=Path, help=argparse.SUPPRESS)


def run_cell(file: Path, measure: Callable[[Line], Mapping[str, Any]]) -> None:
    """A cell's process: measure what `file` asks, and leave the result, or why there is none."""
    asked = asked_of(file)
    folder = Path(asked["folder"])
    try:
        result = measure(asked)
    except BaseException as e:
        named = "" if isinstance(e, SystemExit) else f"{type(e).__name__}: "
        (folder / _WHY).write_text(one_line(f"{named}{e}"))
        raise
    write_result(folder, result)


def asked_of(file: Path) -> Line:
    """Called by a cell's process: what it is to measure. From now on it ends with its parent."""
    # Linux: prctl(PR_SET_PDEATHSIG, SIGKILL). A cluster that it starts ends with it.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    asked: Line = json.loads(file.read_text())
    return asked


def write_result(folder: Path, result: Mapping[str, Any]) -> None:
    """Called by a cell's process: leave its result, whole or not at all."""
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as out:
        json.dump(dict(result), out)
    Path(out.name).replace(folder / "result.json")
