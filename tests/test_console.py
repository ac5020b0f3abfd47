"""What people see of a training: one line an epoch with what is left, and on a terminal a bar that
moves with the steps.
"""

from __future__ import annotations

import io
import json
import logging
import re

import pytest
from rich.console import Console as Rich

from raypipe.cli.console import Console
from raypipe.search import opening
from raypipe.search.first_answer import FirstAnswer
from raypipe.search.leaderboard import FIRST, Trial, standings
from raypipe.search.trials.standing import Standing
from raypipe.train.loop import LoopState
from raypipe.train.measure.meter import Position
from raypipe.train.stopping import FITTED, IN_TIME

METRICS = {
    "val_loss": 0.41,
    "val_accuracy": 0.875,
    "train_loss": 0.39,
    "images_per_s": 1234.5,
    "forward_s": 0.01,
}


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
    assert (
        "epoch   1 of 4  val_loss 0.4100 · val_accuracy 0.8750 · train_loss 0.3900 · 1,234 "
        "images/s · 30 s left" in first
    )
    assert "epoch   2 of 4" in second and second.endswith("20 s left") and "forward_s" not in second


def test_a_terminal_shows_epoch_step_rate_metric_and_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_a_training_by_the_clock_counts_to_its_time_and_not_to_the_most_epochs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A refit for which 5 epochs fit was at epoch 4 of 60, with half an hour left."""
    clock = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    console, out = Console(), io.StringIO()
    console.err = Rich(file=out, force_terminal=True, width=160, highlight=False)
    with console.training(60, "val_accuracy", within_s=100) as told:
        clock[0] += 30  # it reads images
        told.step(Position(0, 0, 10, 0.0))
        clock[0] += 10
        told.step(Position(0, 5, 10, 1234.5))
        clock[0] += 12
        told.epoch(METRICS, LoopState(epoch=1, seconds=20.0))
        clock[0] += 10
        told.step(Position(1, 5, 10, 1234.5))
        told.epoch(METRICS, LoopState(epoch=5, seconds=97.0, stopped=IN_TIME))
    text = out.getvalue()
    assert "of 60" not in text
    assert "epoch 2 · step 5 of 10 · 1,234 images/s · val_accuracy 0.8750 · 70 s left" in text
    lines = re.findall(r"epoch   (\d)  val_loss.*images/s(.*)", text)
    assert lines == [("1", " · 80 s left"), ("5", "")]


STANDINGS = [
    Standing("trial-002-b", {"train.lr": 0.01}, 0.91, 9, "running"),
    Standing("trial-001-a", {}, 0.8, 3, "stopped"),
]


def search_shown(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    clock = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    console, out = Console(), io.StringIO()
    console.err = Rich(file=out, force_terminal=terminal, width=120, highlight=False)
    with console.searching("val_accuracy") as told:
        told(0, 16, [])
        for done, standings in ((1, STANDINGS[1:]), (1, STANDINGS), (2, STANDINGS)):
            clock[0] += 20
            told(done, 16, standings)
    return out.getvalue()


def test_a_terminal_shows_how_trials_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    out = search_shown(True, monkeypatch)
    assert "Searching: 3 of at most 16 trials begun, 2 ended, 60 s" in out  # one is not shown
    assert re.search(r"1\s+trial-002-b\s+0.91\s+9\s+running\s+0.01", out) and re.search(
        r"2\s+trial-001-a\s+0.8\s+3\s+stopped", out
    )


def test_elsewhere_a_new_best_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = search_shown(False, monkeypatch).splitlines()
    assert first.endswith("best so far val_accuracy 0.8000, trial-001-a after 3 epochs: –")
    assert second.endswith(
        "best so far val_accuracy 0.9100, trial-002-b after 9 epochs: train.lr 0.01"
    )
    assert third.endswith("Searching: 2 of at most 16 trials begun, 1 ended, 40 s")


def test_what_a_first_answer_has_reached_is_the_best_so_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trials began with "best so far 0.2", though a head had more; and heads counted as trials."""
    console, out = Console(), io.StringIO()
    console.err = Rich(file=out, force_terminal=False, width=160, highlight=False)
    fitted = Trial(f"{FIRST}-1", {}, 0.875, 1, False, (METRICS,), "somewhere", FITTED)
    with console.searching("val_accuracy") as told:
        told(0, 16, standings([fitted], "val_accuracy", "max"))
        trials = opening.beside(FirstAnswer([fitted]), "val_accuracy", "max", told)
        trials(1, 16, STANDINGS[1:])
        trials(1, 16, STANDINGS)
        equal = Standing("trial-003-c", {}, 0.91, 9, "running")
        trials(1, 16, [equal, *STANDINGS])  # no new best
    first, second = out.getvalue().splitlines()
    assert first.endswith(f"best so far val_accuracy 0.8750, {FIRST}-1 fitted at once: –")
    assert "0.9100, trial-002-b after 9 epochs" in second
    assert opening.beside(FirstAnswer(), "val_accuracy", "max", told) is told


def test_many_fields_are_one_column(capsys: pytest.CaptureFixture[str]) -> None:
    changes = {f"train.field{i}": i for i in range(9)}
    Console().leaderboard("val_loss", [Standing("trial-001-a", changes, 0.5, 3, "full")])
    out = capsys.readouterr().out
    assert "values" in out and "field0 0, field1 1," in out


def test_text_of_users_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """rich reads square brackets as markup: the label `[red]` would vanish."""
    console = Console()
    console.out = Rich(width=120, highlight=False)
    console.table("[bold]title", ["label [dim]"], [["[red]"], [None], ["–"]])
    console.facts({"[b]name": "[green]value"})
    said = capsys.readouterr().out
    for text in ("[bold]title", "label [dim]", "[red]", "[b]name", "[green]value", "'–'"):
        assert text in said


@pytest.mark.timeout(60)
def test_a_word_of_a_million_letters_is_shown_soon(capsys: pytest.CaptureFixture[str]) -> None:
    """Rich's highlighter needs ten minutes for a third of it."""
    Console()
    logging.getLogger("raypipe").info("[b]%s[/b]", "y" * 1_000_000)
    said = "".join(capsys.readouterr().err.split())
    assert said == "[b]" + "y" * 1_000_000 + "[/b]"


def test_a_secret_that_looks_like_json_does_not_break_the_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_API_KEY", '": "plain')
    monkeypatch.setenv("OTHER_API_KEY", "accuracy")
    Console(as_json=True).finish({"accuracy": "plain accuracy", "also": '": "plain'})
    told = json.loads(capsys.readouterr().out)
    assert told == {"accuracy": "plain ***", "also": "***"}


def test_work_that_is_taken_up_counts_its_own_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prediction that was killed at 90 % said "180,100 images/s, 1 s left" when it went on."""
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    console, out = Console(), io.StringIO()
    console.err = Rich(file=out, width=160)
    with console.progress("Predicting") as tick:
        tick(900_000, 1_000_000)
        clock[0] += 10
        tick(901_000, 1_000_000)
    assert out.getvalue().splitlines()[-1].endswith("100 images/s, 990 s left")


def test_a_small_metric_is_not_shown_as_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    console, out = Console(), io.StringIO()
    console.err = Rich(file=out, width=160)
    with console.training(4, "val_mae") as told:
        told.epoch({**METRICS, "val_mae": 2.31e-6}, LoopState(epoch=1))
    assert "val_mae 2.31e-06" in out.getvalue() and "val_loss 0.4100" in out.getvalue()
