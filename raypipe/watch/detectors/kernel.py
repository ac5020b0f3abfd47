"""Exact MMD as a detector: `watch/mmd.py` with the permutations that Alibi Detect draws."""

from __future__ import annotations

from raypipe.watch.detectors.detector import Found, Pair, Setting


def mmd(pair: Pair, setting: Setting) -> Found:
    """The squared MMD, and its p-value by permutation."""
    # Not at the top: settings are read without torch.
    from raypipe.watch import mmd as exact

    rows, batch_rows = len(pair.reference), len(pair.batch)
    chosen_LP = exact.regroupings(rows, batch_rows, setting.permutations, setting.seed)
    found = exact.mmd(pair.reference, pair.batch, setting.width, chosen_LP)
    return Found(found.statistic, found.p_value)
