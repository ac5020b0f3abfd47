"""Asynchronous successive halving: ASHA, and PASHA's cap on the epochs.

Pure: no clock, no random numbers, no Ray. The same reports in the same order give the same
verdicts.

ASHA is Li et al. 2020, "A system for massively parallel hyperparameter tuning":

- Rungs are at `grace`, grace * reduction, … epochs, and the last one at `max_epochs`.
- A trial pauses at each rung. It continues when it is among the best 1/reduction of the trials that
  reached the rung so far.
- Ray's ASHA never pauses. A trial that is good so far continues, and any other one is stopped for
  good. So the first trials run to their end even if they are bad; benchmarks/results has the cost.
- A pause costs a restart from a checkpoint. Where that is expensive (`pauses=False`), trials are
  stopped as Ray's are, with two differences: among equal trials the first one wins (hopeless trials
  predict one class and tie), and a value that is not a number stops its trial.

The cap (`capped`) is PASHA's (Bohdal et al. 2023, "PASHA: Efficient HPO and NAS with progressive
resource allocation"):

- No trial passes the second rung at first. The cap moves up a rung whenever the trials that reached
  it are ranked otherwise there than one rung below.
- Two trials may swap places if their values below differ by no more than epsilon, the noise: the
  90th percentile of the differences of pairs whose curves cross at least twice.
- With `pauses=False`, trials pause at the cap all the same: stopped ones could not continue when it
  moves, and the best so far are among them.

When nothing else is left to run and no trial was trained in full, the best one on the highest rung
is (`last`). So a search ends with a model and not only with a ranking. The papers leave that to the
user.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from raypipe.train.stopping import Mode

Verdict = Literal["go on", "pause", "stop"]


def rungs(max_epochs: int, grace: int, reduction: int) -> list[int]:
    """Epochs at which trials are compared; the last is max_epochs."""
    epochs = []
    epoch = grace
    while epoch < max_epochs:
        epochs.append(epoch)
        epoch *= reduction
    return [*epochs, max_epochs]


class Halving:
    """Decides which trials continue.

    total: how many trials there will be, if known. `hopeless` needs it.
    """

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
        self.rungs = rungs(max_epochs, grace, reduction)
        self._reduction = reduction
        self._total = total
        self._sign = 1 if mode == "max" else -1  # stored values: more is better
        self._pauses = pauses
        self._capped = capped

        # What was learned. `state` saves it; rungs are numbers from 0.
        self._at: list[dict[str, float]] = [{} for _ in self.rungs]  # rung -> trial -> value
        self._until: dict[str, int] = {}  # trial -> the rung that it may run to
        self._paused: dict[str, int] = {}  # trial -> the rung where it paused
        self._ended: dict[str, bool] = {}  # trials that never continue
        self._curves: dict[str, dict[int, float]] = {}  # trial -> epoch -> value, for the noise
        top = len(self.rungs) - 1
        self._cap = min(1, top) if capped else top  # the highest rung that trials may reach
        self._epsilon = 0.0  # the noise

    @property
    def max_epochs(self) -> int:
        return self.rungs[-1]

    @property
    def cap(self) -> int:
        """Epochs that trials may reach so far."""
        return self.rungs[self._cap]

    def report(self, trial: str, epoch: int, value: float) -> Verdict:
        """What the trial does after this epoch. The same report after a restore: the same verdict.

        value: the metric; NaN stops the trial.
        """
        if math.isnan(value):
            self._record(trial, self._next_rung(epoch), -math.inf)
            self._paused.pop(trial, None)
            return "stop"
        # A usable epoch. Record it, at a rung for ranking too.
        score = self._sign * value
        if self._capped:
            self._curves.setdefault(trial, {}).setdefault(epoch, score)
        if epoch in self.rungs:
            self._record(trial, self.rungs.index(epoch), score)
        if epoch >= self.max_epochs:
            return "stop"

        # The first report may be of a later epoch than the first: if a kill made Tune forget the
        # trial, it is drawn again and finds its checkpoint.
        rung = self._until.setdefault(trial, self._next_rung(epoch))
        if epoch < self.rungs[rung]:
            return "go on"
        # At the rung that it may run to: decide.
        if not self._pauses and trial not in self._best(rung):
            return "stop"
        if self._pauses or rung >= self._cap:
            self._paused[trial] = rung
            return "pause"
        self._until[trial] = rung + 1
        return "go on"

    def promotable(self) -> list[str]:
        """Paused trials that may continue: the highest rung first, there the best first."""
        trials = []
        for rung in reversed(range(self._cap)):
            for trial in self._best(rung):
                if self._paused.get(trial) == rung:
                    trials.append(trial)
        return trials

    def hopeless(self) -> list[str]:
        """Paused trials that no later result can promote: too many others are better already."""
        if self._total is None:
            return []
        # At the end a rung has so many places, if all trials reach it.
        places = max(1, self._total // self._reduction)
        trials = []
        for rung in range(len(self.rungs)):
            for trial in self._ranked(rung)[places:]:
                if self._paused.get(trial) == rung:
                    trials.append(trial)
        return trials

    def last(self) -> str | None:
        """The trial to train in full when nothing else is left to run.

        None if a trial was trained in full already, or if none is paused.
        """
        # One that diverged on its way was not.
        is_whole = any(score > -math.inf for score in self._at[-1].values())
        if is_whole or not self._paused:
            return None
        highest = max(self._paused.values())
        paused = [trial for trial in self._ranked(highest) if self._paused.get(trial) == highest]
        return paused[0]

    def resume(self, trial: str, to_the_end: bool = False) -> None:
        """A paused trial continues, to the next rung or to its end."""
        rung = self._paused.pop(trial)
        end = len(self.rungs) - 1
        self._until[trial] = end if to_the_end else rung + 1

    def forget(self, trial: str) -> None:
        """The trial is not paused any more. What it reported still ranks others."""
        self._paused.pop(trial, None)

    def end(self, trial: str) -> None:
        """The trial never continues, even if a restored search does not know that it ended."""
        self.forget(trial)
        self._ended[trial] = True

    def is_paused(self, trial: str) -> bool:
        return trial in self._paused

    def is_ended(self, trial: str) -> bool:
        return trial in self._ended

    def state(self) -> dict[str, Any]:
        """Everything that was learned, as plain dicts; each key is an attribute without its `_`."""
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
        """Continue from what `state` returned. It stays as it is: reports change a copy."""
        for name, value in copy.deepcopy(state).items():
            setattr(self, f"_{name}", value)

    def _record(self, trial: str, rung: int, score: float) -> None:
        """Keep the trial's first score at a rung, and move the cap if rankings disagree there."""
        self._at[rung].setdefault(trial, score)
        top = len(self.rungs) - 1
        if rung == self._cap < top and self._disagree():
            self._cap += 1

    def _next_rung(self, epoch: int) -> int:
        """The first rung at this epoch or later."""
        for rung, at in enumerate(self.rungs):
            if at >= epoch:
                return rung
        return len(self.rungs) - 1

    def _ranked(self, rung: int) -> list[str]:
        """From best to worst; equal trials in the order of their arrival."""
        scores = self._at[rung]
        return sorted(scores, key=lambda trial: -scores[trial])

    def _best(self, rung: int) -> list[str]:
        """The best 1/reduction of a rung's trials; without pauses one at least."""
        places = len(self._at[rung]) // self._reduction
        if not self._pauses:
            places = max(1, places)
        return self._ranked(rung)[:places]

    def _disagree(self) -> bool:
        """Does the cap's rung rank its trials otherwise than the rung below, beyond the noise?"""
        here = self._at[self._cap]
        below = self._at[self._cap - 1]
        # The trials that both rungs know, ranked by either.
        now = []
        for trial in self._ranked(self._cap):
            if trial in below and here[trial] > -math.inf:
                now.append(trial)
        before = sorted(now, key=lambda trial: -below[trial])
        curves = [self._curves[trial] for trial in here if trial in self._curves]
        self._epsilon = noise(curves, self._epsilon)
        for a, b in zip(now, before, strict=True):
            if a != b and abs(below[a] - below[b]) > self._epsilon:
                return True
        return False


def noise(curves: Iterable[dict[int, float]], otherwise: float = 0.0) -> float:
    """PASHA's epsilon: how far apart two trials may be by noise alone.

    Taken are the pairs whose curves (epoch -> value) cross at least twice, as only noise makes them
    do, and how far apart they are at their last common epoch. The result is the 90th percentile, or
    `otherwise` if there is no such pair.
    """
    known = list(curves)
    values = _table(known)
    # All pairs at once: a thousand trials have half a million.
    one, other = np.triu_indices(len(known), 1)
    leader = np.zeros(len(one))  # 1: the first leads, -1: the other, 0: nobody so far
    crossings = np.zeros(len(one), int)
    last = np.zeros(len(one))
    for epoch in range(values.shape[1]):
        lead = values[one, epoch] - values[other, epoch]
        is_common = ~np.isnan(lead)
        last[is_common] = lead[is_common]
        # Equal values count for neither.
        now = np.where(is_common, np.sign(lead), 0)
        crossings += now * leader < 0
        leader = np.where(now != 0, now, leader)
    apart = np.abs(last[crossings >= 2]).tolist()
    if not apart:
        return otherwise
    apart.sort()
    percentile = min(len(apart) - 1, int(0.9 * len(apart)))
    return apart[percentile]


def _table(curves: Sequence[dict[int, float]]) -> np.ndarray:
    """A row for each curve and a column for each epoch that any has; NaN where a curve has none."""
    epochs = sorted({epoch for curve in curves for epoch in curve})
    rows = [[curve.get(epoch, math.nan) for epoch in epochs] for curve in curves]
    return np.array(rows, np.float64).reshape(len(curves), len(epochs))
