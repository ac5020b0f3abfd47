"""Has the world moved? Evidence from several detectors, judged together at one false-alarm rate.

`detectors/` says what is tested, `engine.py` where. With m pieces of evidence the smallest p-value
is judged at alpha/m, the next at alpha/(m-1), and so on until one is not small enough (Holm 1979).
So `alpha` is the false-alarm rate of the whole check: at most one false alarm in 100 nightly checks
at 0.01. Pieces about the same images are correlated, which makes this careful, not wrong.

The rate holds for images drawn independently. Images that come in groups (the cells of one module,
the frames of one film) differ from group to group: two neighbouring blocks of 130 ELPV mono cells
alarm always (7 of 7), random halves never (0 of 100). With `watch.group`, mixture and mmd move
whole groups, and the rate holds for groups drawn independently; batches must hold many of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from raypipe.config import Section
from raypipe.errors import DataError
from raypipe.images.measure import SEEN
from raypipe.watch import by_domain, engine, groups, projection
from raypipe.watch.by_domain import MIXTURE
from raypipe.watch.detectors import DETECTORS
from raypipe.watch.detectors.detector import Pair, Setting
from raypipe.watch.domains import Part, Rows
from raypipe.watch.engine import Engine
from raypipe.watch.feedback import NOTHING as NOTHING_CAME
from raypipe.watch.feedback import Feedback
from raypipe.watch.settings import LEAST_ROWS
from raypipe.watch.severity import NOT_ASKED, Severity
from raypipe.watch.superiority import holm

LEAST_P = (
    1e-300  # Kolmogorov-Smirnov's p underflows to 0 on large batches, and no evidence is certain
)

Name = Literal[
    "mixture",
    "mmd",
    "online",
    "ks",
    "cvm",
    "chi2",
    "looks",
    "lsdd",
    "classifier",
    "spot_the_diff",
    "learned_kernel",
]

# Where there is one domain, and no group.
DEFAULT: tuple[Name, ...] = ("mmd", "ks")


@dataclass(frozen=True)
class Seen:
    """What else is known of the images of one side, row by row; None: nothing.

    labels_N: predicted classes. looks_NK: the columns of `measure.SEEN`; NaN where an image was not
    looked at. domains: of reference images, as by_domain.names gives them. groups: images of one
    name belong together. arrived_N: of a batch, when each image came, in any unit; NaN: unknown.
    """

    labels_N: Sequence[str] | None = None
    looks_NK: np.ndarray | None = None
    domains: Sequence[str] | None = None
    groups: Sequence[str] | None = None
    arrived_N: Sequence[float] | None = None


NOTHING = Seen()


@dataclass(frozen=True)
class _Side:
    embedding_ND: np.ndarray
    scores_NC: np.ndarray
    seen: Seen


@dataclass(frozen=True)
class Evidence:
    """One test: `detector` looked at `on`; drift when `p_value` is at most `threshold`.

    threshold: Holm's, alpha / (m - r) for the piece with the r smaller p-values; those behind the
    first one without drift share its threshold. engine: exact or alibi. detail: what moved most.
    """

    detector: str
    on: str
    statistic: float
    p_value: float
    threshold: float
    is_drift: bool
    engine: str = ""
    detail: str = ""


@dataclass(frozen=True)
class DriftReport:
    """All evidence of one check. `p_value` = min(1, m * smallest p). `unusual`: (batch row,
    distance), most unusual first.

    A distance of 1 is the usual one between reference images; 2 is twice as far from all the
    reference. engine: exact, alibi, or both. notes: why this engine, and which detectors were left
    out, for people. parts: which known domain each part of the batch resembles; empty without the
    detector mixture. feedback: of labels that came.
    """

    evidence: tuple[Evidence, ...]
    p_value: float
    is_drift: bool
    alpha: float
    reference_images: int
    batch_images: int
    unusual: tuple[tuple[int, float], ...]
    engine: str = ""
    notes: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    severity: Severity = NOT_ASKED
    feedback: Feedback = NOTHING_CAME


def tests(detectors: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """(detector, what it looks at): the pieces of evidence that they give at most."""
    return tuple((name, on) for name in detectors for on in DETECTORS[name].looks_at)


class DriftConfig(Section):
    """Which tests run, where, and how often a check may raise a false alarm."""

    alpha: float = Field(default=0.01, gt=0, lt=0.5)
    """Probability of a false alarm for one check, over all its tests together."""
    detectors: Annotated[tuple[Name, ...], Field(min_length=1)] | None = None
    """null: mixture if the champion knows several domains (`watch.domain`), or if groups are known
    (`watch.group`); else mmd and ks.

    mixture compares with the nearest mixture of the domains: a batch of one of them is no drift,
    which all others would call one. mmd, lsdd, classifier, spot_the_diff and learned_kernel compare
    embeddings as a whole. ks and cvm compare single features, and the scores. chi2 compares how
    often each class is predicted. looks compares brightness, contrast, sharpness and size. online
    slides a window over the batch as its images came (`watch.arrived`): it finds a change that most
    of a night hides.
    """
    engine: Engine = "auto"
    """Where the tests are computed. exact: in raypipe. alibi: by Alibi Detect in its sidecar. auto:
    exact where raypipe has the test, with equal results; alibi for lsdd, classifier, spot_the_diff
    and learned_kernel. The report says which, and why."""
    permutations: int = Field(default=500, ge=20)
    """Random regroupings behind a p-value of mmd, lsdd or learned_kernel, and of chi2 where classes
    have few images; the time grows with them.

    At least the number of tests / alpha: the smallest p-value is 1 / (permutations + 1). More: a
    steadier p-value.
    """
    max_rows: int = Field(default=500, ge=LEAST_ROWS)
    """Images of each side whose embeddings are compared; more are sampled. The time grows with its
    square."""
    window: int = Field(default=50, ge=10)
    """Images of the window that the detector online slides over a batch, at most half of it.
    Smaller: it finds a strong change sooner. Larger: it finds a weaker one."""
    unusual: int = Field(default=12, ge=0)
    """Pictures in the report of images that are least like the reference."""

    @property
    def tests(self) -> tuple[tuple[str, str], ...]:
        """(detector, what it looks at): the pieces of evidence that a check yields at most."""
        return tests(self.detectors or DEFAULT)

    @property
    def needs_sidecar(self) -> bool:
        """Is anything asked for that Alibi Detect computes?"""
        names = self.detectors or ()
        return self.engine == "alibi" or not all(DETECTORS[name].is_here for name in names)

    @property
    def pieces(self) -> int:
        """How much evidence a check yields: KS looks at the embedding and at the scores."""
        return len(self.tests)

    @model_validator(mode="after")
    def _can_raise_an_alarm(self) -> DriftConfig:
        chosen = self.detectors or DEFAULT
        if len(set(chosen)) < len(chosen):
            raise ValueError("each detector once: a repeated one only makes each test stricter")
        smallest = 1 / (self.permutations + 1)
        permuting = any(DETECTORS[name].permutes for name in chosen)
        if permuting and smallest >= self.alpha / self.pieces:
            need = int(self.pieces / self.alpha)
            raise ValueError(
                f"permutations must be at least {need} at alpha {self.alpha}: no smaller p than "
                f"{smallest:.4f} can come out"
            )
        return self

    @model_validator(mode="after")
    def _engine_has_them(self) -> DriftConfig:
        missing = [name for name in self.detectors or () if not DETECTORS[name].is_here]
        if self.engine == "exact" and missing:
            raise ValueError(
                f"engine exact has no {', '.join(missing)}: only Alibi Detect has; "
                "engine auto takes it for these alone"
            )
        return self


def detect(
    ref_embedding: np.ndarray,
    batch_embedding: np.ndarray,
    ref_scores: np.ndarray,
    batch_scores: np.ndarray,
    cfg: DriftConfig,
    seed: int,
    ref_seen: Seen = NOTHING,
    batch_seen: Seen = NOTHING,
) -> DriftReport:
    """Compare a batch with the champion's reference: embeddings (images, d) and scores (images,
    classes), finite numbers.

    A detector that looks at what one side does not have is left out, and the report says so. Tests
    of Alibi Detect need a connection to Ray. Equal input and seed give an equal report. DataError
    for what cannot be compared.
    """
    reference = _Side(ref_embedding, ref_scores, ref_seen)
    batch = _Side(batch_embedding, batch_scores, batch_seen)
    _check(reference, batch)
    pairs, missing = _pairs(reference, batch, cfg, seed)
    known, window = _rows(reference), _rows(batch)
    chosen = cfg.detectors or ((MIXTURE,) if by_domain.is_default(known, window) else DEFAULT)
    others = tests([name for name in chosen if name != MIXTURE])
    embedding = pairs["embedding"]
    too_few = _too_few_groups(embedding.units, cfg.alpha / len(tests(chosen)))
    why_not = {
        (name, on): too_few if too_few and DETECTORS[name].moves_groups else missing.get(on, "")
        for name, on in others
    }
    asked = [test for test, why in why_not.items() if not why]
    left_out = [f"{name} left out: {why}" for (name, _), why in why_not.items() if why]
    if not asked and MIXTURE not in chosen:
        raise DataError(
            "No detector has what it looks at",
            got="; ".join(left_out),
            fix="Wait for a batch of more groups, or check several batches together"
            if too_few
            else "Add mmd or ks to drift.detectors",
        )
    names = list(dict.fromkeys(name for name, _ in asked))
    choice = engine.choose(cfg.engine, names, grouped=embedding.units is not None)
    single = [name for name in names if not DETECTORS[name].moves_groups]
    if embedding.units is not None and single:
        left_out.append(
            f"{', '.join(single)}: images count as independent draws, and these come in groups; "
            "more false alarms than alpha says"
        )
    pooled_LK = np.concatenate([embedding.reference, embedding.batch])
    width = projection.median_width(pooled_LK, seed)
    setting = Setting(cfg.permutations, seed, width, cfg.window)
    found = engine.run(asked, choice, pairs, setting, cfg.alpha)
    notes: tuple[str, ...] = (choice.why,) if asked else ()
    parts: tuple[Part, ...] = ()
    if MIXTURE in chosen:
        mixed = by_domain.test(known, window, cfg.permutations, cfg.max_rows, seed)
        choice = choice.also(MIXTURE, engine.EXACT)
        asked += [(MIXTURE, on) for on, _ in mixed.found]
        found += [one for _, one in mixed.found]
        notes, parts = (*notes, *mixed.notes), mixed.parts

    p_values = [max(one.p_value, LEAST_P) for one in found]
    rejected = holm(p_values, cfg.alpha)
    levels = thresholds(p_values, len(rejected), cfg.alpha)
    evidence = tuple(
        Evidence(
            detector=name,
            on=on,
            statistic=one.statistic,
            p_value=p_value,
            threshold=threshold,
            is_drift=place in rejected,
            engine=choice.engine_by_detector[name],
            detail=one.detail,
        )
        for place, ((name, on), one, p_value, threshold) in enumerate(
            zip(asked, found, p_values, levels, strict=True)
        )
    )
    distance_M = projection.unusual(
        reference.embedding_ND.astype(np.float32), batch.embedding_ND.astype(np.float32)
    )
    most = np.argsort(-distance_M, kind="stable")[: cfg.unusual]
    return DriftReport(
        evidence=evidence,
        p_value=min(1.0, len(evidence) * min(p_values)),
        is_drift=bool(rejected),
        alpha=cfg.alpha,
        reference_images=len(reference.embedding_ND),
        batch_images=len(batch.embedding_ND),
        unusual=tuple((int(row), float(distance_M[row])) for row in most),
        engine=choice.name,
        notes=(*notes, *left_out),
        parts=parts,
    )


def _rows(side: _Side) -> Rows:
    return Rows(side.embedding_ND, side.scores_NC, side.seen.domains, side.seen.groups)


def thresholds(p_values: Sequence[float], rejected: int, alpha: float) -> list[float]:
    """Holm's level of each p-value. Behind the first that is not rejected, no level counts: these
    have its level, which their larger p-values miss too."""
    by_size = np.argsort(p_values, kind="stable")
    rank = np.empty(len(p_values), int)
    rank[by_size] = np.arange(len(p_values))
    return [alpha / (len(p_values) - r) for r in np.minimum(rank, rejected).tolist()]


def _pairs(
    reference: _Side, batch: _Side, cfg: DriftConfig, seed: int
) -> tuple[dict[str, Pair], dict[str, str]]:
    """Both sides of each kind as the tests see them; and why others are missing."""
    rng = np.random.default_rng(seed)
    # float32 first, as a package and a table of predictions keep them.
    rows = [side.embedding_ND.astype(np.float32) for side in (reference, batch)]
    units = None
    if reference.seen.groups is None or batch.seen.groups is None:
        sides = [projection.subsample(one, cfg.max_rows, rng) for one in rows]
    else:
        of = [groups.codes(reference.seen.groups), groups.codes(batch.seen.groups)]
        size = min(groups.median_size(one) for one in of)
        kept = [groups.at_most(one, size, rng) for one in of]
        kept = [
            one[groups.whole(of_side[one], cfg.max_rows, rng)]
            for one, of_side in zip(kept, of, strict=True)
        ]
        units = groups.Units.of(*(o[one] for o, one in zip(of, kept, strict=True)))
        sides = [side[one].astype(np.float64) for side, one in zip(rows, kept, strict=True)]
    ours, theirs = (
        projection.columns(side.scores_NC.astype(np.float32)) for side in (reference, batch)
    )
    embedding = Pair(*projection.project(*sides), units=units)
    pairs = {"embedding": embedding, "scores": Pair(ours, theirs)}
    missing = {}
    for on, found in (
        ("classes", _classes(reference, batch)),
        ("looks", _looks(reference, batch)),
        ("arrival", _arrival(reference, batch, cfg, seed)),
    ):
        if isinstance(found, str):
            missing[on] = found
        else:
            pairs[on] = found
    return pairs, missing


def _too_few_groups(units: groups.Units | None, needed: float) -> str:
    """Why no regrouping of these can show a p-value of `needed`; "" if it can."""
    if units is None or (min(units.counts) > 1 and 1 / units.ways <= needed):
        return ""
    ours, theirs = units.counts
    return (
        f"{ours} groups of the reference and {theirs} of the batch can change places in "
        f"{units.ways:.0f} ways, so no p-value below {1 / units.ways:.2g} can come out, and an "
        f"alarm takes {needed:.2g}"
    )


def _classes(reference: _Side, batch: _Side) -> Pair | str:
    """The number of each image's predicted class; or why not."""
    ours, theirs = reference.seen.labels_N, batch.seen.labels_N
    if ours is None or theirs is None:
        return "the model predicts no classes"
    # Not an array of text: one long name would make all of them as long.
    names = tuple(sorted({*ours, *theirs}))
    number = {name: place for place, name in enumerate(names)}
    ours_N1 = np.array([[number[name]] for name in ours], np.int64)
    theirs_M1 = np.array([[number[name]] for name in theirs], np.int64)
    return Pair(ours_N1, theirs_M1, names)


def _looks(reference: _Side, batch: _Side) -> Pair | str:
    """What images look like: the columns that vary, of images that were looked at; or why not."""
    both = []
    for name, side in (("champion's package", reference), ("batch", batch)):
        if side.seen.looks_NK is None:
            return f"the {name} does not say what its images look like; an older raypipe wrote it"
        seen_NK = np.asarray(side.seen.looks_NK, np.float64)
        seen_NK = seen_NK[np.isfinite(seen_NK).all(axis=1)]
        if len(seen_NK) < LEAST_ROWS:
            return f"only {len(seen_NK)} images of the {name} were looked at"
        both.append(seen_NK)
    pooled_LK = np.concatenate(both)
    varies = np.flatnonzero(np.ptp(pooled_LK, axis=0) > 0)
    if not len(varies):
        return "all images look the same"
    names = tuple(SEEN[k] for k in varies)
    return Pair(both[0][:, varies], both[1][:, varies], names)


def _arrival(reference: _Side, batch: _Side, cfg: DriftConfig, seed: int) -> Pair | str:
    """The batch in the order in which its images came; or why not."""
    if "online" not in (cfg.detectors or ()):
        return "nobody asks for it"
    if batch.seen.arrived_N is None:
        return "nothing says in which order the images came: name their column in watch.arrived"
    if reference.seen.groups is not None and batch.seen.groups is not None:
        return "images come in groups (watch.group), and neighbours of one group are alike"
    arrived_M = np.asarray(batch.seen.arrived_N, np.float64)
    order_M = np.argsort(arrived_M, kind="stable")
    order_M = order_M[np.isfinite(arrived_M[order_M])]
    if len(order_M) < LEAST_ROWS:
        return f"only {len(order_M)} images of the batch say when they came"
    rng = np.random.default_rng(seed)
    most = min(cfg.max_rows, projection.MOST_ONLINE)
    sides = [
        projection.subsample(rows_ND.astype(np.float32), most, rng)
        for rows_ND in (reference.embedding_ND, batch.embedding_ND[order_M])
    ]
    return Pair(*projection.project(*sides))


def _check(reference: _Side, batch: _Side) -> None:
    """Raise DataError for sides that cannot be compared."""
    for side, one in (("ref", reference), ("batch", batch)):
        _check_array(f"{side}_embedding", one.embedding_ND)
        _check_array(f"{side}_scores", one.scores_NC)
    for what, ours, theirs in (
        ("embedding", reference.embedding_ND, batch.embedding_ND),
        ("scores", reference.scores_NC, batch.scores_NC),
    ):
        if ours.shape[1] != theirs.shape[1]:
            fix = (
                "Compute both with the same model version: the reference is kept in the "
                "champion's package"
            )
            raise DataError(
                f"The batch's {what} is {theirs.shape[1]} wide and the reference's {ours.shape[1]}",
                fix=fix,
            )
    for side, one in (("ref", reference), ("batch", batch)):
        others = (
            ("scores", one.scores_NC),
            ("labels", one.seen.labels_N),
            ("looks", one.seen.looks_NK),
            ("domains", one.seen.domains),
            ("groups", one.seen.groups),
            ("arrived", one.seen.arrived_N),
        )
        for what, rows in others:
            if rows is not None and len(rows) != len(one.embedding_ND):
                raise DataError(
                    f"{side}_embedding has {len(one.embedding_ND)} rows and {side}_{what} "
                    f"{len(rows)}",
                    rule="Row i of both is image i",
                )
        if one.seen.looks_NK is not None and one.seen.looks_NK.shape[1:] != (len(SEEN),):
            raise DataError(
                f"{side}_looks has the shape {one.seen.looks_NK.shape}",
                rule=f"Its columns are {', '.join(SEEN)}",
            )


def _check_array(name: str, array: np.ndarray) -> None:
    side = "reference" if name.startswith("ref") else "batch"
    if array.ndim != 2 or array.shape[1] == 0:
        raise DataError(
            f"{name} is not a table of numbers",
            got=array.shape,
            rule="It has the shape (images, width)",
        )
    if len(array) < LEAST_ROWS:
        fix = f"Wait until the {side} has {LEAST_ROWS} images, or check several batches together"
        raise DataError(
            f"The {side} has too few images for a drift test",
            got=len(array),
            rule=f"At least {LEAST_ROWS}",
            fix=fix,
        )
    if not np.isfinite(array).all():
        bad = int((~np.isfinite(array).all(axis=1)).sum())
        fix = (
            "Look at these images: raypipe clean marks broken ones; or the model overflows in "
            "half precision"
        )
        raise DataError(
            f"{name} holds numbers that are not finite in {bad} of {len(array)} rows", fix=fix
        )
