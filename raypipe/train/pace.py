"""A training that must end by a clock: a learning rate that reaches zero when the time is over.

An ordinary schedule is a function of steps, so a host that slows down by half ends it late, or cuts
it before the rate has fallen. Here the schedule's progress is planned anew before each step:

    steps that still fit = time left / the seconds that steps took of late
    the next step moves the progress by (1 - progress) / steps that still fit

At a constant speed that is the ordinary schedule. When the host slows down, each step moves
further, so the rate falls to zero in fewer steps and in the same time. `train.epochs` stays the
most: a fast host ends there, before its time.

One evaluation, at the end, is part of the time. The time is that of the loop (`LoopState.seconds`),
so a training that was killed goes on with the time that it has left.

The numbers of a clock differ from run to run, so two such trainings differ. Trainings without
`train.anneal_s` know nothing of this file.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import fmean

# Steps whose mean says how long a step takes. Fewer follow a wait for data, more are late to see
# that a host has slowed down.
RECENT = 12
# So many steps after an evaluation say whether the host slowed down in it. The fastest of them
# counts: one or two may wait for data.
AFTER = 3
# The part of the time that is kept free: the host may slow down in the very last evaluation.
SLACK = 0.015
# What an evaluation is expected to take of an epoch's steps, before one was measured: it has no
# backward pass, and validation is smaller than training.
EVALUATION = 0.1
# From here on a training counts as annealed: a cosine has 0.6 % of the peak rate left.
ANNEALED = 0.95


class Pace:
    """How far the schedule of a training with a limit of time is, and whether a step still fits.

    Call `next` before each step, `stepped` after it, `evaluated` after each evaluation, and then
    `is_over`. The time from one call to the next is what it took. All ranks call them alike.
    """

    def __init__(
        self,
        limit_s: float,
        epoch_steps: int,
        progress: float = 0.0,
        in_epoch: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        agreed: Callable[[list[float]], list[float]] = lambda own: own,
    ) -> None:
        """limit_s: seconds from now on, with the last evaluation. epoch_steps: of an epoch.

        progress, in_epoch: of the training before it was interrupted; steps of its last
        epoch. agreed: the numbers of the first rank,
        on every rank. Clocks of ranks differ, and one that stopped alone would leave the others
        waiting.
        """
        self.progress = progress
        self._clock = clock
        self._last = clock()
        self._ends = self._last + limit_s * (1 - SLACK)
        self._epoch_steps = max(1, epoch_steps)
        self._in_epoch = in_epoch
        self._agreed = agreed
        self._steps_s: deque[float] = deque(maxlen=RECENT)
        # The first AFTER steps since the newest evaluation.
        self._after_s: list[float] = []
        self._has_stepped = False
        # The longest evaluation but the newest, in steps: a host slows down for both. Of the
        # newest: its seconds, and those of a step before it.
        self._longest = 0.0
        self._newest: tuple[float, float] | None = None

    def next(self, most: int) -> float | None:
        """The schedule's progress in the middle of the next step; None: no step fits any more.

        most: steps that are left by train.epochs. The first step of an epoch always fits: it had
        time when it began (`is_over`), and saving may have taken that. An epoch without a step
        would have no training loss.
        """
        fitting = self._fitting()
        if fitting is None:
            fitting = most
        steps = max(1, min(most, fitting))
        moved = (1 - self.progress) / steps
        own = [self.progress + moved / 2, self.progress + moved, float(fitting < 1)]
        middle, after, is_over = self._agreed(own)
        if is_over and self._in_epoch:
            return None
        self.progress = after
        return middle

    def stepped(self) -> None:
        """A step has ended; its wait for data belongs to it."""
        seconds = self._lap()
        self._in_epoch += 1
        # The first one allocates, compiles and waits for the first images: it says nothing.
        if self._has_stepped:
            self._steps_s.append(seconds)
            self._after_s = [*self._after_s, seconds][:AFTER]
        self._has_stepped = True

    def evaluated(self) -> None:
        """An evaluation has ended."""
        self._in_epoch = 0
        took_s = self._lap()
        if self._steps_s:
            self._longest = self._evaluation_steps()
            self._newest = took_s, self._step_s()
        self._after_s = []

    def is_over(self) -> bool:
        """Does no further epoch begin? It would need a step and an evaluation."""
        fitting = self._fitting()
        own = [float(fitting is not None and fitting < 1)]
        return self._agreed(own)[0] > 0

    @property
    def is_annealed(self) -> bool:
        """Has the rate as good as reached the schedule's end?"""
        return self.progress >= ANNEALED

    def _lap(self) -> float:
        now = self._clock()
        took_s = now - self._last
        self._last = now
        return took_s

    def _step_s(self) -> float:
        """What a step takes now: the mean of the recent ones, or more if the last two took more."""
        recent = self._steps_s
        newest = min(list(recent)[-2:]) if len(recent) > 1 else 0.0
        return max(fmean(recent), newest, 1e-9)

    def _evaluation_steps(self) -> float:
        """How many steps an evaluation takes: the longest so far, as the last one has to fit."""
        if self._newest is None:
            return self._longest
        seconds, step_s = self._newest
        # Where the host slowed down in it, the steps right after it say so: it would count as twice
        # as long. A host that slows down later makes the next evaluation longer, too.
        after_s = min(self._step_s(), *self._after_s) if self._after_s else 0.0
        return max(self._longest, seconds / max(step_s, after_s))

    def _fitting(self) -> int | None:
        """How many steps fit into the time that is left; None: no step was measured yet."""
        left_s = self._ends - self._clock()
        if not self._steps_s:
            return 0 if self._has_stepped and left_s <= 0 else None
        step_s = self._step_s()
        evaluation_steps = self._evaluation_steps()
        if self._newest is None:
            evaluation_steps = EVALUATION * self._epoch_steps
        evaluation_s = evaluation_steps * step_s
        # Whole epochs, the first one from where it is; each ends with an evaluation.
        steps = 0
        epoch = self._epoch_steps - self._in_epoch
        if left_s >= epoch * step_s + evaluation_s:
            left_s -= epoch * step_s + evaluation_s
            epoch_s = self._epoch_steps * step_s + evaluation_s
            whole = int(left_s / epoch_s)
            left_s -= whole * epoch_s
            steps = epoch + whole * self._epoch_steps
        # And a part of one, which needs its evaluation as well.
        return steps + int(max(0.0, left_s - evaluation_s) / step_s)
