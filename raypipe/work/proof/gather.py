"""Everything that the eight questions ask for, from where it is kept. What fails becomes a reason.

Reading is all that happens here, but for the alias: like every verb, this brings it in line with
the table of moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypipe.config import RunConfig, validate
from raypipe.errors import DataError, hidden, one_line
from raypipe.feed.dataset import Pinned, pin
from raypipe.registry import fetching, follow, moves, recorded
from raypipe.registry.moves import Move
from raypipe.registry.package import Package
from raypipe.registry.recorded import Recorded
from raypipe.registry.store import Store
from raypipe.registry.versions import ModelVersion
from raypipe.tables import appended, cleaned, identity, label_column, scan
from raypipe.tables.appended import Appended
from raypipe.tables.cleaned import Cleaning
from raypipe.tables.table import Columns
from raypipe.train import described, origin
from raypipe.train.job import TrainJob
from raypipe.train.unseen import Unseen
from raypipe.watch import records
from raypipe.watch.settings import WatchConfig
from raypipe.work.proof.answers import Check

T = TypeVar("T")
NO_TABLE = Appended(())
TOLERANCE = 1e-4  # of a metric that is computed again: the package keeps scores as float32


@dataclass(frozen=True)
class Table:
    """The pinned table as it is now. error: why it cannot be read. rows: by role, as recorded."""

    error: str = ""
    table_id: str = ""
    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    cleaning: Cleaning | None = None


@dataclass(frozen=True)
class Found:
    """What is known of one version. Texts ending in `_error` say why a part is missing."""

    store: Store
    version: ModelVersion
    run: RunConfig
    seal: Check
    info: Mapping[str, Any] = field(default_factory=dict)
    table: Table = Table()
    judged: tuple[Check, ...] = ()
    mlflow: Recorded | None = None
    in_use: int | None = None
    moves: tuple[Move, ...] = ()
    moves_altered: str = ""
    decisions: Appended = NO_TABLE
    checks: Appended = NO_TABLE
    noted: str = ""  # key of the decision that its tag names
    gate: Recorded | None = None
    gate_reason: str | None = None
    drift: Recorded | None = None
    errors: Mapping[str, str] = field(default_factory=dict)

    @property
    def made(self) -> Mapping[str, Any]:
        """What the package says of how it came to be; {} in an older one."""
        made = self.info.get(origin.MADE)
        # Of a later raypipe, its names may mean something else.
        if not isinstance(made, dict) or made.get("format") != origin.FORMAT:
            return {}
        return made

    @property
    def package(self) -> str:
        """The source of what the package says."""
        return f"package.json of {self.version}, sealed {(self.version.seal or '')[:12]}"

    @property
    def move(self) -> Move | None:
        """The newest move that brought the alias to this version."""
        to_it = [move for move in self.moves if move.version_to == self.version.version]
        return to_it[-1] if to_it else None

    @property
    def decision(self) -> Mapping[str, Any] | None:
        """The comparison in which it was the challenger. None: nothing says that one was its own.

        Another registry may have a model of this name, and its records lie in the same folder.
        """
        row, is_named = self.challenged
        return row if is_named or self.gate is not None else None

    @property
    def challenged(self) -> tuple[Mapping[str, Any] | None, bool]:
        """(the newest comparison that its move or its tag names, or else one of its name; whether
        it was named)."""
        move = self.move
        key = (move.evidence.get("decision") if move else None) or self.noted
        mine = [row for row in self.decisions.rows if row.get("challenger") == str(self.version)]
        named = [row for row in self.decisions.rows if key and row.get("key") == key]
        rows = named or mine
        return (rows[-1] if rows else None), bool(named)

    def check_row(self, key: str) -> Mapping[str, Any] | None:
        found = [row for row in self.checks.rows if row.get("key") == key]
        return found[-1] if found else None


def gather(
    store: Store,
    version: ModelVersion,
    run: RunConfig,
    watch: WatchConfig,
    reread: bool = True,
    storage_options: dict[str, str] | None = None,
) -> Found:
    """What is known of a version.

    reread: read its rows' ids and labels again, and compare. storage_options: of the store of its
    table, which no package keeps.
    """
    errors: dict[str, str] = {}

    def tried(part: str, read: Callable[[], T], otherwise: T) -> T:
        # Each record is on its own: a table that is gone must not hide what the others say.
        try:
            return read()
        except Exception as e:
            errors[part] = hidden(one_line(e))
            return otherwise

    package, seal = _package(store, version)
    info: Mapping[str, Any] = package.info if package else {}
    table, judged = Table("The package does not say which"), [_not_again("There is no package")]
    if package is not None:
        nothing = Table("The package cannot be read"), judged
        table, judged = tried("table", lambda: _again(package, reread, storage_options), nothing)
    mlflow = tried("mlflow", lambda: recorded.of_version(store, version), None)
    held = tried("moves", lambda: follow.held(store), None)
    nothing_moved: tuple[Move, ...] = ()
    listed = tried("moves", lambda: moves.read(store).moves, nothing_moved)
    place = store.moves
    log = tried("moves", lambda: appended.read(place, store.moves_options), NO_TABLE)
    decisions = tried("decisions", lambda: records.decisions(run, watch), NO_TABLE)
    checks = tried("checks", lambda: records.checks(run, watch), NO_TABLE)
    noted = tried("mlflow", lambda: recorded.decision_of(store, version), "")
    found = Found(
        store,
        version,
        run,
        seal,
        info,
        table,
        tuple(judged),
        mlflow,
        held.version if held else None,
        tuple(listed),
        log.altered,
        decisions,
        checks,
        noted,
        errors=errors,
    )
    return _with_runs(found, tried)


def _with_runs(found: Found, tried: Callable[..., Any]) -> Found:
    """With the MLflow runs of its decision and of its drift check."""
    row, _ = found.challenged
    key = str((row or {}).get("key", ""))
    gate = tried("gate", lambda: recorded.of_key(found.store, key), None)
    reason = None
    if gate is not None:
        reason = tried("gate", lambda: recorded.text_of(found.store, gate, "decision.txt"), None)

    def check_run() -> Recorded | None:
        evidence = found.made.get("called_for", {}).get("evidence", {})
        return recorded.of_key(found.store, str(evidence.get("check", "")))

    drift = tried("drift", check_run, None)
    return replace(found, gate=gate, gate_reason=reason, drift=drift)


def _package(store: Store, version: ModelVersion) -> tuple[Package | None, Check]:
    what = "The package is the one that was registered"
    try:
        return fetching.fetch(store, version), Check(
            what, True, f"sha256 {(version.seal or '')[:12]}", True
        )
    except fetching.Gone as e:
        return None, Check(what, None, hidden(one_line(e)))
    except DataError as e:
        # Without a seal there is nothing to compare with.
        return None, Check(what, None if version.seal is None else False, hidden(one_line(e)))
    except Exception as e:
        return None, Check(what, None, hidden(one_line(e)))


def _again(
    package: Package, reread: bool, storage_options: dict[str, str] | None
) -> tuple[Table, list[Check]]:
    """The pinned table as it is now, and the metrics of the judged rows, computed again."""
    info = package.info
    try:
        job = validate(TrainJob, info["config"])
        # The address as it was resolved: the configuration's may be relative to another folder.
        named = job.table.model_copy(
            update={
                "uri": info["table"]["uri"],
                "version": info["table"]["version"],
                "storage_options": storage_options,
            }
        )
        # The rows of a split are counted, whether all of them were trained on or not.
        feed = job.feed.model_copy(update={"leave_out": None})
        pinned = pin(named, feed, package.classes or None, package.task.kind)
    except Exception as e:
        return Table(hidden(one_line(e))), [_not_again(hidden(one_line(e)))]
    said = info.get(origin.MADE, {}).get("cleaning")
    was = Cleaning(**said) if said else None
    cleaning = cleaned.of(pinned.table, pinned.version, was)
    if not reread:
        why = "Not tried: --quick reads no rows"
        table = Table("", pinned.version.table_id, {}, cleaning)
        return table, [_not_again(why)]
    try:
        rows = origin.rows_of(job, pinned)
    except Exception as e:
        return Table(hidden(one_line(e)), pinned.version.table_id), [
            _not_again(hidden(one_line(e)))
        ]
    table = Table("", pinned.version.table_id, rows, cleaning)
    try:
        return table, _judged_again(job, pinned, package)
    except Exception as e:
        return table, [_not_again(hidden(one_line(e)))]


def _not_again(why: str) -> Check:
    return Check("The metrics, computed again from the labels and the package's scores", None, why)


def _judged_again(job: TrainJob, pinned: Pinned, package: Package) -> list[Check]:
    """The package keeps ids and scores of the judged rows, and the table their labels."""
    said = package.info.get(origin.MADE, {}).get("judged")
    if not said:
        return [_not_again("The package does not say which rows were judged")]
    reference = package.reference()
    ids = identity.of_ids(reference.ids)
    same = Check(
        "The judged rows are those of the package's reference",
        (ids.ids_sha256, ids.rows) == (said["ids_sha256"], said["images"]),
        f"{ids.rows:,} ids, sha256 {ids.ids_sha256[:12]}",
    )
    labels = _labels(pinned, said["split"], reference.ids)
    if isinstance(labels, str):
        return [same, _not_again(labels)]
    unseen = Unseen(said["split"], reference, pinned.task.encode(labels))
    now = described.judged(job, pinned, unseen)
    checks = [same, _compared("all judged rows", said["metrics"], now.quality.metrics)]
    by_name = {part.name: part for part in now.slices}
    for part in said["slices"]:
        other = by_name.get(part["name"])
        checks.append(_compared(part["name"], part["metrics"], other.metrics if other else {}))
    return checks


def _labels(pinned: Pinned, split: str, ids: tuple[str, ...]) -> list[str] | str:
    """The label of each id; a text that says why not, where one is missing or means two images."""
    columns: Columns = pinned.table.columns
    wanted = pa.array(sorted(set(ids)), pa.string())
    by_id: dict[str, str] = {}
    where = pinned.rows_of(split)
    for part in scan.each(pinned.table, pinned.version, list({columns.id, columns.label}), where):
        labels = label_column.read(part[columns.label], pinned.task.kind, columns.label)
        names = part[columns.id].cast(pa.string())
        inside = pc.is_in(names, value_set=wanted)
        some = zip(names.filter(inside).to_pylist(), labels.filter(inside).to_pylist(), strict=True)
        for name, label in some:
            if label is None:
                continue
            if by_id.get(name, label) != label:
                return f"The id {name} has two labels"
            by_id[name] = label
    missing = [name for name in ids if name not in by_id]
    if missing:
        return f"{len(missing):,} judged ids have no label in {pinned.version}"
    return [by_id[name] for name in ids]


def _compared(name: str, said: Mapping[str, Any], now: Mapping[str, float]) -> Check:
    """Metrics of a slice as recorded, and as computed again."""
    differ = []
    for metric, value in said.items():
        again = now.get(metric)
        # JSON has no NaN: a metric that is not a number is null there.
        was = math.nan if value is None else float(value)
        if again is None or not np.isclose(was, again, TOLERANCE, TOLERANCE, equal_nan=True):
            differ.append(f"{metric} {was:.4g}, now {again}")
    what = f"Metrics of {name}, computed again from the labels and the package's scores"
    return Check(what, not differ, "; ".join(differ) or "equal")
