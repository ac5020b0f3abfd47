"""The detector `mixture` of a drift check: what it needs, when it is the default, what it says.

The test itself is domains.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raypipe.errors import one_line
from raypipe.watch import domains
from raypipe.watch.clusters import clusters
from raypipe.watch.detectors.detector import Found
from raypipe.watch.domains import Fit, Part, Rows

MIXTURE = "mixture"
SHOWN = 120  # characters of a domain's name, in a line for people


@dataclass(frozen=True)
class Verdict:
    """found: (what was looked at, result). notes: for people."""

    found: tuple[tuple[str, Found], ...]
    parts: tuple[Part, ...]
    notes: tuple[str, ...]


def names(domain_names: Sequence[str] | None, features_ND: np.ndarray) -> Sequence[str] | None:
    """The domain of each reference row. None: all rows are one domain.

    domain_names: as a package has them: none at all if no column names any; then clusters of the
    features stand in for them.
    """
    if domain_names is None or len(domain_names):
        return domain_names
    return [f"cluster {code + 1}" for code in clusters(features_ND).tolist()]


def is_default(reference: Rows, window: Rows) -> bool:
    """Do the tests that know neither domains nor groups mislead here?"""
    has_groups = reference.groups is not None and window.groups is not None
    return has_groups or len(set(reference.domains or ())) > 1


def test(
    reference: Rows, window: Rows, permutations: int, most: int, seed: int, needed: float
) -> Verdict:
    """needed: a p-value that is an alarm. Raises DataError for rows that do not fit together."""
    fitted = domains.fit(reference, window, permutations, most, seed)
    mixed = ", ".join(f"{part.weight:.0%} {_shown(part)}" for part in fitted.parts if _counts(part))
    found = [
        ("embedding", Found(fitted.statistic, fitted.p_value, mixed)),
        ("scores", Found(fitted.score_statistic, fitted.score_p_value)),
    ]
    if fitted.most_copies > 1:
        often = f"one image comes {fitted.most_copies} times"
        found.append(("copies", Found(float(fitted.most_copies), fitted.copies_p_value, often)))
    notes = (_why(reference, window), *_notes(fitted, window, needed))
    return Verdict(tuple(found), fitted.parts, notes)


def _why(reference: Rows, window: Rows) -> str:
    known = len(set(reference.domains or ("",)))
    by = " whole groups of" if reference.groups is not None and window.groups is not None else ""
    return (
        f"mixture: the batch is compared with the nearest mixture of {known} domains, by{by} images"
    )


def _notes(fitted: Fit, window: Rows, needed: float) -> list[str]:
    notes = []
    for part in fitted.parts:
        if part.share > 0:
            notes.append(
                f"{part.share:.0%} of the batch resemble {_shown(part)}; of these, "
                f"{part.unlike:.0%} lie farther from it than 99% of its own images"
            )
    if window.groups is not None and fitted.least_of_groups > needed:
        notes.append(
            f"the groups are so few that no p-value below {fitted.least_of_groups:.2g} can come "
            f"out, and an alarm needs {needed:.2g}"
        )
    return notes


def _counts(part: Part) -> bool:
    return part.weight >= 0.005


def _shown(part: Part) -> str:
    """A name may be any text of a column: a page of it, or one with line breaks."""
    return one_line(part.domain, SHOWN) or "(no name)"
