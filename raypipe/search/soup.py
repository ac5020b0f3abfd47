"""The best trials' weights, averaged: one model, often better than each of them, that predicts as fast as one.

Greedy soup (Wortsman et al. 2022, "Model soups: averaging weights of multiple fine-tuned models improves accuracy without
increasing inference time"): from the best trial down, one joins the mean when the mean with it is at least as good on
validation. Trials of another backbone, mode or resolution are left out, and so, by that rule, are those whose weights lie in
another basin. Statistics of batch norms are averaged as weights are; where that does not fit, the mean is worse and not taken.
A trial whose weights are not finite never joins, and neither does one that makes the mean's loss or metric not finite.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from raypipe.config import metrics_of, to_json
from raypipe.models import finite
from raypipe.search.leaderboard import Trial
from raypipe.search.trials.epoch_result import metric_of
from raypipe.train import checkpoint
from raypipe.train.parallel.snapshot import Piece, Snapshot
from raypipe.train.stopping import Mode, unusable

FILE = "soup.json"
Weights = Mapping[str, Tensor]
Judge = Callable[[Weights], dict[str, float]]


@dataclass(frozen=True)
class Soup:
    """`members` by name, the best trial first; validation metrics of their mean; where it lies, as a checkpoint."""

    members: tuple[str, ...]
    metrics: dict[str, float]
    checkpoint: str


def cook(
    trials: Sequence[Trial], judge: Judge, metric: str, mode: Mode, folder: Path
) -> Soup | None:
    """Of `trials`, from best to worst; None where the best alone is best. Written into the search's `folder`."""
    best, *others = (trial for trial in trials if trial.checkpoint is not None)
    sign = 1 if mode == "max" else -1
    mean = _weights(best)
    members, metrics = [best.name], judge(mean)
    if unusable(metrics) is not None:
        return None
    for trial in others:
        tried = _mean(mean, _weights(trial), len(members))
        if finite.first_bad(tried) is not None:
            continue
        found = judge(tried)
        if sign * metric_of(found, metric) >= sign * metric_of(
            metrics, metric
        ):  # False if either is NaN
            mean, metrics = tried, found
            members.append(trial.name)
    if len(members) == 1:
        return None
    state = checkpoint.read(Path(str(best.checkpoint))).state
    pieces = {name: Piece.whole(tensor) for name, tensor in mean.items()}
    at = checkpoint.write(folder / "soup", Snapshot(pieces), state)
    soup = Soup(tuple(members), metrics, str(at))
    (folder / FILE).write_text(to_json(asdict(soup)))
    return soup


def read(folder: Path) -> Soup | None:
    """What `cook` wrote there."""
    if not (folder / FILE).exists():
        return None
    found = json.loads((folder / FILE).read_text())
    metrics = metrics_of(found["metrics"])
    if unusable(metrics) is not None:  # an older version's
        return None
    return Soup(tuple(found["members"]), metrics, found["checkpoint"])


def _weights(trial: Trial) -> dict[str, Tensor]:
    return dict(checkpoint.read(Path(str(trial.checkpoint))).weights)


def _mean(mean: Weights, more: Weights, of: int) -> dict[str, Tensor]:
    """Of `of` + 1 models, `mean` being that of the first `of`. Counters are not averaged."""
    return {
        name: torch.lerp(tensor, more[name].to(tensor.dtype), 1 / (of + 1))
        if tensor.is_floating_point()
        else tensor
        for name, tensor in mean.items()
    }
