"""One sink of type azure_monitor: it keeps records, and a thread of it sends them."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from raypipe.config import RunConfig
from raypipe.errors import one_line
from raypipe.monitor import ingestion
from raypipe.monitor.recorder import Keeping, Recorder
from raypipe.monitor.sender import Sender
from raypipe.monitor.settings import AzureMonitorConfig

log = logging.getLogger("raypipe")


class Monitor:
    """Open from the start of a verb to its end."""

    def __init__(self, run: RunConfig, cfg: AzureMonitorConfig, verb: str) -> None:
        """Raises ConfigError if the packages are missing, before any work."""
        began = time.thread_time()
        ingestion.require()
        self._cfg = cfg
        most = int(cfg.spool_mb * 2**20)
        # What belongs to no training and no check belongs to this call.
        self.keeping = Keeping(cfg.folder(run), most, uuid.uuid4().hex[:12], run.name, verb)
        self._recorder = Recorder(self.keeping)
        host = str(urlsplit(cfg.endpoint).hostname)
        self._sender = Sender(self._recorder, ingestion.Ingestion(cfg), cfg.every_s, host)
        self._opened_cpu_s = time.thread_time() - began

    def note(self, stream: str, values: Mapping[str, Any]) -> None:
        """Keep a record; never raises, and never waits for the network."""
        self._recorder.note(stream, values)

    def close(self, waits: bool = True) -> None:
        """Deliver what waits, for within_s at most. Never raises.

        waits: false leaves it to the next run.
        """
        try:
            self._sender.close(self._cfg.within_s if waits else 0.0)
        except Exception as e:
            log.warning("Azure Monitor: %s: %s", type(e).__name__, one_line(e))

    def spent(self) -> dict[str, float]:
        """What it took so far: CPU seconds of records and of deliveries, and how many records."""
        noted = self._recorder.cpu_s
        all_s = self._opened_cpu_s + noted + self._sender.cpu_s
        return {"cpu_s": all_s, "note_cpu_s": noted, "records": self._recorder.noted}
