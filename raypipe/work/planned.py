"""What --dry-run shows: what a verb would do, and what it would take."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from raypipe.costs import estimate
from raypipe.costs.estimate import Part
from raypipe.costs.spent import Price, duration
from raypipe.work.result import Facts, Result
from raypipe.work.tables import Table


@dataclass(frozen=True, repr=False)
class Planned(Result):
    """The plan of a verb. price: None where the node type is not known.

    most: the parts are an upper bound of theirs, because a rule may end the verb earlier. missing:
    what of the verb is not estimated.
    """

    verb: str
    what: Facts
    parts: tuple[Part, ...] = ()
    most: bool = False
    missing: str = ""
    price: Price | None = None
    calibration_s: float = 0.0
    """Seconds that were spent on measurements."""

    @property
    def is_upper_bound(self) -> bool:
        """Is it one of the whole verb?"""
        return self.most and not self.missing

    def facts(self) -> Facts:
        facts = dict(self.what)
        if self.parts:
            whole = estimate.total(self.parts)
            facts["takes"] = (
                f"{'at most' if self.is_upper_bound else 'about'} {duration(whole.seconds)}, "
                f"{whole.cpu_s:,.0f} CPU seconds, {whole.device_s:,.0f} device seconds"
            )
            if self.missing:
                facts["takes"] += ", without what is not estimated"
            facts["costs"] = "unknown: say on what it runs, as in cost.node=g5.xlarge"
            if self.price is not None:
                facts["costs"] = f"${self.price.usd(whole.seconds):,.2f} on {self.price}"
        if self.missing:
            facts["not estimated"] = self.missing
        return facts | {"dry run": "nothing was written, no cluster was started"}

    def summary(self) -> Facts:
        """Amounts are None where nothing is estimated; `usd` also where no price is known."""
        whole = estimate.total(self.parts) if self.parts else None
        usd = self.price.usd(whole.seconds) if self.price and whole else None
        return {
            "dry_run": True,
            "verb": self.verb,
            "plan": self.what,
            "seconds": whole.seconds if whole else None,
            "cpu_s": whole.cpu_s if whole else None,
            "device_s": whole.device_s if whole else None,
            "usd": usd,
            "is_upper_bound": self.is_upper_bound,
            "parts": [asdict(part) for part in self.parts],
            "not_estimated": self.missing,
            "calibration_s": self.calibration_s,
        }

    def tables(self) -> list[Table]:
        if not self.parts:
            return []
        rows = []
        for part in self.parts:
            amounts = (part.seconds, part.cpu_s, part.device_s)
            rows.append([part.name, *(round(amount, 1) for amount in amounts)])
        columns = ["part", "seconds", "CPU seconds", "device seconds"]
        return [Table(f"What raypipe {self.verb} takes", columns, rows)]
