"""Another Delta table with an image column: one part a row group of a pinned version, read as the log means it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from raypipe.tables import fragment, scan
from raypipe.tables.conditions import Where
from raypipe.tables.fragment import Fragment, Options
from raypipe.tables.sources import inside
from raypipe.tables.sources.candidate import Candidate, Part, Read
from raypipe.tables.sources.columns import Wanted, candidates, value
from raypipe.tables.sources.fence import Fence
from raypipe.tables.sources.labels import require
from raypipe.tables.table import Columns, ImageTable, TableConfig, TableVersion

ROWS_A_CALL = 1024


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
            yield value(images[candidate.at[0]], candidate, self.fence)


def row_groups(
    uri: str,
    version: int | str | None,
    where: Where,
    wanted: Wanted,
    fence: Fence,
    storage_options: Options,
) -> tuple[list[Part], TableVersion]:
    """The rows of one version, and which version it is: where the new rows come from."""
    # Without a label and a split of its own the table gives both columns as they are, not as the text of a name.
    columns = Columns(image=wanted.image, id="", label="", split="")
    table = ImageTable.open(TableConfig(uri=uri, columns=columns, storage_options=storage_options))
    pinned = table.pin(version)
    schema = pa.schema(table.delta(pinned.version).schema().to_arrow())
    wanted.check(pinned, schema)
    require(pinned, schema.names, *where)
    inside.require(table, pinned, fence)
    named = (
        ["path"] if "path" in schema.names and pa.types.is_string(schema.field("path").type) else []
    )
    others = [f.name for f in schema if f.name != wanted.image]
    small = [*wanted.small, *named] or others[:1]  # any column tells which rows there are
    parts = []
    for number, (group, rows) in enumerate(
        scan.located(table, pinned, list(dict.fromkeys(small)), where)
    ):
        at: list[tuple[int, ...]] = [(row,) for row in rows[scan.ROW].to_pylist()]
        size = group.bytes // max(1, group.rows)
        found = list(candidates(wanted.rows(rows), str(number), wanted, size, at))
        if named:  # the whole path, as that table has it
            found = [
                c._replace(path=path or c.path)
                for c, path in zip(found, rows["path"].to_pylist(), strict=True)
            ]
        parts.append(Part(Rows(group, wanted.image, fence, storage_options), found, ROWS_A_CALL))
    return parts, pinned
