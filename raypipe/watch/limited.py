"""What the limits of the gate (limits.py) are about: rows of named slices, latencies and sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import pyarrow as pa
import pyarrow.compute as pc

from raypipe.errors import ConfigError, DataError
from raypipe.feed.dataset import Pinned
from raypipe.models.spread import Spread
from raypipe.registry.package import Package
from raypipe.serve import latency
from raypipe.tables import conditions, label_column, scan
from raypipe.train import learned
from raypipe.train.job import TrainJob
from raypipe.watch.comparison import compare
from raypipe.watch.limits import LimitsConfig, Measured, Named


def rows_of(cfg: LimitsConfig, job: TrainJob, pinned: Pinned) -> dict[str, AbstractSet[str]]:
    """The ids of the labelled test rows of each named slice; "" of a row without one.

    Of labelled rows only, as those that are compared: another row of the same id, which nobody
    judges, puts none into a slice. Raises ConfigError for a condition that the table cannot hold.
    """
    table, version, tests = pinned.table, pinned.version, pinned.rows_of(job.feed.test)
    schema = pa.schema(table.at(version).schema().to_arrow())
    names_of, kind = table.columns, pinned.task.kind
    found: dict[str, AbstractSet[str]] = {}
    for limit in cfg.slices:
        missing = sorted(set(limit.where) - set(schema.names))
        if missing:
            raise ConfigError(
                f"The slice {limit.name} names a column that the table does not have",
                got=f"gate.slices where {', '.join(missing)}",
                rule=f"Columns of {version}: {', '.join(schema.names)}",
                fix="Name a column of the table, or leave the slice out",
            )
        where = conditions.both(tests, limit.where, schema, names_of.label)
        wanted = list(dict.fromkeys([names_of.id, names_of.label]))
        rows = scan.rows(table, version, wanted, where)
        labels = label_column.read(rows[names_of.label], kind, names_of.label)
        ids = rows[names_of.id].filter(labels.is_valid()).to_pylist()
        found[limit.name] = {"" if one is None else str(one) for one in ids}
    return found


def require_own_ids(judged: pa.Table, ids: Mapping[str, AbstractSet[str]]) -> None:
    """Raise DataError if there are named slices, and ids name several rows: then nobody knows which
    of them are in a slice.

    judged: all rows, before one of each group is drawn.
    """
    if not ids or not len(judged):
        return
    if pc.count_distinct(judged["id"]).as_py() != len(judged):
        raise DataError(
            "Named slices need test images with ids of their own",
            got=f"{len(judged)} labelled test images, "
            f"{pc.count_distinct(judged['id']).as_py()} different ids",
            fix="Set table.columns.id to a column that names each image, or leave out gate.slices",
        )


def compared(
    judged: pa.Table, ids: Mapping[str, AbstractSet[str]], unit: float | None
) -> tuple[Named, ...]:
    """Both models on each named slice.

    judged: the rows that are compared. ids: of each slice's rows.
    """
    if not len(judged):
        return tuple(Named(name, None) for name in ids)
    found = []
    for name, inside in ids.items():
        rows = judged.filter(pc.is_in(judged["id"], pa.array(sorted(inside), pa.string())))
        if not len(rows):
            found.append(Named(name, None))
            continue
        champion, challenger = rows["model_0"].to_pylist(), rows["model_1"].to_pylist()
        found.append(Named(name, compare(name, champion, challenger, False, unit)))
    return tuple(found)


def size_of(files: Mapping[str, bytes]) -> int:
    """What a server loads. Lists of rows that the weights have learned from grow with each retrain,
    and say nothing about the model."""
    lists = (learned.OWN, learned.INHERITED)
    return sum(len(content) for name, content in files.items() if name not in lists)


def measured(
    packages: Sequence[Package],
    cfg: LimitsConfig,
    job: TrainJob,
    pinned: Pinned,
    say: Callable[[str], None],
) -> Measured | None:
    """Size of champion and challenger, in this order, and their latency if it has a limit.

    None where nothing is limited.
    """
    if not cfg.measures:
        return None
    champion_bytes, challenger_bytes = (size_of(one.files) for one in packages)
    wanted = (pinned, job.feed.test, job.model.pixels, job.feed.cpu_threads)
    images = latency.images(*wanted) if cfg.times else []
    if not images:
        return Measured(champion_bytes, challenger_bytes)
    say(f"Measuring the latency of both models on batches of {cfg.latency_batch}")
    times = latency.measure(packages, images, cfg.latency_batch)
    champion = [took[0] for took in times.times_RM]
    challenger = [took[1] for took in times.times_RM]
    return Measured(
        champion_bytes,
        challenger_bytes,
        champion_ms=Spread.of(champion),
        challenger_ms=Spread.of(challenger),
        ratio=Spread.of([b / a for a, b in zip(champion, challenger, strict=True)]),
        batch=times.batch,
        rounds=len(times.times_RM),
        machine=times.machine,
    )
