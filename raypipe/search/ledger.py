"""The clock of a search with a budget: what each phase was to take and took, and when it is over.

One `Ledger` goes with a verb from its first line to its last. forecast.py says what the end will
take, and budget.py decides from these numbers.
A search without `search.budget_s` has a ledger too, which only counts.

A phase that cannot look at a clock (a read, a decode, the cluster's start) is interrupted by a
timer, as Ctrl-C would: then there is one message within the budget. Only the main thread of a
process can be interrupted so; elsewhere such a phase ends when it ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from raypipe.errors import RaypipeError
from raypipe.files import is_owned, owned
from raypipe.search import budget
from raypipe.search.budget import Ending, Speed
from raypipe.search.forecast import Forecast
from raypipe.timer import Alarm, interrupted
from raypipe.train.stopping import OF_BUDGET

WAITED_S = 0.5  # less is no waiting
# What is asked for where not even the start was over. 900 small pictures on a busy host of two
# cores had an answer within 45 s, and 2,624 solar cells on a quiet one within 60 s.
UNKNOWN_S = 60.0


class IsLate(Protocol):
    """Would what takes so many seconds end after its time?"""

    def __call__(self, needs_s: float = 0.0) -> bool: ...


class TooShort(RaypipeError):
    """The budget is over before there is what was wanted of it."""


@dataclass
class Phase:
    """Seconds of one phase; planned is None where nothing was planned."""

    spent_s: float = 0.0
    planned_s: float | None = None
    evidence: str = ""


class Ledger:
    """What a verb has spent of its budget.

    began: `clock()` when the process or the call began; None: now.
    """

    def __init__(
        self,
        budget_s: float | None = None,
        began: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget_s = budget_s
        self.phases: dict[str, Phase] = {}
        self.refit_share = 0.0
        self.refits = False
        self.fits_heads_again = False
        self.forecast = Forecast()
        self.start_s = 0.0
        self.notes: list[str] = []
        self.waits_for: Path | None = None
        """A folder that another process works in."""
        self.goes_on: bool | None = None
        """Did an earlier run leave trials of this search, which have not gone on yet? None: the
        search is not known yet."""
        self.on_over: Callable[[], None] = lambda: None
        """Called when trials have to end."""
        self._clock = clock
        self._began = clock() if began is None else began
        self._lap = self._began
        self._trials_began: float | None = None
        self._known: tuple[int, Speed | None] = (1, None)  # trials, and the leading one's speed
        self._waited: set[Path] = set()  # for folders of other processes, which was said
        self._alarms: list[Alarm] = []  # those of `reading`, the outer one first

    @property
    def spent_s(self) -> float:
        return self._clock() - self._began

    def lap(self, name: str) -> float:
        """The time since the last lap was that of phase `name`. Returns its seconds."""
        now = self._clock()
        took_s, self._lap = now - self._lap, now
        self.phase(name).spent_s += took_s
        return took_s

    def phase(self, name: str) -> Phase:
        return self.phases.setdefault(name, Phase())

    def plan(self, name: str, seconds: float, evidence: str = "") -> None:
        """What a phase is expected to take, and why."""
        phase = self.phase(name)
        phase.planned_s, phase.evidence = max(0.0, seconds), evidence

    def plan_ending(self, ending: Ending) -> None:
        """The cluster's end comes after what the phase counts, so it is no part of its plan."""
        seconds = ending.seconds - budget.closing_s(ending.start_s)
        self.plan("ending", seconds, str(ending))

    def started(self) -> None:
        """The cluster runs: what this took tells how fast the host is."""
        self.start_s = self.lap("start")

    def ending(
        self, trials: int, speed: Speed | None, refit: bool = False, fewest: bool = False
    ) -> Ending:
        """What the end is expected to take (forecast.py); without a budget nothing is expected."""
        if self.budget_s is None:
            return Ending(0, self.start_s, trials)
        return self.forecast.ending(self.budget_s, self.start_s, trials, speed, refit, fewest)

    def trials_begin(self, embedded: int = 0) -> None:
        """All images are read: from now on trials look at the clock, and no alarm interrupts them.

        embedded: how many images passed through a frozen backbone. Raises RaypipeError if no time
        is left for a trial.
        """
        self._end_alarms()
        took_s = self.lap("reading")
        if embedded:
            self.forecast.embedded_per_s = embedded / max(took_s, 1e-3)
        self._trials_began = self.spent_s
        if self.is_over(1, None):
            # To start trials and to stop them again would take seconds that are not there.
            raise self.too_short()
        # If there is still no epoch when they end, the budget is too short, and a rerun no help.
        self.goes_on = False

    def is_over(self, trials: int, speed: Speed | None) -> str | None:
        """Why trials have to end now; None: they may go on.

        trials: that began. speed: of the leading one; None: no trial has reported yet.
        """
        if self.budget_s is None or self._trials_began is None:
            return None
        self._known = trials, speed
        ending = self.ending(trials, speed)
        # A first answer is worth more than the seconds of a refit.
        refits = self.refits and speed is not None
        end_s = budget.trials_end(
            self.budget_s, self._trials_began, ending, self.refit_share, refits
        )
        self.plan("trials", end_s - self._trials_began, str(speed or "no trial has reported"))
        self.plan_ending(ending)
        if self.spent_s < end_s:
            return None
        self.on_over()
        return f"{OF_BUDGET}{self.budget_s:g} s leaves no more time for trials"

    def left_s(self, trials: int, speed: Speed | None) -> float | None:
        """Seconds before the ending has to begin; None: there is no budget."""
        return self.left_before_s(self.ending(trials, speed).seconds)

    def left_before_s(self, ending_s: float) -> float | None:
        """Seconds before an ending that takes so long has to begin; None: there is no budget."""
        if self.budget_s is None:
            return None
        return budget.usable(self.budget_s) - self.spent_s - ending_s

    def left_for_heads_s(self, images_per_s: float) -> float | None:
        """`left_s` where the model will be heads on one frozen backbone: without shifted copies.

        images_per_s: that pass through this backbone.
        """
        if self.budget_s is None:
            return None
        guessed = self.ending(1, None)
        # A view of an image is a prediction, and the image is read once.
        views = self.forecast.views
        judged, reading_s = guessed.judged // views, guessed.reading_s * views
        ending = replace(
            guessed,
            images_per_s=images_per_s,
            judged=judged,
            reading_s=reading_s,
            heads_alone=True,
        )
        return budget.usable(self.budget_s) - self.spent_s - ending.least_s

    def left_now_s(self) -> float | None:
        """`left_s` by what the trials have said so far."""
        return self.left_s(*self._known)

    def choosing(self) -> IsLate:
        """Has this part of choosing an ensemble, from now on, taken its time? Candidates are asked,
        and one is chosen. The half that each leaves is for what follows: the chosen one predicts
        validation, too, and is written."""
        left_s = self.left_now_s()
        if left_s is None or self.budget_s is None:
            return lambda needs_s=0.0: False
        ends_s = self.spent_s + min(budget.CHOOSING * self.budget_s, left_s) / 2
        return lambda needs_s=0.0: self.spent_s + needs_s > ends_s

    @contextmanager
    def owned(self, folder: Path) -> Iterator[None]:
        """`files.owned`; the time until another process is done with it is a phase of its own.

        Raises TooShort if the budget is over before.
        """
        self.waits_for, began = folder, self._clock()
        with ExitStack() as held:
            with self.reading() if is_owned(folder) else nullcontext():
                # A search is waited for, and then its refit.
                held.enter_context(owned(folder, says=folder not in self._waited))
            self.waits_for = None
            waited_s = self._clock() - began
            if waited_s > WAITED_S:
                self._waited.add(folder)
                self.phase("waiting for another process").spent_s += waited_s
                # What came before belongs to the phase that the next lap names.
                self._lap += waited_s
            yield

    def too_short(self) -> TooShort:
        """The budget is over, and there is no answer."""
        if self.waits_for is not None:
            return TooShort(
                "Another process works on the same search, and the budget was over before it ended",
                got=f"search.budget_s={self.budget_s:g}",
                rule=f"It works in {self.waits_for}",
                fix="Run the same command again when it has ended: what it finished is kept",
            )
        spent = {name: one.spent_s for name, one in self.phases.items() if one.spent_s >= 0.5}
        took = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in spent.items())
        took = took or "the start took all of it"
        if self.goes_on:
            # A longer budget would be another search, which begins with nothing.
            return TooShort(
                "This search was begun before, and there was no time left to go on with it",
                got=f"search.budget_s={self.budget_s:g}",
                rule=f"{took}; another search.budget_s is another search",
                fix="Run the same command again: what its trials finished is kept",
            )
        ending = self.ending(1, None)
        least = 1.5 * self.spent_s + 1.25 * ending.seconds
        if not self.start_s:
            # Nothing is known of this machine or of the table before the cluster runs.
            least = max(least, UNKNOWN_S)
        fix = f"Set search.budget_s={_round_up(least)} or more"
        if self.goes_on is None:
            fix += ". Only if this search was interrupted before, run the same command again"
        sent = ""
        if ending.upload_s >= 0.5:
            sent = f", {ending.upload_s:.0f} s of them to upload the package"
        if sent and any(self.forecast.uploads):
            # What never uploads measures no other rate.
            sent += " as fast as the last one went"
            fix += (
                ". If that one was slow by chance, delete mlflow/uploads.json in the run's folder"
            )
        return TooShort(
            "The budget was over before a trial had finished an epoch",
            got=f"search.budget_s={self.budget_s:g}",
            rule=f"{took}; test and registration need about {ending.seconds:.0f} s{sent}",
            fix=fix,
        )

    def reading(
        self, is_answered: bool = False, phase: str = "reading", least_s: float | None = None
    ) -> AbstractContextManager[None]:
        """Raise TooShort in what is within, when there is no more time for it.

        is_answered: there is a model already, and what remains to be done is to register it; else a
        message. Such a reading ends the ones around it: they would raise though there is a model.
        least_s: seconds that it has in any case, however long the end may take.
        """
        if self.budget_s is None:
            return nullcontext()

        def error() -> RaypipeError:
            self.lap(phase)
            return self.too_short()

        left_s = None
        if is_answered:
            self._end_alarms()
            left_s = self.left_now_s()
        if left_s is None:
            # Without an answer there is nothing to predict or to register.
            left_s = budget.usable(self.budget_s) - self.spent_s
            left_s -= budget.closing_s(self.start_s)
        left_s = max(left_s, least_s or 0.0)
        return self._alarmed(left_s, error)

    @contextmanager
    def _alarmed(self, left_s: float, error: Callable[[], RaypipeError]) -> Iterator[None]:
        with interrupted(left_s, error) as alarm:
            self._alarms.append(alarm)
            yield

    def _end_alarms(self) -> None:
        while self._alarms:
            self._alarms.pop().end()

    def summary(self) -> dict[str, Any] | None:
        """For --json; None without a budget. Closing the cluster comes after it."""
        if self.budget_s is None:
            return None
        phases = {}
        for name, phase in self.phases.items():
            phases[name] = {
                "planned_s": None if phase.planned_s is None else round(phase.planned_s, 1),
                "spent_s": round(phase.spent_s, 1),
                **({"evidence": phase.evidence} if phase.evidence else {}),
            }
        return {
            "budget_s": self.budget_s,
            "spent_s": round(self.spent_s, 1),
            "phases": phases,
            "notes": self.notes,
        }

    def facts(self) -> dict[str, str]:
        """For people; without a budget the notes alone."""
        if self.budget_s is None:
            return {"notes": ". ".join(self.notes)} if self.notes else {}
        parts = []
        for name, phase in self.phases.items():
            text = f"{name} {phase.spent_s:.0f} s"
            if phase.planned_s is not None:
                text += f" (planned {phase.planned_s:.0f})"
            parts.append(text)
        said = f"{self.spent_s:.0f} of {self.budget_s:g} s: {', '.join(parts)}"
        return {"budget": ". ".join([said, *self.notes])}


def _round_up(seconds: float) -> int:
    """To tens: a number that a user types."""
    return int(-(-seconds // 10) * 10)
