"""What verbs return that write rows into Delta tables: ingest, clean, and predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from raypipe.costs.spent import Spent
from raypipe.serve.batch import PredictResult
from raypipe.serve.stream import StreamResult
from raypipe.tables.clean import CleanResult
from raypipe.tables.ingest import IngestResult
from raypipe.work.result import Facts, Result, prepared_from

COUNTS = (
    "seen accepted present dropped other_split returned relabelled labels_removed duplicates "
    "quarantined reasons unlabelled splits"
)


@dataclass(frozen=True, repr=False)
class Ingested(Result):
    """An ingest, or with `dry_run` how its source was understood."""

    table: str
    done: IngestResult | None
    understood: Mapping[str, Any]

    def facts(self) -> Facts:
        done = self.done
        # A dry run: nothing was counted, because nothing was read.
        if done is None:
            return {**self.understood, "table": f"{self.table}: nothing was written"}
        return {
            "table": done.version,
            "accepted": done.accepted,
            "already there": done.present,
            **_if_any("of these dropped by an earlier cleaning", done.dropped),
            **_if_any("of these in another split, where they stay", done.other_split),
            **_if_any("back after an earlier cleaning by other rules", done.returned),
            "relabelled": done.relabelled,
            **_if_any("of these without a label now", done.labels_removed),
            "duplicates": done.duplicates,
            "quarantined": done.reasons or 0,
            "unlabelled": done.unlabelled,
            "splits": done.splits,
        }

    def summary(self) -> Facts:
        if self.done is None:
            return {"understood": self.understood, "dry_run": True}
        # Scripts know these names; they are those of IngestResult.
        counts = {name: getattr(self.done, name) for name in COUNTS.split()}
        return {"table": str(self.done.version)} | counts


def _if_any(name: str, count: int) -> dict[str, int]:
    """A line, if there is something to count."""
    return {name: count} if count else {}


@dataclass(frozen=True, repr=False)
class Cleaned(Result):
    """A cleaning, and the tag of the version without the dropped rows."""

    done: CleanResult
    tag: str

    def facts(self) -> Facts:
        done = self.done
        return {
            "looked at": f"{done.images} images of {done.raw}",
            "found": done.counts or "nothing",
            "dropped": done.dropped,
            f"tag {self.tag}": done.clean,
        }

    def summary(self) -> Facts:
        done = self.done
        return {
            "table": str(done.clean),
            "images": done.images,
            "dropped": done.dropped,
            "verdicts": done.counts,
        }


@dataclass(frozen=True, repr=False)
class Predicted(Result):
    """Predictions of a table; `done.out` is the table that holds them."""

    done: PredictResult
    spent: Spent

    def key(self) -> str:
        return self.done.key

    def facts(self) -> Facts:
        done = self.done
        return {
            "model": done.model,
            "images": f"{done.images} of {done.table}",
            **prepared_from(done.table, "prepared from"),
            "labels": done.labels,
            **({"without a prediction": done.broken} if done.broken else {}),
            **({"new": f"{done.made} since v{done.since}"} if done.since is not None else {}),
            "predictions": done.out,
            **self.spent.facts(),
        }

    def summary(self) -> Facts:
        done = self.done
        return {
            "predictions": str(done.out),
            "model": done.model,
            "table": str(done.table),
            **prepared_from(done.table),
            "images": done.images,
            "broken": done.broken,
            "labels": done.labels,
            "made": done.made,
            "since": done.since,
            "spent": self.spent.summary(),
        }


@dataclass(frozen=True, repr=False)
class Followed(Result):
    """A stream that was stopped, or had nothing left to do."""

    done: StreamResult

    def facts(self) -> Facts:
        done = self.done
        return {
            "model": done.model or "–",
            "table": done.table if done.version is None else f"{done.table}@v{done.version}",
            "images": f"{done.rows} in {done.micro_batches} micro-batches",
            "predictions": done.out,
        }

    def summary(self) -> Facts:
        return asdict(self.done)
