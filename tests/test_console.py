"""What people see of a training: one line an epoch with what is left, and on a terminal a bar that moves with the steps."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console as Rich

from raypipe.console import Console
from raypipe.train.loop import LoopState
from raypipe.train.meter import Position

METRICS = {"val_loss": 0.41, "val_accuracy": 0.875, "train_loss": 0.39, "images_per_s": 1234.5, "forward_s": 0.01}


def shown(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    """Two of four epochs of ten steps, ten seconds each: positions in the middle and at the end."""
    clock = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    console, out = Console(), io.StringIO()
    console.err = Rich(file=out, force_terminal=terminal, width=160, highlight=False)
    with console.training(4, "val_accuracy") as told:
        told.step(Position(0, 0, 10, 0.0))
        for epoch in range(2):
            clock[0] += 5
            told.step(Position(epoch, 5, 10, 1234.5))
            clock[0] += 5
            told.epoch(METRICS, LoopState(epoch=epoch + 1))
        told.step(Position(2, 1, 10, 1234.5))
    return out.getvalue()


def test_elsewhere_an_epoch_is_a_line_with_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = shown(False, monkeypatch).splitlines()
    assert "epoch   1 of 4  val_loss 0.4100 · val_accuracy 0.8750 · train_loss 0.3900 · 1,234 images/s · 30 s left" in first
    assert "epoch   2 of 4" in second and second.endswith("20 s left") and "forward_s" not in second


def test_a_terminal_shows_epoch_step_rate_metric_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    out = shown(True, monkeypatch)
    assert "epoch 3 of 4 · step 1 of 10 · 1,234 images/s · val_accuracy 0.8750 · 18 s left" in out
    lines = re.findall(r"0:\d\d\S* epoch   (\d) of 4", out)
    assert lines == ["1", "2"], "a bar came between the time and its line"


def test_a_run_that_is_taken_up_counts_its_own_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    console, out = Console(), io.StringIO()
    console.err = Rich(file=out, width=160)
    with console.training(100, "val_accuracy") as told:
        told.step(Position(98, 0, 10, 1.0))
        clock[0] += 120
        told.epoch(METRICS, LoopState(epoch=99))
        clock[0] += 120
        told.epoch(METRICS, LoopState(epoch=100))
    first, last = out.getvalue().splitlines()
    assert first.endswith("2 min left") and last.endswith("images/s")
