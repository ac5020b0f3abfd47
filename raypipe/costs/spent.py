"""What a run has spent, and what it saved by ending trials early."""

from __future__ import annotations

from dataclasses import dataclass

from raypipe.costs.settings import CostConfig


@dataclass(frozen=True)
class Price:
    """Dollars an hour of so many nodes of a type."""

    node: str
    usd_per_hour: float
    nodes: int

    @classmethod
    def of(cls, cfg: CostConfig, nodes: int) -> Price | None:
        """None where the configuration names no node type."""
        if cfg.node is None:
            return None
        usd = cfg.price(cfg.node)
        assert usd is not None, "the configuration checks it"
        return cls(cfg.node, usd, nodes)

    def usd(self, seconds: float) -> float:
        return self.usd_per_hour * self.nodes * seconds / 3600

    def __str__(self) -> str:
        many = f"{self.nodes} x " if self.nodes > 1 else ""
        return f"{many}{self.node} at ${self.usd_per_hour:,.3f} an hour"


@dataclass(frozen=True)
class Spent:
    """seconds: of this call of the verb, by the clock; `usd` is what they cost. device_s: seconds
    that trainings held a device, a GPU or a CPU worker, in all calls that they took: a training
    that went on, or was finished before, has more of them than this call. saved: the share of the
    epochs that the scheduler and stopping rules left out.
    """

    seconds: float
    device_s: float
    price: Price | None = None
    saved: float = 0.0

    @property
    def usd(self) -> float | None:
        return self.price.usd(self.seconds) if self.price else None

    def facts(self) -> dict[str, str]:
        text = duration(self.seconds)
        if self.price is not None:
            text += f", ${self.usd:,.2f} ({self.price})"
        text += f"; the training {self.device_s / 3600:.4f} device hours, with earlier calls"
        facts = {"took": text}
        if self.saved > 0:
            facts["saved"] = f"{self.saved:.0%} of the epochs, by ending early what was not better"
        return facts

    def summary(self) -> dict[str, float | None]:
        return {
            "seconds": self.seconds,
            "device_s": self.device_s,
            "usd": self.usd,
            "saved_epochs": self.saved,
        }


def duration(seconds: float) -> str:
    """For people: 40 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
