"""What workers on Spark executors tell the driver: small files in a folder of the run.

All nodes see that folder, because they share the checkpoints beside it. It needs no port and no
token. A worker has an `Outbox`, the driver the `Inbox`:

    task-RANK           Spark has started this worker
    epoch-NNNNNN.json   the state after that many epochs, from rank 0
    position.json       the position in the epoch, from rank 0
    error-RANK.json     why this worker failed
"""

from __future__ import annotations

import json
import re
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from raypipe import errors
from raypipe.config import to_json
from raypipe.errors import RaypipeError, hidden, one_line
from raypipe.files import write_atomic
from raypipe.train.loop import LoopState, Report
from raypipe.train.measure.meter import Position, ReportPosition

POSITION = "position.json"
MARK = "raypipe-error: "  # before JSON in the text of an exception, where no file can be written
AGAIN = "Spark tries a group again that has failed"


class Outbox:
    """Of a worker. It writes in a thread, so that no step waits for a slow disk."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._writer = ThreadPoolExecutor(1, "messages")
        self._position: Future[Any] | None = None

    def epoch(self, metrics: dict[str, float], state: LoopState) -> None:
        """The state holds the metrics too."""
        self._send(f"epoch-{state.epoch:06d}.json", state.to_dict())

    def position(self, position: Position) -> None:
        """Left out while an earlier one is being written."""
        if self._position is None or self._position.done():
            self._position = self._send(POSITION, asdict(position))

    def error(self, error: BaseException) -> None:
        self._send(f"error-{self._rank}.json", as_dict(error))

    def close(self) -> None:
        """All messages are written when it returns."""
        self._writer.shutdown()

    def _send(self, name: str, fields: dict[str, Any]) -> Future[Any]:
        return self._writer.submit(self._write, name, to_json(fields))

    def _write(self, name: str, text: str) -> None:
        # Not made anew: a driver that has removed it does not read any more.
        if self._folder.is_dir():
            write_atomic(self._folder / name, text)


def as_dict(error: BaseException) -> dict[str, Any]:
    """An error as JSON types, without credentials."""
    if not isinstance(error, RaypipeError):
        return {"kind": "", "what": hidden(f"{type(error).__name__}: {one_line(error)}")}
    parts = {"what": error.what, "rule": error.rule, "fix": error.fix}
    parts = {name: hidden(text) for name, text in parts.items()}
    got = None if error.got is None else hidden(str(error.got))
    return {"kind": type(error).__name__, "got": got, **parts}


@dataclass(frozen=True)
class Inbox:
    """Of the driver, for one group of `workers` workers."""

    folder: Path
    workers: int

    def make(self) -> None:
        """Make the folder. A driver that was killed may have left others: they go."""
        for old in self.folder.parent.glob("inbox-*"):
            shutil.rmtree(old, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def remove(self) -> None:
        """Workers that are still there leave."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def has_started(self) -> bool:
        """Has any worker?"""
        return any(self.folder.glob("task-*"))

    def has_error(self) -> bool:
        return any(self.folder.glob("error-*.json"))

    def relay(self, progress: Report, report_position: ReportPosition) -> None:
        """Pass on what is new."""
        for file in sorted(self.folder.glob("epoch-*.json")):
            state = LoopState.from_dict(json.loads(file.read_text()))
            file.unlink()
            progress(state.history[-1], state)
        with suppress(FileNotFoundError):
            position = json.loads((self.folder / POSITION).read_text())
            (self.folder / POSITION).unlink()
            report_position(Position(**position))

    def cause(self, said: str) -> RaypipeError:
        """The error to show of those of all workers. said: what Spark says of its failed job.

        A RaypipeError is preferred, and then the first: "connection lost" on other ranks is only
        its consequence.
        """
        files = list(self.folder.glob("error-*.json"))
        files.sort(key=lambda file: file.stat().st_mtime_ns)
        found = [json.loads(file.read_text()) for file in files]
        # From a worker that does not see the folder.
        found += [json.loads(line) for line in re.findall(f"{MARK}(.*)", said)]
        for parts in found:
            kind = getattr(errors, parts.pop("kind"), None)
            if kind is not None:
                return kind(**parts)  # type: ignore[no-any-return]
        missing = self.workers - len(found)
        reason = found[0]["what"] if found else _reason(said)
        if missing and found:
            reason = f"{missing} of {self.workers} workers are gone, the others say {reason}"
        return RaypipeError(
            f"Training failed on a Spark executor: {reason}",
            rule="Executors and workers are killed where their memory is too small",
            fix=f"See the executors' logs. Checkpoints are kept in {self.folder.parent}",
        )


def _reason(said: str) -> str:
    """What a person needs of Spark's many lines about a failed job."""
    if not said or AGAIN in said:
        return "an executor, or a worker on it, was lost"
    found = re.search(r"ExecutorLostFailure.*|^[\w.]+(Error|Exception): .*", said, re.MULTILINE)
    return one_line(found[0] if found else said)
