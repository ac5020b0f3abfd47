"""How a version came to be: what its package says beside its weights, under `made`.

Rows, cleaning, code, packages, hardware, judgement, cost, and what called for it. The package's
seal covers all of it. `raypipe report model` reads it, and checks what can be checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

import numpy as np

from raypipe.cluster.usage import Nodes
from raypipe.feed.dataset import Pinned
from raypipe.registry import made_by
from raypipe.registry.card import Judged
from raypipe.registry.versions import ModelVersion
from raypipe.tables import cleaned, identity
from raypipe.train import learned
from raypipe.train.job import TrainJob, TrainResult
from raypipe.train.start import learned_by
from raypipe.train.unseen import Unseen

MADE = "made"  # its name in package.json
FORMAT = 1


@dataclass(frozen=True)
class CalledFor:
    """Why a version was made.

    verb: that made it. reason: in words. parent: the champion that it is to replace, whose settings
    it starts from. evidence: what called for it, as of a drift check its key and its p-value.
    device_s: of all trainings that led to it; None: of its own alone. heads: how many of them were
    heads of a first answer. start: what it began with.
    """

    verb: str
    reason: str
    parent: ModelVersion | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    device_s: float | None = None
    heads: int = 0
    start: Start = field(default_factory=lambda: Start())

    def behind(self, folder: str | None) -> CalledFor:
        """With the rows behind the weights of the package that `train.start_from` names."""
        rows_N2 = learned.united(self.start.inherited_N2, learned_by(folder))
        return replace(self, start=replace(self.start, inherited_N2=rows_N2))


@dataclass(frozen=True)
class Start:
    """What a version began with.

    weights: where they came from, in words. version: whose they are; None: nobody's. inherited_N2:
    the rows that they had learned from (learned.py). replay: how many old rows were trained on
    beside new ones; {}: all rows.
    """

    weights: str = ""
    version: ModelVersion | None = None
    inherited_N2: np.ndarray = field(default_factory=lambda: learned.NONE_N2, repr=False)
    replay: Mapping[str, Any] = field(default_factory=dict)

    def facts(self, job: TrainJob) -> dict[str, Any]:
        """As a package keeps it."""
        words = self.weights
        if not words:
            words = "pretrained" if job.model.pretrained else "random"
            words = f"{job.train.start_from}" if job.train.start_from else words
        return {
            "weights": words,
            "version": str(self.version) if self.version else "",
            "seal": self.version.seal if self.version else "",
            # Identities, and not rows: of a row of a prepared table there are two (learned.py).
            "inherited": len(self.inherited_N2),
            "replay": dict(self.replay),
        }


def facts(
    job: TrainJob,
    pinned: Pinned,
    result: TrainResult,
    unseen: Unseen,
    judged: Judged,
    nodes: Nodes,
    called_for: CalledFor,
    trials: int,
) -> dict[str, Any]:
    """What the package of this result says under `made`; plain values, fit for JSON."""
    parent = called_for.parent
    sizes = [asdict(node.size) for _, node in sorted(nodes.items())]
    return {
        "format": FORMAT,
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "table_id": pinned.version.table_id,
        # Of a prepared table: its source's; else "".
        "source_table_id": pinned.version.origin_id,
        "rows": rows_of(job, pinned),
        "start": called_for.start.facts(job),
        "cleaning": asdict(cleaned.of(pinned.table, pinned.version)),
        "code": made_by.code(),
        "packages": made_by.packages(),
        "machine": made_by.machine(),
        # Of the nodes that were recorded; a short training has none.
        "nodes": sizes,
        "judged": {
            "split": judged.split,
            "caution": judged.caution,
            "images": judged.quality.images,
            "ids_sha256": identity.of_ids(unseen.reference.ids).ids_sha256,
            "metrics": judged.quality.metrics,
            "slices": [asdict(part) for part in judged.slices],
        },
        "spent": {
            "seconds": result.seconds,
            "device_s": result.device_s,
            "all_device_s": called_for.device_s,
            "trials": trials - called_for.heads,
            "heads": called_for.heads,
        },
        "called_for": {
            "verb": called_for.verb,
            "reason": called_for.reason,
            "parent": str(parent) if parent else "",
            "parent_seal": parent.seal if parent else "",
            "evidence": dict(called_for.evidence),
        },
    }


def rows_of(job: TrainJob, pinned: Pinned) -> dict[str, dict[str, Any]]:
    """The labelled rows of each split of the job: their number, and the hash of their ids."""
    found = {}
    splits = {"train": job.feed.train, "val": job.feed.val, "test": job.feed.test}
    for role, split in splits.items():
        # A split without rows may be no value that the column can have: `test` among numbers.
        rows = identity.of_ids([])
        if pinned.counts[split]:
            kind, where = pinned.task.kind, pinned.rows_of(split)
            rows = identity.labelled(pinned.table, pinned.version, where, kind)
        found[role] = {"split": split, **asdict(rows)}
        # feed.leave_out takes rows out of a split.
        if pinned.counts[split] < rows.rows:
            found[role]["used"] = pinned.counts[split]
    return found
