"""Moves of the champion alias by hand, and the history of all moves."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from raypipe.errors import one_line
from raypipe.job import Job
from raypipe.registry import follow, recorded, versions
from raypipe.registry import promote as registry
from raypipe.registry.moves import Move
from raypipe.registry.store import Store
from raypipe.watch import records
from raypipe.work.find import looked_at
from raypipe.work.result import Facts, Result
from raypipe.work.tables import Table


@dataclass(frozen=True, repr=False)
class Moved(Result):
    """The alias after a move, or the moves that it has made (`listed`)."""

    store: Store
    before: int | None
    after: int | None
    moves: tuple[Move, ...]
    listed: bool = False
    is_plan: bool = False
    """Of --dry-run: nothing was moved."""
    gate: str = ""
    """What the gate said of the version when it was compared; a move by hand overrules it."""

    def tables(self) -> list[Table]:
        if not self.listed:
            return []
        columns = ["move", "at (UTC)", "from", "to", "why", "who", "note"]
        rows = []
        for m in self.moves:
            ends = [m.version_from, m.version_to]
            rows.append([m.number, f"{m.at:%Y-%m-%d %H:%M:%S}", *ends, m.why, m.who, m.note])
        return [Table(f"Moves of {self.store.model}@{self.store.alias}", columns, rows)]

    def facts(self) -> Facts:
        if self.is_plan:
            return self._planned()
        # Somebody may have deleted the alias in MLflow.
        facts: Facts = {self.store.alias: f"{self.store.model}/{self.after}"}
        if self.after is None:
            facts[self.store.alias] = "none"
        if not self.listed:
            newest = self.moves[-1] if self.moves else None
            before = "nothing" if self.before is None else f"version {self.before}"
            same = self.before == self.after
            facts["moved"] = "no: it was there already" if same else f"from {before}"
            facts["newest move"] = newest or "none"
        facts |= {"gate": self.gate} if self.gate else {}
        return {**facts, "table of moves": self.store.moves}

    def _planned(self) -> Facts:
        alias, newest = self.store.alias, self.moves[-1] if self.moves else None
        facts: Facts = {alias: f"{self.store.model}/{self.before}"}
        if self.before is None:
            facts[alias] = "none"
        same = self.before == self.after
        facts["would move"] = "no: it is there already" if same else f"to version {self.after}"
        facts |= {"gate": self.gate} if self.gate else {}
        if newest is not None and newest.version_to != self.before:
            # The command itself would mend or record this first.
            facts["note"] = f"the table of moves says version {newest.version_to}: {newest}"
        if not self.store.is_shared:
            facts["fence"] = "only hosts that share the run folder; set registry.moves"
        return {**facts, "newest move": newest or "none", "table of moves": self.store.moves}

    def summary(self) -> Facts:
        moves = [asdict(m) | {"at": m.at.isoformat()} for m in self.moves]
        facts: Facts = {"model": self.store.model, "alias": self.store.alias}
        facts |= {"before": self.before, "after": self.after}
        facts |= {"dry_run": True} if self.is_plan else {}
        facts |= {"gate": self.gate} if self.gate else {}
        return {**facts, "moves": moves if self.listed else moves[-1:]}


def promote(job: Job, version: int, note: str, unbar: bool) -> Moved:
    """Promote a version by hand. Raises DataError for one that is not there or was rolled back."""
    store = looked_at(job)
    challenger = versions.require(store, version, "raypipe promote CONFIG --version N")
    before = follow.held(store).version
    registry.promote(store, challenger, before, "by hand", note, unbar=unbar)
    return _moved(store, before, _gate(job, store, version))


def rollback(job: Job, to: int | None, note: str) -> Moved:
    """Go back to version `to`, or to the one before. Raises as registry.promote.rollback does."""
    store = looked_at(job)
    before = follow.held(store).version
    registry.rollback(store, to, note)
    return _moved(store, before)


def plan(job: Job, version: int | None, unbar: bool = False, rolls_back: bool = False) -> Moved:
    """What `promote` or, with rolls_back, `rollback` would do. Raises what they would."""
    store = looked_at(job)
    before, after, moves = registry.plan(store, version, unbar, rolls_back)
    gate = "" if rolls_back else _gate(job, store, after)
    return Moved(store, before, after, moves.moves, is_plan=True, gate=gate)


def history(job: Job) -> Moved:
    """All moves of the job's alias."""
    store = looked_at(job)
    now = follow.held(store)
    return Moved(store, now.version, now.version, now.history.moves, listed=True)


def _moved(store: Store, before: int | None, gate: str = "") -> Moved:
    now = follow.held(store)
    return Moved(store, before, now.version, now.history.moves, gate=gate)


def _gate(job: Job, store: Store, version: int) -> str:
    """The newest decision about a version, in words; "not compared" without one."""
    try:
        row = records.decision_about(job.run, job.watch, f"{store.model}/{version}")
        is_own = row is None or _is_own(store, version, str(row.get("key", "")))
    except Exception as e:
        # A move by hand must not depend on it, nor on how MLflow is.
        return f"not known: {one_line(e)}"
    if row is None:
        return "not compared"
    if not is_own:
        return f"not known: nothing in this registry names the comparison {row.get('key')}"
    return f"against {row.get('champion')}: {row.get('reason')}"


def _is_own(store: Store, version: int, key: str) -> bool:
    """Is the comparison one of this registry's? Another one may have a model of this name, and its
    records lie in the same folder."""
    named = versions.require(store, version, "")
    own = recorded.decision_of(store, named) == key
    return own or recorded.of_key(store, key) is not None
