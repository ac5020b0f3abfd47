"""A trial's values as numbers between 0 and 1, for models that measure distances.

    uniform, loguniform, quniform, randint    one coordinate, from the lowest to the highest value
    choice, grid of three or more numbers     one coordinate: they have an order
    any other choice or grid                  one coordinate a value: 1/sqrt(2) for the trial's own,
                                              so that two values are 1 apart
    a field that is not always drawn          one more: 1 where it is absent

A field's branches share its coordinates, but chosen values and ranges do not: a trial is absent on
those of the other kind. A range is logarithmic if each of its branches is, and chosen numbers are
if they are above 0 and span a factor of samplers.SPAN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from raypipe.search.space.samplers import (
    Branch,
    Choice,
    Range,
    are_logarithmic,
    are_ordered,
)
from raypipe.search.space.space import Field, Space


class Coordinates:
    """`of(changes)` -> x_D.

    group_D: the number of each coordinate's field.
    """

    def __init__(self, space: Space) -> None:
        self._fields = [_of_field(field) for field in space.fields]
        groups: list[int] = []
        for number, field in enumerate(self._fields):
            groups.extend([number] * field.size)
        self.group_D = np.array(groups, int)

    def of(self, changes: Mapping[str, Any]) -> np.ndarray:
        """The coordinates_D of a trial with these values, by field."""
        return np.concatenate([field.of(changes) for field in self._fields] or [np.zeros(0)])


class _Ordered:
    """A field of ranges: its position between its ends, and a flag."""

    def __init__(self, name: str, low: float, high: float, is_log: bool, is_optional: bool) -> None:
        self._name = name
        self._is_log = is_log
        self._is_optional = is_optional
        self._low = math.log(low) if is_log else low
        self._high = math.log(high) if is_log else high
        self.size = 1 + is_optional

    def of(self, changes: Mapping[str, Any]) -> np.ndarray:
        found = np.zeros(self.size)
        if self._name not in changes:
            found[-1] = 1.0  # the flag; the position says nothing
            return found
        value = float(changes[self._name])
        value = math.log(value) if self._is_log else value
        width = max(self._high - self._low, 1e-12)
        found[0] = min(1.0, max(0.0, (value - self._low) / width))
        return found


class _OneOf:
    """A field that has a choice: one coordinate a value, and one for none of them."""

    def __init__(self, name: str, values: list[Any]) -> None:
        self._name = name
        self._codes = Choice(tuple(values))
        self.size = len(values) + 1

    def of(self, changes: Mapping[str, Any]) -> np.ndarray:
        found = np.zeros(self.size)
        code = self._codes.code(changes[self._name]) if self._name in changes else None
        found[-1 if code is None else code] = math.sqrt(0.5)
        return found


class _Either:
    """A field of which some branches choose a value and others draw from a range.

    On one coordinate a range beside words would be one point, and a logarithmic one beside a chosen
    0 would lie near that 0. A value that is both counts as chosen.
    """

    def __init__(self, name: str, chosen: list[Branch], drawn: list[Branch]) -> None:
        self._name = name
        self._codes = Choice(tuple(_values(chosen)))
        self._chosen = _of_branches(name, chosen, is_optional=True)
        self._drawn = _of_branches(name, drawn, is_optional=True)
        self.size = self._chosen.size + self._drawn.size

    def of(self, changes: Mapping[str, Any]) -> np.ndarray:
        is_chosen = self._codes.code(changes.get(self._name)) is not None
        chosen, drawn = (changes, {}) if is_chosen else ({}, changes)
        return np.concatenate([self._chosen.of(chosen), self._drawn.of(drawn)])


def _of_field(field: Field) -> _Ordered | _OneOf | _Either:
    chosen = [branch for branch in field.branches if isinstance(branch.sampler, Choice)]
    drawn = [branch for branch in field.branches if branch not in chosen]
    if chosen and drawn:
        return _Either(field.name, chosen, drawn)
    is_optional = field.branches[-1].condition is not None
    return _of_branches(field.name, chosen or drawn, is_optional)


def _of_branches(name: str, branches: list[Branch], is_optional: bool) -> _Ordered | _OneOf:
    """Of branches that all choose, or all draw from a range."""
    samplers = [branch.sampler for branch in branches]
    if isinstance(samplers[0], Choice):
        values = _values(branches)
        if not are_ordered(values):
            return _OneOf(name, values)
        return _Ordered(name, min(values), max(values), are_logarithmic(values), is_optional)
    ends = [sampler.ends[:2] for sampler in samplers]
    return _Ordered(
        name,
        min(low for low, _ in ends),
        max(high for _, high in ends),
        all(isinstance(sampler, Range) and sampler.log for sampler in samplers),
        is_optional,
    )


def _values(branches: list[Branch]) -> list[Any]:
    """All that these choose from, each once."""
    values: list[Any] = []
    for branch in branches:
        values.extend(value for value in branch.sampler.ends if not _has(values, value))
    return values


def _has(values: list[Any], value: Any) -> bool:
    """Is it among them? True and 1 are two values."""
    return Choice(tuple(values)).code(value) is not None
