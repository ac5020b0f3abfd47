"""The log of one run of a verb: what people saw, and why it failed, without secrets."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from raypipe.errors import RaypipeError, hidden

MOST_BYTES = 50 * 2**20
MOST_OF_LAST = 100_000  # characters
# What a console says to people; only a run's log listens.
SAID = "raypipe.said"
# The message, and the traceback where there is one.
_FORMATTER = logging.Formatter()


class _File(logging.Handler):
    """Lines with the time; no secret is in them. A full disk ends the log and not the run.

    The last line, which says how the run ended, is written also behind the log's end.
    """

    def __init__(self, file: Path) -> None:
        super().__init__()
        file.parent.mkdir(parents=True, exist_ok=True)
        # A name of its own, so there is nothing to append to; volumes of Unity Catalog refuse that.
        self._out = file.open("w", encoding="utf-8", errors="replace")
        self._room = MOST_BYTES
        self._turn = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = _FORMATTER.format(record)
        except Exception:
            # A message that does not fit its values: the standard library says so on stderr.
            self.handleError(record)
            return
        self.line(text, record.levelname if record.levelno > logging.INFO else "")

    def line(self, text: str, level: str = "", is_last: bool = False) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        shown = hidden(text)[:MOST_OF_LAST] if is_last else hidden(text)
        line = " ".join(filter(None, (stamp, level, shown))) + "\n"
        try:
            # A thread may still log while the run's end closes the file.
            with self._turn:
                if (self._room <= 0 and not is_last) or self._out.closed:
                    return
                self._room -= len(line.encode("utf-8", "replace"))
                if self._room <= 0 and not is_last:
                    line = f"{stamp} The log ends here: it has {MOST_BYTES >> 20} MiB\n"
                self._out.write(line)
                self._out.flush()
        except OSError:
            self._room = 0

    def close(self) -> None:
        with suppress(OSError), self._turn:
            self._out.close()
        super().close()


@contextmanager
def logged(file: Path) -> Iterator[_File]:
    """While the block runs, all that raypipe says goes into `file` too."""
    handler = _File(file)
    loggers = [logging.getLogger("raypipe"), logging.getLogger(SAID)]
    # Told once: on its way up it would come to the console again.
    loggers[1].propagate = False
    loggers[1].setLevel(logging.INFO)
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield handler
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()


def why(error: BaseException) -> str:
    """An error for the log: its message, or of one that nobody foresaw its traceback."""
    if isinstance(error, RaypipeError):
        return f"Failed: {error}"
    return "Failed: " + "".join(traceback.format_exception(error)).rstrip()
