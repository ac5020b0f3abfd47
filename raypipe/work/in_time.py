"""`raypipe tune` within search.budget_s: which refit fits, and how much may judge its model.

search/budget.py decides; search/ledger.py holds the clock. Without a budget nothing here changes
anything.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace as with_
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch

from raypipe.config import replace
from raypipe.errors import RaypipeError, one_line
from raypipe.feed import image_seconds
from raypipe.feed.dataset import Pinned
from raypipe.images import shifts
from raypipe.job import Job
from raypipe.models.severity import LEAST_VALIDATION
from raypipe.models.zoo import ModelConfig
from raypipe.registry.tracking import LEAST_COPIED
from raypipe.search import budget, networks, refit, refit_together, variants
from raypipe.search.budget import Ending, Refit, Speed
from raypipe.search.leaderboard import Trial
from raypipe.search.ledger import Ledger
from raypipe.search.refit_together import Again
from raypipe.search.result import SearchResult
from raypipe.timer import OutOfTime, interrupted
from raypipe.train.checkpoint import weights_mb
from raypipe.train.job import TrainJob
from raypipe.train.launch import wants_gpu
from raypipe.train.trainer import Plan
from raypipe.work import kept_refits

log = logging.getLogger("raypipe")
LATE = 1.02  # of the seconds of a refit: then it is ended, and comes to nothing
# Of these, what its last checkpoint and its result take after its last step. Of 12 s, the 1.5 %
# that a training by the clock keeps free (train/pace.py) were too few.
WRITTEN_S = 1.5
STAYS = "what validation chose stays"
# Trains a job until a point of `time.monotonic`; None: as long as it takes.
Train = Callable[[TrainJob, SearchResult, float | None], SearchResult]


def begin(job: Job, pinned: Pinned, ledger: Ledger) -> None:
    """Tell the ledger what the end will be about."""
    forecast = ledger.forecast
    if ledger.budget_s is not None:  # nobody plans without one
        forecast.time_network = partial(_network_per_s, classes=len(pinned.classes))
        forecast.image_s = _image_s(job, pinned)
        forecast.weigh_network = partial(_weights_mb, classes=len(pinned.classes))
        if forecast.uploads:
            forecast.weights_mb = forecast.network_mb(job.model)
    forecast.has_more_threads = _has_more_threads(job.training)
    forecast.splits = tuple(pinned.counts[split] for split in {job.feed.val, job.feed.test})
    forecast.tests = pinned.counts[job.feed.test]
    forecast.views = job.model.views
    forecast.validation = pinned.counts[job.feed.val]
    if job.search.ensemble > 1:
        # It takes as long as its members, and its candidates predict validation images.
        forecast.others = job.search.ensemble - 1
        forecast.chosen = pinned.counts[job.feed.val]
        forecast.combined = 2 * job.search.ensemble * forecast.chosen
    if job.search.soup > 1:
        forecast.combined += job.search.soup * pinned.counts[job.feed.val]
    forecast.judged_images = job.registry.judged_images
    forecast.shifted = _copies(job, pinned, job.feed.train)
    if job.search.refit is not None:
        learns = refit.learned(job.training, job.search.refit_changes or {})
        forecast.shifted_again = _copies(job, pinned, learns)
    forecast.least_shifted = min(job.registry.severity_images, LEAST_COPIED) * len(shifts.KINDS)


def _copies(job: Job, pinned: Pinned, learns: str) -> int:
    """Shifted copies that are wanted of a model; 0 where no estimate can come of them.

    learns: the split or splits that it learns (train/shifted.py says of what copies are).
    """
    knows_val = set(pinned.parts(job.feed.val)) <= set(pinned.parts(learns))
    split = job.feed.test if knows_val else job.feed.val
    images = pinned.counts[split]
    # Seconds that are kept for them would be nobody's: of 27 images a budget of 90 s kept 19 s.
    if job.model.task != "single_label" or images < LEAST_VALIDATION:
        return 0
    if pinned.common(split, learns):
        return 0
    return min(images, job.registry.severity_images) * len(shifts.KINDS)


def _weights_mb(model: ModelConfig, classes: int) -> float:
    """MB of the weights of a trial; 0: it cannot be built here."""
    try:
        return variants.weights_mb(model, classes)
    # Of a library, or of a user's own code. An estimate ends no search.
    except Exception as e:
        log.info("How large %s is cannot be said: %s", model.name, one_line(e))
        return 0.0


def _image_s(job: Job, pinned: Pinned) -> float:
    """Seconds in which a validation image is read and decoded; 0: not known."""
    try:
        return image_seconds.measured(pinned, job.feed.val, job.model.pixels, job.feed)
    # An estimate ends no search: whoever needs the images says what is wrong with them.
    except Exception as e:
        log.info("How long an image takes is not known: %s", one_line(e))
        return 0.0


def speed_of(found: SearchResult, name: str | None = None) -> Speed | None:
    """Of a trial's last epoch; of no name: of the one that was trained again, else the best."""
    if name is None:
        name = found.again[0] if found.again else found.trials[0].name
    trial = next((trial for trial in found.trials if trial.name == name), None)
    # The job is another one's after a refit, and for an ensemble.
    model = found.models.get(name, found.job.model)
    if trial is None or not trial.history:
        return None
    is_frozen, epochs = model.mode == "frozen", len(trial.history)
    more = _has_more_threads(found.job)
    return budget.speed_of(trial.name, model.pixels, is_frozen, trial.history[-1], epochs, more)


def _expect(found: SearchResult, members: Sequence[Trial], ledger: Ledger) -> Speed | None:
    """Tell the ledger what a prediction by these members takes; the speed of the leading one.

    That is the first fine-tuned one: only its side may change.
    """
    forecast = ledger.forecast
    forecast.others = forecast.combined = forecast.chosen = 0
    forecast.trials_ended = True
    if forecast.uploads:
        # Of an ensemble it is that of all members.
        forecast.weights_mb, forecast.heads_mb = weights_mb(Path(found.best.checkpoint)), 0.0
        if not found.shares and found.job.model.mode == "frozen":
            forecast.weights_mb += forecast.network_mb(found.job.model)
    # By place: a soup stands there as its best trial, which may be a member besides.
    models = {str(place): found.models[trial.name] for place, trial in enumerate(members)}
    measured = {str(place): speed_of(found, trial.name) for place, trial in enumerate(members)}
    speeds = {place: speed for place, speed in measured.items() if speed is not None}
    leader = next((place for place in models if models[place].mode != "frozen"), "0")
    forecast.views = models[leader].views
    forecast.others_s = networks.others_s(models, speeds, leader, forecast.network_per_s)
    speed = speeds.get(leader)
    if speed is None:
        return None
    if models[leader].mode != "frozen":
        return networks.on_cpus(speed, models[leader], forecast.network_per_s)
    return networks.unmeasured(speed, models[leader], forecast.network_per_s)


def refitted(job: Job, found: SearchResult, ledger: Ledger, train: Train) -> SearchResult:
    """The search with its refit, or as it was: without one, or with one that does not fit.

    A refit that was begun keeps its plan in the search's folder: so the same command goes on with
    it after a kill.
    """
    wanted = job.search.refit_changes
    if wanted is None:
        return found
    assert found.pinned is not None
    # Before what was settled: that may be of another configuration.
    why = refit.never(job.training, job.search, found.pinned)
    if why:
        return _as_it_was(found, ledger, why)
    settled = kept_refits.settled(job, found)
    if settled is not None and not settled["again"]:
        return _as_it_was(found, ledger, settled["why"])
    again = refit_together.again_of(job.training, job.search, found)
    if isinstance(again, str):
        return _as_it_was(found, ledger, again)
    if refit_together.is_of_several(found, again):
        return _refitted_together(job, wanted, found, again, ledger, train)
    ledger.forecast.again_s = 0.0
    over = _over_limits(job, found, ledger)
    if over:
        return _as_it_was(found, ledger, over)
    least_s = _least_s(found, found.trials[:1], ledger)
    return _refitted_alone(job, wanted, found, ledger, train, least_s)


def _refitted_together(
    job: Job,
    wanted: dict[str, Any],
    found: SearchResult,
    again: Again,
    ledger: Ledger,
    train: Train,
) -> SearchResult:
    """The search with its ensemble trained again (refit_together.py), or as validation chose it."""
    side = refit_together.side_px(wanted, found, again, job.search)
    if isinstance(side, str):
        return _as_it_was(found, ledger, side)
    if side is not None:
        wanted = wanted | {"model.side_px": side}
    # Where it comes to nothing, all members predict. Its own is the one whose side may change.
    ledger.forecast.again_s = 0.0
    names = {*(found.members or [found.trials[0].name]), *again.shares}
    members = _named(found, names, again.tuned)
    left_s = ledger.left_s(len(found.trials), _expect(found, members, ledger))

    fitted_s = [trial.seconds for trial in members if trial.name in again.heads]
    ledger.plan("refit of heads", budget.again_s(fitted_s), f"{len(fitted_s)} heads")

    def head(again: TrainJob, member: SearchResult) -> SearchResult:
        return train(again, member, None)

    settled = kept_refits.settled(job, found)
    # Who was trained after the heads is done, or their model is registered: then they are read
    # again, however late it is.
    is_done = again.tuned is not None and kept_refits.is_done(
        job, refit_together.alone(found, again.tuned)
    )
    try:
        with _within(None if is_done or settled is not None else left_s):
            trained = refit_together.heads_again(job.training, found, again, wanted, head)
    except OutOfTime as e:
        trained = e.what
    ledger.lap("refit of heads")
    if isinstance(trained, str):
        return _as_it_was(found, ledger, trained)
    if again.tuned is not None:
        member = refit_together.alone(found, again.tuned)
        ledger.forecast.again_s = budget.TOGETHER_S
        least_s = _least_s(found, members, ledger)
        # Members that leave do not predict.
        _expect(found, _named(found, again.shares, again.tuned), ledger)
        if settled is not None and again.tuned not in settled["again"]:
            tuned = _as_it_was(member, ledger, settled["why"])
        else:
            tuned = _refitted_alone(job, wanted, member, ledger, train, least_s)
        ledger.forecast.again_s = 0.0
        if not tuned.refitted:
            left = refit_together.without_rival(found, again, trained)
            if left.refitted:
                ledger.notes.append(f"The heads were fitted again without {again.tuned}")
            return left
        trained[again.tuned] = tuned
    told = partial(_as_it_was, found, ledger)
    return refit_together.combined_or_as_it_was(found, again, trained, told)


def _named(found: SearchResult, names: Collection[str], first: str | None) -> list[Trial]:
    """The trials of these names, this one first."""
    members = [trial for trial in found.trials if trial.name in names]
    return sorted(members, key=lambda trial: trial.name != first)


def _least_s(found: SearchResult, members: Sequence[Trial], ledger: Ledger) -> float:
    """What the end takes by these members if as few images judge them as may."""
    speed = _expect(found, members, ledger)
    return ledger.ending(len(found.trials), speed, fewest=True).seconds


def _as_it_was(found: SearchResult, ledger: Ledger, why: str) -> SearchResult:
    log.warning("%s%s", kept_refits.NONE, why)
    return _noted(found, ledger, why)


def _noted(found: SearchResult, ledger: Ledger, why: str) -> SearchResult:
    ledger.notes.append(f"{kept_refits.NONE}{why}")
    return found


def _within(left_s: float | None) -> AbstractContextManager[object]:
    if left_s is None:
        return nullcontext()
    return interrupted(left_s, lambda: OutOfTime("the time of the refit is over"))


def _refitted_alone(
    job: Job,
    wanted: dict[str, Any],
    found: SearchResult,
    ledger: Ledger,
    train: Train,
    least_s: float,
) -> SearchResult:
    """The best trial of `found` trained again, or `found`.

    wanted: search.refit. least_s: what the end takes at least, if this comes to nothing.
    """
    if ledger.budget_s is None:
        try:
            done = train(refit.job_of(job.training, wanted, found), found, None)
        except RaypipeError as e:
            return _as_it_was(found, ledger, refit.why_diverged(e))
        why = refit.unfinished(done)
        return done if why is None else _as_it_was(found, ledger, f"{why}, and {STAYS}")
    planned = _planned(job, wanted, found, ledger, least_s)
    if isinstance(planned, str):
        return _noted(found, ledger, planned)
    left_s = ledger.left_before_s(least_s)
    assert left_s is not None
    if found.job.train.solver == "steps":
        # It ends by its own clock. What comes after it has the rest.
        left_s = min(left_s, LATE * planned.seconds)
    # A finished one is only read, which a rerun or another terminal has always time for: else it
    # would register what this refit was better than.
    is_done = kept_refits.is_done(job, found)
    takes_s = planned.seconds
    if found.job.train.solver != "steps":
        # A head is fitted once, whatever is left for it.
        takes_s = budget.again_s([found.trials[0].seconds])
    ledger.plan("refit", 0.0 if is_done else min(left_s, takes_s), planned.why)
    try:
        with _within(None if is_done else left_s):
            changes = {
                "model.side_px": planned.side_px,
                "train.epochs": planned.epochs,
                "train.anneal_s": planned.seconds,
            }
            again = refit.job_of(job.training, wanted | changes, found)
            done = train(again, found, time.monotonic() + max(0.1, left_s - WRITTEN_S))
    except OutOfTime:
        return _noted(found, ledger, f"it had not ended in time, and {STAYS}")
    except RaypipeError as e:
        why = refit.why_diverged(e)
        kept_refits.forget_plan(job, found)
        return _noted(found, ledger, why)
    finally:
        ledger.lap("refit")
    why = refit.unfinished(done)
    if why is not None:
        kept_refits.forget_plan(job, found)
        return _noted(found, ledger, f"{why}, and {STAYS}")
    kept_refits.keep_plan(job, found, planned, trained=done.best.key)
    return done


def _over_limits(job: Job, found: SearchResult, ledger: Ledger) -> str:
    """Which of search.limits the refit of a first answer would break; "": none.

    Refits of what trials may draw were looked at before the first trial (variants.limited). Its
    backbone is another one.
    """
    limits, pinned = job.search.limits, found.pinned
    if found.trials[0].drawn or not limits.of_models or pinned is None:
        return ""
    wanted = job.search.refit_changes or {}
    if ledger.budget_s is not None:
        # A head stays at its own resolution: see _planned.
        wanted = wanted | {"model.side_px": found.job.model.side_px}
    model = refit.job_of(job.training, wanted, found).model
    classes = len(pinned.classes)
    measured = variants.measured([model], classes, pinned, found.job, found.folder)
    return measured[model.shape].breaks(limits)


def _planned(
    job: Job, wanted: dict[str, Any], found: SearchResult, ledger: Ledger, least_s: float
) -> Refit | str:
    """The refit that was begun before, or the one that fits now; a text: why none does.

    least_s: what the end takes at least, if it comes to nothing.
    """
    begun = kept_refits.plan_of(job, found)
    if begun is not None:
        return begun
    own = job.train.epochs if "epochs" in job.train.model_fields_set else None
    speed, pinned = speed_of(found), found.pinned
    if speed is None or pinned is None or ledger.budget_s is None:
        return "nothing says how long its epochs would take"
    speed = networks.on_cpus(speed, found.job.model, ledger.forecast.network_per_s)
    if _has_more_threads(found.job):
        speed = speed.alone
    sides = [speed.side_px]
    # Features of another resolution would have to be computed first.
    if found.job.model.mode == "finetune" and "model.side_px" in wanted:
        sides.insert(0, refit.side_of(found.job, wanted))
    if found.job.model.mode == "finetune" and _has_more_threads(found.job):
        _time(found, sides[0], ledger)
    images = sum(pinned.counts[split] for split in {job.feed.train, job.feed.val})
    # The job's, of which trials may have had fewer (space/defaults.py), unless they drew them.
    set_to = wanted.get("train.epochs", found.trials[0].changes.get("train.epochs", own))
    most = None if set_to is None else int(set_to)
    if found.job.train.solver != "steps":
        most = 1  # a head is fitted at once
    elif not job.search.trains_again:
        most = most or found.job.train.epochs  # heads keep their own settings
    trials = len(found.trials)
    # Its model may have other views than the trial's.
    ledger.forecast.views = int(wanted.get("model.views", found.job.model.views))
    planned = budget.plan_refit(
        ledger.budget_s,
        ledger.spent_s,
        ledger.ending(trials, speed, refit=True),
        speed,
        images,
        most,
        tuple(sides),
        least_s,
    )
    if isinstance(planned, Refit):
        kept_refits.keep_plan(job, found, planned)
    return planned


def _time(found: SearchResult, side_px: int, ledger: Ledger) -> None:
    """Tell the ledger how fast the best trial's network predicts, now that nobody runs beside it.

    side_px: which it will have.
    """
    assert found.pinned is not None
    model = found.job.model
    asked = model.model_copy(update={"side_px": side_px})
    rate = variants.predictions_per_s(asked, len(found.pinned.classes))
    ledger.forecast.timed[found.trials[0].name] = rate * (asked.pixels / model.pixels) ** 2


def _network_per_s(model: ModelConfig, classes: int) -> float:
    """Images a second through this network on the CPUs of this process; 0: it cannot be timed."""
    try:
        return variants.predictions_per_s(model, classes)
    # Of a library, or of a user's own code. An estimate ends no search.
    except Exception as e:
        log.warning("%s cannot be timed on this machine's CPUs: %s", model.name, one_line(e))
        return 0.0


def _has_more_threads(job: TrainJob) -> bool:
    """Has what runs in this process more threads than a trial? It has all of them."""
    if job.train.workers != 1 or torch.get_num_threads() == 1:
        return False
    return not wants_gpu(job.train, ray.cluster_resources())


def ending(found: SearchResult, ledger: Ledger) -> tuple[Plan, float | None, float | None]:
    """The plan to publish, which judges the model by as many images as there is time for.

    And two times of time.monotonic, None without a budget: when shifted copies have to be done, and
    when no further trial gets a run on MLflow's server. What came of it, the registered version
    knows (lacking.py).
    """
    plan, forecast = found.plan, ledger.forecast
    if ledger.budget_s is None:
        return plan, None, None
    leading = [trial for trial in found.trials if trial.name in found.again] or found.trials[:1]
    speed = _expect(found, found.trials_of_members if found.shares else leading, ledger)
    # Who leads may be as it was, beside heads.
    leads = found.refitted and not found.stay
    if leads:
        forecast.views = found.job.model.views  # search.refit may have set them
    expected = ledger.ending(len(found.trials), speed, refit=found.refitted)
    if speed is not None and leads:
        expected = expected.at(found.job.model.pixels / speed.side_px)
    rate, registry = 1 / expected.judging_s, plan.job.registry
    # A refit has learned from validation.
    splits = (forecast.tests,) if found.refitted and forecast.tests else forecast.splits
    fitting = _fitting(ledger, expected, splits)
    # There may be no time for as few as were planned: a large network on the CPUs.
    fewest = min(budget.FEWEST_JUDGED, max(budget.LEAST_JUDGED, fitting))
    wanted = registry.judged_images
    most = budget.judged_images(ledger.budget_s, rate, forecast.views, wanted, fewest)
    if "refit" in ledger.phases and not found.refitted:
        # It came to nothing. It left time for an end with as few images as may be.
        most = min(most, max(fewest, fitting))
    judged = forecast.views * sum(min(most, images) for images in splits)
    expected = with_(expected, judged=min(judged, expected.judged))
    changes: dict[str, float | int] = {}
    if most < max(forecast.splits, default=0):
        changes["registry.judged_images"] = most
    end_s = budget.usable(ledger.budget_s) - ledger.spent_s
    until_s = end_s - expected.fixed_s
    left_s = until_s - expected.judged_s - expected.fit_s
    copies = forecast.copies(found.refitted)
    if copies and left_s < expected.least_shifted_s:
        # None is made. The user's number of images stays, or the package would call it the reason.
        until_s, expected = 0.0, with_(expected, shifted=0)
    elif copies:
        changes["registry.severity_s"] = min(registry.severity_s, left_s)
    ledger.plan_ending(expected)
    plan = with_(plan, job=replace(plan.job, changes)) if changes else plan
    now = time.monotonic()
    # A run in a file takes milliseconds. A server may take a second for one.
    runs_until = now + end_s - expected.after_runs_s if expected.answer_s else None
    return plan, now + until_s, runs_until


def _fitting(ledger: Ledger, expected: Ending, splits: Sequence[int]) -> int:
    """Images of each split for whose predictions there is time. splits: how many they have."""
    left_s = ledger.left_before_s(expected.fixed_s) or 0.0
    judging = sum(1 for images in splits if images) or 1
    each_s = (1 + budget.ENDING_MARGIN) * expected.judging_s * ledger.forecast.views * judging
    return int(max(0.0, left_s) / each_s)
