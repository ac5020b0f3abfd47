"""An ensemble whose members were trained again, on training and validation images.

A search chooses an ensemble on validation images (together.py). After that they may be trained on,
as in a refit of one trial (refit.py); AutoGluon does so for every model (`refit_full`).

- Heads on frozen features are fitted again at their own settings. That takes seconds.
- Of fine-tuned members, the one with the most weight is trained again, as search.refit wants it. It
  takes nearly all of the time. The others leave, because what they learned without the validation
  images, and with fewer pixels, is a weaker form of what this one learns.
- The fine-tuned one gets at least half of the weight if it trains longer or with more pixels than
  its trial did: validation has judged the trial, and no validation images are left to judge the
  refitted one. Half is no fit: on solar cells (seed 31) a refit alone had 90.26 % of a test split
  right, heads alone 88.7 to 89.6, and their plain mean 90.3 to 91.0.

Where all members are heads, the best fine-tuned trial joins them with half of the weight, if the
refit trains it longer or with more pixels, and validation cannot tell its accuracy from theirs: it
lies in the interval of TOLD standard errors around theirs, and at most BEHIND below them. Trials
are short and small, so heads lead in most searches; the refit is what a fine-tuned model can become
in the time that is left. If it comes to nothing, or its weights are damaged, the heads are fitted
again without it. Where a search is judged by another share, as val_balanced_accuracy, that one
counts: with rare classes, who knows none of them is right as often.

search.refit=heads leaves fine-tuned members as they are: heads alone are fitted again.

It is all or nothing: if one member cannot be trained again, the ensemble stays as validation chose
it. What is trained is kept by content in the run's folder, so a killed command finds it again.

Where search.limits are set: the whole keeps them with the refit's side, else with the trial's own,
else it stays as validation chose it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from dataclasses import replace as with_
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from raypipe.config import key_of
from raypipe.errors import ConfigError, DataError, RaypipeError, one_line
from raypipe.files import owned
from raypipe.models.ensemble import Member
from raypipe.models.intervals import wilson
from raypipe.models.zoo import ModelConfig
from raypipe.search import refit, trial_files, variants
from raypipe.search.result import SearchResult
from raypipe.search.schedulers import mutations
from raypipe.search.settings import SearchConfig
from raypipe.train import checkpoint, ensembles
from raypipe.train.ensembles import Part
from raypipe.train.job import TrainJob
from raypipe.train.trainer import STOPPED

LEAST = 0.5
"""Of the weight, for a fine-tuned member that trains longer or with more pixels."""

TOLD = 3.0
"""Standard errors of an accuracy on the validation images, as Wilson's score interval (1927) counts
them: that of 393 images which are all right ends at .978. After four epochs at 128 px the best of
six trials on solar cells was 2.6 behind the heads (.83 and .87 of 393 images). Its refit has three
times as many epochs, on a quarter more images."""

BEHIND = 0.1
"""Of accuracy, at most, whatever the interval says: that of five images which are all right begins
at .36."""

ACCURACIES = ("val_accuracy", "val_balanced_accuracy", "val_f1")
"""Metrics of which an accuracy's interval says enough."""

log = logging.getLogger("raypipe")
Train = Callable[[TrainJob, SearchResult], SearchResult]
"""Trains a job, from refit.job_of, and returns the given result with its model."""

WEIGHTS = "together"  # in the folder of the training, as of any other


@dataclass(frozen=True)
class Again:
    """The members that are trained again.

    shares: by trial, the fine-tuned one first; they sum to 1. tuned: the fine-tuned one; None: all
    are heads on frozen features. stay: members that are not trained again.
    """

    shares: dict[str, float]
    tuned: str | None
    stay: tuple[str, ...] = ()

    @property
    def heads(self) -> tuple[str, ...]:
        """In the order of the ensemble."""
        return tuple(n for n in self.shares if n != self.tuned and n not in self.stay)

    def lifted(self, grows: bool) -> Again:
        """With at least LEAST for a fine-tuned member that `grows`; heads keep their relations."""
        if self.tuned is None or not grows or self.shares[self.tuned] >= LEAST:
            return self
        others = 1 - self.shares[self.tuned]
        shares = {name: (1 - LEAST) * share / others for name, share in self.shares.items()}
        return Again(shares | {self.tuned: LEAST}, self.tuned)


def chosen(shares: Mapping[str, float], frozen: Collection[str], rival: str | None = None) -> Again:
    """Who of an ensemble is trained again. shares: of its members; frozen: those that are heads.

    rival: a fine-tuned trial that joins if all of them are.
    """
    tuned = [name for name in shares if name not in frozen]
    if not tuned and rival is not None:
        heads = {name: (1 - LEAST) * share for name, share in chosen(shares, frozen).shares.items()}
        return Again({rival: LEAST, **heads}, rival)
    # The first one of equal weights is the better trial.
    first = max(tuned, key=lambda name: shares[name], default=None)
    staying = [*([first] if first is not None else []), *(n for n in shares if n in frozen)]
    total = sum(shares[name] for name in staying)
    return Again({name: shares[name] / total for name in staying}, first)


def chosen_of(found: SearchResult, wanted: Mapping[str, Any] | None = None) -> Again:
    """`chosen`, of the ensemble of a search, or of its one model.

    wanted: search.refit and its epochs, if a fine-tuned trial may join heads; None: none may.
    """
    shares, frozen = _members(found)
    return chosen(shares, frozen, None if wanted is None else _rival(found, wanted))


def heads_of(found: SearchResult) -> Again | str:
    """The heads of the ensemble, or of the one model, are trained again, and nobody else; a text:
    why none is."""
    shares, frozen = _members(found)
    if not frozen:
        return "no head on frozen features is part of the model"
    stay = tuple(name for name in shares if name not in frozen)
    return Again(shares, None, stay)


def _members(found: SearchResult) -> tuple[dict[str, float], list[str]]:
    """The weights of the model's members, by trial; and those that are heads."""
    shares = dict(zip(found.members, found.shares, strict=True)) or {found.trials[0].name: 1.0}
    return shares, [name for name in shares if found.models[name].mode == "frozen"]


def again_of(job: TrainJob, cfg: SearchConfig, found: SearchResult) -> Again | str:
    """Who is trained again, if the fine-tuned one can be; a text: why no head is, or not this one.

    job: the search's. Where a search makes ensembles, a fine-tuned trial may join heads; one that
    cannot be trained stays away. Raises ConfigError for a member whose settings refuse what is
    wanted.
    """
    if not cfg.trains_again:
        return heads_of(found)
    wanted = cfg.refit_changes or {}
    # The job's epochs, of which trials within a budget may have had fewer.
    joins = cfg.ensemble > 1
    again = chosen_of(found, {"train.epochs": job.train.epochs, **wanted} if joins else None)
    if again.tuned is None or not is_of_several(found, again):
        return again
    try:
        refit.job_of(job, dict(wanted), alone(found, again.tuned))
    except (RaypipeError, SafetensorError, OSError, ValueError) as e:
        own = chosen_of(found)
        if again.tuned not in own.shares:
            log.warning("The refit does without %s: %s", again.tuned, one_line(e))
            return own
        if isinstance(e, ConfigError):
            raise
        return f"{again.tuned} cannot be trained again: {one_line(e)}"
    return again


def is_of_several(found: SearchResult, again: Again) -> bool:
    """Is the model an ensemble, now or after the refit?"""
    return bool(found.shares) or len(again.shares) > 1


def _rival(found: SearchResult, wanted: Mapping[str, Any]) -> str | None:
    """The best fine-tuned trial, if it grows in the refit and validation cannot tell it apart."""
    models = found.models
    tuned = [t for t in found.trials if t.name in models and models[t.name].mode == "finetune"]
    best = next((trial for trial in tuned if trial.checkpoint is not None and trial.kept), None)
    if best is None or found.pinned is None:
        return None
    model = models[best.name]
    # null is the backbone's own.
    side_px = wanted.get("model.side_px", model.side_px)
    grown = model.model_copy(update={"side_px": None if side_px is None else int(side_px)})
    more_px = grown.pixels > model.pixels
    if not more_px and int(wanted["train.epochs"]) <= best.epochs:
        return None
    metric = found.metric if found.metric in ACCURACIES else "val_accuracy"
    known = found.best.metrics.get(metric, math.nan)
    # Of the epoch that it offers: an earlier one may have been more accurate.
    offered = best.history[checkpoint.epoch_of(Path(str(best.checkpoint))) - 1]
    reached = offered.get(metric, math.nan)
    images = found.pinned.counts[found.job.feed.val]
    # Wilson's, because sqrt(p (1 - p) / n) is 0 where all images were right: then none could join.
    least, _ = wilson(known, max(1, images), TOLD)
    least = max(least, known - BEHIND)
    return best.name if not math.isnan(known) and reached >= least else None


def alone(found: SearchResult, name: str) -> SearchResult:
    """The search as if this member were its best trial, and its model: what refit.py asks for."""
    assert found.searched is not None
    trial = next(trial for trial in found.trials if trial.name == name)
    others = tuple(one for one in found.trials if one is not trial)
    best = found.best
    trained = trial_files.training_result(found.key, best.version, best.classes, trial)
    job = mutations.job_of(found.searched, trial.changes, trial.schedule)
    return with_(found, job=job, best=trained, trials=(trial, *others), members=(), shares=())


def heads_again(
    job: TrainJob, found: SearchResult, again: Again, wanted: Mapping[str, Any], train: Train
) -> dict[str, SearchResult] | str:
    """The refits of the heads, by trial; a text: why one of them failed, or was cut.

    job: the search's. wanted: search.refit, which says when heads that learn by steps stop; their
    other settings are their own. Raises RaypipeError if somebody asked the process to stop.
    """
    stopping = {name: wanted[name] for name in wanted if name.startswith("train.stopping.")}
    trained = {}
    try:
        for name in again.heads:
            member = alone(found, name)
            # In this process: it takes no steps that workers could share.
            here = stopping | {"train.workers": 1, "train.strategy": "single"}
            trained[name] = train(refit.job_of(job, here, member), member)
            # With a rate that has not fallen, it is no better than what validation chose.
            why = refit.unfinished(trained[name])
            if why is not None:
                return f"its heads were not fitted again: of {name}, {why}"
    # Of a library too, as in a first answer: an eigenvalue that does not converge.
    except Exception as e:
        if isinstance(e, RaypipeError) and e.what == STOPPED:
            raise
        return f"its heads were not fitted again: {one_line(e)}"
    return trained


def refitted(job: TrainJob, found: SearchResult, cfg: SearchConfig, train: Train) -> SearchResult:
    """The search with its refit, without a clock. job: the search's. cfg: with search.refit."""
    assert found.pinned is not None
    wanted = cfg.refit_changes or {}
    again = refit.never(job, cfg, found.pinned) or again_of(job, cfg, found)
    if isinstance(again, str):
        log.warning("No refit: %s", again)
        return found
    if not is_of_several(found, again):
        try:
            done = train(refit.job_of(job, wanted, found), found)
        except RaypipeError as e:
            log.warning("No refit: %s", refit.why_diverged(e))
            return found
        return done if _is_finished(done) else found
    side = side_px(wanted, found, again, cfg)
    heads = side if isinstance(side, str) else heads_again(job, found, again, wanted, train)
    if isinstance(heads, str):
        log.warning("No refit: %s", heads)
        return found
    if again.tuned is not None:
        wanted = wanted if side is None else wanted | {"model.side_px": side}
        member = alone(found, again.tuned)
        try:
            heads[again.tuned] = train(refit.job_of(job, wanted, member), member)
        except RaypipeError as e:
            log.warning("No refit: %s", refit.why_diverged(e))
            return without_rival(found, again, heads)
        if not _is_finished(heads[again.tuned]):
            return without_rival(found, again, heads)
    return combined_or_as_it_was(found, again, heads, lambda why: log.warning("No refit: %s", why))


def combined_or_as_it_was(
    found: SearchResult,
    again: Again,
    trained: Mapping[str, SearchResult],
    told: Callable[[str], object],
) -> SearchResult:
    """`combined`; or the search as it was, if the weights of a member that stays cannot be read.

    told: takes why.
    """
    try:
        return combined(found, again, trained)
    except (DataError, SafetensorError, OSError) as e:
        if not again.stay:
            raise
        told(f"a member that stays cannot be read: {one_line(e)}")
        return found


def _is_finished(done: SearchResult) -> bool:
    """Is a refit a model? If not, the log says why."""
    why = refit.unfinished(done)
    if why is not None:
        log.warning("No refit: %s", why)
    return why is None


def without_rival(
    found: SearchResult, again: Again, heads: Mapping[str, SearchResult]
) -> SearchResult:
    """The search after the refit of the fine-tuned one has come to nothing.

    Was it a rival, the heads that were fitted again are the model; was it a member, what validation
    chose stays. heads: their refits, by trial.
    """
    if again.tuned in chosen_of(found).shares:
        return found
    return combined(found, chosen_of(found), heads)


def side_px(
    wanted: Mapping[str, Any], found: SearchResult, again: Again, cfg: SearchConfig
) -> int | str | None:
    """The side with which the fine-tuned member keeps search.limits among the others.

    None: any does, or all are heads, which keep them. A text: why none does. wanted: search.refit.
    """
    if not cfg.limits.of_models or found.pinned is None:
        return None
    models = {name: found.models[name] for name in again.shares}
    if again.tuned is None:
        # With validation images, kernel heads have more landmarks than those that were chosen.
        return _breaks(models, found, again, cfg) or None
    job = alone(found, again.tuned).job
    own_px = job.model.pixels
    why = ""
    for side in dict.fromkeys([refit.side_of(job, wanted), own_px]):
        models[again.tuned] = refit.replaced(job, {**wanted, "model.side_px": side}).model
        why = _breaks(models, found, again, cfg)
        if not why:
            return side
    return why


def _breaks(
    models: Mapping[str, ModelConfig], found: SearchResult, again: Again, cfg: SearchConfig
) -> str:
    """Which of search.limits the members break together; "": none. models: theirs, by trial."""
    assert found.pinned is not None
    members = [Member(models[n], share, name=n) for n, share in again.shares.items()]
    whole = variants.of_members(members, found.pinned, found.job, found.folder)
    return whole.breaks(cfg.limits)


def combined(
    found: SearchResult, again: Again, trained: Mapping[str, SearchResult]
) -> SearchResult:
    """The search with the ensemble of these refits, by trial, and of who stays; with a single one,
    that refit.

    Its job, history and metrics are those of its first member. As of every refit, the metrics have
    nothing of validation, which was trained on.
    """
    names = list(again.shares)
    first = trained[names[0]] if names[0] in trained else _led(found, again, trained)
    if len(names) == 1:
        return with_(first, trials=found.trials)
    again = again.lifted(_grows(found, again, trained))
    stay = {name: alone(found, name) for name in again.stay}
    # One that stays has no key of its own: that of what validation chose knows its weights.
    content = [trained[n].best.key if n in trained else f"{found.best.key} {n}" for n in names]
    shares = tuple(again.shares.values())
    key = key_of("refitted together", list(zip(content, shares, strict=True)))
    path = first.job.folder(key) / WEIGHTS
    # Written again, it would be no checkpoint for a moment, in which another process may read it.
    with owned(path.parent):
        if checkpoint.verify(path) is not None:
            every = {**trained, **stay}
            parts = [_part(every[name], name, again.shares[name]) for name in names]
            state = checkpoint.read_model(Path(first.best.checkpoint)).state
            ensembles.write(path, ensembles.build(parts), state)
    best = with_(
        first.best,
        key=key,
        checkpoint=str(path),
        seconds=sum(one.best.seconds for one in trained.values()),
        device_s=sum(one.best.device_s for one in trained.values()),
    )
    return with_(
        first,
        best=best,
        trials=found.trials,
        members=tuple(names),
        shares=shares,
        again=tuple(name for name in names if name not in again.stay),
    )


def _led(found: SearchResult, again: Again, trained: Mapping[str, SearchResult]) -> SearchResult:
    """The first member, which stays: beside its heads the model knows validation images, too."""
    lead = alone(found, next(iter(again.shares)))
    version = {"table.version": lead.best.version.version}
    return with_(
        lead,
        job=refit.replaced(lead.job, refit.splits(lead.job) | version),
        best=refit.without_validation(lead.best),
        refitted=True,
        pinned=trained[again.heads[0]].pinned,
    )


def _grows(found: SearchResult, again: Again, trained: Mapping[str, SearchResult]) -> bool:
    """Did the fine-tuned member train longer, or with more pixels, than its trial?"""
    if again.tuned is None:
        return False
    trial = next(trial for trial in found.trials if trial.name == again.tuned)
    refitted = trained[again.tuned]
    epochs = len(refitted.best.history)
    if refitted.job.train.start_from == trial.checkpoint:
        epochs += trial.epochs
    more_px = refitted.job.model.pixels > found.models[again.tuned].pixels
    return more_px or epochs > trial.epochs


def _part(result: SearchResult, name: str, share: float) -> Part:
    weights = checkpoint.read_model(Path(result.best.checkpoint)).weights
    return Part(Member(result.job.model, share, name=name), dict(weights), result.best.classes)
