"""Ctrl-C, SIGTERM and SIGUSR1 while trials run: the search saves its state, and ends with an error.

Tune (2.60) has its own handlers for Ctrl-C and SIGUSR1, which SLURM sends before it preempts. Its
loop ends, and `fit` returns as if all trials had ended: a search of sixteen trials was finished for
good with the five that had begun. Nor are its handlers taken back: the next Ctrl-C was swallowed as
well, in a refit or in the next cell of a notebook. So ours take their place:

1. The first signal is noted. Tune's loop ends after its step (0.1 s), and its state is saved.
2. The trials' processes are killed, because Tune would wait for the ends of their epochs, up to ten
   minutes. As after any kill, a trial goes on after its last epoch.
3. `fit` raises KeyboardInterrupt after Ctrl-C, else RaypipeError.
4. The handlers from before are back: after the first signal already, so that a second one ends the
   process at once. Whatever is written meanwhile is written by an atomic rename.
5. In a notebook the process goes on after a second Ctrl-C, and Tune would leave its trials running:
   the next search would wait for their CPUs without an end. They are killed.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from ray.tune import tune as tune_loop
from ray.tune.execution import tune_controller

from raypipe.errors import RaypipeError
from raypipe.train.trainer import STOPPED

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Asked:
    """Whether a signal asked the search to end; in the place of Tune's event.

    Not a threading.Event: serve/signals.py says why.
    """

    def __init__(self) -> None:
        self._by: int | None = None
        self._before: dict[int, Any] = {}
        self.running: Any = None
        """Tune's controller, from its first step until its trials have ended."""

    def is_set(self) -> bool:
        """What Tune's loop asks before each step."""
        return self._by is not None

    def error(self) -> BaseException:
        """How the search ends."""
        if self._by == signal.SIGINT:
            return KeyboardInterrupt()
        return RaypipeError(
            STOPPED,
            got=signal.Signals(self._by or signal.SIGTERM).name,
            rule="What the trials have reported is saved",
            fix="Run it again",
        )

    def listen(self) -> Asked:
        """Note the signals from now on; only a main thread can."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                before = signal.getsignal(number)
                # Whoever started this process may have it ignore Ctrl-C (nohup). None: a handler
                # that is not Python's could not be set again.
                if before not in (signal.SIG_IGN, None):
                    self._before[number] = before
                    signal.signal(number, self._note)
        return self

    def forget(self) -> None:
        """The handlers from before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._by = number
        self.forget()


@contextmanager
def heeded() -> Iterator[Asked]:
    """Within this context `fit` ends as above when a signal comes."""
    asked = Asked()
    controller = tune_controller.TuneController
    plain_setup, plain_cleanup = tune_loop._setup_signal_catching, controller.cleanup
    plain_step = controller.step

    def step(self: Any) -> None:
        asked.running = self
        plain_step(self)

    def cleanup(self: Any) -> None:
        # Tune calls it when its loop has ended and the state is saved.
        if not asked.is_set():
            plain_cleanup(self)
            asked.running = None
            return
        self._actor_manager.cleanup()
        asked.running = None
        self.end_experiment_callbacks()
        raise asked.error()

    tune_loop._setup_signal_catching, controller.cleanup = asked.listen, cleanup
    controller.step = step
    try:
        yield asked
        # It came while Tune waited for the last trials: `fit` has returned as if nothing was.
        if asked.is_set():
            raise asked.error()
    except BaseException:
        if asked.running is not None:
            with suppress(Exception):  # Ray may be gone
                asked.running._actor_manager.cleanup()
        raise
    finally:
        asked.forget()
        controller.step = plain_step
        tune_loop._setup_signal_catching, controller.cleanup = plain_setup, plain_cleanup
