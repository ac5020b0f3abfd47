"""What a run has to send to `artifacts.uri`, kept in its folder until the store has it.

    run.dir/artifacts/logs/NAME.log       the log of each run of a verb
    run.dir/artifacts/pending/NAME.json   what is to be sent; removed when it was
    run.dir/artifacts/pending/NAME.lock   held by the process that works on it
    run.dir/artifacts/lock                held by the process that sends

A run begins with a record of its log alone, and ends with one of all its files. Whatever ends the
process, the record stays, and the next verb in this folder sends it. A store that is down costs one
warning: the run itself has its result.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from filelock import Timeout

from raypipe import stores
from raypipe.artifacts import bundle, run_log
from raypipe.artifacts.settings import ArtifactsConfig
from raypipe.config import RunConfig, to_json
from raypipe.errors import RaypipeError, hidden
from raypipe.files import file_lock, owned, write_atomic
from raypipe.registry import uploads
from raypipe.tables.objects import Objects

log = logging.getLogger("raypipe")
FORMAT = 1
# For how long the end of a run may try in vain to send what earlier ones left.
PATIENCE_S = 60.0


@dataclass
class Outgoing:
    """What one run sends. key: of its result; until it is known, the name of the log."""

    verb: str
    name: str
    key: str = ""
    files: dict[str, Path] = field(default_factory=dict)
    said: str = ""
    """The result, for the end of the log."""


@contextmanager
def sent(run: RunConfig, cfg: ArtifactsConfig, verb: str) -> Iterator[Outgoing]:
    """Keep a log while the block runs; then send it and what the block put into `files`.

    An error of the block is logged, sent too, and raised again. Nothing here fails the block.
    """
    # Two calls in one second and one process are two runs.
    name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{verb}-{uuid.uuid4().hex[:6]}"
    outgoing = Outgoing(verb, name)
    with ExitStack() as held:
        try:
            outbox = _Outbox(run, cfg, outgoing)
            held.enter_context(outbox.owned())
            written = held.enter_context(run_log.logged(outbox.log_file))
            outbox.record("unfinished")
        except OSError as e:
            log.warning("No log is kept, and no artifacts are sent: %s", e)
            yield outgoing
            return
        try:
            yield outgoing
        except BaseException as e:
            written.line(run_log.why(e), is_last=True)
            # After Ctrl-C nobody waits for an upload: the next run sends it.
            if isinstance(e, Exception):
                written.close()
                outbox.send("failed")
            raise
        written.line(outgoing.said, is_last=True)
        written.close()
        outbox.send("finished")


class _Outbox:
    """The records of a run's folder, and this run's own."""

    def __init__(self, run: RunConfig, cfg: ArtifactsConfig, outgoing: Outgoing) -> None:
        self._run = run
        self._cfg = cfg
        self._uri = stores.address(str(cfg.uri))
        self._outgoing = outgoing
        self._folder = run.path / "artifacts"
        self._own = self._folder / "pending" / f"{outgoing.name}.json"
        self.log_file = self._folder / "logs" / f"{outgoing.name}.log"
        outgoing.files[f"logs/{self.log_file.name}"] = self.log_file

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Hold this run's record, so that no other process sends it meanwhile."""
        self._own.parent.mkdir(parents=True, exist_ok=True)
        lock = file_lock(self._own.with_suffix(".lock"))
        with suppress(Timeout):
            lock.acquire(timeout=0)
        try:
            yield
        finally:
            lock.release()
            if not self._own.exists():
                self._own.with_suffix(".lock").unlink(missing_ok=True)

    def record(self, status: str) -> _Record:
        """Write down what is to be sent."""
        record = self._now(status)
        write_atomic(self._own, to_json({"format": FORMAT, **asdict(record)}))
        return record

    def _now(self, status: str) -> _Record:
        """What there is to be sent, under names that outlive a move of the run's folder."""
        outgoing = self._outgoing
        key = f"{outgoing.verb}-{outgoing.key}" if outgoing.key else outgoing.name
        place = f"{bundle.segment(self._run.name)}/{bundle.segment(key)}"
        facts = {"run": self._run.name, "verb": outgoing.verb, "status": status}
        files = {}
        for name, path in bundle.expanded(outgoing.files).items():
            inside = path.is_relative_to(self._run.path)
            files[name] = str(path.relative_to(self._run.path) if inside else path)
        return _Record(self._uri, place, facts, files)

    def send(self, status: str) -> None:
        """Send what this run made, and then what earlier runs left."""
        with ExitStack() as turn:
            # Two processes must not write one manifest at the same time.
            with suppress(OSError):
                turn.enter_context(owned(self._folder))
            store = self._send_own(status)
            if store is not None:
                self._send_all_left_behind(store)

    def _send_own(self, status: str) -> Objects | None:
        """Returns the open store; None if it failed, which costs one warning."""
        kept = f"They are kept in {self._run.path}. The same command, or any other with this "
        kept += "run.dir, sends them"
        try:
            record = self.record(status)
        except OSError as e:
            # A full disk. What is in memory can be sent all the same.
            record = self._now(status)
            kept = f"What they are cannot be written down ({e}): only the same command sends them"
        try:
            store = Objects(self._uri, self._cfg.storage_options)
            self._upload(store, record)
            self._own.unlink(missing_ok=True)
        except (RaypipeError, OSError) as e:
            log.warning("The artifacts were not sent to artifacts.uri: %s %s", _said(e), kept)
            return None
        log.info("Artifacts: %s/%s", self._uri, record.place)
        return store

    def _send_all_left_behind(self, store: Objects) -> None:
        """Send the records of earlier runs. One that cannot be sent does not hold up the others."""
        elsewhere: dict[str, int] = Counter()
        failing_s = 0.0
        for file in sorted(self._own.parent.glob("*.json")):
            record = _read(file)
            if record is None:
                continue
            if record.uri != self._uri:
                elsewhere[record.uri] += 1
                continue
            began = time.monotonic()
            try:
                self._send_left_behind(store, file)
            except (RaypipeError, OSError) as e:
                said = "The artifacts of an earlier run were not sent, and stay in %s: %s"
                log.warning(said, file, _said(e))
                failing_s += time.monotonic() - began
            if failing_s > PATIENCE_S:
                break
        for uri, runs in elsewhere.items():
            said = "Artifacts of %d earlier runs wait for artifacts.uri=%s, in %s"
            log.info(said, runs, uri, self._own.parent)

    def _send_left_behind(self, store: Objects, file: Path) -> None:
        """Send what an earlier run could not, unless that run still lives."""
        lock = file_lock(file.with_suffix(".lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return
        try:
            # It may have been sent, or written again, before the lock was free.
            record = _read(file)
            if record is not None:
                self._upload(store, record)
                file.unlink(missing_ok=True)
        finally:
            lock.release()
        if not file.exists():
            file.with_suffix(".lock").unlink(missing_ok=True)

    def _upload(self, store: Objects, record: _Record) -> None:
        files = {name: self._run.path / path for name, path in record.files.items()}
        timed = partial(uploads.note, self._run.path / "mlflow", uploads.place_of(self._uri))
        missing = bundle.upload(store, record.place, files, record.facts, timed)
        if missing:
            log.warning(
                "%s of %s are not in artifacts.uri: they were deleted before they could be sent",
                ", ".join(missing),
                record.place,
            )


@dataclass(frozen=True)
class _Record:
    """What a run has to send. files: paths from the run's folder, or absolute ones."""

    uri: str
    place: str
    facts: dict[str, str]
    files: dict[str, str]


def _read(file: Path) -> _Record | None:
    """A record; None if it is gone, torn, or of another format."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.pop("format") != FORMAT:
            return None
        record = _Record(**content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return record if isinstance(record.files, dict) else None


def _said(error: Exception) -> str:
    # The store is opened as tables are, and its messages name a table's settings.
    return hidden(str(error)).replace("table.", "artifacts.")
