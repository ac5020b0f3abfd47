"""The result of a search: its trials from best to worst, and the best one's model.

The value of a trial is its best usable epoch, because that epoch's weights are the model it offers;
with train.result=last, its last one. An epoch is unusable if a loss, the metric or a weight is not
finite. A trial without a usable epoch failed and ranks last.

A scheduler or a budget ends some trials early, and more epochs alone make a trial better. So the
order says whose model is better, and not whose settings are. Two more figures compare settings, and
both are shown wherever the order is:

- `compared`: each trial's best after as many epochs as all trials had.
- `ahead`: the trials that were better than the first one after as many epochs as they got.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from dataclasses import replace as with_
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from raypipe.cluster import usage
from raypipe.config import metrics_of, require_format, to_json
from raypipe.errors import DataError, one_line
from raypipe.feed.dataset import Pinned
from raypipe.files import write_atomic
from raypipe.models import finite
from raypipe.models.zoo import ModelConfig
from raypipe.search.trials import trial_checkpoints
from raypipe.search.trials.epoch_result import metric_of
from raypipe.search.trials.standing import Reached, Standing
from raypipe.tables.table import TableVersion
from raypipe.train import checkpoint
from raypipe.train.job import TrainJob, TrainResult
from raypipe.train.measure.utilisation import Utilisation, utilisation
from raypipe.train.settings import TrainConfig
from raypipe.train.stopping import FITTED, Mode, improved, unusable
from raypipe.train.trainer import Plan, prepare
from raypipe.train.worker import Prepared

log = logging.getLogger("raypipe")
# A trial's name, values, metrics by epoch, and what it took.
Run = tuple[str, dict[str, Any], tuple[dict[str, float], ...], dict[str, float]]
FIRST = "first-answer"  # the names of trials that were fitted before the search drew any

# Of result.json. Format 2 knows no `kept` and not what trials took; format 1 (ba74455 and before)
# has fewer fields still. What is missing has its default.
FORMAT = 3
REACHED = "reached.json"


@dataclass(frozen=True)
class Trial:
    """One trial that ended."""

    name: str

    changes: dict[str, Any]
    """The values it tried, by dotted field; after an exploit, the last ones."""

    metric: float
    """The metric of the epoch that it offers; NaN if it failed."""

    epochs: int

    stopped_early: bool
    """Ended by the scheduler, or by the end of the search."""

    history: tuple[dict[str, float], ...]
    """The metrics of each epoch that its weights were trained for."""

    checkpoint: str | None
    """The path of that epoch's checkpoint; None if it failed."""

    stopped: str | None = None
    """Why its own rule (train.stopping) ended it."""

    seconds: float = 0.0
    """For which it held devices, as the search's budgets count; in results of older versions its
    time in the training loop."""

    device_s: float = 0.0
    """Seconds times devices: GPUs, shares of one, or without any CPU workers. 0: not known, in
    results of older versions."""

    cut: bool = False
    """Ended by a budget, its own or the search's: the epochs that it lacks were not spared."""

    failures: int = 0
    """How often it failed, also if a retry succeeded."""

    schedule: tuple[dict[str, Any], ...] = ()
    """For a trial that took over weights: values by epoch (trial_checkpoints.Schedule)."""

    kept: bool = True
    """False: `search.keep` had the files of its checkpoint deleted."""

    @property
    def drawn(self) -> bool:
        """False: a head of the first answer, whose values are not of the space."""
        return not self.name.startswith(FIRST)

    def whole(self, epochs: int) -> int:
        """The epochs that it would have trained to its end. epochs: the job's, if it drew none."""
        return int(self.changes.get("train.epochs", epochs))


@dataclass(frozen=True)
class Ahead:
    """A trial that was better than the first one after as many epochs as it got."""

    trial: str

    epochs: int

    metric: float
    """The trial's best."""

    first: float
    """The first one's best after as many epochs."""


@dataclass(frozen=True)
class Spared:
    """What the scheduler, and the trials' own rules, saved by ending trials early.

    share: of the epochs that all trials would have run. device_s: what these epochs would have
    held, at each trial's own pace.
    """

    share: float = 0.0
    device_s: float = 0.0


@dataclass(frozen=True)
class SearchResult:
    """What a search, or a search and its refit, came to."""

    key: str
    """The name of the search's folder."""

    job: TrainJob
    """The best trial's job; after a refit, the refit's."""

    best: TrainResult
    """The best trial's training; after a refit, the refit's.

    A refit's has no validation metrics, because it was trained on validation images too.
    """

    trials: tuple[Trial, ...]
    """From best to worst."""

    metric: str

    seconds: float
    """Duration of this call: short if the search was finished before."""

    stopped: str | None = None
    """Why the search ended before its last trial."""

    decoded: int = 0
    """How many images were decoded, for all trials together."""

    full_epochs: int = 0
    """How many epochs all trials would have run to their ends."""

    members: tuple[str, ...] = ()
    """The trials whose weights were averaged, if the model is such an average (soup.py), or whose
    scores are (together.py)."""

    shares: tuple[float, ...] = ()
    """The weights of an ensemble's members; () for any other model."""

    refitted: bool = False

    again: tuple[str, ...] = ()
    """The trials that were trained again for the model of a refit; the one that `job` is of is the
    first."""

    searched: TrainJob | None = field(default=None, repr=False, compare=False)
    """The job of the search, before any trial's values; None only in tests."""

    reached: tuple[Reached, ...] = ()
    """When its trials became better than all before; () in results of older versions."""

    models: Mapping[str, ModelConfig] = field(default_factory=dict, repr=False, compare=False)
    """Each trial's model, by its name."""

    ran_s: float = 0.0
    """Seconds that its trials took, kills included, and before them its first answer; 0: not
    known."""

    pinned: Pinned | None = field(default=None, repr=False, compare=False)
    """The rows that its model was trained on; None only in tests."""

    @property
    def is_of_one_refit(self) -> bool:
        """Is its model what one training again has made? Then that one has told its own end."""
        return self.refitted and len(self.again) == 1

    @property
    def plan(self) -> Plan:
        """The training of its model, for whoever publishes or tests it."""
        job, pinned = self.job, self.pinned
        assert pinned is not None
        return Plan(job, pinned, self.best.key, self.kept, Prepared(lambda: prepare(job, pinned)))

    @property
    def trials_of_members(self) -> list[Trial]:
        """Of `members`; for a soup among them the best trial, which is as fast."""
        by_name = {trial.name: trial for trial in self.trials}
        return [by_name.get(name, self.trials[0]) for name in self.members]

    @property
    def folder(self) -> Path:
        return self.job.run.path / "search" / self.key

    @property
    def kept(self) -> Path:
        """The folder for the registered model's metrics on the test split.

        Each refit has its own: one search may have any number of refits.
        """
        if self.refitted:
            return self.job.folder(self.best.key)
        return self.folder

    @property
    def used(self) -> Utilisation | None:
        """How busy the nodes were while the trials ran."""
        epochs = [metrics for trial in self.trials for metrics in trial.history]
        return utilisation(usage.read(self.folder / usage.FILE), epochs)

    @property
    def epochs(self) -> int:
        """How many epochs all trials ran together; heads of a first answer have none."""
        return sum(trial.epochs for trial in self.trials if trial.drawn)

    @property
    def trials_s(self) -> float:
        """Seconds from the first trial's begin, or the first answer's, to the last one's end, or to
        the last time that it became better."""
        return max([self.ran_s, *(one.seconds for one in self.reached)])

    @property
    def device_s(self) -> float:
        """Seconds times devices of all trials, and of the refit after them."""
        # Older results know the trials' seconds alone.
        workers = self.job.train.most_workers
        held = [trial.device_s or trial.seconds * workers for trial in self.trials]
        return sum(held) + (self.best.device_s if self.refitted else 0.0)

    def runs(self, usd_per_device_s: float | None = None) -> list[Run]:
        """The trials as MLflow gets them, with what each took."""
        runs = []
        for trial in self.trials:
            hours = trial.device_s / 3600
            cost = {"cost.seconds": trial.seconds, "cost.device_hours": hours}
            if usd_per_device_s is not None:
                cost["cost.usd"] = trial.device_s * usd_per_device_s
            runs.append((trial.name, trial.changes, trial.history, cost))
        return runs

    @property
    def spared(self) -> Spared:
        """What ending trials early has saved."""
        # After a refit, `job` is its own: it may train for longer than a trial.
        job = self.searched or self.job
        return spared(self.trials, job.train.epochs, self.full_epochs)

    @property
    def mode(self) -> Mode:
        return self.job.train.stopping.mode

    @property
    def standings(self) -> list[Standing]:
        return standings(self.trials, self.metric, self.mode)

    @property
    def ahead(self) -> list[Ahead]:
        return ahead(self.trials, self.metric, self.mode)


def spared(trials: Sequence[Trial], each: int, full_epochs: int) -> Spared:
    """What early stopping saved of the `each` epochs that a trial would have run, or of those that
    it drew.

    Epochs that a budget cut, or that a failed trial lacks, were not saved.
    """
    epochs = device_s = 0.0
    for trial in trials:
        if trial.cut or trial.checkpoint is None or not trial.epochs:
            continue
        # A head that was fitted at once has no further epochs.
        if trial.stopped == FITTED:
            continue
        missing = max(0, trial.whole(each) - trial.epochs)
        epochs += missing
        device_s += missing * trial.device_s / trial.epochs
    return Spared(epochs / full_epochs if full_epochs else 0.0, device_s)


def standings(trials: Sequence[Trial], metric: str, mode: Mode) -> list[Standing]:
    """The standings of trials that ended, in their order."""
    equal_epochs = compared(trials, metric, mode)
    rows = []
    for trial in trials:
        if trial.checkpoint is None:
            state = "failed"
        elif trial.stopped == FITTED:
            state = "fitted"
        elif trial.stopped_early or trial.stopped is not None:
            state = "stopped"
        else:
            state = "full"
        row = Standing(
            trial.name,
            trial.changes,
            trial.metric,
            trial.epochs,
            state,
            equal_epochs.get(trial.name),
            trial.seconds,
            trial.device_s,
        )
        rows.append(row)
    return rows


def best_within(trial: Trial, epochs: int, metric: str, mode: Mode) -> float:
    """The best of the trial's first `epochs` epochs; NaN if none of them is usable."""
    values = [metric_of(line, metric) for line in trial.history[:epochs]]
    usable = [value for value in values if not math.isnan(value)]
    better = max if mode == "max" else min
    return better(usable, default=math.nan)


def compared(trials: Sequence[Trial], metric: str, mode: Mode) -> dict[str, tuple[int, float]]:
    """By trial: (N, its best of the first N epochs). Every usable trial had N epochs.

    {} if all had equally many. A trial that its own rule ended may have had fewer than N: it would
    have had no more epochs in any search.
    """
    usable = [trial for trial in trials if trial.checkpoint is not None and trial.history]
    # Trials that their own rule ended do not set N.
    lengths = [trial.epochs for trial in usable if trial.stopped is None]
    common = min(lengths, default=0)
    # A head that was fitted at once has no epochs.
    if not common or all(t.epochs == common for t in usable if t.stopped != FITTED):
        return {}
    best = {}
    for trial in usable:
        best[trial.name] = (common, best_within(trial, common, metric, mode))
    return best


def ahead(trials: Sequence[Trial], metric: str, mode: Mode) -> list[Ahead]:
    """The trials that had fewer epochs than the first one and were better than it by then.

    `trials` are in the leaderboard's order.
    """
    first = trials[0]
    leading = []
    for trial in trials[1:]:
        if trial.checkpoint is None or trial.stopped is not None or trial.epochs >= first.epochs:
            continue
        # How good the first one was when this trial ended.
        then = best_within(first, trial.epochs, metric, mode)
        if improved(trial.metric, None if math.isnan(then) else then, mode):
            leading.append(Ahead(trial.name, trial.epochs, trial.metric, then))
    return leading


def ranked(trials: Iterable[Trial], metric: str, mode: Mode) -> list[Trial]:
    """From best to worst; those without a usable epoch come last.

    Accuracies on few images are often equal. Then the lower loss wins, because a learning rate that
    is too high shows there first.
    """
    sign = -1 if mode == "max" else 1

    def place(trial: Trial) -> tuple[bool, float, float, str]:
        # True sorts last.
        failed = trial.checkpoint is None or not math.isfinite(trial.metric)
        if failed or not _usable(trial):
            return True, 0.0, 0.0, trial.name
        # The loss of the epoch whose metric counts.
        loss = math.inf
        for line in trial.history:
            if metric_of(line, metric) == trial.metric:
                loss = line["val_loss"]
                break
        return False, sign * trial.metric, loss, trial.name

    return sorted(trials, key=place)


def write(file: Path, trials: Iterable[Trial], stopped: str | None, decoded: int) -> None:
    """Write result.json; see `read`."""
    outcome = {
        "format": FORMAT,
        "trials": [asdict(trial) for trial in trials],
        "stopped": stopped,
        "decoded": decoded,
    }
    write_atomic(file, to_json(outcome))


def read(file: Path) -> tuple[tuple[Trial, ...], str | None, int]:
    """(trials from best to worst, why the search ended before its last, images decoded)."""
    outcome = json.loads(file.read_text())
    require_format(outcome, FORMAT, file)
    trials = [_read_trial(fields, file.parent / "trials") for fields in outcome["trials"]]
    # Only trials that an older version ranked by NaN move.
    trials.sort(key=lambda trial: trial.checkpoint is None)
    return tuple(trials), outcome["stopped"], outcome.get("decoded", 0)


def so_far(reached: Iterable[Reached], mode: Mode) -> list[Reached]:
    """Those that were better than all before them; `reached` is in the order of time."""
    better: list[Reached] = []
    for one in reached:
        if improved(one.value, better[-1].value if better else None, mode):
            better.append(one)
    return better


def write_reached(folder: Path, reached: Sequence[Reached], seconds: float) -> None:
    """Write reached.json into a search's folder; see `read_reached`."""
    kept = {"reached": [asdict(one) for one in reached], "seconds": seconds}
    write_atomic(folder / REACHED, to_json(kept))


def read_reached(folder: Path) -> tuple[tuple[Reached, ...], float]:
    """(when the best of a search became better, seconds that its trials took); none and 0 in the
    folder of an older version."""
    file = folder / REACHED
    if not file.exists():
        return (), 0.0
    kept = json.loads(file.read_text())
    # JSON has no NaN: null stands for it, and has reached nothing.
    reached = [Reached(**fields) for fields in kept["reached"] if fields["value"] is not None]
    return tuple(reached), float(kept["seconds"])


def _read_trial(fields: dict[str, Any], trials: Path) -> Trial:
    """A trial of result.json. trials: where their checkpoints are now; the folder may have moved.

    Older versions ranked a trial by the accuracy of an epoch of NaN: such a trial counts as failed.
    """
    # JSON has no NaN: null stands for it.
    metric = math.nan if fields["metric"] is None else fields["metric"]
    history = tuple(metrics_of(line) for line in fields["history"])
    schedule = tuple(fields.get("schedule", ()))
    trial = Trial(**{**fields, "metric": metric, "history": history, "schedule": schedule})
    if trial.checkpoint is not None:
        path = str(trial_checkpoints.below(trials, trial.checkpoint))
        trial = with_(trial, checkpoint=path)
    if _usable(trial):
        return trial
    return with_(trial, metric=math.nan, checkpoint=None)


def _usable(trial: Trial) -> bool:
    """Has a usable epoch the value that the trial is ranked by?"""
    if not trial.history:
        return True
    # An older version took the value from an epoch of NaN.
    having = [metrics for metrics in trial.history if trial.metric in metrics.values()]
    return any(unusable(metrics) is None for metrics in having)


def trial_of(
    result: Any,
    metric: str,
    mode: str,
    train: TrainConfig,
    trials: Path,
    check_weights: bool = True,
) -> Trial:
    """The trial of one of Tune's results, with the checkpoint of its best usable epoch, or of its
    last one, as train.result says.

    trials: the folder of all trials' checkpoints. check_weights: read them all, and take no epoch
    whose weights are not finite.
    """
    name = trial_checkpoints.name_of(result.path)
    changes = dict(result.config or {})
    # Find the folder as the trial itself does: an exploit may have changed it.
    pointer = result.checkpoint.path if result.checkpoint else None
    pointed = trial_checkpoints.pointed_checkpoint(pointer, trials)
    folder = trial_checkpoints.folder_of(trials, name, changes, pointed)

    ended = folder / trial_checkpoints.ENDED
    if ended.exists():
        return _read_trial(json.loads(ended.read_text()), trials)

    # A trial keeps its best checkpoints and the last one, whose state has the whole history.
    kept = trial_checkpoints.epoch_checkpoints(folder)
    last = kept[max(kept)][0] if kept else None
    history = tuple(last.history) if last else ()
    values = {epoch: metric_of(history[epoch - 1], metric) for epoch in kept}
    # From the best epoch down; among equal ones the first.
    usable = [epoch for epoch in values if not math.isnan(values[epoch])]
    sign = -1 if mode == "max" else 1
    if changes.get("train.result", train.result) == "last":
        usable.sort(reverse=True)
    else:
        usable.sort(key=lambda epoch: (sign * values[epoch], epoch))
    # Loading weights is slow, so it stops at the first epoch whose weights are finite.
    sound = _has_finite_weights if check_weights else lambda _: True
    best = next((epoch for epoch in usable if sound(kept[epoch][1])), None)
    # Failed: it keeps its history and offers no model.
    if result.error is not None or last is None or best is None:
        return Trial(name, changes, math.nan, len(history), False, history, None)

    schedule = trial_checkpoints.read_schedule(folder)
    if len(schedule) < 2:
        schedule = ()  # it was trained with its own values alone
    return Trial(
        name=name,
        changes=changes,
        metric=values[best],
        epochs=len(history),
        stopped_early=len(history) < changes.get("train.epochs", train.epochs)
        and last.stopped is None,
        history=history,
        checkpoint=str(kept[best][1]),
        stopped=last.stopped,
        seconds=last.seconds,
        schedule=schedule,
    )


def _has_finite_weights(folder: Path) -> bool:
    """Are the weights what was saved, and finite?"""
    try:
        weights = checkpoint.read_model(folder).weights
        return finite.first_bad(weights) is None
    except (DataError, SafetensorError, OSError, ValueError) as e:
        log.warning("Skipped checkpoint %s: %s", folder, one_line(e))
        return False


def training_result(
    key: str, version: TableVersion, classes: tuple[str, ...], trial: Trial
) -> TrainResult:
    """What a training with the trial's job would have returned. Its checkpoint is not read: beside
    a whole ensemble it may be damaged."""
    folder = str(trial.checkpoint)
    best = checkpoint.epoch_of(Path(folder)) - 1  # epochs count from 0 here
    return TrainResult(
        key, version, classes, trial.history[best], trial.history, best, folder, 0.0, trial.stopped
    )
