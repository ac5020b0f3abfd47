"""Work on table versions: compare two, trace where one came from, compact files, delete old ones.

Two versions are compared by image id, never by bytes. In tables that `raypipe ingest` writes, an id
is the hash of its image. A commit made from another version records it (`raypipe.from`, written by
clean and by ingest from Delta). `lineage` reads these records back.

Compaction goes through deltalake, with our writer settings: deltalake's default of 1,048,576 rows a
row group would be 40 GB of images in one. It rewrites files and changes no row. deltalake refuses
to compact tables with column mapping. Vacuum keeps the files of every tagged version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from raypipe.errors import DataError
from raypipe.tables import protocol, scan, storage
from raypipe.tables.address import resolve
from raypipe.tables.provenance import commit_properties
from raypipe.tables.schema import writer_properties
from raypipe.tables.table import ImageTable, TableVersion

T = TypeVar("T")
Changed = list[tuple[str, "str | None", "str | None"]]  # id, value before, value after
Counts = dict[str, tuple[int, int]]  # class or split: images before, images after


@dataclass(frozen=True)
class Diff:
    """What changed between two versions."""

    before: TableVersion
    after: TableVersion
    added: list[str]
    """Ids that only `after` has."""
    removed: list[str]
    """Ids that only `before` has."""
    relabelled: Changed
    moved: Changed
    """Ids with another split."""
    classes: Counts
    splits: Counts


@dataclass(frozen=True)
class Step:
    """Consecutive commits with one reason and one origin: versions `first` to `last` of `uri`."""

    uri: str
    first: int
    last: int
    why: str
    source: str


@dataclass(frozen=True)
class Vacuum:
    """Files that no kept version needs. `kept`: per tag, the files that stay only because of it."""

    files: list[str]
    kept: dict[str, int]
    deleted: bool


def diff(table: ImageTable, before: TableVersion, after: TableVersion) -> Diff:
    """Compare the images of two versions by id.

    Raises DataError when the table has no ids, or when a version has one id twice.
    """
    old = _labels_by_id(table, before)
    new = _labels_by_id(table, after)
    # One row for each image of both versions, with its label and split before and after.
    both = old.join(new, "id", join_type="inner", right_suffix="_after").sort_by("id")
    return Diff(
        before=before,
        after=after,
        added=_ids_only_in(new, old),
        removed=_ids_only_in(old, new),
        relabelled=_changes(both, "label"),
        moved=_changes(both, "split"),
        classes=_count_pairs(old, new, "label"),
        splits=_count_pairs(old, new, "split"),
    )


def _labels_by_id(table: ImageTable, version: TableVersion) -> pa.Table:
    """Columns id, label and split of a version. A column that the version lacks is all null."""
    columns = table.columns
    stored = table.at(version).schema().to_arrow().names
    optional = [name for name in (columns.label, columns.split) if name in stored]

    # An id column that is missing is an error, which `scan.rows` raises.
    rows = scan.rows(table, version, [columns.id, *optional])
    _require_unique_ids(rows[columns.id], version)

    roles = {
        "id": columns.id,
        "label": columns.label,
        "split": columns.split,
    }
    by_role = {}
    for role, name in roles.items():
        if name in stored:
            by_role[role] = rows[name]
        else:
            by_role[role] = pa.nulls(len(rows), pa.string())
    return pa.table(by_role)


def _require_unique_ids(ids: pa.ChunkedArray, version: TableVersion) -> None:
    """Raise DataError for an id that is null or not unique."""
    rule = "Images are compared by id"
    fix = "Set table.columns.id"
    if ids.null_count:
        raise DataError(f"{version} has a row without an id", rule=rule, fix=fix)
    # Counting in Arrow is fast; Python looks only for the id to name.
    counts = pc.value_counts(ids)
    if len(counts) == len(ids):
        return
    for entry in counts.to_pylist():
        if entry["counts"] > 1:
            raise DataError(
                f"{version} has an id twice",
                got=entry["values"],
                rule=rule,
                fix=fix,
            )


def _ids_only_in(here: pa.Table, there: pa.Table) -> list[str]:
    """Sorted ids of `here` that `there` lacks."""
    known = set(there["id"].to_pylist())
    return sorted(image for image in here["id"].to_pylist() if image not in known)


def _changes(both: pa.Table, role: str) -> Changed:
    """Images of both versions whose label or split differs."""
    ids = both["id"].to_pylist()
    before = both[role].to_pylist()
    after = both[f"{role}_after"].to_pylist()
    changed = []
    for image, old, new in zip(ids, before, after, strict=True):
        if old != new:
            changed.append((image, old, new))
    return changed


def _count_pairs(old: pa.Table, new: pa.Table, role: str) -> Counts:
    """Images per class or split in both versions. "–" counts the images without one."""
    before = _value_counts(old[role])
    after = _value_counts(new[role])
    # key=str, because None cannot be compared with a name.
    pairs = {}
    for value in sorted({*before, *after}, key=str):
        name = "–" if value is None else str(value)
        pairs[name] = (before.get(value, 0), after.get(value, 0))
    return pairs


def _value_counts(values: pa.ChunkedArray) -> dict[str | None, int]:
    return {entry["values"]: entry["counts"] for entry in pc.value_counts(values).to_pylist()}


def lineage(table: ImageTable, version: TableVersion) -> list[Step]:
    """The commits that led to a version, newest first.

    Follows every table that a commit was made from, as far as its log can still be read.
    """
    steps: list[Step] = []
    visited: set[tuple[str, int]] = set()
    queue = [(table, version.version)]
    while queue:
        current, newest = queue.pop(0)
        if (current.uri, newest) in visited:
            continue
        visited.add((current.uri, newest))

        # A table's commits form steps; each may point to a version of another table.
        for entry in current.history():
            is_older = entry["version"] <= newest
            is_relevant = entry["changes"] or entry["version"] == 0
            if not (is_older and is_relevant):
                continue

            source = entry["from"]
            if source.startswith("@"):  # a version of the same table
                source = current.uri + source
            _add_commit(steps, current.uri, entry, source)
            origin = _origin_table(source, current)
            if origin is not None:
                queue.append(origin)
    return steps


def _add_commit(steps: list[Step], uri: str, entry: dict[str, Any], source: str) -> None:
    """Append a commit, or extend the last step when reason and origin are the same."""
    number = entry["version"]
    why = entry["why"] or entry["operation"]
    if steps:
        last = steps[-1]
        if (last.uri, last.why, last.source) == (uri, why, source):
            # Commits arrive newest first, so the step grows at its old end.
            steps[-1] = replace(last, first=number)
            return
    steps.append(Step(uri, number, number, why, source))


def _origin_table(source: str, current: ImageTable) -> tuple[ImageTable, int] | None:
    """The other table and version that `source` (uri@vN) names; None when there is none to read."""
    uri, _, number = source.rpartition("@v")
    if not uri or uri == current.uri or not number.isdigit():
        return None

    # The origin may be gone by now; the lineage then ends here.
    options = current.storage_options
    if not ImageTable.exists(uri, options):
        return None
    return ImageTable(resolve(uri), storage_options=options), int(number)


def optimize(table: ImageTable, by: Sequence[str] = (), target_mb: int = 256) -> dict[str, int]:
    """Compact small files into files of about `target_mb` MB.

    With `by`, cluster all rows along a z-order of these columns. The rows and the size of row
    groups stay the same. Returns the number of files before and after, and the version.
    Raises DataError.
    """
    delta = table.delta()
    protocol.preflight(delta)
    table.require(delta, *by)
    files_before = len(delta.file_uris())

    reason = f"optimize by {', '.join(by)}" if by else "optimize"
    settings: dict[str, Any] = {
        "target_size": target_mb * 2**20,
        "writer_properties": writer_properties(table.columns.image),
        "commit_properties": commit_properties(reason, f"@v{delta.version()}"),
    }

    def rewrite() -> object:
        if by:
            return delta.optimize.z_order(list(by), **settings)
        return delta.optimize.compact(**settings)

    _call_deltalake(table, "optimized", rewrite)

    # The rewrite made a new version: load it to count its files.
    delta = table.delta()
    return {
        "files_before": files_before,
        "files_after": len(delta.file_uris()),
        "version": delta.version(),
    }


def vacuum(table: ImageTable, keep_hours: int | None = None, delete: bool = False) -> Vacuum:
    """List the files that only versions older than `keep_hours` need; with `delete`, remove them.

    `keep_hours` of None means the table's own retention, or a week. Files of tagged versions stay.
    Raises DataError for fewer hours than the table's properties allow.
    """
    delta, tags = table.delta(), table.tags()
    tagged = sorted(set(tags.values()))
    for version in tagged:
        table.delta(version)  # raises its own message when a tagged version is gone
    # A full vacuum also removes files that no log entry names. deltalake 1.6 counts the live files
    # of deletion vectors among these, so tables with deletion vectors get the other mode.
    full = "deletionVectors" not in (delta.protocol().reader_features or ())

    def run(keep_versions: list[int], dry_run: bool, **more: Any) -> list[str]:
        settings: dict[str, Any] = {
            "retention_hours": keep_hours,
            "full": full,
            "keep_versions": keep_versions or None,
            "dry_run": dry_run,
            "commit_properties": commit_properties("vacuum"),
        }
        return _call_deltalake(table, "vacuumed", lambda: delta.vacuum(**settings | more))

    # A dry run per tag tells how many files this tag alone would keep.
    unprotected = set(run([], dry_run=True))
    # A table inside is found by its log, which may be younger than files of it that would go.
    of_any_age = {"retention_hours": 0, "enforce_retention_duration": False}
    inner = sorted(path for path in run([], dry_run=True, **of_any_age) if "/_delta_log/" in path)
    if inner:
        raise DataError(
            "Another table lies inside of this one",
            got=inner[0].partition("/_delta_log/")[0],
            rule="VACUUM would remove its files",
            fix="Move it to a place beside this table",
        )
    kept = {}
    if unprotected:
        for name, version in sorted(tags.items()):
            saved = unprotected - set(run([version], dry_run=True))
            if saved:
                kept[name] = len(saved)

    files = run(tagged, dry_run=not delete)
    return Vacuum(sorted(files), kept, delete)


def _call_deltalake(table: ImageTable, done: str, work: Callable[[], T]) -> T:
    """Run `work`; turn an error of deltalake into a DataError."""
    try:
        return work()
    except Exception as e:  # deltalake's errors share no base class
        raise storage.refusal(e, table.uri, f"The table cannot be {done}") from None
