"""Events as lines of the log."""

from __future__ import annotations

import logging
from typing import Literal

from raypipe.config import Section, to_json
from raypipe.errors import hidden
from raypipe.watch.events import Event

log = logging.getLogger("raypipe")


class LogConfig(Section):
    """Events as lines of the log."""

    type: Literal["log"] = "log"
    """One line each, with the run's id."""


class Log:
    """Each event is a line; its facts are JSON."""

    def send(self, event: Event) -> None:
        said = hidden(f"{event.kind} {event.run}: {event.text} {to_json(dict(event.facts))}")
        log.info("%s", said)
