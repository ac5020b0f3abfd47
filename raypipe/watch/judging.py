"""Champion and challenger on the same test rows, which neither has learned from.

The gate's tests count rows as independent. Images of one group, as of one part, share their fate,
and copies of an image are one image. So one of each is compared (`independent`). With all images of
60 parts, 10 of each, an equal challenger was promoted in 33 % of 200 draws, and 5 % was promised
(tests/watch/test_judging.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raypipe.errors import DataError, one_line
from raypipe.feed.dataset import Pinned
from raypipe.files import write_atomic
from raypipe.registry.package import Package
from raypipe.registry.tracking import RegistryConfig
from raypipe.registry.versions import ModelVersion
from raypipe.serve import evaluate
from raypipe.tables import scan
from raypipe.tables.prepared import ORIGINAL
from raypipe.train import learned
from raypipe.watch import begin, groups
from raypipe.watch.comparison import Comparison, compare


def judge(
    packages: Sequence[Package],
    pinned: Pinned,
    split: str,
    belonging: str | None,
    say: Callable[[str], None],
) -> pa.Table:
    """The labelled rows of the split: the slice of each (group), and whether champion (model_0) and
    challenger (model_1) have it right, or their absolute errors.

    belonging: the column that `group_column` names. `independent` draws one row of each group.

    Rows that the weights of either have learned from are left out. That happens where rows changed
    their split since, where the champion was trained on another split or table, and for an image
    that is in both splits.
    """
    where = pinned.rows_of(split)
    unknown = unknown_to(packages[0], pinned, split)
    if unknown:
        say(unknown)
    judged = evaluate.judge(packages, pinned.table, pinned.version, where, say, belonging)
    if not len(judged):
        return judged
    learned_by = learned_ids(packages, pinned, where, say)
    is_known = pc.is_in(judged["id"], value_set=pa.array(sorted(learned_by), pa.string()))
    is_known = pc.or_(is_known, _known_without_id(judged, packages, pinned))
    known = int(pc.sum(is_known).as_py() or 0)
    if known:
        say(
            f"{known} of {len(judged)} test rows are left out: "
            "the champion or the challenger has learned from them"
        )
    return judged.filter(pc.invert(is_known))


def group_column(cfg: RegistryConfig, champion: Package, pinned: Pinned) -> str | None:
    """The column that names the groups of test images; None: each image stands alone.

    The job's own; else the one that the champion was registered with, where the table has it.
    """
    if cfg.group is not None:
        return cfg.group
    theirs: str | None = champion.info["config"].get("registry", {}).get("group")
    names = {field.name for field in pinned.table.at(pinned.version).schema().fields}
    return theirs if theirs in names else None


def independent(judged: pa.Table, seed: int, say: Callable[[str], None]) -> pa.Table:
    """One row of each group, and one of several copies of an image. An image without a group stands
    alone.

    judged: from `judge`. Which ones are drawn depends on the seed, on ids and on bytes: not on what
    a model says, and not on how the table is stored.
    """
    if not len(judged):
        return judged
    hashes, belongs = judged["sha256"].to_pylist(), judged["belongs"].to_pylist()
    drawn = [
        hashlib.blake2b(repr((seed, image_id, digest)).encode(), digest_size=16).digest()
        for image_id, digest in zip(judged["id"].to_pylist(), hashes, strict=True)
    ]
    order = sorted(range(len(judged)), key=lambda row: (drawn[row], belongs[row]))
    kept = groups.apart(order, belongs, hashes)
    if len(kept) < len(judged):
        whys = ["one of each group"] if any(belongs) else []
        whys += ["one of several copies of an image"] if len({*hashes}) < len(judged) else []
        say(f"{len(kept)} of {len(judged)} test rows are compared: {', and '.join(whys)}")
    return judged.take(pa.array(kept, pa.int64()))


def unknown_to(champion: Package, pinned: Pinned, split: str) -> str:
    """What to say where a split has classes that the champion cannot predict; "" where it has none.

    A class that was renamed in the table is one, and the champion loses all of its images.
    """
    labels = pinned.labels(split)
    unknown = {name: images for name, images in labels.items() if name not in champion.classes}
    if not unknown:
        return ""
    gone = [name for name in champion.classes if name not in labels]
    text = (
        f"{sum(unknown.values()):,} of the {sum(labels.values()):,} labels in feed.test={split} "
        f"are of classes that the champion does not know, as {min(unknown)!r}: it is wrong on all "
        "of them"
    )
    if gone:
        text += f". Of its own, {min(gone)!r} has no test image any more: was a class renamed?"
    return text


def require_shared(champion: Package, pinned: Pinned, split: str) -> None:
    """Raise DataError if the champion knows none of the classes in a split, or of its tags.

    It would lose all images: any challenger would be better. The table is another model's, or its
    column of labels is another one.
    """
    labels = pinned.labels(split)
    if not labels or {*labels} & {*champion.classes}:
        return
    raise DataError(
        f"The champion knows none of the classes in feed.test={split}",
        got=sorted(labels)[:5],
        rule="A challenger is compared with it on labels that it can predict: "
        + one_line(", ".join(champion.classes), 200),
        fix="Check table.uri and table.columns.label. If all classes have new names, train and "
        "promote by hand: raypipe train CONFIG, then raypipe promote CONFIG --version N",
    )


def learned_ids(
    packages: Sequence[Package], pinned: Pinned, where: scan.Where, say: Callable[[str], None]
) -> set[str]:
    """Ids of rows that a package's weights have learned from. Rows without an id are not in it."""
    ids, rows_N2 = learned.rows_of(pinned, pinned.version, where)
    is_known_N = np.zeros(len(ids), bool)
    for package in packages:
        known_M2 = begin.seen_by(package, pinned)
        if known_M2 is None:
            say(
                "Whether the champion has learned from test rows cannot be told: its package is old"
            )
            continue
        is_known_N |= learned.is_among(rows_N2, known_M2)
    return {name for name, known in zip(ids, is_known_N.tolist(), strict=True) if name and known}


def _known_without_id(
    judged: pa.Table, packages: Sequence[Package], pinned: Pinned
) -> pa.BooleanArray:
    """Rows without an id whose image a package's weights have learned from.

    By "" as an id of its own, all of them were left out as soon as one was known.
    """
    has_no_id_N = np.array([not name for name in judged["id"].to_pylist()])
    is_known_N = np.zeros(len(judged), bool)
    if has_no_id_N.any():
        nobody = [None] * len(judged)
        version = pinned.version
        rows_NK = learned.identities(version.table_id, nobody, judged["stored_sha256"])
        if version.origin_id:
            # A champion of the source knows its bytes, and not those of the prepared copy.
            of_source_N2 = learned.identities(version.origin_id, nobody, judged[ORIGINAL])
            rows_NK = np.hstack([rows_NK, of_source_N2])
        for package in packages:
            known_M2 = begin.seen_by(package, pinned)
            if known_M2 is not None:
                is_known_N |= learned.is_among(rows_NK, known_M2)
    return pa.array(has_no_id_N & is_known_N)


def keep(judged: pa.Table, file: Path) -> None:
    """Write the judged rows beside the report: they say on which images the two models differ."""
    content = pa.BufferOutputStream()
    pq.write_table(judged, content)
    write_atomic(file, content.getvalue().to_pybytes())


def by_slice(
    judged: pa.Table, trained_on: Sequence[str], unit: float | None
) -> tuple[tuple[Comparison, ...], Comparison | None]:
    """Both models on each slice, and on all rows together; ((), None) without rows.

    judged: from `judge`. trained_on: the champion's sources; a slice of another one is new.
    """
    if not len(judged):
        return (), None

    def compared(name: str, rows: pa.Table, is_new: bool) -> Comparison:
        champion, challenger = rows["model_0"].to_pylist(), rows["model_1"].to_pylist()
        return compare(name, champion, challenger, is_new, unit)

    slices = []
    for name in sorted(set(judged["group"].to_pylist())):
        rows = judged.filter(pc.equal(judged["group"], name))
        slices.append(compared(name, rows, is_new=name not in trained_on))
    return tuple(slices), compared("all", judged, is_new=False)


def not_finite(judged: pa.Table, champion: ModelVersion, challenger: ModelVersion) -> str:
    """Which model has an error that is no finite number, on how many rows, and the way out; "" if
    none has.

    If it is the champion, no challenger could ever be better by a number.
    """
    if not len(judged):
        return ""
    odd = []
    for name in ("model_0", "model_1"):
        is_finite_N = np.isfinite(np.array(judged[name].to_pylist(), float))
        odd.append(judged["id"].filter(pa.array(~is_finite_N)).to_pylist())
    if not any(odd):
        return ""
    both = zip((f"the champion {champion}", f"the challenger {challenger}"), odd, strict=True)
    text = " and ".join(
        f"{name} gives no finite number for {len(ids):,} of {len(judged):,} test images, as "
        f"{ids[0]!r}"
        for name, ids in both
        if ids
    )
    if odd[1]:
        return text
    way_out = f"raypipe promote CONFIG --version {challenger.version}"
    return f"{text}. The challenger gives one for each: {way_out} puts it in use"


def unit(package: Package) -> float | None:
    """The unit of absolute errors; None where rows are right or wrong.

    For a regression it is the standard deviation of the champion's training labels.
    """
    if package.task.kind == "regression":
        return package.model.spread
    return 1.0 if package.task.kind == "probability" else None
