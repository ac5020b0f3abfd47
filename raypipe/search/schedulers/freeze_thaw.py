"""Freeze-thaw search: after every epoch, which trial may train the next one.

Pure: no clock, no Ray. Random numbers depend on the seed and on how many epochs were reported, so
the same reports in the same order give the same verdicts, also after a restore. Of equal trials the
first one is chosen; Tune adds them in another order after a kill.

Swersky et al. 2014, "Freeze-thaw Bayesian optimization", with the acquisition of Rakotoarison et
al. 2024, "In-context freeze-thaw Bayesian optimization" (ifBO):

- A Gaussian process over trials' values and epochs (surrogate.py) predicts every curve, also those
  of trials that have not begun.
- Each decision draws a horizon of 1 to `max_epochs` epochs and a threshold below the best target.
  The trial that most probably passes the threshold within the horizon may train an epoch. Short
  horizons and low thresholds exploit, others explore: no single setting of the two is good for all
  tables.
- The trial that has just reported goes on without a pause if it is that trial. It goes on anyway
  for the share FIRST of its epochs: in a warm-up, good trials look as bad as hopeless ones.
- The best trial may have values that the model thinks little of. So once nothing has improved the
  metric for as long as STUCK epochs of each trial take, half of the decisions begin another trial.
- The search ends when all trials have begun, and WAIT epochs of each have since improved nothing;
  or as many as one whole training has, if that is more. Expected gains are no good end: they stay
  high for ever where a validation set is noisy, and fall to nothing too early elsewhere. Nor are
  seconds: where the best trial's epochs are long, too few of them fit into the wait.
- Cheap trials are not preferred: dividing the probability by a trial's seconds an epoch, or by
  their root, finds the best later and loses it where it is dear.

Targets are minimised (`curves.target`). The winner is judged by the metric.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Container
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy.special import log_ndtr

from raypipe.search.schedulers import surrogate
from raypipe.search.schedulers.curves import Curve, log_seconds, observed
from raypipe.search.schedulers.halving import Verdict
from raypipe.search.schedulers.surrogate import Array, Data, Likeness, Posterior, one_thread
from raypipe.train.stopping import Mode

FIRST = 0.04  # share of the epochs that every trial trains before it pauses; one epoch at least
STUCK = 0.5  # epochs without an improvement, of each trial of the search; by their seconds
BEGIN = 0.5  # share of the decisions that then begin a trial
WAIT = 2  # epochs of each trial, since the last improvement and since the last trial began
IMPROVED = 1e-3  # share of the best metric by which it must get better to count
# The hyperparameters are one guess, taken for certain. So intervals are too narrow by this factor,
# on the tables that the rule was developed on.
WIDER = 1.7
MOST_CANDIDATES = 256  # bounds a decision's cost, as curves.MOST_OBSERVED does
FIRST_FIT = 6  # observations that the hyperparameters are first fitted to
GROWTH = 1.25  # of the observations, until they are fitted again


class FreezeThaw:
    """Decides which trial trains the next epoch.

    group_D: which coordinates of a trial's values share a lengthscale.
    """

    def __init__(self, max_epochs: int, group_D: Array, mode: Mode = "max", seed: int = 0) -> None:
        self.max_epochs = max_epochs
        self._first = max(1, round(FIRST * max_epochs))
        self._group_D = group_D
        self._sign = 1 if mode == "max" else -1
        self._seed = seed
        self._x: dict[str, Array] = {}  # of all trials, in the order of their arrival
        self._known: tuple[int, _Model] | None = None  # the model after so many reports
        self._likeness: Likeness | None = None  # at the fitted hyperparameters
        self._prices: dict[str, float] = {}  # logarithms of seconds an epoch; empty: not known yet

        # What was learned. `state` saves it.
        self._curves: dict[str, Curve] = {}  # of trials that have begun
        self._running: dict[str, bool] = {}
        self._ended: dict[str, bool] = {}  # trials that never continue
        self._failed: dict[str, bool] = {}  # trials that do not continue in this run
        self._reports = 0
        self._best: float | None = None  # the metric, when it last improved; more is better
        self._improved = 0.0  # what was spent until then
        self._news = 0  # reports until then, or until a trial last reported its first epoch
        self._spent = 0.0  # seconds of all epochs, or their number
        self._theta: list[float] | None = None  # the surrogate's hyperparameters
        self._fitted = 0  # observations that they were fitted to
        self._to_the_end: str | None = None  # a trial that is trained in full whatever is predicted
        self._done = False

    def meet(self, trial: str, x_D: Array) -> None:
        """A trial that may be begun, and its values."""
        if trial in self._x and not np.array_equal(self._x[trial], x_D):
            self._known = self._likeness = None  # they know other values
        self._x[trial] = x_D
        self._prices = {}

    @one_thread
    def report(
        self,
        trial: str,
        epoch: int,
        value: float,
        target: float,
        seconds: float | None = None,
        ended: bool = False,
    ) -> Verdict:
        """What the trial does after this epoch. The same report after a restore: the same verdict.

        value: the metric; NaN ends the trial. target: see `curves.target`. seconds: of this epoch;
        None: not known. ended: it was the trial's last one, by train.stopping or as a fitted head.
        """
        self.forget(trial)
        curve = self._curves.setdefault(trial, Curve())
        is_lost = math.isnan(value) or math.isnan(target)
        if epoch not in curve.targets:
            # A lost trial is as bad as any, so that trials like it are avoided.
            score = -math.inf if is_lost else self._sign * value
            was_timed = any(one.seconds for one in self._curves.values())
            curve.add(epoch, math.inf if is_lost else target, score, seconds)
            self._reports += 1
            self._prices = {}
            self._spend(trial, is_first_time=bool(curve.seconds) and not was_timed)
            self._note(score)
            if len(curve.targets) == 1:
                self._news = self._reports
        elif is_lost and not curve.is_lost:
            # It had trained this epoch before a kill, and has diverged now.
            curve.targets[curve.epoch] = math.inf
            self._known = None
        curve.is_whole = curve.is_whole or ended
        if is_lost or ended or epoch >= self.max_epochs or trial in self._ended:
            self.end(trial)
            return "stop"
        goes_on = trial == self._to_the_end or epoch < self._first
        if not goes_on and self._next() != trial:
            return "pause"
        self._running[trial] = True
        return "go on"

    @one_thread
    def choose(self, ready: Container[str] | None = None) -> str | None:
        """The trial that begins or continues now; None if none is worth an epoch.

        ready: the trials that can start; None: all that wait.
        """
        chosen = self._next(ready)
        if chosen is not None:
            self._running[chosen] = True
        return chosen

    @property
    def done(self) -> bool:
        """The search has ended, and no trial runs."""
        return self._done

    @one_thread
    def forecast(self) -> dict[str, tuple[float, float]]:
        """Trial -> (mean, standard deviation) of its target after its last epoch, as a report would
        say it. Of trials that have begun and wait.
        """
        names = [name for name in self._open() if self._epoch(name)]
        if not names:
            return {}
        model = self._model()
        mean_C, sd_C = self._predict(model, names, np.full(len(names), self.max_epochs))
        sd_C = WIDER * np.hypot(sd_C, model.posterior.noise) * model.scale
        pairs = zip((mean_C * model.scale + model.mean).tolist(), sd_C.tolist(), strict=True)
        return dict(zip(names, pairs, strict=True))

    def end(self, trial: str) -> None:
        """The trial never continues. What it reported is still learned from."""
        self._running.pop(trial, None)
        self._ended[trial] = True

    def fail(self, trial: str) -> None:
        """The trial failed. It is not chosen again, but Tune may start it again by itself."""
        self._running.pop(trial, None)
        self._failed[trial] = True

    def begin(self, trial: str) -> None:
        """The trial runs, though nobody chose it."""
        self.forget(trial)
        self._running[trial] = True
        self._done = False

    def forget(self, trial: str) -> None:
        """The trial neither runs nor failed: it may continue."""
        self._running.pop(trial, None)
        self._failed.pop(trial, None)

    def is_running(self, trial: str) -> bool:
        return trial in self._running

    def is_failed(self, trial: str) -> bool:
        return trial in self._failed

    def is_ended(self, trial: str) -> bool:
        return trial in self._ended

    def state(self) -> dict[str, Any]:
        """Everything that was learned; each key is an attribute without its `_`."""
        curves = {
            name: replace(curve, targets=dict(curve.targets), seconds=list(curve.seconds))
            for name, curve in self._curves.items()
        }
        return {
            "curves": curves,
            "running": dict(self._running),
            "ended": dict(self._ended),
            "failed": dict(self._failed),
            "reports": self._reports,
            "best": self._best,
            "improved": self._improved,
            "news": self._news,
            "spent": self._spent,
            "theta": self._theta,
            "fitted": self._fitted,
            "to_the_end": self._to_the_end,
            "done": self._done,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned. It stays as it is: reports change a copy."""
        # An older raypipe did not keep `news`.
        state = {"news": state["reports"], **copy.deepcopy(state)}
        state.pop("begun", None)
        for name, value in state.items():
            setattr(self, f"_{name}", value)
        self._known = self._likeness = None
        self._prices = {}

    # The decision.

    def _next(self, ready: Container[str] | None = None) -> str | None:
        """The open trial that is most worth an epoch; None if none is.

        ready: of the open trials, those that it may be.
        """
        if self._to_the_end not in self._running:
            self._to_the_end = None
        open_ = self._open()
        self._done = not open_ and not self._running
        startable = [name for name in open_ if ready is None or name in ready]
        if not startable:
            return None
        if not any(curve.targets for curve in self._curves.values()):
            return startable[0]  # nothing is known yet
        model = self._model()
        if self._is_settled(open_):
            return self._last(open_, startable)
        if self._begins_another(model):
            new = [name for name in startable if not self._epoch(name)]
            startable = new or startable
        self._weigh(model, startable)
        return max(startable, key=model.worth.__getitem__)

    def _begins_another(self, model: _Model) -> bool:
        is_stuck = self._spent - self._improved >= STUCK * self._round()
        return is_stuck and model.draw.begins

    def _weigh(self, model: _Model, names: list[str]) -> None:
        """What an epoch of each trial is worth, into `model.worth`: the same until a report."""
        names = [name for name in names if name not in model.worth]
        if not names:
            return
        draw = model.draw
        epochs = [min(self._epoch(name) + draw.horizon, self.max_epochs) for name in names]
        mean_C, sd_C = self._predict(model, names, np.array(epochs))
        worth_C = log_ndtr((draw.threshold - mean_C) / np.hypot(sd_C, model.posterior.noise))
        # The last digits depend on who else is asked for, and after a restore those are others.
        worth_C = np.round(worth_C, 9)
        model.worth.update(zip(names, worth_C.tolist(), strict=True))

    def _open(self) -> list[str]:
        """Trials that may train an epoch now: those that wait, and the next ones to begin."""
        waiting = []
        new: list[str] = []
        closed = {*self._running, *self._ended, *self._failed}
        for name in self._x:
            if name in closed:
                continue
            if name in self._curves and self._curves[name].targets:
                waiting.append(name)
            elif len(new) < MOST_CANDIDATES // 2:
                new.append(name)
        if len(waiting) > MOST_CANDIDATES // 2:
            waiting.sort(key=lambda name: min(self._curves[name].targets.values()))
            # Targets may be of the loss, and the best by the metric is the winner so far.
            best = max(waiting, key=lambda name: self._curves[name].best)
            waiting = waiting[: MOST_CANDIDATES // 2]
            if best not in waiting:
                waiting[-1] = best
        return [*waiting, *new]

    def _epoch(self, name: str) -> int:
        curve = self._curves.get(name)
        return curve.epoch if curve else 0

    def _draw(self, y_N: Array) -> _Draw:
        draw = np.random.default_rng([self._seed, self._reports])
        horizon = int(draw.integers(1, self.max_epochs + 1))
        best = float(y_N.min())
        spread = max(float(np.median(y_N)) - best, 1e-3)
        threshold = best - 10 ** draw.uniform(-4, -1) * spread
        return _Draw(horizon, threshold, draw.random() < BEGIN)

    def _spend(self, trial: str, is_first_time: bool) -> None:
        """Count an epoch of the trial, at what its epochs usually cost.

        is_first_time: no seconds were known before, and each epoch counted as one.
        """
        price = float(np.exp(self._log_seconds([trial])[0]))
        if is_first_time:
            self._spent, self._improved = self._spent * price, self._improved * price
        self._spent += price

    def _note(self, score: float) -> None:
        """Remember when the best metric last improved."""
        least = -math.inf if self._best is None else self._best + IMPROVED * abs(self._best)
        if score > least:
            self._best = score
            self._improved, self._news = self._spent, self._reports

    def _is_settled(self, open_: list[str]) -> bool:
        """Have all trials begun, and has nothing improved for long?"""
        if not all(map(self._epoch, open_)):
            return False
        return self._reports - self._news >= max(WAIT * len(self._x), self.max_epochs)

    def _round(self) -> float:
        """What an epoch of each trial costs, as `_spent` counts."""
        return float(np.exp(self._log_seconds(list(self._x))).sum())

    def _last(self, open_: list[str], startable: list[str]) -> str | None:
        """The best trial, to be trained in full when nothing else is worth it.

        None if a trial was trained in full, or is just being. Without a curve to its end, whatever
        is predicted of ends is a guess; with one, the search may turn out not to be settled.
        """
        if self._has_whole() or self._to_the_end in self._running:
            self._done = not self._running
            return None
        begun = [name for name in (*open_, *self._running) if self._epoch(name)]
        best = max(begun, key=lambda name: self._curves[name].best)
        if best in self._running:
            self._to_the_end = best
            return None
        if best not in startable:
            return None  # Tune is still saving it
        self._to_the_end = best
        return best

    def _has_whole(self) -> bool:
        """Was a trial trained to its last epoch, or is the best one at the end of its own rule?

        One that diverged was not, however good it was before: it has no value at its end.
        """
        usable = [
            (curve.best, curve)
            for name, curve in self._curves.items()
            if curve.best > -math.inf and not curve.is_lost and name not in self._failed
        ]
        if any(curve.epoch >= self.max_epochs for _, curve in usable):
            return True
        _, best = max(usable, key=lambda one: one[0], default=(0.0, Curve()))
        return best.is_whole

    def _log_seconds(self, names: list[str]) -> Array:
        """Of an epoch of each trial: what was observed or is guessed, the same until a report."""
        if not self._prices:
            every = list(self._x)
            found = log_seconds(self._curves, self._x, every)
            self._prices = dict(zip(every, found.tolist(), strict=True))
        return np.array([self._prices[name] for name in names])

    # The surrogate.

    def _model(self) -> _Model:
        """The surrogate of what was observed so far, with hyperparameters fitted now and then."""
        if self._known is None or self._known[0] != self._reports:
            self._known = self._reports, self._new_model()
        return self._known[1]

    def _new_model(self) -> _Model:
        rows, trials, epochs, raw = observed(self._curves)
        y_N, mean, scale = surrogate.standardised(raw)
        x_MD = np.array([self._x[name] for name in rows])
        data = Data(x_MD, np.array(trials), np.log(epochs), y_N, self._group_D)
        reports = self._reports
        if reports >= max(FIRST_FIT, GROWTH * self._fitted):
            start = None if self._theta is None else np.array(self._theta)
            self._theta = surrogate.fit(data, start).tolist()
            self._fitted, self._likeness = reports, None
        theta_P = surrogate.prior(data.groups)[0] if self._theta is None else np.array(self._theta)
        self._likeness = self._likeness or Likeness(theta_P, self._group_D, self._x)
        posterior = Posterior(theta_P, data, self._likeness.between(rows, rows))
        rows_of = {name: row for row, name in enumerate(rows)}
        return _Model(posterior, rows_of, self._draw(y_N), mean, scale)

    def _predict(self, model: _Model, names: list[str], epochs_C: Array) -> tuple[Array, Array]:
        assert self._likeness is not None  # the model has one
        alike_MC = self._likeness.between(list(model.rows), names)
        trial_C = np.array([model.rows.get(name, -1) for name in names])
        return model.posterior.at(alike_MC, trial_C, np.log(epochs_C))


@dataclass(frozen=True)
class _Draw:
    """What is drawn for the decisions between two reports."""

    horizon: int  # epochs
    threshold: float
    begins: bool  # a trial, if the search is stuck


@dataclass(frozen=True)
class _Model:
    """The surrogate at one decision. Targets are standardised."""

    posterior: Posterior
    rows: dict[str, int]  # trial -> its row in the data
    draw: _Draw
    mean: float  # of the targets
    scale: float  # their standard deviation
    worth: dict[str, float] = field(default_factory=dict)  # of an epoch, of trials asked about
