"""Where events go: the log, webhooks, Azure Monitor. None of them fails the work it tells of."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Annotated, Protocol

from pydantic import Field

from raypipe.config import RunConfig
from raypipe.monitor.monitor import Monitor
from raypipe.monitor.settings import AzureMonitorConfig
from raypipe.watch.events import Event
from raypipe.watch.sinks import webhook
from raypipe.watch.sinks.azure_monitor import AzureMonitor
from raypipe.watch.sinks.log import Log, LogConfig
from raypipe.watch.sinks.webhook import WebhookConfig

log = logging.getLogger("raypipe")
AnySink = LogConfig | WebhookConfig | AzureMonitorConfig
SinkConfig = Annotated[AnySink, Field(discriminator="type")]


class Sink(Protocol):
    """Takes events. `send` neither raises nor takes longer than the sink was given."""

    def send(self, event: Event) -> None: ...


class Sinks:
    """All sinks of a job. A fault of one is one warning, and the others get the event."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)
        self._warned: set[int] = set()

    def send(self, *events: Event) -> None:
        for event in events:
            for number, sink in enumerate(self._sinks):
                try:
                    sink.send(event)
                except Exception as e:  # a sink is never worth a night's check
                    if number not in self._warned:
                        self._warned.add(number)
                        kind = type(sink).__name__
                        # Its text may hold an address.
                        log.warning("The sink %s failed: %s", kind, type(e).__name__)


def opened(run: RunConfig, sinks: Sequence[AnySink], monitors: Sequence[Monitor] = ()) -> Sinks:
    """The sinks of these settings. Raises ConfigError for an address or a secret that is not there.

    It is called before the work, which must not end because of them. monitors: those of type
    azure_monitor, which tell of more than events, and so are opened and closed by the verb.
    """
    made: list[Sink] = [AzureMonitor(monitor) for monitor in monitors]
    for cfg in sinks:
        if isinstance(cfg, LogConfig):
            made.append(Log())
        elif isinstance(cfg, WebhookConfig):
            made.append(webhook.opened(run, cfg))
    return Sinks(made)
