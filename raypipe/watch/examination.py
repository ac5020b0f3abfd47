"""What one drift check tests: its images, those of earlier windows, and the labels that came.

Earlier windows and labels are read when they are needed: a check whose evidence is stored already
needs neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from raypipe.config import RunConfig
from raypipe.errors import DataError
from raypipe.models.tasks import NUMERIC
from raypipe.registry.package import Package, Reference
from raypipe.tables import between
from raypipe.tables.table import ImageTable, TableConfig
from raypipe.watch import (
    by_domain,
    by_image,
    feedback,
    feedback_rows,
    promise,
    records,
    severity,
    spans,
)
from raypipe.watch.detect import DriftConfig, DriftReport, detect
from raypipe.watch.feedback_rows import Came, Champion
from raypipe.watch.power import Known
from raypipe.watch.predicted import Batch, read_batch
from raypipe.watch.settings import WatchConfig
from raypipe.watch.sides import Seen
from raypipe.watch.window_log import Entry
from raypipe.watch.windows import Window


@dataclass(frozen=True)
class Examination:
    """One check's question: has `mine`, predicted by `champion`, moved from its reference?

    name: of the check. source: the batch's table. window: None for a batch named by its version.
    log: events of earlier windows. about: what is looked at, under which its labels are kept.
    """

    run: RunConfig
    watch: WatchConfig
    drift: DriftConfig
    name: str
    champion: Champion
    source: TableConfig
    mine: Batch
    window: Window | None
    log: Sequence[Entry]
    about: str

    def report(self, alpha: float | None) -> DriftReport:
        """The verdict of all tests. alpha: of a promise (promise.level); None: drift.alpha."""
        package = self.champion.package
        says = self.labels.says if self.labels else feedback.NOTHING
        of_spans = {count: self._tested(one) for count, one in self._spans().items()}
        found = promise.over_spans(
            self.drift, alpha, self._tested(self._grouped), of_spans, says.found
        )
        # Of a package that was tampered with nothing is said: it raises.
        features_ND, scores_NC = self.mine.features_ND, self.mine.scores_NC
        cost = severity.severity(package.severity(), scores_NC, features_ND, self.run.seed)
        left_out = _not_compared(package, self.reference, self.source, self._grouped, self.watch)
        spent = promise.too_little(self.watch, alpha)
        notes = (*spent, *found.notes, *left_out, *says.notes)
        return replace(found, severity=cost, feedback=says, notes=notes)

    @cached_property
    def labels(self) -> Came | None:
        """The labels that came for these images and for those of earlier windows; None: none."""
        rows = self._checks if self._number and self.log else []
        before = feedback_rows.before(
            self.log, rows, self.champion, self._number, self.watch.feedback
        )
        return feedback_rows.gather(
            *(self.run, self.watch, self.name, self.champion, self.source, self.mine),
            before,
            self.about,
        )

    @cached_property
    def reference(self) -> Reference:
        return self.champion.package.reference()

    @property
    def _number(self) -> int:
        """Of the window; 0 for a batch that was named by its version."""
        return self.window.number if self.window is not None else 0

    @cached_property
    def _checks(self) -> Sequence[Mapping[str, Any]]:
        return records.checks(self.run, self.watch).rows

    @cached_property
    def _known(self) -> Known:
        """With its domains, which are clusters where nobody named them: found once."""
        return known(self.champion.package, self.reference)

    @cached_property
    def _grouped(self) -> Batch:
        return self._with_groups(self.mine)

    def _with_groups(self, one: Batch) -> Batch:
        groups = by_image.groups(self.champion.package, self.reference, self.source, one)
        return replace(one, groups=groups)

    def _tested(self, one: Batch) -> Callable[[DriftConfig], DriftReport]:
        """The tests of one batch against the reference, with the settings that they get."""
        package, reference, ours = self.champion.package, self.reference, self._known.seen
        theirs = Seen(
            labels_of(package, one.scores_NC),
            one.looks_NK,
            groups=one.groups,
            arrived_N=by_image.arrived(self.watch.arrived, self.source, one),
        )
        embeddings = (reference.features_ND, one.features_ND)
        scores = (reference.scores_NC, one.scores_NC)
        return lambda cfg: detect(*embeddings, *scores, cfg, self.run.seed, ours, theirs)

    def _spans(self) -> dict[int, Batch]:
        """The images of the last checks that are tested together, by the number of checks."""
        horizon = self.watch.horizon
        if horizon is None or not horizon.spans or not self._number:
            return {}
        by = (self.champion.model, self.champion.seal)
        most = max(horizon.spans) - 1
        before = spans.earlier(self.log, self._checks, *by, self._number, most)
        return spans.together(
            self._grouped, before, self._earlier, horizon.spans, self.drift.max_rows
        )

    def _earlier(self, entry: Entry) -> Batch:
        """An earlier window, with the groups that its images had: they may have left the table, or
        it may have given their ids to others. Raises DataError where nobody knows them."""
        options = self.source.storage_options
        one = read_batch(self.mine.version, entry.predictions, entry.prediction, options)
        if self._grouped.groups is None:
            return one
        table = ImageTable.open(self.source)
        then = table.pin(entry.version)
        one = self._with_groups(replace(one, version=then))
        # A table that was restored from a backup has the number again, with other rows.
        same = between.state(table, then, self.source.where) == entry.state
        if one.groups is None or not same:
            raise DataError(f"{then} does not say the groups of the images of {entry.window}")
        return one


def known(package: Package, reference: Reference) -> Known:
    """The reference of a champion's package, as detectors see it."""
    seen = Seen(
        labels_of(package, reference.scores_NC),
        reference.looks_NK,
        by_domain.names(reference.domains, reference.features_ND),
        reference.groups,
    )
    return Known(reference.features_ND, reference.scores_NC, seen)


def labels_of(package: Package, scores_NC: np.ndarray) -> list[str] | None:
    """The predicted classes; None of a model that predicts numbers."""
    return None if package.task.kind in NUMERIC else package.task.predictions(scores_NC)


def _not_compared(
    package: Package, reference: Reference, source: TableConfig, mine: Batch, watch: WatchConfig
) -> list[str]:
    """What of the batch or of its reference the tests could not take, for people."""
    notes = []
    kept = package.info.get("config", {}).get("registry", {})
    for name in ("domain", "group"):
        asked = getattr(watch, name)
        # A champion keeps what was named when it was registered.
        if asked and not kept.get(name):
            notes.append(
                f"watch.{name}={asked} has no effect: the champion was registered without it. The "
                "command that trained it, with this setting, registers a version that has it"
            )
    if mine.broken:
        of = mine.broken + len(mine.ids)
        notes.append(f"{mine.broken} of {of} images have no prediction (broken): they are left out")
    images = list(zip(mine.ids, mine.sha256, strict=True))
    is_known_N = by_image.learned_from(package, source, mine.version, images)
    if is_known_N is not None and is_known_N.any():
        notes.append(
            f"the champion has learned from {int(is_known_N.sum())} of these {len(images)} images: "
            "it is surer of them than of others, which may look like drift"
        )
    if reference.groups is not None and mine.groups is None:
        column = package.info["config"].get("registry", {}).get("group")
        notes.append(
            f"the reference has groups by {column!r}, and the batch's table has no such column: "
            "its images are taken for independent, so neighbours of one group may look like drift"
        )
    return notes
