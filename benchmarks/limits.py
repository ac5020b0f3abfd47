"""Is search.limits kept, where the best model of a search without limits would break it?

    python -m benchmarks.limits --json --tasks digits [--steps free latency size money all]
        [--budget-s 90] [search.preset=fast ...]

The first step is `raypipe tune` as a process, without limits. Each of the others is another one in
a new folder, with one limit at TIGHT of what the first one's took, or with all three. The claim:
each of them ends with a registered model, and that keeps its limits. It is measured apart from what
the search says of itself:

latency   another process loads the registered package, as `raypipe serve` does, and takes ROUNDS
          times one image to its label, with one thread, as each worker of the server has. Kept:
          the whole interval of the median is within the limit, as the gate of a retrain has it.
          `all_threads_ms` is the same with as many as torch takes by itself.
size      the bytes of the weights in MLflow's store. `package_mb` is all that a server loads, as
          the gate of a retrain weighs it: the search does not limit that.
money     the device seconds of all trials on the leaderboard, heads of a first answer included,
          times the price of an hour. `clock_money` is more than that: the clock of the phase of
          trials on all cores, beginnings of processes and unfinished epochs included.

`validation` of a step beside the first one's is what its limit costs. Test scores are dropped.

One line a step is appended to --out. A step whose line is there (of the same task, settings and
commit) is not run again, so steps can be had in several sittings. Without a model of the first
step there is no limit to set: the benchmark ends and says why.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.budget import TASKS, table
from benchmarks.feed import commit, machine

TIGHT = 0.75
"""A limit, as a part of what the best model without limits takes."""

ROUNDS = 101
PRICE = 3.6  # an hour of one worker: a device second costs a thousandth
STEPS = {
    "free": (),
    "latency": ("latency_ms",),
    "size": ("size_mb",),
    "money": ("money",),
    "all": ("latency_ms", "size_mb", "money"),
}
BUDGET_S = {"digits": 90.0, "solar": 180.0}


def limits_of(step: str, free: Mapping[str, Any]) -> dict[str, float]:
    """The limits of a step, from what the first one's model and trials took."""
    found = {}
    for name in STEPS[step]:
        took = free[name][0] if name == "latency_ms" else free[name]
        found[name] = float(f"{TIGHT * took:.3g}")
    return found


def kept(limits: Mapping[str, float], took: Mapping[str, Any]) -> dict[str, bool]:
    """By limit: is it kept? Written so that NaN keeps none."""
    # Of a latency the upper end.
    judged = {"latency_ms": took["latency_ms"][2], "size_mb": took["size_mb"]}
    judged["money"] = took["money"]
    return {name: bool(judged[name] <= limit) for name, limit in limits.items()}


def taken(model: str, run_dir: Path, uri: Path) -> dict[str, Any]:
    """What a registered model takes, in this process."""
    from raypipe.images.decode import decode_batch
    from raypipe.models.spread import Spread
    from raypipe.serve.latency import one_thread
    from raypipe.tables.table import ImageTable, TableConfig
    from raypipe.watch.limited import size_of
    from raypipe.work import find

    package = find.find(f"models:/{model}", {"dir": str(run_dir)}, {}).package
    table = ImageTable.open(TableConfig(uri=str(uri)))
    column = table.columns.image
    images = table.delta().to_pyarrow_dataset().head(32, columns=[column])[column].to_pylist()

    def timed() -> list[float]:
        times = []
        for number in range(3 + ROUNDS):
            image = images[number % len(images)]
            began = time.perf_counter()
            package.predict_pixels(decode_batch([image], package.side_px, 1))
            times.append(1000 * (time.perf_counter() - began))
        found = Spread.of(times[3:])
        return [round(ms, 2) for ms in (found.median, found.low, found.high)]

    with one_thread():
        on_one = timed()
    return {
        "latency_ms": on_one,
        "all_threads_ms": timed(),
        "size_mb": round(len(package.files["weights.safetensors"]) / 1e6, 3),
        "package_mb": round(size_of(package.files) / 1e6, 2),
        "side_px": package.side_px,
        "members": [
            f"{one.model.name} {one.model.head}, {one.model.mode}, {one.model.pixels} px"
            for one in package.members
        ],
    }


def run(
    task: str, step: str, limits: Mapping[str, float], budget_s: float, more: list[str], uri: Path
) -> dict[str, Any]:
    """One step: the search, and what its model takes."""
    load, at = os.getloadavg()[0], time.time()
    with tempfile.TemporaryDirectory(dir=uri.parents[1]) as place:
        command = [sys.executable, "-m", "raypipe", "tune", "--table", str(uri)]
        command += ["--label", "label", "--json", f"run.dir={place}"]
        command += [f"search.budget_s={budget_s:g}", f"search.stopping.price_per_hour={PRICE}"]
        command += [f"search.limits.{name}={limit:g}" for name, limit in limits.items()]
        began = time.monotonic()
        done = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
        wall_s = time.monotonic() - began
        line = {
            "task": task,
            "step": step,
            "budget_s": budget_s,
            "settings": more,
            "limits": dict(limits),
            "wall_s": round(wall_s, 1),
            "code": done.returncode,
            "message": done.stderr.splitlines()[-8:] if done.returncode else [],
            "load": round(load, 1),
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at)),
        }
        if done.returncode:
            return line | {"kept": dict.fromkeys(limits, False)}
        said = json.loads(done.stdout.splitlines()[-1])
        took = _told(said) | _measured(said["model"], Path(place), uri)
        took["claimed"] = _claimed(Path(place))
    return line | took | {"kept": kept(limits, took)}


def _told(said: Mapping[str, Any]) -> dict[str, Any]:
    """What the search says of its trials, without its test scores."""
    costs: Sequence[Mapping[str, Any]] = said["trial_costs"]
    heads = [one for one in costs if one["trial"].startswith("first-answer")]
    phases = said["budget"]["phases"]
    cores_s = phases.get("trials", {}).get("spent_s", 0.0) * len(os.sched_getaffinity(0))
    return {
        "validation": {k: v for k, v in said["metrics"].items() if k.startswith("val_")},
        "best": said["best"],
        "ensemble": said["ensemble"],
        "trials": said["trials"],
        "stopped": said["stopped"],
        "money": _money(sum(one["device_s"] for one in costs)),
        "heads_money": _money(sum(one["device_s"] for one in heads)),
        "clock_money": _money(cores_s + sum(one["device_s"] for one in heads)),
        "phases": phases,
        "notes": said["budget"]["notes"],
    }


def _money(device_s: float) -> float:
    return round(device_s * PRICE / 3600, 5)


def _claimed(place: Path) -> dict[str, Any]:
    """The search's own figures by shape, in words: median, low and high ms, and MB."""
    found = {}
    for file in place.glob("**/variants.json"):
        for one in json.loads(file.read_text()).values():
            ms = [one[name] for name in ("latency_ms", "low_ms", "high_ms")]
            found.setdefault(one["text"], []).append([*ms, one["size_mb"]])
    return found


def _measured(model: str, place: Path, uri: Path) -> dict[str, Any]:
    """`taken` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.limits", "--measure", model, str(place), str(uri)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    read: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return read


def known(out: Path, wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    """The last line of the ledger with these values."""
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    for line in reversed(lines):
        one: dict[str, Any] = json.loads(line)
        if all(one.get(name) == value for name, value in wanted.items()):
            return one
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="accepted for uniformity")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["digits"])
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--budget-s", type=float, help="default: 90 for digits, 180 for solar")
    parser.add_argument("--out", type=Path, default=Path("runs/limits/ledger.jsonl"))
    parser.add_argument("--measure", nargs=3, metavar=("MODEL", "FOLDER", "TABLE"))
    # Settings hold a `=`, and come last.
    chosen, more = parser.parse_known_args()
    if chosen.measure:
        model, place, uri = chosen.measure
        print(json.dumps(taken(model, Path(place), Path(uri))))
        return
    more = more or ["search.preset=fast"]
    folder = chosen.out.absolute().parent
    folder.mkdir(parents=True, exist_ok=True)
    where = {"machine": machine(), "commit": commit()}
    lines = []
    for task in chosen.tasks:
        budget_s = chosen.budget_s or BUDGET_S[task]
        same = {"task": task, "budget_s": budget_s, "settings": more} | where
        free: dict[str, Any] = {}
        # Without the first step there are no limits to set.
        for step in [step for step in STEPS if step == "free" or step in chosen.steps]:
            one = known(chosen.out, same | {"step": step})
            if one is None:
                limits = limits_of(step, free)
                one = run(task, step, limits, budget_s, more, table(task, folder)) | where
                with chosen.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(one) + "\n")
            if step == "free":
                free = one
                if one["code"]:
                    raise SystemExit(f"{task}: the search without limits failed: {one['message']}")
            lines.append(one)
    all_kept = all(value for one in lines for value in one["kept"].values())
    print(json.dumps({"all_kept": all_kept, "runs": lines}))


if __name__ == "__main__":
    main()
