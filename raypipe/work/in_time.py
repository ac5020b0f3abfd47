"""`raypipe tune` within search.budget_s: which refit fits, and how much may judge its model.

search/budget.py decides; search/ledger.py holds the clock. Without a budget nothing here changes
anything.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from dataclasses import replace as with_
from pathlib import Path

from raypipe.config import replace, to_json
from raypipe.errors import RaypipeError
from raypipe.feed.dataset import Pinned
from raypipe.files import write_atomic
from raypipe.images import shifts
from raypipe.job import Job
from raypipe.search import budget, refit, variants
from raypipe.search.budget import Refit, Speed
from raypipe.search.leaderboard import SearchResult
from raypipe.search.ledger import Ledger
from raypipe.timer import OutOfTime, interrupted
from raypipe.train import checkpoint, shifted
from raypipe.train.job import TrainJob
from raypipe.train.pace import ANNEALED
from raypipe.train.stopping import FITTED
from raypipe.train.trainer import DIVERGED, Plan

log = logging.getLogger("raypipe")
PLAN = "refit.json"  # in the search's folder: the refit that was begun
# Trains a job until a point of `time.monotonic`; None: as long as it takes.
Train = Callable[[TrainJob, SearchResult, float | None], SearchResult]


def begin(job: Job, pinned: Pinned, ledger: Ledger) -> None:
    """Tell the ledger what the end will be about."""
    ledger.splits = tuple(pinned.counts[split] for split in {job.feed.val, job.feed.test})
    # An ensemble takes as long as its members, and its candidates predict validation images.
    ledger.views = job.model.views * job.search.ensemble
    if job.search.ensemble > 1:
        ledger.combined = (2 * job.search.ensemble + 1) * pinned.counts[job.feed.val]
    ledger.judged_images = job.registry.judged_images
    if job.model.task == "single_label":
        images = job.registry.severity_images
        ledger.shifted = images * len(shifts.KINDS)
        ledger.least_shifted = min(images, shifted.LEAST_COPIED) * len(shifts.KINDS)


def speed_of(found: SearchResult) -> Speed | None:
    """Of the best trial's last epoch."""
    trial = found.trials[0]
    # The job is another one's after a refit, and for an ensemble.
    model = found.models.get(trial.name, found.job.model)
    if not trial.history:
        return None
    is_frozen, epochs = model.mode == "frozen", len(trial.history)
    return budget.speed_of(trial.name, model.pixels, is_frozen, trial.history[-1], epochs)


def refitted(job: Job, found: SearchResult, ledger: Ledger, train: Train) -> SearchResult:
    """The search with its refit, or as it was: without one, or with one that does not fit.

    A refit that was begun keeps its plan in the search's folder: so the same command goes on with
    it after a kill.
    """
    wanted = job.search.refit
    if wanted is None:
        return found
    over = _over_limits(job, found, ledger)
    if over:
        log.warning("No refit: %s", over)
        ledger.notes.append(f"No refit: {over}")
        return found
    if ledger.budget_s is None:
        return train(refit.job_of(job.training, wanted, found), found, None)
    planned = _planned(job, found, ledger)
    if isinstance(planned, str):
        ledger.notes.append(f"No refit: {planned}")
        return found
    left_s = ledger.left_s(len(found.trials), speed_of(found))
    assert left_s is not None
    ledger.plan("refit", min(left_s, planned.seconds), planned.why)
    try:
        with interrupted(left_s, lambda: OutOfTime("The time of the refit is over")):
            changes = {
                "model.side_px": planned.side_px,
                "train.epochs": planned.epochs,
                "train.anneal_s": planned.seconds,
            }
            again = refit.job_of(job.training, wanted | changes, found)
            done = train(again, found, time.monotonic() + left_s)
    except OutOfTime:
        ledger.notes.append("No refit: it had not ended in time, and the best trial stays")
        return found
    except RaypipeError as e:
        if e.what != DIVERGED:
            raise
        _forget_plan(found)
        ledger.notes.append(f"No refit: {e}")
        return found
    finally:
        ledger.lap("refit")
    state = checkpoint.read(Path(done.best.checkpoint)).state
    # A head that is fitted at once has no schedule.
    if done.best.stopped != FITTED and (state.progress or 0.0) < ANNEALED:
        share = f"{state.progress or 0.0:.0%} of its schedule"
        ledger.notes.append(f"No refit: it came to {share}, and the best trial stays")
        _forget_plan(found)
        return found
    return done


def _over_limits(job: Job, found: SearchResult, ledger: Ledger) -> str:
    """Which of search.limits the refit of a first answer would break; "": none.

    Refits of what trials may draw were looked at before the first trial (variants.limited). Its
    backbone is another one.
    """
    limits, pinned = job.search.limits, found.pinned
    if found.trials[0].drawn or not limits.of_models or pinned is None:
        return ""
    wanted = job.search.refit or {}
    if ledger.budget_s is not None:
        # A head stays at its own resolution: see _planned.
        wanted = wanted | {"model.side_px": found.job.model.side_px}
    model = refit.job_of(job.training, wanted, found).model
    classes = len(pinned.classes)
    measured = variants.measured([model], classes, pinned, found.job, found.folder)
    return measured[model.shape].breaks(limits)


def _forget_plan(found: SearchResult) -> None:
    """The same command may plan another refit: this one came to nothing."""
    (found.folder / PLAN).unlink(missing_ok=True)


def _planned(job: Job, found: SearchResult, ledger: Ledger) -> Refit | str:
    """The refit that was begun before, or the one that fits now; a text: why none does."""
    file = found.folder / PLAN
    asked = to_json(job.search.refit)
    if file.exists():
        kept = json.loads(file.read_text())
        if kept.pop("asked") == asked:
            return Refit(**kept)
    speed, pinned = speed_of(found), found.pinned
    if speed is None or pinned is None or ledger.budget_s is None:
        return "nothing says how long its epochs would take"
    wanted = job.search.refit or {}
    sides = [speed.side_px]
    # Features of another resolution would have to be computed first.
    if found.job.model.mode == "finetune" and wanted.get("model.side_px"):
        sides.insert(0, int(wanted["model.side_px"]))
    images = sum(pinned.counts[split] for split in {job.feed.train, job.feed.val})
    most = int(wanted.get("train.epochs", found.job.train.epochs))
    planned = budget.plan_refit(
        ledger.budget_s,
        ledger.spent_s,
        ledger.ending(len(found.trials), speed),
        speed,
        images,
        most,
        tuple(sides),
    )
    if isinstance(planned, Refit):
        write_atomic(file, to_json(asdict(planned) | {"asked": asked}))
    return planned


def ending(found: SearchResult, ledger: Ledger) -> tuple[Plan, float | None]:
    """The plan to publish, which judges the model by as many images as there is time for.

    And when shifted copies have to be done, of time.monotonic; None: when they are done.
    """
    plan = found.plan
    if ledger.budget_s is None:
        return plan, None
    speed = speed_of(found)
    ledger.views = found.job.model.views * max(1, len(found.shares))
    expected = ledger.ending(len(found.trials), speed)
    if speed is not None and found.refitted:
        expected = expected.at(found.job.model.pixels / speed.side_px)
    ledger.plan("ending", expected.seconds, str(expected))
    rate, registry = expected.images_per_s, plan.job.registry
    most = budget.judged_images(ledger.budget_s, rate, ledger.views, registry.judged_images)
    changes: dict[str, float | int] = {}
    if most < max(ledger.splits, default=0):
        changes["registry.judged_images"] = most
        ledger.notes.append(f"{most} images of a split judge the model: {rate:.0f} a second")
    until_s = budget.usable(ledger.budget_s) - ledger.spent_s - expected.fixed_s
    left_s = until_s - expected.judged_s - expected.fit_s
    if ledger.shifted and left_s < expected.least_shifted_s:
        changes["registry.severity_images"] = 0
        ledger.notes.append("No time for shifted copies: drift checks estimate no accuracy")
    elif ledger.shifted:
        changes["registry.severity_s"] = min(registry.severity_s, left_s)
    plan = with_(plan, job=replace(plan.job, changes)) if changes else plan
    return plan, time.monotonic() + until_s
