"""Reads the predictions table: which predictions it has, and the rows of one.

A prediction may add to another one, its base: then its rows are the base's and its own, without
those that went. `base` leads from one to the next, like the links of a chain. A prediction is
finished when all rows are there that each of its links should have, and until then it has no rows
for any reader.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypipe.errors import DataError
from raypipe.serve import pieces
from raypipe.serve.predicted_rows import CONSTANT
from raypipe.tables import scan
from raypipe.tables.address import resolve
from raypipe.tables.between import identity_of
from raypipe.tables.conditions import Where
from raypipe.tables.parts import Counts, counts
from raypipe.tables.table import ImageTable, TableVersion

Options = dict[str, str] | None


@dataclass(frozen=True)
class Link:
    """What a predictions table has of one prediction, without its base.

    version, state: of the table, by number and by what is in it (between.state).
    rows: how many rows it has when it is finished. have: how many are there, in these parts.
    takes: some of its rows say what went from its base.
    """

    key: str
    line: str
    base: str | None
    version: int
    state: str
    rows: int
    have: int
    parts: tuple[str, ...]
    takes: bool = False

    @property
    def pieces(self) -> set[int]:
        return pieces.numbers(self.parts)


Links = dict[str, Link]  # by key


def links(found: Counts) -> Links:
    """The predictions in a table. found: rows of each part, by the values of CONSTANT.

    Raises DataError for rows that no prediction writes.
    """
    known: Links = {}
    old: dict[str, tuple[int, str]] = {}
    for (line, key, base, version, state, rows, part, gone), have in found.items():
        # An earlier raypipe made it; its keys are other keys.
        if line is None or state is None:
            old[key] = (have, part)
            continue
        new = Link(key, line, base, version, state, rows, 0, ())
        link = known.get(key, new)
        # All rows of a prediction say the same of it, and each belongs to a part.
        is_same = replace(link, have=0, parts=(), takes=False) == new
        if None in (key, version, rows) or not is_same or not pieces.is_part(part):
            raise _foreign(have, key, part)
        parts = (*link.parts, part)
        takes = link.takes or gone is not None
        known[key] = replace(link, have=link.have + have, parts=parts, takes=takes)
    for key in old.keys() & known.keys():
        raise _foreign(old[key][0], key, old[key][1])
    return known


def _foreign(rows: int, key: str | None, part: str | None) -> DataError:
    """The error for rows of which nobody can say what they belong to."""
    return DataError(
        "The predictions table has rows that raypipe did not write",
        got=f"{rows} with key={key}, part={part}",
        rule="Rows that somebody adds or changes make predictions wrong",
        fix="Delete these rows, or restore the table to its version before them",
    )


def finished(known: Links) -> set[str]:
    """The keys of the predictions that are there as a whole, with all that they add to."""
    is_finished: dict[str, bool] = {}
    for key in known:
        # Walk down to a link that was judged before, or the end; then judge the links on the way.
        way: list[Link] = []
        at: str | None = key
        while at is not None and at in known and at not in is_finished:
            way.append(known[at])
            at = known[at].base
        good = at is None or is_finished.get(at, False)
        for link in reversed(way):
            good = good and link.have == link.rows
            is_finished[link.key] = good
    return {key for key, good in is_finished.items() if good}


def chain(known: Links, key: str) -> list[Link]:
    """A prediction and what it adds to, newest first; none if it is not there, or not finished."""
    links: list[Link] = []
    at: str | None = key
    while at is not None:
        link = known.get(at)
        if link is None or link.have != link.rows:
            return []
        links.append(link)
        at = link.base
    return links


def read_rows(uri: str, key: str, columns: list[str], storage_options: Options = None) -> pa.Table:
    """The rows of one finished prediction; no rows where it was not made, or not to its end.

    All of them are in memory then; `batches` has them one after the other.
    """
    parts = list(batches(uri, key, columns, storage_options))
    return pa.concat_tables(parts) if parts else pa.table({})


def batches(
    uri: str,
    key: str,
    columns: list[str],
    storage_options: Options = None,
    version: int | None = None,
) -> Iterator[pa.Table]:
    """The rows of one finished prediction, some at a time.

    version: of the predictions table; None: the newest.
    """
    path = resolve(uri)
    if not ImageTable.exists(path, storage_options):
        return
    # Pinned: others may add rows meanwhile.
    table = ImageTable(path, storage_options=storage_options)
    pinned = table.pin(version)
    found = chain(links(counts(table, pinned, CONSTANT)), key)
    have = {field.name for field in table.at(pinned).schema().fields}
    if found and {*columns} <= have:
        yield from _rows(table, pinned, found, columns)


def _rows(
    table: ImageTable, pinned: TableVersion, found: list[Link], columns: list[str]
) -> Iterator[pa.Table]:
    keys: Where = {"key": [link.key for link in found]}
    # The log tells whether any rows were taken away: mostly none.
    if not any(link.takes for link in found):
        yield from scan.each(table, pinned, columns, keys)
        return
    wanted = list(dict.fromkeys([*columns, "image_id", "sha256", "gone"]))
    went = _went(table, pinned, keys)
    for rows in scan.each(table, pinned, wanted, keys):
        rows = rows.filter(pc.is_null(rows["gone"]))
        yield _without(rows, went).select(columns)


def _went(table: ImageTable, pinned: TableVersion, keys: Where) -> Counter[bytes]:
    """How many rows of each identity are not in the version any more."""
    went = Counter[bytes]()
    for rows in scan.each(table, pinned, ["image_id", "sha256", "gone"], keys):
        went.update(_identities(rows.filter(pc.is_valid(rows["gone"]))))
    return went


def _identities(rows: pa.Table) -> list[bytes]:
    found = identity_of(rows["image_id"].to_pylist(), rows["sha256"].to_pylist())
    return [one.tobytes() for one in found]


def _without(rows: pa.Table, went: Counter[bytes]) -> pa.Table:
    """The rows that did not go; `went` is counted down. Equal rows can stand for each other."""
    if not went:
        return rows
    stays_N = np.ones(len(rows), bool)
    for place, identity in enumerate(_identities(rows)):
        if went.get(identity):
            stays_N[place] = False
            went[identity] -= 1
    return rows.filter(pa.array(stays_N))
