"""MMD as a detector: of a whole batch (`watch/mmd.py`), and as its images came (`online.py`)."""

from __future__ import annotations

from dataclasses import replace

from raypipe.watch.detectors.detector import Found, Pair, Setting

TIE = 1e-6  # differences of a squared MMD below are rounding, in float32


def mmd(pair: Pair, setting: Setting) -> Found:
    """The squared MMD, and its p-value by the permutations that Alibi Detect draws; or by those of
    whole groups."""
    # Not at the top: settings are read without torch.
    from raypipe.watch import mmd as exact

    count, seed = setting.permutations, setting.seed
    if pair.units is None:
        chosen_LP = exact.regroupings(len(pair.reference), len(pair.batch), count, seed)
        found = exact.mmd(pair.reference, pair.batch, setting.width, chosen_LP)
        return Found(found.statistic, found.p_value)
    chosen_LP = pair.units.regroupings(count, seed)
    found = exact.mmd(pair.reference, pair.batch, setting.width, chosen_LP)
    # Of few groups the observed grouping is often drawn again: it counts as extreme.
    found = replace(found, rounding=TIE)
    ours, theirs = pair.units.counts
    return Found(found.statistic, found.p_value, f"by {ours} and {theirs} whole groups")


def online(pair: Pair, setting: Setting) -> Found:
    """The largest squared MMD of a window that slides over the batch, whose rows are in order."""
    from raypipe.watch import online as exact

    found = exact.scan(
        pair.reference,
        pair.batch,
        setting.width,
        setting.window,
        setting.permutations,
        setting.seed,
    )
    first, last = found.farthest
    images = len(pair.batch)
    drawn = ""
    if pair.night is not None and images < pair.night.images:
        # Places among all that came: nobody sees which images were drawn.
        first, last = (int(pair.night.places_M[place - 1]) + 1 for place in (first, last))
        drawn = f" ({images} of them were compared)"
        images = pair.night.images
    where = f"farthest: images {first} to {last} of {images} as they came{drawn}"
    return Found(found.statistic, found.p_value, where)
