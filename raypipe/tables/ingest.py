"""Images from anywhere -> verified rows of a Delta table, exactly once.

`sources` lists candidates. `verify` reads and decodes them in parallel. This driver takes the
verified chunks in the source's order and collects them into batches; a batch is one commit. For
each batch, in a thread of its own:
1. `relabel` notes the labels, and rejects files that contradict earlier ones.
2. `quarantine` keeps the rejected files with their reason and bytes, so nothing is lost.
3. `ingest_state` decides which images are new, and their near-duplicate group and split.
4. The new rows are committed directly on the version that step 3 knew (`commits`). If another
   writer committed first, the state is read again and step 3 repeated.

Exactly once: an image's id is the sha256 of its bytes in the source. So the same ingest again, or
after a kill, adds only what is missing. Labels of images that the table holds already are changed
at the end (`relabel`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from raypipe.cluster.connect import ClusterConfig
from raypipe.errors import DataError
from raypipe.tables import quarantine, relabel, retries, split, verify
from raypipe.tables.address import resolve
from raypipe.tables.commits import Moved, append_once
from raypipe.tables.ingest_config import IngestConfig
from raypipe.tables.ingest_state import (
    Counts,
    State,
    decide,
    placed_in,
    read_state,
    with_ids,
)
from raypipe.tables.provenance import commit_properties
from raypipe.tables.quarantine import uri_of as quarantine_uri
from raypipe.tables.relabel import Labels
from raypipe.tables.sources import Listed, Part, candidates, understood
from raypipe.tables.sources.fence import ROOTS
from raypipe.tables.table import ImageTable, TableConfig, TableVersion

__all__ = ["IngestConfig", "IngestResult", "ingest", "quarantine_uri", "understand"]

log = logging.getLogger("raypipe")
ROWS_PER_COMMIT = 20_000
# A commit is a sixteenth of the source within these limits. Nothing overlaps the writing of the
# last one, and that costs 10 % of the time at 128 MB of 300. Twice the size waits in memory: one
# batch is written while the next is collected.
BYTES_PER_COMMIT = (32 * 2**20, 128 * 2**20)
# The log keeps minima and maxima of these columns only.
STATISTICS: dict[str, str | None] = {
    "delta.dataSkippingStatsColumns": "image_id,label,split,source"
}

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class IngestResult:
    """What happened to every candidate: accepted + present + duplicates + quarantined == seen.

    A file whose image another file of this ingest has is a duplicate, also if the table has it.

    `relabelled` counts rows that were in the table before and got a label, or another one, or lost
    theirs (`labels_removed`). Of the present images `dropped` are not in the table, because an
    earlier cleaning dropped them, and `other_split` are in another split than this source gives: an
    image never moves. `returned` counts accepted images that a cleaning by other rules had dropped.
    """

    version: TableVersion
    seen: int
    accepted: int
    present: int
    duplicates: int
    quarantined: int
    reasons: dict[str, int]
    unlabelled: int
    splits: dict[str, int]
    relabelled: int = 0
    labels_removed: int = 0
    dropped: int = 0
    other_split: int = 0
    returned: int = 0


def ingest(
    table: TableConfig,
    cfg: IngestConfig,
    progress: Progress = lambda done, total: None,
    cluster: ClusterConfig = ClusterConfig(),  # noqa: B008  (frozen)
    say: Callable[[dict[str, Any]], None] = lambda facts: None,
    policies: set[str] | None = None,
) -> IngestResult:
    """Add the images of `cfg.source` that the table lacks, and update the labels of those it has.

    `progress(done, total)` counts candidates. `say` gets the description of the source
    (`understand`) before the work begins. Images that cleaning dropped under one of these
    `policies` (`clean.known_as`; None: under any) are not added again.

    Raises DataError when the source is wrong, before anything is written; when no image is
    readable, after filling the quarantine; and when a split would stay empty or without a class,
    before that batch is written.
    """
    listed, parts, facts = understand(cfg)
    say(facts)
    run = _Ingest(table, cfg, listed, parts, policies)
    run.add_all(progress, cluster)
    base = run.state.base
    if base is None:
        raise _nothing_readable(cfg, run)
    version, relabelled, removed = run.relabel(TableVersion(run.uri, base.version()))
    counts = run.counts
    _warn(cfg, run.state, counts)
    return IngestResult(
        version=version,
        seen=run.total,
        accepted=counts.splits.total(),
        present=counts.present,
        duplicates=counts.duplicates,
        quarantined=counts.reasons.total(),
        reasons=dict(counts.reasons),
        unlabelled=counts.unlabelled,
        splits=dict(counts.splits),
        relabelled=relabelled,
        labels_removed=removed,
        dropped=counts.dropped,
        other_split=counts.other_split,
        returned=counts.returned,
    )


def understand(cfg: IngestConfig) -> tuple[Listed, list[Part], dict[str, Any]]:
    """The source's candidates, the parts that this ingest takes, and a description for people.

    Reads names and labels, no image, and writes nothing. Raises DataError when the source is wrong.
    """
    listed = candidates(cfg.source)
    if cfg.share != (0.0, 1.0) and not listed.steady:
        raise DataError(
            "A share of this table would be other rows after each table optimize",
            got=f"ingest.share={list(cfg.share)}",
            rule="A share goes by path; without a column path a row is named by its place",
            fix="Pin ingest.from.version, or choose rows with ingest.from.where",
        )
    parts = _in_share(listed.parts, cfg.share)
    if not any(part.candidates for part in parts):
        raise DataError(
            "This share of the source holds no file",
            got=f"ingest.share={list(cfg.share)}",
            rule="A file belongs to the share that the hash of its path falls into",
            fix="Take a larger share",
        )
    facts = understood(cfg.source, listed.layout, parts)
    if facts["splits"] == "drawn":
        facts["splits"] = {"drawn": cfg.splits}
    return listed, parts, facts


class _Ingest:
    """One run of `ingest`: its inputs, the state of the table, and the counts so far."""

    def __init__(
        self,
        table: TableConfig,
        cfg: IngestConfig,
        listed: Listed,
        parts: list[Part],
        policies: set[str] | None,
    ) -> None:
        self.table, self.cfg, self.parts, self.policies = table, cfg, parts, policies
        self.uri = resolve(table.uri)
        self.options = table.storage_options
        self.lineage = listed.lineage
        self.total = sum(len(part.candidates) for part in parts)
        self.labels = Labels()
        self.counts = Counts()
        self.state = self.read_state()

    def read_state(self) -> State:
        """What the table holds now."""
        return read_state(self.uri, self.cfg, self.options, self.policies, self.total)

    def add_all(self, progress: Progress, cluster: ClusterConfig) -> None:
        """Verify all candidates and commit them in batches."""
        cfg = self.cfg
        known = frozenset(self.state.known) | self.state.stored_as.keys()
        verifier = verify.Verifier(cfg.formats, cfg.max_pixels, cfg.max_side, cfg.quality, known)
        threads = cfg.threads or verify.cores()
        chunks = verify.stream(verifier, self.parts, cfg.workers, threads, cluster)
        batches = _batches(
            chunks, _commit_bytes(self.parts), lambda done: progress(done, self.total)
        )
        # One batch is written while the next is verified: that saves a fifth of the time.
        with ThreadPoolExecutor(1) as writer:
            written: Future[Counts] | None = None
            for batch in batches:
                if written is not None:
                    self.counts.add(written.result())
                written = writer.submit(self.add, batch)
            if written is not None:
                self.counts.add(written.result())

    def add(self, batch: list[pa.Table]) -> Counts:
        """Quarantine the rejected files of a batch and commit the new images; returns the counts of
        this batch.
        """
        batch = self.labels.add([with_ids(chunk, self.state) for chunk in batch])
        quarantine.keep(self.uri, batch, self.cfg.name, self.options)
        why = commit_properties(f"ingest {self.cfg.name}", self.lineage)
        state = self.state
        for _ in range(retries.ATTEMPTS):
            decision = decide(batch, self.cfg, state)
            _refuse_gaps(
                self.cfg,
                drawn=state.drawn + decision.counts.drawn,
                placed=state.placed + placed_in(decision.rows),
            )
            base, rows = state.base, decision.rows
            ids = rows["image_id"].to_pylist()
            try:
                if ids:
                    base = append_once(self.uri, rows, base, why, STATISTICS, self.options)
            except Moved:
                state.renew(self.read_state())
                continue
            state.landed(decision, base)
            return decision.counts
        raise retries.busy(self.uri)

    def relabel(self, version: TableVersion) -> tuple[TableVersion, int, int]:
        """Update the labels of images that `version` held before this run.

        Returns the newest version, how many rows changed, and how many of them lost their label.
        """
        counts = self.counts
        if not (counts.present or counts.duplicates or counts.reasons[relabel.REASON]):
            # All images are new: each has the label that it came with.
            return version, 0, 0
        opened = ImageTable(self.uri, storage_options=self.options)
        why = commit_properties(f"relabel by ingest {self.cfg.name}", self.lineage)
        after, relabelled, removed = relabel.apply(opened, self.labels, why)
        return (after, relabelled, removed) if relabelled else (version, 0, 0)


def _in_share(parts: list[Part], share: tuple[float, float]) -> list[Part]:
    """The parts with only the candidates in this share of the source."""
    low, high = share
    if share == (0.0, 1.0):
        return parts
    inside = []
    for part in parts:
        # By name, not by content: a share is chosen before any file is read. The salt keeps it
        # independent of the split.
        chosen = [c for c in part.candidates if low <= split.position(c.path, "share") < high]
        inside.append(Part(part.read, chosen, part.rows))
    return inside


def _commit_bytes(parts: list[Part]) -> int:
    """After so many bytes a batch is committed."""
    low, high = BYTES_PER_COMMIT
    total = 0
    for part in parts:
        total += sum(candidate.bytes for candidate in part.candidates)
    return min(high, max(low, total // 16))


def _batches(
    chunks: Iterable[pa.Table], most_bytes: int, progress: Callable[[int], None]
) -> Iterator[list[pa.Table]]:
    """Verified chunks, as many as make one commit. The cuts depend on the source alone."""
    batch: list[pa.Table] = []
    done = rows = size = 0
    for chunk in chunks:
        batch.append(chunk)
        done += len(chunk)
        rows += len(chunk)
        size += chunk.nbytes
        progress(done)
        if rows >= ROWS_PER_COMMIT or size >= most_bytes:
            yield batch
            batch, rows, size = [], 0, 0
    if batch:
        yield batch


def _refuse_gaps(cfg: IngestConfig, drawn: split.Placed, placed: split.Placed) -> None:
    """Raise DataError for a split that lacks images, or a class, when that cannot be chance.

    The cause is a large near-duplicate group.
    """
    gaps = split.missing(drawn, placed, cfg.splits)
    certain = [gap for gap in gaps if gap.chance < split.CERTAIN]
    if certain:
        raise DataError(
            f"A split would stay empty or lack a class: {'; '.join(map(str, certain[:3]))}",
            got=f"near_bits {cfg.near_bits}",
            rule="Images that look alike stay in one split, and here nearly all do; "
            "this batch was not written",
            fix="Set ingest.stratify=true, or ingest.near_bits=0 (only equal looks stay together), "
            "or give splits yourself (ingest.from.split_column)",
        )


def _warn(cfg: IngestConfig, state: State, counts: Counts) -> None:
    """Log gaps that may be chance or a small table, images that have look-alikes in another split,
    images of which a part is read, and images that are nearly black.
    """
    gaps = split.missing(state.drawn, state.placed, cfg.splits)
    if gaps:
        log.warning(
            "%s. ingest.stratify=true holds the shares in every class",
            "; ".join(map(str, gaps[:5])),
        )
    if state.groups.refused:
        log.warning(
            "%d images look like many others (more than half a split): their splits are drawn "
            "one by one, so an image may have a look-alike in another split",
            state.groups.refused,
        )
    if counts.between:
        log.warning(
            "%d images look like images of two splits: each is in the split of the nearest one, "
            "so it has a look-alike in another split",
            counts.between,
        )
    if counts.more:
        log.warning(
            "%d images have several pages or frames: only the first of each is read",
            counts.more,
        )
    if counts.dark:
        log.warning(
            "%d images are nearly black: their files have 16 bits, and no value reaches 4096. "
            "Stretch such values, as of a camera of 12 bits, to 16 bits before you ingest them",
            counts.dark,
        )


def _nothing_readable(cfg: IngestConfig, run: _Ingest) -> DataError:
    """The error for a source without a readable image and a table that does not exist."""
    reasons = dict(run.counts.reasons)
    fix = f"See {quarantine_uri(run.uri)} for each reason"
    if "outside" in reasons:
        fix += f". {ROOTS}"
    return DataError(
        f"None of {run.total} files is a readable image",
        got=reasons,
        rule=f"Formats: {', '.join(cfg.formats)}, every row decodable",
        fix=fix,
    )
