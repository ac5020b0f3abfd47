"""The sinks of type azure_monitor of a verb: open from its start to its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from raypipe.job import Job
from raypipe.monitor.monitor import Monitor
from raypipe.monitor.settings import AzureMonitorConfig


@contextmanager
def opened(job: Job, verb: str) -> Iterator[tuple[Monitor, ...]]:
    """Raises ConfigError if their packages are missing. At the end, deliver what waits.

    What an earlier run left is delivered as well. After Ctrl-C nobody waits: the next run delivers.
    """
    monitors: list[Monitor] = []
    with ExitStack() as stack:
        for cfg in job.watch.sinks:
            if isinstance(cfg, AzureMonitorConfig):
                monitor = Monitor(job.run, cfg, verb)
                monitors.append(monitor)
                stack.push(
                    lambda kind, error, trace, monitor=monitor: monitor.close(
                        waits=kind is None or issubclass(kind, Exception)
                    )
                )
        yield tuple(monitors)
