"""Searches that are killed with SIGKILL at random moments, and what must hold when they have ended.

    python -m tests.chaos.kill_search --kills 50 --json [--home runs/kills] [--ledger FILE]
        [--seconds 240]

--kills: so many, and one more for each case that has had none.

Each search of CASES runs once undisturbed. Then it is started, killed and started again, `AT_ONCE`
times at most, and at last runs to its end. A kill hits a random moment of the clock, or a random
call of a function of POINTS. Two ways:

- driver: the search joins a cluster of one CPU, and only its own process dies. One trial runs at a
  time, so everything must be as if nobody had killed it: configurations, order, metrics.
- machine: the search starts a cluster of two CPUs, and all its processes die. Two trials run at a
  time, and which of them reports first is chance. So its rules must hold, not its figures.

The ledger has a line a search, with its commit. The same command goes on where it stopped.

A process that has imported everything forks each search: an import takes four seconds of CPU.
"""

from __future__ import annotations

import argparse
import collections
import functools
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from raypipe.cluster import connect

connect.prepare_environment()  # before anything imports Ray

from benchmarks import looks  # noqa: E402
from benchmarks.ledger import LEDGERS, without_places  # noqa: E402
from raypipe.config import replace, validate  # noqa: E402
from raypipe.job import Job  # noqa: E402
from raypipe.search import tuner  # noqa: E402
from raypipe.search.schedulers import mutations  # noqa: E402

# What differs from search to search; one line adds one.
CASES: dict[str, dict[str, Any]] = {
    "asha": {"search.scheduler": "asha"},
    "bohb": {"search.scheduler": "asha", "search.searcher": "bohb"},
    "tpe": {"search.scheduler": "asha", "search.searcher": "tpe"},
    "pbt": {"search.scheduler": "pbt", "search.samples": 4},
    "pb2": {"search.scheduler": "pb2", "search.samples": 4},
    "freeze_thaw": {"search.scheduler": "freeze_thaw"},
}
# Who is trained depends on measured seconds: no two runs are the same, killed or not.
BY_CLOCK = ("freeze_thaw",)
EPOCHS, BATCH = 9, 12
AT_ONCE = 3  # kills of one search
LEFT_S = 120  # for what outlives a killed cluster
ENDED_S = 120  # the longest that an undisturbed search may take
MARK = "RAYPIPE_KILLED_SEARCH"  # in the environment of every process that we start
# Functions of the search's process. A kill hits before or after one of their calls.
POINTS = (
    "raypipe.search.searchers.planned:Planned.suggest",
    "raypipe.search.searchers.optuna_search:Suggested._record",
    "raypipe.search.trials.monitor:Monitor.on_trial_result",
    "raypipe.search.schedulers.tune_schedulers:HalvingScheduler.on_trial_result",
    "raypipe.search.schedulers.halving:Halving.resume",
    "raypipe.search.schedulers.pbt:_Population._exploit",
    "raypipe.search.schedulers.mutations:append",
    "raypipe.search.kept:_forget",
    "raypipe.search.kept:_say_ended",
    "raypipe.search.kept:clear",
    "raypipe.search.trial_files:write",
    "ray.tune.execution.tune_controller:TuneController.save_to_dir",
    "ray.tune.search.searcher:Searcher.save_to_dir",
    "ray.tune.callback:CallbackList.save_to_dir",
)


Same = Literal["all", "trials", "rules"]


@dataclass(frozen=True)
class Moment:
    """When a search is killed."""

    seconds: float = 0.0
    """After its start, if there is no point."""

    point: str = ""
    call: int = 0
    after: bool = False

    def __str__(self) -> str:
        if not self.point:
            return f"{self.seconds:.2f} s"
        return f"{'after' if self.after else 'before'} call {self.call} of {self.point}"


@dataclass(frozen=True)
class Undisturbed:
    """A search that nobody killed."""

    seconds: float
    trials: list[dict[str, Any]]
    steps: dict[str, int]
    calls: dict[str, int]
    moves: list[dict[str, Any]] = field(default_factory=list)


def job_of(case: str, home: Path, run: Path, alone: bool) -> Job:
    """The search; alone: one trial at a time on the cluster that is joined."""
    rates = "loguniform(1e-4, 3e-2)"
    space = {"train.lr": rates}
    if case not in ("pbt", "pb2"):
        space["model.dropout"] = "choice(0.0, 0.2, 0.5)"
    asked: dict[str, Any] = {
        "table": {"uri": str(home / "table")},
        "run": {"dir": str(run), "seed": 3},
        "cluster": {"address": "auto"} if alone else {"address": "local", "cpus": 2},
        "model": {
            "name": "file:tests.chaos.counted_model:net",
            "options": {"notes": str(run / "steps"), "step_s": 0.01},
            "mode": "finetune",
            "pretrained": False,
            "side_px": 32,
        },
        "train": {
            "epochs": EPOCHS,
            "batch_size": BATCH,
            "precision": "fp32",
            "schedule": "constant",
            "warmup": 0.0,
            "stopping": {"metric": "val_loss", "patience": None},
        },
        "search": {"samples": 8, "grace": 1, "keep": 3, "space": space},
    }
    return replace(validate(Job, asked), CASES[case])


# One search, in a process of its own.


def start(job: Job, env: dict[str, str], moment: Moment | None, calls: Path | None) -> int:
    """Fork a process that searches; returns its id, which is that of its group, too.

    calls: where it writes how often it called the functions of POINTS.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        os.environ.update(env)
        log = os.open(job.run.path / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        counts = watched(moment)
        connect.connect(job.cluster)
        tuner.search(job.training, job.search)
        if calls:
            calls.write_text(json.dumps(counts))
        connect.close()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def watched(moment: Moment | None) -> dict[str, int]:
    """Count the calls of POINTS in this process, which ends at the moment."""
    counts: dict[str, int] = {}
    for point in POINTS:
        module, _, name = point.partition(":")
        *path, last = name.split(".")
        owner: Any = functools.reduce(getattr, path, importlib.import_module(module))
        setattr(owner, last, _counted(getattr(owner, last), point, moment, counts))
    return counts


def _counted(
    real: Callable[..., Any], point: str, moment: Moment | None, counts: dict[str, int]
) -> Callable[..., Any]:
    @functools.wraps(real)
    def called(*given: Any, **named: Any) -> Any:
        counts[point] = counts.get(point, 0) + 1
        now = moment is not None and point == moment.point and counts[point] == moment.call
        if now and not moment.after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*given, **named)
        if now:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return called


def finish(pid: int, within_s: float) -> int | None:
    """Wait for a process that was forked; its exit code, None if it was killed.

    Raises TimeoutError, and kills it, if it does not end.
    """
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return None if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    kill_group(pid)
    os.waitpid(pid, 0)
    raise TimeoutError(f"a search did not end in {within_s:.0f} s")


def kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)


def still_there() -> list[str]:
    """The command lines of processes that searches of this run have started."""
    found = []
    wanted = f"{MARK}={os.getpid()}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:100])
        except OSError:
            continue
    return found


def outlived() -> list[str]:
    """What still runs when all has ended. Ray's agents need a minute: they ask a dead cluster."""
    until = time.monotonic() + LEFT_S
    while (found := still_there()) and time.monotonic() < until:
        time.sleep(0.2)
    return found


# What a search left.


def folder_of(job: Job) -> Path:
    (folder,) = job.run.path.glob("search/*")
    return folder


def trials_of(job: Job) -> list[dict[str, Any]]:
    """The leaderboard without times and places."""
    trials = json.loads((folder_of(job) / "result.json").read_text())["trials"]
    kept = ("name", "changes", "metric", "epochs", "stopped_early", "kept", "schedule")
    return [
        {name: trial[name] for name in kept}
        | {"losses": [epoch["val_loss"] for epoch in trial["history"]]}
        for trial in trials
    ]


def steps_of(job: Job) -> dict[str, int]:
    """Training steps by trial."""
    return dict(collections.Counter((job.run.path / "steps").read_text().split()))


def undisturbed(case: str, home: Path, alone: bool, env: dict[str, str]) -> Undisturbed:
    """The search without a kill: run on the first call, read later."""
    run = home / f"{case}-{'driver' if alone else 'machine'}-undisturbed"
    file = run / "undisturbed.json"
    if not file.exists():
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir(parents=True)
        job = job_of(case, home, run, alone)
        began = time.monotonic()
        pid = start(job, env, None, run / "calls")
        if finish(pid, ENDED_S) != 0:
            raise RuntimeError((run / "log").read_text()[-4000:])
        found = {
            "seconds": time.monotonic() - began,
            "trials": trials_of(job),
            "steps": steps_of(job),
            "calls": json.loads((run / "calls").read_text()),
            "moves": mutations.read(folder_of(job)),
        }
        file.write_text(json.dumps(found))
    return Undisturbed(**json.loads(file.read_text()))


def moment(rng: random.Random, whole: Undisturbed, attempt: int) -> Moment:
    """Half of the moments are of the clock, half are calls. After `attempt` kills less is left."""
    left = 1 / (1 + attempt)
    if rng.random() < 0.5:
        return Moment(seconds=rng.uniform(0, 0.9 * whole.seconds * left))
    point = rng.choice(sorted(whole.calls))
    last = max(1, int(whole.calls[point] * left))
    return Moment(0.0, point, rng.randint(1, last), rng.random() < 0.5)


def killed(
    case: str, home: Path, alone: bool, seed: int, most: int, env: dict[str, str]
) -> dict[str, Any]:
    """Search, be killed up to `most` times, end; returns the ledger's line."""
    whole = undisturbed(case, home, alone, env)
    rng = random.Random(f"{case} {alone} {seed}")
    run = home / f"{case}-{'driver' if alone else 'machine'}-{seed}"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    job = job_of(case, home, run, alone)
    # Tune saves its state every ten seconds: these searches take no longer.
    often = {"TUNE_GLOBAL_CHECKPOINT_S": "0.3"} if rng.random() < 0.5 else {}
    moments: list[str] = []
    began = time.monotonic()
    for attempt in range(most + 1):
        when = moment(rng, whole, attempt) if attempt < most else None
        pid = start(job, env | often | {MARK: str(os.getpid())}, when, None)
        if when is not None and not when.point:
            time.sleep(when.seconds)
            if os.waitpid(pid, os.WNOHANG)[0]:
                break  # it had ended
            kill_group(pid)
        code = finish(pid, ENDED_S)
        if code is not None:
            if code:
                raise RuntimeError(f"{case} {seed}: {(run / 'log').read_text()[-3000:]}")
            break
        moments.append(str(when))
    line = {
        "case": case,
        "way": "driver" if alone else "machine",
        "seed": seed,
        "kills": len(moments),
        "moments": moments,
        "saves_often": bool(often),
        "seconds": round(time.monotonic() - began, 1),
        "commit": looks.commit(),
    }
    same: Same = "rules" if case in BY_CLOCK else "all" if alone else "trials"
    return line | {"problems": problems(whole, job, len(moments), 1 if alone else 2, same)}


def problems(whole: Undisturbed, job: Job, kills: int, at_once: int, same: Same) -> list[str]:
    """What does not hold of a search that was killed `kills` times and then ended."""
    moves = mutations.read(folder_of(job))
    return compared(whole, trials_of(job), steps_of(job), moves, kills, at_once, same)


def compared(
    whole: Undisturbed,
    trials: list[dict[str, Any]],
    steps: dict[str, int],
    moves: list[dict[str, Any]],
    kills: int,
    at_once: int = 1,
    same: Same = "all",
) -> list[str]:
    """The same, of the leaderboard, the training steps by trial, and the exploits.

    at_once: so many trials ran at a time. same: what must be as if nobody had killed it, namely
    everything; which trials there are, by number; or only the rules of all searches.
    """
    found = []
    numbers = [trial["name"].split("-")[1] for trial in trials]
    if len(set(numbers)) != len(numbers):
        found.append(f"a trial twice: {sorted(trial['name'] for trial in trials)}")
    expected = [trial["name"].split("-")[1] for trial in whole.trials]
    if same != "rules" and sorted(numbers) != sorted(expected):
        found.append(f"trials {sorted(numbers)}, undisturbed {sorted(expected)}")
    if same == "all" and trials != whole.trials:
        found += differences(whole.trials, trials)
    # A kill may cost the epoch that a trial was in, and no other.
    per_epoch = per_epoch_of(whole)
    epochs = {trial["name"]: trial["epochs"] for trial in trials}
    for name in sorted(set(steps) | set(epochs)):
        done, needed = steps.get(name, 0), epochs.get(name, 0) * per_epoch
        if done < needed or done >= needed + (kills * per_epoch or 1):
            found.append(f"{name}: {done} steps for {needed}, {per_epoch} an epoch, {kills} kills")
    redone = sum(steps.values()) - sum(epochs.values()) * per_epoch
    if redone >= (kills * per_epoch * at_once or 1):
        found.append(f"{redone} steps too many")
    turns = [(move["trial"], move["epoch"]) for move in moves]
    if len(set(turns)) != len(turns):
        found.append(f"exploits twice: {turns}")
    if same == "all" and moves != whole.moves:
        found.append(f"exploits {moves}, undisturbed {whole.moves}")
    return found


def per_epoch_of(whole: Undisturbed) -> int:
    steps = sum(whole.steps.values())
    epochs = sum(trial["epochs"] for trial in whole.trials)
    assert steps % epochs == 0, "an undisturbed search trains each epoch once"
    return steps // epochs


def differences(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> Iterator[str]:
    by_name = {trial["name"]: trial for trial in expected}
    if [trial["name"] for trial in expected] != [trial["name"] for trial in found]:
        yield f"order {[t['name'] for t in found]}, undisturbed {list(by_name)}"
    for trial in found:
        other = by_name.get(trial["name"], {})
        for name, value in trial.items():
            if other and other[name] != value:
                yield f"{trial['name']}.{name} {value}, undisturbed {other[name]}"


# The ledger, and the clusters.


def table(home: Path) -> None:
    """Sixty small pictures of two classes, ingested by another process: deltalake must not have run
    in one that forks.
    """
    if not (home / "table" / "_delta_log").exists():
        home.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-c", _INGEST, str(home)], check=True)


_INGEST = """
import sys
from pathlib import Path
from tests.conftest import encode, striped
from raypipe.config import validate
from raypipe.tables.ingest import IngestConfig, ingest
from raypipe.tables.table import TableConfig
home = Path(sys.argv[1])
folder = home / "photos"
folder.mkdir(exist_ok=True)
lines = ["file,label"]
for seed in range(60):
    label = ("warm", "cold")[seed % 2]
    (folder / f"{seed:02d}.png").write_bytes(encode(striped(seed, label)))
    lines.append(f"{seed:02d}.png,{label}")
(folder / "labels.csv").write_text("\\n".join(lines) + "\\n", encoding="utf-8")
source = {"images": str(folder), "labels": str(folder / "labels.csv")}
ingest(TableConfig(uri=str(home / "table")), validate(IngestConfig,
    {"from": source, "splits": {"train": 0.6, "val": 0.4}, "workers": 0}))
"""
_CLUSTER = """
import sys, logging, ray
context = ray.init("local", num_cpus=1, object_store_memory=100 * 2**20, include_dashboard=False,
    log_to_driver=False, logging_level=logging.ERROR)
print(context.address_info["address"], flush=True)
sys.stdin.read()
"""


@contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """A cluster of one CPU, which ends with this context; the environment that joins it."""
    process = subprocess.Popen(
        [sys.executable, "-c", _CLUSTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"RAY_preload_python_modules": "torch,ray.tune"},
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, "no cluster"
        yield {"RAY_ADDRESS": address}
    finally:
        process.communicate("", timeout=60)


def run(
    home: Path, file: Path, cases: list[str], ways: list[str], kills: int, seconds: float
) -> list[Any]:
    """Kill searches in turn until the ledger has so many kills, and one of each case, or the time
    is over.
    """
    table(home)
    until = time.monotonic() + seconds
    for way in ways:
        if time.monotonic() >= until:
            break
        alone = way == "driver"
        with cluster() if alone else _none() as env:
            _fill(home, file, cases, way, kills // len(ways), until, env)
    return ledger(file)


def _fill(
    home: Path,
    file: Path,
    cases: list[str],
    way: str,
    kills: int,
    until: float,
    env: dict[str, str],
) -> None:
    for seed in itertools.count():
        done = [line for line in ledger(file) if line["way"] == way]
        of_case = kills_by_case(done)
        left = kills - of_case.total()
        if left <= 0 and all(of_case[case] for case in cases):
            return
        case = cases[seed % len(cases)]
        if any((line["case"], line["seed"]) == (case, seed) for line in done):
            continue
        if left <= 0 and of_case[case]:
            continue
        if time.monotonic() >= until:
            return
        line = killed(case, home, way == "driver", seed, min(AT_ONCE, max(1, left)), env)
        print(json.dumps(line), file=sys.stderr, flush=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as out:
            out.write(without_places(json.dumps(line)) + "\n")


def kills_by_case(lines: list[dict[str, Any]]) -> collections.Counter[str]:
    found: collections.Counter[str] = collections.Counter()
    for line in lines:
        found[line["case"]] += line["kills"]
    return found


@contextmanager
def _none() -> Iterator[dict[str, str]]:
    yield {}


def ledger(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--home", type=Path, default=Path("runs/kills"))
    parser.add_argument("--ledger", type=Path, default=LEDGERS / "kill_search.jsonl")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument(
        "--ways", nargs="+", choices=["driver", "machine"], default=["driver", "machine"]
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="start no search after these")
    parser.add_argument("--json", action="store_true", help="accepted for uniformity")
    chosen = parser.parse_args()
    home, file = chosen.home.absolute(), chosen.ledger.absolute()
    began_with = len(ledger(file))
    done = run(home, file, chosen.cases, chosen.ways, chosen.kills, chosen.seconds)
    told = {
        "kills": sum(line["kills"] for line in done),
        "kills_by_case": kills_by_case(done),
        "searches": len(done),
        "commits": sorted({line.get("commit", "") for line in done}),
        "with_problems": [line for line in done if line["problems"]],
        "processes_left": outlived() if len(done) > began_with else [],
    }
    print(json.dumps(told))
    sys.exit(bool(told["with_problems"] or told["processes_left"]))


if __name__ == "__main__":
    main()
