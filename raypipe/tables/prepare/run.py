"""Prepare a table once: its images decoded, made smaller and coded again, for data that is read
more than once.

How it goes:
1. `plan` says which rows of the source are missing: all, or those that were appended since.
2. Ray tasks (workers.py) make one file a part (parts.py), anywhere on the cluster. A finished file
   is noted beside the table (staged.py), so a run that goes on after a kill, or beside another,
   does not make it again.
3. One commit (commit.py) names all files, directly on the version that step 1 knew. Until then the
   table has none of the rows, so nobody trains on half of them.

The table says which version it stands for (tables/prepared.py). This process holds a line for each
file, and no image.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable

from raypipe import stores
from raypipe.cluster.folder import require_shared
from raypipe.config import key_of
from raypipe.errors import DataError
from raypipe.images.smaller import Shape
from raypipe.tables import prepared, retries, storage
from raypipe.tables.commits import TRIES, Moved
from raypipe.tables.prepare import parts, workers
from raypipe.tables.prepare.commit import commit
from raypipe.tables.prepare.parts import Coding
from raypipe.tables.prepare.plan import Plan, Work, address, plan, source_schema
from raypipe.tables.prepare.staged import Made, Staged
from raypipe.tables.table import ImageTable, TableConfig, TableVersion

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class PrepareResult:
    """table: the prepared one. source: the version that it stands for. rows: of the table.

    made: rows that were added now; 0: there was nothing to do. Of these rows, broken: images that
    were kept as they are, by reason; bytes_before, bytes_after: of all images. files: added now;
    shared: how many of them other runs had made.
    """

    table: TableVersion
    source: TableVersion
    rows: int
    made: int = 0
    broken: dict[str, int] = field(default_factory=dict)
    bytes_before: int = 0
    bytes_after: int = 0
    files: int = 0
    shared: int = 0


def prepare(
    source: TableConfig,
    dst: str,
    shape: Shape,
    tasks: int | None = None,
    full: bool = False,
    progress: Progress = lambda done, total: None,
    connect: Callable[[], object] = lambda: None,
) -> PrepareResult:
    """Bring the prepared table at `dst` up to the version that `source` names.

    tasks: run at a time; None: one a CPU of the cluster. full: where the table cannot be brought up
    to this version, replace what it holds, in one commit. progress: (rows done, all rows). connect:
    called once there is work for a cluster.

    Raises DataError, before anything is written, for a source without images, a place that is
    taken, and a prepared table that cannot be brought up to this version. Two calls at once add
    every row once.
    """
    table, version = ImageTable.open_pinned(source)
    work = Work(table, version, source, shape, address(dst, table.uri))
    first = work.open()
    for _ in range(TRIES):
        base = work.open()
        # Somebody else may have made it anew meanwhile.
        is_first = _number(base) == _number(first)
        planned = plan(work, base, full and is_first)
        if planned is None:
            assert base is not None
            return _result(work, base, [], 0)
        connect()
        try:
            return _make(work, planned, tasks, progress)
        except Moved:
            # At random: otherwise rivals would meet again.
            time.sleep(random.uniform(0, 0.1))
    raise retries.busy(work.dst, f"{TRIES} tries")


def _number(base: DeltaTable | None) -> int:
    return -1 if base is None else prepared.number_of(base)


def _make(work: Work, planned: Plan, tasks: int | None, progress: Progress) -> PrepareResult:
    """Make the missing parts and commit all. Raises Moved if somebody else has, meanwhile."""
    cut = parts.cut(planned.rows)
    # The same parts have the same key: whoever makes them shares them.
    names = [[one.file, one.row_group, one.deleted.hex()] for one in planned.rows.fragments]
    key = key_of("prepare", work.line, work.roles, work.version.identity, planned.since, names)
    staged = Staged(work.dst, key, work.options)
    done = _begun(staged) if cut else {}
    missing = [part for part in cut if part.number not in done]
    shared = len(done)
    if missing and "://" not in stores.local(work.dst):
        _require_shared(work.dst)

    total = sum(part.rows for part in cut)
    rows = total - sum(part.rows for part in missing)
    progress(rows, total)
    for made, is_own in workers.stream(missing, _coding(work, planned, staged), tasks):
        done[made.number] = made
        shared += not is_own
        rows += made.rows
        progress(rows, total)

    ordered = [done[part.number] for part in cut]
    _require_files(staged, ordered)
    out = commit(work, planned, ordered)
    staged.clear()
    return _result(work, out, ordered, shared)


def _begun(staged: Staged) -> dict[int, Made]:
    """What other runs have made of this work. Raises DataError where nothing can be written."""
    try:
        staged.begin()
        return staged.all()
    except (OSError, pa.ArrowException) as e:
        what = "The prepared table cannot be written"
        raise storage.refusal(e, staged.uri, what, "Check that the folder can be written") from None


def _require_shared(dst: str) -> None:
    """Before hours of work, and not at their end."""
    folder = Path(stores.local(dst))
    fix = "Name a folder that all nodes share, or an object store"
    require_shared(folder, {"CPU": 1}, "DST", fix)


def _coding(work: Work, planned: Plan, staged: Staged) -> Coding:
    # Each part brings its own row groups.
    reading = replace(planned.rows, fragments=[], counts=[])
    schema, columns = source_schema(work), work.table.columns
    return Coding(schema, reading, columns, work.shape, work.options, staged)


def _require_files(staged: Staged, made: list[Made]) -> None:
    """Raise DataError if this process does not see what the workers have written."""
    if not made:
        return
    sizes = staged.sizes()
    lost = [one.name for one in made if sizes.get(one.name) != one.size]
    if lost:
        raise DataError(
            f"{len(lost)} of {len(made)} files are not in {staged.uri}",
            got=lost[0],
            rule="The workers have written them to another disk, or somebody has removed them",
            fix="On several nodes, name a folder that all of them share, or an object store; "
            "then run the same command again",
        )


def _result(work: Work, out: DeltaTable, made: list[Made], shared: int) -> PrepareResult:
    origin = prepared.origin_of(out)
    assert origin is not None
    broken = Counter[str]()
    for one in made:
        broken.update(one.broken)
    table_id = str(out.metadata().id)
    return PrepareResult(
        table=TableVersion(work.dst, out.version(), table_id, str(origin), origin.table_id),
        source=work.version,
        rows=origin.rows,
        made=sum(one.rows for one in made),
        broken=dict(broken),
        bytes_before=sum(one.bytes_before for one in made),
        bytes_after=sum(one.bytes_after for one in made),
        files=len(made),
        shared=shared,
    )
