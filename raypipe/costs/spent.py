"""What a run has spent, and what it saved by ending trials early."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raypipe.costs.settings import CostConfig


@dataclass(frozen=True)
class Price:
    """Dollars an hour of so many nodes of a type, which have so many devices together.

    devices: GPUs that train, or without any CPUs; 0: not known.
    """

    node: str
    usd_per_hour: float
    nodes: int
    devices: float = 0.0

    @classmethod
    def of(cls, cfg: CostConfig, nodes: int, devices: float = 0.0) -> Price | None:
        """None where the configuration names no node type."""
        if cfg.node is None:
            return None
        usd = cfg.price(cfg.node)
        assert usd is not None, "the configuration checks it"
        return cls(cfg.node, usd, nodes, devices)

    def usd(self, seconds: float) -> float:
        return self.usd_per_hour * self.nodes * seconds / 3600

    @property
    def usd_per_device_s(self) -> float | None:
        """Dollars for a second of one device: what a trial holds of the nodes, it pays."""
        return self.usd(1.0) / self.devices if self.devices else None

    def __str__(self) -> str:
        many = f"{self.nodes} x " if self.nodes > 1 else ""
        return f"{many}{self.node} at ${self.usd_per_hour:,.3f} an hour"


@dataclass(frozen=True)
class Spent:
    """seconds: of this call of the verb, by the clock; `usd` is what they cost. device_s: seconds
    that trainings held a device, a GPU or a CPU worker, in all calls that they took: a training
    that went on, or was finished before, has more of them than this call. saved: the share of the
    epochs of a search that its scheduler and its trials' own rules left out, and saved_device_s
    what these would have taken. of: what held the devices; a prediction counts those of this call
    alone.
    """

    seconds: float
    device_s: float
    price: Price | None = None
    saved: float = 0.0
    saved_device_s: float = 0.0
    of: Literal["training", "prediction"] = "training"

    @property
    def usd(self) -> float | None:
        return self.price.usd(self.seconds) if self.price else None

    def facts(self) -> dict[str, str]:
        text = duration(self.seconds)
        if self.price is not None:
            text += f", ${self.usd:,.2f} ({self.price})"
        text += f"; the {self.of} {self.device_s / 3600:.4f} device hours"
        if self.of == "training":
            text += ", with earlier calls"
        facts = {"took": text}
        if self.saved > 0:
            saved = f"{self.saved:.0%} of the epochs"
            if self.saved_device_s:
                saved += f", about {self.saved_device_s / 3600:.4f} device hours"
            if self.saved_usd:
                saved += f", ${self.saved_usd:,.2f}"
            facts["saved"] = f"{saved}, by ending early what was not better"
        return facts

    @property
    def saved_usd(self) -> float | None:
        a_second = self.price.usd_per_device_s if self.price else None
        return None if a_second is None else a_second * self.saved_device_s

    def logged(self) -> dict[str, float]:
        """For an MLflow run, as metrics."""
        logged = {"cost.seconds": self.seconds, "cost.device_hours": self.device_s / 3600}
        return logged if self.usd is None else {**logged, "cost.usd": self.usd}

    def summary(self) -> dict[str, float | None]:
        amounts = {"seconds": self.seconds, "device_s": self.device_s, "usd": self.usd}
        if self.of == "prediction":
            return amounts
        return amounts | {
            "saved_epochs": self.saved,
            "saved_device_s": self.saved_device_s,
            "saved_usd": self.saved_usd,
        }


def duration(seconds: float) -> str:
    """For people: 40 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
