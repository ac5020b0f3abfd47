"""Decisions about challengers, as rows of a Delta table."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from raypipe.config import RunConfig, to_json
from raypipe.tables.commits import rows_named
from raypipe.watch import foreign_row
from raypipe.watch.comparison import Comparison
from raypipe.watch.decide import Decision
from raypipe.watch.evidence_row import now
from raypipe.watch.limits import Measured, Named
from raypipe.watch.settings import WatchConfig

_NUMBERS = "champion", "challenger", "p_value", "spread"  # of a comparison

ROW = pa.schema(
    [
        (n, pa.string())
        for n in ("key", "champion", "challenger", "table", "slices", "reason", "decided_at")
    ]
    + [("promoted", pa.bool_()), ("format", pa.int32())]
)
# Of a row; a key of format 1 named fewer things, so its rows are not looked at and the comparison
# is made again.
FORMAT = 2


def find(run: RunConfig, watch: WatchConfig, key: str) -> dict[str, Any] | None:
    """The row of the decision with this key, if there is one."""
    place = watch.place(run, "decisions")
    rows = rows_named(place, {"key": key}, None, watch.storage_options).to_pylist()
    return rows[0] if rows else None


def as_row(
    key: str,
    parts: tuple[Any, Any, Any],
    slices: tuple[Comparison, ...],
    union: Comparison | None,
    decision: Decision,
    named: tuple[Named, ...] = (),
    measured: Measured | None = None,
    seals: tuple[str | None, str | None] = (None, None),
) -> pa.Table:
    """The decision as its row of the table `decisions`; `decided` reads it.

    seals: of the packages of champion and challenger, as another registry may have models of these
    names.
    """
    champion, challenger, table = map(str, parts)
    row = {
        "key": key,
        "champion": champion,
        "challenger": challenger,
        "table": table,
        "promoted": decision.act,
    }
    judged: dict[str, Any] = {"slices": [asdict(s) for s in slices]}
    judged["union"] = asdict(union) if union else None
    # Without limits a row is as it always was.
    if named:
        judged["named"] = [asdict(one) for one in named]
    if measured is not None:
        judged["measured"] = measured.as_json()
    if any(seals):
        judged["seals"] = seals
    row |= {
        "reason": decision.reason,
        "slices": to_json(judged),
        "decided_at": now().isoformat(),
        "format": FORMAT,
    }
    return pa.Table.from_pylist([row], ROW)


def decided(row: dict[str, Any]) -> tuple[tuple[Comparison, ...], Comparison | None, Decision]:
    """(slices, all rows together, decision) from a row that `as_row` wrote.

    Raises DataError for another row: a promotion must not rest on it.
    """
    with foreign_row.refused("decisions", "decision", row):
        judged = json.loads(row["slices"])
        slices = tuple(map(_comparison, judged["slices"]))
        # Without any row there was nothing to compare.
        union = _comparison(judged["union"]) if judged["union"] else None
        act, reason = row["promoted"], row["reason"]
        if type(act) is not bool or type(reason) is not str:
            raise ValueError("no decision")
        return slices, union, Decision(act, reason)


def _comparison(fields: dict[str, Any]) -> Comparison:
    """JSON has null for a number that is not finite; the unit may be null itself."""
    lost = [name for name in _NUMBERS if name in fields and fields[name] is None]
    return Comparison(**fields | dict.fromkeys(lost, math.nan))


def limited(row: dict[str, Any]) -> dict[str, Any]:
    """`named` and `measured` of a result, from a row that `as_row` wrote. Raises as `decided`."""
    with foreign_row.refused("decisions", "decision", row):
        judged = json.loads(row["slices"])
        named = tuple(
            Named(one["name"], _comparison(one["judged"]) if one["judged"] else None)
            for one in judged.get("named", ())
        )
        measured = judged.get("measured")
        return {"named": named, "measured": Measured.read(measured) if measured else None}
