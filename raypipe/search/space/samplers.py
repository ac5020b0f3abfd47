"""How a field is drawn: `loguniform(1e-4, 1e-1)`, with a condition if wanted.

    grid(a, b)               every value, combined with every value of the other grids
    choice(a, b)             one value at random; repeat a value to weight it
    uniform(low, high)       a real number
    loguniform(low, high)    a real number whose logarithm is uniform
    quniform(low, high, q)   low, low + q, … up to high, which is drawn if a step ends there
    randint(low, high)       a whole number from low to high - 1, as in NumPy
    … if CONDITION           drawn only if CONDITION is true (conditions.py)
    … if CONDITION else …    several branches: the first whose condition is true

A sampler maps a number from 0 to 1 to a value. So one uniform number draws it, wherever that number
comes from. Its ends and its finite values are known without drawing: checks before a search need
them, and so do searchers that model the space.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raypipe.errors import ConfigError
from raypipe.search.space.conditions import Condition

# Groups: sampler, arguments, condition, the next branch.
_BRANCH = re.compile(r"\s*(\w+)\s*\((.*?)\)\s*(?:\bif\b(.+?)(?:\belse\b(.+))?)?$", re.DOTALL)
SAMPLERS = ("grid", "choice", "uniform", "loguniform", "quniform", "randint")
SPAN = 4.0  # chosen numbers that differ by this factor are apart by their logarithms
_MOST_LISTED = 1000  # steps of a range that are listed as finite values

_RULES = {
    "uniform": "uniform(low, high) with low < high",
    "loguniform": "loguniform(low, high) with low < high, low > 0",
    "quniform": "quniform(low, high, q) with low < high and q > 0",
    "randint": "randint(low, high) with whole numbers low < high; high itself is never drawn",
}


@dataclass(frozen=True)
class Choice:
    """grid or choice: one of some values of any type."""

    values: tuple[Any, ...]
    grid: bool = False

    def at(self, u: float) -> Any:
        """The value for a uniform number 0 <= u < 1."""
        return self.values[int(u * len(self.values))]

    @property
    def ends(self) -> tuple[Any, ...]:
        """If a field accepts these values, it accepts all."""
        return self.values

    @property
    def finite(self) -> tuple[Any, ...] | None:
        """All values."""
        return self.values

    def code(self, value: Any) -> int | None:
        """The value's number, by which searchers know it; None if it is not one of the values."""
        for number, member in enumerate(self.values):
            # In Python True == 1.
            same_kind = isinstance(member, bool) == isinstance(value, bool)
            if member == value and same_kind:
                return number
        return None

    def of_code(self, code: float) -> Any:
        """The value of which `code` is the code."""
        return self.values[int(code)]


@dataclass(frozen=True)
class Range:
    """uniform or loguniform: a real number from low to high."""

    low: float
    high: float
    log: bool = False

    def at(self, u: float) -> float:
        """The value for a uniform number 0 <= u < 1."""
        if self.log:
            low, high = math.log(self.low), math.log(self.high)
            value = math.exp(low + u * (high - low))
            return min(self.high, max(self.low, value))
        return min(self.high, self.low + u * (self.high - self.low))

    @property
    def ends(self) -> tuple[Any, ...]:
        """If a field accepts these values, it accepts all.

        The last one is a fraction: a field of whole numbers refuses it.
        """
        inside = self.low + 0.618 * (self.high - self.low)
        return self.low, self.high, inside

    @property
    def finite(self) -> tuple[Any, ...] | None:
        """None: there are infinitely many values."""
        return None

    def code(self, value: Any) -> float | None:
        """The value itself, by which searchers know it; None if it lies outside the range."""
        if not _is_number(value) or not self.low <= value <= self.high:
            return None
        return float(value)

    def of_code(self, code: float) -> Any:
        """The value of which `code` is the code."""
        return code


@dataclass(frozen=True)
class Steps:
    """quniform or randint: low, low + step, …, each with the same probability.

    The values are whole numbers if low and step are.
    """

    low: float
    step: float
    count: int
    """How many values."""

    def at(self, u: float) -> float:
        """The value for a uniform number 0 <= u < 1."""
        return self.value(int(u * self.count))

    def value(self, i: int) -> float:
        """The value after `i` steps."""
        value = self.low + i * self.step
        if isinstance(value, int):
            return value
        return float(f"{value:.12g}")  # not 0.30000000000000004

    @property
    def ends(self) -> tuple[Any, ...]:
        """If a field accepts these values, it accepts all."""
        return self.value(0), self.value(self.count - 1)

    @property
    def finite(self) -> tuple[Any, ...] | None:
        """All values; None if there are very many."""
        if self.count > _MOST_LISTED:
            return None
        return tuple(self.value(i) for i in range(self.count))

    def code(self, value: Any) -> int | None:
        """How many steps lead to the value, which is how searchers know it; None if none do."""
        if not _is_number(value):
            return None
        # The nearest step, if the value is a step.
        i = round((value - self.low) / self.step)
        if not 0 <= i < self.count:
            return None
        return i if math.isclose(self.value(i), value, abs_tol=1e-12) else None

    def of_code(self, code: float) -> Any:
        """The value of which `code` is the code."""
        return self.value(int(code))


Sampler = Choice | Range | Steps


def different(sampler: Sampler) -> list[Any] | None:
    """Its finite values, each once; None if there are infinitely many, or very many."""
    if sampler.finite is None:
        return None
    return [value for i, value in enumerate(sampler.finite) if sampler.code(value) == i]


@dataclass(frozen=True)
class Branch:
    """One of the ways to draw a field."""

    key: str
    """Its name for searchers, which know one sampler per name: train.lr, train.lr#2, …"""

    sampler: Sampler

    condition: Condition | None
    """None: always true."""

    text: str
    """The sampler as it was written, without its condition."""


def read(field: str, text: str) -> tuple[Branch, ...]:
    """The branches of a field, in their order. Raises ConfigError if `text` is not a sampler."""
    branches: list[Branch] = []
    rest: str | None = str(text)
    while rest is not None:
        match = _BRANCH.match(rest)
        if not match or match[1] not in SAMPLERS:
            kinds = ", ".join(f"{name}(…)" for name in SAMPLERS)
            raise ConfigError(
                f"search.space.{field} is not a draw",
                got=text,
                rule=f"One of {kinds}, if you like with `if …`",
            )
        # `rest` is None after the last branch.
        kind, arguments, condition, rest = match.groups()
        read_condition = Condition.read(field, condition) if condition else None
        key = f"{field}#{len(branches) + 1}" if branches else field
        sampler = _sampler(field, kind, arguments, text)
        branches.append(Branch(key, sampler, read_condition, f"{kind}({arguments})"))
    return tuple(branches)


def _sampler(field: str, kind: str, inside: str, text: str) -> Sampler:
    """The sampler `kind(inside)`; `text` is the whole draw, for messages."""
    arguments = _arguments(inside)
    if kind in ("grid", "choice"):
        if not arguments:
            raise ConfigError(f"search.space.{field} has nothing to choose from", got=text)
        return Choice(tuple(arguments), kind == "grid")
    if not _is_range(kind, arguments):
        raise ConfigError(f"search.space.{field} is not a range", got=text, rule=_RULES[kind])
    if kind == "randint":
        low, high = arguments
        return Steps(low, 1, high - low)
    if kind == "quniform":
        low, high, step = arguments
        # A little more, so that a high which a step reaches is not lost to rounding.
        steps = math.floor((high - low) / step * (1 + 1e-9))
        return Steps(low, step, steps + 1)
    low, high = arguments
    return Range(low, high, kind == "loguniform")


def _arguments(inside: str) -> list[Any]:
    """The arguments in a sampler's brackets. Words need no quotes: choice(cosine, constant)."""
    if not inside.strip():
        return []
    try:
        return list(ast.literal_eval(f"({inside},)"))
    except (ValueError, SyntaxError):
        return [_word(part) for part in inside.split(",") if part.strip()]


def _word(text: str) -> Any:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return text.strip()


def _is_range(kind: str, arguments: list[Any]) -> bool:
    """Do the arguments follow the rule in _RULES?"""
    if len(arguments) != (3 if kind == "quniform" else 2):
        return False
    if not all(_is_number(value) and math.isfinite(value) for value in arguments):
        return False
    if arguments[0] >= arguments[1]:
        return False
    if kind == "randint":
        return all(isinstance(value, int) for value in arguments)
    if kind == "loguniform":
        return bool(arguments[0] > 0)
    if kind == "quniform":
        return bool(arguments[2] > 0)
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def are_ordered(values: Sequence[Any]) -> bool:
    """Are these chosen values numbers, and enough of them that their order tells something?

    On the solar table's resolutions and batch sizes a search needed 48 epochs instead of 55 to its
    winner when it knew their order (40 orders; benchmarks/thaw.py).
    """
    numbers = [value for value in values if isinstance(value, int | float)]
    return len(numbers) == len(values) >= 3 and not any(isinstance(v, bool) for v in values)


def are_logarithmic(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) >= SPAN * min(values)
