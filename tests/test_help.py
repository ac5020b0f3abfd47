"""What --help shows can be typed."""

from __future__ import annotations

import io
import re
import shlex
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from rich.text import Text
from typer.main import get_command

from raypipe.main import app, main


def commands(command: Any, path: str = "raypipe") -> Iterator[tuple[str, str]]:
    """The name and the help of each command that does something."""
    if getattr(command, "invoke_without_command", True):
        yield path, command.help or ""
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{path} {name}")


def parsed(words: list[str]) -> Any:
    """The context of `raypipe WORDS`. Raises for a command, or an option, that there is not."""
    command: Any = get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words[0]]
        words = words[1:]
    # The context of a group does not look for its command.
    assert getattr(command, "invoke_without_command", True), f"no command: {words}"
    return command.make_context("raypipe", words)


@pytest.mark.parametrize(("path", "text"), commands(get_command(app)))
def test_every_command_has_an_example_that_is_shown_whole_and_parsed(path: str, text: str) -> None:
    """`evaluate.slices=[line]` was shown without [line]: brackets are rich's markup."""
    examples = re.findall(r"\[bold\](.*?)\[/bold\]", " ".join(text.split()))
    assert examples
    for example in examples:
        shown = Text.from_markup(example).plain
        assert shown == example.replace("\\[", "[")
        raypipe, *words = shlex.split(shown)
        assert raypipe == "raypipe" and parsed(words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train", "mine.yaml", "--epoch"], "No such option: --epoch"),
        (["ingest", "mine.yaml", "--exit-code"], "No such option: --exit-code"),
        (["report", "modle", "mine.yaml"], "no command"),
        (["traim", "mine.yaml"], "no command"),
    ],
)
def test_a_command_line_that_cannot_be_typed_is_seen(words: list[str], says: str) -> None:
    """The negative control."""
    with pytest.raises(Exception, match=says):
        parsed(words)


def test_an_option_before_the_command_of_a_group_is_not_lost(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`raypipe sidecars --json pack` printed no JSON."""
    assert main(["sidecars", "--json", "pack", "--only", "nobody"]) == 2
    assert "raypipe sidecars pack --json" in capsys.readouterr().err


def test_a_terminal_without_some_letters_shows_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a UnicodeEncodeError, behind the work of a verb."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["config", "cluster"]) == 0
    out.flush()
    assert b"#sha256=\\u2026 behind it" in b" ".join(out.buffer.getvalue().split())
