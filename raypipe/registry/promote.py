"""The champion alias: which version it names, and how it is moved.

MLflow lets the last writer of an alias win. So a move is fenced by a commit in the table of moves
(moves.py), and the alias follows that table (follow.py). A promotion names the champion that the
challenger was compared with; it is refused if the alias has moved since. A version that was rolled
back is barred, a decision is carried out once, and a version that nobody could load is not put in
use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from raypipe.errors import DataError, RaypipeError
from raypipe.models.tasks import Task
from raypipe.registry import catalog, fetching, follow, moves, of_task, versions
from raypipe.registry.follow import Held
from raypipe.registry.moves import History, Why
from raypipe.registry.store import Store
from raypipe.registry.versions import ModelVersion
from raypipe.tables import retries
from raypipe.tables.commits import TRIES, Moved


def champion(store: Store) -> ModelVersion | None:
    """The version that the alias points at, or None before the first promotion.

    The alias is brought in line with the table of moves first.
    """
    entity = follow.held(store).entity
    return None if entity is None else versions.of_entity(entity)


def had_champion(store: Store) -> bool:
    """Has the alias ever named a version? By the moves, or, where their table is a new one, by the
    tag that an applied move has left on its version."""
    tag = follow.APPLIED + store.alias
    if moves.read(store).used():
        return True
    return any(tag in catalog.read(entity.tags) for entity in versions.entities(store))


def require_champion(store: Store) -> ModelVersion:
    """The champion. Raises DataError if there is none."""
    version = champion(store)
    if version is not None:
        return version
    what = f"There is no {store.alias} of {store.model!r}"
    there = versions.every(store)
    if not there:
        fix = "Train and register one first: raypipe tune CONFIG"
        raise DataError(what, got=store.uri, fix=fix)
    # Another alias is meant, or somebody has deleted this one in MLflow.
    raise DataError(
        what,
        got=store.uri,
        rule=f"The newest registered version is {there[-1].version}, and this alias names none",
        fix=f"raypipe promote CONFIG --version N registry.alias={store.alias}",
    )


class Lost(RaypipeError):
    """Somebody else moved the alias first."""


class Barred(DataError):
    """The version was rolled back, or its decision was carried out before."""


class Unreadable(DataError):
    """The files of a version cannot be read, or are not those that were registered."""


def promote(
    store: Store,
    challenger: ModelVersion,
    expected: int | None,
    why: Why = "promotion",
    note: str = "",
    evidence: Mapping[str, Any] | None = None,
    unbar: bool = False,
) -> None:
    """Point the alias at `challenger`, if it still points at version `expected`.

    `expected` is None if there was no champion. evidence: keys of what called for it, as of its
    decision. unbar: also a version that was rolled back. Raises Lost if the alias has moved, Barred
    for a version that was rolled back and for a decision that was carried out before, DataError for
    a version of another task than the champion's, Unreadable for one that nobody could load.
    """

    def check(now: Held) -> None:
        if not unbar:
            _refuse_barred(store, now.history, challenger.version, evidence or {})
        if now.version != expected:
            raise _lost(store, now, challenger.version, expected, why)
        _require_same_task(now, challenger)

    _move(store, challenger, check, why, note, evidence)


def rollback(store: Store, to: int | None = None, note: str = "") -> tuple[int | None, int]:
    """Point the alias at version `to` (None: the one before), and bar the version it leaves.

    Returns (version before, version after). If the newest move is a rollback already, None
    changes nothing: the call may be repeated. Raises DataError without an earlier version, Barred
    for one that was rolled back itself, Lost if the alias moves meanwhile, Unreadable for one that
    nobody could load.
    """
    now = follow.held(store)
    done = _rolled_back(now) if to is None else None
    if done is not None:
        return done
    target = _target(store, now, to)

    def check(then: Held) -> None:
        _refuse_barred(store, then.history, target.version, {})
        if then.version != now.version:
            raise _lost(store, then, target.version, now.version, "rollback")

    _move(store, target, check, "rollback", note, None)
    return now.version, target.version


def plan(
    store: Store, version: int | None, unbar: bool = False, rolls_back: bool = False
) -> tuple[int | None, int, History]:
    """What a promotion of this version, or a rollback to it, would do: (from, to, the moves).

    Nothing is written; a crash that the next command would mend is not mended. version: None for
    the one before, of a rollback. Raises what the move itself would.
    """
    now = follow.look(store)
    if rolls_back:
        done = _rolled_back(now) if version is None else None
        if done is not None:
            return done[1], done[1], now.history
        challenger = _target(store, now, version)
    else:
        assert version is not None, "a promotion names its version"
        challenger = versions.require(store, version, "raypipe promote CONFIG --version N")
    is_move = now.version != challenger.version
    if not unbar and is_move:
        _refuse_barred(store, now.history, challenger.version, {})
    if not rolls_back:
        _require_same_task(now, challenger)
    if is_move:
        _require_readable(store, challenger, "rollback" if rolls_back else "by hand")
    return now.version, challenger.version, now.history


def beside(store: Store, task: Task) -> str:
    """What to say before a version of this task is registered; "" if nothing. It writes nothing."""
    entity = follow.look(store).entity
    if entity is None:
        return ""
    version = versions.of_entity(entity)
    return of_task.warning(str(version), version.tags, task)


def _require_same_task(now: Held, challenger: ModelVersion) -> None:
    if now.entity is not None:
        current = versions.of_entity(now.entity)
        kinds = [version.tags.get(of_task.KIND) for version in (challenger, current)]
        of_task.require_same(f"The version {challenger}", kinds[0], str(current), kinds[1])


def _rolled_back(now: Held) -> tuple[int | None, int] | None:
    """The ends of the newest move, if that is a rollback already, and the alias is still there."""
    newest = now.history.newest
    if newest is None or newest.why != "rollback" or not newest.version_to:
        return None
    # Somebody has moved the alias in MLflow since, and nobody has recorded that yet.
    if newest.version_to != now.version:
        return None
    return newest.version_from, newest.version_to


def _target(store: Store, now: Held, to: int | None) -> ModelVersion:
    """The version that a rollback goes to. Raises DataError where there is none."""
    target = now.history.before(now.version) if to is None else to
    if target is None or (target not in now.history.used() and target != now.version):
        what = f"There is no earlier {store.alias} of {store.model!r} to go back to"
        used = f"version {now.version} is in use" if now.version else "no version is in use"
        raise DataError(
            what if to is None else f"Version {to} was never the {store.alias} of {store.model!r}",
            got=used if to is None else f"--to {to}",
            rule="A rollback goes to a version that the table of moves has as an earlier one",
            fix="raypipe promote CONFIG --version N moves to any version",
        )
    return versions.require(store, target, "Name another one: raypipe rollback CONFIG --to N")


def _move(
    store: Store,
    to: ModelVersion,
    check: Callable[[Held], None],
    why: Why,
    note: str,
    evidence: Mapping[str, Any] | None,
) -> None:
    """Move the alias if `check` does not refuse, and if the files of `to` can be read; again and
    again while others commit to the table."""
    is_read = False
    for attempt in range(1, TRIES + 1):
        now = follow.held(store)
        # Done already, perhaps by an earlier run of this command that was killed afterwards.
        if now.version == to.version:
            return
        check(now)
        if not is_read:
            _require_readable(store, to, why)
            is_read = True
            # Reading may take minutes: a move by hand meanwhile is seen now.
            continue
        try:
            follow.move(store, now, to.version, why, note, evidence)
            return
        except Moved:
            # Perhaps a move of another model. If it was this one's, `check` says who won.
            retries.pause(attempt)
    raise retries.busy(store.moves, f"{TRIES} tries")


def _require_readable(store: Store, version: ModelVersion, why: Why) -> None:
    """Raise Unreadable if the package cannot be had, or is not the one that was registered.

    All of it is read and hashed, and nothing of it is run: 0.02 s for 20 MB on a disk of this
    machine (2026-11-27), elsewhere as long as the download takes. A server that follows the alias
    could not load such a version either, and would say so long after the move.
    """
    try:
        fetching.fetch(store, version)
    except DataError as e:
        verb = "rollback CONFIG --to N" if why == "rollback" else "promote CONFIG --version N"
        raise Unreadable(
            f"The {store.alias} is not moved to {version}: {e.what}",
            got=e.got,
            rule=e.rule or "A version is put in use only if its files can be read",
            fix=f"{e.fix or 'Bring the file back from a backup'}. Or take another version: "
            f"raypipe {verb}",
        ) from e


def _lost(store: Store, now: Held, version: int, expected: int | None, why: Why) -> Lost:
    newest = now.history.newest
    moved = f". The newest move: {newest}" if newest else ""
    if why == "promotion":
        doing, rule = "compared", f"It was compared with version {expected}"
        fix = "Run raypipe retrain again"
    else:
        doing, rule = "put in its place", f"It was version {expected}"
        fix = "See raypipe promote CONFIG --history, then run the command again"
    return Lost(
        f"The {store.alias} of {store.model!r} changed while version {version} was being {doing}",
        got=f"version {now.version}",
        rule=rule + moved,
        fix=fix,
    )


def _refuse_barred(
    store: Store, history: History, version: int, evidence: Mapping[str, Any]
) -> None:
    rolled_back = history.rolled_back(version)
    done = history.of_decision(evidence.get("decision"))
    if rolled_back is None and done is None:
        return
    what = f"Version {version} of {store.model!r} is not promoted again"
    rule = f"It was rolled back: {rolled_back}"
    if rolled_back is None:
        rule = f"This decision was carried out before, and the alias was moved since: {done}"
    raise Barred(what, rule=rule, fix=f"raypipe promote CONFIG --version {version} --unbar")
