"""What verbs return that watch a model: drift checks, what a check can see, and retrains."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from raypipe.config import RunConfig
from raypipe.costs.spent import Spent
from raypipe.registry.versions import ModelVersion
from raypipe.watch import feedback
from raypipe.watch.check import CheckResult
from raypipe.watch.comparison import Comparison
from raypipe.watch.feedback import Feedback
from raypipe.watch.power import Power, as_facts
from raypipe.watch.retrained import RetrainResult
from raypipe.watch.severity import Severity
from raypipe.watch.windows import Waiting, Window
from raypipe.work.result import Facts, Result, prepared_from
from raypipe.work.results.models import Registered
from raypipe.work.tables import LEVEL, Table, comparison, evidence, limits


@dataclass(frozen=True, repr=False)
class Drifted(Result):
    """A drift check. retrain: the policy calls for one, before labels are counted."""

    checked: CheckResult
    retrain: bool = False

    @property
    def is_drift(self) -> bool:
        return self.checked.report.is_drift

    @property
    def p_value(self) -> float:
        return self.checked.report.p_value

    def tables(self) -> list[Table]:
        return [evidence(self.checked)]

    def report_page(self) -> str:
        return self.checked.page

    def key(self) -> str:
        return Path(self.checked.page).stem.removeprefix("drift-")

    def facts(self) -> Facts:
        notes = self.checked.report.notes
        return {
            **prepared_from(self.checked.table, "prepared from"),
            "what it costs": str(self.checked.report.severity),
            **({"labels say": labels} if (labels := str(self.checked.report.feedback)) else {}),
            **({"tests": "; ".join(notes)} if notes else {}),
            **_to_label(self.checked, "to label"),
            "report": self.checked.page,
        }

    def summary(self) -> Facts:
        report = self.checked.report
        return {
            "is_drift": report.is_drift,
            "retrain": self.retrain,
            "p_value": report.p_value,
            "model": self.checked.model,
            "table": str(self.checked.table),
            **prepared_from(self.checked.table),
            **window_facts(self.checked.window),
            "evidence": report.evidence,
            "severity": severity_facts(report.severity),
            "feedback": feedback_facts(report.feedback),
            "engine": report.engine,
            "notes": report.notes,
            **_to_label(self.checked, "to_label"),
            "report": self.checked.page,
        }


@dataclass(frozen=True, repr=False)
class Waited(Result):
    """A drift check that had too few new images: they stay for the next one.

    retrain: as in Drifted, by earlier checks.
    """

    waiting: Waiting
    retrain: bool = False
    is_drift = False

    def facts(self) -> Facts:
        missed = {"missed": self.waiting.missed} if self.waiting.missed else {}
        return {"no check": str(self.waiting), **missed}

    def summary(self) -> Facts:
        w = self.waiting
        known: Facts = {"is_drift": False, "retrain": self.retrain, "p_value": None}
        known |= {"table": str(w.table), "since": w.since}
        missed = {"missed": w.missed} if w.missed else {}
        return known | {"waiting": {"images": w.images, "needed": w.needed}} | missed


def _to_label(checked: CheckResult, name: str) -> Facts:
    """Which images are most worth a label; nothing without drift."""
    return {name: checked.to_label} if checked.to_label else {}


def severity_facts(found: Severity) -> Facts:
    """The estimated accuracy and its loss; without one, null and why."""
    loss = found.loss
    return {
        "accuracy": found.accuracy,
        "low": found.low,
        "high": found.high,
        "known": found.known,
        "loss": loss[0] if loss else None,
        "why_not": found.why_not or None,
    }


def feedback_facts(says: Feedback) -> Facts | None:
    """What the labels that came say; None where none did."""
    return None if says.measured is None else feedback.as_row(says)


def window_facts(window: Window | None) -> Facts:
    """Which images were looked at; nothing for a batch that was named by its version."""
    if window is None or not window.number:
        return {}
    known: Facts = {"window": window.number, "since": window.since, "again": window.again}
    return known | ({"missed": window.missed} if window.missed else {})


@dataclass(frozen=True, repr=False)
class Powered(Result):
    """What a drift check can see."""

    power: Power
    champion: ModelVersion

    def facts(self) -> Facts:
        return {"champion": str(self.champion), **as_facts(self.power)}

    def summary(self) -> Facts:
        return {"champion": str(self.champion), **asdict(self.power), "holds": self.power.holds}


@dataclass(frozen=True, repr=False)
class Retrained(Result):
    """A decision about a challenger, the champion after it, and the drift check before it."""

    done: RetrainResult
    champion: ModelVersion | None
    checked: CheckResult | None = None
    spent: Spent | None = None
    run: RunConfig | None = None

    @property
    def promoted(self) -> bool:
        return self.done.decision.act and self.done.challenger is not None

    def tables(self) -> list[Table]:
        found = [] if self.checked is None else [evidence(self.checked)]
        # Without a challenger there is nothing to compare.
        more = [comparison(self.done), limits(self.done)]
        return [*found, *(table for table in more if table is not None)]

    def report_page(self) -> str | None:
        return None if self.checked is None else self.checked.page

    def key(self) -> str:
        # Without a challenger, the drift check is what there is.
        return self.done.key or (Path(self.checked.page).stem if self.checked else "")

    def files(self) -> dict[str, Path]:
        challenger, run = self.done.challenger, self.run
        if challenger is None or run is None:
            return super().files()
        return {**super().files(), **Registered(challenger, self.champion, "").files(run)}

    def facts(self) -> Facts:
        report: Facts = {}
        if self.checked is not None:
            report = {**_to_label(self.checked, "to label"), "report": self.checked.page}
        took = self.spent.facts() if self.spent else {}
        return {**report, **took, "decision": self.done.decision.reason}

    def summary(self) -> Facts:
        done = self.done
        named = {one.name: _slice(one.judged) if one.judged else None for one in done.named}
        return {
            "promoted": self.promoted,
            "reason": done.decision.reason,
            "champion": str(self.champion) if self.champion else None,
            "challenger": str(done.challenger) if done.challenger else None,
            "spent": self.spent.summary() if self.spent else None,
            "slices": {s.slice: _slice(s) for s in done.slices},
            **({"named_slices": named} if named else {}),
            **({"limits": done.measured.as_json()} if done.measured else {}),
        }


def _slice(s: Comparison) -> Facts:
    return {
        "champion": s.champion,
        "challenger": s.challenger,
        "measure": "accuracy" if s.unit is None else "mean absolute error",
        "images": s.images,
        "p_value": s.p_value,
        "won": s.won,
        "lost": s.lost,
        "at_worst": s.at_worst(LEVEL),
    }
