"""Drawing from a search space, define-by-run: a field is asked for when those its condition names are known.

Trial i of a random search is a function of (seed, i), and each field's value of its own name too: a search that is restored
draws the same, and a field more leaves the others as they were. What the job's validators refuse together (frozen_blocks under
mode frozen) is drawn again, up to TRIES times; each costs half a millisecond.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from raypipe.config import replace
from raypipe.errors import ConfigError
from raypipe.search.space.samplers import Branch, Choice, Sampler
from raypipe.train.job import TrainJob

Changes = dict[str, Any]  # a trial's fields
Suggest = Callable[[str, Sampler], Any]  # (the branch's key, how it is drawn) -> a value

TRIES = 64
DATA = (
    "model.name",
    "model.mode",
    "model.side_px",
)  # with other values of these, trials read other arrays


@dataclass(frozen=True)
class Field:
    """`branches`: the ways to draw it; the first whose condition holds is taken, and where none does it is not set."""

    name: str
    branches: tuple[Branch, ...]

    @property
    def needs(self) -> tuple[str, ...]:
        """The fields its conditions ask for."""
        return tuple(name for b in self.branches if b.condition for name in b.condition.names)

    @property
    def grid(self) -> bool:
        return any(isinstance(b.sampler, Choice) and b.sampler.grid for b in self.branches)

    @property
    def conditional(self) -> bool:
        return any(branch.condition for branch in self.branches)

    def branch(self, value_of: Callable[[str], Any]) -> Branch | None:
        return next(
            (b for b in self.branches if b.condition is None or b.condition.holds(value_of)), None
        )


@dataclass(frozen=True)
class Space:
    """`fields` in an order in which conditions know what they ask for; `job` is what trials change."""

    fields: tuple[Field, ...]
    job: TrainJob

    def of(self, job: TrainJob) -> Space:
        """The same draws for a job of which a search is perhaps a part."""
        return Space(self.fields, plain(job))

    def draw(self, suggest: Suggest) -> Changes:
        """One trial's fields. `suggest` is asked for those alone that will be set."""
        changes: Changes = {}
        for field in self.fields:
            if branch := field.branch(self.known(changes)):
                changes[field.name] = suggest(branch.key, branch.sampler)
        return changes

    def keyed(self, wanted: Mapping[str, Any]) -> Changes:
        """By branch, what must be suggested for a trial of these values, as far as the space has them."""
        found: Changes = {}

        def suggest(key: str, how: Sampler) -> Any:
            value = wanted.get(key.partition("#")[0])
            if how.code(value) is not None:
                found[key] = value
            return value

        self.draw(suggest)
        return found

    def known(self, changes: Mapping[str, Any]) -> Callable[[str], Any]:
        """A field's value in a trial: as it was drawn, else as the job has it."""

        def value_of(name: str) -> Any:
            if name in changes:
                return changes[name]
            found: Any = self.job
            for part in name.split("."):
                found = getattr(found, part)
            return found

        return value_of

    def refusal(self, changes: Changes) -> ConfigError | None:
        """Why no job has these fields; None when one has."""
        try:
            replace(self.job, changes)
        except ConfigError as e:
            return e
        return None

    def trial(self, seed: int, i: int, pins: Mapping[str, Any] | None = None) -> Changes:
        """Trial i of a random search, in which keys in `pins` have these values. Raises ConfigError when TRIES were refused."""
        for attempt in range(TRIES):
            changes = self.draw(partial(at_random, (seed, i, attempt), pins or {}))
            refused = self.refusal(changes)
            if refused is None:
                return changes
        raise ConfigError(
            f"search.space draws what the job refuses, {TRIES} times in a row",
            got=changes,
            rule=" ".join(filter(None, (refused.what, refused.rule))),  # type: ignore[union-attr]
            fix="Put a condition on one of the fields, as in \"randint(0, 6) if model.mode == 'finetune'\"",
        )

    @property
    def cells(self) -> list[Changes]:
        """Every combination of the grid's fields, by key; each is run `samples` times. Of no grid: one that pins nothing."""
        cells: list[tuple[Changes, Changes]] = [({}, {})]  # by name, for conditions, and by key
        for field in (f for f in self.fields if f.grid):
            cells = [cell for named, keyed in cells for cell in self._crossed(field, named, keyed)]
        return [keyed for _, keyed in cells]

    def _crossed(
        self, field: Field, named: Changes, keyed: Changes
    ) -> list[tuple[Changes, Changes]]:
        branch = field.branch(self.known(named))
        if branch is None:
            return [(named, keyed)]
        return [
            (named | {field.name: value}, keyed | {branch.key: value})
            for value in branch.sampler.finite or ()
        ]

    def values(self, name: str) -> list[Any]:
        """The finite values a field can be drawn as; empty when it is not searched, or continuous."""
        return [
            value
            for f in self.fields
            if f.name == name
            for b in f.branches
            for value in b.sampler.finite or ()
        ]

    @property
    def always(self) -> tuple[str, ...]:
        """The fields that every trial draws."""
        return tuple(f.name for f in self.fields if f.branches[-1].condition is None)

    def variants(self, names: Iterable[str] = DATA) -> list[Changes]:
        """One trial for every combination of these fields, drawn or not, that a trial can have."""
        among = [f for f in self.fields if f.name in set(names)]
        options = [
            [{}, *({f.name: value} for value in dict.fromkeys(self.values(f.name)))] for f in among
        ]
        wanted = [
            {name: value for part in parts for name, value in part.items()}
            for parts in itertools.product(*options)
        ]
        found = [self._like(values, [f.name for f in among]) for values in wanted]
        return [changes for changes in found if changes is not None]

    def _like(self, wanted: Changes, among: list[str]) -> Changes | None:
        """A trial that draws, of the fields `among`, just the `wanted` ones as these values."""
        drawn = [(b, wanted[f.name]) for f in self.fields if f.name in wanted for b in f.branches]
        pins = {
            branch.key: value for branch, value in drawn if branch.sampler.code(value) is not None
        }
        for i in range(TRIES):
            changes = self.draw(partial(at_random, (0, i, 0), pins))
            if {n: v for n, v in changes.items() if n in among} == wanted and self.refusal(
                changes
            ) is None:
                return changes
        return None


def plain(job: TrainJob) -> TrainJob:
    """The training alone."""
    return TrainJob.model_validate(job.model_dump(include=set(TrainJob.model_fields)))


def at_random(seeds: tuple[int, int, int], pins: Mapping[str, Any], key: str, how: Sampler) -> Any:
    """The value pinned to this key, else one that depends on the seeds and the key alone."""
    return pins[key] if key in pins else how.at(uniform(*seeds, key))


def uniform(*seeds: Any) -> float:
    """A number from 0 to 1, without 1, that is a function of what it is given."""
    return (int.from_bytes(hashlib.sha256(repr(seeds).encode()).digest()[:8], "big") >> 11) / 2**53
