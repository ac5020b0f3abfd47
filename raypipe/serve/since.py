"""What a prediction has to predict: all rows of its version, or what changed since an earlier one.

`tables/between.py` tells from the log what changed. Where the log cannot (its old commits were
cleaned up, or files of the earlier version vacuumed), all images of the version are compared with
the rows of the earlier prediction, by id and sha256: that reads each image and predicts none twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from raypipe.config import key_of
from raypipe.errors import DataError, Unreachable
from raypipe.serve.links import Link, Links, batches, finished
from raypipe.serve.predicted_rows import gone
from raypipe.tables import between
from raypipe.tables.between import NOTHING_N2, Difference, Rows
from raypipe.tables.conditions import Where
from raypipe.tables.parts import PartTable
from raypipe.tables.table import ImageTable, TableVersion

Say = Callable[[str], None]
LOOK_AGAIN = 50
"""Files that may be looked at again with each version, before it is noted that they have nothing.
A note is a commit to the predictions table; to look at 50 files took 0.04 s on a disk."""


@dataclass(frozen=True)
class Plan:
    """A prediction that is to be made.

    rows: what is predicted. gone: rows that say what went from the base (predicted_rows.gone).
    costly: finding that out took long, so that it should not be done again.
    """

    key: str
    base: Link | None
    rows: Rows
    gone: pa.Table
    costly: bool

    @property
    def images(self) -> int:
        return sum(self.rows.counts)

    @property
    def size(self) -> int:
        """Rows of the prediction itself."""
        return self.images + len(self.gone)


@dataclass(frozen=True)
class Target:
    """A version of a table that is to have a prediction.

    line: what its predictions have in common with those of other versions. state: of its rows
    (between.state). key: of a prediction of all its rows.
    """

    line: str
    version: int
    state: str
    key: str

    def is_of(self, link: Link) -> bool:
        """Is it a prediction of this version? The number alone may mean other rows: a table may
        have been restored from a backup.
        """
        mine = (self.line, self.version, self.state)
        return mine == (link.line, link.version, link.state)


def made(known: Links, target: Target) -> str | None:
    """The key of a finished prediction of this version; that of all its rows if there is one."""
    keys = sorted(key for key in finished(known) if target.is_of(known[key]))
    # Those that add to an earlier prediction have keys of their own, and the same rows.
    if target.key in keys:
        return target.key
    return keys[0] if keys else None


def _begun(known: Links, line: str) -> list[Link]:
    """The predictions of a line that can be gone on with, those with most rows first."""
    whole = finished(known)
    half: list[Link] = []
    for link in known.values():
        has_base = link.base is None or link.base in whole
        if link.line == line and link.have < link.rows and has_base:
            half.append(link)
    return sorted(half, key=lambda link: link.have, reverse=True)


def _earlier(known: Links, target: Target) -> list[Link]:
    """The finished predictions of earlier versions."""
    links = [known[key] for key in finished(known)]
    return [one for one in links if one.line == target.line and one.version < target.version]


@dataclass(frozen=True)
class Claim:
    """What somebody has begun to predict, told before its first row: version, and the base's.

    Whoever predicts with since=last goes on with it, and begins nothing else beside it. So two that
    see different versions do not both predict the rows between. It is kept in the log of the
    predictions table.
    """

    version: int
    base: int | None

    @classmethod
    def of(cls, out: PartTable, line: str) -> Claim | None:
        version = out.noted(f"raypipe.{line}.version")
        base = out.noted(f"raypipe.{line}.base")
        if version is None or base is None:
            return None
        return cls(version, None if base < 0 else base)

    def make(self, out: PartTable, line: str) -> bool:
        """False if somebody has committed since `out` was opened; then look again."""
        base = -1 if self.base is None else self.base
        return out.note({f"raypipe.{line}.version": self.version, f"raypipe.{line}.base": base})


def unfinished(known: Links, target: Target, claim: Claim | None) -> list[int]:
    """The versions whose predictions were begun and are of use, the earliest first.

    Of use: a later version that is finished is what a prediction adds to, so what was begun before
    it adds nothing.
    """
    last = max((link.version for link in _earlier(known, target)), default=-1)
    versions = {link.version for link in _begun(known, target.line)}
    if claim:
        versions.add(claim.version)
    # A later one that is finished needs nobody either.
    whole = {known[key].version for key in finished(known) if known[key].line == target.line}
    return sorted(number for number in versions - whole if number > last)


def base_of(known: Links, target: Target, claim: Claim | None, since_last: bool) -> Link | None:
    """The prediction to add to; None: predict all rows.

    One that was begun is gone on with, whatever was asked: its rows are there already.
    """
    # What was begun of this version is gone on with.
    for link in _begun(known, target.line):
        if target.is_of(link):
            return known[link.base] if link.base else None
    if not since_last:
        return None

    # Else the last finished one, or that of whoever has begun this version before its first row.
    earlier = _earlier(known, target)
    if claim and claim.version == target.version:
        earlier = [link for link in earlier if link.version == claim.base]
    return max(earlier, key=lambda link: (link.version, link.key), default=None)


@dataclass(frozen=True)
class Looked:
    """A version that has the same rows as the base has; without a base, that has none.

    It is kept in the log of the predictions table. With a rare `where` a stream would else look at
    all files since the base each time, and they become more and more.
    version: its number. rows: names its state and the base.
    """

    version: int
    rows: int

    @classmethod
    def at(cls, version: int, state: str, base: Link | None) -> Looked:
        name = key_of("looked", state, base.key if base else None)
        # The log keeps whole numbers of 64 bits: the 12 hexadecimal digits have 48.
        return cls(version, int(name, 16))

    @classmethod
    def of(cls, out: PartTable, line: str) -> Looked | None:
        version = out.noted(f"raypipe.{line}.looked.version")
        rows = out.noted(f"raypipe.{line}.looked.rows")
        return None if version is None or rows is None else cls(version, rows)

    def note(self, out: PartTable, line: str) -> None:
        """Keep it. If somebody commits at the same moment, it is found out once more later."""
        named = {"version": self.version, "rows": self.rows}
        out.note({f"raypipe.{line}.looked.{name}": value for name, value in named.items()})


def note_nothing(planned: Plan, target: Target, out: PartTable) -> None:
    """Remember that this version brought nothing, if it was costly to find that out."""
    if not planned.size and planned.costly:
        Looked.at(target.version, target.state, planned.base).note(out, target.line)


def _looked(
    table: ImageTable, where: Where, out: PartTable, base: Link | None, target: Target
) -> TableVersion | None:
    """The last version that is known to have the rows of the base. Raises DataError."""
    looked = Looked.of(out, target.line)
    first = base.version if base else -1
    if looked is None or not first < looked.version <= target.version:
        return None
    pinned = table.pin(looked.version)
    # The number may mean other rows now, or the base may be another one.
    state = between.state(table, pinned, where)
    return pinned if looked == Looked.at(looked.version, state, base) else None


def plan(
    table: ImageTable,
    version: TableVersion,
    where: Where,
    out: PartTable,
    base: Link | None,
    target: Target,
    say: Say,
) -> Plan:
    """What is left to do for a version that has no finished prediction.

    out: the predictions. say: told where the log cannot answer. Raises DataError as tables do.
    """
    if base is not None:
        return _since(table, version, where, out, base, target, say)
    try:
        before = _looked(table, where, out, None, target)
        found = between.between(table, before, version, where) if before else None
    except Unreachable:
        raise
    except DataError:
        found = None  # then all files are looked at
    if found is not None:
        return Plan(target.key, None, found.new, gone([], []), _is_costly(found))
    costly = len(table.snapshot(version).paths(table.uri)) > LOOK_AGAIN
    return Plan(target.key, None, between.selected(table, version, where), gone([], []), costly)


def _is_costly(found: Difference) -> bool:
    return found.compared or found.files > LOOK_AGAIN


def _since(
    table: ImageTable,
    version: TableVersion,
    where: Where,
    out: PartTable,
    base: Link,
    target: Target,
    say: Say,
) -> Plan:
    try:
        before = _looked(table, where, out, base, target)
        if before is None:
            before = table.pin(base.version)
            _require_state(table, before, where, base)
        found = between.between(table, before, version, where)
    except Unreachable:
        raise
    except DataError as e:
        say(
            f"What changed since v{base.version} cannot be told from the log ({e.what}): all "
            "images are compared with their predictions, by id and sha256"
        )
        everything = between.selected(table, version, where)
        known_N2 = _predicted(out, base.key)
        found = between.compare(table, everything, known_N2)
    # Of the same base another plan may come, if files were vacuumed meanwhile. Its pieces are
    # other pieces, so it has another name.
    names = [[one.file, one.row_group, one.deleted.hex()] for one in found.new.fragments]
    its_key = key_of("since", target.key, base.key, names)
    gone_rows = _gone(out, base.key, found)
    return Plan(its_key, base, found.new, gone_rows, _is_costly(found))


def _require_state(table: ImageTable, pinned: TableVersion, where: Where, base: Link) -> None:
    """Raise DataError if the version has other rows than those that were predicted."""
    if between.state(table, pinned, where) != base.state:
        raise DataError(f"v{base.version} has other rows now: the table was restored from a backup")


def _predicted(out: PartTable, key: str) -> np.ndarray:
    """The identities of all rows of a prediction."""
    parts = [NOTHING_N2]
    for rows in batches(out.uri, key, ["image_id", "sha256"], out.options):
        ids, hashes = rows["image_id"].to_pylist(), rows["sha256"].to_pylist()
        parts.append(between.identity_of(ids, hashes))
    return np.concatenate(parts)


def _gone(out: PartTable, key: str, found: Difference) -> pa.Table:
    """The ids and hashes of what went, looked up among the base's rows."""
    if not len(found.gone_N2):
        return gone([], [])
    # Equal rows can stand for each other: as many as went are taken.
    wanted = Counter(one.tobytes() for one in found.gone_N2)
    names: list[str | None] = []
    hashes: list[str | None] = []
    for rows in batches(out.uri, key, ["image_id", "sha256"], out.options):
        pairs = list(zip(rows["image_id"].to_pylist(), rows["sha256"].to_pylist(), strict=True))
        identities = between.identity_of(*zip(*pairs, strict=True)) if pairs else NOTHING_N2
        for pair, identity in zip(pairs, identities, strict=True):
            if wanted[identity.tobytes()] > 0:
                wanted[identity.tobytes()] -= 1
                names.append(pair[0])
                hashes.append(pair[1])
    if +wanted:
        raise DataError(
            f"{out.uri} lacks {wanted.total()} rows that it should have of an earlier prediction",
            rule="Rows were removed or changed there",
            fix="Set predict.since=null to predict all rows again",
        )
    # In one order at every run: the rows are cut into pieces.
    order = sorted(range(len(names)), key=lambda n: (names[n] or "", hashes[n] or ""))
    names = [names[n] for n in order]
    hashes = [hashes[n] for n in order]
    return gone(names, hashes)
