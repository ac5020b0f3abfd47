"""Runs a verb as a Ray job.

The current folder is uploaded as the job's working directory. The job's output is printed here,
and a failed job fails this command.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from raypipe.cluster.connect import ENV, prepare_environment
from raypipe.errors import (
    ClusterError,
    ConfigError,
    RaypipeError,
    holds_secret,
    is_secret_name,
    one_line,
)

RUNTIME_ENV = Path("infra/ray/runtime_env.yaml")
VERB_CODES = 1, 2, 3
ADDRESSES = "RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"
LAST_STATUS_TRIES = 30
AGENT_TRIES = 6


def submit_job(address: str, arguments: list[str], say: Callable[[str], None]) -> int:
    """Run `raypipe ARGUMENTS` on the cluster whose dashboard is at `address`.

    Returns the exit code of the verb there. Its message is in the job's output, which is printed
    here. `say` prints one line.

    Raises ConfigError for credentials in the job's environment, ClusterError if the job cannot be
    submitted, RaypipeError if it ended without an exit code: stopped, or its node was lost.
    """
    prepare_environment()
    from ray.job_submission import JobStatus, JobSubmissionClient

    if not address.strip():
        raise ConfigError(
            "The address of --submit is blank",
            rule="It is the dashboard's, like http://HOST:8265",
            fix="Is its variable set? Without --submit the verb runs here",
        )
    environment = _environment()
    refuse_secrets(address, environment["env_vars"])
    try:
        with _own_address():
            client = JobSubmissionClient(address)
        runtime_env = environment | {"working_dir": str(Path.cwd())}
        job = _submitted(client, f"python -m raypipe {shlex.join(arguments)}", runtime_env)
    except Exception as e:
        raise ClusterError(
            f"The job cannot be submitted: {one_line(e)}",
            got=address,
            rule="The address is the dashboard's, and RAY_AUTH_MODE=token needs "
            "the cluster's token in ~/.ray/auth_token",
        ) from e
    say(f"Submitted as {job}")

    async def follow() -> None:
        async for lines in client.tail_job_logs(job):
            print(lines, end="", flush=True)

    asyncio.run(follow())
    # The log may end some moments before the job's status does.
    info = client.get_job_info(job)
    for _ in range(LAST_STATUS_TRIES):
        if JobStatus(info.status).is_terminal():
            break
        time.sleep(1)
        info = client.get_job_info(job)
    if info.status == JobStatus.SUCCEEDED:
        return 0
    code = info.driver_exit_code
    # A signal's number is negative; above 3 is no code of raypipe's.
    if info.status == JobStatus.FAILED and code in VERB_CODES:
        say(f"Job {job} ended with exit code {code}")
        return int(code)
    raise RaypipeError(
        f"Job {job} ended as {info.status}",
        got=info.message,
        fix=f"ray job logs {job}",
    )


@contextmanager
def _own_address() -> Iterator[None]:
    """Within it, Ray takes the address that it is given.

    Otherwise RAY_ADDRESS would silently replace it, and the job would go to another cluster.
    """
    kept = {name: os.environ.pop(name) for name in ADDRESSES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def _environment() -> dict[str, Any]:
    """The job's runtime environment: that of infra/ray/runtime_env.yaml, over our own variables.

    Raises ConfigError for a file that is no mapping, without a line of it: it may hold a secret.
    """
    environment: Any = {}
    if RUNTIME_ENV.exists():
        try:
            environment = yaml.safe_load(RUNTIME_ENV.read_text(encoding="utf-8")) or {}
        except (OSError, ValueError, yaml.YAMLError) as e:
            raise ConfigError(
                f"{RUNTIME_ENV} cannot be read: {getattr(e, 'problem', None) or type(e).__name__}"
            ) from None
    variables = environment.get("env_vars") or {} if isinstance(environment, dict) else None
    if not isinstance(variables, dict):
        raise ConfigError(
            f"{RUNTIME_ENV} is no runtime environment of Ray",
            rule="It is a mapping, and its env_vars are a mapping too",
        )
    return environment | {"env_vars": ENV | variables}


def _submitted(client: Any, entrypoint: str, runtime_env: dict[str, Any]) -> str:
    """Submit the job; returns its id.

    On a cluster that has just started, Ray's dashboard answers before its agents do.
    """
    for _ in range(AGENT_TRIES):
        try:
            return str(client.submit_job(entrypoint=entrypoint, runtime_env=runtime_env))
        except RuntimeError as e:
            if "No available agent" not in str(e):
                raise
            time.sleep(5)
    return str(client.submit_job(entrypoint=entrypoint, runtime_env=runtime_env))


def refuse_secrets(address: str, variables: dict[str, str]) -> None:
    """Raise ConfigError for credentials: the dashboard shows a job's environment in plain text."""
    if holds_secret(address):
        raise ConfigError(
            "The cluster's address holds a credential",
            got=address,
            fix="RAY_JOB_HEADERS in the environment may hold it",
        )
    for name, value in variables.items():
        if value and (is_secret_name(name) or holds_secret(str(value))):
            raise ConfigError(
                f"{RUNTIME_ENV} gives the job a credential, {name}",
                rule="A job's environment stands on the cluster's dashboard in plain text",
                fix=f"Take {name} out, and set it where the cluster's nodes are started",
            )
