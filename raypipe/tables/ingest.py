"""Images from anywhere -> verified rows of a Delta table, exactly once.

`sources` lists candidates, `verify` reads and decodes them in parallel, and this driver decides in the source's order what is
new, which family and split it belongs to, and commits. What does not decode goes to a quarantine table with the reason and its
bytes, so nothing is lost.

Exactly once: an image's id is the sha256 of its bytes in the source, so the same ingest again, or after a kill, adds only what
is missing. A batch of rows is one commit on top of the version that was searched for its ids (`commits`): when another ingest
got in between, the batch is decided again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable
from pydantic import Field, field_validator

from raypipe.cluster.connect import ClusterConfig
from raypipe.config import Section
from raypipe.errors import DataError
from raypipe.images import decode
from raypipe.tables import scan, split, verdicts, verify
from raypipe.tables.commits import Moved, append_once, batch_id
from raypipe.tables.fragment import Options
from raypipe.tables.sources import Listed, Part, SourceConfig, candidates, understood
from raypipe.tables.sources.fence import ROOTS
from raypipe.tables.table import SCHEMA, ImageTable, TableConfig, TableVersion, resolve, told

ROWS_PER_COMMIT = 20_000
# A commit is a sixteenth of the source within these limits: nothing overlaps the writing of the last (128 MB of 300: 10 %).
BYTES_PER_COMMIT = 32 * 2**20, 128 * 2**20  # twice that waits in memory: one batch is written, the next collected
ATTEMPTS = 20  # at one commit, when others keep coming first
STATISTICS: dict[str, str | None] = {"delta.dataSkippingStatsColumns": "image_id,label,split,source"}
QUARANTINE = pa.schema(
    [(n, pa.string()) for n in ("image_id", "reason", "detail", "path", "source", "label")] + [("image", pa.binary())]
)

Progress = Callable[[int, int], None]


class IngestConfig(Section):
    """What to ingest, under which source name, how to split it, what to store (`max_side` in pixels), and who does the work.

    splits: shares, which hold on average; with `stratify`, in every label, but for an image or two. `seed` draws others.
    `dry_run`: tell what the source was understood as, and write nothing.
    `workers`: Ray tasks at a time; 0 means `threads` of this process (null: one a core); auto chooses by the number of images.
    """

    source: SourceConfig = Field(default=SourceConfig(), alias="from")
    name: str = "ingest"
    share: tuple[float, float] = (0.0, 1.0)
    splits: dict[str, float] = Field(default={"train": 0.7, "val": 0.15, "test": 0.15})
    stratify: bool = False
    seed: int = 0
    near_bits: int = Field(default=12, ge=0, lt=16)
    formats: tuple[decode.Format, ...] = Field(default=decode.FORMATS, min_length=1)
    max_pixels: int = Field(default=decode.MAX_PIXELS, gt=0)
    max_side: int | None = Field(default=None, ge=16)
    quality: int = Field(default=90, ge=1, le=100)
    dry_run: bool = False
    workers: int | Literal["auto"] = "auto"
    threads: int | None = Field(default=None, ge=1)

    @field_validator("splits")
    @classmethod
    def _shares(cls, splits: dict[str, float]) -> dict[str, float]:
        if not splits or any(s <= 0 for s in splits.values()):
            raise ValueError("splits is a mapping of names to positive shares, like {train: 0.7, val: 0.15, test: 0.15}")
        return splits

    @field_validator("workers")
    @classmethod
    def _workers(cls, workers: int | str) -> int | str:
        if isinstance(workers, int) and workers < 0:
            raise ValueError("workers is auto, 0 for threads in this process, or a number of Ray tasks")
        return workers


@dataclass(frozen=True)
class IngestResult:
    """What happened to every candidate: accepted + present + duplicates + quarantined == seen."""

    version: TableVersion
    seen: int
    accepted: int
    present: int
    duplicates: int
    quarantined: int
    reasons: dict[str, int]
    unlabelled: int
    splits: dict[str, int]


@dataclass
class _Counts:
    present: int = 0
    duplicates: int = 0
    unlabelled: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    splits: Counter[str] = field(default_factory=Counter)

    def add(self, other: _Counts) -> None:
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))


@dataclass
class _Held:
    """What the table holds at `base` (None: there is no table), and which ids this run has added. `strata` where splits are
    stratified."""

    base: DeltaTable | None
    known: set[str]
    families: split.Families
    strata: split.Strata | None
    mine: set[str] = field(default_factory=set)


def ingest(
    table: TableConfig,
    cfg: IngestConfig,
    progress: Progress = lambda done, total: None,
    cluster: ClusterConfig = ClusterConfig(),  # noqa: B008  (frozen)
    say: Callable[[dict[str, Any]], None] = lambda facts: None,
) -> IngestResult:
    """Add what `cfg.source` holds and the table lacks; `progress(done, total)` counts candidates.

    `say` is told what the source was understood as, before anything is done (`understand`).

    Raises DataError before anything is written when the source is wrong, and after filling the quarantine when no image
    at all was readable.
    """
    listed, parts, facts = understand(cfg)
    say(facts)
    total = sum(len(p.candidates) for p in parts)
    uri, options = resolve(table.uri), table.storage_options
    why = told(f"ingest {cfg.name}", listed.lineage)
    held, counts = _look(uri, cfg, options), _Counts()
    verifier = verify.Verifier(cfg.formats, cfg.max_pixels, cfg.max_side, cfg.quality, frozenset(held.known))
    stream = verify.stream(verifier, parts, cfg.workers, cfg.threads or verify.cores(), cluster)

    def settle(batch: list[pa.Table]) -> _Counts:
        _quarantine(uri, batch, cfg.name, options)
        return _add(uri, batch, cfg, held, why, options)

    with ThreadPoolExecutor(1) as writer:  # one batch is written while the next is verified: a fifth of the time
        written: Future[_Counts] | None = None
        for batch in _batches(stream, _commit_bytes(parts), lambda done: progress(done, total)):
            counts.add(written.result() if written else _Counts())
            written = writer.submit(settle, batch)
        counts.add(written.result() if written else _Counts())
    if held.base is None and not held.known:
        raise DataError(
            f"None of {total} files is a readable image",
            got=dict(counts.reasons),
            rule=f"Formats: {', '.join(cfg.formats)}, every row decodable",
            fix=f"See {quarantine_uri(uri)} for each reason" + (f". {ROOTS}" if "outside" in counts.reasons else ""),
        )
    return IngestResult(
        TableVersion(uri, held.base.version()) if held.base else ImageTable.open(table).pin(),
        total,
        counts.splits.total(),
        counts.present,
        counts.duplicates,
        counts.reasons.total(),
        dict(counts.reasons),
        counts.unlabelled,
        dict(counts.splits),
    )


def understand(cfg: IngestConfig) -> tuple[Listed, list[Part], dict[str, Any]]:
    """What the source holds, the parts of it that this ingest takes, and for people what they were taken for.

    Reads names and labels, no image, and writes nothing. Raises DataError when the source is wrong.
    """
    listed = candidates(cfg.source)
    parts = _in_share(listed.parts, cfg.share)
    facts = understood(cfg.source, listed.layout, parts)
    if facts["splits"] == "drawn":
        facts["splits"] = {"drawn": cfg.splits}
    return listed, parts, facts


def quarantine_uri(uri: str) -> str:
    return resolve(uri).rstrip("/") + "_quarantine"


def _in_share(parts: list[Part], share: tuple[float, float]) -> list[Part]:
    low, high = share
    if share == (0.0, 1.0):
        return parts
    # By name, not by content: a share is chosen before any file is read. The salt keeps it independent of the split.
    return [Part(p.read, [c for c in p.candidates if low <= split.position(c.path, "share") < high], p.rows) for p in parts]


def _look(uri: str, cfg: IngestConfig, options: Options) -> _Held:
    """Raises DataError for a table that ingest did not make."""
    known: set[str] = set()
    families, strata = split.Families(cfg.near_bits), split.Strata() if cfg.stratify else None
    if not ImageTable.exists(uri, options):
        return _Held(None, known, families, strata)
    opened = ImageTable.open(TableConfig(uri=uri, storage_options=options))
    base = opened.delta()
    opened.require(base, *(n for n in SCHEMA.names if n != "sha256"))  # which older tables lack: the next commit adds it
    columns = ["image_id", "look", "family", "label", "split"]
    for row in scan.rows(opened, TableVersion(uri, base.version()), columns).to_pylist():
        known.add(row["image_id"])
        families.join(row["image_id"], bytes.fromhex(row["look"]), row["family"])
        if strata:
            strata.add(row["family"], row["label"], row["split"])
    # What cleaning dropped must not come back with the next ingest.
    return _Held(base, known | verdicts.dropped_ids(uri, None, options), families, strata)


def _commit_bytes(parts: list[Part]) -> int:
    low, high = BYTES_PER_COMMIT
    return min(high, max(low, sum(c.bytes for p in parts for c in p.candidates) // 16))


def _batches(stream: Iterable[pa.Table], most_bytes: int, progress: Callable[[int], None]) -> Iterator[list[pa.Table]]:
    """Verified chunks, as many as make one commit. Where they are cut depends on the source alone."""
    batch: list[pa.Table] = []
    done = rows = size = 0
    for chunk in stream:
        batch.append(chunk)
        done, rows, size = done + len(chunk), rows + len(chunk), size + chunk.nbytes
        progress(done)
        if rows >= ROWS_PER_COMMIT or size >= most_bytes:
            yield batch
            batch, rows, size = [], 0, 0
    if batch:
        yield batch


def _add(uri: str, batch: list[pa.Table], cfg: IngestConfig, held: _Held, why: CommitProperties, options: Options) -> _Counts:
    """Commit what is new in the batch; `held` is what the table holds afterwards."""
    for _ in range(ATTEMPTS):
        rows, counts, strata = _decide(batch, cfg, held)
        ids = rows["image_id"].to_pylist()
        try:
            if ids:
                held.base = append_once(uri, rows, batch_id(ids), held.base, why, STATISTICS, options)
            held.mine |= set(ids)
            held.strata = strata
            return counts
        except Moved:
            now = _look(uri, cfg, options)
            held.base, held.families, held.strata = now.base, now.families, now.strata
            held.known |= now.known - held.mine
    raise DataError(f"Others keep writing to {uri}", got=f"{ATTEMPTS} attempts", fix="Run again when they are done")


def _decide(batch: list[pa.Table], cfg: IngestConfig, held: _Held) -> tuple[pa.Table, _Counts, split.Strata | None]:
    """The rows of images that are new, complete with family and split, what became of the others, and the strata with them."""
    counts, fresh, accepted = _Counts(), set[str](), []
    strata, salt = held.strata and held.strata.copy(), str(cfg.seed) if cfg.seed else ""
    for chunk in batch:
        keep, more = [], []
        for i, row in enumerate(chunk.select(["image_id", "reason", "look", "given", "label"]).to_pylist()):
            image_id = row["image_id"]
            if row["reason"]:
                counts.reasons[row["reason"]] += 1
            elif image_id in held.mine or image_id in fresh:
                counts.duplicates += 1
            elif image_id in held.known:
                counts.present += 1
            else:
                fresh.add(image_id)
                family = held.families.join(image_id, bytes.fromhex(row["look"]))
                drawer = partial(strata.draw, label=row["label"]) if strata else split.draw
                drawn = row["given"] or drawer(family, fractions=cfg.splits, salt=salt)
                if strata:
                    strata.add(family, row["label"], drawn)
                counts.unlabelled += row["label"] is None
                counts.splits[drawn] += 1
                keep.append(i)
                more.append({"split": drawn, "source": cfg.name, "family": family})
        kept = chunk if len(keep) == len(chunk) else chunk.take(pa.array(keep, pa.int64()))
        added = pa.Table.from_pylist(more, pa.schema([SCHEMA.field(n) for n in ("split", "source", "family")]))
        accepted.append(pa.table([(added if n in added.column_names else kept)[n] for n in SCHEMA.names], schema=SCHEMA))
    return pa.concat_tables(accepted), counts, strata


def _quarantine(uri: str, batch: list[pa.Table], name: str, options: Options) -> None:
    """Keep what was rejected, once for each path and content."""
    target = quarantine_uri(uri)
    rejected: dict[tuple[str, str | None], dict[str, Any]] = {
        (row["path"], row["image_id"]): {n: row.get(n) for n in QUARANTINE.names} | {"source": name}
        for chunk in batch
        for row in chunk.filter(chunk["reason"].is_valid()).to_pylist()
    }
    for _ in range(ATTEMPTS if rejected else 0):
        base, new = None, rejected
        if ImageTable.exists(target, options):
            there = ImageTable(target, storage_options=options)
            base = there.delta()
            have = scan.rows(there, TableVersion(target, base.version()), ["path", "image_id"]).to_pylist()
            new = {key: row for key, row in rejected.items() if key not in {(r["path"], r["image_id"]) for r in have}}
        try:
            if new:
                rows = pa.Table.from_pylist(list(new.values()), QUARANTINE)
                append_once(target, rows, batch_id(new), base, told("quarantine"), None, options)
            return
        except Moved:
            continue
    if rejected:
        raise DataError(f"Others keep writing to {target}", got=f"{ATTEMPTS} attempts", fix="Run again when they are done")
