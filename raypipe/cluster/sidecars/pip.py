"""pip in a process of its own: its environment, its index, and errors without credentials.

pip installs, because it knows the user's index, mirror and certificates. An index may have a
password in its address (PIP_INDEX_URL, pip.conf). It stays in the environment: command lines are
public, and what pip prints is hidden before it becomes a message.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from raypipe.errors import hidden, keep_secrets_of

# By setting of pip: the variable that says the same.
INDEX = {
    "index-url": "PIP_INDEX_URL",
    "extra-index-url": "PIP_EXTRA_INDEX_URL",
    "trusted-host": "PIP_TRUSTED_HOST",
}
# No variable and no file of this node says anything to pip then.
ALONE = "--isolated"
NO_FILES = {"PIP_CONFIG_FILE": os.devnull}
# Later ones win, as in pip.
_LEVELS = "global", "install", ":env:"
# pip takes packages on PYTHONPATH for installed. Without .pyc files, every first call of a sidecar
# costs 3 s more.
_HARMFUL = "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONHOME"


class Failed(Exception):
    """A process ended with an error. The text is the end of its output, without credentials."""


def run(
    command: Sequence[str], more: Mapping[str, str] | None = None, limit_s: float | None = None
) -> None:
    """Run a command. more: variables that it has besides this process's.

    Raises Failed, and subprocess.TimeoutExpired.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _HARMFUL}
    done = subprocess.run(
        command, capture_output=True, text=True, env=kept | dict(more or {}), timeout=limit_s
    )
    if done.returncode:
        raise Failed(tail(hidden(done.stdout + done.stderr)) or f"exit code {done.returncode}")


def pip(arguments: Sequence[str], more: Mapping[str, str] | None = None) -> None:
    """Run pip. Raises Failed."""
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check"]
    for value in (more or {}).values():
        _keep(value)
    try:
        run([*command, *arguments], more)
    except Failed as e:
        # What pip printed may quote an address that only its files have.
        settings()
        raise Failed(hidden(str(e))) from None


def settings() -> dict[str, str]:
    """The index that pip takes here, by name of setting: its variables over its files.

    From here on, no message of this process shows their credentials.
    """
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    found: dict[str, str] = {}
    for level in _LEVELS:
        for line in listed.stdout.splitlines():
            name, _, value = line.partition("=")
            with suppress(ValueError, SyntaxError):
                text = str(ast.literal_eval(value))
                _keep(text)
                setting = name.removeprefix(f"{level}.")
                if setting != name and setting in INDEX:
                    found[setting] = text
    return found


def index() -> dict[str, str]:
    """The index of this process as variables for pip elsewhere; {} where none is set.

    Addresses of files stay here: they may be other files there.
    """
    found = {}
    for setting, value in settings().items():
        parts = [part for part in value.split() if not part.startswith(("file:", "/", "."))]
        if parts:
            found[INDEX[setting]] = " ".join(parts)
    return found


def _keep(value: str) -> None:
    """Keep the credentials of addresses, separated by blanks, out of all later messages."""
    for part in value.split():
        keep_secrets_of(part)


def tail(text: str, lines: int = 12) -> str:
    """The last lines of an output."""
    return "\n".join(text.strip().splitlines()[-lines:])
