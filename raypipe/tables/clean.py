"""fastdup over a pinned version -> verdict rows, and a new tagged version without what the policy
drops.

Rows are judged and dropped, not ids: of three rows with one id only the broken one goes. The new
version is the judged version less the dropped rows. If another writer adds a row meanwhile,
cleaning stops with an error: that row was not judged.

A verdict is a fact with its numbers: what was measured, against which limit, for which partner.
Verdicts stay in a Delta table beside the images; the policy `drop` only decides which verdicts
remove an image. Of a group of duplicates a labelled one stays, the first in id order: a label is
work that nobody wants to do again. Outliers and blurred images are reported and kept by default: a
rare defect looks like an outlier.

Images are decoded, checked, reduced to at most `side_px` a side and encoded again before fastdup
gets them: its own decoders are old.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from pydantic import Field

from raypipe.cluster import sidecar
from raypipe.cluster.sidecars import build
from raypipe.config import Section, key_of
from raypipe.errors import DataError
from raypipe.images.decode import BadImage, decode, encode_png
from raypipe.tables import cleaned, constraints, rewrite, scan, tags, verdicts
from raypipe.tables.changes import Place
from raypipe.tables.fastdup_sidecar import LEAST
from raypipe.tables.table import ImageTable, TableConfig, TableVersion
from raypipe.tables.verdicts import Seen

log = logging.getLogger("raypipe")
# From this similarity on two files hold the same pixels. A JPEG saved again at quality 85 reaches
# 0.9994 at most.
EXACT = 0.99995
# Of a group of duplicates "clean 2" kept the first in id order, labelled or not. Of more than six
# copies "clean 3" may have kept several.
RULES, RULES_BEFORE = "clean 4", ("clean 3", "clean 2")
# fastdup lists pairs from this similarity on.
LEAST_SIMILARITY = 0.9


class CleanConfig(Section):
    """The limits of the verdicts, and which verdicts drop an image. `raypipe clean` keeps every
    verdict.
    """

    near_duplicate: float = Field(default=0.998, ge=LEAST_SIMILARITY, le=1)
    """Two images with at least this similarity (0-1) are near-duplicates. Different solar cells of
    one module reach 0.9977. At least 0.9: fastdup lists no pairs that are less similar.
    """

    dark: float = Field(default=8.0, ge=0, le=255)
    """An image whose mean pixel (0-255) is below this is dark."""

    bright: float = Field(default=247.0, ge=0, le=255)
    """An image whose mean pixel (0-255) is above this is bright."""

    blurred: float = Field(default=10.0, ge=0)
    """An image is blurred if the variance of its Laplacian, on pixels 0-255, is below this."""

    outlier: float = Field(default=0.6, ge=0, le=1)
    """An image is an outlier if its nearest image is less similar (0-1) than this. At most 5 % of
    the images can be outliers: fastdup names no more.
    """

    drop: tuple[verdicts.Verdict, ...] = (
        "exact_duplicate",
        "near_duplicate",
        "broken",
        "dark",
        "bright",
    )
    """Findings that drop an image. Blurred images and outliers stay by default: they may be rare
    defects.
    """

    tag: str = "clean"
    """Tag of the cleaned version. Each cleaning moves it to its new version."""

    side_px: int = Field(default=256, ge=32)
    """Most pixels of a side of the images that fastdup gets."""


@dataclass(frozen=True)
class CleanResult:
    """The judged version, the version without the dropped rows, and numbers of images.

    `policy` is the key of the verdict rows, `counts` has the number of images by verdict.
    """

    raw: TableVersion
    clean: TableVersion
    policy: str
    images: int
    dropped: int
    counts: dict[str, int]


def clean(source: TableConfig, cfg: CleanConfig) -> CleanResult:
    """Judge every image of the pinned version, keep the verdicts, and tag the cleaned version.

    Raises DataError when there is no image, when the limits would drop all of them, and when the
    table has got other rows since the pinned version: they were not judged.
    """
    tags.check_name(cfg.tag)  # before anything is dropped
    build.place("fastdup")  # raises where there is none for this Python
    table = ImageTable.open(source)
    raw = table.pin(source.version)
    # Before an hour of looking at images: their rows could not be dropped.
    constraints.require_changeable(table.delta(), table.uri)
    images = len(scan.rows(table, raw, [table.columns.id], source.where))
    if not images:
        raise DataError(
            f"{raw} has no images to look at",
            got=source.where or None,
            fix="Check table.version and table.where",
        )

    # Judge the version, unless an earlier run with the same policy has.
    policy, rows = earlier(table, raw, source, cfg)
    if rows is None:
        rows = _judge(table, raw, source, cfg)
        options = source.storage_options
        verdicts.write(table.uri, raw, policy, rules(cfg), rows, images, options)

    # Drop the rows that the policy names; a row may have several verdicts.
    dropped = [row for row in rows if row["dropped"]]
    places = {Place(row["file"], row["row"]) for row in dropped}
    if len(places) >= images:
        raise DataError(
            f"Cleaning would drop all {images} images of {raw}",
            got=dict(Counter(row["verdict"] for row in dropped)),
            fix="Loosen the limits in clean, or shorten clean.drop",
        )
    version = rewrite.drop(table, raw, places, _why(policy, raw))
    table.tag(cfg.tag, version.version, move=True)
    counts = Counter(row["verdict"] for row in rows)
    return CleanResult(raw, version, policy, images, len(places), dict(counts))


def earlier(
    table: ImageTable, raw: TableVersion, source: TableConfig, cfg: CleanConfig
) -> tuple[str, verdicts.Rows | None]:
    """The key of these verdicts on `raw`, and those that an earlier run has kept; None: none.

    Raises DataError if another cleaning has dropped rows of `raw`, and this one may drop some; and
    if this one will, and other rows have come since.
    """
    files = table.snapshot(raw).paths(table.uri)
    policy = _policy(raw, source, cfg, files)
    rows = verdicts.read(table.uri, raw, policy, source.storage_options)
    # A table that was moved since names its files otherwise.
    if rows is not None and any(row["file"] not in files for row in rows):
        rows = None
    if cfg.drop and (rows is None or any(row["dropped"] for row in rows)):
        _require_uncleaned(table, raw, _why(policy, raw), drops=rows is not None)
    return policy, rows


def _why(policy: str, raw: TableVersion) -> str:
    """What the commit of a cleaning says (cleaned.CLEAN)."""
    return f"clean {policy} of v{raw.version}"


def _require_uncleaned(table: ImageTable, raw: TableVersion, why: str, drops: bool) -> None:
    """Raise DataError if another cleaning has dropped rows of `raw`, and no commit says `why`.
    Asked before an hour of looking at images.

    drops: it is known that there is something to drop. Only then it is an error that other rows
    have come since; else that is said.
    """
    _, since = table.commits(after=raw.version)
    if any(entry.get("raypipe") == why for entry in since):
        return
    changing = [entry for entry in since if entry["changes"]]
    made = cleaned.CLEAN.fullmatch(str(changing[-1].get("raypipe", ""))) if changing else None
    if made is not None and int(made[2]) == raw.version:
        raise DataError(
            f"{raw} was cleaned before, with other limits or of other rows",
            got=f"version {changing[-1]['version']}, without what was dropped then",
            rule="A version is cleaned once; what is left is judged by cleaning the newest version",
            fix="Leave table.version out. For images that only the other limits dropped, run "
            "raypipe ingest with these limits first: it adds them again",
        )
    if drops:
        rewrite.require_same_rows(table, raw, since)
    elif changing:
        log.warning(
            "%s has got or lost rows since version %d. If an image is to be dropped, this cleaning "
            "will end without dropping it: leave table.version out",
            table.uri,
            raw.version,
        )


def rules(cfg: CleanConfig) -> str:
    """The key of the limits and of what they drop. The tag of the result is not part of it."""
    return _key_of_rules(RULES, cfg)


def _key_of_rules(version: str, cfg: CleanConfig) -> str:
    return key_of(version, cfg.model_dump(mode="json", exclude={"tag"}))


def known_as(cfg: CleanConfig) -> set[str]:
    """The keys under which a table may hold what these rules dropped: today's, those of before, and
    that of raypipe 0.1.
    """
    before = {_key_of_rules(version, cfg) for version in RULES_BEFORE}
    return {rules(cfg), key_of(cfg, {}), *before}


def _policy(
    raw: TableVersion, source: TableConfig, cfg: CleanConfig, files: Mapping[str, bytes]
) -> str:
    """The key of everything that verdicts depend on beside the version's address and number.

    files: of the version, by name (snapshot.paths).
    """
    # The id: a table that was deleted and made again at the same address is another table. And one
    # that was restored from a backup has other rows under the same number.
    state = sorted((name.rpartition("/")[2], what.hex()) for name, what in files.items())
    about = source.where, source.sample_key, source.columns, raw.table_id
    return key_of(rules(cfg), *about, state)


def _judge(
    table: ImageTable, raw: TableVersion, source: TableConfig, cfg: CleanConfig
) -> verdicts.Rows:
    """The verdicts on all images: those that do not decode are broken, the others go to fastdup."""
    images = _recoded_images(table, raw, source, cfg)
    rows: verdicts.Rows = []
    readable: list[Seen] = []
    pngs: list[bytes] = []
    for seen, png in images:
        if png:
            readable.append(seen)
            pngs.append(png)
        else:
            rows.append(verdicts.row(seen, "broken"))
    if len(readable) >= LEAST:
        report = _with_copies(_call_fastdup(pngs), pngs)
        rows += _verdicts(readable, report, cfg)
    else:
        log.warning(
            "fastdup needs %d images and %s has %d: only broken ones were looked for",
            LEAST,
            raw,
            len(readable),
        )
    for row in rows:
        row["dropped"] = row["verdict"] in cfg.drop
    return rows


def _recoded_images(
    table: ImageTable, raw: TableVersion, source: TableConfig, cfg: CleanConfig
) -> list[tuple[Seen, bytes]]:
    """Every image of the version with its PNG for fastdup, in the order in which duplicates stay;
    empty bytes for a broken image.

    Images are decoded on the cluster. Rows of one id come in the table's order.
    """
    columns = table.columns
    have = {field.name for field in table.at(raw).schema().fields}
    has_labels = columns.label in have

    def recode(batch: dict[str, Any]) -> dict[str, Any]:
        images = batch[columns.image]
        digests = [None if data is None else _sha256(data) for data in images]
        pngs = [_recode(data, cfg.side_px) for data in images]
        # Without a label column nothing is labelled. Numbers: Ray makes NaN of a column of nulls.
        labels = batch[columns.label] if has_labels else [None] * len(images)
        without_label = np.array([_without_label(label) for label in labels], np.int64)
        return {
            "id": batch[columns.id],
            "without_label": without_label,
            "file": batch[scan.FILE],
            "row": batch[scan.ROW],
            "sha256": np.array(digests, dtype=object),
            "png": np.array(pngs, dtype=object),
        }

    names = list(dict.fromkeys([columns.id, columns.image]))
    if has_labels:
        names = list(dict.fromkeys([*names, columns.label]))
    stream, fragments = scan.placed(table, raw, names, source.where)
    starts = scan.starts(fragments)
    images: list[tuple[Seen, bytes, int]] = []
    for batch in stream.map_batches(recode, batch_size=64).iter_batches(batch_size=256):
        fields = [batch[name] for name in ("id", "without_label", "file", "row", "sha256", "png")]
        for image_id, without, number, row, sha256, png in zip(*fields, strict=True):
            # `number` is that of a row group in `fragments`, `row` counts within the row group.
            file = fragments[number].file
            place = starts[number] + int(row)
            seen = Seen(_text(image_id), file, place, _text(sha256))
            images.append((seen, png, int(without)))

    order: dict[str, int] = {}  # of the files
    for fragment in fragments:
        order.setdefault(fragment.file, len(order))

    # Ray returns blocks in any order. The first of two duplicates stays.
    def rank(image: tuple[Seen, bytes, int]) -> tuple[int, bool, str, int, int]:
        seen, _, without = image
        without_id = seen.image_id is None
        return without, without_id, seen.image_id or "", order[seen.file], seen.row

    return [(seen, png) for seen, png, _ in sorted(images, key=rank)]


def _text(value: object) -> str | None:
    """A text, or None: Ray gives NaN for the nulls of a block that has nothing else."""
    return value if isinstance(value, str) else None


def _without_label(label: str | None) -> int:
    """0 for a label, 2 for none. 1 for a blank, which is a label under multi_label only."""
    if label is None:
        return 2
    return 0 if label.strip() else 1


def _call_fastdup(pngs: list[bytes]) -> dict[str, np.ndarray]:
    """fastdup's report on these images; see fastdup_sidecar.find."""
    sizes = [len(png) for png in pngs]
    arrays: dict[str, np.ndarray] = {
        "data": np.frombuffer(b"".join(pngs), np.uint8),
        "offsets": np.cumsum([0, *sizes], dtype=np.int64),
    }
    options = {"threshold": LEAST_SIMILARITY}
    report, _ = sidecar.call("fastdup", "raypipe.tables.fastdup_sidecar:find", arrays, options)
    return report


def _verdicts(images: list[Seen], report: dict[str, np.ndarray], cfg: CleanConfig) -> verdicts.Rows:
    """fastdup's report as verdicts: unreadable images, duplicates, pixel statistics, outliers."""
    rows = [verdicts.row(images[i], "broken") for i in report["invalid"]]
    rows += _duplicates(images, report, cfg)

    # Pixel statistics. An unreadable image has NaN, which fails no comparison.
    mean, blur = report["stat_mean"], report["stat_blur"]
    for verdict, values, limit, fails in (
        ("dark", mean, cfg.dark, mean < cfg.dark),
        ("bright", mean, cfg.bright, mean > cfg.bright),
        ("blurred", blur, cfg.blurred, blur < cfg.blurred),
    ):
        for i in np.flatnonzero(fails):
            rows.append(verdicts.row(images[i], verdict, None, float(values[i]), limit))

    # fastdup always reports the same share of the images: only far ones are outliers.
    outliers = report["outlier"]
    nearest = report["outlier_nearest"]
    similarities = report["outlier_similarity"].tolist()
    for i, j, similarity in zip(outliers, nearest, similarities, strict=True):
        if similarity < cfg.outlier:
            partner = images[j].image_id
            rows.append(verdicts.row(images[i], "outlier", partner, similarity, cfg.outlier))
    return rows


def _duplicates(
    images: list[Seen], report: dict[str, np.ndarray], cfg: CleanConfig
) -> verdicts.Rows:
    """A verdict for each image that an earlier one of `images` duplicates."""
    rows: verdicts.Rows = []
    duplicates: set[int] = set()
    pairs = [report[name].tolist() for name in ("pair_a", "pair_b", "pair_similarity")]
    for a, b, similarity in zip(*pairs, strict=True):
        if similarity < cfg.near_duplicate:
            break  # pairs come most similar first
        if a in duplicates or b in duplicates:
            continue  # its pair with the image that stays is another one
        # a < b, and `images` is in the order in which they stay.
        duplicates.add(b)
        verdict, limit = "near_duplicate", cfg.near_duplicate
        if similarity >= EXACT:
            verdict, limit = "exact_duplicate", EXACT
        rows.append(verdicts.row(images[b], verdict, images[a].image_id, similarity, limit))
    return rows


def _with_copies(report: dict[str, np.ndarray], pngs: list[bytes]) -> dict[str, np.ndarray]:
    """The report with a pair of each copy and the first one, before fastdup's pairs.

    fastdup names the five nearest of an image: of more copies, some would not be paired with one
    that stays.
    """
    first: dict[str, int] = {}
    stays, copies = [], []
    for number, png in enumerate(pngs):
        same = first.setdefault(_sha256(png), number)
        if same != number:
            stays.append(same)
            copies.append(number)
    exact = np.ones(len(copies), np.float32)
    both = dict(report)
    for name, new in (("pair_a", stays), ("pair_b", copies), ("pair_similarity", exact)):
        kind = report[name].dtype
        both[name] = np.concatenate([np.array(new, kind), report[name]])
    return both


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _recode(data: bytes, side_px: int) -> bytes:
    """PNG of the checked pixels, at most `side_px` a side; empty for a broken image."""
    try:
        image = Image.fromarray(decode(data))
    except BadImage:
        return b""
    image.thumbnail((side_px, side_px), Image.Resampling.BILINEAR)
    return encode_png(np.asarray(image))
