"""A false-alarm rate for a year of checks: what one check may spend of it, and how it shows that.

With `watch.horizon` a check's alpha is its share of the promise (horizon.py), 8.2e-5 for 3 % in 365
nights, less where earlier checks have spent more. So small a p-value takes 36,000 permutations. Few
checks need them: 500 are drawn first, and all of them only where these leave a doubt. The p-value
that is kept is valid below DOUBT: an alarm needs the full number to say so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from raypipe.config import RunConfig
from raypipe.errors import DataError
from raypipe.watch import records
from raypipe.watch.detect import DEFAULT, DriftConfig, DriftReport, tests
from raypipe.watch.horizon import Horizon
from raypipe.watch.settings import WatchConfig
from raypipe.watch.spans import joined as spans_joined

Found = Callable[[DriftConfig], DriftReport]

DOUBT = 0.02
"""A p-value of few permutations above this is no alarm with all of them: of 500 it is 10."""
NOTHING_LEFT = 1e-12
"""The alpha of a check whose horizon is spent: it looks, and cannot alarm."""


def level(run: RunConfig, watch: WatchConfig, about: str, model: str) -> float | None:
    """The alpha of a check by this model; None without a horizon.

    about: what is looked at, as the evidence names it. What was spent before is in the evidence: of
    checks under a horizon, each once.
    """
    if watch.horizon is None:
        return None
    rows = [row for row in records.checks(run, watch).rows if row.get("name") == watch.name]
    # The same check again spends nothing.
    this = (about, model)
    others = [r for r in rows if r.get("promised") and (records.looked_at(r), r["model"]) != this]
    horizon = Horizon(watch.horizon.checks, watch.horizon.false_alarm)
    return max(NOTHING_LEFT, horizon.level([row["alpha"] for row in others]))


def over_spans(
    drift: DriftConfig, alpha: float | None, found: Found, spans: Mapping[int, Found]
) -> DriftReport:
    """The report of a check and of its spans (spans.py), each at an equal share of `alpha`.

    found, spans: tests with these settings. Without a promise (alpha None) the check's alone.
    """
    # Its windows are nights already, and their order is of one night.
    of_spans = drift.detectors and tuple(name for name in drift.detectors if name != "online")
    if alpha is None or not spans or of_spans == ():
        return kept(drift, alpha, found)
    share = alpha / (1 + len(spans))
    cfg = drift.model_copy(update={"detectors": of_spans})
    reports = {}
    for count, of in spans.items():
        # A test that these images cannot have says so, and the others go on.
        try:
            reports[count] = kept(cfg, share, of)
        except DataError:
            continue
    return spans_joined(alpha, kept(drift, share, found), reports)


def kept(drift: DriftConfig, alpha: float | None, found: Found) -> DriftReport:
    """The report of `found` at the settings of a check; under a promise, at `alpha`.

    found: tests with these settings.
    """
    if alpha is None:
        return found(drift)
    # Set past the rule that so few permutations can show alpha: they only leave a doubt.
    first = found(drift.model_copy(update={"alpha": alpha}))
    in_doubt = any(e.p_value <= DOUBT and not e.is_drift for e in first.evidence)
    if first.is_drift or not in_doubt or alpha <= NOTHING_LEFT:
        return first
    pieces = max(len(first.evidence), len(tests(drift.detectors or DEFAULT)))
    # One more than the smallest that can show it: a p-value is at most its threshold then.
    needed = math.ceil(pieces / alpha) + 1
    return found(drift.model_copy(update={"alpha": alpha, "permutations": needed}))
