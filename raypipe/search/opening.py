"""How a search begins: its first answer, within search.limits and its part of the budget.

first_answer.py fits the heads. Here stands who may be fitted, how long that may take, and what is
written if no time is left for a trial after it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace as with_
from pathlib import Path
from statistics import fmean

from raypipe.config import replace
from raypipe.errors import RaypipeError
from raypipe.feed.dataset import Pinned
from raypipe.models.backbones import BACKBONES
from raypipe.search import (
    budget,
    contenders,
    first_answer,
    kept,
    leaderboard,
    networks,
    trial_files,
    variants,
)
from raypipe.search.first_answer import FirstAnswer
from raypipe.search.leaderboard import Trial
from raypipe.search.ledger import Ledger, TooShort
from raypipe.search.limits import SearchLimits
from raypipe.search.settings import SearchConfig
from raypipe.search.trials.monitor import Listener
from raypipe.search.trials.standing import Reached, Standing
from raypipe.search.trials.trial_data import decoded_images
from raypipe.train.job import TrainJob
from raypipe.train.stopping import Mode, Progress, target

log = logging.getLogger("raypipe")


def answer(
    job: TrainJob,
    cfg: SearchConfig,
    pinned: Pinned,
    folder: Path,
    progress: Listener,
    total: int,
    ledger: Ledger,
) -> FirstAnswer:
    """What the search has before its first trial; nothing unless it asks for that."""
    if not cfg.first_answer:
        return FirstAnswer()
    rule = job.train.stopping
    fitted: list[Trial] = []

    def told(trial: Trial) -> None:
        fitted.append(trial)
        if trial.checkpoint is None:
            return  # no model, so it leads nothing
        usable = [one for one in fitted if one.checkpoint is not None]
        ranked = leaderboard.ranked(usable, rule.metric, rule.mode)
        progress(0, total, leaderboard.standings(ranked, rule.metric, rule.mode))

    barred: dict[str, str] = {}
    first = FirstAnswer()
    seconds = first_answer.SECONDS
    left_s = ledger.left_s(1, None)
    if left_s is not None:
        # Trials want a part of the time, too.
        seconds = min(seconds, max(1.0, left_s / 2))
    try:
        # It estimates its time: where that was wrong, what is there counts.
        least_s = _left_for_one_s(job, ledger)
        with ledger.reading(is_answered=True, phase="first answer", least_s=least_s):
            if cfg.limits.of_models:
                models = first_answer.models(job, pinned)
                measured = variants.measured(models, len(pinned.classes), pinned, job, folder)
                barred = {shape: one.breaks(cfg.limits) for shape, one in measured.items()}
            left_for_one_s, most_s = ledger.left_for_heads_s, _affordable_s(cfg)
            first_answer.make(
                job,
                pinned,
                folder,
                seconds,
                told,
                barred,
                left_for_one_s,
                found=first,
                most_s=most_s,
            )
    except TooShort:
        if not fitted:
            raise
    ledger.lap("first answer")
    _expect(ledger, job, cfg, first)
    if fitted:
        best = leaderboard.ranked(fitted, rule.metric, rule.mode)[0]
        if best.checkpoint is None:
            lacks = leaderboard.lacks_metric(fitted, rule.metric)
            why = f"{rule.metric} has no value" if lacks else "each one's scores are not finite"
            log.warning("The first answer has no usable head: %s", why)
            return first
        log.info(
            "The first answer after %.0f s: %s %.4g (%s)",
            first.seconds,
            rule.metric,
            best.metric,
            ", ".join(str(value) for value in best.changes.values()),
        )
    return first


def beside(first: FirstAnswer, metric: str, mode: Mode, progress: Listener) -> Listener:
    """A listener to trials that tells `progress` of the heads, too: trials have to beat them."""
    ranked = leaderboard.ranked(first.trials, metric, mode)
    usable = [trial for trial in ranked if trial.checkpoint is not None]
    heads = leaderboard.standings(usable, metric, mode)
    sign = -1 if mode == "max" else 1

    def told(done: int, total: int, standings: Sequence[Standing]) -> None:
        progress(done, total, sorted([*heads, *standings], key=lambda one: sign * one.best))

    return told if heads else progress


def best_head(first: FirstAnswer, metric: str, mode: Mode) -> float | None:
    """The metric of the best head; None without one that is a model."""
    for trial in leaderboard.ranked(first.trials, metric, mode):
        if trial.checkpoint is not None and math.isfinite(trial.metric):
            return trial.metric
    return None


def has_target(job: TrainJob, cfg: SearchConfig, first: FirstAnswer) -> str | None:
    """Why no trial has to begin: a head is as good as search.stopping.target. None: none is."""
    if cfg.stopping.target is None:
        return None
    rule = job.train.stopping
    best = best_head(first, rule.metric, rule.mode)
    return target(cfg.stopping.target)(Progress(rule.metric, rule.mode, [], first=best))


def _left_for_one_s(job: TrainJob, ledger: Ledger) -> float | None:
    """Seconds for the reading of least work, before anything was measured."""
    least = min((one.work for one in contenders.readings(job.model)), default=1.0)
    return ledger.left_for_heads_s(budget.GUESSED_IMAGES_PER_S / least)


def _affordable_s(cfg: SearchConfig) -> float | None:
    """Device seconds of all heads: half of what search.limits.money pays; None: no limit."""
    price = cfg.stopping.price_per_hour
    if cfg.limits.money is None or price is None:
        return None
    # Trials want a part of the money, too.
    return 3600 * cfg.limits.money / price / 2


def _expect(ledger: Ledger, job: TrainJob, cfg: SearchConfig, first: FirstAnswer) -> None:
    """Tell the ledger what an ensemble with these heads takes.

    Who becomes a member is not known yet: the networks that take longest, beside a trial's.
    """
    forecast = ledger.forecast
    forecast.works_per_s = first.works_per_s
    if first.works_per_s is not None and job.model.name not in BACKBONES:
        # It was measured on this very backbone, at its own side (contenders.readings).
        forecast.pixels_per_s[job.model.name] = first.works_per_s * job.model.pixels**2
    if not first.trials:
        return
    members = min(len(first.trials), max(1, cfg.ensemble - 1))
    # A single head has a refit's time, if there is one.
    if ledger.fits_heads_again and (cfg.ensemble > 1 or not ledger.refits):
        # As if they took equally long: the slow ones may not be chosen.
        mean_s = fmean(trial.seconds for trial in first.trials)
        forecast.again_s = budget.again_s([mean_s] * members)
    if cfg.ensemble < 2:
        return
    models = [replace(job, trial.changes).model for trial in first.trials]
    forecast.others_s = networks.heads_s(models, cfg.ensemble - 1, forecast.network_per_s)
    forecast.others = max(0, forecast.others - len(models))
    if forecast.uploads:
        of = zip(first.trials, models, strict=True)
        kept = {one.checkpoint: model for one, model in of if one.checkpoint is not None}
        forecast.weigh_heads(kept, cfg.ensemble - 1)


def end_with(
    folder: Path,
    job: TrainJob,
    cfg: SearchConfig,
    first: FirstAnswer,
    stopped: str,
    combine: Callable[[list[Trial]], None],
    notes: Sequence[str] = (),
) -> None:
    """Write the result of a search that begins no trial.

    stopped: why. combine: chooses an ensemble of the heads, if there is time for that. notes: what
    was not made; `combine` may add to them.
    """
    rule = job.train.stopping
    ranked = leaderboard.ranked(first.trials, rule.metric, rule.mode)
    trials = kept.Kept(job, cfg, folder).result(ranked)
    combine(trials)
    write_reached(folder, first, [], 0.0, rule.mode)
    trial_files.write(folder / "result.json", trials, stopped, decoded_images(first.data), notes)
    kept.clear(folder, trials)


def nothing_fitted(limits: SearchLimits) -> RaypipeError:
    """For a search whose limits only heads can keep, and none of them was fitted."""
    return RaypipeError(
        "No head of the first answer was fitted, and no trial can keep search.limits",
        got=", ".join(f"{name}={value}" for name, value in limits if value is not None),
        rule="The log says why heads were left out",
        fix="Raise the limits, or search.budget_s",
    )


def write_reached(
    folder: Path,
    first: FirstAnswer,
    by_trials: Sequence[Reached],
    trials_s: float,
    mode: Mode,
) -> None:
    """Keep when the search became better: by its first answer, and then by its trials."""
    later = [with_(one, seconds=first.seconds + one.seconds) for one in by_trials]
    # After a kill, a head that is fitted anew may come before one that was there.
    heads = sorted(first.reached, key=lambda one: one.seconds)
    reached = leaderboard.so_far([*heads, *later], mode)
    trial_files.write_reached(folder, reached, first.seconds, trials_s)
