"""What changed between two versions, where a version came from, and keeping a table small without losing a tagged one.

Images are compared by id, never by bytes: an id is the hash of its image in what `raypipe ingest` writes. A commit whose rows
are from another version says so (`raypipe.from`, written by clean and by ingest from Delta); lineage reads those back.

Compaction goes through deltalake with our writer, because its default of 1,048,576 rows a row group is 40 GB of images in one.
It rewrites bytes and changes no row; column mapping it refuses. Vacuum keeps the files of tagged versions: a tag is a promise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from raypipe.errors import DataError
from raypipe.tables import protocol, scan, storage
from raypipe.tables.table import ImageTable, TableVersion, resolve, told, writer

T = TypeVar("T")
Changed = list[tuple[str, "str | None", "str | None"]]  # id, value before, value after


@dataclass(frozen=True)
class Diff:
    """From one version to another: ids that came, went, got another label or split; images a class and a split in both."""

    before: TableVersion
    after: TableVersion
    added: list[str]
    removed: list[str]
    relabelled: Changed
    moved: Changed
    classes: dict[str, tuple[int, int]]
    splits: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Step:
    """Commits in a row with one reason and one origin: versions `first` to `last` of the table at `uri`."""

    uri: str
    first: int
    last: int
    why: str
    source: str


@dataclass(frozen=True)
class Vacuum:
    """Files that no kept version needs, and for each tag how many files stay only because of it."""

    files: list[str]
    kept: dict[str, int]
    deleted: bool


def diff(table: ImageTable, before: TableVersion, after: TableVersion) -> Diff:
    """Compare the images of two versions. Raises DataError for a table without ids, or with an id twice in one version."""
    c, sides = table.columns, []
    for version in (before, after):
        have = table.delta(version.version).schema().to_arrow().names
        rows = scan.rows(table, version, [c.id, *(n for n in (c.label, c.split) if n in have)])
        if rows[c.id].null_count:
            raise DataError(
                f"{version} has a row without an id",
                rule="Images are compared by id",
                fix="Set table.columns.id",
            )
        if len(counted := pc.value_counts(rows[c.id])) < len(rows):
            twice = next(r["values"] for r in counted.to_pylist() if r["counts"] > 1)
            raise DataError(
                f"{version} has an id twice",
                got=twice,
                rule="Images are compared by id",
                fix="Set table.columns.id",
            )
        values = {
            n: rows[n] if n in have else pa.nulls(len(rows), pa.string())
            for n in (c.id, c.label, c.split)
        }
        sides.append(pa.table(values).rename_columns(["id", "label", "split"]))
    old, new = sides
    both = old.join(new, "id", join_type="inner", right_suffix="_after").sort_by("id")

    def only(here: pa.Table, there: pa.Table) -> list[str]:
        return sorted(
            here["id"]
            .filter(pc.invert(pc.is_in(here["id"], value_set=there["id"].combine_chunks())))
            .to_pylist()
        )

    def changed(name: str) -> Changed:
        values = (both[n].to_pylist() for n in ("id", name, f"{name}_after"))
        return [(i, a, b) for i, a, b in zip(*values, strict=True) if a != b]

    def counts(name: str) -> dict[str, tuple[int, int]]:
        a, b = (
            {r["values"]: r["counts"] for r in pc.value_counts(side[name]).to_pylist()}
            for side in sides
        )
        return {
            str(k) if k is not None else "–": (a.get(k, 0), b.get(k, 0))
            for k in sorted({*a, *b}, key=str)
        }

    return Diff(
        before,
        after,
        only(new, old),
        only(old, new),
        changed("label"),
        changed("split"),
        counts("label"),
        counts("split"),
    )


def lineage(table: ImageTable, version: TableVersion) -> list[Step]:
    """How the version came to be, newest first, through the tables it was made from as far as they can still be read."""
    steps: list[Step] = []
    seen: set[tuple[str, int]] = set()
    ahead = [(table, version.version)]
    while ahead:
        here, newest = ahead.pop(0)
        if (here.uri, newest) in seen:
            continue
        seen.add((here.uri, newest))
        for entry in here.history():
            if entry["version"] > newest or not (entry["changes"] or entry["version"] == 0):
                continue
            source = here.uri + entry["from"] if entry["from"].startswith("@") else entry["from"]
            why = entry["why"] or entry["operation"]
            last = steps[-1] if steps else None
            if last and (last.uri, last.why, last.source) == (here.uri, why, source):
                steps[-1] = Step(here.uri, entry["version"], last.last, why, source)
            else:
                steps.append(Step(here.uri, entry["version"], entry["version"], why, source))
            uri, _, number = source.rpartition("@v")
            if (
                uri not in ("", here.uri)
                and number.isdigit()
                and ImageTable.exists(uri, table.storage_options)
            ):
                ahead.append(
                    (ImageTable(resolve(uri), storage_options=table.storage_options), int(number))
                )
    return steps


def optimize(table: ImageTable, by: Sequence[str] = (), target_mb: int = 256) -> dict[str, int]:
    """Compact small files into ones of about `target_mb`; with `by`, cluster all rows along a z-order of these columns.

    The rows stay the same, row groups stay small. Returns files before and after, and the version. Raises DataError.
    """
    delta = table.delta()
    protocol.preflight(delta)
    table.require(delta, *by)
    before, work = len(delta.file_uris()), delta.optimize
    how: dict[str, Any] = {
        "target_size": target_mb * 2**20,
        "writer_properties": writer(table.columns.image),
        "commit_properties": told(
            f"optimize by {', '.join(by)}" if by else "optimize", f"@v{delta.version()}"
        ),
    }
    _delta(table, "optimized", lambda: work.z_order(list(by), **how) if by else work.compact(**how))
    delta = table.delta()
    return {
        "files_before": before,
        "files_after": len(delta.file_uris()),
        "version": delta.version(),
    }


def vacuum(table: ImageTable, keep_hours: int | None = None, delete: bool = False) -> Vacuum:
    """Find, and with `delete` remove, files that only versions older than `keep_hours` need (null: the table's own, or a week).

    Files of tagged versions stay. Raises DataError for fewer hours than the table's properties allow.
    """
    delta, tags = table.delta(), table.tags()
    for version in set(tags.values()):
        table.delta(version)  # a tag on a version that is gone has its own message
    # A full vacuum also takes what no log names, and deltalake 1.6 counts the live files of deletion vectors among that.
    full = "deletionVectors" not in (delta.protocol().reader_features or ())

    def run(keep: list[int], real: bool) -> list[str]:
        how: dict[str, Any] = {
            "retention_hours": keep_hours,
            "full": full,
            "keep_versions": keep or None,
            "dry_run": not real,
        }
        return _delta(
            table, "vacuumed", lambda: delta.vacuum(**how, commit_properties=told("vacuum"))
        )

    doomed = set(run([], False))
    kept = (
        {name: len(doomed - set(run([version], False))) for name, version in sorted(tags.items())}
        if doomed
        else {}
    )
    return Vacuum(
        sorted(run(sorted(set(tags.values())), delete)),
        {n: k for n, k in kept.items() if k},
        delete,
    )


def _delta(table: ImageTable, done: str, work: Callable[[], T]) -> T:
    try:
        return work()
    except Exception as e:  # deltalake's errors share no base
        raise storage.refusal(e, table.uri, f"The table cannot be {done}") from None
