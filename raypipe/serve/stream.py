"""Follows a table: predicts the rows of its new versions, in micro-batches, until it is stopped.

A micro-batch is a prediction of the newest version with since=last (batch.py), so its rows are the
same as those of a batch, each once, and a drift check reads them as one. There is no checkpoint
beside the predictions: what is committed there says where to go on, after SIGTERM as after SIGKILL.
Two streams at once share the work's result: each piece is kept of the first.

Back-pressure: one micro-batch at a time. While it is predicted, versions gather, and the next
micro-batch has them all; its memory is bounded as a batch's is. The model is the champion when a
micro-batch begins. A new champion predicts all rows of the table anew: its predictions are another
line.

A table, registry or storage that cannot be reached for a while is tried again, less and less often.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from raypipe.config import RunConfig
from raypipe.errors import ClusterError, ConfigError, one_line
from raypipe.registry import promote
from raypipe.registry.store import Store
from raypipe.registry.versions import ModelVersion
from raypipe.serve import batch
from raypipe.serve.batch import Calls, NothingToPredict, PredictConfig, Stopped
from raypipe.serve.signals import stopping
from raypipe.tables.table import ImageTable, TableConfig, TableVersion

log = logging.getLogger("raypipe")
MOST_POLL_S = 5.0
MOST_RETRY_S = 60.0
Show = Callable[[str], AbstractContextManager[Callable[..., None]]]


@dataclass(frozen=True)
class StreamResult:
    """What a stream has done. version: the last that it finished; None if none.

    out: the address of the predictions. rows: that it predicted, in so many micro-batches.
    """

    out: str
    table: str
    model: str | None
    version: int | None
    rows: int
    micro_batches: int


def follow(
    store: Store,
    run: RunConfig,
    source: TableConfig,
    cfg: PredictConfig,
    calls: Calls,
    show: Show = lambda label: nullcontext(lambda done, total: None),
) -> StreamResult:
    """Predict the table's new rows until SIGTERM or SIGINT; with cfg.follow=once, those so far.

    show: a label -> a block in which the progress of one micro-batch is shown.
    On a signal the rows that are being predicted are committed, and the rest waits for the next
    start. Raises ConfigError for a source with a version of its own, DataError as tables do.
    """
    if source.version is not None:
        raise ConfigError(
            "A stream follows the newest version",
            got=f"version={source.version}",
            fix="Leave the table's version out",
        )
    with stopping() as stop:
        # A quarter to see the version, a quarter until the first commit, half for the workers.
        calls = replace(calls, stop=stop.is_set, commit_s=cfg.latency_s / 4)
        incremental = cfg.model_copy(update={"since": "last"})
        stream = _Stream(store, run, source, incremental, calls, show)
        while not stop.is_set():
            again_s = min(cfg.latency_s / 4, MOST_POLL_S)
            try:
                stream.catch_up()
            except Exception as e:
                # What is wrong at the start stays wrong; what comes later may pass.
                if cfg.follow == "once" or not stream.has_begun or isinstance(e, ClusterError):
                    raise
                again_s = max(again_s, stream.failed(e))
            if cfg.follow == "once":
                break
            stop.wait(again_s)
    return stream.result


class _Stream:
    """Where a stream is."""

    def __init__(
        self,
        store: Store,
        run: RunConfig,
        source: TableConfig,
        cfg: PredictConfig,
        calls: Calls,
        show: Show,
    ) -> None:
        self._store, self._run, self._source = store, run, source
        self._cfg, self._calls, self._show = cfg, calls, show
        self._table = ImageTable.open(source)
        # What was brought last: nothing is looked at until the version or the champion changes.
        self._seen: tuple[str, str] | None = None
        self._failures = 0
        self._said = ""
        uri = batch.place(run, cfg)
        self.result = StreamResult(uri, self._table.uri, None, None, 0, 0)

    @property
    def has_begun(self) -> bool:
        """Has it caught up once?"""
        return self._seen is not None

    def failed(self, error: Exception) -> float:
        """Say why it could not catch up, each reason once; returns the seconds until it tries
        again.
        """
        self._failures += 1
        # The exponent has an end: the table may be away for days.
        again_s: float = min(MOST_RETRY_S, 2.0 ** min(self._failures, 10))
        reason = one_line(error)
        if reason != self._said:
            self._calls.say(f"The stream waits, and tries again: {reason}")
        self._said = reason
        return again_s

    def catch_up(self) -> None:
        """Bring the predictions up to the newest version."""
        newest = self._table.newest()
        model = promote.require_champion(self._store)
        if self._seen != (newest.identity, str(model)):
            self._bring(newest, model)
        if self._failures:
            self._calls.say("The stream goes on")
        self._failures = 0
        self._said = ""

    def _bring(self, newest: TableVersion, model: ModelVersion) -> None:
        """Predict what is new. Where it was asked to stop, the rest stays for the next start."""
        began = time.monotonic()
        try:
            with self._show(f"Predicting {newest}") as tick:
                calls = replace(self._calls, progress=tick)
                done = batch.bring(self._store, self._run, self._source, self._cfg, calls, model)
        except Stopped:
            return
        except NothingToPredict:
            self._seen = (newest.identity, str(model))
            return
        # A version that came meanwhile may be among them.
        self._seen = (done.version.identity, str(model))
        made = done.made.images
        if made:
            seconds = time.monotonic() - began
            log.info("%s: %d rows in %.1f s", done.version, made, seconds)
        self.result = replace(
            self.result,
            model=str(model),
            version=done.version.version,
            rows=self.result.rows + made,
            micro_batches=self.result.micro_batches + bool(made),
        )
