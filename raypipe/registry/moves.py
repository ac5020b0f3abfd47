"""The table of alias moves: an append-only Delta table that all hosts of one MLflow store share.

Each row is one move of one alias of one model. A move is committed directly after the newest commit
that was read, or not at all (tables/commits.py), so of two promoters exactly one wins. A model is
told apart from one of the same name in another MLflow store by its time of creation.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from raypipe.errors import DataError
from raypipe.tables import scan
from raypipe.tables.address import resolve
from raypipe.tables.commits import (
    append_once,
    json_of,
    newest,
    require_columns_of,
    require_rows_of,
)
from raypipe.tables.provenance import commit_properties
from raypipe.tables.table import ImageTable

if TYPE_CHECKING:
    from raypipe.registry.store import Store

Why = Literal["promotion", "rollback", "by hand"]
SCHEMA = pa.schema(
    [
        ("number", pa.int64()),
        ("model", pa.string()),
        # When MLflow made the model, in ms.
        ("model_made", pa.int64()),
        ("alias", pa.string()),
        ("version_from", pa.int64()),
        ("version_to", pa.int64()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("who", pa.string()),
        ("why", pa.string()),
        ("note", pa.string()),
        ("evidence", pa.string()),
        ("store", pa.string()),
    ]
)


@dataclass(frozen=True)
class Move:
    """One move. Versions are None where there is no alias; `at` is UTC; evidence holds keys."""

    number: int
    version_from: int | None
    version_to: int | None
    at: datetime
    who: str
    why: str
    note: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.why} by {self.who} at {self.at:%Y-%m-%d %H:%M:%S} UTC"


@dataclass(frozen=True)
class History:
    """The moves of one alias, oldest first, and the version of the table that they were read of."""

    moves: tuple[Move, ...]
    base: Any

    @property
    def newest(self) -> Move | None:
        return self.moves[-1] if self.moves else None

    def rolled_back(self, version: int) -> Move | None:
        """The rollback that bars this version; None if it never was, or was moved to since."""
        for move in reversed(self.moves):
            if move.version_to == version:
                return None
            if move.version_from == version and move.why == "rollback":
                return move
        return None

    def of_decision(self, key: str | None) -> Move | None:
        """The move that carried out the decision with this key."""
        found = (move for move in self.moves if key and move.evidence.get("decision") == key)
        return next(found, None)

    def before(self, version: int | None) -> int | None:
        """The version that was in use before this one, leaving out barred ones."""
        # Moves by hand may lead back to the version in use, which does not come before itself.
        seen: set[int] = set()
        while version is not None and version not in seen:
            if seen and self.rolled_back(version) is None:
                return version
            seen.add(version)
            version = self._replaced(version)
        return None

    def _replaced(self, version: int) -> int | None:
        for place in reversed(range(len(self.moves))):
            move = self.moves[place]
            # A rollback came from a later version, not from an earlier one.
            if move.version_to != version or move.why == "rollback":
                continue
            # Somebody may have deleted the alias: then what it named before that was replaced.
            ends = (one.version_from for one in reversed(self.moves[: place + 1]))
            before = next((end for end in ends if end is not None), None)
            if before != version:
                return before
        return None

    def used(self) -> set[int]:
        """Every version that the alias has named."""
        ends = {end for move in self.moves for end in (move.version_from, move.version_to)}
        return {end for end in ends if end is not None}


def read(store: Store) -> History:
    """The moves of the store's alias. Raises DataError for a table that is none of moves."""
    path = resolve(store.moves)
    if not ImageTable.exists(path, store.moves_options):
        return History((), None)
    base = newest(path, store.moves_options)
    if base is None:
        return History((), None)
    require_columns_of(SCHEMA, base, path, "promotion")
    table = ImageTable(path, storage_options=store.moves_options)
    have = {column.name for column in base.schema().fields}
    missing = [name for name in SCHEMA.names if name not in have]
    if missing:
        raise DataError(
            f"{path} is no table of moves",
            got=f"no column {missing[0]}",
            rule=f"Its columns are {', '.join(SCHEMA.names)}",
            fix="Set registry.moves to another place",
        )
    where: scan.Where = {"model": store.model, "alias": store.alias}
    rows = scan.rows(table, table.pin(base.version()), SCHEMA.names, where)
    require_rows_of(SCHEMA, rows, path, {"version_from", "version_to"})
    made = _made(store) if len(rows) else None
    found = [_move(row, path) for row in rows.to_pylist() if row["model_made"] == made]
    return History(tuple(sorted(found, key=lambda move: move.number)), base)


def append(
    store: Store,
    history: History,
    ends: tuple[int | None, int | None],
    why: Why,
    note: str = "",
    evidence: Mapping[str, Any] | None = None,
    by: str = "",
) -> Move:
    """Commit a move from ends[0] to ends[1] directly after `history`.

    Raises tables.commits.Moved if somebody else committed first, DataError if the table cannot be
    written.
    """
    newest = history.newest
    number = newest.number + 1 if newest else 1
    now = datetime.now(UTC)
    move = Move(number, *ends, now, by or who(), why, note, dict(evidence or {}))
    row = {
        "number": number,
        "model": store.model,
        "model_made": _made(store),
        "alias": store.alias,
        "version_from": move.version_from,
        "version_to": move.version_to,
        "at": now,
        "who": move.who,
        "why": why,
        "note": note,
        "evidence": json.dumps(move.evidence),
        "store": store.uri,
    }
    text = f"{why} {store.model}@{store.alias}: version {ends[0]} to {ends[1]}"
    rows = pa.Table.from_pylist([row], SCHEMA)
    options = store.moves_options
    path = resolve(store.moves)
    append_once(path, rows, history.base, commit_properties(text), storage_options=options)
    return move


def _move(row: Mapping[str, Any], path: str) -> Move:
    kept = {name: row[name] for name in Move.__annotations__ if name != "evidence"}
    return Move(**kept, evidence=json_of(row["evidence"], path))


def _made(store: Store) -> int | None:
    """When MLflow made the model, in ms; None if it was deleted since."""
    from mlflow.exceptions import MlflowException

    try:
        return int(store.client.get_registered_model(store.model).creation_timestamp or 0)
    except MlflowException as e:
        if e.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise


def who() -> str:
    """USER@HOST, and the Ray job if this is one."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # in a container the user may have no name
        user = "unknown"
    job = os.environ.get("RAY_JOB_ID") or os.environ.get("DATABRICKS_JOB_ID")
    return f"{user}@{socket.gethostname()}" + (f" (job {job})" if job else "")
