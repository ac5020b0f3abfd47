"""Fine-tuning starts of raypipe's own space, by a process that learned from Quick-Tune's runs.

python -m benchmarks.transfer --json [--curves ../shared/curves] [--picks 4]

Candidates are random draws of the default space that fine-tune, and the start that was set by hand.
Each is written as the Quick-Tune configuration that is nearest to it: AdamW, a small convolutional
network, no regulariser that raypipe does not have. What does not correspond: Quick-Tune's layer
decay is 0.65, 0.75 or none, its longest runs have 50 epochs, its images 128 px and its backbones
others than EfficientNet-Lite0; one_cycle is written as cosine with a warm-up.

The process predicts each candidate on six tasks of the sizes of ours, as a mean over three
backbones. Greedy picks then raise the expected maximum, a mean over these tasks.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import quicktune, ranker, ranker_gp
from benchmarks.quicktune import Runs
from raypipe.config import validate
from raypipe.search.space import defaults, parse
from raypipe.train.job import TrainJob

# Images for training and validation, classes: of benchmarks/task_tables.py.
SIZES = {
    "elpv-binary": (1968, 2),
    "elpv-levels": (1968, 4),
    "elpv-mono": (806, 2),
    "elpv-poly": (1162, 2),
    "emoji": (1419, 9),
    "digits": (1348, 10),
}
BACKBONES = ("edgenext_small", "mobilevitv2_075", "tf_efficientnet_b4_ns")
BLOCKS = 16  # of EfficientNet-Lite0
CANDIDATES = 96
AUGMENTATION = {"none": "None", "randaugment": "random_augment", "trivial": "trivial_augment"}
Values = dict[str, Any]
# The only start of earlier versions, set by hand on the solar cells.
HAND: Values = {
    "model.mode": "finetune",
    "model.side_px": 128,
    "model.dropout": 0.2,
    "model.frozen_blocks": 3,
    "model.norm_momentum": 0.1,
    "train.lr": 1e-3,
    "train.weight_decay": 0.02,
    "train.batch_size": 32,
    "train.schedule": "one_cycle",
    "train.label_smoothing": 0.1,
    "train.layer_decay": 0.9,
    "augment.flip_horizontal": True,
    "augment.flip_vertical": False,
    "augment.crop_area": 0.9,
    "augment.policy": "none",
}


def candidates(gpu: bool = False) -> list[Values]:
    """The hand-set start, then draws of the default space that fine-tune a pretrained backbone."""
    job = validate(TrainJob, {"table": {"uri": "unused"}})
    drawn = defaults.space(job, 2000, gpu)
    space = parse.parse(drawn, job)
    found = [dict(HAND)]
    number = 0
    while len(found) < CANDIDATES:
        trial = space.trial(1, number)
        number += 1
        if trial["model.mode"] == "finetune" and trial["model.name"] == job.model.name:
            found.append(trial)
    return found


def as_quicktune(values: Values, backbone: str, columns: list[str]) -> dict[str, float]:
    """The nearest configuration of Quick-Tune's space."""
    row = dict.fromkeys(columns, 0.0)
    policy = AUGMENTATION[values.get("augment.policy", "none")]
    for name in (
        f"cat:model:{backbone}",
        "cat:opt:adamw",
        "cat:sched:cosine",
        f"cat:data_augmentation:{policy}",
    ):
        row[name] = 1.0
    decay = values.get("train.layer_decay", 1.0)
    return row | {
        "batch_size": values["train.batch_size"],
        "lr": values["train.lr"],
        "weight_decay": values["train.weight_decay"],
        "pct_to_freeze": values.get("model.frozen_blocks", 0) / BLOCKS,
        "layer_decay": decay if decay < 1 else -1.0,
        "drop": values["model.dropout"],
        "smoothing": values.get("train.label_smoothing", 0.0),
        "clip_grad": 1.0,
        "momentum": 0.9,
        "warmup_epochs": 5.0 if values["train.schedule"] == "one_cycle" else 0.0,
        "warmup_lr": 1e-6,
    }


def with_candidates(folder: Path, found: list[Values]) -> tuple[Runs, np.ndarray]:
    """Quick-Tune's runs that train more than the head, then rows of the candidates: (runs, place).

    place_CTB: which row is a candidate on a task with a backbone.
    """
    runs = quicktune.read(folder)
    columns = quicktune.columns(folder)
    rows, images, classes = [], [], []
    for values in found:
        for many, kinds in SIZES.values():
            for backbone in BACKBONES:
                rows.append(as_quicktune(values, backbone, columns))
                images.append(many)
                classes.append(kinds)
    numbers, codes = quicktune.encoded(rows, images, classes)
    kept_N = ~runs.head_only_N
    place_CTB = kept_N.sum() + np.arange(len(rows)).reshape(len(found), len(SIZES), len(BACKBONES))
    known = replace(
        runs,
        # A task of their own, which tells nothing about any of the 18.
        task_N=np.concatenate([runs.task_N[kept_N], np.full(len(rows), len(runs.tasks))]),
        best_N=np.concatenate([runs.best_N[kept_N], np.full(len(rows), np.nan)]),
        numbers_NF=np.concatenate([runs.numbers_NF[kept_N], numbers]),
        categories_NC=np.concatenate([runs.categories_NC[kept_N], codes]),
        head_only_N=np.zeros(kept_N.sum() + len(rows), bool),
    )
    return known, place_CTB


@torch.no_grad()
def predicted(
    kernel: ranker_gp.Kernel, target_n: np.ndarray, place_CTB: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean_CT and covariance of all (candidate, task), each a mean over the backbones."""
    old = torch.arange(len(target_n))
    new = torch.tensor(place_CTB.reshape(-1))
    root = torch.linalg.cholesky(kernel.noisy(old))
    mean = target_n.mean()
    cross = kernel(new, old)
    expected = cross @ torch.cholesky_solve(torch.tensor(target_n - mean)[:, None], root)[:, 0]
    half = torch.linalg.solve_triangular(root, cross.T, upper=False)
    covariance = kernel(new, new) - half.T @ half
    pairs, backbones = place_CTB.shape[0] * place_CTB.shape[1], place_CTB.shape[2]
    averaged = covariance.reshape(pairs, backbones, pairs, backbones).mean((1, 3))
    means = expected.reshape(pairs, backbones).mean(1) + mean
    return means.reshape(place_CTB.shape[:2]).numpy(), averaged.numpy()


def greedy(
    mean_CT: np.ndarray, covariance: np.ndarray, noise: float, picks: int
) -> tuple[list[int], list[float]]:
    """Candidates that together have the largest expected maximum, mean over tasks; its growth."""
    rng = np.random.default_rng(0)
    pairs = mean_CT.size
    root = np.linalg.cholesky(covariance + (noise + 1e-6) * np.eye(pairs))
    drawn_SCT = (mean_CT.reshape(-1) + rng.standard_normal((1024, pairs)) @ root.T).reshape(
        -1, *mean_CT.shape
    )
    reached_ST = np.full(drawn_SCT[:, 0].shape, -10.0)
    chosen: list[int] = []
    levels = []
    for _ in range(picks):
        level_C = np.maximum(drawn_SCT, reached_ST[:, None]).mean((0, 2))
        chosen.append(int(level_C.argmax()))
        levels.append(round(float(level_C.max()), 3))
        reached_ST = np.maximum(reached_ST, drawn_SCT[:, chosen[-1]])
    return chosen, levels


def choose(folder: Path, picks: int) -> dict[str, Any]:
    found = candidates()
    runs, place_CTB = with_candidates(folder, found)
    known = int(place_CTB.min())
    rows_n = np.arange(len(runs.task_N))
    target_n = ranker.targets(runs, ranker.log_regret, np.arange(known))
    seen_n = rows_n < known
    kernel = ranker_gp.fitted(runs, rows_n, target_n, seen_n)
    mean_CT, covariance = predicted(kernel, target_n, place_CTB)
    chosen, levels = greedy(mean_CT, covariance, kernel.noise.exp().item(), picks)
    mean_C = mean_CT.mean(1)
    order = np.argsort(-mean_C).tolist()
    return {
        "hand": {"mean": round(float(mean_C[0]), 3), "place": order.index(0) + 1},
        "of": len(found),
        "best_means": [round(float(mean_C[at]), 3) for at in order[:5]],
        "levels": levels,
        "picks": [found[at] | {"mean": round(float(mean_C[at]), 3)} for at in chosen],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="accepted: the output is JSON anyway")
    parser.add_argument("--curves", type=Path, default=quicktune.FOLDER)
    parser.add_argument("--picks", type=int, default=4)
    given = parser.parse_args()
    print(json.dumps(choose(given.curves, given.picks)))


if __name__ == "__main__":
    main()
