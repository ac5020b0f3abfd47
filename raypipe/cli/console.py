"""What people see: progress and messages on stderr, results on stdout, one JSON line at the end
when asked for.

On a terminal progress is a bar (rich); elsewhere it is a plain line every five seconds, so a job's
log stays readable.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console as Rich
from rich.console import Group
from rich.highlighter import NullHighlighter
from rich.live import Live
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from raypipe.artifacts.run_log import SAID
from raypipe.config import to_json
from raypipe.costs.spent import duration
from raypipe.errors import hidden
from raypipe.report.formats import cell

if TYPE_CHECKING:
    from raypipe.search.trials.standing import Standing
    from raypipe.train.loop import LoopState
    from raypipe.train.measure.meter import Position

_said = logging.getLogger(SAID)
_said.propagate = False
PLAIN_EVERY_S = 5.0
ENDED_EVERY_S = 30.0
PACE_AFTER_S = 2.0  # before, what is left would be a guess
LOG_WIDTH = 140  # columns, where there is no terminal to ask


class Console:
    """One per process. `as_json` sends everything for people to stderr and keeps stdout for the
    JSON line.
    """

    def __init__(self, as_json: bool = False, began: float | None = None) -> None:
        """began: `time.monotonic` when the process of a command began; None: now."""
        self.as_json = as_json
        # A notebook shows stderr in red, and rich would make each line a picture of its own there.
        in_notebook = "ipykernel" in sys.modules
        self.err = Rich(
            stderr=not in_notebook,
            highlight=False,
            force_jupyter=False,
            width=None if sys.stderr.isatty() else LOG_WIDTH,
        )
        self.out = self.err
        if not as_json:
            width = None if sys.stdout.isatty() else LOG_WIDTH
            self.out = Rich(highlight=False, force_jupyter=False, width=width)
        self._started = time.monotonic()
        self.began = self._started if began is None else began
        # One handler at a time: a notebook makes a Console with each call.
        log = logging.getLogger("raypipe")
        # Rich's own highlighter looks at each letter of a word as often as the word has letters: a
        # line with one of 100,000 letters took a minute.
        handler = RichHandler(
            console=self.err,
            show_time=False,
            show_path=False,
            show_level=False,
            highlighter=NullHighlighter(),
            keywords=[],
        )
        handler.addFilter(_without_credentials)
        log.handlers = [handler]
        log.setLevel(logging.INFO)
        log.propagate = False

    def say(self, text: str) -> None:
        """A line about what is going on, with the time since the start."""
        _said.info("%s", text)
        seconds = int(time.monotonic() - self._started)
        stamp = (f"{seconds // 60:d}:{seconds % 60:02d}", "dim")
        self.err.print(
            Text.assemble(stamp, " ", hidden(text)), soft_wrap=True
        )  # in one piece, or a moving bar comes between

    def heading(self, text: str) -> None:
        if self.err.is_terminal:
            self.err.rule(Text(text, style="bold"), align="left", style="dim")
        else:
            self.err.print(f"== {text}", markup=False)

    @contextmanager
    def progress(self, label: str, unit: str = "images") -> Iterator[Callable[..., None]]:
        """`with console.progress("Reading") as tick: tick(done, total)`."""
        started = shown = time.monotonic()
        first: tuple[float, int] | None = None

        def pace_of(done: int) -> float:
            """Of this run alone: an earlier one may have done most of it. 0: too early to say."""
            nonlocal first
            now = time.monotonic()
            began, before = first = first or (now if done else started, done)
            return (done - before) / (now - began) if done - before > 50 and now > began else 0.0

        if self.err.is_terminal:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            with Progress(*columns, console=self.err, transient=True) as bar:
                task = bar.add_task(label, total=None, rate="")

                def drawn(done: int, total: int) -> None:
                    pace = pace_of(done)
                    rate = f"{pace:,.0f} {unit}/s" if pace else ""
                    bar.update(task, completed=done, total=total, rate=rate)

                yield drawn
            return

        def plain(done: int, total: int) -> None:
            nonlocal shown
            pace = pace_of(done)  # each time, so that the first one is seen
            if time.monotonic() - shown > PLAIN_EVERY_S or (
                done == total and time.monotonic() - started > PLAIN_EVERY_S
            ):
                shown = time.monotonic()
                left = (total - done) / pace if pace else 0.0
                rate = f", {pace:.0f} {unit}/s, {left:.0f} s left" if pace else ""
                self.say(f"{label}: {done} of {total}{rate}")

        yield plain

    @contextmanager
    def training(
        self, epochs: int, metric: str, within_s: float | None = None
    ) -> Iterator[Training]:
        """`with console.training(20, "val_loss") as told: trainer.run(job, progress=told.epoch,
        report_position=told.step)`.
        """
        if not self.err.is_terminal:
            yield Training(self, epochs, metric, within_s)
            return
        # Drawn twice a second: rich's ten times would take 2 % of a core from the training.
        columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}", markup=False))
        with Progress(*columns, console=self.err, transient=True, refresh_per_second=2) as bar:
            yield Training(self, epochs, metric, within_s, bar)

    @contextmanager
    def searching(self, metric: str) -> Iterator[Searching]:
        """`with console.searching("val_accuracy") as told: tuner.search(job, told)`."""
        if not self.err.is_terminal:
            yield Searching(self, metric)
            return
        with Live(console=self.err, transient=True, refresh_per_second=2) as live:
            yield Searching(self, metric, live)

    def leaderboard(self, metric: str, standings: Sequence[Standing], top: int = 8) -> None:
        self.out.print(_leaderboard(metric, standings, top))

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.out.print(_table(title, columns, rows))

    def facts(self, facts: Mapping[str, Any]) -> None:
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            line = Text.assemble((f"{name:<{width}}  ", "dim"), cell(value))
            self.out.print(line, soft_wrap=True)

    def finish(self, result: Mapping[str, Any]) -> None:
        """The last line of stdout under --json."""
        if self.as_json:
            plain = json.loads(to_json(result, default=plain_value))
            print(json.dumps(_without_secrets(plain)), flush=True)


class Training:
    """What people see of a training: a line an epoch, with what is left, and on a terminal a bar
    that moves with the steps. One that ends by a clock moves with the clock: its epochs are as many
    as fit.
    """

    def __init__(
        self,
        console: Console,
        epochs: int,
        metric: str,
        within_s: float | None = None,
        bar: Progress | None = None,
    ) -> None:
        self._console, self._epochs, self._metric, self._bar = console, epochs, metric, bar
        self._within_s = within_s
        self._of = f" of {epochs}" if within_s is None else ""
        self._ran = (0.0, time.monotonic())  # seconds in the training's loop, and when
        self._task = bar.add_task("preparing", total=None) if bar else None
        self._since: tuple[float, float] | None = (
            None  # when we first heard, and the share that was done by then
        )
        self._judged = ""

    def step(self, at: Position) -> None:
        """About once a second."""
        if self._since is None:
            self._ran = (0.0, time.monotonic())  # it has only begun
        done, left = self._so_far(at.epoch + at.step / at.steps)
        if self._bar is not None and self._task is not None:
            parts = (
                f"epoch {at.epoch + 1}{self._of}",
                f"step {at.step} of {at.steps}",
                f"{at.images_per_s:,.0f} images/s",
                self._judged,
                left,
            )
            self._bar.update(
                self._task, completed=done, total=1.0, description=" · ".join(p for p in parts if p)
            )

    def epoch(self, metrics: Mapping[str, float], state: LoopState) -> None:
        self._ran = (state.seconds, time.monotonic())
        _, left = self._so_far(state.epoch)
        told = [name for name in metrics if name.startswith(("val_", "train_"))]
        learned = [f"{name} {_figure(metrics[name])}" for name in told]
        parts = (
            *learned,
            f"{metrics['images_per_s']:,.0f} images/s",
            "" if state.stopped else left,
        )
        if self._metric in metrics:  # a refit has no validation
            self._judged = f"{self._metric} {_figure(metrics[self._metric])}"
        self._console.say(f"epoch {state.epoch:>3}{self._of}  {' · '.join(p for p in parts if p)}")

    def _so_far(self, epochs: float) -> tuple[float, str]:
        """The share that is done, and what is left, after so many epochs."""
        done = epochs / self._epochs
        if self._within_s is None:
            return done, self._left(done)
        self._since = self._since or (time.monotonic(), done)
        spent_s, at = self._ran
        spent_s += time.monotonic() - at
        # A fast host has trained all epochs before its time.
        done = min(1.0, max(done, spent_s / self._within_s))
        return done, f"{duration((1 - done) * self._within_s)} left" if done < 1 else ""

    def _left(self, done: float) -> str:
        """At the pace so far, if no stopping rule ends it earlier."""
        now = time.monotonic()
        began, share = self._since = self._since or (now, done)
        if done >= 1 or done <= share or now - began < PACE_AFTER_S:
            return ""
        return f"{duration((now - began) / (done - share) * (1 - done))} left"


def _figure(value: float) -> str:
    """Four decimals; of a small number four digits, as it would be 0.0000."""
    return f"{value:.4f}" if value == 0 or not abs(value) < 1e-3 else f"{value:.4g}"


class Searching:
    """What people see of a search: on a terminal the best trials as they stand; elsewhere a line
    for every new best, and now and then how many trials have begun and ended.
    """

    def __init__(self, console: Console, metric: str, live: Live | None = None) -> None:
        self._console, self._metric, self._live = console, metric, live
        self._started = self._shown = time.monotonic()
        self._best: float | None = None

    def __call__(self, done: int, total: int, standings: Sequence[Standing]) -> None:
        now = time.monotonic()
        # One that failed at once has nothing to show, and is not among the standings.
        begun = done + sum(one.state in ("running", "waiting") for one in standings)
        elapsed = duration(now - self._started)
        ended = f"Searching: {begun} of at most {total} trials begun, {done} ended, {elapsed}"
        if self._live is not None:
            self._live.update(Group(ended, _leaderboard(self._metric, standings)))
            return
        leader = standings[0] if standings else None
        # Of equally good ones the first said so: another one is no new best.
        if leader is not None and leader.best != self._best:
            self._best = leader.best
            after = f"after {leader.epochs} epoch{'s' * (leader.epochs > 1)}"
            if leader.state == "fitted":
                after = "fitted at once"
            self._console.say(
                f"best so far {self._metric} {_figure(leader.best)}, {leader.name} {after}: "
                f"{cell(leader.changes)}"
            )
        if now - self._shown > ENDED_EVERY_S:
            self._shown = now
            self._console.say(ended)


def _without_credentials(record: logging.LogRecord) -> bool:
    record.msg, record.args = hidden(record.getMessage()), ()
    return True


def plain_value(value: Any) -> Any:
    """Dataclasses, paths and dates as JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, (Path, datetime)):
        return str(value)
    return repr(value)


def _without_secrets(value: Any) -> Any:
    """JSON's values with secrets hidden in its strings only: keys and numbers stay as they are."""
    if isinstance(value, dict):
        return {key: _without_secrets(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_secrets(inner) for inner in value]
    return hidden(value) if isinstance(value, str) else value


def _leaderboard(metric: str, standings: Sequence[Standing], top: int = 8) -> Table:
    # Not at the top: it imports torch, and --help should not wait for that.
    from raypipe.work.tables import leaderboard

    table = leaderboard(metric, standings, top)
    return _table(table.title, table.columns, table.rows)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    table = Table(
        title=Text(title),
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for i, name in enumerate(columns):
        numeric = bool(rows) and all(isinstance(r[i], (int, float)) for r in rows)
        table.add_column(Text(name), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        # As text: rich would read the label `[red]` as a colour and show nothing.
        table.add_row(*[Text(cell(v)) for v in row])
    return table
