"""MMD as a detector: of a whole batch (`watch/mmd.py`), and as its images came (`online.py`)."""

from __future__ import annotations

from raypipe.watch.detectors.detector import Found, Pair, Setting


def mmd(pair: Pair, setting: Setting) -> Found:
    """The squared MMD, and its p-value by the permutations that Alibi Detect draws."""
    # Not at the top: settings are read without torch.
    from raypipe.watch import mmd as exact

    rows, batch_rows = len(pair.reference), len(pair.batch)
    chosen_LP = exact.regroupings(rows, batch_rows, setting.permutations, setting.seed)
    found = exact.mmd(pair.reference, pair.batch, setting.width, chosen_LP)
    return Found(found.statistic, found.p_value)


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
    where = f"farthest: images {first} to {last} of {len(pair.batch)} as they came"
    return Found(found.statistic, found.p_value, where)
