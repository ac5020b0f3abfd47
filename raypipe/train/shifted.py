"""What a published model's estimate of its own accuracy is calibrated on: shifted copies.

A sample of the unseen images is changed on purpose (images/shifts.py), each in all nine ways and
each way at one of three strengths, by turn: 9 predictions an image. All images at all strengths are
nine to eighteen times as many, and the interval is about a point narrower
(benchmarks/results/2026-11-25-severity.md). Both the number of images and the seconds are bounded:
registry.severity_images and severity_s.

The training loop knows nothing of it. Where it makes no sense, the reason is kept in the package,
and drift checks name it.

Letters in names: N reference images, M known ones, B images of a batch, H x W pixels.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from dataclasses import replace as with_

import numpy as np
import torch

from raypipe.config import replace
from raypipe.errors import DataError
from raypipe.feed.dataset import Pinned
from raypipe.feed.locate import locate
from raypipe.feed.rows import Rows
from raypipe.images import decode, shifts
from raypipe.models import calibrate as temperature
from raypipe.models.predictor import Predictor
from raypipe.models.severity import (
    LEAST_OF_DOMAIN,
    LEAST_VALIDATION,
    Calibration,
    calibrate,
    require_enough,
)
from raypipe.registry.tracking import LEAST_COPIED
from raypipe.timer import OutOfTime, interrupted
from raypipe.train import looked_at
from raypipe.train.job import TrainJob
from raypipe.train.trainer import seen_by
from raypipe.train.unseen import Unseen

STRENGTHS = (0.3, 0.6, 1.0)
KNOWN = 500
"""Images as they are, of which the package keeps 32 numbers each."""
AT_ONCE = 16
COPYING = 0.75  # of the time until an end: the estimate is fitted to the copies in the rest
ONE, OTHERS = "all", "(other domains)"
NO_TIME = "no time was left for shifted copies"


@dataclass(frozen=True)
class Measured:
    """A calibration, or why there is none.

    copied: images that were shifted. seconds: that all of it took.
    """

    calibration: Calibration | None
    why_not: str
    copied: int = 0
    seconds: float = 0.0


def in_time(
    job: TrainJob, model: Predictor, pinned: Pinned, unseen: Unseen, until: float | None
) -> Measured:
    """`measured`, or none if it is not done by `until`, of time.monotonic; None: however long."""
    if until is None:
        return measured(job, model, pinned, unseen)
    left_s = until - time.monotonic()
    if left_s <= 0:
        # Where an estimate makes no sense, more time would give none.
        return Measured(None, _why_not(job, pinned, unseen) or NO_TIME)
    # What came before may have taken longer than was planned. Copies that end by themselves are
    # enough for an estimate, where those that are interrupted are lost.
    is_late = COPYING * left_s < job.registry.severity_s
    if is_late:
        job = replace(job, {"registry.severity_s": COPYING * left_s})
    try:
        with interrupted(left_s, lambda: OutOfTime(NO_TIME)):
            found = measured(job, model, pinned, unseen)
    except OutOfTime as e:
        return Measured(None, e.what)
    if is_late and 0 < found.copied < LEAST_COPIED <= job.registry.severity_images:
        return with_(found, why_not=NO_TIME)  # not the user's number of seconds
    return found


def measured(
    job: TrainJob,
    model: Predictor,
    pinned: Pinned,
    unseen: Unseen,
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Calibrate the estimate of accuracy on the unseen images and on shifted copies of some.

    clock: seconds, for registry.severity_s. Raises DataError for a file that cannot be read.
    """
    why_not = _why_not(job, pinned, unseen)
    if why_not:
        return Measured(None, why_not)
    job = seen_by(model, job)
    start = clock()
    reference, samples_N = unseen.reference, unseen.samples_N
    assert samples_N is not None
    images_N = _images(samples_N, reference.groups)
    domains_N = _domains(reference.domains, images_N)
    known = np.flatnonzero(domains_N != "")
    if len(known) > KNOWN:
        known = np.sort(np.random.default_rng(0).choice(known, KNOWN, replace=False))
    # Of few drawn ones a domain may be small, too.
    domains_N[known] = pooled(domains_N[known], images_N[known])
    known = known[domains_N[known] != ""]
    try:
        require_enough(domains_N[known], images_N[known])
    except DataError:
        most = job.registry.judged_images
        if most is not None and most < LEAST_VALIDATION:
            # The table has more. Within a budget a clock has set it.
            allows = f"registry.judged_images={most} allows {len(known)} validation images"
            return Measured(None, f"{allows}, and {LEAST_VALIDATION} are needed")
        return Measured(None, _too_few(len(known)))

    # Copies come from row groups that are few, so from few files.
    rows = locate(pinned, unseen.split, job.feed).sampled(job.registry.judged_images)
    some = looked_at.drawn(rows, samples_N[known], job.registry.severity_images)
    copies = list(_copies(job, model, rows, samples_N, known[np.sort(some)], clock))
    copied = len({int(place) for places_B, *_ in copies for place in places_B})
    if copied < LEAST_COPIED:
        limits = f"registry.severity_images={job.registry.severity_images} and "
        limits += f"registry.severity_s={job.registry.severity_s:g} allow"
        why_not = f"{limits} {copied} shifted images, and {LEAST_COPIED} are needed"
        return Measured(None, why_not, copied, clock() - start)

    places_R = np.concatenate([known, *(places_B for places_B, *_ in copies)])
    kinds_R = np.concatenate([np.full(len(known), ""), *(kinds_B for _, kinds_B, *_ in copies)])
    features_RD = np.concatenate([reference.features_ND[known], *(f for *_, f, _ in copies)])
    scores_RC = np.concatenate([reference.scores_NC[known], *_tempered(unseen, copies)])
    try:
        found = calibrate(
            scores_RC,
            unseen.labels_N[places_R],
            features_RD,
            domains_N[places_R],
            job.run.seed,
            kinds_R,
            images_N[places_R],
        )
        # As a package reads it: a number that is not finite would be found too late there.
        found = Calibration.from_json(found.to_json(), "this model")
    except DataError as e:
        return Measured(None, e.what.lower(), copied, clock() - start)
    return Measured(found, "", copied, clock() - start)


def _why_not(job: TrainJob, pinned: Pinned, unseen: Unseen) -> str:
    if not job.registry.severity_images:
        return "registry.severity_images is 0"
    if pinned.task.kind != "single_label":
        return f"the task is {pinned.task.kind}: accuracy is estimated of single labels only"
    if unseen.samples_N is None or not len(unseen.samples_N):
        return "there are no validation images"
    # On images that it was trained on, a model is right more often than on any others.
    if pinned.common(unseen.split, job.feed.train):
        return f"the model was trained on images of {unseen.split}, and no others are labelled"
    if unseen.is_inherited:
        return f"the weights that it started from may have learned from images of {unseen.split}"
    images = pinned.counts[unseen.split]
    return _too_few(images) if images < LEAST_VALIDATION else ""


def _too_few(images: int) -> str:
    return f"too few labelled validation images to calibrate on ({images} images)"


def _domains(domains: tuple[str, ...] | None, images_N: np.ndarray) -> np.ndarray:
    """The known domain of each image, (N,), where the table names them; else they are one."""
    if not domains:
        return np.full(len(images_N), ONE, dtype=object)
    named_N = np.array([name or "(no name)" for name in domains], dtype=object)
    return pooled(named_N, images_N)


def pooled(domains_N: np.ndarray, images_N: np.ndarray) -> np.ndarray:
    """Domains of fewer images than calibration needs become one; blank if they are few even so.

    images_N: the same number for images of one group, which count once.
    """
    pooled_N = domains_N.copy()
    for small in (OTHERS, ""):
        # Pairs, not numpy's texts: those lose a zero character at the end of a name.
        pairs = set(zip(pooled_N.tolist(), images_N.tolist(), strict=True))
        counts = Counter(name for name, _ in pairs)
        few = {name for name, count in counts.items() if count < LEAST_OF_DOMAIN}
        pooled_N[[name in few for name in pooled_N.tolist()]] = small
    return pooled_N


def _images(samples_N: np.ndarray, groups: tuple[str, ...] | None) -> np.ndarray:
    """The same number for images that are not independent: those of one group."""
    if groups is None:
        return samples_N
    number: dict[object, int] = {}
    # An image without a group stands alone.
    keys = [group or sample for group, sample in zip(groups, samples_N.tolist(), strict=True)]
    return np.array([number.setdefault(key, len(number)) for key in keys])


Copies = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _copies(
    job: TrainJob,
    model: Predictor,
    rows: Rows,
    samples_N: np.ndarray,
    places: np.ndarray,
    clock: Callable[[], float],
) -> Iterator[Copies]:
    """(places of the originals, kinds, features, scores) of shifted copies, batch by batch.

    It ends when the time is up, or at once if that would be before `LEAST_COPIED` images.
    """
    model = model.for_inference()
    start, done = clock(), 0
    for some, images in looked_at.stored(rows, samples_N, places):
        for first in range(0, len(some), AT_ONCE):
            part = slice(first, first + AT_ONCE)
            decoded = decode.decode_good(images[part], job.model.pixels, job.feed.cpu_threads)
            good_B = some[part][list(decoded.good)]
            if not len(good_B):
                continue
            yield _predicted(model, decoded.pixels_NHWC, good_B, done)
            done += len(good_B)
            spent, wanted = clock() - start, min(LEAST_COPIED, len(places))
            if spent * max(1.0, wanted / done) > job.registry.severity_s:
                return


def _predicted(
    model: Predictor, pixels_BHWC: np.ndarray, places_B: np.ndarray, seed: int
) -> Copies:
    """Each image in all ways; which strength a way has changes from image to image."""
    copies, originals, kinds = [], [], []
    for number, kind in enumerate(shifts.KINDS):
        turn_B = (seed + np.arange(len(places_B)) + number) % len(STRENGTHS)
        for turn, strength in enumerate(STRENGTHS):
            mine = np.flatnonzero(turn_B == turn)
            if len(mine):
                # Another seed each time: else chance does the same to the first image of each.
                changed = shifts.shifted(pixels_BHWC[mine], kind, strength, seed * 3 + turn)
                copies.append(changed)
                originals.append(places_B[mine])
                kinds.append(np.full(len(mine), kind))
    features_RD, scores_RC = model.predict(np.concatenate(copies))
    return np.concatenate(originals), np.concatenate(kinds), features_RD, scores_RC


def _tempered(unseen: Unseen, copies: list[Copies]) -> list[np.ndarray]:
    """The scores of the copies as the package will give them."""
    found = unseen.calibrated
    scores = [scores_RC for *_, scores_RC in copies]
    if found is None:
        return scores
    return [
        temperature.tempered("single_label", torch.from_numpy(one), found.temperature).numpy()
        for one in scores
    ]
