"""A false-alarm rate for a year of checks: what one check may spend of it, and how it shows that.

With `watch.horizon` a check's alpha is its share of the promise (horizon.py), 8.2e-5 for 3 % in 365
nights, less where earlier checks have spent more. So small a p-value takes 36,000 permutations. Few
checks need them: 500 are drawn first, and all of them only where these leave a doubt. The p-value
that is kept is valid below DOUBT: an alarm needs the full number to say so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from raypipe.config import RunConfig
from raypipe.errors import DataError
from raypipe.watch import feedback, records
from raypipe.watch.detect import DEFAULT, DriftConfig, DriftReport, Evidence, tests, thresholds
from raypipe.watch.engine import EXACT
from raypipe.watch.error_tests import Found as OfLabels
from raypipe.watch.horizon import Horizon
from raypipe.watch.settings import WatchConfig
from raypipe.watch.spans import joined as spans_joined
from raypipe.watch.superiority import holm

Found = Callable[[DriftConfig], DriftReport]

DOUBT = 0.02
"""A p-value of few permutations above this is no alarm with all of them: of 500 it is 10."""
MOST_DEFAULT = 3  # pieces of evidence of the detectors that are chosen for a user
NO_SHARE = (
    "labels: no test, as the tests of images need all of alpha: they have so few groups that no "
    "smaller p-value can come out"
)
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


def too_little(watch: WatchConfig, alpha: float | None) -> list[str]:
    """A note if a check at this level has less than its share of the promise, for people."""
    horizon = watch.horizon
    if horizon is None or alpha is None:
        return []
    share = horizon.false_alarm / horizon.checks
    if alpha >= share:
        return []
    is_blind = ", and it cannot alarm" if alpha <= NOTHING_LEFT else ""
    return [
        "earlier checks had other settings, and have used too much of "
        f"watch.horizon.false_alarm={horizon.false_alarm:g}: the alpha of this check is "
        f"{alpha:.2g} instead of {share:.2g}{is_blind}. Raise watch.horizon.false_alarm, or wait "
        f"until they are not among the last {horizon.checks} checks"
    ]


def over_spans(
    drift: DriftConfig,
    alpha: float | None,
    found: Found,
    spans: Mapping[int, Found],
    labels: Sequence[OfLabels] = (),
) -> DriftReport:
    """The report of a check, of its spans (spans.py), and of labels that came (feedback.py), each
    at an equal share of the level.

    found, spans: tests with these settings. alpha: of a promise; None: drift.alpha, and no spans.
    labels: tests that are made already, and are judged here. Where the images cannot have a share,
    they have all of the level, and labels are judged by nothing (NO_SHARE).
    """
    # Its windows are nights already, and their order is of one night.
    of_spans = drift.detectors and tuple(name for name in drift.detectors if name != "online")
    if alpha is None or of_spans == ():
        spans = {}
    if not spans and not labels:
        return kept(drift, alpha, found)
    level = drift.alpha if alpha is None else alpha
    share = level / (1 + len(spans) + bool(labels))
    try:
        alone = found(_able(drift, share)) if alpha is None else kept(drift, share, found)
    except DataError:
        if not labels:
            raise
        # Of few groups, no p-value may be small enough for a share: then images have all of it.
        alone = over_spans(drift, alpha, found, spans)
        return replace(alone, notes=(*alone.notes, NO_SHARE))
    cfg = drift.model_copy(update={"detectors": of_spans})
    reports = {}
    for count, of in spans.items():
        # A test that these images cannot have says so, and the others go on.
        try:
            reports[count] = kept(cfg, share, of)
        except DataError:
            continue
    joined = spans_joined(level, alone, reports)
    return _with_labels(joined, labels, share, 1 + len(reports)) if labels else joined


def _able(drift: DriftConfig, share: float) -> DriftConfig:
    """The settings at this level, with permutations enough to show it."""
    needed = math.ceil(max(drift.pieces, MOST_DEFAULT) / share) + 1
    most = max(drift.permutations, needed)
    return drift.model_copy(update={"alpha": share, "permutations": most})


def _with_labels(
    joined: DriftReport, labels: Sequence[OfLabels], share: float, parts: int
) -> DriftReport:
    """The report of `parts` tests of images, and these of labels, each at `share`."""
    p_values = [one.p_value for one in labels]
    rejected = holm(p_values, share)
    evidence = tuple(
        Evidence(
            detector=feedback.DETECTOR,
            on=one.on,
            statistic=one.statistic,
            p_value=one.p_value,
            threshold=threshold,
            is_drift=place in rejected,
            engine=EXACT,
            detail=one.detail,
        )
        for place, (one, threshold) in enumerate(
            zip(labels, thresholds(p_values, len(rejected), share), strict=True)
        )
    )
    smallest = min(joined.p_value / parts, len(labels) * min(p_values))
    return replace(
        joined,
        evidence=(*joined.evidence, *evidence),
        p_value=min(1.0, (parts + 1) * smallest),
        is_drift=joined.is_drift or bool(rejected),
        alpha=(parts + 1) * share,
    )


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
