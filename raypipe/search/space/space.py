"""Draw trials from a search space.

Fields are drawn in dependency order: a field comes after those that its condition names.

Trial i of a random search is a function of the seed and i; each field's value depends on its own
name too. So a restored search draws the same trials, and one field more leaves the others as they
were.

A job may refuse values that are allowed one by one (frozen_blocks under mode frozen), and
search.limits may refuse most models. Then the trial is drawn again, up to MOST_TRIES times; each
try costs half a millisecond, or a tenth where it is known that its model breaks a limit.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import field as field_
from dataclasses import replace as replaced
from functools import cached_property, partial
from typing import Any

from raypipe.config import replace
from raypipe.errors import ConfigError
from raypipe.models.zoo import NOT_SHAPE
from raypipe.search.space.samplers import Branch, Choice, Sampler, different
from raypipe.train.job import TrainJob

Changes = dict[str, Any]  # a trial's values, by dotted field or by the key of a branch
Suggest = Callable[[str, Sampler], Any]  # (the branch's key, its sampler) -> a value

TRIES = 64  # to find values of other fields beside which a value is allowed
# Of one trial. Where one draw of ten is allowed, 64 are refused in a row in one trial of 850: a
# preset plans 2,000. Of these, one in a hundred million times as many.
MOST_TRIES = 2048

# With other values of these fields, trials train on other arrays.
DATA = ("model.name", "model.mode", "model.side_px")


@dataclass(frozen=True)
class Field:
    """One field of the space."""

    name: str

    branches: tuple[Branch, ...]
    """The ways to draw it. The first with a true condition is taken; without one, none is drawn."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The fields that its conditions name."""
        names: list[str] = []
        for branch in self.branches:
            if branch.condition:
                names.extend(branch.condition.names)
        return tuple(names)

    @property
    def grid(self) -> bool:
        samplers = [branch.sampler for branch in self.branches]
        return any(is_grid(sampler) for sampler in samplers)

    @property
    def conditional(self) -> bool:
        return any(branch.condition for branch in self.branches)

    def branch(self, value_of: Callable[[str], Any]) -> Branch | None:
        """The branch that a trial draws, given the values that it has already."""
        for branch in self.branches:
            if branch.condition is None or branch.condition.holds(value_of):
                return branch
        return None


@dataclass(frozen=True)
class Space:
    """The fields of a search, and the job that its trials change."""

    fields: tuple[Field, ...]
    """In dependency order."""

    job: TrainJob

    barred: Mapping[str, str] | None = None
    """By `ModelConfig.shape`: why no trial may have such a model, "" where one may (search.limits).
    None: every model may."""

    by_clock: bool = False
    """Each trial trains until the search's time is over (defaults.trains_by_clock)."""

    _over_limits: dict[str, ConfigError] = field_(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Refusals by search.limits, by what is drawn of the model's shape: asking the job takes
    longer."""

    @property
    def all_barred(self) -> bool:
        """May no trial begin at all? Then only a first answer can keep search.limits."""
        return self.barred is not None and bool(self.barred) and all(self.barred.values())

    def of(self, job: TrainJob) -> Space:
        """The same fields for another job."""
        return replaced(self, job=job)

    def draw(self, suggest: Suggest) -> Changes:
        """The values of one trial, by field. `suggest` is called only for fields that are drawn."""
        changes: Changes = {}
        for field in self.fields:
            branch = field.branch(self.known(changes))
            if branch is not None:
                changes[field.name] = suggest(branch.key, branch.sampler)
        return changes

    def keyed(self, wanted: Mapping[str, Any]) -> Changes:
        """By branch key: what must be suggested for a trial with these values.

        wanted: by field. A value that the space cannot draw is left out, and one that it writes
        otherwise (0 for 0.0) is written as it does. Where the draw of another field decides on the
        branch, each branch that can have the value is given it.
        """
        keyed: Changes = {}
        settled: Changes = {}
        undecided: set[str] = set()  # fields that chance draws, or may draw
        for field in self.fields:
            branches, is_drawn = self._possible(field, settled, undecided)
            able: list[Branch] = []
            if field.name in wanted:
                value = wanted[field.name]
                for branch in branches:
                    code = branch.sampler.code(value)
                    if code is not None:
                        able.append(branch)
                        keyed[branch.key] = branch.sampler.of_code(code)
            if is_drawn and len(able) == len(branches):
                settled[field.name] = wanted[field.name]
            elif branches:
                undecided.add(field.name)
        return keyed

    def drawable(self, known: Mapping[str, Any]) -> set[str]:
        """The other fields that a trial with these values may draw. known: by field."""
        drawable: set[str] = set()
        for field in self.fields:
            if field.name not in known and self._possible(field, {**known}, drawable)[0]:
                drawable.add(field.name)
        return drawable

    def _possible(
        self, field: Field, settled: Changes, undecided: set[str]
    ) -> tuple[list[Branch], bool]:
        """The branches that a trial may draw, and whether it draws one of them for certain.

        settled: the trial's values that are known. undecided: fields whose values chance draws.
        """
        value_of = self.known(settled)
        branches = []
        for branch in field.branches:
            condition = branch.condition
            if condition is not None and not undecided.isdisjoint(condition.names):
                branches.append(branch)
            elif condition is None or condition.holds(value_of):
                return [*branches, branch], True
        return branches, False

    def known(self, changes: Mapping[str, Any]) -> Callable[[str], Any]:
        """A function from a field to its value in a trial: the drawn one, else the job's."""

        def value_of(name: str) -> Any:
            if name in changes:
                return changes[name]
            value: Any = self.job
            for part in name.split("."):
                value = getattr(value, part)
            return value

        return value_of

    def refusal(self, changes: Changes) -> ConfigError | None:
        """Why the job refuses these values, or search.limits do; None if they are allowed."""
        drawn = "" if self.barred is None else str([*_shaping(changes)])
        # A space that an older raypipe has pickled knows no refusals.
        seen: dict[str, ConfigError] = self.__dict__.setdefault("_over_limits", {})
        if drawn in seen:
            return seen[drawn]
        try:
            job = replace(self.job, changes)
        except ConfigError as e:
            return e
        if why := job.train.newly_too_few(self.job.train):
            return ConfigError("A trial would have too few images", rule=why)
        if self.barred is None:
            return None
        why = self.barred.get(job.model.shape, "Its model was not measured before the search")
        if not why:
            return None
        seen[drawn] = ConfigError("A trial would break search.limits", rule=why)
        return seen[drawn]

    def trial(
        self, seed: int, i: int, pins: Mapping[str, Any] | None = None, tries: int = MOST_TRIES
    ) -> Changes:
        """Trial i of a random search.

        pins: values that are fixed, by branch key. A draw that has them all is preferred to one
        whose conditions leave some out. Raises ConfigError if so many draws are refused.
        """
        if pins and self.every(pins, most=1) is not None:
            tries = 1  # nothing is drawn
        wanted: dict[str, list[Any]] = {}
        for key, value in (pins or {}).items():
            wanted.setdefault(field_of(key), []).append(value)
        second: Changes | None = None
        for attempt in range(tries):
            changes = self.draw(partial(at_random, (seed, i, attempt), pins or {}))
            refused = self.refusal(changes)
            has_all = all(name in changes and changes[name] in wanted[name] for name in wanted)
            if refused is None and has_all:
                return changes
            if refused is None and second is None:
                second = changes
        if second is not None:
            return second
        assert refused is not None
        condition = "\"randint(0, 6) if model.mode == 'finetune'\""
        times = f", {tries} times in a row" if tries > 1 else ""
        raise ConfigError(
            f"search.space draws what the job refuses{times}",
            got=changes,
            rule=" ".join(filter(None, (refused.what, refused.rule))),
            fix=f"Put a condition on one of the fields, as in {condition}",
        )

    @property
    def cells(self) -> list[Changes]:
        """Every combination of the grids' values, by branch key; [{}] without a grid."""
        # Conditions need the values by field, and searchers need them by key.
        cells: list[tuple[Changes, Changes]] = [({}, {})]
        for field in self.fields:
            if not field.grid:
                continue
            extended = []
            for by_field, by_key in cells:
                extended.extend(self._extended(field, by_field, by_key))
            cells = extended
        return [by_key for _, by_key in cells]

    @cached_property
    def cells_within_limits(self) -> list[Changes]:
        """`cells`, without those whose models break a limit. Those that the job itself refuses
        stay: whoever draws them gets its message.

        Kept, because such a cell is drawn MOST_TRIES times until it is known. Raises ConfigError if
        there is no other one.
        """
        if self.barred is None or self.cells == [{}]:
            return self.cells
        kept = []
        for cell in self.cells:
            if self._allows(cell) or not replaced(self, barred=None)._allows(cell):
                kept.append(cell)
        if not kept:
            raise ConfigError(
                "No combination of the grid in search.space is within search.limits",
                got=f"{len(self.cells)} combinations",
                fix="Add a smaller model.side_px or model.name to the grid, or raise the limit",
            )
        return kept

    def _allows(self, cell: Changes) -> bool:
        """May a cell of the grid have a trial?"""
        with suppress(ConfigError):
            self.trial(self.job.run.seed, 0, cell)
            return True
        return False

    def every(self, cell: Mapping[str, Any], most: int) -> list[Changes] | None:
        """All different draws of a cell of the grid, by field; None if there are more than `most`.

        The job, or search.limits, may refuse some of them.
        """
        draws: list[Changes] = [{}]
        for field in self.fields:
            extended = []
            for changes in draws:
                branch = field.branch(self.known(changes))
                if branch is None:
                    extended.append(changes)
                    continue
                values = [cell[branch.key]] if branch.key in cell else different(branch.sampler)
                if values is None:
                    return None
                extended.extend({**changes, field.name: value} for value in values)
            if len(extended) > most:
                return None
            draws = extended
        return draws

    def _extended(
        self, field: Field, by_field: Changes, by_key: Changes
    ) -> list[tuple[Changes, Changes]]:
        """One cell of the grid, combined with every value of one more field."""
        branch = field.branch(self.known(by_field))
        # Another branch than the grid's is drawn, in each trial anew.
        if branch is None or not is_grid(branch.sampler):
            return [(by_field, by_key)]
        cells = []
        for value in different(branch.sampler) or ():
            cells.append((by_field | {field.name: value}, by_key | {branch.key: value}))
        return cells

    def values(self, name: str) -> list[Any]:
        """The finite values that a field can have; [] if it is not searched, or continuous."""
        values: list[Any] = []
        for field in self.fields:
            if field.name == name:
                for branch in field.branches:
                    values.extend(branch.sampler.finite or ())
        return values

    @property
    def most_epochs(self) -> int:
        """Those of the longest trial: the job's, unless train.epochs is drawn."""
        drawn = [field for field in self.fields if field.name == "train.epochs"]
        ends = [int(end) for field in drawn for b in field.branches for end in b.sampler.ends]
        if not drawn or drawn[0].branches[-1].condition is not None:
            ends.append(self.job.train.epochs)
        return max(ends)

    @property
    def always(self) -> tuple[str, ...]:
        """The fields that every trial draws: their last branch has no condition."""
        always = [field for field in self.fields if field.branches[-1].condition is None]
        return tuple(field.name for field in always)

    def variants(self, names: Iterable[str] = DATA) -> list[Changes]:
        """One trial for each possible combination of these fields' values.

        A field that a trial does not draw is a combination of its own.
        """
        chosen = set(names)
        fields = [field.name for field in self.fields if field.name in chosen]
        # {}: the field is not drawn.
        options: list[list[Changes]] = []
        for name in fields:
            values = dict.fromkeys(self.values(name))  # each once
            options.append([{}, *({name: value} for value in values)])
        cells = self.cells
        trials = []
        for parts in itertools.product(*options):
            wanted: Changes = {}
            for part in parts:
                wanted |= part
            # Of a large grid, chance would miss the one cell that has these values.
            fitting = [cell for cell in cells if _has_no_other(cell, wanted, fields)]
            trial = self._trial_with(wanted, fields, fitting)
            if trial is not None:
                trials.append(trial)
        return trials

    def _trial_with(
        self, wanted: Changes, fields: list[str], cells: list[Changes]
    ) -> Changes | None:
        """A trial for `variants`: of these fields it draws exactly those in `wanted`, with these
        values. cells: of the grid, which are tried in turn.

        None if TRIES draws, or one of each cell, bring no such trial that the job accepts.
        """
        # A value may belong to several branches of a field: it is fixed in all.
        pins: Changes = {}
        for field in self.fields:
            if field.name not in wanted:
                continue
            value = wanted[field.name]
            for branch in field.branches:
                # `code` is None for a value that the branch's sampler cannot draw.
                if branch.sampler.code(value) is not None:
                    pins[branch.key] = value
        for i in range(max(TRIES, len(cells)) if cells else 0):
            # Attempt i of one fixed seed: the other fields are drawn anew, and every run draws the
            # same.
            changes = self.draw(partial(at_random, (0, i, 0), pins | cells[i % len(cells)]))
            # Conditions may still add or remove one of the fields.
            drawn = {name: value for name, value in changes.items() if name in fields}
            if drawn == wanted and self.refusal(changes) is None:
                return changes
        return None


def _has_no_other(cell: Changes, wanted: Changes, fields: list[str]) -> bool:
    """Has a cell of the grid, by branch key, no value of these fields but those in `wanted`?"""
    of_fields = {field_of(key): value for key, value in cell.items() if field_of(key) in fields}
    return of_fields.items() <= wanted.items()


def is_grid(sampler: Sampler) -> bool:
    return isinstance(sampler, Choice) and sampler.grid


def _shaping(changes: Changes) -> Iterator[tuple[str, Any]]:
    """The drawn values on which the shape of the model depends."""
    for name, value in changes.items():
        section, _, field = name.partition(".")
        if section == "model" and field not in NOT_SHAPE:
            yield name, value


def field_of(key: str) -> str:
    """The field of a branch's key: train.lr for train.lr#2."""
    return key.partition("#")[0]


def at_random(
    seeds: tuple[int, int, int], pins: Mapping[str, Any], key: str, sampler: Sampler
) -> Any:
    """The value that `pins` has for this key, else one that depends on the seeds and the key."""
    if key in pins:
        return pins[key]
    return sampler.at(uniform(*seeds, key))


def uniform(*seeds: Any) -> float:
    """A number 0 <= u < 1 that depends on `seeds` alone: 53 bits of their SHA-256."""
    digest = hashlib.sha256(repr(seeds).encode()).digest()
    bits = int.from_bytes(digest[:8], "big") >> 11
    return bits / 2**53
