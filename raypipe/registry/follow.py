"""The alias in MLflow follows the table of moves.

MLflow has no compare-and-set, so a move is committed to the table first. Then the alias is set, the
table is read again (a newer move wins), the alias is read back, and the version gets the tag
`raypipe.move.ALIAS` with the move's number: the move is applied. A table that was deleted begins
again at 1, so `raypipe.moved_at.ALIAS` has the move's number and time.

If the alias differs from the newest move, it is looked at twice, LOOK_AGAIN_S apart, because a
promoter may be between its commit and the alias. If it still differs, this rule tells a crash from
a move by hand:

- The newest move has no tag, and the alias still is where that move began: its process died. The
  alias is set, and one log line says so.
- Otherwise somebody moved the alias in MLflow (or deleted it, or the version). That is recorded as
  a move `by hand`, and stays.

A promoter that sleeps longer than LOOK_AGAIN_S between its look at the table and its call to MLflow
may set an old alias; it mends that when it wakes, unless somebody else has recorded it by then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC
from typing import Any

from raypipe.errors import DataError, RaypipeError
from raypipe.registry import catalog, moves
from raypipe.registry.moves import History, Move
from raypipe.registry.store import Store
from raypipe.tables import retries
from raypipe.tables.commits import TRIES, Moved

log = logging.getLogger("raypipe")
# Tables whose lost moves were told of: a server looks often.
_told: set[tuple[str, str, str]] = set()
# Differences from the table that could be neither recorded nor mended, and were told of.
_unrecorded: set[tuple[str, str, str, int, int | None]] = set()
LOOK_AGAIN_S = 0.5
APPLIED = "raypipe.move."  # tag of a version, with the alias: the number of the applied move
MOVED_AT = "raypipe.moved_at."  # the same: its number and its time
# What MLflow's stores answer where there is no such model, version or alias. Its SQL store calls a
# missing alias an invalid parameter, as it calls much else.
_NOT_THERE = "RESOURCE_DOES_NOT_EXIST", "NOT_FOUND"


@dataclass(frozen=True)
class Held:
    """What the alias names (MLflow's own record of the version, or None), and its moves."""

    entity: Any
    history: History

    @property
    def version(self) -> int | None:
        return int(self.entity.version) if self.entity else None


def look(store: Store) -> Held:
    """The alias and its moves as they are now. Nothing is mended and nothing recorded."""
    return Held(_alias(store), moves.read(store))


def held(store: Store) -> Held:
    """The alias, in line with the table. Raises DataError for a table that cannot be read."""
    seen = None
    for attempt in range(1, TRIES + 1):
        now = look(store)
        move = now.history.newest
        if move is None:
            _tell_of_lost_moves(store, now)
            return now
        if now.version == move.version_to:
            if now.entity is not None and not _has_tag(store, now.entity, move):
                _tag_if_allowed(store, move)
            return now
        difference = (now.version, move.number)
        if seen != difference:
            seen = difference
            time.sleep(LOOK_AGAIN_S)
            continue
        if now.version == move.version_from and not _is_applied(store, move):
            if not _mend(store, now, move):
                return now
        elif not _record_by_hand(store, now, move):
            return now
        retries.pause(attempt)
    raise retries.busy(store.moves, f"{TRIES} tries")


def move(
    store: Store,
    now: Held,
    to: int,
    why: moves.Why,
    note: str = "",
    evidence: Mapping[str, Any] | None = None,
) -> None:
    """Commit a move to version `to`, and let the alias follow. Raises Moved; see moves.append."""
    if not store.is_shared:
        log.warning(
            "Promotions of other hosts are not fenced: the moves of %s are kept in %s alone. "
            "Set registry.moves to a Delta table that all hosts share",
            store.model,
            store.moves,
        )
    apply(store, moves.append(store, now.history, (now.version, to), why, note, evidence))


def apply(store: Store, move: Move) -> None:
    """Set the alias to the newest move's version, and read it back. `move` was the newest."""
    for attempt in range(1, TRIES + 1):
        # By hand to nowhere: there is nothing to set.
        if move.version_to is None:
            return
        alias = store.model, store.alias, str(move.version_to)
        _set(store.client.set_registered_model_alias, *alias)
        newest = moves.read(store).newest
        entity = _alias(store)
        if newest is None or newest.number == move.number:
            if entity is not None and int(entity.version) == move.version_to:
                _tag(store, move)
                return
        else:
            move = newest
        retries.pause(attempt)
    raise RaypipeError(
        f"The {store.alias} of {store.model!r} does not follow the table of moves",
        got=store.moves,
        rule=f"Version {move.version_to}: {move}",
        fix="Run the command again: it sets the alias",
    )


def _tell_of_lost_moves(store: Store, now: Held) -> None:
    """Warn, once, if the version in use was moved to by a move that the table does not have."""
    tags = {} if now.entity is None else catalog.read(now.entity.tags)
    of = (store.moves, store.model, store.alias)
    if APPLIED + store.alias not in tags or of in _told:
        return
    _told.add(of)
    log.warning(
        "The table of moves %s has none of %s, but its %s was moved before: the table was deleted, "
        "or registry.moves named another place. Earlier moves and rollbacks are forgotten; bring "
        "the table back from a backup, or go on with a new one",
        store.moves,
        store.model,
        store.alias,
    )


def _record_by_hand(store: Store, now: Held, newest: Move) -> bool:
    """Record that somebody moved the alias in MLflow. False if the table cannot be written."""
    who = f"somebody in MLflow, seen by {moves.who()}"
    ends = newest.version_to, now.version
    try:
        moves.append(store, now.history, ends, "by hand", "not by raypipe", by=who)
    except Moved:
        return True
    except DataError as e:
        # A server may have a table that it can only read: the alias counts, a promoter records it.
        which = store.moves, store.model, store.alias, newest.number, now.version
        if which not in _unrecorded:
            _unrecorded.add(which)
            log.warning("A move by hand of %s could not be recorded: %s", store.model, e)
        return False
    said = "The %s of %s was moved by hand in MLflow from version %s to %s: recorded"
    log.warning(said, store.alias, store.model, *ends)
    return True


def _alias(store: Store) -> Any:
    """MLflow's record of the version that the alias names; None without one."""
    from mlflow.exceptions import MlflowException

    try:
        return store.client.get_model_version_by_alias(store.model, store.alias)
    except MlflowException as e:
        # No model of this name, or no such alias.
        if says_not_there(e):
            return None
        raise


def says_not_there(error: Any) -> bool:
    """Does this error of MLflow's say that a model, a version or an alias does not exist?"""
    is_invalid = error.error_code == "INVALID_PARAMETER_VALUE"
    return error.error_code in _NOT_THERE or (is_invalid and "not found" in str(error))


def _is_applied(store: Store, move: Move) -> bool:
    """Did the alias follow this move? A version that was deleted since has no tag: it counts."""
    from mlflow.exceptions import MlflowException

    if move.version_to is None:
        return True
    try:
        entity = store.client.get_model_version(store.model, str(move.version_to))
    except MlflowException as e:
        if says_not_there(e):
            return True
        raise
    return _has_tag(store, entity, move)


def _has_tag(store: Store, entity: Any, move: Move) -> bool:
    tags = catalog.read(entity.tags)
    number = str(tags.get(APPLIED + store.alias, ""))
    # Anybody may write a tag.
    if not number.isdecimal():
        return False
    which = str(tags.get(MOVED_AT + store.alias, ""))
    if which.partition(" ")[0] != number:
        # The number is an older raypipe's, which tells moves apart by it alone.
        return int(number) >= move.number
    return which == _which(move)


def _which(move: Move) -> str:
    return f"{move.number} {move.at.astimezone(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"


def _tag(store: Store, move: Move) -> None:
    # The number first: after a kill in between, it counts alone.
    tags = {APPLIED + store.alias: str(move.number), MOVED_AT + store.alias: _which(move)}
    if store.is_catalog:
        tags = catalog.written(tags)
    for name, value in tags.items():
        version = str(move.version_to)
        _set(store.client.set_model_version_tag, store.model, version, name, value)


def _tag_if_allowed(store: Store, move: Move) -> None:
    """A promoter that was killed has left it out. Who may only read leaves it to the next one."""
    from mlflow.exceptions import MlflowException

    try:
        _tag(store, move)
    except MlflowException as e:
        if e.error_code != "PERMISSION_DENIED":
            raise
        log.debug("The tag of %s stays out: %s", move, e)


def _mend(store: Store, now: Held, move: Move) -> bool:
    """Set the alias that a killed promoter has left behind. False if this process may not: the
    alias counts as it is, and the next process that may sets it."""
    from mlflow.exceptions import MlflowException

    said = "The table of moves says version %s of %s, the %s said %s"
    about = move.version_to, store.model, store.alias, now.version
    try:
        apply(store, move)
    except MlflowException as e:
        if e.error_code != "PERMISSION_DENIED":
            raise
        which = store.moves, store.model, store.alias, move.number, now.version
        if which not in _unrecorded:
            _unrecorded.add(which)
            log.warning(f"{said}, and MLflow lets this process change nothing: it stays", *about)
        return False
    log.warning(f"{said}: mended", *about)
    return True


def _set(write: Callable[..., None], *given: str) -> None:
    """Write to MLflow, again after an error: of two that insert one alias or tag at once, MLflow's
    SQL store refuses one (measured: one of 150 promotions by three threads)."""
    from mlflow.exceptions import MlflowException

    for attempt in range(1, 4):
        try:
            return write(*given)
        except MlflowException:
            if attempt == 3:
                raise
            retries.pause(attempt)
