"""The sinks of type azure_monitor of a verb: open from its start to its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from raypipe.errors import ConfigError
from raypipe.job import Job
from raypipe.monitor.monitor import Monitor
from raypipe.monitor.settings import AzureMonitorConfig


@contextmanager
def opened(job: Job, verb: str) -> Iterator[tuple[Monitor, ...]]:
    """Raises ConfigError if their packages are missing, or two are the same. At the end, deliver
    what waits.

    What an earlier run left is delivered as well. After Ctrl-C nobody waits: the next run delivers.
    """
    cfgs = [cfg for cfg in job.watch.sinks if isinstance(cfg, AzureMonitorConfig)]
    if len({(cfg.endpoint, cfg.rule) for cfg in cfgs}) < len(cfgs):
        # Each would send its own record, so all counts would be twice what they are.
        raise ConfigError(
            "Two sinks of type azure_monitor have one endpoint and rule",
            fix="Leave out one in watch.sinks",
        )
    monitors: list[Monitor] = []
    with ExitStack() as stack:
        for cfg in cfgs:
            monitor = Monitor(job.run, cfg, verb)
            monitors.append(monitor)
            stack.push(
                lambda kind, error, trace, monitor=monitor: monitor.close(
                    waits=kind is None or issubclass(kind, Exception)
                )
            )
        yield tuple(monitors)
