"""Claim: two Ray Train workers of ours step as fast as a hand-written torchrun script, and zero3
saves memory.

python -m benchmarks.step --json [--pairs 5] [--steps 60]

Rate: EfficientNet-Lite0, 64 px, fp32, two ranks of one thread and 16 images a step. Ours is the
whole path, TrainJob to Ray Train to Feed (loader `cache`: pixels decoded before); the rival,
benchmarks/bare_ddp.py, takes the same pixels from its own memory. Each run is a fresh process,
torchrun and ours take turns; the backbone notes when a step starts (clock.py). A rate is of the
steps after the first ten; a ratio is of neighbours, the median over the pairs; fsdp and zero3 run
once, after the last pair. Ray's daemons run beside ours and not beside torchrun: what they take
counts against us. Where others use the machine, look at `cpu_ratios` (CPU seconds a step), too.

Launch: from starting the command to the end of the first step. Ours starts a cluster; `on_cluster`
counts from `trainer.run`.

Memory: 16 square layers, 604 MB of parameters, AdamW, 2 images a rank. The peak of a rank's
resident memory (VmHWM) above what it had before the model was built, when torch, Ray and DeepSpeed
were imported and the ranks had met.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import pictures
from benchmarks.feed import commit, machine

RANKS, WARM_UP, MEMORY_STEPS = 2, 10, 16
RATE = {"backbone": "efficientnet_lite0", "side_px": 64, "batch_size": 32}
MEMORY = {"backbone": "wide-16", "side_px": 32, "batch_size": 4}


@dataclass(frozen=True)
class Steps:
    """One run. seconds and CPU seconds a step (mean of the ranks), launch to the end of the first
    step, peak above baseline.
    """

    step_s: float
    cpu_s: float
    launch_s: float
    on_cluster_s: float
    peak_mb: float
    threads: int
    nice: int

    @classmethod
    def read(cls, folder: Path, launched: float) -> Steps:
        ranks = [
            [json.loads(line) for line in file.read_text().splitlines()]
            for file in sorted(folder.glob("rank-*.jsonl"))
        ]
        built, timed = [r[0] for r in ranks], [r[1 + WARM_UP :] for r in ranks]

        def a_step(key: str) -> float:
            return statistics.fmean((t[-1][key] - t[0][key]) / (len(t) - 1) for t in timed)

        called, first_done = folder / "called", max(r[2]["t"] for r in ranks)
        return cls(
            a_step("t"),
            a_step("cpu"),
            first_done - launched,
            first_done - float(called.read_text()) if called.exists() else first_done - launched,
            max(line["peak_mb"] for r in ranks for line in r),
            built[0]["threads"],
            built[0]["nice"],
        )


class Track:
    """The table that all run on, and where each leaves its notes."""

    def __init__(self, folder: Path, steps: int, console: Console) -> None:
        self._folder, self._steps, self._console, self._runs = folder, steps, console, 0
        images = {
            RATE["batch_size"]: steps * RATE["batch_size"],
            MEMORY["batch_size"]: MEMORY_STEPS * MEMORY["batch_size"],
        }
        self._tables = {
            batch_size: pictures.table(folder, count) for batch_size, count in images.items()
        }

    def torchrun(self) -> Steps:
        pixels = self._folder / f"pixels-{self._steps}.npz"
        if not pixels.exists():
            _decode(self._tables[RATE["batch_size"]], pixels)
        notes = self._notes()
        asked = {
            "model": _model(RATE, notes, False),
            "pixels": str(pixels),
            "batch_size": RATE["batch_size"],
        }
        command = [
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(RANKS),
            "-m",
            "benchmarks.bare_ddp",
        ]
        return self._run("torchrun", [*command, json.dumps(asked | {"steps": self._steps})], notes)

    def ours(self, strategy: str, which: dict[str, Any]) -> Steps:
        notes = self._notes()
        job = {
            "table": {"uri": self._tables[which["batch_size"]]},
            "run": {"dir": str(notes / "run")},
            "cluster": {"address": "local", "cpus": RANKS, "object_store_mb": 300},
            "feed": {"carrier": "cache", "val": "train", "test": "train"},
            "model": _model(which, notes, which is MEMORY),
            "train": {
                "workers": RANKS,
                "strategy": strategy,
                "epochs": 1,
                "batch_size": which["batch_size"],
                "precision": "fp32",
                "max_failures": 0,
                "timeout_s": 600,
            },
        }
        return self._run(strategy, ["-m", "benchmarks.step", "--job", json.dumps(job)], notes)

    def _notes(self) -> Path:
        self._runs += 1
        folder = self._folder / f"run-{self._runs}"
        folder.mkdir()
        return folder

    def _run(self, name: str, command: list[str], notes: Path) -> Steps:
        launched = time.monotonic()
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
        steps = Steps.read(notes, launched)
        shutil.rmtree(notes)  # with 2 GB of checkpoints
        self._console.print(
            f"{name}: {steps.step_s * 1e3:.0f} ms a step, CPU {steps.cpu_s * 1e3:.0f} ms, "
            f"{steps.peak_mb:.0f} MB"
        )
        return steps


def _model(which: dict[str, Any], notes: Path, deepspeed: bool) -> dict[str, Any]:
    options = {"backbone": which["backbone"], "folder": str(notes), "deepspeed": deepspeed}
    config = {
        "name": "file:benchmarks.clock:clocked",
        "mode": "finetune",
        "pretrained": False,
        "dropout": 0.0,
    }
    return config | {"side_px": which["side_px"], "options": options}


def _decode(uri: str, file: Path) -> None:
    from benchmarks.contenders import encoded_images, row_groups
    from raypipe.images.decode import decode_batch

    encoded = [image for path, group, _ in row_groups(uri) for image in encoded_images(path, group)]
    pixels = np.asarray(decode_batch(encoded, RATE["side_px"]))
    np.savez(file, pixels=pixels, labels=np.arange(len(pixels)) % pictures.CLASSES)


def train(job: dict[str, Any]) -> None:
    """Ours, in this process: what `raypipe train` does."""
    from raypipe.cluster.connect import close, connect, prepare_environment

    prepare_environment()  # Ray reads its switches at import
    from raypipe.config import validate
    from raypipe.train.job import TrainJob
    from raypipe.train.trainer import run

    cfg = validate(TrainJob, job)
    connect(cfg.cluster)
    Path(cfg.model.options["folder"], "called").write_text(str(time.monotonic()))
    run(cfg)
    close()


def measure(track: Track, pairs: int) -> dict[str, Any]:
    rate = [{"torchrun": track.torchrun(), "ddp": track.ours("ddp", RATE)} for _ in range(pairs)]
    rate[-1] |= {name: track.ours(name, RATE) for name in ("fsdp", "zero3")}
    memory = {name: track.ours(name, MEMORY) for name in ("ddp", "fsdp", "zero3")}

    def ratio(key: str, name: str, other: str) -> float:
        """Of rates, so that more is better: the other's seconds by the name's."""
        return round(
            statistics.median(
                getattr(r[other], key) / getattr(r[name], key) for r in rate if name in r
            ),
            3,
        )

    def median(key: str, digits: int) -> dict[str, float]:
        return {
            name: round(statistics.median(getattr(r[name], key) for r in rate if name in r), digits)
            for name in rate[-1]
        }

    return {
        "ratios": {
            "ddp_vs_torchrun": ratio("step_s", "ddp", "torchrun"),
            "zero3_vs_ddp": ratio("step_s", "zero3", "ddp"),
            "fsdp_vs_ddp": ratio("step_s", "fsdp", "ddp"),
            "zero3_memory_vs_ddp": round(memory["zero3"].peak_mb / memory["ddp"].peak_mb, 3),
            "fsdp_memory_vs_ddp": round(memory["fsdp"].peak_mb / memory["ddp"].peak_mb, 3),
            "launch_to_first_step": round(1 / ratio("launch_s", "ddp", "torchrun"), 2),
            "launch_to_first_step_on_cluster": round(
                1 / ratio("on_cluster_s", "ddp", "torchrun"), 2
            ),
            "zero3_vs_ddp_wide": round(memory["ddp"].step_s / memory["zero3"].step_s, 3),
            "fsdp_vs_ddp_wide": round(memory["ddp"].step_s / memory["fsdp"].step_s, 3),
        },
        "cpu_ratios": {"ddp_vs_torchrun": ratio("cpu_s", "ddp", "torchrun")},
        "ddp_vs_torchrun_by_pair": [round(r["torchrun"].step_s / r["ddp"].step_s, 3) for r in rate],
        "step_s": median("step_s", 4),
        "cpu_s": median("cpu_s", 4),
        "launch_s": median("launch_s", 1),
        "on_cluster_s": median("on_cluster_s", 1),
        "peak_mb": {name: round(m.peak_mb, 1) for name, m in memory.items()},
        "threads": {name: s.threads for name, s in rate[-1].items()},
        "nice": {name: s.nice for name, s in rate[-1].items()},
    }


def show(result: dict[str, Any], console: Console) -> None:
    table = Table("", "ms a step", "CPU ms", "launch, s", "peak, MB", title="Step")
    for name, step_s in result["step_s"].items():
        peak = result["peak_mb"].get(name)
        figures = (
            f"{step_s * 1e3:.0f}",
            f"{result['cpu_s'][name] * 1e3:.0f}",
            f"{result['launch_s'][name]:g}",
        )
        table.add_row(name, *figures, f"{peak:.0f}" if peak else "-")
    console.print(table)
    for name, value in result["ratios"].items():
        console.print(f"{name}: {value:g}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON line on stdout")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.job:
        train(asked.job)
        return 0
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Track(Path(folder), asked.steps, console), asked.pairs) | {
            "pairs": asked.pairs,
            "steps": asked.steps,
            "machine": machine(),
            "commit": commit(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": "python -m benchmarks.step " + " ".join(sys.argv[1:]),
        }
    show(result, console)
    if asked.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
