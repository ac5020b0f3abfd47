"""A training that must end by a clock: in time and annealed, however the host slows down."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.train import checkpoint
from raypipe.train.loop import LoopState
from raypipe.train.pace import ANNEALED, Pace
from raypipe.train.schedule import factor, factor_at
from raypipe.train.stopping import IN_TIME
from raypipe.train.worker import train_rank

from .test_loop import Recorder, job, pixels


@dataclass
class Host:
    """Trains against a clock of its own: a step takes `step_s` times the host's slowness then."""

    step_s: float = 1.0
    evaluation_s: float = 2.0
    slow_from_s: float = float("inf")
    slowness: float = 1.0
    now: float = 0.0
    progress: list[float] = field(default_factory=list)
    evaluations: list[tuple[float, float]] = field(default_factory=list)  # when: from, to

    def spend(self, seconds: float) -> None:
        self.now += seconds * (self.slowness if self.now >= self.slow_from_s else 1.0)

    def train(self, limit_s: float, epoch_steps: int = 10, epochs: int = 10_000) -> Pace:
        pace = Pace(limit_s, epoch_steps, clock=lambda: self.now)
        left = epochs * epoch_steps
        while left:
            for _ in range(epoch_steps):
                middle = pace.next(left)
                if middle is None:
                    break
                self.progress.append(middle)
                self.spend(self.step_s)
                pace.stepped()
                left -= 1
            began = self.now
            self.spend(self.evaluation_s)
            self.evaluations.append((began, self.now))
            pace.evaluated()
            if pace.is_over():
                break
        return pace


@settings(max_examples=300, deadline=None)
@given(
    limit_s=st.floats(100, 2000),
    slow_from=st.floats(0, 1),
    slowness=st.floats(0.5, 2.0),
    epoch_steps=st.integers(2, 200),
    evaluation_s=st.floats(0.1, 8),
)
def test_it_ends_in_time_and_annealed_when_the_host_slows_down_by_half(
    limit_s: float, slow_from: float, slowness: float, epoch_steps: int, evaluation_s: float
) -> None:
    host = Host(1.0, evaluation_s, slow_from * limit_s, slowness)
    pace = host.train(limit_s, epoch_steps)
    # A step is a second. It ends late by a part of an evaluation where the host slows down when no
    # time is left for a slow evaluation and the steps that show it; in the first evaluation, of
    # which no clock tells whether that was at its beginning; and where the first one is the last.
    first_began, first_ended = host.evaluations[0]
    is_late = host.slow_from_s + evaluation_s + slowness * (evaluation_s + 3) > limit_s
    is_hidden = first_began < host.slow_from_s <= first_ended or len(host.evaluations) == 1
    longer_s = max(0.0, evaluation_s * (slowness - 1))
    assert host.now <= limit_s + (longer_s + 2 if is_late or is_hidden else 1)
    assert host.now >= 0.8 * limit_s - 2 * evaluation_s * slowness, "and the time is used"
    steps = len(host.progress)
    ordinary = factor("cosine", steps - 1, steps)
    # An evaluation that takes much of the time, and in which the host slows down, can end the
    # training early. The worst of 30,000 hostile draws was .16 of the peak rate above the ordinary.
    is_short = evaluation_s <= 0.02 * limit_s
    assert factor_at("cosine", host.progress[-1]) < ordinary + (0.02 if is_short else 0.25)
    assert pace.progress >= (0.9 if is_short else 0.65)
    assert all(a <= b for a, b in zip(host.progress, host.progress[1:], strict=False))


def test_an_evaluation_in_which_the_host_slows_down_is_no_longer_one() -> None:
    """It counted as twice as long for all that followed, so the training ended early, at a quarter
    of the peak rate.
    """
    host = Host(1.0, 7.799, slow_from_s=54.9, slowness=1.947)
    host.train(limit_s=100, epoch_steps=5)
    assert factor_at("cosine", host.progress[-1]) < 0.2


@pytest.mark.parametrize("slow_from_s", [58.5, 60, 75])
def test_a_host_that_slows_down_after_the_only_evaluation_ends_in_time(slow_from_s: float) -> None:
    """The slower the later steps were, the fewer of them the evaluation seemed to take: it had as
    many seconds as before, and the training ended at 106 s.
    """
    host = Host(1.0, 8.0, slow_from_s=slow_from_s, slowness=2)
    pace = host.train(limit_s=100, epoch_steps=50)
    assert host.evaluations[0] == (50, 58) and len(host.evaluations) == 2
    assert 90 <= host.now <= 101 and pace.is_annealed


def test_two_steps_that_wait_for_data_make_no_evaluation_shorter() -> None:
    """Readers start anew with each epoch: its first steps say little of the evaluation before."""
    now = [0.0]

    def spend(seconds: float) -> None:
        now[0] += seconds

    pace = Pace(100, 40, clock=lambda: now[0])
    for _ in range(40):
        assert pace.next(80) is not None
        spend(1)
        pace.stepped()
    spend(8)
    pace.evaluated()
    waits_s = [4.0, 4.0]
    while pace.next(80) is not None:
        spend(waits_s.pop() if waits_s else 1)
        pace.stepped()
    assert now[0] + 8 <= 100


def test_at_a_constant_speed_it_is_the_ordinary_schedule() -> None:
    host = Host(1.0, 2.0)
    host.train(limit_s=1000, epoch_steps=20)
    steps = len(host.progress)
    assert steps == pytest.approx(0.985 * 1000 / 1.1, abs=15)
    # It guesses at its first two steps only.
    ordinary = [(done + 0.5) / steps for done in range(steps)]
    assert host.progress == pytest.approx(ordinary, abs=2 / steps)


def test_a_host_that_is_fast_enough_ends_with_its_epochs() -> None:
    host = Host(0.01, 0.01)
    host.train(limit_s=1000, epoch_steps=10, epochs=3)
    assert host.progress == pytest.approx([(i + 0.5) / 30 for i in range(30)])


def test_a_step_longer_than_the_time_is_the_only_one() -> None:
    host = Host(step_s=50.0)
    pace = host.train(limit_s=5)
    assert len(host.progress) == 1 and not pace.is_annealed


def test_a_training_that_was_interrupted_goes_on_from_where_its_rate_was() -> None:
    pace = Pace(100, 10, progress=0.5, clock=lambda: 0.0)
    first = pace.next(100)
    assert first == pytest.approx(0.5025)


def test_an_epoch_that_has_begun_has_a_step() -> None:
    """Saving took what was left of the time. Without a step the training loss of it was 0."""
    now = [0.0]
    pace = Pace(10, 2, clock=lambda: now[0])
    for _ in range(2):
        assert pace.next(20) is not None
        now[0] += 1
        pace.stepped()
    pace.evaluated()
    assert not pace.is_over()
    now[0] = 20
    assert pace.next(18) is not None and pace.progress == pytest.approx(1)
    pace.stepped()
    assert pace.next(17) is None and pace.is_over()


def test_ranks_follow_the_first() -> None:
    """This rank's clock says that the time is over, and the first rank's does not."""
    now = [0.0]
    pace = Pace(10, 5, clock=lambda: now[0], agreed=lambda own: [0.1, 0.2, 0.0][: len(own)])
    for _ in range(3):
        assert pace.next(50) == 0.1 and pace.progress == 0.2
        now[0] += 100
        pace.stepped()


def test_the_loop_ends_by_the_clock_and_goes_on_after_a_kill(tmp_path: Path) -> None:
    asked = job(epochs=10_000, anneal_s=2.0, checkpoint_steps=1, result="last")
    killed = Recorder(tmp_path, dies_after=(1, 1))
    with pytest.raises(KeyboardInterrupt):
        train_rank(asked, pixels(), None, killed.save, killed.report)
    resume = tmp_path / checkpoint.name(1, 1)
    before = checkpoint.read(resume).state
    assert before.progress is not None and 0 < before.progress < 0.9
    told = Recorder(tmp_path)
    state = train_rank(asked, pixels(), resume, told.save, told.report)
    is_annealed = (state.progress or 0) >= ANNEALED
    assert state.finished(10_000)
    assert state.stopped == (IN_TIME if is_annealed else "the budget of 2 s is spent")
    assert state.progress is not None and before.progress < state.progress
    assert 1 < state.epoch < 10_000 and state.seconds > before.seconds
    # What is on disk says that it has ended: it is not trained on.
    assert checkpoint.read(max(tmp_path.glob("epoch-*"))).state.stopped == state.stopped


def test_an_ordinary_training_writes_no_progress(tmp_path: Path) -> None:
    told = Recorder(tmp_path)
    state = train_rank(job(epochs=1), pixels(), None, told.save, told.report)
    assert state.progress is None and "progress" not in state.to_dict()
    assert LoopState.from_dict(state.to_dict()) == state
