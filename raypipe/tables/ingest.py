"""Files -> verified rows of a Delta table, exactly once.

Every image is decoded to its last pixel before it is accepted; what does not decode goes to a quarantine table with the
reason and its bytes, so nothing is lost. An image's id is the sha256 of its bytes: running the same ingest again, or after a
kill, adds only what is missing. Each batch of rows is one Delta commit, so a batch is in the table whole or not at all.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pydantic import Field, field_validator

from raypipe.config import Section
from raypipe.errors import DataError
from raypipe.images import decode, measure
from raypipe.tables import scan, split, verdicts
from raypipe.tables.sources import Candidate, SourceConfig, candidates
from raypipe.tables.table import SCHEMA, ImageTable, TableConfig, TableVersion, append, resolve

ROWS_PER_COMMIT = 20_000
QUARANTINE = pa.schema(
    [(n, pa.string()) for n in ("image_id", "reason", "detail", "path", "source", "label")] + [("image", pa.binary())]
)

Progress = Callable[[int, int], None]


class IngestConfig(Section):
    """What to ingest, under which source name, and how to split it."""

    source: SourceConfig = Field(default=SourceConfig(), alias="from")
    name: str = "ingest"
    share: tuple[float, float] = (0.0, 1.0)
    splits: dict[str, float] = Field(default={"train": 0.7, "val": 0.15, "test": 0.15})
    near_bits: int = Field(default=12, ge=0, lt=16)
    max_pixels: int = Field(default=decode.MAX_PIXELS, gt=0)
    threads: int = Field(default=2, ge=1)

    @field_validator("splits")
    @classmethod
    def _shares(cls, splits: dict[str, float]) -> dict[str, float]:
        if not splits or any(s <= 0 for s in splits.values()):
            raise ValueError("splits is a mapping of names to positive shares, like {train: 0.7, val: 0.15, test: 0.15}")
        return splits


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


def ingest(table: TableConfig, cfg: IngestConfig, progress: Progress = lambda done, total: None) -> IngestResult:
    """Add what `cfg.source` holds and the table lacks; `progress(done, total)` counts candidates.

    Raises DataError before anything is written when the source is wrong, and after filling the quarantine when no image
    at all was readable.
    """
    wanted = _in_share(candidates(cfg.source), cfg)
    uri = resolve(table.uri)
    known, families = _known(table, cfg)
    counts, accepted_total = _Counts(), 0
    version: TableVersion | None = None
    splits: Counter[str] = Counter()
    for start in range(0, len(wanted), ROWS_PER_COMMIT):
        accepted, rejected = [], []
        with ThreadPoolExecutor(cfg.threads) as pool:
            batch = wanted[start : start + ROWS_PER_COMMIT]
            for done, (candidate, row, bad) in enumerate(pool.map(lambda c: _verify(c, cfg), batch), start=start + 1):
                if bad is not None:
                    rejected.append(
                        row | {"reason": bad.reason, "detail": str(bad), "label": candidate.label, "source": cfg.name}
                    )
                    counts.reasons[bad.reason] += 1
                elif row["image_id"] in known:
                    counts.duplicates += known[row["image_id"]] == "new"
                    counts.present += known[row["image_id"]] == "old"
                else:
                    known[row["image_id"]] = "new"
                    counts.unlabelled += candidate.label is None
                    accepted.append(_complete(row, candidate, cfg, families))
                progress(done, len(wanted))
        _quarantine(uri, rejected, table.storage_options)
        if accepted:
            splits.update(row["split"] for row in accepted)
            version = append(uri, pa.Table.from_pylist(accepted, SCHEMA), f"ingest {cfg.name}", table.storage_options)
            accepted_total += len(accepted)
    if version is None and not known:
        raise DataError(
            f"None of {len(wanted)} files is a readable image",
            got=dict(counts.reasons),
            rule=f"Formats: {', '.join(decode.FORMATS)}, every row decodable",
            fix=f"See {quarantine_uri(uri)} for each reason",
        )
    return IngestResult(
        version or ImageTable.open(table).pin(),
        len(wanted),
        accepted_total,
        counts.present,
        counts.duplicates,
        counts.reasons.total(),
        dict(counts.reasons),
        counts.unlabelled,
        dict(splits),
    )


def quarantine_uri(uri: str) -> str:
    return resolve(uri).rstrip("/") + "_quarantine"


def _in_share(found: list[Candidate], cfg: IngestConfig) -> list[Candidate]:
    low, high = cfg.share
    if (low, high) == (0.0, 1.0):
        return found
    # By name, not by content: a share is chosen before any file is read. The salt keeps it independent of the split.
    return [c for c in found if low <= split.position(c.path.name, "share") < high]


def _known(table: TableConfig, cfg: IngestConfig) -> tuple[dict[str, str], split.Families]:
    known: dict[str, str] = {}
    families = split.Families(cfg.near_bits)
    if ImageTable.exists(table.uri):
        opened = ImageTable.open(table)
        opened.require(opened.delta(), *SCHEMA.names)  # ingest writes its own layout; refuse a foreign table before decoding
        for row in scan.rows(opened, opened.pin(), ["image_id", "look", "family"]).to_pylist():
            known[row["image_id"]] = "old"
            families.join(row["image_id"], bytes.fromhex(row["look"]), row["family"])
        for image_id in verdicts.dropped_ids(
            opened.uri, table.storage_options
        ):  # what cleaning dropped must not come back with the next ingest
            known.setdefault(image_id, "old")
    return known, families


def _verify(candidate: Candidate, cfg: IngestConfig) -> tuple[Candidate, dict[str, Any], decode.BadImage | None]:
    try:
        data = candidate.path.read_bytes()
    except OSError as e:
        return candidate, {"image_id": None, "path": str(candidate.path), "image": None}, decode.BadImage("unreadable", str(e))
    row = {"image_id": hashlib.sha256(data).hexdigest(), "path": candidate.path.name, "image": data, "bytes": len(data)}
    try:
        info, gray_HW = decode.inspect(data, cfg.max_pixels)
    except decode.BadImage as bad:
        return candidate, row, bad
    look = measure.difference_hash(gray_HW)
    return candidate, row | {"format": info.format, "width": info.width, "height": info.height, "look": look.hex()}, None


def _complete(row: dict[str, Any], candidate: Candidate, cfg: IngestConfig, families: split.Families) -> dict[str, Any]:
    family = families.join(row["image_id"], bytes.fromhex(row["look"]))
    drawn = candidate.split or split.draw(family, cfg.splits)
    return row | {"label": candidate.label, "split": drawn, "source": cfg.name, "family": family}


def _quarantine(uri: str, rejected: list[dict[str, Any]], storage_options: dict[str, str] | None) -> None:
    target = quarantine_uri(uri)
    if rejected and ImageTable.exists(target):
        there = ImageTable(target, storage_options=storage_options)
        have = {tuple(r.values()) for r in scan.rows(there, there.pin(), ["path", "image_id"]).to_pylist()}
        rejected = [r for r in rejected if (r["path"], r["image_id"]) not in have]
    if rejected:
        append(target, pa.Table.from_pylist(rejected, QUARANTINE), "quarantine", storage_options)
