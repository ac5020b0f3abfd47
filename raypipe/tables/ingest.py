"""Images from anywhere -> verified rows of a Delta table, exactly once.

`sources` lists candidates, `verify` reads and decodes them in parallel, and this driver decides in the source's order what is
new, which family and split it belongs to, and commits. What does not decode goes to a quarantine table with the reason and its
bytes, so nothing is lost.

Exactly once: an image's id is the sha256 of its bytes in the source, so the same ingest again, or after a kill, adds only what
is missing. A batch of rows is one commit on top of the version that was searched for its ids (`commits`): when another ingest
got in between, the batch is decided again. What a source says of images that are there already is for `relabel`.
"""

from __future__ import annotations

import logging
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
from raypipe.tables import relabel, scan, split, verdicts, verify
from raypipe.tables.commits import Moved, append_once
from raypipe.tables.fragment import Options
from raypipe.tables.provenance import commit_properties
from raypipe.tables.retries import ATTEMPTS
from raypipe.tables.schema import SCHEMA
from raypipe.tables.sources import Listed, Part, SourceConfig, candidates, understood
from raypipe.tables.sources.fence import ROOTS
from raypipe.tables.table import ImageTable, TableConfig, TableVersion, resolve

log = logging.getLogger("raypipe")
ROWS_PER_COMMIT = 20_000
# A commit is a sixteenth of the source within these limits: nothing overlaps the writing of the last (128 MB of 300: 10 %).
BYTES_PER_COMMIT = (
    32 * 2**20,
    128 * 2**20,
)  # twice that waits in memory: one batch is written, the next collected
STATISTICS: dict[str, str | None] = {
    "delta.dataSkippingStatsColumns": "image_id,label,split,source"
}
QUARANTINE = pa.schema(
    [(n, pa.string()) for n in ("image_id", "reason", "detail", "path", "source", "label")]
    + [("image", pa.binary())]
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
            raise ValueError(
                "splits is a mapping of names to positive shares, like {train: 0.7, val: 0.15, test: 0.15}"
            )
        return splits

    @field_validator("workers")
    @classmethod
    def _workers(cls, workers: int | str) -> int | str:
        if isinstance(workers, int) and workers < 0:
            raise ValueError(
                "workers is auto, 0 for threads in this process, or a number of Ray tasks"
            )
        return workers


@dataclass(frozen=True)
class IngestResult:
    """What happened to every candidate: accepted + present + duplicates + quarantined == seen.

    `relabelled` counts rows that were there and got a label, or another one.
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


@dataclass
class _Counts:
    present: int = 0
    duplicates: int = 0
    unlabelled: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    splits: Counter[str] = field(default_factory=Counter)
    drawn: split.Placed = field(
        default_factory=Counter
    )  # of these, images whose split the source did not give

    def add(self, other: _Counts) -> None:
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))


@dataclass
class _Held:
    """What the table holds at `base` (None: there is no table), and what this run has added: ids, and images that were drawn.

    `placed` counts the table's images by label and split; `strata` where splits are stratified.
    """

    base: DeltaTable | None
    known: set[str]
    families: split.Families
    strata: split.Strata | None
    placed: split.Placed
    mine: set[str] = field(default_factory=set)
    drawn: split.Placed = field(default_factory=Counter)


def ingest(
    table: TableConfig,
    cfg: IngestConfig,
    progress: Progress = lambda done, total: None,
    cluster: ClusterConfig = ClusterConfig(),  # noqa: B008  (frozen)
    say: Callable[[dict[str, Any]], None] = lambda facts: None,
    policies: set[str] | None = None,
) -> IngestResult:
    """Add what `cfg.source` holds and the table lacks, and relabel what it labels anew.

    `progress(done, total)` counts candidates; `say` is told what the source was understood as, before anything is done
    (`understand`). What cleaning dropped under one of these `policies` (`clean.known_as`; None: under any) stays away.

    Raises DataError before anything is written when the source is wrong, after filling the quarantine when no image at all
    was readable, and before a batch is written that would leave a split empty or without a class.
    """
    listed, parts, facts = understand(cfg)
    say(facts)
    total = sum(len(p.candidates) for p in parts)
    uri, options = resolve(table.uri), table.storage_options
    why = commit_properties(f"ingest {cfg.name}", listed.lineage)
    look = partial(_look, uri, cfg, options, policies, total)
    held, counts, heard = look(), _Counts(), relabel.Heard()
    verifier = verify.Verifier(
        cfg.formats, cfg.max_pixels, cfg.max_side, cfg.quality, frozenset(held.known)
    )
    stream = verify.stream(verifier, parts, cfg.workers, cfg.threads or verify.cores(), cluster)

    def settle(batch: list[pa.Table]) -> _Counts:
        batch = heard.listen(batch)
        _quarantine(uri, batch, cfg.name, options)
        return _add(uri, batch, cfg, held, look, why, options)

    with ThreadPoolExecutor(
        1
    ) as writer:  # one batch is written while the next is verified: a fifth of the time
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
            fix=f"See {quarantine_uri(uri)} for each reason"
            + (f". {ROOTS}" if "outside" in counts.reasons else ""),
        )
    version = TableVersion(uri, held.base.version()) if held.base else ImageTable.open(table).pin()
    relabelled = 0
    if (
        counts.present or counts.duplicates or counts.reasons[relabel.REASON]
    ):  # else every image has the label it came with
        opened = ImageTable(uri, storage_options=options)
        after, relabelled = relabel.apply(
            opened,
            heard,
            cfg.name,
            commit_properties(f"relabel by ingest {cfg.name}", listed.lineage),
        )
        version = after if relabelled else version
    _warn(cfg, held)
    return IngestResult(
        version,
        total,
        counts.splits.total(),
        counts.present,
        counts.duplicates,
        counts.reasons.total(),
        dict(counts.reasons),
        counts.unlabelled,
        dict(counts.splits),
        relabelled,
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
    return [
        Part(
            p.read,
            [c for c in p.candidates if low <= split.position(c.path, "share") < high],
            p.rows,
        )
        for p in parts
    ]


def _look(
    uri: str, cfg: IngestConfig, options: Options, policies: set[str] | None, total: int
) -> _Held:
    """What the table holds now. Raises DataError for a table that ingest did not make."""
    known: set[str] = set()
    placed: split.Placed = Counter()
    strata = split.Strata() if cfg.stratify else None
    if not ImageTable.exists(uri, options):
        families = split.Families(cfg.near_bits, split.most_in_family(total, cfg.splits))
        return _Held(None, known, families, strata, placed)
    opened = ImageTable.open(TableConfig(uri=uri, storage_options=options))
    base = opened.delta()
    opened.require(
        base, *(n for n in SCHEMA.names if n != "sha256")
    )  # which older tables lack: the next commit adds it
    columns = ["image_id", "look", "family", "label", "split"]
    rows = scan.rows(opened, TableVersion(uri, base.version()), columns).to_pylist()
    families = split.Families(
        cfg.near_bits, split.most_in_family(max(total, len(rows)), cfg.splits)
    )
    for row in rows:
        known.add(row["image_id"])
        families.join(row["image_id"], bytes.fromhex(row["look"]), row["family"])
        placed[row["label"], row["split"]] += 1
        if strata:
            strata.add(row["family"], row["label"], row["split"])
    # What cleaning dropped must not come back with the next ingest.
    return _Held(
        base, known | verdicts.dropped_ids(uri, policies, options), families, strata, placed
    )


def _commit_bytes(parts: list[Part]) -> int:
    low, high = BYTES_PER_COMMIT
    return min(high, max(low, sum(c.bytes for p in parts for c in p.candidates) // 16))


def _batches(
    stream: Iterable[pa.Table], most_bytes: int, progress: Callable[[int], None]
) -> Iterator[list[pa.Table]]:
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


def _add(
    uri: str,
    batch: list[pa.Table],
    cfg: IngestConfig,
    held: _Held,
    look: Callable[[], _Held],
    why: CommitProperties,
    options: Options,
) -> _Counts:
    """Commit what is new in the batch; `held` is what the table holds afterwards."""
    for _ in range(ATTEMPTS):
        rows, counts, strata = _decide(batch, cfg, held)
        ids = rows["image_id"].to_pylist()
        placed = held.placed + Counter(
            zip(rows["label"].to_pylist(), rows["split"].to_pylist(), strict=True)
        )
        drawn = held.drawn + counts.drawn
        _refuse_gaps(cfg, drawn, placed)
        try:
            if ids:
                held.base = append_once(uri, rows, held.base, why, STATISTICS, options)
            held.mine |= set(ids)
            held.strata, held.placed, held.drawn = strata, placed, drawn
            return counts
        except Moved:
            now = look()
            held.base, held.families, held.strata, held.placed = (
                now.base,
                now.families,
                now.strata,
                now.placed,
            )
            held.known |= now.known - held.mine
    raise DataError(
        f"Others keep writing to {uri}",
        got=f"{ATTEMPTS} attempts",
        fix="Run again when they are done",
    )


def _refuse_gaps(cfg: IngestConfig, drawn: split.Placed, placed: split.Placed) -> None:
    """Raise DataError for a split that lacks images, or a class, when that cannot be luck: look-alikes hold it together."""
    gaps = [g for g in split.missing(drawn, placed, cfg.splits) if g.chance < split.CERTAIN]
    if gaps:
        raise DataError(
            f"A split would stay empty or lack a class: {'; '.join(map(str, gaps[:3]))}",
            got=f"near_bits {cfg.near_bits}",
            rule="Images that look alike stay in one split, and here nearly all do; this batch was not written",
            fix="Set ingest.stratify=true, or ingest.near_bits=0 (only equal looks stay together), or give splits yourself "
            "(ingest.from.split_column)",
        )


def _warn(cfg: IngestConfig, held: _Held) -> None:
    """Say what may be luck, or a small table."""
    if gaps := split.missing(held.drawn, held.placed, cfg.splits):
        log.warning(
            "%s. ingest.stratify=true holds the shares in every class",
            "; ".join(map(str, gaps[:5])),
        )
    if held.families.refused:
        log.warning(
            "%d images look like many others (more than half a split): their splits are drawn one by one, so an image may "
            "have a look-alike in another split",
            held.families.refused,
        )


def _decide(
    batch: list[pa.Table], cfg: IngestConfig, held: _Held
) -> tuple[pa.Table, _Counts, split.Strata | None]:
    """The rows of images that are new, complete with family and split, what became of the others, and the strata with them."""
    counts, fresh, accepted = _Counts(), set[str](), []
    strata, salt = held.strata and held.strata.copy(), str(cfg.seed) if cfg.seed else ""
    for chunk in batch:
        keep, more = [], []
        for i, row in enumerate(
            chunk.select(["image_id", "reason", "look", "given", "label"]).to_pylist()
        ):
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
                counts.drawn[row["label"], drawn] += not row["given"]
                keep.append(i)
                more.append({"split": drawn, "source": cfg.name, "family": family})
        kept = chunk if len(keep) == len(chunk) else chunk.take(pa.array(keep, pa.int64()))
        added = pa.Table.from_pylist(
            more, pa.schema([SCHEMA.field(n) for n in ("split", "source", "family")])
        )
        accepted.append(
            pa.table(
                [(added if n in added.column_names else kept)[n] for n in SCHEMA.names],
                schema=SCHEMA,
            )
        )
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
            have = scan.rows(
                there, TableVersion(target, base.version()), ["path", "image_id"]
            ).to_pylist()
            new = {
                key: row
                for key, row in rejected.items()
                if key not in {(r["path"], r["image_id"]) for r in have}
            }
        try:
            if new:
                rows = pa.Table.from_pylist(list(new.values()), QUARANTINE)
                append_once(
                    target,
                    rows,
                    base,
                    commit_properties("quarantine"),
                    None,
                    options,
                )
            return
        except Moved:
            continue
    if rejected:
        raise DataError(
            f"Others keep writing to {target}",
            got=f"{ATTEMPTS} attempts",
            fix="Run again when they are done",
        )
