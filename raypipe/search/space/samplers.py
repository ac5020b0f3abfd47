"""How a field is drawn: `loguniform(1e-4, 1e-1)`, and on which condition.

A sampler maps a number from 0 to 1 to a value, so one uniform number draws it, whoever makes that number. What it holds is
also known without drawing (its ends, its finite values), for checks before a search and for searchers that model the space.

  grid(a, b)               every value, crossed with the other grids
  choice(a, b)             one of them; one that stands there twice is twice as likely
  uniform(low, high)       a real number;  loguniform: uniform in its logarithm
  quniform(low, high, q)   low, low + q, … and high, where a step ends there
  randint(low, high)       a whole number from low to high - 1, as NumPy's
  … if CONDITION           set only where it holds;  … if CONDITION else …: the first that holds
"""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass
from typing import Any

from raypipe.errors import ConfigError
from raypipe.search.space.conditions import Condition

_DRAW = re.compile(r"\s*(\w+)\s*\((.*?)\)\s*(?:\bif\b(.+?)(?:\belse\b(.+))?)?$", re.DOTALL)
SAMPLERS = ("grid", "choice", "uniform", "loguniform", "quniform", "randint")


@dataclass(frozen=True)
class Choice:
    values: tuple[Any, ...]
    grid: bool = False

    def at(self, u: float) -> Any:
        return self.values[int(u * len(self.values))]

    @property
    def ends(self) -> tuple[Any, ...]:
        """Values that say whether a field can take all of them."""
        return self.values

    @property
    def finite(self) -> tuple[Any, ...] | None:
        return self.values

    def code(self, value: Any) -> int | None:
        """Its number, by which searchers know it; None when the value is not one of these."""
        alike = [
            i
            for i, v in enumerate(self.values)
            if v == value and isinstance(v, bool) == isinstance(value, bool)
        ]
        return alike[0] if alike else None


@dataclass(frozen=True)
class Range:
    low: float
    high: float
    log: bool = False

    def at(self, u: float) -> float:
        if self.log:
            low, high = math.log(self.low), math.log(self.high)
            return min(self.high, max(self.low, math.exp(low + u * (high - low))))
        return min(self.high, self.low + u * (self.high - self.low))

    @property
    def ends(self) -> tuple[Any, ...]:
        return (
            self.low,
            self.high,
            self.low + 0.618 * (self.high - self.low),
        )  # a whole number's field refuses the last

    @property
    def finite(self) -> tuple[Any, ...] | None:
        return None

    def code(self, value: Any) -> float | None:
        inside = (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and self.low <= value <= self.high
        )
        return float(value) if inside else None


@dataclass(frozen=True)
class Steps:
    """low, low + step, …: `count` values, each as likely as the others. Whole numbers if low and step are."""

    low: float
    step: float
    count: int

    def at(self, u: float) -> float:
        return self.value(int(u * self.count))

    def value(self, i: int) -> float:
        found = self.low + i * self.step
        return (
            found if isinstance(found, int) else float(f"{found:.12g}")
        )  # not 0.30000000000000004

    @property
    def ends(self) -> tuple[Any, ...]:
        return self.value(0), self.value(self.count - 1)

    @property
    def finite(self) -> tuple[Any, ...] | None:
        return tuple(self.value(i) for i in range(self.count)) if self.count <= 1000 else None

    def code(self, value: Any) -> int | None:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return None
        i = round((value - self.low) / self.step)
        return (
            i if 0 <= i < self.count and math.isclose(self.value(i), value, abs_tol=1e-12) else None
        )


Sampler = Choice | Range | Steps


@dataclass(frozen=True)
class Branch:
    """One of the ways to draw a field. `key` names it to searchers, which know one sampler a name."""

    key: str
    sampler: Sampler
    condition: Condition | None


def read(field: str, text: str) -> tuple[Branch, ...]:
    """The ways to draw a field, the first whose condition holds first. Raises ConfigError."""
    branches: list[Branch] = []
    rest: str | None = str(text)
    while rest is not None:
        found = _DRAW.match(rest)
        if not found or found[1] not in SAMPLERS:
            kinds = ", ".join(s + "(…)" for s in SAMPLERS)
            raise ConfigError(
                f"search.space.{field} is not a draw",
                got=text,
                rule=f"One of {kinds}, if you like with `if …`",
            )
        condition = Condition.read(field, found[3]) if found[3] else None
        key = field if not branches else f"{field}#{len(branches) + 1}"
        branches.append(Branch(key, _sampler(field, found[1], found[2], text), condition))
        rest = found[4]
    return tuple(branches)


def _sampler(field: str, kind: str, inside: str, text: str) -> Sampler:
    try:
        arguments = list(ast.literal_eval(f"({inside},)")) if inside.strip() else []
    except (ValueError, SyntaxError):  # bare words, as in choice(cosine, constant)
        arguments = [_word(a) for a in inside.split(",") if a.strip()]
    if kind in ("grid", "choice"):
        if not arguments:
            raise ConfigError(f"search.space.{field} has nothing to choose from", got=text)
        return Choice(tuple(arguments), kind == "grid")
    if rule := _broken_rule(kind, arguments):
        raise ConfigError(f"search.space.{field} is not a range", got=text, rule=rule)
    if kind == "randint":
        return Steps(arguments[0], 1, arguments[1] - arguments[0])
    if kind == "quniform":
        low, high, q = arguments
        return Steps(low, q, math.floor((high - low) / q * (1 + 1e-9)) + 1)
    return Range(arguments[0], arguments[1], kind == "loguniform")


def _broken_rule(kind: str, arguments: list[Any]) -> str:
    """What a range's arguments should be, or nothing when they are."""
    numbers = [
        a
        for a in arguments
        if isinstance(a, (int, float)) and not isinstance(a, bool) and math.isfinite(a)
    ]
    right = len(numbers) == len(arguments) == (3 if kind == "quniform" else 2)
    right = right and (kind != "randint" or all(isinstance(a, int) for a in numbers))
    rules = {
        "uniform": "uniform(low, high) with low < high",
        "loguniform": "loguniform(low, high) with low < high, low > 0",
        "quniform": "quniform(low, high, q) with low < high and q > 0",
        "randint": "randint(low, high) with whole numbers low < high; high itself is never drawn",
    }
    positive = {"loguniform": 0, "quniform": 2}  # the argument that must be
    right = (
        right
        and arguments[0] < arguments[1]
        and (kind not in positive or arguments[positive[kind]] > 0)
    )
    return "" if right else rules[kind]


def _word(text: str) -> Any:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return text.strip()
