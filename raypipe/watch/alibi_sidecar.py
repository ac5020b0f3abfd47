"""Alibi Detect in its sidecar: reference and batch features in, test statistics and p-values out.

Runs under numpy 1 (see `cluster/sidecar.py`), so it imports nothing of raypipe. 0.11.4 is
Apache-2.0, 0.13.0 is not.

A p-value is only worth its false-alarm rate, so nothing is fitted on the reference alone:
standardisation, principal components and the kernel's width come from reference and batch
*together*, which leaves the two exchangeable when nothing has drifted. Fitted on 130 reference rows
alone, 64 components suit those rows better than any fresh ones: MMD then says p < 0.05 in 9 of 60
draws from one distribution, where the union says it in 4 (and KS in 5.4 % of 500). Both sides are
cut to `max_rows` first, so that a batch of 2,000 does not own the components that 130 reference
rows are judged in. Cost: 500+500 rows, 64 components, 500 permutations: about 2 s on one core, and
4 s more for the first import.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np

DEFAULTS = {
    "detectors": ["mmd", "ks"],
    "permutations": 500,
    "alpha": 0.01,
    "seed": 0,
    "max_rows": 500,
}
# At most, and at most a quarter of the rows: a component needs several rows to be more than noise.
COMPONENTS = 64
NEIGHBOURS = 5


def check(
    arrays: dict[str, np.ndarray], options: dict[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Compare `batch_embedding` (n, d) with `ref_embedding` (m, d), and `batch_scores` (n, classes)
    with `ref_scores`.

    options: `detectors` of mmd, lsdd (embedding), ks (embedding and scores); `permutations`,
    `max_rows` per side, `seed`. Returns `unusual` (float32 (n,)): mean distance to the 5 nearest
    reference rows, in units of the reference's own median; and facts["evidence"]: [{detector, on,
    statistic, p_value}]. Equal input and seed give equal p-values.
    """
    import torch

    unknown = sorted(set(options) - set(DEFAULTS))
    if unknown:
        raise ValueError(f"unknown options {unknown}, known are {sorted(DEFAULTS)}")
    settings = {**DEFAULTS, **options}
    rng = np.random.default_rng(settings["seed"])
    sides = [
        _subsample(arrays[f"{side}_embedding"], settings["max_rows"], rng)
        for side in ("ref", "batch")
    ]
    reference, batch = _project(*sides)
    evidence = []
    for detector in settings["detectors"]:
        torch.manual_seed(
            settings["seed"]
        )  # permutations and kernel centres are drawn with torch's generator
        if detector == "ks":
            evidence.append({"detector": "ks", "on": "embedding", **_ks(reference, batch)})
            scores = [_columns(arrays[f"{side}_scores"]) for side in ("ref", "batch")]
            evidence.append({"detector": "ks", "on": "scores", **_ks(*scores)})
        else:
            measured = _permutation_test(detector, reference, batch, settings)
            evidence.append({"detector": detector, "on": "embedding", **measured})
    facts = {
        "evidence": evidence,
        "components": reference.shape[1],
        "rows": [len(reference), len(batch)],
    }
    return {"unusual": _unusual(arrays["ref_embedding"], arrays["batch_embedding"])}, facts


def alibi() -> Any:
    """`alibi_detect.cd`, which wants pydantic 1 while Ray refuses it: lend it the copy inside
    pydantic 2 for the import. Its test of classifiers, which nothing here calls, imports what scipy
    has no longer under Python 3.13.
    """
    lent = ("pydantic", "pydantic.fields")
    if "alibi_detect.cd" not in sys.modules:
        vars(importlib.import_module("scipy.stats")).setdefault("binom_test", None)
        own = {name: importlib.import_module(name) for name in lent}
        sys.modules.update(
            {
                name: importlib.import_module(name.replace("pydantic", "pydantic.v1"))
                for name in lent
            }
        )
        try:
            importlib.import_module("alibi_detect.cd")
        finally:
            sys.modules.update(own)
    return sys.modules["alibi_detect.cd"]


def _permutation_test(
    detector: str, reference: np.ndarray, batch: np.ndarray, settings: dict[str, Any]
) -> dict[str, float]:
    kinds = {"mmd": "MMDDrift", "lsdd": "LSDDDrift"}
    if detector not in kinds:
        raise ValueError(f"unknown detector {detector!r}, known are ['ks', 'lsdd', 'mmd']")
    count = int(settings["permutations"])
    how: dict[str, Any] = {
        "backend": "pytorch",
        "p_val": settings["alpha"],
        "n_permutations": count,
        "device": "cpu",
    }
    if detector == "mmd":  # alibi would take the width from the reference alone
        how |= {
            "sigma": np.array([_width(np.concatenate([reference, batch]))], dtype=np.float32),
            "configure_kernel_from_x_ref": False,
        }
    data = getattr(alibi(), kinds[detector])(reference, **how).predict(batch)["data"]
    # alibi's p is the share of permutations at least as extreme, which can be 0. The data as
    # observed is one permutation too.
    p_value = (round(float(data["p_val"]) * count) + 1) / (count + 1)
    return {"statistic": float(data["distance"]), "p_value": p_value}


def _ks(reference: np.ndarray, batch: np.ndarray) -> dict[str, float]:
    """The largest two-sample Kolmogorov-Smirnov distance over columns, and min(1, columns *
    smallest p): Bonferroni.
    """
    data = alibi().KSDrift(reference, p_val=0.05).predict(batch, drift_type="feature")["data"]
    p_value = min(1.0, reference.shape[1] * float(np.min(data["p_val"])))
    return {"statistic": float(np.max(data["distance"])), "p_value": p_value}


def _subsample(rows: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    rows = rows.astype(np.float64)
    return rows if len(rows) <= most else rows[np.sort(rng.choice(len(rows), most, replace=False))]


def _columns(scores: np.ndarray) -> np.ndarray:
    """Two classes are one number twice: testing both would only double the Bonferroni factor."""
    return np.asarray(scores[:, 1:] if scores.shape[1] == 2 else scores, dtype=np.float64)


def _project(reference: np.ndarray, batch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both on the principal components of their standardised union, signs and all a function of the
    union only.
    """
    pooled = np.concatenate([reference, batch])
    spread = pooled.std(0)
    alive = spread > 1e-6 * max(1e-12, spread.max())  # a feature that never moves says nothing
    if not alive.any():
        return np.zeros((len(reference), 1), np.float32), np.zeros((len(batch), 1), np.float32)
    pooled = (pooled[:, alive] - pooled[:, alive].mean(0)) / spread[alive]
    keep = max(1, min(COMPONENTS, len(pooled) // 4, pooled.shape[1]))
    _, _, axes = np.linalg.svd(pooled, full_matrices=False)
    projected = (pooled @ axes[:keep].T).astype(np.float32)
    return projected[: len(reference)], projected[len(reference) :]


def _width(pooled: np.ndarray) -> float:
    """The median heuristic, as in alibi's `sigma_median`, over all pairs."""
    squared = _squared_distances(pooled, pooled)[np.triu_indices(len(pooled), 1)]
    return float(np.sqrt(0.5 * max(np.median(squared), 1e-12)))


def _unusual(reference: np.ndarray, batch: np.ndarray) -> np.ndarray:
    """Here the reference sets the scale alone: this ranks images for people to look at and is no
    test.
    """
    spread = reference.std(0)
    spread = np.maximum(
        spread, max(0.1 * float(np.median(spread)), 1e-6)
    )  # a feature dead in the reference must not rule
    reference, batch = (
        ((side - reference.mean(0)) / spread).astype(np.float64) for side in (reference, batch)
    )
    nearest = min(NEIGHBOURS, len(reference) - 1)
    own = _squared_distances(reference, reference)
    np.fill_diagonal(own, np.inf)
    unit = max(float(np.median(_nearest(own, nearest))), 1e-12)
    blocks = [
        _nearest(_squared_distances(batch[at : at + 1024], reference), nearest)
        for at in range(0, len(batch), 1024)
    ]
    return (np.concatenate(blocks) / unit).astype(np.float32)


def _nearest(squared: np.ndarray, count: int) -> np.ndarray:
    return np.sqrt(np.partition(squared, count - 1, axis=1)[:, :count]).mean(1)


def _squared_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return np.maximum((a**2).sum(1)[:, None] + (b**2).sum(1) - 2 * a @ b.T, 0)
