"""What a challenger must keep beside being better: named slices, latency and size.

A named slice is a part of the test rows that must not get worse, whatever the others say. Each has
its own test of safety, the one of the gate's other slices (safety.py): the lower confidence bound
of the difference lies above minus its tolerance. A challenger that loses the tolerance on it passes
with a probability of at most `gate.safety_alpha`, for any number of named slices, because it has to
pass all of them. Too few rows to show that are a refusal, or are said and let pass.

A latency is a median with its interval from order statistics, which asks nothing of the
distribution of the times. It is within the limit when the whole interval is: a measurement that is
too noisy to tell refuses, and says so.

Pure functions of counts, times and bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from raypipe.config import Section
from raypipe.models.spread import Spread
from raypipe.watch import safety
from raypipe.watch.comparison import Comparison

MB = 10**6


class SliceLimit(Section):
    """A part of the test images on which the challenger must not be worse."""

    name: str = Field(min_length=1, max_length=100)
    """Name of the slice in decisions and reports."""

    where: dict[str, str | list[str]] = Field(min_length=1)
    """Which test images: column and value, or a list of values; with several columns, the images
    that meet all."""

    tolerance: float | None = Field(default=None, gt=0, le=1)
    """The loss that is too much, in units of gate.tolerance. null: gate.tolerance."""

    least_rows: int = Field(default=30, ge=2)
    """With fewer labelled test images the slice is not judged."""

    few: Literal["refuse", "pass"] = "refuse"
    """If the slice has too few images: refuse the challenger, or ignore the slice and say so."""


@dataclass(frozen=True)
class Named:
    """A named slice of a comparison; `judged` is None where no labelled test image is in it."""

    name: str
    judged: Comparison | None


@dataclass(frozen=True)
class Measured:
    """Latency and size of champion and challenger. Latencies are of `batch` images, in ms, on
    `machine`; None where nothing limits them. `ratio` is the challenger's by the champion's, of
    each round. Sizes are bytes of the packages."""

    champion_bytes: int
    challenger_bytes: int
    champion_ms: Spread | None = None
    challenger_ms: Spread | None = None
    ratio: Spread | None = None
    batch: int = 0
    rounds: int = 0
    machine: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, kept: dict[str, Any]) -> Measured:
        """From `as_json`; an end that JSON has as null is open."""
        fields = dict(kept)
        for name in ("champion_ms", "challenger_ms", "ratio"):
            if fields.get(name) is not None:
                fields[name] = _spread(fields[name])
        return cls(**fields)


def _spread(kept: dict[str, Any]) -> Spread:
    opened = {"median": math.nan, "low": -math.inf, "high": math.inf}
    return Spread(**{name: opened[name] if kept[name] is None else kept[name] for name in opened})


class LimitsConfig(Section):
    """What a challenger must keep beside being better. Part of the section gate."""

    slices: tuple[SliceLimit, ...] = ()
    """Parts of the test images, beside the sources, on which the challenger must not be worse:
    `[{name: night, where: {shift: night}, tolerance: 0.02}]`."""

    latency_ms: float | None = Field(default=None, gt=0)
    """Most milliseconds of the challenger for latency_batch images (the median), from encoded bytes
    to labels, on one thread of the machine that compares. null: no limit."""

    latency_ratio: float | None = Field(default=None, gt=0)
    """The challenger's latency divided by the champion's is at most this. Both are measured in
    turns on the same images. An equal model is at 1, plus or minus noise: so set 1.1 to refuse
    slower models. null: no limit."""

    latency_batch: int = Field(default=1, ge=1, le=4096)
    """Images in a batch when latency is measured."""

    size_mb: float | None = Field(default=None, gt=0)
    """Most megabytes (10^6 bytes) of the challenger's package. null: no limit."""

    size_ratio: float | None = Field(default=None, gt=0)
    """The size of the challenger's package divided by the champion's is at most this. null: no
    limit."""

    @model_validator(mode="after")
    def _slices_have_names(self) -> Self:
        counts = Counter(limit.name for limit in self.slices)
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            raise ValueError(f"{', '.join(twice)}: two slices have one name. Give each its own")
        return self

    @property
    def times(self) -> bool:
        """Does anything limit latency?"""
        return self.latency_ms is not None or self.latency_ratio is not None

    @property
    def measures(self) -> bool:
        """Is there anything to measure?"""
        return self.times or self.size_mb is not None or self.size_ratio is not None


@dataclass(frozen=True)
class Verdict:
    """One limit in words, and whether it refuses the challenger."""

    refuses: bool
    text: str


def verdicts(
    named: Sequence[Named],
    measured: Measured | None,
    cfg: LimitsConfig,
    tolerance: float,
    safety_alpha: float,
) -> list[Verdict]:
    """Each limit that is set, kept or not, in the order of the settings.

    tolerance: of slices that name none. A limit whose measurement is missing refuses.
    """
    by_name = {one.name: one.judged for one in named}
    found = [
        _slice(limit, by_name.get(limit.name), limit.tolerance or tolerance, safety_alpha)
        for limit in cfg.slices
    ]
    if not cfg.measures:
        return found
    if measured is None:
        return [*found, Verdict(True, "latency and size were not measured")]
    of = _of(measured)
    if cfg.latency_ms is not None:
        found.append(_time("latency", measured.challenger_ms, cfg.latency_ms, " ms", of))
    if cfg.latency_ratio is not None:
        found.append(_time("latency", measured.ratio, cfg.latency_ratio, " times", of))
    mb = measured.challenger_bytes / MB
    if cfg.size_mb is not None:
        text = f"size {mb:.4g} MB, {cfg.size_mb:g} MB is allowed"
        found.append(Verdict(not mb <= cfg.size_mb, text))
    if cfg.size_ratio is not None:
        ratio = measured.challenger_bytes / max(1, measured.champion_bytes)
        text = f"size {ratio:.3g} times the champion's ({mb:.4g} MB), {cfg.size_ratio:g} is allowed"
        found.append(Verdict(not ratio <= cfg.size_ratio, text))
    return found


def counted(images: int) -> str:
    """So many compared images in words: the test split may have more of them (judging.py)."""
    what = "no labelled test image"
    if images:
        what = f"{images} labelled test images (one of each group, and of copies)"
    return f"{what} that neither model has learned from"


def _slice(
    limit: SliceLimit, judged: Comparison | None, tolerance: float, safety_alpha: float
) -> Verdict:
    images = judged.images if judged else 0
    if judged is None or images < limit.least_rows:
        have, asked = counted(images), f"{limit.least_rows} are asked for"
        text = f"slice {limit.name} is not judged: {have}, {asked}"
        return Verdict(limit.few == "refuse", text)
    if not (math.isfinite(judged.champion) and math.isfinite(judged.challenger)):
        return Verdict(True, f"slice {limit.name}: {judged.change} is not a finite number")
    bound, tolerated = judged.amount(judged.at_worst(safety_alpha)), judged.amount(-tolerance)
    text = f"slice {limit.name}: {judged.change} ({images} images), at worst {bound}"
    if judged.p_worse(tolerance) < safety_alpha:
        return Verdict(False, text)
    text += f", and {tolerated} is tolerated"
    needed = safety.rows_needed(judged.standard_error, images, safety_alpha, tolerance)
    if judged.difference > -tolerance and needed > images:
        text += f" ({needed:,} images would clear an equal challenger nine times of ten)"
    return Verdict(True, text)


def _of(measured: Measured) -> str:
    images = "1 image" if measured.batch == 1 else f"{measured.batch} images"
    return f"for {images}, median of {measured.rounds} rounds on {measured.machine}"


def _time(what: str, spread: Spread | None, limit: float, unit: str, of: str) -> Verdict:
    """Written so that a median of NaN refuses."""
    if spread is None:
        return Verdict(True, f"{what} was not measured")
    value = f"{spread.median:.3g}{unit}"
    allowed = f"{limit:g}{unit} is allowed"
    if unit == " times":
        value, allowed = f"{spread.median:.3g} times the champion's", f"{limit:g} is allowed"
    text = f"{what} {value} ({spread.low:.3g} to {spread.high:.3g}) {of}, {allowed}"
    if spread.high <= limit:
        return Verdict(False, text)
    noisy = spread.low <= limit
    return Verdict(True, text + (": too near to tell on this machine" if noisy else ""))
