"""Starts of a search on six tasks: what three reach that were chosen without the task itself.

python -m benchmarks.portfolio --json [--measure] [--minutes 3.5] [--ledger FILE]

A cell is one start on one task with one seed, trained by `train_rank` in this process with one
thread: EPOCHS epochs on at most TRAIN training images, at SIDE_PX, judged on at most VAL validation
images. The test split is never read. Cells are kept in a ledger, one JSON line each: with
--measure, cells that are missing are trained until the minutes are over; without it, none are.

Compared, by the best validation accuracy of three trials:
hand        the start that was set by hand, then the default space's first two random draws
portfolio   three starts, chosen greedily on the other five tasks: those that leave the least mean
            regret there (the best of all cells of a task minus the best of the picks)
A cell's `cpu_s` is of one epoch, the mean of all; the cost model is compared with it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from benchmarks import task_tables
from benchmarks.transfer import HAND, Values

LEDGER = Path(__file__).parent / "data" / "portfolio_cells.jsonl"
STARTS = Path(__file__).parent / "data" / "portfolio_starts.json"
EPOCHS, TRAIN, VAL = 5, 240, 240
SIDE_PX = 96  # of all that fine-tune; features of a frozen backbone are of 224 px
PICKS = 3
# Measured in this order, so that the first ones done are the most different.
TASKS = ("digits", "elpv-mono", "emoji", "elpv-levels", "elpv-poly", "elpv-binary")


def named_starts() -> dict[str, Values]:
    """Every start that is measured: by hand, drawn (`draw-…`), transferred, heads."""
    found: dict[str, Values] = {"hand": HAND}
    found |= json.loads(STARTS.read_text(encoding="utf-8"))
    return found


def read(ledger: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Cells by (task, start, seed)."""
    if not ledger.exists():
        return {}
    rows = [json.loads(line) for line in ledger.read_text(encoding="utf-8").splitlines()]
    return {(row["task"], row["start"], row["seed"]): row for row in rows}


# Measuring.


class Bench:
    """The tasks' images at the sides that starts ask for, and features of the frozen backbone."""

    def __init__(self, home: Path, seed: int) -> None:
        self._home = home
        self._seed = seed
        self._kept: dict[tuple[str, int, bool], Any] = {}
        self._forward_s = forward_s()

    def data(self, task: str, values: Values) -> Any:
        """A `worker.Data`, made once for each task, side and mode."""
        frozen = values["model.mode"] == "frozen"
        side_px = 224 if frozen else SIDE_PX
        key = (task, side_px, frozen)
        if key not in self._kept:
            # One task after the other: older arrays are not needed again.
            self._kept = {k: v for k, v in self._kept.items() if k[0] == task}
            self._kept[key] = self._made(task, side_px, frozen)
        return self._kept[key]

    def _made(self, task: str, side_px: int, frozen: bool) -> Any:
        import torch

        from raypipe.feed import feed as feeds
        from raypipe.feed.dataset import FeedConfig, pin
        from raypipe.feed.feed import Feed, Source
        from raypipe.models.zoo import ImageModel, ModelConfig
        from raypipe.train.worker import Data

        table = task_tables.table(task, self._seed, self._home)
        cfg = FeedConfig(carrier="threads")
        pinned = pin(table, cfg)
        embedded = ImageModel(ModelConfig(name="efficientnet_lite0"), 2).for_inference()
        sources = {}
        for split, most in (("train", TRAIN), ("val", VAL)):
            streamed = feeds.prepare(pinned, [split], side_px, cfg, 0, most=most)[split]
            # `val` of a feed is its second source, in order.
            batches = list(Feed(streamed, streamed, 64, 0).val())
            inputs = torch.cat([batch.inputs for batch in batches]).numpy()
            if frozen:
                inputs = embedded.predict(inputs)[0]
            rows = feeds.fetch(streamed.rows)
            sources[split] = Source(
                "memory", rows, side_px, cfg, inputs=np.ascontiguousarray(inputs)
            )
        return Data(pinned.classes, frozen, sources["train"], sources["val"])

    def cell(self, task: str, name: str, values: Values) -> dict[str, Any]:
        from raypipe.config import replace, validate
        from raypipe.train.job import TrainJob
        from raypipe.train.worker import train_rank

        data = self.data(task, values)
        fixed = {
            "table": {"uri": "unused"},
            "run": {"seed": self._seed},
            "train": {"epochs": EPOCHS, "precision": "fp32", "stopping": {"patience": None}},
        }
        job = replace(validate(TrainJob, fixed), values | {"model.side_px": data.train.side_px})
        began = time.process_time()
        state = train_rank(job, data, None, lambda state, engine: None, lambda metrics, state: None)
        used_s = time.process_time() - began
        curve = [round(float(epoch["val_accuracy"]), 4) for epoch in state.history]
        return {
            "task": task,
            "start": name,
            "seed": self._seed,
            "best": max(curve),
            "curve": curve,
            "cpu_s": round(used_s / EPOCHS, 3),
            "forward_ms": round(1000 * self._forward_s, 3),
            "images": [len(data.train.rows), len(data.val.rows)],
        }


def forward_s() -> float:
    """CPU seconds of an image's inference at SIDE_PX: what calibrates the cost model. Others use
    the machine, so the clock is the process's own."""
    from raypipe.models.predictor import CPU_BATCH
    from raypipe.models.zoo import ImageModel, ModelConfig

    net = ImageModel(ModelConfig(name="efficientnet_lite0", side_px=SIDE_PX), 2).for_inference()
    pixels_BHWC = np.zeros((CPU_BATCH, SIDE_PX, SIDE_PX, 3), np.uint8)
    seconds = []
    for _ in range(4):
        began = time.process_time()
        net.predict(pixels_BHWC)
        seconds.append(time.process_time() - began)
    return min(seconds) / CPU_BATCH


def measure(ledger: Path, home: Path, seeds: list[int], minutes: float) -> int:
    """Train missing cells for so long; how many are still missing."""
    import torch

    torch.set_num_threads(1)
    until = time.monotonic() + 60 * minutes
    done = read(ledger)
    for seed in seeds:
        bench = Bench(home, seed)
        for task in TASKS:
            for name, values in named_starts().items():
                if (task, name, seed) in done or time.monotonic() > until:
                    continue
                row = bench.cell(task, name, values)
                done[task, name, seed] = row
                with ledger.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    return len(seeds) * len(TASKS) * len(named_starts()) - len(done)


# Choosing and comparing. Pure.


def greedy(best_ST: np.ndarray, picks: int) -> list[int]:
    """Starts that together leave the least mean regret over the tasks; earlier ones first if
    equal."""
    chosen: list[int] = []
    reached_T = np.full(best_ST.shape[1], -np.inf)
    for _ in range(min(picks, len(best_ST))):
        level_S = np.maximum(best_ST, reached_T).mean(1)
        level_S[chosen] = -np.inf
        chosen.append(int(level_S.argmax()))
        reached_T = np.maximum(reached_T, best_ST[chosen[-1]])
    return chosen


def compared(best_ST: np.ndarray, names: list[str], tasks: list[str]) -> dict[str, Any]:
    """Each task left out in turn. best_ST: validation accuracy of a start on a task."""
    hand = [names.index(name) for name in ("hand", "draw-1", "draw-2")]
    rows = {}
    for at, task in enumerate(tasks):
        others = np.arange(len(tasks)) != at
        picked = greedy(best_ST[:, others], PICKS)
        top = best_ST[:, at].max()
        rows[task] = {
            "hand": [round(100 * float(best_ST[hand[:n], at].max()), 1) for n in (1, 3)],
            "portfolio": [round(100 * float(best_ST[picked[:n], at].max()), 1) for n in (1, 3)],
            "best_of_all": round(100 * float(top), 1),
            "picks": [names[pick] for pick in picked],
        }
    gain = [row["portfolio"][1] - row["hand"][1] for row in rows.values()]
    return {
        "by_task": rows,
        "mean_gain_points": round(float(np.mean(gain)), 2),
        "better_equal_worse": [sum(g > 0 for g in gain), gain.count(0), sum(g < 0 for g in gain)],
    }


def costs(cells: dict[tuple[str, str, int], dict[str, Any]]) -> dict[str, Any]:
    """By start: CPU seconds an epoch as predicted from one measured inference, and as measured."""
    from benchmarks.start_costs import Speed, cost
    from raypipe.config import validate
    from raypipe.train.job import TrainJob

    job = validate(TrainJob, {"table": {"uri": "unused"}})
    found: dict[str, Any] = {}
    ratios = []
    for name, values in named_starts().items():
        rows = [row for row in cells.values() if row["start"] == name]
        pairs = []
        for row in rows:
            speeds = {"efficientnet_lite0": Speed(row["forward_ms"] / 1000, SIDE_PX)}
            counts = dict(zip(("train", "val"), row["images"], strict=True))
            expected = cost(job, values | {"model.side_px": SIDE_PX}, counts, speeds)
            if expected is not None:
                pairs.append((expected.epoch_s, row["cpu_s"]))
        if pairs:
            found[name] = np.mean(pairs, axis=0).round(2).tolist()
        if values["model.mode"] == "finetune":
            ratios += [predicted / measured for predicted, measured in pairs]
    if ratios:
        found["finetune_ratio"] = np.quantile(ratios, (0, 0.5, 1)).round(2).tolist()
    return found


def report(ledger: Path) -> dict[str, Any]:
    """Of the seeds and tasks that have every start."""
    cells, names = read(ledger), list(named_starts())
    found: dict[str, Any] = {"cells": len(cells), "epoch_cpu_s": costs(cells)}
    seeds = sorted({seed for _, _, seed in cells})
    tasks = [
        task for task in TASKS if seeds and all((task, name, seeds[0]) in cells for name in names)
    ]
    if len(tasks) < 2:
        return found
    whole = [s for s in seeds if all((t, n, s) in cells for t in tasks for n in names)]
    best_ST = np.array(
        [[np.mean([cells[t, n, s]["best"] for s in whole]) for t in tasks] for n in names]
    )
    return found | {
        "seeds": whole,
        "starts": {
            name: [round(100 * float(x), 1) for x in row_T]
            for name, row_T in zip(names, best_ST, strict=True)
        },
        "portfolio_of_all": [names[at] for at in greedy(best_ST, 6)],
        "left_out": compared(best_ST, names, tasks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="accepted: the output is JSON anyway")
    parser.add_argument("--measure", action="store_true", help="train cells that are missing")
    parser.add_argument("--minutes", type=float, default=3.5)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--ledger", type=Path, default=LEDGER)
    parser.add_argument("--home", type=Path, default=Path("runs/tasks"))
    given = parser.parse_args()
    if given.measure:
        missing = measure(given.ledger, given.home, given.seeds, given.minutes)
        print(json.dumps({"missing": missing}))
    print(json.dumps(report(given.ledger)))


if __name__ == "__main__":
    main()
