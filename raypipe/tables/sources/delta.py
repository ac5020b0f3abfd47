"""Another Delta table with an image column as a source.

One part a row group of a pinned version, with partition values, deleted rows and column mapping
read as its log says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from raypipe.tables import conditions, fragment, scan
from raypipe.tables.conditions import Where
from raypipe.tables.fragment import Fragment, Options
from raypipe.tables.sources import inside
from raypipe.tables.sources.candidate import Candidate, Part, Read
from raypipe.tables.sources.columns import SourceColumns, candidates, value
from raypipe.tables.sources.fence import Fence
from raypipe.tables.sources.labels import require, tell_of_split
from raypipe.tables.table import Columns, ImageTable, TableConfig, TableVersion

ROWS_A_CALL = 1024
PATH = "path"  # the column where raypipe's own tables keep the path of an image


@dataclass(frozen=True)
class Rows:
    """Reads rows (`at`) of one row group."""

    fragment: Fragment
    column: str
    fence: Fence
    storage_options: Options = field(repr=False)

    def __call__(self, candidates: Sequence[Candidate]) -> Iterator[Read]:
        images = fragment.binary(self.fragment, self.column, self.storage_options)
        for candidate in candidates:
            row = candidate.at[0]
            yield value(images[row], candidate, self.fence)


def row_groups(
    uri: str,
    version: int | str | None,
    where: Where,
    columns: SourceColumns,
    fence: Fence,
    storage_options: Options,
) -> tuple[list[Part], TableVersion, bool]:
    """The rows of one version, that version (it is the origin of the new rows), and whether rows
    have paths of their own. Without one a row is named by its place, which changes with its files.

    Raises DataError for missing columns, and for data files outside of the table and the fence.
    """
    # Without label and split roles, the table gives both columns in their own types, not as text.
    # So the condition on labels is put in full here.
    roles = Columns(
        image=columns.image,
        id="",
        label="",
        split="",
    )
    table = ImageTable.open(
        TableConfig(
            uri=uri,
            columns=roles,
            storage_options=storage_options,
        )
    )
    pinned = table.pin(version)

    # Check columns and files before any of them is read.
    schema = pa.schema(table.at(pinned).schema().to_arrow())
    columns.check(pinned, schema)
    tell_of_split(pinned, schema.names, columns.label_and_split)
    require(pinned, schema.names, *where)
    inside.require(table, pinned, fence)
    where = conditions.by_class(where, schema, columns.label or "")

    # Rows of raypipe's own tables have a path, which is kept as the candidate's path.
    has_paths = PATH in schema.names and pa.types.is_string(schema.field(PATH).type)
    names = [*columns.label_and_split, PATH] if has_paths else columns.label_and_split
    if not names:
        # The scan needs one column to say which rows there are: any small one will do.
        others = [name for name in schema.names if name != columns.image]
        names = others[:1] or [columns.image]
    names = list(dict.fromkeys(names))

    parts = []
    located = scan.located(table, pinned, names, where)
    for number, (group, rows) in enumerate(located):
        group_candidates = _candidates(group, rows, str(number), columns)
        if has_paths:
            group_candidates = _with_paths(group_candidates, rows)
        reader = Rows(group, columns.image, fence, storage_options)
        parts.append(Part(reader, group_candidates, ROWS_A_CALL))
    return parts, pinned, has_paths


def _candidates(
    group: Fragment, rows: pa.Table, container: str, columns: SourceColumns
) -> list[Candidate]:
    """The rows of one row group as candidates."""
    at: list[tuple[int, ...]] = []
    for row in rows[scan.ROW].to_pylist():
        at.append((row,))
    listed = candidates(
        columns.rows(rows),
        container,
        columns,
        size=group.bytes // max(1, group.rows),
        at=at,
    )
    return list(listed)


def _with_paths(group_candidates: list[Candidate], rows: pa.Table) -> list[Candidate]:
    """The candidates with the whole path that the table has for them."""
    with_paths = []
    paths = rows[PATH].to_pylist()
    for candidate, path in zip(group_candidates, paths, strict=True):
        with_paths.append(candidate._replace(path=path or candidate.path))
    return with_paths
