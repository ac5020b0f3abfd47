"""Ctrl-C, SIGTERM and SIGUSR1 while trials run end the search with an error."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune import tune as tune_loop
from ray.tune.execution.tune_controller import TuneController

from raypipe.errors import RaypipeError
from raypipe.search.trials import interrupts


@pytest.fixture(autouse=True)
def before() -> Iterator[dict[int, Any]]:
    """Handlers, which each test must leave as they were."""
    # A shell starts what it puts into the background with Ctrl-C ignored.
    shells = signal.signal(signal.SIGINT, signal.default_int_handler)
    handlers = {number: signal.getsignal(number) for number in interrupts.SIGNALS}
    plain = tune_loop._setup_signal_catching, TuneController.cleanup, TuneController.step
    yield handlers
    after = {number: signal.getsignal(number) for number in interrupts.SIGNALS}
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.signal(signal.SIGINT, shells)
    assert after == handlers
    patched = tune_loop._setup_signal_catching, TuneController.cleanup, TuneController.step
    assert plain == patched


class Trials:
    """What Tune's `cleanup` is called on; says what was done to the trials' processes."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self._actor_manager = SimpleNamespace(cleanup=lambda: self.done.append("killed"))

    def _cleanup_trials(self) -> None:
        self.done.append("waited for")

    def end_experiment_callbacks(self) -> None:
        self.done.append("told")


@pytest.mark.parametrize(
    ("number", "error", "says"),
    [
        (signal.SIGINT, KeyboardInterrupt, "^$"),
        (signal.SIGTERM, RaypipeError, r"Stopped on request \(got 'SIGTERM'\).*Run it again"),
        (signal.SIGUSR1, RaypipeError, r"Stopped on request \(got 'SIGUSR1'\)"),
    ],
)
def test_a_signal_ends_the_search_with_an_error(
    number: int, error: type[BaseException], says: str, before: dict[int, Any]
) -> None:
    trials = Trials()
    with pytest.raises(error, match=says), interrupts.heeded():
        event = tune_loop._setup_signal_catching()
        assert signal.getsignal(number) != before[number]
        signal.raise_signal(number)
        assert event.is_set(), "Tune's loop ends, and saves its state"
        # The next one does what it did before the search: nothing is swallowed.
        assert signal.getsignal(number) == before[number]
        TuneController.cleanup(trials)
    assert trials.done == ["killed", "told"], "nobody waits for the ends of their epochs"


def test_a_signal_while_the_last_trials_are_waited_for_is_not_swallowed() -> None:
    class Late(Trials):
        def _cleanup_trials(self) -> None:
            signal.raise_signal(signal.SIGTERM)
            super()._cleanup_trials()

    trials = Late()
    with pytest.raises(RaypipeError, match="Stopped on request"), interrupts.heeded():
        tune_loop._setup_signal_catching()
        TuneController.cleanup(trials)
    assert trials.done == ["waited for", "told"]


def test_a_second_interrupt_ends_it_at_once_and_leaves_no_trial() -> None:
    """In a notebook the next search waited for the CPUs of the trials that went on."""
    trials = Trials()
    with (
        pytest.MonkeyPatch.context() as patched,
        pytest.raises(KeyboardInterrupt),
    ):
        patched.setattr(TuneController, "step", lambda self: None)
        with interrupts.heeded():
            event = tune_loop._setup_signal_catching()
            signal.raise_signal(signal.SIGINT)
            assert event.is_set()
            TuneController.step(trials)
            signal.raise_signal(signal.SIGINT)
            pytest.fail("it was swallowed")
    assert trials.done == ["killed"]


def test_without_a_signal_tune_ends_as_ever(before: dict[int, Any]) -> None:
    trials = Trials()
    with interrupts.heeded() as asked:
        assert tune_loop._setup_signal_catching() is asked
        TuneController.cleanup(trials)
    assert trials.done == ["waited for", "told"] and not asked.is_set()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_signal_that_the_process_ignores_stays_ignored() -> None:
    """As of a command behind nohup."""
    plain = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts.heeded():
            event = tune_loop._setup_signal_catching()
            signal.raise_signal(signal.SIGINT)
            assert not event.is_set()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, plain)


def test_elsewhere_than_in_the_main_thread_there_are_no_signals(before: dict[int, Any]) -> None:
    found = []

    def work() -> None:
        with interrupts.heeded():
            tune_loop._setup_signal_catching()
            found.append({number: signal.getsignal(number) for number in interrupts.SIGNALS})

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before]
