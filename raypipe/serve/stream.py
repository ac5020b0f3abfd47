"""Follows a table: predicts the rows of its new versions, in micro-batches, until it is stopped.

A micro-batch is a prediction of the newest version with since=last (batch.py), so its rows are the
same as those of a batch, each once, and a drift check reads them as one. There is no checkpoint
beside the predictions: what is committed there says where to go on, after SIGTERM as after SIGKILL.
Two streams at once share the work's result: each piece is kept of the first.

Back-pressure: one micro-batch at a time. While it is predicted, versions gather, and the next
micro-batch has them all; its memory is bounded as a batch's is. The model is the champion when a
micro-batch begins. A new champion predicts all rows of the table anew: its predictions are another
line.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from raypipe.config import RunConfig
from raypipe.errors import ConfigError
from raypipe.registry import promote
from raypipe.registry.tracking import Store
from raypipe.serve import batch
from raypipe.serve.batch import Calls, NothingToPredict, PredictConfig, Stopped
from raypipe.serve.signals import stopping
from raypipe.tables.table import ImageTable, TableConfig

log = logging.getLogger("raypipe")
MOST_POLL_S = 5.0
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
        stream = _Stream(store, run, source, replace_since(cfg), calls, show)
        while not stop.is_set():
            stream.catch_up()
            if cfg.follow == "once":
                break
            stop.wait(min(cfg.latency_s / 4, MOST_POLL_S))
    return stream.result


def replace_since(cfg: PredictConfig) -> PredictConfig:
    return cfg.model_copy(update={"since": "last"})


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
        self._seen: tuple[int, str] | None = None
        uri = batch.place(run, cfg)
        self.result = StreamResult(uri, self._table.uri, None, None, 0, 0)

    def catch_up(self) -> None:
        """Bring the predictions up to the newest version."""
        newest = self._table.newest()
        model = promote.require_champion(self._store)
        if self._seen == (newest, str(model)):
            return
        began = time.monotonic()
        try:
            with self._show(f"Predicting {self._table.uri}@v{newest}") as tick:
                calls = replace(self._calls, progress=tick)
                done = batch.bring(self._store, self._run, self._source, self._cfg, calls, model)
        except Stopped:
            return
        except NothingToPredict:
            self._seen = (newest, str(model))
            return
        # A version that came meanwhile may be among them.
        self._seen = (done.version.version, str(model))
        if done.made:
            seconds = time.monotonic() - began
            log.info("%s: %d rows in %.1f s", done.version, done.made, seconds)
        self.result = replace(
            self.result,
            model=str(model),
            version=done.version.version,
            rows=self.result.rows + done.made,
            micro_batches=self.result.micro_batches + bool(done.made),
        )
