"""Trials on disk: what a search writes about them, and how they are read again.

search/KEY/result.json   the ranked trials of a finished search (`write`, `read`)
search/KEY/reached.json  when the best of the search became better (`write_reached`)
search/KEY/trials/       the checkpoints, which say how a trial ended (`trial_of`)
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from dataclasses import replace as with_
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError

from raypipe.config import metrics_of, require_format, to_json
from raypipe.errors import DataError, one_line
from raypipe.files import write_atomic
from raypipe.models import finite
from raypipe.search.leaderboard import FIRST, Trial, is_usable
from raypipe.search.trials import trial_checkpoints
from raypipe.search.trials.epoch_result import metric_of
from raypipe.search.trials.standing import Reached
from raypipe.tables.table import TableVersion
from raypipe.train import checkpoint
from raypipe.train.job import TrainResult
from raypipe.train.settings import TrainConfig

log = logging.getLogger("raypipe")
# Of result.json. Format 2 knows no `kept` and not what trials took; format 1 (ba74455 and before)
# has fewer fields still. What is missing has its default.
FORMAT = 3
REACHED = "reached.json"


class Outcome(NamedTuple):
    """What result.json says.

    trials: from best to worst. stopped: why the search ended before its last one. decoded: images.
    notes: what it did not make, and why; () in results of older versions.
    """

    trials: tuple[Trial, ...]
    stopped: str | None
    decoded: int
    notes: tuple[str, ...]


def write(
    file: Path,
    trials: Iterable[Trial],
    stopped: str | None,
    decoded: int,
    notes: Sequence[str] = (),
) -> None:
    """Write result.json; see `Outcome`."""
    outcome = {
        "format": FORMAT,
        "trials": [asdict(trial) for trial in trials],
        "stopped": stopped,
        "decoded": decoded,
        "notes": list(notes),
    }
    write_atomic(file, to_json(outcome))


def read(file: Path) -> Outcome:
    """What `write` wrote, or an older version."""
    outcome = json.loads(file.read_text())
    require_format(outcome, FORMAT, file)
    trials = [_read_trial(fields, file.parent / "trials") for fields in outcome["trials"]]
    # They are sorted, but for those that an older version ranked by an epoch of NaN.
    trials.sort(key=lambda trial: trial.checkpoint is None)
    notes = tuple(outcome.get("notes", ()))
    return Outcome(tuple(trials), outcome["stopped"], outcome.get("decoded", 0), notes)


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
    if is_usable(trial):
        return trial
    return with_(trial, metric=math.nan, checkpoint=None)


def write_reached(
    folder: Path, reached: Sequence[Reached], first_s: float, trials_s: float = 0.0
) -> None:
    """Write reached.json into a search's folder; see `read_reached`.

    first_s: seconds that its first answer took; trials_s: its trials.
    """
    kept = {"reached": [asdict(one) for one in reached], "seconds": first_s + trials_s}
    write_atomic(folder / REACHED, to_json(kept | {"first_s": first_s}))


def read_reached(folder: Path) -> tuple[tuple[Reached, ...], float]:
    """(when the best of a search became better, seconds that its trials took).

    Nothing and 0 for a search of an older version.
    """
    file = folder / REACHED
    if not file.exists():
        return (), 0.0
    kept = json.loads(file.read_text())
    # JSON has no NaN: null stands for it, and NaN was never better.
    reached = [Reached(**fields) for fields in kept["reached"] if fields["value"] is not None]
    return tuple(reached), float(kept["seconds"])


def read_first_s(folder: Path) -> float:
    """Seconds that the first answer of a search took so far.

    In the file of an older version: until its last head that was the best so far.
    """
    file = folder / REACHED
    if not file.exists():
        return 0.0
    heads = [one.seconds for one in read_reached(folder)[0] if one.by.startswith(FIRST)]
    return float(json.loads(file.read_text()).get("first_s", max(heads, default=0.0)))


def trial_of(
    result: Any,
    metric: str,
    mode: str,
    train: TrainConfig,
    trials: Path,
    check_weights: bool = True,
) -> Trial:
    """The trial of one of Tune's results, with the checkpoint of the epoch that it offers.

    That is its best usable epoch, or its last one, as train.result says. trials: the folder of all
    trials' checkpoints. check_weights: read the weights, and take no epoch whose are not finite.
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
    usable = _by_preference(values, mode, changes.get("train.result", train.result))
    # Loading weights is slow, so it stops at the first epoch whose weights are finite.
    sound = _has_finite_weights if check_weights else lambda _: True
    best = next((epoch for epoch in usable if sound(kept[epoch][1])), None)
    # A trial that failed keeps its history and offers no model.
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


def _by_preference(values: Mapping[int, float], mode: str, wanted: str) -> list[int]:
    """The epochs whose value is a number, in the order in which a trial would offer them.

    values: the metric by epoch. wanted: train.result. Of equally good epochs the first one counts.
    """
    usable = [epoch for epoch in values if not math.isnan(values[epoch])]
    if wanted == "last":
        return sorted(usable, reverse=True)
    sign = -1 if mode == "max" else 1
    return sorted(usable, key=lambda epoch: (sign * values[epoch], epoch))


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
