"""What a search leaves: its trials from best to worst, and the best one's model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from raypipe.search import lineage
from raypipe.tables.table import TableVersion
from raypipe.train import checkpoint
from raypipe.train.job import TrainJob, TrainResult
from raypipe.train.loop import LoopState
from raypipe.train.settings import TrainConfig
from raypipe.train.stopping import Mode


@dataclass(frozen=True)
class Trial:
    """One finished trial. `metric` is its best epoch's; NaN when it failed. `stopped_early` is the scheduler's doing, or the
    end of the search's; `stopped` is why its own rule (train.stopping) ended it. `failures` counts how often it failed, also
    where a retry went on. `schedule`, of a trial that took over another's weights: the values of `changes` by epoch, as
    {"epoch": from, field: value, …}; the history is that of the weights."""

    name: str
    changes: dict[str, Any]
    metric: float
    epochs: int
    stopped_early: bool
    history: tuple[dict[str, float], ...]
    checkpoint: str | None
    stopped: str | None = None
    failures: int = 0
    schedule: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class SearchResult:
    """Trials from best to worst, the best one's job and its training result. `stopped`: why it ended before its last trial."""

    key: str
    job: TrainJob
    best: TrainResult
    trials: tuple[Trial, ...]
    metric: str
    seconds: float
    stopped: str | None = None


def ranked(trials: Iterable[Trial], mode: Mode) -> list[Trial]:
    """From best to worst; those that failed come last."""
    sign = -1 if mode == "max" else 1
    return sorted(trials, key=lambda t: (t.checkpoint is None, sign * t.metric if t.checkpoint else 0.0, t.name))


def write(file: Path, trials: Iterable[Trial], stopped: str | None) -> None:
    """All or nothing."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps({"trials": [asdict(t) for t in trials], "stopped": stopped}))
    partial.replace(file)


def read(file: Path) -> tuple[tuple[Trial, ...], str | None]:
    """(trials, why the search ended before its last)."""
    outcome = json.loads(file.read_text())
    return tuple(
        Trial(**t | {"history": tuple(t["history"]), "schedule": tuple(t["schedule"])}) for t in outcome["trials"]
    ), outcome["stopped"]


def trial_of(result: Any, metric: str, mode: str, train: TrainConfig, trials: Path, trial: str) -> Trial:
    """The line of one of Tune's results, with the checkpoint of its best epoch, which lies in the `trial`'s of `trials`."""
    name, values = Path(result.path).name, dict(result.config or {})
    kept: dict[int, tuple[LoopState, Path]] = {}
    if result.checkpoint is not None:
        kept = lineage.whole_epochs(lineage.home(trials, trial, values, lineage.follow(result.checkpoint.path)))
    history = kept[max(kept)][0].history if kept else []
    usable = [epoch for epoch in kept if history[epoch - 1][metric] == history[epoch - 1][metric]]  # NaN: it diverged
    if result.error is not None or not usable:
        return Trial(name, values, float("nan"), len(history), False, tuple(history), None)
    pick = max if mode == "max" else min
    epoch = pick(usable, key=lambda epoch: (history[epoch - 1][metric], -epoch if mode == "max" else epoch))
    reason = kept[max(kept)][0].stopped
    cut, best = len(history) < train.epochs and reason is None, history[epoch - 1][metric]
    return Trial(name, values, best, len(history), cut, tuple(history), str(kept[epoch][1]), reason)


def as_training(key: str, version: TableVersion, classes: tuple[str, ...], trial: Trial) -> TrainResult:
    """What a training with the trial's job would have returned."""
    state = checkpoint.read(Path(str(trial.checkpoint))).state
    last = state.epoch - 1  # the checkpoint kept is of the trial's best epoch
    where = str(trial.checkpoint)
    return TrainResult(key, version, classes, trial.history[last], trial.history, last, where, 0.0, trial.stopped)
