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
from raypipe.watch import by_domain, engine, groups, projection, sides
from raypipe.watch.by_domain import MIXTURE
from raypipe.watch.detectors import DETECTORS
from raypipe.watch.detectors.detector import Found, Setting
from raypipe.watch.domains import Part
from raypipe.watch.engine import Choice, Engine
from raypipe.watch.feedback import NOTHING as NOTHING_CAME
from raypipe.watch.feedback import Feedback
from raypipe.watch.settings import LEAST_ROWS
from raypipe.watch.severity import NOT_ASKED, Severity
from raypipe.watch.sides import NOTHING, Seen, Side
from raypipe.watch.superiority import holm

# Kolmogorov-Smirnov's p underflows to 0 on large batches, and no evidence is certain.
LEAST_P = 1e-300

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

    mixture compares with the nearest mixture of the domains. So a batch of one domain is no drift;
    all others would call it one. mmd, lsdd, classifier, spot_the_diff and learned_kernel compare
    embeddings as a whole. ks and cvm compare single features, and the scores. chi2 compares how
    often each class is predicted. looks compares brightness, contrast, sharpness and size. online
    slides a window over the images in the order in which they came (`watch.arrived`): it finds a
    change in a part of the batch.
    """
    engine: Engine = "auto"
    """Where the tests are computed. exact: in raypipe. alibi: by Alibi Detect in its sidecar. auto:
    in raypipe if it has the test, with equal results; else (lsdd, classifier, spot_the_diff,
    learned_kernel) by Alibi Detect. The report says which, and why."""
    permutations: int = Field(default=500, ge=20)
    """Random permutations for a p-value of mixture, mmd, online, lsdd or learned_kernel, and of
    chi2 if classes have few images. The time grows with their number.

    Needed: at least the number of tests / alpha, because the smallest p-value is 1 / (permutations
    + 1). More: a steadier p-value.
    """
    max_rows: int = Field(default=500, ge=LEAST_ROWS)
    """Most images of batch and of reference whose embeddings are compared; larger sets are sampled.
    The time grows with the square of this number."""
    window: int = Field(default=50, ge=10)
    """Images of the window that the detector online slides over a batch, at most half of the batch.
    Smaller: it finds a strong change sooner. Larger: it finds a weaker one. Of a batch of more than
    max_rows images a sample is compared, in its order: then the window spans more of the batch."""
    unusual: int = Field(default=12, ge=0)
    """Number of images in the report that are least like the reference."""

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
    """Compare a batch with the champion's reference.

    Embeddings have the shape (images, d), scores (images, classes); all numbers are finite. A
    detector that looks at what one side does not have is left out, and the report says so. Tests
    of Alibi Detect need a connection to Ray. Equal input and seed give an equal report. DataError
    for what cannot be compared.
    """
    reference = Side(ref_embedding, ref_scores, ref_seen)
    batch = Side(batch_embedding, batch_scores, batch_seen)
    sides.check(reference, batch)
    with_arrival = "online" in (cfg.detectors or ())
    pairs, missing = sides.pairs(reference, batch, cfg.max_rows, seed, with_arrival)
    known, window = sides.rows_of(reference), sides.rows_of(batch)
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
            "No detector has the input that it needs",
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
        needed = cfg.alpha / len(tests(chosen))
        mixed = by_domain.test(known, window, cfg.permutations, cfg.max_rows, seed, needed)
        choice = choice.also(MIXTURE, engine.EXACT)
        asked += [(MIXTURE, on) for on, _ in mixed.found]
        found += [one for _, one in mixed.found]
        notes, parts = (*notes, *mixed.notes), mixed.parts

    evidence = _judged(asked, found, choice, cfg.alpha)
    return DriftReport(
        evidence=evidence,
        p_value=min(1.0, len(evidence) * min(one.p_value for one in evidence)),
        is_drift=any(one.is_drift for one in evidence),
        alpha=cfg.alpha,
        reference_images=len(reference.embedding_ND),
        batch_images=len(batch.embedding_ND),
        unusual=_unusual(reference, batch, cfg.unusual),
        engine=choice.name,
        notes=(*notes, *left_out),
        parts=parts,
    )


def _judged(
    asked: Sequence[tuple[str, str]], found: Sequence[Found], choice: Choice, alpha: float
) -> tuple[Evidence, ...]:
    """The evidence of these tests, judged together at alpha. found: what each of them says."""
    p_values = [max(one.p_value, LEAST_P) for one in found]
    rejected = holm(p_values, alpha)
    levels = thresholds(p_values, len(rejected), alpha)
    evidence = []
    for place, ((detector, on), one) in enumerate(zip(asked, found, strict=True)):
        evidence.append(
            Evidence(
                detector=detector,
                on=on,
                statistic=one.statistic,
                p_value=p_values[place],
                threshold=levels[place],
                is_drift=place in rejected,
                engine=choice.engine_by_detector[detector],
                detail=one.detail,
            )
        )
    return tuple(evidence)


def _unusual(reference: Side, batch: Side, count: int) -> tuple[tuple[int, float], ...]:
    """(row, distance) of the images of the batch that are least like the reference."""
    distance_M = projection.unusual(
        reference.embedding_ND.astype(np.float32), batch.embedding_ND.astype(np.float32)
    )
    most = np.argsort(-distance_M, kind="stable")[:count]
    return tuple((int(row), float(distance_M[row])) for row in most)


def thresholds(p_values: Sequence[float], rejected: int, alpha: float) -> list[float]:
    """Holm's level of each p-value. Behind the first that is not rejected, no level counts: these
    have its level, which their larger p-values miss too."""
    by_size = np.argsort(p_values, kind="stable")
    rank = np.empty(len(p_values), int)
    rank[by_size] = np.arange(len(p_values))
    return [alpha / (len(p_values) - r) for r in np.minimum(rank, rejected).tolist()]


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
