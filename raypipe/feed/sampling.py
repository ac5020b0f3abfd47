"""Weighted sampling: how often each sample is drawn in an epoch.

Legend: N samples, S sources.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from raypipe.errors import DataError

BLOCK = 2**22  # samples


def resample(weights_N: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """How often each sample comes among N draws (sum N): its expected count, rounded up or down.

    This is systematic resampling. Source: J. Carpenter et al., "Improved particle filter for
    nonlinear problems" (1999).
    """
    n = len(weights_N)
    per_weight = n / weights_N.sum()
    offset = rng.uniform()
    copies_N = np.empty(n, np.int32 if n < 2**31 else np.int64)

    # In blocks, because the arrays in between take eight bytes a sample each.
    total, drawn = 0.0, 0
    for first in range(0, n, BLOCK):
        block = slice(first, first + BLOCK)
        weight_until = np.cumsum(np.concatenate(([total], weights_N[block])))[1:]
        total = weight_until[-1]
        expected_until = weight_until * per_weight
        if first + BLOCK >= n:
            expected_until[-1] = n  # without the rounding error of the sum
        # One random offset for all edges; then a sample gets the whole numbers between its edges.
        drawn_until = np.ceil(expected_until - offset).astype(np.int64).clip(0)
        copies_N[block] = np.diff(drawn_until, prepend=drawn)
        drawn = int(drawn_until[-1])
    return copies_N


def balanced_weights(labels_N: np.ndarray) -> np.ndarray:
    """Weights under which every class comes equally often."""
    weights_C = 1.0 / np.bincount(labels_N).clip(1)  # a class without samples weighs no sample
    return np.asarray(weights_C[labels_N])


def source_weights(
    sources: pa.DictionaryArray, mix: Mapping[str, float] | None = None
) -> np.ndarray:
    """Weights under which every source comes equally often, or in the shares of `mix`.

    sources: of each sample; a null is the source "None". Raises DataError where `mix` names other
    sources than there are.
    """
    texts = [str(value) for value in (*sources.dictionary.to_pylist(), None)]
    code_N = sources.indices.fill_null(len(texts) - 1).to_numpy()
    is_used = np.bincount(code_N, minlength=len(texts)) > 0
    names = sorted({text for text, used in zip(texts, is_used, strict=True) if used})
    place = {name: i for i, name in enumerate(names)}
    source_N = np.array([place.get(text, 0) for text in texts])[code_N]
    counts_S = np.bincount(source_N)
    shares = dict.fromkeys(names, 1.0) if mix is None else mix
    if set(shares) != set(names):
        raise DataError(
            "feed.mix does not fit the sources of the training rows",
            got=dict(shares),
            rule=f"It gives each of {', '.join(names)} a share, and nothing else",
            fix="Correct it, or leave it out: then every source comes equally often",
        )
    weights_S = np.array([shares[name] for name in names]) / counts_S
    return np.asarray(weights_S[source_N], dtype=np.float64)
