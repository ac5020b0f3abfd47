"""What a retrain came to, and how its decision is carried out: also one that a killed run left.

The decision is in its table before anything is done (decisions.py). Carrying it out logs it, moves
the alias and tags the challenger; the second time nothing happens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from raypipe.config import RunConfig, key_of
from raypipe.registry import fetching, promote, runs, versions
from raypipe.registry.store import Store
from raypipe.registry.versions import ModelVersion
from raypipe.watch import decide, decisions, records
from raypipe.watch.comparison import Comparison
from raypipe.watch.cycle import Busy, Journal, hold
from raypipe.watch.decide import Decision, GateConfig
from raypipe.watch.limits import Measured, Named
from raypipe.watch.settings import WatchConfig


@dataclass(frozen=True)
class RetrainResult:
    """What was decided and why. Without a challenger, `challenger` and `slices` are empty."""

    champion: ModelVersion
    challenger: ModelVersion | None
    decision: Decision
    slices: tuple[Comparison, ...]
    union: Comparison | None = None  # all rows of all slices
    key: str | None = None  # of the challenger's training
    device_s: float = 0.0  # that the challenger's trainings held devices
    named: tuple[Named, ...] = ()  # slices that the gate names
    measured: Measured | None = None  # latency and size, where the gate limits them
    left: RetrainResult | None = None  # of a run that was killed: what this one has carried out


def limits_of(gate: GateConfig) -> str:
    """Names the settings of the gate."""
    return key_of("gate", decide.key_part(gate))


def finish(
    store: Store,
    run: RunConfig,
    watch: WatchConfig,
    past: Journal,
    say: Callable[[str], None],
    limits: str = "",
) -> RetrainResult | None:
    """Carry out the decision that a killed run has left behind, if there is one; returns it.

    Whatever this run is about: its check may find no drift, or the alias may have moved already.
    limits: names the gate's settings; what was decided by others is not carried out any more.
    """
    compared = [event for event in past.events if event.event == "compared"]
    if not compared or past.data(compared[-1].cycle, "ended") is not None:
        return None
    cycle = compared[-1].cycle
    with hold(past, cycle, say) as held:
        left = past.data(cycle, "compared")
        if isinstance(held, Busy) or left is None or past.data(cycle, "ended") is not None:
            return None
        say("An earlier run ended before it had carried its decision out")
        lost = _lost(store, run, watch, left) or _outdated(store, run, watch, left, limits)
        if lost:
            # Else no retrain of this model could ever begin.
            held.reached("ended", **left)
            say(f"It is not carried out: {lost}")
            return None
        done = decided(store, run, watch, left)
        if done is not None:
            held.reached("ended", **left)
            say(done.decision.reason)
        return done


def _lost(store: Store, run: RunConfig, watch: WatchConfig, kept: Mapping[str, Any]) -> str:
    """What is not there any more of a decision, in words; "" if it can be carried out."""
    row = decisions.find(run, watch, kept["evidence"]["decision"])
    if row is None:
        return "the row of the decision was deleted"
    there = {version.version: version for version in versions.every(store)}
    for name in (row["champion"], row["challenger"]):
        if _number(name) not in there:
            return f"{name} was deleted"
        if _is_another(there[_number(name)], row):
            return f"{name} is another package than the one that was compared"
    return ""


def _is_another(version: ModelVersion, row: Mapping[str, Any]) -> bool:
    """Is it another package than the one of this name that a decision compared? A store that was
    made again counts from 1, and another registry may be in use now."""
    was = records.seals_of(row).get(str(version))
    return bool(version.seal and was and version.seal != was)


def _outdated(
    store: Store, run: RunConfig, watch: WatchConfig, kept: Mapping[str, Any], limits: str
) -> str:
    """Why a decision is not this job's any more, in words; "" if it is, or was carried out."""
    # An older raypipe kept no settings.
    if not limits or kept.get("gate") in (None, limits):
        return ""
    row = decisions.find(run, watch, kept["evidence"]["decision"])
    current = promote.champion(store)
    if row and row["promoted"] and current and current.version == _number(row["challenger"]):
        return ""
    return "the settings of the gate have changed since: the next retrain compares by the new ones"


def _number(version: str) -> int:
    """Of a version as a decision names it."""
    return int(version.rpartition("/")[2])


def decided(
    store: Store, run: RunConfig, watch: WatchConfig, kept: Mapping[str, Any] | None
) -> RetrainResult | None:
    """The result of a retrain from its decision: nothing is trained or compared.

    kept: what its journal says. Carrying it out once more does nothing, or says what stands against
    it. None where there is no such decision, or it is about other packages than those of this
    registry.
    """
    row = decisions.find(run, watch, kept["evidence"]["decision"]) if kept else None
    if kept is None or row is None:
        return None
    slices, union, decision = decisions.decided(row)
    numbers = [_number(row[name]) for name in ("champion", "challenger")]
    fix = "It was deleted: a retrain for another version of the table makes a new one"
    champion, challenger = (versions.require(store, number, fix) for number in numbers)
    if _is_another(champion, row) or _is_another(challenger, row):
        return None
    try:
        decision = carry_out(store, champion, challenger, decision, slices, kept["evidence"])
    except promote.Lost as e:
        decision = Decision(False, str(e))
    except promote.Unreadable as e:
        # A place that is away may come back.
        if isinstance(e.__cause__, fetching.Away):
            raise
        # Lost files would stop each later retrain, too.
        decision = Decision(False, str(e))
    training, device_s = str(kept["training"]), float(kept["device_s"])
    done = RetrainResult(champion, challenger, decision, slices, union, training, device_s)
    return replace(done, **decisions.limited(row))


def carry_out(
    store: Store,
    champion: ModelVersion,
    challenger: ModelVersion,
    decision: Decision,
    slices: tuple[Comparison, ...],
    evidence: dict[str, Any],
) -> Decision:
    """Log the decision, move the alias if it says so, and tag the challenger with how it ended,
    unless its move was refused. All of it does nothing the second time.

    Returns the decision; where a rollback stands against it, one not to promote. Raises
    promote.Lost where the alias was moved by somebody else, and promote.Unreadable.
    """

    def log_into(run_id: str) -> None:
        for s in slices:
            values = {"champion": s.champion, "challenger": s.challenger, "p_value": s.p_value}
            finite = {name: value for name, value in values.items() if math.isfinite(value)}
            named = {f"gate.{s.slice}.{name}": value for name, value in finite.items()}
            runs.log_metrics(store, run_id, named)
        runs.log_text(store, run_id, decision.reason, "decision.txt")

    params = {"champion": str(champion), "challenger": str(challenger)}
    runs.once(store, evidence["decision"], f"gate {challenger}", params, None, log_into)
    if decision.act:
        # Only if the alias still points at the champion that was compared.
        try:
            promote.promote(store, challenger, champion.version, evidence=evidence)
        except promote.Barred as e:
            return Decision(False, str(e))
    # After the move: a challenger whose move is refused is not called promoted.
    versions.tag_decision(store, challenger, evidence["decision"], decision.act)
    return decision
