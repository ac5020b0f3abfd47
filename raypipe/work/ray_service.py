"""The champion as an application of Ray Serve, for who deploys it without `raypipe serve`.

KubeRay's RayService, `serve deploy` and `serve run` import it by name:

    import_path: raypipe.work.ray_service:app
    args: {config: /etc/raypipe/config.yaml, overrides: [serve.host=0.0.0.0, serve.port=8080]}

The replicas are those of `raypipe serve`: each listens on `serve.port` itself, and requests do not
pass through Ray. Ray Serve's proxy, which such deployments start, needs a port of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raypipe.cluster.connect import prepare_environment
from raypipe.config import Section, load, validate
from raypipe.job import Job
from raypipe.registry import tracking
from raypipe.serve.online import server
from raypipe.work.find import require_store


class ServiceArgs(Section):
    """Arguments of the application."""

    config: str
    """Path of the configuration, on the node that builds the application."""

    overrides: tuple[str, ...] = ()
    """section.key=value, as on the command line."""


def app(args: dict[str, Any]) -> Any:
    """The application of Ray Serve; args as ServiceArgs has them.

    Raises ConfigError for arguments and settings, also for serve.port=0: who deploys has to know
    the port. Raises DataError where there is no champion.
    """
    prepare_environment()
    given = validate(ServiceArgs, dict(args))
    job = load(Job, Path(given.config), given.overrides)
    require_store(job.run, job.registry)
    registry = tracking.placed(job.run, job.registry, job.artifacts)
    return server.application(job.run, registry, job.serve)
