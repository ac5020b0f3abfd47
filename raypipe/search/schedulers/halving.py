"""Successive halving of trials as they come, and a cap on their epochs that grows only while rankings disagree. Pure: no clock,
no random number, no Ray; the same reports in the same order give the same verdicts.

Rungs are at `grace`, grace * reduction, … epochs, and the last at `max_epochs`. ASHA (Li et al. 2020, "A system for massively
parallel hyperparameter tuning"): a trial pauses at each rung, and goes on when it is among the best 1/reduction of those that
came so far. Ray's ASHA never pauses: a trial that is good *so far* runs on, any other is stopped for good. So the first trials
run to their end whatever they are worth; what that costs is in benchmarks/results. A pause costs a restart from a checkpoint:
where that is dear (`pauses=False`), trials are stopped as Ray's are, with two differences. Among equals the first wins
(hopeless trials predict one class and tie), and a value that is no number stops its trial.

The cap (`capped`) is PASHA's (Bohdal et al. 2023, "PASHA: Efficient HPO and NAS with progressive resource allocation"): no
trial passes the second rung; then the cap moves up a rung whenever the trials that reached it are ranked otherwise there than
a rung below. Places may be swapped by trials whose values below differ by no more than epsilon, the noise: the 90th percentile
of the differences of pairs whose curves cross at least twice. With `pauses=False`, trials pause at the cap all the same:
stopped ones could not go on when it grows, and the best so far are among them.

When nothing else is left to run and no trial was trained in full, the best one on the highest rung is (`last`): a search ends
with a model and not with a ranking. The paper leaves that to the user.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import combinations, pairwise
from typing import Any, Literal

from raypipe.train.stopping import Mode

Verdict = Literal["go on", "pause", "stop"]


def rungs(max_epochs: int, grace: int, reduction: int) -> list[int]:
    """Epochs at which trials are compared; the last is max_epochs."""
    found, epoch = [], grace
    while epoch < max_epochs:
        found.append(epoch)
        epoch *= reduction
    return [*found, max_epochs]


class Halving:
    """Which trials go on. `total`, where known, is how many there will be: those with no chance left are told by `hopeless`."""

    def __init__(
        self,
        max_epochs: int,
        grace: int = 1,
        reduction: int = 3,
        mode: Mode = "max",
        pauses: bool = True,
        capped: bool = False,
        total: int | None = None,
    ) -> None:
        self.rungs, self._reduction, self._total = (
            rungs(max_epochs, grace, reduction),
            reduction,
            total,
        )
        self._sign, self._pauses, self._capped = (1 if mode == "max" else -1), pauses, capped
        self._at: list[dict[str, float]] = [
            {} for _ in self.rungs
        ]  # by rung: trial -> value, in order of arrival
        self._until: dict[str, int] = {}  # the rung a trial may run to
        self._paused: dict[str, int] = {}  # at which rung
        self._ended: dict[str, bool] = {}  # for good
        self._curves: dict[str, dict[int, float]] = {}  # trial -> epoch -> value, for the noise
        self._cap, self._epsilon = (
            (min(1, len(self.rungs) - 1) if capped else len(self.rungs) - 1),
            0.0,
        )

    @property
    def max_epochs(self) -> int:
        return self.rungs[-1]

    @property
    def cap(self) -> int:
        """Epochs that trials may reach so far."""
        return self.rungs[self._cap]

    def report(self, trial: str, epoch: int, value: float) -> Verdict:
        """What the trial does after this epoch. A report that comes again, after a restore, gets the same answer."""
        if value != value:
            self._record(trial, self._next_rung(epoch), -math.inf)
            self._paused.pop(trial, None)
            return "stop"
        if self._capped:
            self._curves.setdefault(trial, {}).setdefault(epoch, self._sign * value)
        if epoch in self.rungs:
            self._record(trial, self.rungs.index(epoch), self._sign * value)
        if epoch >= self.max_epochs:
            return "stop"
        # One that Tune forgot in a kill is drawn again, finds its checkpoint, and comes with a later epoch than the first.
        rung = self._until.setdefault(trial, self._next_rung(epoch))
        if epoch < self.rungs[rung]:
            return "go on"
        if not self._pauses and not self._good(trial, rung):
            return "stop"
        if self._pauses or rung >= self._cap:
            self._paused[trial] = rung
            return "pause"
        self._until[trial] = rung + 1
        return "go on"

    def promotable(self) -> list[str]:
        """Paused trials that may go on, those on the highest rung first, and of these the best."""
        found = []
        for rung in reversed(range(self._cap)):
            found += [trial for trial in self._best(rung) if self._paused.get(trial) == rung]
        return found

    def hopeless(self) -> list[str]:
        """Paused trials that no result to come can promote: too many were better already."""
        if self._total is None:
            return []
        places = max(1, self._total // self._reduction)
        return [
            t
            for rung in range(len(self.rungs))
            for t in self._ranked(rung)[places:]
            if self._paused.get(t) == rung
        ]

    def last(self) -> str | None:
        """The trial to train in full when nothing else is left to run: None when one was, or there is none."""
        if self._at[-1] or not self._paused:
            return None
        highest = max(self._paused.values())
        return next(trial for trial in self._ranked(highest) if self._paused.get(trial) == highest)

    def resume(self, trial: str, to_the_end: bool = False) -> None:
        """The trial goes on, to the next rung or to its end."""
        rung = self._paused.pop(trial)
        self._until[trial] = len(self.rungs) - 1 if to_the_end else rung + 1

    def forget(self, trial: str) -> None:
        """It is not waiting any more. What it reported still ranks others."""
        self._paused.pop(trial, None)

    def end(self, trial: str) -> None:
        """It will never go on, also where a restored search does not know that it had ended."""
        self.forget(trial)
        self._ended[trial] = True

    def is_paused(self, trial: str) -> bool:
        return trial in self._paused

    def is_ended(self, trial: str) -> bool:
        return trial in self._ended

    def state(self) -> dict[str, Any]:
        """Everything that was learned; plain dicts."""
        return {
            "at": [dict(values) for values in self._at],
            "until": dict(self._until),
            "paused": dict(self._paused),
            "ended": dict(self._ended),
            "curves": {trial: dict(curve) for trial, curve in self._curves.items()},
            "cap": self._cap,
            "epsilon": self._epsilon,
        }

    def restore(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, f"_{name}", value)

    def _record(self, trial: str, rung: int, value: float) -> None:
        self._at[rung].setdefault(trial, value)
        if rung == self._cap < len(self.rungs) - 1 and self._disagree():
            self._cap += 1

    def _next_rung(self, epoch: int) -> int:
        return next((i for i, at in enumerate(self.rungs) if at >= epoch), len(self.rungs) - 1)

    def _ranked(self, rung: int) -> list[str]:
        """From best to worst; among equals the first to come."""
        values = self._at[rung]
        return sorted(values, key=lambda trial: -values[trial])

    def _best(self, rung: int) -> list[str]:
        places = len(self._at[rung]) // self._reduction
        return self._ranked(rung)[: places if self._pauses else max(1, places)]

    def _good(self, trial: str, rung: int) -> bool:
        return trial in self._best(rung)

    def _disagree(self) -> bool:
        """Does the cap's rung rank its trials otherwise than the rung below, by more than the noise?"""
        here, below = self._at[self._cap], self._at[self._cap - 1]
        now = [
            trial for trial in self._ranked(self._cap) if trial in below and here[trial] > -math.inf
        ]
        before = sorted(now, key=lambda trial: -below[trial])
        self._epsilon = noise(
            [self._curves[trial] for trial in here if trial in self._curves], self._epsilon
        )
        return any(
            abs(below[a] - below[b]) > self._epsilon
            for a, b in zip(now, before, strict=True)
            if a != b
        )


def noise(curves: Iterable[dict[int, float]], otherwise: float = 0.0) -> float:
    """Epsilon: the 90th percentile of how far apart those pairs are, at their last common epoch, whose curves cross at least
    twice, as only noise makes them do; `otherwise` where there is no such pair."""
    apart = []
    for one, other in combinations(list(curves), 2):
        leads = [one[epoch] - other[epoch] for epoch in sorted(one.keys() & other.keys())]
        signs = [lead > 0 for lead in leads if lead]
        if sum(a != b for a, b in pairwise(signs)) >= 2:
            apart.append(abs(leads[-1]))
    return sorted(apart)[min(len(apart) - 1, int(0.9 * len(apart)))] if apart else otherwise
