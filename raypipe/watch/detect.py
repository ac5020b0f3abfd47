"""Has the world moved? Evidence from several detectors, judged together at one false-alarm rate.

The tests run in the Alibi Detect sidecar (`alibi_sidecar.py`): MMD by permutation and
Kolmogorov-Smirnov on the embedding, Kolmogorov-Smirnov on the predicted scores. With m pieces of
evidence each is judged at alpha/m (Bonferroni), so `alpha` is the false-alarm rate of the whole
check: at most one false alarm in 100 nightly checks at 0.01. Pieces about the same images are
correlated, which makes Bonferroni careful, not wrong.

The rate holds for images drawn independently. Images that come in groups (the cells of one module,
the frames of one film) differ from group to group: two neighbouring blocks of 130 ELPV mono cells
alarm always (7 of 7), random halves never (0 of 100). Draw the reference over many groups, and
compare with batches that hold many groups too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from raypipe.cluster import sidecar
from raypipe.config import Section
from raypipe.errors import DataError
from raypipe.watch.settings import LEAST_ROWS

LEAST_P = (
    1e-300  # Kolmogorov-Smirnov's p underflows to 0 on large batches, and no evidence is certain
)


@dataclass(frozen=True)
class Evidence:
    """One test: `detector` looked at `on` (embedding or scores); drift when `p_value` is below
    `threshold` = alpha / m.
    """

    detector: str
    on: str
    statistic: float
    p_value: float
    threshold: float
    is_drift: bool


@dataclass(frozen=True)
class DriftReport:
    """All evidence of one check. `p_value` = min(1, m * smallest p). `unusual`: (batch row,
    distance), most unusual first.

    A distance of 1 is the usual one between reference images; 2 is twice as far from all the
    reference.
    """

    evidence: tuple[Evidence, ...]
    p_value: float
    is_drift: bool
    alpha: float
    reference_images: int
    batch_images: int
    unusual: tuple[tuple[int, float], ...]


class DriftConfig(Section):
    """Which tests run and how often a check may raise a false alarm."""

    alpha: float = Field(default=0.01, gt=0, lt=0.5)
    """Probability of a false alarm for one check, over all its tests together."""
    detectors: tuple[Literal["mmd", "ks", "lsdd"], ...] = Field(default=("mmd", "ks"), min_length=1)
    """mmd and lsdd compare embeddings as a whole. ks compares single features, and the scores."""
    permutations: int = Field(default=500, ge=20)
    """Random regroupings behind a p-value of mmd or lsdd; the time grows with them.

    At least the number of tests / alpha: the smallest p-value is 1 / (permutations + 1). More: a
    steadier p-value.
    """
    max_rows: int = Field(default=500, ge=LEAST_ROWS)
    """Images of each side that are compared; more are sampled. The time grows with its square."""
    unusual: int = Field(default=12, ge=0)
    """Pictures in the report of images that are least like the reference."""

    @property
    def pieces(self) -> int:
        """How much evidence a check yields: KS looks at the embedding and at the scores."""
        return len(self.detectors) + ("ks" in self.detectors)

    @model_validator(mode="after")
    def _can_raise_an_alarm(self) -> DriftConfig:
        if len(set(self.detectors)) < len(self.detectors):
            raise ValueError("each detector once: a repeated one only raises the Bonferroni factor")
        smallest = 1 / (self.permutations + 1)
        if set(self.detectors) - {"ks"} and smallest >= self.alpha / self.pieces:
            need = int(self.pieces / self.alpha)
            raise ValueError(
                f"permutations must be at least {need} at alpha {self.alpha}: no smaller p than "
                f"{smallest:.4f} can come out"
            )
        return self


def detect(
    ref_embedding: np.ndarray,
    batch_embedding: np.ndarray,
    ref_scores: np.ndarray,
    batch_scores: np.ndarray,
    cfg: DriftConfig,
    seed: int,
) -> DriftReport:
    """Compare a batch with the champion's reference: embeddings (images, d) and scores (images,
    classes), finite numbers.

    Needs a connection to Ray. Equal input and seed give an equal report. DataError for what cannot
    be compared.
    """
    arrays = {
        "ref_embedding": ref_embedding,
        "batch_embedding": batch_embedding,
        "ref_scores": ref_scores,
        "batch_scores": batch_scores,
    }
    for name, array in arrays.items():
        _check(name, array)
    for what in ("embedding", "scores"):
        ours, theirs = arrays[f"ref_{what}"].shape[1], arrays[f"batch_{what}"].shape[1]
        if ours != theirs:
            fix = (
                "Compute both with the same model version: the reference is kept in the "
                "champion's package"
            )
            raise DataError(
                f"The batch's {what} is {theirs} wide and the reference's {ours}", fix=fix
            )
    for side in ("ref", "batch"):
        embedded, scored = (len(arrays[f"{side}_embedding"]), len(arrays[f"{side}_scores"]))
        if embedded != scored:
            raise DataError(
                f"{side}_embedding has {embedded} rows and {side}_scores {scored}",
                rule="Row i of both is image i",
            )
    options = {**cfg.model_dump(mode="json", exclude={"unusual"}), "seed": seed}
    floats = {name: np.asarray(array, dtype=np.float32) for name, array in arrays.items()}
    found, facts = sidecar.call("alibi", "raypipe.watch.alibi_sidecar:check", floats, options)
    threshold = cfg.alpha / len(facts["evidence"])
    evidence = tuple(
        Evidence(
            e["detector"],
            e["on"],
            e["statistic"],
            max(e["p_value"], LEAST_P),
            threshold,
            e["p_value"] < threshold,
        )
        for e in facts["evidence"]
    )
    most = np.argsort(-found["unusual"], kind="stable")[: cfg.unusual]
    return DriftReport(
        evidence=evidence,
        p_value=min(1.0, len(evidence) * min(e.p_value for e in evidence)),
        is_drift=any(e.is_drift for e in evidence),
        alpha=cfg.alpha,
        reference_images=len(ref_embedding),
        batch_images=len(batch_embedding),
        unusual=tuple((int(row), float(found["unusual"][row])) for row in most),
    )


def _check(name: str, array: np.ndarray) -> None:
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
