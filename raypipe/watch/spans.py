"""A drift that is small and lasts: the images of several checks are tested together.

One night of 50 images at 8.2e-5 does not see it. So with `watch.horizon.spans: [7, 28]` a check
also tests the images of the last 7 and of the last 28 checks, each span at an equal share of its
level: by the union bound the promise holds.

It asks more than single nights do, so it is off by default. Nights may depend on each other in any
way as long as each is tested alone. Here the images of all nights of a span must be exchangeable
with the reference's. Modules photographed again each night are not: 28 nights of them are a few
modules, and no 1,400 images. With `watch.group` the cells of one module move together, whichever
night they come from, and that is covered. The groups of an earlier night are those of the table's
version then; where it cannot be read any more, the look back ends. Nights that share weather are
not: with an AR(1) of .8, 27 % of the years alarmed where 3 % were asked for
(benchmarks/results/2026-11-25-horizon.md).

Which earlier checks a span looks back at is read from the log of windows and the table of evidence,
so that no clock, rerun or missed night counts:

- Checked windows alone. Those that were left or wait have their images in a later one, and a rerun
  of a window is the same window. An image that came often is one image, by its sha256.
- Of this champion, under the promise: others have other features.
- After the last check that alarmed. No image is evidence of two alarms, so that one bad night does
  not fill `watch.policy`'s k of n. The promise is kept: until the first false alarm nothing was
  left out.
- None for a night that has drift.max_rows images already: of more images, no more are compared.

How many images there are decides how many spans are tested, never what they look like.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from raypipe.errors import DataError, Unreachable
from raypipe.watch.detect import DriftReport
from raypipe.watch.predicted import Batch
from raypipe.watch.window_log import Entry


def earlier(
    entries: Sequence[Entry],
    rows: Sequence[Mapping[str, Any]],
    model: str,
    seal: str | None,
    window: int,
    most: int,
) -> list[Entry]:
    """The checked windows that the spans of this window look back at, newest first; `most` of them.

    entries: of the log of windows, in their order. rows: of the table of evidence. seal: of the
    model's package; a row without one is of an older raypipe.
    """
    evidence = {row["key"]: row for row in rows}
    found: list[Entry] = []
    for entry in reversed(entries):
        if entry.event != "checked" or entry.window >= window:
            continue
        row = evidence.get(entry.evidence)
        if row is None or row["is_drift"] or not row.get("promised"):
            break
        # A registry that was made again gives another model the same name and number.
        if (row["model"], row.get("seal")) != (model, seal):
            break
        found.append(entry)
        if len(found) == most:
            break
    return found


def together(
    mine: Batch,
    before: Sequence[Entry],
    read: Callable[[Entry], Batch],
    spans: Sequence[int],
    max_rows: int,
) -> dict[int, Batch]:
    """The different images of the last checks, by the number of checks; this one is one of them.

    before: newest first. read: its prediction; a DataError ends the look back, as the images before
    are gone. A span that would be the same as a shorter one is left out.
    """
    if len(mine.ids) >= max_rows:
        return {}
    all_of = [mine]
    for entry in before:
        try:
            all_of.append(read(entry))
        except Unreachable:
            raise
        except DataError:
            break
    counts = sorted({min(span, len(all_of)) for span in spans} - {1})
    return {count: _distinct(all_of[:count]) for count in counts}


def _distinct(batches: Sequence[Batch]) -> Batch:
    """One batch of all, each image once: the newest row of it."""
    hashes = [sha256 for one in batches for sha256 in one.sha256]
    ids = [image_id for one in batches for image_id in one.ids]
    first = {sha256: row for row, sha256 in reversed(list(enumerate(hashes)))}
    rows = sorted(first.values())
    looks = [one.looks_NK for one in batches if one.looks_NK is not None]
    groups = [group for one in batches for group in one.groups or []]
    return Batch(
        batches[0].version,
        [ids[row] for row in rows],
        [hashes[row] for row in rows],
        np.concatenate([one.features_ND for one in batches])[rows],
        np.concatenate([one.scores_NC for one in batches])[rows],
        np.concatenate(looks)[rows] if len(looks) == len(batches) else None,
        groups=[groups[row] for row in rows] if len(groups) == len(hashes) else None,
    )


def joined(alpha: float, alone: DriftReport, spans: Mapping[int, DriftReport]) -> DriftReport:
    """One report of a check and its spans, each of which was judged at an equal share of alpha.

    What it says about single images and domains is of this check alone.
    """
    if not spans:
        return alone
    more = [
        replace(one, on=f"{one.on} of {count} checks")
        for count, report in spans.items()
        for one in report.evidence
    ]
    every = [alone, *spans.values()]
    looked = ", ".join(f"{r.batch_images} of {count} checks" for count, r in spans.items())
    return replace(
        alone,
        evidence=(*alone.evidence, *more),
        p_value=min(1.0, len(every) * min(report.p_value for report in every)),
        is_drift=any(report.is_drift for report in every),
        alpha=alpha,
        notes=(*alone.notes, f"images that were tested together, too: {looked}"),
    )
