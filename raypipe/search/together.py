"""The ensemble of a finished search: its trials' weighted mean, if validation says it is better.

Candidates are the best trials, the heads of a first answer, and the soup if there is one. Each says
what it says of the validation images, at its own side and over its own views, and greedy.py
chooses. Whether the ensemble is better than the best of them is asked three times:

1. on halves of validation that it was not chosen on (greedy.py),
2. on all of validation, by its members' own predictions (greedy.Bar),
3. on all of validation, by its own: members of several sides shrink pixels inside, which is not
   quite what their own pipelines do (models/ensemble.py). Where there is no time for all images, on
   a sample; of the others it says the mean of what its members said.

Then it is timed as a whole. While it breaks search.limits, the member with the least weight goes.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from dataclasses import replace as with_
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from raypipe.config import metrics_of, replace, to_json
from raypipe.errors import RaypipeError, one_line
from raypipe.feed.dataset import Pinned
from raypipe.feed.feed import Feed, Source, fetch
from raypipe.feed.rows import drawn
from raypipe.files import write_atomic
from raypipe.models.ensemble import EnsembleModel, Member, logits_of
from raypipe.models.predictor import Predictor
from raypipe.search import greedy, quality, variants
from raypipe.search.choosing import Choosing
from raypipe.search.leaderboard import Trial
from raypipe.search.limits import share_of_limits
from raypipe.search.settings import SearchConfig
from raypipe.search.trials.trial import data_key
from raypipe.serve import latency
from raypipe.train import checkpoint, ensembles, trainer
from raypipe.train.ensembles import Part
from raypipe.train.job import TrainJob, TrainResult
from raypipe.train.worker import Data, objective_of

log = logging.getLogger("raypipe")
FILE = "together.json"
WEIGHTS = "together"
MOST_HELD = 16_000_000
"""Scores of a candidate that are held in memory: 64 MB. Of 2,000 classes and 50,000 images, sixteen
candidates have 6.4 GB."""


@dataclass(frozen=True)
class Together:
    """An ensemble of trials."""

    members: tuple[str, ...]
    """The trials by name, the best one first; `soup` is their average."""

    shares: tuple[float, ...]
    """Their weights, which sum to 1."""

    metrics: dict[str, float]
    """Validation metrics of the ensemble."""

    gain: float
    """How much better than the best candidate its metric was on images that it was not chosen on,
    on average."""

    checkpoint: str

    checked: int | None = None
    """Of how many validation images it said itself what the metrics judge; None: of all."""


@dataclass(frozen=True)
class Candidate:
    """A model that may become a member."""

    name: str
    job: TrainJob
    checkpoint: str


def make(
    candidates: Sequence[Candidate],
    cfg: SearchConfig,
    pinned: Pinned,
    data: Mapping[str, Data],
    folder: Path,
    choosing: Choosing | None = None,
) -> Together | None:
    """Choose an ensemble, and write it into `folder`, of the search.

    candidates: the best one first. choosing: the time that this may take; None: as long as it
    takes. Who would take too long is not asked, no further half of validation judges an ensemble
    when the time is over, and the check is of a sample. Returns None if no ensemble is better than
    the best candidate.
    """
    forget(folder)
    job = candidates[0].job
    rule = job.train.stopping
    judge = quality.judge_by(pinned.task, rule.metric, rule.mode)
    found = said_of(candidates, pinned, data, choosing)
    if len(found.usable) < 2:
        return None
    costs = _costs(found.usable, cfg, pinned, folder)
    chosen = greedy.choose(
        found.scores_KNC,
        found.labels_N,
        judge,
        costs,
        None if costs is None else 1.0,
        job.run.seed,
        cfg.ensemble,
        _never if choosing is None else choosing.part(),
        [Member(one.job.model).shared for one in found.usable],
    )
    if chosen is None or len(chosen.members) < 2:
        return None
    weights = {found.usable[k].name: chosen.weights_K[k] for k in chosen.members}
    members = [one for one in found.usable if one.name in weights]
    ensemble = _within_limits(members, weights, cfg, pinned)
    if ensemble is None:
        return None
    first = next(one for one in members if one.name == ensemble.members[0].name)
    checked = None
    if choosing is not None:
        checked = choosing.checked([one.name for one in ensemble.members], len(found.labels_N))
    answers = predicted(ensemble, first.job, pinned, checked)
    scores_NC, labels_N = answers.scores_NC, answers.labels_N
    sample_S = drawn(len(fetch(data[data_key(first.job)].val.rows)), checked)
    if sample_S is not None:
        numbered = answers._replace(samples_N=sample_S[answers.samples_N])
        scores_NC, labels_N = _completed(numbered, found, ensemble), found.labels_N
    if not chosen.bar.is_passed(judge(scores_NC, labels_N)):
        return None
    objective = objective_of(first.job, data[data_key(first.job)])
    logits_NC = logits_of(pinned.task.kind, torch.from_numpy(scores_NC))
    metrics = objective.metrics(objective.totals(logits_NC, torch.tensor(labels_N)))
    return _write(ensemble, first, chosen.gain, metrics, checked, folder)


def _never(needs_s: float = 0.0) -> bool:
    return False


def forget(folder: Path) -> None:
    """Remove what `make` wrote: a killed search that goes on may have no time to choose again."""
    (folder / FILE).unlink(missing_ok=True)


def _within_limits(
    members: Sequence[Candidate], weights: Mapping[str, float], cfg: SearchConfig, pinned: Pinned
) -> EnsembleModel | None:
    """The ensemble of as many members as keep the limits, those of most weight; None of one."""
    left = list(members)
    while len(left) > 1:
        ensemble = ensembles.build([_part(one, weights[one.name], pinned) for one in left])
        if _within(ensemble, left[0].job, cfg, pinned):
            return ensemble
        # Of equal weights the last one goes: the better trials come first.
        left.remove(min(reversed(left), key=lambda one: weights[one.name]))
    return None


class Answers(NamedTuple):
    """What a model says of images, by their numbers in the split."""

    scores_NC: np.ndarray
    labels_N: np.ndarray
    samples_N: np.ndarray


@dataclass(frozen=True)
class Said:
    """What candidates say of the validation images, all in the same order."""

    usable: list[Candidate]
    scores_KNC: list[np.ndarray]
    labels_N: np.ndarray
    samples_N: np.ndarray
    """Their numbers in the split. Images that cannot be read are left out."""


def said_of(
    candidates: Sequence[Candidate],
    pinned: Pinned,
    data: Mapping[str, Data],
    choosing: Choosing | None = None,
) -> Said:
    """Those whose weights can be read and are finite, and what they say, in the order as given.

    The best one is asked first, because an ensemble has to be better, and then those that take no
    time: their features are there. From the third one on, nobody is who would take too long.
    """
    images = pinned.counts[candidates[0].job.feed.val]
    is_late = _never if choosing is None else choosing.part()
    takes_s = [0.0 if choosing is None else choosing.asking_s(c.name, images) for c in candidates]
    heard: dict[int, Answers] = {}
    late = 0
    for place in sorted(range(len(candidates)), key=lambda place: place > 0 and takes_s[place] > 0):
        one = candidates[place]
        if len(heard) > 1 and is_late(takes_s[place]):
            late += 1
            continue
        try:
            model = _assembled(one, pinned)
            answers = _on(model, one.job, data[data_key(one.job)].val)
            heard[place] = answers._replace(scores_NC=_put_aside(answers.scores_NC))
        # A checkpoint that was deleted or is damaged costs its trial its place, and nothing else.
        except (RaypipeError, OSError, ValueError, RuntimeError) as e:
            log.warning("%s cannot join an ensemble: %s", one.name, one_line(e))
    if late:
        asked = len(candidates) - late
        log.info("An ensemble is chosen among %d of %d trials", asked, len(candidates))
    said = Said([], [], np.zeros(0), np.zeros(0))
    backbones: dict[str, str] = {}
    for place in sorted(heard):
        one, (scores_NC, labels_N, samples_N) = candidates[place], heard[place]
        if said.usable and not np.array_equal(samples_N, said.samples_N):
            # Whether a broken image can be read depends on the side. Labels may be equal by chance.
            log.warning("%s cannot join an ensemble: it has seen other images", one.name)
            continue
        shared, name = Member(one.job.model).shared, one.job.model.name
        if shared and backbones.setdefault(shared, name) != name:
            # An ensemble keeps one backbone of an architecture for all of its heads.
            log.warning(
                "%s cannot join an ensemble: %s has the architecture of %s and weights of its own",
                one.name,
                name,
                backbones[shared],
            )
            continue
        said.usable.append(one)
        said.scores_KNC.append(scores_NC)
        said = with_(said, labels_N=labels_N, samples_N=samples_N)
    return said


def _put_aside(scores_NC: np.ndarray) -> np.ndarray:
    """The same scores, on the disk if they are more than MOST_HELD.

    A choice reads most of them once or twice. Their file has no name, and goes with the array.
    """
    if scores_NC.size <= MOST_HELD:
        return scores_NC
    try:
        with tempfile.TemporaryFile() as file:
            # Not written through the map: on a full disk that would end the process.
            file.write(np.ascontiguousarray(scores_NC).data)
            file.flush()
            held = np.memmap(file, dtype=scores_NC.dtype, mode="r", shape=scores_NC.shape)
    except OSError as e:
        log.info("The scores of a candidate stay in memory: %s", one_line(e))
        return scores_NC
    return np.asarray(held)


def _assembled(one: Candidate, pinned: Pinned) -> Predictor:
    result = TrainResult("", pinned.version, pinned.classes, {}, (), 0, one.checkpoint, 0.0)
    return trainer.assemble(one.job, result)


def _on(model: Predictor, job: TrainJob, source: Source) -> Answers:
    """What the model says of the source's images, in the order of their samples."""
    frozen = job.model.mode == "frozen"
    predictor = model if frozen else model.for_inference()
    feed = Feed(source, source, source.judged_at_once, job.run.seed)
    samples, scores = [], []
    try:
        for batch in feed.val():
            samples.append(batch.samples_B)
            if frozen:
                with torch.inference_mode():
                    logits_BC = model.head(batch.inputs)  # type: ignore[operator]
                    scores.append(model.scores(logits_BC).numpy())
            else:
                scores.append(predictor.predict(batch.inputs.numpy())[1])
    finally:
        feed.close()
    samples_N = np.concatenate(samples)
    order = np.argsort(samples_N, kind="stable")
    samples_N = samples_N[order]
    return Answers(np.concatenate(scores)[order], fetch(source.rows).labels(samples_N), samples_N)


def predicted(
    model: EnsembleModel, job: TrainJob, pinned: Pinned, most: int | None = None
) -> Answers:
    """What the ensemble says of the validation images, as its package says it.

    most: of a sample of so many, numbered in the sample; None: of all.
    """
    seen = trainer.seen_by(model, job)
    source = trainer.sources(seen, pinned, [seen.feed.val], here=True, most=most)[seen.feed.val]
    return _on(model, seen, source)


def _completed(answers: Answers, found: Said, ensemble: EnsembleModel) -> np.ndarray:
    """What the ensemble says itself of some images, and its members' mean of the others."""
    mean_NC = np.zeros_like(found.scores_KNC[0], dtype=np.float64)
    names = [one.name for one in found.usable]
    for member, share in zip(ensemble.members, ensemble.shares, strict=True):
        mean_NC += share * found.scores_KNC[names.index(member.name)]
    # Who has read an image that others could not has no mean to complete.
    known = np.isin(answers.samples_N, found.samples_N)
    places = np.searchsorted(found.samples_N, answers.samples_N[known])
    mean_NC[places] = answers.scores_NC[known]
    return mean_NC.astype(answers.scores_NC.dtype)


def _costs(
    usable: Sequence[Candidate], cfg: SearchConfig, pinned: Pinned, folder: Path
) -> list[float] | None:
    """The share of the limits that each takes; None without limits."""
    if not cfg.limits.of_models:
        return None
    models = [one.job.model for one in usable]
    found = variants.measured(models, len(pinned.classes), pinned, usable[0].job, folder)
    return [share_of_limits(found[model.shape], cfg.limits) for model in models]


def _within(model: EnsembleModel, job: TrainJob, cfg: SearchConfig, pinned: Pinned) -> bool:
    """Does the whole of it keep the limits?"""
    if not cfg.limits.of_models:
        return True
    images = latency.images(pinned, job.feed.train, model.side_px, job.feed.cpu_threads)
    time = variants.timed([model.for_inference()], images)[0]
    whole = with_(time, text="The ensemble", size_mb=variants.size_mb(model))
    why = whole.breaks(cfg.limits)
    if why:
        log.info("%s: it gets a member less", why)
    return not why


def _part(one: Candidate, weight: float, pinned: Pinned) -> Part:
    weights: Mapping[str, Tensor] = checkpoint.read(Path(one.checkpoint), verified=True).weights
    return Part(Member(one.job.model, weight, name=one.name), dict(weights), pinned.classes)


def _write(
    ensemble: EnsembleModel,
    first: Candidate,
    gain: float,
    metrics: dict[str, float],
    checked: int | None,
    folder: Path,
) -> Together:
    # A checkpoint like any other; its state is the first member's.
    state = checkpoint.read_model(Path(first.checkpoint)).state
    path = ensembles.write(folder / WEIGHTS, ensemble, state)
    names = tuple(member.name for member in ensemble.members)
    found = Together(names, ensemble.shares, metrics, gain, str(path), checked)
    write_atomic(folder / FILE, to_json(asdict(found)))
    return found


def read(folder: Path) -> Together | None:
    """The ensemble that `make` wrote into `folder`; None if it wrote none."""
    file = folder / FILE
    if not file.exists():
        return None
    fields = json.loads(file.read_text())
    metrics = metrics_of(fields["metrics"])
    # The folder may have been moved since.
    return Together(
        tuple(fields["members"]),
        tuple(fields["shares"]),
        metrics,
        fields["gain"],
        str(folder / WEIGHTS),
        fields.get("checked"),
    )


def candidates(
    job: TrainJob, trials: Sequence[Trial], cfg: SearchConfig, average: str | None
) -> list[Candidate]:
    """The soup, if there is one, twice as many of the best trials as an ensemble has members, the
    best one of each backbone, mode and resolution, and the heads of the first answer.

    Heads are few and soon asked: their features are there. Hundreds of trials push them from the
    best ones by luck, so they come before those that are only the best of their kind. A copy of a
    better trial says what that one says, and takes nobody's place. `search.keep` may have kept
    more: it does not change a result. average: the soup's checkpoint. Its job is the best trial's.
    """
    best: list[Candidate] = []
    heads: list[Candidate] = []
    others: list[Candidate] = []
    if average is not None:
        best.append(Candidate("soup", replace(job, trials[0].changes), average))
    kinds: set[str] = set()
    tried: set[str] = set()
    for trial in trials:
        of_trial = replace(job, trial.changes)
        leads = data_key(of_trial) not in kinds
        kinds.add(data_key(of_trial))
        if trial.checkpoint is None or trial.values in tried:
            continue
        one = Candidate(trial.name, of_trial, trial.checkpoint)
        place = len(tried)
        tried.add(trial.values)
        if place < 2 * cfg.ensemble:
            best.append(one)
        elif not trial.drawn:
            heads.append(one)
        elif leads:
            others.append(one)
    return best + heads + others
