"""How much each hyperparameter mattered: permutation importance in a random forest over the trials.

A forest (Breiman 2001) needs no assumption on how values act together, and scikit-learn has it. Few
trials say little: with fewer than LEAST_TRIALS there is no answer.

More epochs alone make a trial better, so trials are compared after equally many epochs: by their
best of the first N, where three quarters of them had N epochs or more.

A conditional field that was not set counts as a value of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from raypipe.search.leaderboard import Trial, best_within
from raypipe.train.stopping import Mode

LEAST_TRIALS = 8
TREES = 64
REPEATS = 16


def importance(trials: Sequence[Trial], metric: str, mode: Mode) -> dict[str, float]:
    """Each field's share of the importance, from the largest down; the shares sum to one.

    {} if too few trials ended, or if no field made a difference.
    """
    # Which trials can be compared, and which fields differ between them.
    usable = [trial for trial in trials if math.isfinite(trial.metric) and trial.drawn]
    values = _compared(usable, metric, mode)
    compared = [trial for trial in usable if trial.name in values]
    names = _varied(compared)
    if len(compared) < LEAST_TRIALS or not names:
        return {}
    # Imported here: scikit-learn is slow to import.
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.inspection import permutation_importance

    # One row per trial and one column per field.
    columns = []
    for name in names:
        columns.append(_column([trial.changes.get(name) for trial in compared]))
    inputs = np.column_stack(columns)
    metrics = np.array([values[trial.name] for trial in compared])
    # In units of their spread: to a tree a variance of 2e-16 is none, whatever the labels' unit.
    metrics = (metrics - metrics.mean()) / (metrics.std() or 1.0)
    forest = RandomForestRegressor(TREES, random_state=0).fit(inputs, metrics)
    permuted = permutation_importance(forest, inputs, metrics, n_repeats=REPEATS, random_state=0)
    # How much worse the forest predicts with a field's values shuffled.
    drops = permuted.importances_mean.clip(0)  # below 0 is noise
    if not drops.sum() > 0:
        return {}
    shares = zip(names, (drops / drops.sum()).tolist(), strict=True)
    return dict(sorted(shares, key=lambda pair: (-pair[1], pair[0])))


def _varied(trials: Sequence[Trial]) -> list[str]:
    """The fields that have several values among the trials, in the order of their first use."""
    values: dict[str, set[str]] = {}
    for trial in trials:
        for name in trial.changes:
            values.setdefault(name, set())
    for name, seen in values.items():
        for trial in trials:
            seen.add(repr(trial.changes.get(name)))
    return [name for name, seen in values.items() if len(seen) > 1]


def _compared(trials: Sequence[Trial], metric: str, mode: Mode) -> dict[str, float]:
    """By trial: its best of the first N epochs, as the module's head says.

    A trial with fewer epochs is left out, unless its own rule ended it.
    """
    if not trials:
        return {}
    # N: three quarters of the trials have so many epochs or more.
    lengths = sorted((trial.epochs for trial in trials), reverse=True)
    common = lengths[math.ceil(0.75 * len(lengths)) - 1]
    values = {}
    for trial in trials:
        if trial.epochs >= common or trial.stopped is not None:
            value = best_within(trial, common, metric, mode)
            if math.isfinite(value):
                values[trial.name] = value
    return values


def _column(values: Sequence[Any]) -> np.ndarray:
    """A field's values as numbers for the forest, which looks only at their order.

    Numbers stay; other values are numbered in the order of their names. "Not set" comes first.
    """
    # Fields that were not set are None.
    given = [value for value in values if value is not None]
    if all(map(_is_number, given)):
        missing = min(given) - 1
        return np.array([missing if value is None else value for value in values], float)
    names = sorted({str(value) for value in given})
    numbers = {name: number for number, name in enumerate(names)}
    return np.array([-1 if value is None else numbers[str(value)] for value in values], float)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
