"""How much each hyperparameter decided: permutation importance in a random forest (Breiman 2001) over the trials.

A forest needs no assumption on how values act together, and scikit-learn has it. Few trials say little: below `FEWEST` nothing
is said. More epochs alone make a trial better, so trials are compared at equal budgets: by their best of the first N epochs, N
being what three quarters of them had. A conditional field that was not set is a value of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from raypipe.search.leaderboard import Trial, best_within
from raypipe.train.stopping import Mode

FEWEST = 8
TREES, REPEATS = 64, 16


def importance(trials: Sequence[Trial], metric: str, mode: Mode) -> dict[str, float]:
    """Shares that sum to one, from the most important down; {} where too few trials ended, or nothing made a difference."""
    values = _compared([t for t in trials if math.isfinite(t.metric)], metric, mode)
    told = [t for t in trials if t.name in values]
    names = [
        n
        for n in {n: None for t in told for n in t.changes}
        if len({repr(t.changes.get(n)) for t in told}) > 1
    ]
    if len(told) < FEWEST or not names:
        return {}
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.inspection import permutation_importance

    inputs = np.column_stack([_column([t.changes.get(n) for t in told]) for n in names])
    metrics = np.array([values[t.name] for t in told])
    forest = RandomForestRegressor(TREES, random_state=0).fit(inputs, metrics)
    found = permutation_importance(
        forest, inputs, metrics, n_repeats=REPEATS, random_state=0
    ).importances_mean.clip(0)
    if not found.sum() > 0:
        return {}
    shares = zip(names, (found / found.sum()).tolist(), strict=True)
    return dict(sorted(shares, key=lambda pair: (-pair[1], pair[0])))


def _compared(trials: Sequence[Trial], metric: str, mode: Mode) -> dict[str, float]:
    """By trial: its best of the first N epochs. A trial with fewer is left out, unless its own rule ended it."""
    lengths = sorted((t.epochs for t in trials), reverse=True)
    even = lengths[math.ceil(0.75 * len(lengths)) - 1] if lengths else 0
    found = {
        t.name: best_within(t, even, metric, mode)
        for t in trials
        if t.epochs >= even or t.stopped is not None
    }
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _column(values: Sequence[Any]) -> np.ndarray:
    """Numbers as they are (a forest only looks at their order), everything else by its name; not set comes before both."""
    if all(v is None or (isinstance(v, (int, float)) and not isinstance(v, bool)) for v in values):
        lowest = min(v for v in values if v is not None)
        return np.array([lowest - 1 if v is None else v for v in values], float)
    known = {name: i for i, name in enumerate(sorted({str(v) for v in values if v is not None}))}
    return np.array([-1 if v is None else known[str(v)] for v in values], float)
