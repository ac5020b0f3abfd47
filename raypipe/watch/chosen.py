"""Were the images that got a label chosen by the champion's confidence, or are they a random draw?

Ranks of confidence are compared within each window. Letters in names: N images with labels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy

LEAST = 20
"""Other images; with fewer of them nobody can tell."""
CHOSEN = 0.05
"""A p-value below which the labelled images are no random draw."""


@dataclass(frozen=True)
class Seen:
    """How sure the champion is of some images, and the window that each is of."""

    sure_N: np.ndarray
    window_N: np.ndarray


NOBODY = Seen(np.empty(0), np.empty(0, int))


def why_not_drawn(came: Seen, others: Seen) -> str:
    """Why the labelled images are no random draw of what was checked; "" if they may be.

    Ranks are compared within each window (van Elteren 1960): a night of surer images that are
    labelled sooner than those of another night is still a random draw of its own.
    """
    drawn = np.isfinite(others.sure_N)
    if drawn.sum() < LEAST:
        return ""
    away = variance = 0.0
    ours = theirs = 0.0
    images = 0
    for window in np.unique(came.window_N):
        mine_N = came.sure_N[came.window_N == window]
        other_N = others.sure_N[drawn & (others.window_N == window)]
        n, m = len(mine_N), len(other_N)
        if not m:
            continue
        all_of = n + m
        ranks = scipy.stats.rankdata(np.concatenate([mine_N, other_N]))
        # Equal ranks, of a model that is always sure, vary less.
        _, tied = np.unique(ranks, return_counts=True)
        ties = float((tied.astype(float) ** 3 - tied).sum()) / (all_of * (all_of - 1))
        away += (ranks[:n].sum() - n * (all_of + 1) / 2) / (all_of + 1)
        variance += n * m / 12 * (all_of + 1 - ties) / (all_of + 1) ** 2
        images += n
        ours += mine_N.sum()
        theirs += n * other_N.mean()
    if variance <= 0 or 2 * scipy.stats.norm.sf(abs(away) / variance**0.5) >= CHOSEN:
        return ""
    return (
        f"the champion is {'surer' if away < 0 else 'less sure'} of other images of the same "
        f"windows ({100 * ours / images:.0f} % of the labelled, {100 * theirs / images:.0f} % of "
        "the others)"
    )
