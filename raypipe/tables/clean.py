"""fastdup over a pinned version -> verdict rows, and a new tagged version without what the policy
drops.

Rows are judged and dropped, not ids: of three rows with one id only the broken one goes. The new
version is the one that was judged less what was dropped; a row that another writer adds meanwhile
stops the cleaning and is never in it.

Verdicts are facts with their numbers (what was measured, against which limit, which partner) and
stay in a Delta table beside the images; the policy `drop` only decides which of them cost an image
its place. Of a group of duplicates the first in id order stays. Outliers and blurred images are
reported and kept by default: a rare defect looks like an outlier.

The images go to fastdup decoded, checked, at most `side_px` wide and encoded again by us: its own
decoders are old.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from pydantic import Field

from raypipe.cluster import sidecar
from raypipe.config import Section, key_of
from raypipe.errors import DataError
from raypipe.images.decode import BadImage, decode, encode_png
from raypipe.tables import rewrite, scan, tags, verdicts
from raypipe.tables.changes import Place
from raypipe.tables.fastdup_sidecar import LEAST
from raypipe.tables.table import ImageTable, TableConfig, TableVersion
from raypipe.tables.verdicts import Seen

log = logging.getLogger("raypipe")
EXACT = 0.99995  # same pixels in another file; a JPEG re-saved at quality 85 reaches 0.9994 at most


class CleanConfig(Section):
    """Limits of the verdicts (similarity 0-1, brightness and blur on 0-255 pixels) and which
    verdicts drop an image.
    """

    near_duplicate: float = Field(default=0.998, gt=0.5, le=1)
    dark: float = Field(default=8.0, ge=0, le=255)
    bright: float = Field(default=247.0, ge=0, le=255)
    blurred: float = Field(default=10.0, ge=0)
    outlier: float = Field(default=0.6, ge=0, le=1)
    drop: tuple[verdicts.Verdict, ...] = (
        "exact_duplicate",
        "near_duplicate",
        "broken",
        "dark",
        "bright",
    )
    tag: str = "clean"
    side_px: int = Field(default=256, ge=32)


@dataclass(frozen=True)
class CleanResult:
    """The version looked at, the one without the dropped rows, and what was found; `policy` finds
    the verdict rows.
    """

    raw: TableVersion
    clean: TableVersion
    policy: str
    images: int
    dropped: int
    counts: dict[str, int]


def clean(source: TableConfig, cfg: CleanConfig) -> CleanResult:
    """Judge every image of the pinned version, keep the verdicts, and tag the cleaned version.

    Raises DataError when the table gained other rows since the pinned version: they would come in
    unjudged.
    """
    tags.check_name(cfg.tag)  # before anything is dropped
    table = ImageTable.open(source)
    raw = table.pin(source.version)
    policy = _policy(table, raw, source, cfg)
    images = len(scan.rows(table, raw, [table.columns.id], source.where))
    if not images:
        raise DataError(
            f"{raw} has no images to look at",
            got=source.where or None,
            fix="Check table.version and table.where",
        )
    found = verdicts.read(table.uri, raw, policy, source.storage_options)
    if found is None:
        found = _judge(table, raw, source, cfg)
        verdicts.write(table.uri, raw, policy, rules(cfg), found, images, source.storage_options)
    dropped = {Place(row["file"], row["row"]) for row in found if row["dropped"]}
    if len(dropped) >= images:
        raise DataError(
            f"Cleaning would drop all {images} images of {raw}",
            got=dict(Counter(row["verdict"] for row in found if row["dropped"])),
            fix="Loosen the limits in clean, or shorten clean.drop",
        )
    version = rewrite.drop(table, raw, dropped, f"clean {policy} of v{raw.version}")
    table.tag(cfg.tag, version.version, move=True)
    counts = Counter(row["verdict"] for row in found)
    return CleanResult(raw, version, policy, images, len(dropped), dict(counts))


def rules(cfg: CleanConfig) -> str:
    """The key of the limits and of what they drop; the tag of the result is no part of them."""
    return key_of("clean 2", cfg.model_dump(mode="json", exclude={"tag"}))


def known_as(cfg: CleanConfig) -> set[str]:
    """Under which keys a table may hold what these rules dropped: today's, and the one that raypipe
    0.1 gave them.
    """
    return {rules(cfg), key_of(cfg, {})}


def _policy(table: ImageTable, raw: TableVersion, source: TableConfig, cfg: CleanConfig) -> str:
    """The key of everything that verdicts depend on, beside the version: verdicts on some rows are
    not verdicts on all.
    """
    return key_of(rules(cfg), source.where, source.sample, source.columns, raw.table_id)


def _judge(
    table: ImageTable, raw: TableVersion, source: TableConfig, cfg: CleanConfig
) -> verdicts.Rows:
    c = table.columns

    def recoded(batch: dict[str, Any]) -> dict[str, Any]:
        images = batch[c.image]
        return {
            "id": batch[c.id],
            "file": batch[scan.FILE],
            "row": batch[scan.ROW],
            "sha256": np.array(
                [None if b is None else hashlib.sha256(b).hexdigest() for b in images], dtype=object
            ),
            "png": np.array([_recode(b, cfg.side_px) for b in images], dtype=object),
        }

    stream, fragments = scan.placed(table, raw, list(dict.fromkeys([c.id, c.image])), source.where)
    starts = scan.starts(fragments)
    pairs: list[tuple[Seen, bytes]] = []
    for b in stream.map_batches(recoded, batch_size=64).iter_batches(batch_size=256):
        for image_id, file, row, sha256, png in zip(
            b["id"], b["file"], b["row"], b["sha256"], b["png"], strict=True
        ):
            pairs.append(
                (Seen(image_id, fragments[file].path, starts[file] + int(row), sha256), png)
            )
    # In id order, and rows of one id in the table's: the first of two duplicates stays.
    at = {path: i for i, path in enumerate(dict.fromkeys(f.path for f in fragments))}
    pairs.sort(
        key=lambda pair: (
            pair[0].image_id is None,
            pair[0].image_id or "",
            at[pair[0].file],
            pair[0].row,
        )
    )
    rows = [verdicts.row(seen, "broken") for seen, png in pairs if not png]
    readable = [seen for seen, png in pairs if png]
    if len(readable) >= LEAST:
        encoded = [png for _, png in pairs if png]
        offsets = np.cumsum([0] + [len(png) for png in encoded], dtype=np.int64)
        arrays: dict[str, np.ndarray] = {
            "data": np.frombuffer(b"".join(encoded), np.uint8),
            "offsets": offsets,
        }
        found, _ = sidecar.call(
            "fastdup", "raypipe.tables.fastdup_sidecar:find", arrays, {"threshold": 0.9}
        )
        rows += _verdicts(readable, found, cfg)
    else:
        log.warning(
            "fastdup needs %d images and %s has %d: only broken ones were looked for",
            LEAST,
            raw,
            len(readable),
        )
    return [row | {"dropped": row["verdict"] in cfg.drop} for row in rows]


def _verdicts(images: list[Seen], found: dict[str, np.ndarray], cfg: CleanConfig) -> verdicts.Rows:
    rows = [verdicts.row(images[i], "broken") for i in found["invalid"]]
    gone: set[int] = set()
    for a, b, similarity in zip(
        found["pair_a"].tolist(),
        found["pair_b"].tolist(),
        found["pair_similarity"].tolist(),
        strict=True,
    ):
        if similarity < cfg.near_duplicate:
            break  # pairs come most similar first
        if a not in gone and b not in gone:  # rows are in id order and a < b: the first stays
            gone.add(b)
            kind, limit = (
                ("exact_duplicate", EXACT)
                if similarity >= EXACT
                else ("near_duplicate", cfg.near_duplicate)
            )
            rows.append(verdicts.row(images[b], kind, images[a].image_id, similarity, limit))
    for name, stat, limit, sign in (
        ("dark", "mean", cfg.dark, 1),
        ("bright", "mean", cfg.bright, -1),
        ("blurred", "blur", cfg.blurred, 1),
    ):
        values = found[f"stat_{stat}"]
        for i in np.flatnonzero(sign * values < sign * limit):
            rows.append(verdicts.row(images[i], name, None, float(values[i]), limit))
    for i, nearest, similarity in zip(
        found["outlier"],
        found["outlier_nearest"],
        found["outlier_similarity"].tolist(),
        strict=True,
    ):
        if similarity < cfg.outlier:
            rows.append(
                verdicts.row(
                    images[i], "outlier", images[nearest].image_id, similarity, cfg.outlier
                )
            )
    return rows


def _recode(data: bytes, side_px: int) -> bytes:
    """PNG of the checked pixels, at most side_px a side; empty for an image that does not decode."""
    try:
        image = Image.fromarray(decode(data))
    except BadImage:
        return b""
    image.thumbnail((side_px, side_px), Image.Resampling.BILINEAR)
    return encode_png(np.asarray(image))
