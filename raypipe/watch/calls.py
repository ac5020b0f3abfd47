"""Whether a check called for a retrain, as rows of a Delta table: why one began, and why none did.

A row is written when it is decided, before anything is trained. A check that is looked at again
gets a new row only if the answer differs from the last one, as when labels came; so a rerun, a kill
or two processes at once add none.
"""

from __future__ import annotations

from functools import partial

import pyarrow as pa

from raypipe.config import RunConfig, key_of
from raypipe.tables import retries
from raypipe.tables.commits import TRIES, require_rows_of, rows_named, rows_once
from raypipe.watch import history, policy
from raypipe.watch.check import CheckResult
from raypipe.watch.cycle import Journal
from raypipe.watch.decide import Decision
from raypipe.watch.evidence_row import now
from raypipe.watch.settings import WatchConfig

FORMAT = 1
ROW = pa.schema(
    [
        (name, pa.string())
        for name in ("key", "about", "name", "model", "champion", "reason", "decided_at")
    ]
    + [("number", pa.int64()), ("act", pa.bool_()), ("format", pa.int32())]
    # Of the champion's package: another registry may have a version of this name and number. Null
    # in rows of an older raypipe.
    + [("seal", pa.string())]
)


def keep(
    run: RunConfig,
    watch: WatchConfig,
    about: str,
    model: str,
    champion: str,
    decision: Decision,
    only_first: bool = False,
    seal: str | None = None,
) -> None:
    """Keep a decision about a retrain, unless the last one of the same check is equal.

    about: the key of the check, or what else the run is called. model: without its version.
    champion: with it. only_first: a check that has an answer already keeps it. seal: of the
    champion's package.
    """
    place, options = watch.place(run, "calls"), watch.storage_options
    for attempt in range(1, TRIES + 1):
        found = rows_named(place, {"about": about, "model": model}, None, options)
        require_rows_of(ROW, found, place, {"seal"})
        mine = sorted(found.to_pylist(), key=lambda row: int(row["number"]))
        if mine and (only_first or _same(mine[-1], decision, champion)):
            return
        number = mine[-1]["number"] + 1 if mine else 1
        key = key_of("call", FORMAT, about, model, number)
        row = {
            "key": key,
            "about": about,
            "name": watch.name,
            "model": model,
            "champion": champion,
            "reason": decision.reason,
            "decided_at": now().isoformat(),
            "number": number,
            "act": decision.act,
            "format": FORMAT,
            "seal": seal,
        }
        make = partial(pa.Table.from_pylist, [row], ROW)
        why = f"retrain {model}: {'yes' if decision.act else 'no'}"
        stored = rows_once(place, ROW, {"key": key}, make, why, options)
        if only_first or _same(stored.to_pylist()[0], decision, champion):
            return
        # Another process was first, with another answer: this one comes after it.
        retries.pause(attempt)
    raise retries.busy(place, f"{TRIES} tries")


def _same(row: dict[str, object], decision: Decision, champion: str) -> bool:
    said = (row["act"], row["reason"], row["champion"])
    return said == (decision.act, decision.reason, champion)


def of_check(
    run: RunConfig,
    watch: WatchConfig,
    scope: str,
    model: str,
    seal: str | None,
    checked: CheckResult | None,
) -> Decision:
    """What the policy says of a check before anybody looks for labels, as if there were enough.

    scope: NAME@ALIAS of the model. model: with its version. seal: of its package. checked: None on
    a night with too few images: then earlier checks decide, as in a retrain.

    A retrain that was killed or failed is no earlier one: raypipe retrain goes on with it, where
    the training table has the same rows still. One that is under way is.
    """
    past = _journal(run, watch, scope)
    known = history.checks(run, watch, model, checked, seal)
    tried = history.tried(past, past.broken, watch, run, now())
    enough = {"": watch.policy.min_images}
    return policy.retrain(known, enough, tried, now(), watch.policy)


def alone(run: RunConfig, watch: WatchConfig, scope: str, decision: Decision) -> Decision:
    """The decision of `of_check` as raypipe drift keeps it, which trains nothing."""
    if not decision.act:
        return decision
    found = f"{decision.reason.partition(', and labels')[0]}, and the policy calls for a retrain"
    # Without a cooldown, one that is under way is no obstacle; a second one would end at once.
    busy = _journal(run, watch, scope).under_way
    return Decision(False, f"{found}. {busy}" if busy else f"{found}: raypipe retrain begins one")


def _journal(run: RunConfig, watch: WatchConfig, scope: str) -> Journal:
    return Journal(watch.place(run, "retrains"), scope, watch.storage_options)
