"""Weighted sampling: how often each sample is drawn in an epoch.

Legend: N samples, S sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from raypipe.errors import DataError


def resample(weights_N: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """How often each sample comes among N draws (int64, sum N): its expected count, rounded up or
    down.

    This is systematic resampling. Source: J. Carpenter et al., "Improved particle filter for
    nonlinear problems" (1999).
    """
    n = len(weights_N)
    expected_until_N = np.cumsum(weights_N) * (n / weights_N.sum())
    expected_until_N[-1] = n  # without the rounding error of the sum

    # One random offset for all edges; then a sample gets the whole numbers between its edges.
    edges = np.concatenate(([0.0], expected_until_N)) - rng.uniform()
    return np.diff(np.ceil(edges).astype(np.int64).clip(0))


def balanced_weights(labels_N: np.ndarray) -> np.ndarray:
    """Weights under which every class comes equally often."""
    return 1.0 / np.bincount(labels_N)[labels_N]


def source_weights(sources_N: Sequence[str], mix: Mapping[str, float] | None = None) -> np.ndarray:
    """Weights under which every source comes equally often, or in the shares of `mix`.

    Raises DataError where `mix` names other sources than there are.
    """
    names_S, source_N, counts_S = np.unique(
        np.asarray(sources_N, dtype=str), return_inverse=True, return_counts=True
    )
    names = names_S.tolist()
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
