"""A model soup: the mean of the best trials' weights, if it is better than the best trial alone.

Greedy soup (Wortsman et al. 2022, "Model soups: averaging weights of multiple fine-tuned models
improves accuracy without increasing inference time"). Start with the best trial's weights. Take the
others from best to worst, and keep each one in the mean if validation is at least as good with it:
by the metric, and where that is equal, by the loss.

- Trials of another backbone, mode or resolution are left out by the caller. Weights that lie in
  another basin make the mean worse, so the rule leaves them out.
- Statistics of batch norms are averaged as weights are. Where that does not fit, the mean is worse.
- A trial never joins if its weights are not finite, or if the mean's loss or metric with it is not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from raypipe.config import metrics_of, to_json
from raypipe.files import write_atomic
from raypipe.models import finite
from raypipe.search.leaderboard import Trial
from raypipe.search.trials.epoch_result import metric_of
from raypipe.train import checkpoint
from raypipe.train.parallel.snapshot import Piece, Snapshot
from raypipe.train.stopping import Mode, unusable

FILE = "soup.json"
WEIGHTS = "soup"
Weights = Mapping[str, Tensor]
Validate = Callable[[Weights], dict[str, float]]


@dataclass(frozen=True)
class Soup:
    """A mean of several trials' weights."""

    members: tuple[str, ...]
    """The trials by name, the best one first."""

    metrics: dict[str, float]
    """Validation metrics of the mean."""

    checkpoint: str
    """The path of the mean's checkpoint."""


def make(
    trials: Sequence[Trial], validate: Validate, metric: str, mode: Mode, folder: Path
) -> Soup | None:
    """Average the weights of `trials` (from best to worst), and write the mean into `folder`.

    validate: validation metrics of weights. Returns None if no other trial improves on the best.
    """
    # Start with the best trial alone.
    best, *others = (trial for trial in trials if trial.checkpoint is not None)
    mean = _weights(best)
    metrics = validate(mean)
    if unusable(metrics) is not None:
        return None
    members = [best.name]
    alone = _goodness(metrics, metric, mode)
    for trial in others:
        # The mean with this trial, if it is usable and as good as without.
        candidate = _mean(mean, _weights(trial), len(members))
        if finite.first_bad(candidate) is not None:
            continue
        candidate_metrics = validate(candidate)
        # False if the metric is NaN.
        if _goodness(candidate_metrics, metric, mode) >= _goodness(metrics, metric, mode):
            mean = candidate
            metrics = candidate_metrics
            members.append(trial.name)
    if not _goodness(metrics, metric, mode) > alone:
        return None

    # A checkpoint like any other; its state is the best trial's.
    state = checkpoint.read_model(Path(str(best.checkpoint))).state
    pieces = {name: Piece.whole(tensor) for name, tensor in mean.items()}
    facts = {checkpoint.AVERAGED: len(members)}
    path = checkpoint.write(folder / WEIGHTS, Snapshot(pieces, facts=facts), state)
    soup = Soup(tuple(members), metrics, str(path))
    write_atomic(folder / FILE, to_json(asdict(soup)))
    return soup


def _goodness(metrics: Mapping[str, float], metric: str, mode: Mode) -> tuple[float, float]:
    """More is better: the metric, and then the loss, as on the leaderboard."""
    value = metric_of(metrics, metric)
    return value if mode == "max" else -value, -metrics.get("val_loss", math.inf)


def forget(folder: Path) -> None:
    """Remove what `make` wrote: a killed search that goes on may end with another best trial."""
    (folder / FILE).unlink(missing_ok=True)


def read(folder: Path) -> Soup | None:
    """The soup that `make` wrote into `folder`; None if it wrote none."""
    file = folder / FILE
    if not file.exists():
        return None
    fields = json.loads(file.read_text())
    metrics = metrics_of(fields["metrics"])
    if unusable(metrics) is not None:
        return None  # an older version accepted such a mean
    # The folder may have been moved since.
    return Soup(tuple(fields["members"]), metrics, str(folder / WEIGHTS))


def _weights(trial: Trial) -> dict[str, Tensor]:
    path = Path(str(trial.checkpoint))
    return dict(checkpoint.read_model(path).weights)


def _mean(mean: Weights, added: Weights, count: int) -> dict[str, Tensor]:
    """The mean of `count` + 1 models, given that of `count` models and one more.

    Integer tensors (counters) are not averaged; those of the best trial stay.
    """
    averaged = {}
    for name, tensor in mean.items():
        if tensor.is_floating_point():
            more = added[name].to(tensor.dtype)
            averaged[name] = torch.lerp(tensor, more, 1 / (count + 1))
        else:
            averaged[name] = tensor
    return averaged
