"""raypipe serve: the champion behind HTTP, until it is told to stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raypipe.cluster.connect import connect
from raypipe.job import Job
from raypipe.monitor.monitor import Monitor
from raypipe.monitor.recorder import Keeping
from raypipe.registry import tracking
from raypipe.serve.online import server
from raypipe.serve.signals import stopping
from raypipe.work import monitoring
from raypipe.work.find import require_store
from raypipe.work.result import Facts, Result
from raypipe.work.show import Show


@dataclass(frozen=True, repr=False)
class Served(Result):
    """A server that has stopped."""

    address: str
    model: str
    requests: str

    def facts(self) -> Facts:
        return {"stopped": self.address, "request log": self.requests}

    def summary(self) -> Facts:
        return {"address": self.address, "model": self.model, "requests": self.requests}


def serve(job: Job, show: Show) -> Served:
    """Serve until SIGTERM or SIGINT. Raises ConfigError or DataError before anything is started."""
    require_store(job.run, job.registry)
    # A missing champion, a port in use or a bad token must not cost a cluster start.
    registry = tracking.placed(job.run, job.registry, job.artifacts)
    server.check(job.run, registry, job.serve)
    with monitoring.opened(job, "serve") as monitors:
        connect(job.cluster)
        # Signals end the wait, for room as for requests. Leaving the block ends the replicas with
        # grace.
        with (
            stopping() as stop,
            server.running(job.run, registry, job.serve, _keepings(monitors), stop) as running,
        ):
            show.facts(_facts(running, job))
            server.wait(running, show.say, stop)
            done = Served(running.address, str(running.model), running.requests)
    return done


def _keepings(monitors: Sequence[Monitor]) -> tuple[Keeping, ...]:
    return tuple(monitor.keeping for monitor in monitors)


def _facts(running: server.Server, job: Job) -> Facts:
    facts: Facts = {
        "serving": running.address,
        "model": str(running.model),
        "page": f"{running.address}/",
        "OpenAPI": f"{running.address}/docs",
        "token": "asked for" if running.token else "none: only this machine can ask",
    }
    if job.serve.keep > 0:
        facts["request log"] = running.requests
    return facts
