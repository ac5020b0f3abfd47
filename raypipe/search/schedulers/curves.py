"""What a freeze-thaw search was told: targets of each trial after its epochs, and their seconds.

Pure. What is handed on to the surrogate is bounded, and so is the cost of a decision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from raypipe.search.schedulers.surrogate import Array
from raypipe.train.stopping import Mode

MOST_OBSERVED = 300
LANDMARKS = (1, 3, 8, 24)  # epochs of each trial that are observed, beside its last one
_TINY = 1e-12  # logarithms of losses end here
_SHARES = (1e-3, 1 - 1e-4)  # logits of shares end here
_DEAREST = 30  # times the usual seconds of an epoch; more is a clock's fault, until a third one
_PENALTY = 1.0  # ridge of the seconds an epoch; coordinates are within [0, 1]


def target(metrics: Mapping[str, float], metric: str, mode: Mode) -> float:
    """What the surrogate models, lower is better; NaN if there is no number.

    The logarithm of the validation loss, for it is finer than an accuracy. Without one, the metric:
    its logit where it is a share, its logarithm where lower is better. Both are linear outside of
    their range, so a better number is always a better target.
    """
    loss = metrics.get("val_loss", math.nan)
    if math.isfinite(loss):
        return _logarithm(loss)
    value = metrics.get(metric, math.nan)
    if mode == "min":
        return _logarithm(value)
    inside = min(max(value, _SHARES[0]), _SHARES[1])
    outside = max(0.0, value - 1) + min(0.0, value)  # NaN stays NaN
    return math.log((1 - inside) / inside) - outside


def _logarithm(loss: float) -> float:
    """Of a loss; of one that is not positive, as of a likelihood, what goes on below."""
    return math.log(max(loss, _TINY)) + min(0.0, loss)


@dataclass
class Curve:
    """What is known of one trial."""

    targets: dict[int, float] = field(default_factory=dict)  # epoch -> target
    best: float = -math.inf  # the metric; more is better
    seconds: list[float] = field(default_factory=list)  # of the epochs whose time is known
    is_whole: bool = False  # the trial's own rule ended it: there is no more of it
    # Both are asked for in each decision.
    epoch: int = field(init=False)  # the last one; 0 before the first
    usual: float = field(init=False)  # the median of its seconds; 0 if none is known

    def __post_init__(self) -> None:
        self.epoch = max(self.targets, default=0)
        self.usual = median(self.seconds) if self.seconds else 0.0

    @property
    def is_lost(self) -> bool:
        """Had its last epoch no number? Then it is known as infinitely bad."""
        return self.targets.get(self.epoch) == math.inf

    def add(self, epoch: int, target: float, score: float, seconds: float | None) -> None:
        """score: the metric, more is better. seconds: of this epoch, if known.

        A clock that was set back makes them negative. They are left out then.
        """
        self.targets[epoch] = target
        self.epoch = max(self.epoch, epoch)
        self.best = max(self.best, score)
        if seconds is not None and 0 < seconds < math.inf:
            self.seconds.append(seconds)
            self.usual = median(self.seconds)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also of a search that an older raypipe began: that kept the sum and the number."""
        self.__dict__.update(state)
        timed = self.__dict__.pop("timed", None)
        if timed is not None:
            self.seconds = [state["seconds"] / timed] * timed if timed else []
        self.__post_init__()


def observed(
    curves: Mapping[str, Curve],
) -> tuple[list[str], list[int], list[int], list[float]]:
    """(trials, row of each observation's trial, epochs, targets): MOST_OBSERVED at most.

    Of each trial the last epoch and LANDMARKS; of many trials the best, and some others.
    """
    begun = [name for name, curve in curves.items() if curve.targets]
    if len(begun) > MOST_OBSERVED // 2:
        # The best ones, and others spread over the rest.
        begun.sort(key=lambda name: min(curves[name].targets.values()))
        best, rest = begun[: MOST_OBSERVED // 4], begun[MOST_OBSERVED // 4 :]
        step = math.ceil(len(rest) / (MOST_OBSERVED // 4))
        begun = [*best, *rest[::step]]
    lasts: list[tuple[int, int, float]] = []
    landmarks: list[tuple[int, int, float]] = []
    for row, name in enumerate(begun):
        targets = curves[name].targets
        last = curves[name].epoch
        lasts.append((row, last, targets[last]))
        landmarks.extend((row, e, targets[e]) for e in LANDMARKS if e < last and e in targets)
    seen = [*lasts, *landmarks][:MOST_OBSERVED]
    trials, epochs, raw = zip(*seen, strict=True)
    return begun, list(trials), list(epochs), list(raw)


def log_seconds(curves: Mapping[str, Curve], x: Mapping[str, Array], names: Sequence[str]) -> Array:
    """Logarithms of the trials' seconds an epoch, observed or predicted; 0 if none is known.

    Of a trial's epochs the median: a laptop that slept makes one of them take hours. A trial with
    one or two epochs counts _DEAREST times the median of all trials at most. x: coordinates of all
    trials.
    """
    known = {name: curve.usual for name, curve in curves.items() if curve.seconds}
    if not known:
        return np.zeros(len(names))
    most = _DEAREST * median(known.values()) if len(known) > 2 else math.inf
    for name, seconds in known.items():
        if seconds > most and len(curves[name].seconds) < 3:
            known[name] = most
    if all(name in known for name in names):
        return np.array([math.log(known[name]) for name in names])
    latest = list(known)[-MOST_OBSERVED:]
    y_M = np.log([known[name] for name in latest])
    x_MD = np.array([x[name] for name in latest])
    x_CD = np.array([x[name] for name in names])
    # Ridge regression by its dual: there may be more coordinates than trials.
    center_D = x_MD.mean(0)
    gram_MM = (x_MD - center_D) @ (x_MD - center_D).T + _PENALTY * np.eye(len(x_MD))
    dual_M = np.linalg.solve(gram_MM, y_M - y_M.mean())
    predicted_C = y_M.mean() + (x_CD - center_D) @ (x_MD - center_D).T @ dual_M
    return np.array(
        [
            math.log(known[name]) if name in known else predicted
            for name, predicted in zip(names, predicted_C, strict=True)
        ]
    )
