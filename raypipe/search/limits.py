"""What every model of a search must keep: `search.limits`, and which variants cannot.

How long a model takes and how large it is depend on its backbone, side and views alone, and not on
what it has learned. So each variant that a space can draw is measured once, before the first trial,
with random weights, and trials that could not meet a limit are never begun (`Space.barred`).

- Latency is that of the gate of a retrain (watch/limits.py): one image, from encoded bytes to the
  label, on one thread of the machine that runs the search. So runs each worker of `raypipe serve`.
  It is within the limit when the whole interval of its median is.
- Size is that of the weights, in MB of 10^6 bytes.
- Money is a budget, and no property of a model: see `Monitor`.

Pure functions of numbers; variants.py measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field

from raypipe.config import Section
from raypipe.errors import ConfigError

MB = 10**6


class SearchLimits(Section):
    """What the registered model and its search must keep. Trials that cannot are not begun."""

    latency_ms: float | None = Field(default=None, gt=0)
    """Most milliseconds of the model for one image (the median), from encoded bytes to its label,
    on one thread of the machine that runs the search. raypipe measures it before the first trial.
    null: no limit."""

    size_mb: float | None = Field(default=None, gt=0)
    """Most megabytes (10^6 bytes) of the model's weights. null: no limit."""

    money: float | None = Field(default=None, gt=0)
    """The most that trials may cost, in the currency of search.stopping.price_per_hour, which it
    needs. The search stops before the running epochs would exceed it; search.stopping.money stops
    when it is spent. The heads of a first answer count too. null: no limit."""

    @property
    def of_models(self) -> bool:
        """Is a property of models limited?"""
        return self.latency_ms is not None or self.size_mb is not None


@dataclass(frozen=True)
class Variant:
    """What models of one shape take. latency_ms: the median, and the ends of its interval."""

    text: str
    """For people: the backbone, the side and the views."""

    latency_ms: float
    low_ms: float
    high_ms: float
    size_mb: float

    def breaks(self, limits: SearchLimits) -> str:
        """Which limit it does not keep, in words; "" if it keeps all."""
        broken = []
        # Written so that NaN breaks a limit.
        if limits.latency_ms is not None and not self.high_ms <= limits.latency_ms:
            broken.append(f"needs {self._time} an image")
        if limits.size_mb is not None and not self.size_mb <= limits.size_mb:
            broken.append(f"has {self.size_mb:.3g} MB of weights")
        return f"{self.text} {' and '.join(broken)}" if broken else ""

    @property
    def _time(self) -> str:
        return f"{self.latency_ms:.3g} ms ({self.low_ms:.3g} to {self.high_ms:.3g})"


def barred(
    variants: Mapping[str, Variant], limits: SearchLimits, heads: Sequence[Variant] = ()
) -> dict[str, str]:
    """By shape: why its models may not be trained, "" where they may.

    heads: what a first answer may fit. Raises ConfigError if nothing is left, no head either.
    """
    found = {shape: one.breaks(limits) for shape, one in variants.items()}
    if variants and all(found.values()) and all(one.breaks(limits) for one in heads):
        raise _nothing_left([*variants.values(), *heads], limits)
    return found


def _nothing_left(variants: Sequence[Variant], limits: SearchLimits) -> ConfigError:
    nearest = min(variants, key=lambda one: share_of_limits(one, limits))
    fixes = []
    if limits.latency_ms is not None and not nearest.high_ms <= limits.latency_ms:
        fixes.append(f"search.limits.latency_ms to {_above(nearest.high_ms):g}")
    if limits.size_mb is not None and not nearest.size_mb <= limits.size_mb:
        fixes.append(f"search.limits.size_mb to {_above(nearest.size_mb):g}")
    return ConfigError(
        "No model of the search can keep search.limits",
        got=_words(limits),
        rule=f"The nearest one: {nearest.breaks(limits)}",
        fix=f"Raise {' and '.join(fixes)}, or search a smaller model.side_px or model.name",
    )


def _above(value: float) -> float:
    """A round number above."""
    return float(f"{1.1 * value:.2g}")


def _words(limits: SearchLimits) -> str:
    set_ = {"latency_ms": limits.latency_ms, "size_mb": limits.size_mb}
    return ", ".join(f"{name}={value:g}" for name, value in set_.items() if value is not None)


def require(one: Variant, limits: SearchLimits, what: str, fix: str) -> None:
    """Raise ConfigError for a model that breaks a limit. what: whose model it would be."""
    why = one.breaks(limits)
    if why:
        raise ConfigError(
            f"{what} would break search.limits", got=_words(limits), rule=why, fix=fix
        )


def share_of_limits(one: Variant, limits: SearchLimits) -> float:
    """How much of the tightest limit it takes; 0 without limits. Shares of members add up."""
    shares = [0.0]
    if limits.latency_ms is not None:
        shares.append(one.high_ms / limits.latency_ms)
    if limits.size_mb is not None:
        shares.append(one.size_mb / limits.size_mb)
    return max(shares)
