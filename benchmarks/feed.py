"""Claim: our loaders deliver a lake table's images at the speed of the decoder, where others lose
half of it and more.

python -m benchmarks.feed --json [--images 6000] [--rounds 3] [--only threads,dataloader] [--keep
FOLDER]

Every contender runs in a fresh process, and the bare decode loop runs before and after it: a ratio
is images/s divided by the mean of those two, the median over the rounds. Close other work first,
though it cancels out of ratios better than of rates. Rates are of whole epochs after a first one,
which warms up and checks that every image comes once.

first_batch_s: from asking for the first batch; starts worker processes, but neither planning nor a
Ray cluster. peak_mb: above what was there just before that, when torch was loaded. Within one
process from its peak resident set (VmHWM); where others help, from the summed proportional set
sizes of the process tree, sampled from the first batch to the end of that epoch. in_flight_mb: the
most bytes of row groups that `threads` held at a time.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from benchmarks import pictures
from benchmarks.contenders import BATCH, CONTENDERS, SIDE_PX, Loader, Skip
from raypipe.images.decode import decode_batch

MEASURE_S = 5.0  # whole epochs, until they have taken so long
SAMPLE_S = 0.1  # reading the PSS of a Ray cluster takes 10-20 ms
DIGITS = {"images_per_s": 1, "first_batch_s": 3, "peak_mb": 1}

Result = dict[str, Any]


class Memory:
    """MB above what was taken when this was made."""

    def __init__(self, tree: bool) -> None:
        self._tree, self._peak, self._done = tree, 0.0, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        if not tree:
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts here
        self._before = _tree_mb() if tree else _status_mb("VmRSS")

    def watch(self) -> None:
        if self._tree:
            self._thread.start()

    def rest(self) -> None:
        """End watching: reading a tree's memory costs what is measured next."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()

    def peak_mb(self) -> float:
        return (self._peak if self._tree else _status_mb("VmHWM")) - self._before

    def _sample(self) -> None:
        while not self._done.wait(SAMPLE_S):
            self._peak = max(self._peak, _tree_mb())


def _status_mb(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def _tree_mb() -> float:
    total = 0
    for pid in _tree(os.getpid()):
        with suppress(OSError):  # it has ended meanwhile
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
    return total / 1024


def _tree(root: int) -> list[int]:
    """This process and all below it. (/proc/PID/task/TID/children would be shorter; not every
    kernel has it.)
    """
    below: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            below.setdefault(parent, []).append(int(stat.parent.name))
    tree = [root]
    for pid in tree:
        tree += below.get(pid, [])
    return tree


def contend(name: str, uri: str, images: int) -> Result:
    """One contender's figures, measured in this process."""
    try:
        with CONTENDERS[name](uri) as loader:
            return _measure(
                loader, images, unique=name != "bare"
            )  # its buffers are overwritten while we look
    except Skip as why:
        return {"skipped": str(why)}


def _measure(loader: Loader, images: int, unique: bool) -> Result:
    jpeg = io.BytesIO()
    Image.new("RGB", (pictures.WIDTH, pictures.HEIGHT)).save(jpeg, "JPEG")
    decode_batch(
        [jpeg.getvalue()], SIDE_PX
    )  # loads torch, which a training process has by then: 190 MB, 1.2 s
    memory = Memory(loader.processes)
    first_batch_s, seen = _warm_up(loader, memory)
    memory.rest()
    if unique and (len(set(seen)) != len(seen) or len(seen) < images // BATCH * BATCH):
        raise RuntimeError(
            f"{len(seen)} images came, {len(set(seen))} of them different; {images} exist"
        )
    delivered, epoch, started = 0, 0, time.perf_counter()
    while time.perf_counter() - started < MEASURE_S:
        epoch += 1
        delivered += sum(len(batch) for batch in loader.epoch(epoch))
    rate = delivered / (time.perf_counter() - started)
    in_flight = loader.in_flight_bytes
    return {
        "images_per_s": rate,
        "first_batch_s": first_batch_s,
        "peak_mb": memory.peak_mb(),
        "in_flight_mb": in_flight() / 2**20 if in_flight else None,
    }


def _warm_up(loader: Loader, memory: Memory) -> tuple[float, list[int]]:
    """Epoch 0: seconds to the first batch, and a fingerprint of every image."""
    seen: list[int] = []
    first_batch_s, started = 0.0, time.perf_counter()
    for batch in loader.epoch(0):
        if not seen:
            first_batch_s = time.perf_counter() - started
            memory.watch()
        pixels_BHWC = np.asarray(batch)
        assert pixels_BHWC.shape[1:] == (SIDE_PX, SIDE_PX, 3) and pixels_BHWC.dtype == np.uint8
        seen += [zlib.crc32(pixels_HWC[SIDE_PX // 2].tobytes()) for pixels_HWC in pixels_BHWC]
    return first_batch_s, seen


def race(
    names: list[str], uri: str, images: int, rounds: int, console: Console
) -> tuple[dict[str, list[Result]], dict[str, str]]:
    """Results of each contender, a round each, with its `ratio`; and why some have none."""

    def run(name: str) -> Result:
        command = [
            sys.executable,
            "-m",
            "benchmarks.feed",
            "--contender",
            name,
            "--table",
            uri,
            "--images",
            str(images),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode and name == "bare":
            raise SystemExit(done.stderr)  # nothing can be compared then
        if done.returncode:
            return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1]}
        result: Result = json.loads(done.stdout.splitlines()[-1])
        console.print(
            f"{name}: "
            + (
                f"{result['images_per_s']:.0f} images/s"
                if "images_per_s" in result
                else str(result)
            )
        )
        return result

    results: dict[str, list[Result]] = {name: [] for name in ["bare", *names]}
    notes: dict[str, str] = {}
    for _ in range(rounds):
        results["bare"].append(run("bare"))
        for name in [n for n in names if n not in notes]:
            result = run(name)
            if "images_per_s" not in result:
                notes[name] = "; ".join(f"{k}: {v}" for k, v in result.items())
                continue
            results["bare"].append(run("bare"))
            before, after = (bare["images_per_s"] for bare in results["bare"][-2:])
            results[name].append(
                result | {"ratio": result["images_per_s"] / ((before + after) / 2)}
            )
    return results, notes


def summary(results: dict[str, list[Result]], notes: dict[str, str]) -> Result:
    """Medians over the rounds (of peaks the highest), null for who did not race."""

    def of(name: str, key: str, digits: int) -> float | None:
        values = [r[key] for r in results[name] if r.get(key) is not None]
        return (
            round((max if key.endswith("_mb") else statistics.median)(values), digits)
            if values
            else None
        )

    racing = [name for name in results if name != "bare"]
    return {
        **{
            key: {name: of(name, key, digits) for name in results} for key, digits in DIGITS.items()
        },
        "in_flight_mb": of("threads", "in_flight_mb", 1) if "threads" in results else None,
        "ratios": {name: of(name, "ratio", 3) for name in racing},
        "ratios_by_round": {name: [round(r["ratio"], 3) for r in results[name]] for name in racing},
        "bare_by_run": [round(r["images_per_s"], 1) for r in results["bare"]],
        "notes": notes,
    }


def machine() -> dict[str, object]:
    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "python": platform.python_version(),
    }


def commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=False
        ).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + (
        "+changes" if git("status", "--porcelain", "raypipe", "benchmarks") else ""
    )


def show(result: Result, console: Console) -> None:
    table = Table("contender", "images/s", "÷ bare", "first batch, s", "peak, MB", title="Feed")
    for name in result["images_per_s"]:
        figures = [
            result[key].get(name) for key in ("images_per_s", "ratios", "first_batch_s", "peak_mb")
        ]
        table.add_row(name, *("-" if value is None else f"{value:g}" for value in figures))
    console.print(table)
    for name, note in result["notes"].items():
        console.print(f"{name}: {note}")


def main() -> int:
    rivals = [name for name in CONTENDERS if name != "bare"]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON line on stdout")
    parser.add_argument("--images", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="names, separated by commas: " + ", ".join(rivals))
    parser.add_argument(
        "--keep",
        type=Path,
        default=Path(tempfile.gettempdir()) / "raypipe-benchmark",
        help="the table's folder",
    )
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--table", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.contender:
        print(json.dumps(contend(asked.contender, asked.table, asked.images)))
        return 0
    names = asked.only.split(",") if asked.only else rivals
    if unknown := set(names) - set(rivals):
        parser.error(
            f"no contender is called {', '.join(sorted(unknown))}; there are {', '.join(rivals)}"
        )
    console = Console(stderr=True)
    uri = pictures.table(asked.keep.absolute(), asked.images)
    result = summary(*race(names, uri, asked.images, asked.rounds, console)) | {
        "images": asked.images,
        "rounds": asked.rounds,
        "machine": machine(),
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": "python -m benchmarks.feed " + " ".join(sys.argv[1:]),
    }
    show(result, console)
    if asked.json:
        print(json.dumps(result))
    return int(any(note.startswith("failed") for note in result["notes"].values()))


if __name__ == "__main__":
    sys.exit(main())
