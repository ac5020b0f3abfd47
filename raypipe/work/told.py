"""Results of drift checks and retrains as events (watch/events.py)."""

from __future__ import annotations

from raypipe.config import key_of
from raypipe.registry.versions import ModelVersion
from raypipe.report.formats import beside
from raypipe.tables.table import TableVersion
from raypipe.watch import feedback
from raypipe.watch.check import CheckResult
from raypipe.watch.events import Event, missed, state
from raypipe.watch.retrained import RetrainResult
from raypipe.watch.windows import Waiting


def run_of(checked: CheckResult | None, champion: ModelVersion, table: TableVersion) -> str:
    """The word that joins all events of one piece of work.

    table: what a retrain without a check is about.
    """
    if checked is not None:
        return checked.key
    return key_of("forced", str(champion), champion.seal, table.identity)


def of_check(checked: CheckResult | Waiting) -> tuple[str, list[Event]]:
    """The run, and its events: checks that were missed, and a check that has finished.

    A run that only waits for more images tells of no check. Its heartbeat says that it ran.
    """
    if isinstance(checked, Waiting):
        run = key_of("waiting", checked)
        return run, [missed(run, checked.missed)] if checked.missed else []
    events = []
    window = checked.window
    if window is not None and window.missed:
        events.append(missed(checked.key, window.missed))
    found = checked.report
    said = "drifts" if found.is_drift else "does not drift"
    facts = {
        "name": checked.name,
        "model": checked.model,
        "table": str(checked.table),
        "window": str(window) if window is not None and window.number else None,
        "is_drift": found.is_drift,
        "p_value": found.p_value,
        "images": found.batch_images,
        "accuracy": found.severity.accuracy,
        "accuracy_low": found.severity.low,
        "accuracy_high": found.severity.high,
        "accuracy_known": found.severity.known,
        "no_estimate": found.severity.why_not or None,
        **feedback.as_row(found.feedback),
    }
    said_of = "; ".join(text for text in (str(found.severity), str(found.feedback)) if text)
    p = beside(found.p_value, lambda more: f"{found.p_value:.{3 + more}g}", found.alpha)
    text = f"{checked.name} {said} against {checked.model}: p={p}, {said_of}"
    return checked.key, [*events, Event("check", checked.key, text, facts)]


def of_retrain(run: str, done: RetrainResult, now: ModelVersion | None) -> list[Event]:
    """What was decided, whether the champion moved, and that the retrain has finished.

    now: the champion after it. What a killed run has left behind nobody has told of yet.
    """
    left = [] if done.left is None else _of_decision(run, done.left, done.left.challenger)
    named = str(done.challenger) if done.challenger else None
    finished = state(run, "finished", challenger=named, training=done.key)
    return [*left, *_of_decision(run, done, now), finished]


def _of_decision(run: str, done: RetrainResult, now: ModelVersion | None) -> list[Event]:
    decision, challenger = done.decision, done.challenger
    named = str(challenger) if challenger else None
    facts = {"act": decision.act, "champion": str(done.champion), "challenger": named}
    # The id is made of facts: another reason is another event, which a receiver has not heard yet.
    facts["reason"] = decision.reason
    events = [Event("decision", run, decision.reason, facts)]
    if challenger is not None and decision.act and now is not None:
        moved = {
            "model": now.name,
            "version_from": done.champion.version,
            "version_to": now.version,
        }
        # Somebody else may have moved the alias since: then that is what is told.
        events.append(Event("promotion", run, f"{now} replaces {done.champion}", moved))
    return events
