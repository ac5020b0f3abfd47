"""Runs a verb as a Ray job: packs what it needs, submits it once, follows it to its exit code."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from raypipe import failures
from raypipe.cluster import luggage
from raypipe.cluster.connect import ENV
from raypipe.cluster.jobs import STOPS_S, Jobs, JobState, dashboard
from raypipe.errors import (
    ConfigError,
    RaypipeError,
    hidden,
    holds_secret,
    is_secret_name,
    nearest,
    one_line,
)

RUNTIME_ENV = Path("infra/ray/runtime_env.yaml")
# Parts of a runtime environment that say what travels: that is ours to choose.
OURS = "working_dir", "excludes"
# With it, Ray knows more fields than its own.
PLUGINS = "RAY_RUNTIME_ENV_PLUGINS"
# Ray kills a job that was asked to end after 3 s, if its environment does not say otherwise. A
# prediction commits what its workers have begun, and a training saves its step.
ENDS_WITHIN = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOPS_S)}

_VARIABLE = re.compile(r"\$\{\w+\}")


@dataclass(frozen=True)
class Command:
    """`raypipe VERB [CONFIG] ARGUMENTS` and what else it needs there.

    modules: sources of the user's own modules by path. bring: paths below the current folder.
    """

    verb: str
    config: Path | None
    arguments: Sequence[str]
    modules: Mapping[str, bytes] = field(default_factory=dict)
    bring: Sequence[str] = ()


def submit(address: str, command: Command, say: Callable[[str], None]) -> tuple[Jobs, str]:
    """Submit a verb to the cluster whose dashboard is at `address`; returns its id there.

    Raises ConfigError for credentials in the job's environment, ClusterError if the job cannot be
    submitted.
    """
    address = dashboard(address)
    environment = _environment()
    refuse_secrets(address, environment["env_vars"])
    others = {name: value for name, value in environment.items() if name != "env_vars"}
    refuse_in_packages([others, *_lines_of_files(others)])
    bring = luggage.below_here(list(command.bring))
    jobs = Jobs(address)
    with luggage.packed(command.config, command.modules, bring) as (folder, config):
        words = [str(Path.cwd()), config or "-", command.verb, *command.arguments]
        entrypoint = f"python -m raypipe.submitted {shlex.join(words)}"
        job = jobs.submit(command.verb, entrypoint, environment | {"working_dir": str(folder)})
    say(f"Submitted as {job}; raypipe jobs {address} --stop {job} ends it")
    return jobs, job


def follow(jobs: Jobs, job: str, as_json: bool, say: Callable[[str], None]) -> int:
    """Show the job's output until it ends; returns the exit code of its verb.

    as_json: only the verb's JSON line goes to stdout, all else to stderr.

    Raises RaypipeError if it ended without an exit code (stopped, or its node was lost), or if the
    cluster has gone.
    """
    output = _Output(as_json)
    goes_on = f"{job} continues without this command"
    again = f"raypipe jobs {jobs.address} --follow {job}"

    def take(text: str) -> None:
        with _written(goes_on, f"{again}, or --stop {job}"):
            output.take(text)

    try:
        # As Ctrl-C: the job does not end with this command, which has to be said.
        with failures.on_sigterm(_interrupt):
            state = jobs.follow(job, take, say)
    except KeyboardInterrupt:
        raise RaypipeError(goes_on, fix=f"{again}, or --stop {job}") from None
    code = code_of(state, jobs.address)
    ended = f"{job} ended with exit code {code}"
    with _written(ended, f"{again}{' --json' * as_json} shows it again"):
        output.end(code)
    if code:
        say(f"Job {job} ended with exit code {code}")
    return code


@contextmanager
def _written(rule: str, fix: str) -> Iterator[None]:
    """Raise RaypipeError if what is printed within cannot be written: nobody reads it, or the disk
    is full."""
    try:
        yield
    except OSError as e:
        failures.mute_stdout()
        what = f"This command's output cannot be written: {e.strerror}"
        raise RaypipeError(what, rule=rule, fix=fix) from None


def _interrupt() -> None:
    raise KeyboardInterrupt


def code_of(state: JobState, address: str) -> int:
    """The exit code of the verb. Raises RaypipeError if it was stopped, or ended without one."""
    if state.code is not None:
        return state.code
    if state.status == "SUCCEEDED":
        return 0
    if state.status == "STOPPED":
        raise RaypipeError(
            f"Job {state.job} was stopped",
            rule="What it had finished is kept",
            fix=f"Submit the same command again to go on; raypipe jobs {address} --follow "
            f"{state.job} shows how far it was",
        )
    if "runtime_env setup failed" in state.message:
        raise RaypipeError(
            f"The cluster cannot make the environment of job {state.job}",
            got=_last_error(state.message),
            rule=f"{RUNTIME_ENV} of the folder where it was submitted names packages and variables",
            fix="Mend it there, or install what it names on the cluster's nodes",
        )
    raise RaypipeError(
        f"Job {state.job} ended as {state.status} without an exit code",
        got=state.message or None,
        fix=f"raypipe jobs {address} --follow {state.job} shows its output",
    )


def _last_error(text: str) -> str:
    """The last line of Ray's report that tells of an error, else the last one."""
    lines = [line.strip() for line in text.replace("\\n", "\n").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return one_line((errors or lines)[-1])


class _Output:
    """Where the job's output goes. Its stdout and stderr come as one text."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._rest = ""
        self._last = ""

    def take(self, text: str) -> None:
        if not self._as_json:
            print(text, end="", flush=True)
            return
        # The last line that is a JSON object is the verb's; each earlier one was not.
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if _is_object(line):
                self._tell(self._last)
                self._last = line
            else:
                self._tell(line)

    def end(self, code: int) -> None:
        """The job has ended. Raises RaypipeError where it succeeded without its JSON line."""
        if not self._as_json:
            return
        self.take("\n" if self._rest else "")
        if self._last:
            print(self._last, flush=True)
        elif code == 0:
            raise RaypipeError("The job ended well, but its JSON line did not arrive")

    def _tell(self, line: str) -> None:
        if line:
            print(line, file=sys.stderr, flush=True)


def _is_object(line: str) -> bool:
    if not line.startswith("{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _environment() -> dict[str, Any]:
    """The job's runtime environment: that of infra/ray/runtime_env.yaml, over our own variables.

    Raises ConfigError for a file that is no mapping, without a line of it: it may hold a secret,
    and for a field that Ray would ignore.
    """
    # Ray takes a second to import, and only a submission needs it.
    from ray.runtime_env import RuntimeEnv

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
    unknown = [] if PLUGINS in os.environ else sorted({*environment} - RuntimeEnv.known_fields)
    if unknown:
        raise ConfigError(
            f"{RUNTIME_ENV}: Ray knows no {unknown[0]}, and would ignore it",
            fix=nearest(unknown[0], sorted(k for k in RuntimeEnv.known_fields if k[0] != "_")),
        )
    others = {name: value for name, value in environment.items() if name not in OURS}
    return others | {"env_vars": ENV | ENDS_WITHIN | variables}


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


def _lines_of_files(environment: Mapping[str, Any]) -> list[str]:
    """The lines of files that list packages: Ray reads them here, and sends what they hold."""
    found: list[str] = []
    for name in ("pip", "uv", "conda"):
        given = environment.get(name)
        if isinstance(given, Mapping):
            given = given.get("packages")
        if isinstance(given, str):
            # Or it is the name of an environment of conda.
            with suppress(OSError, UnicodeDecodeError):
                found += Path(given).read_text(encoding="utf-8").splitlines()
    return found


def refuse_in_packages(value: Any) -> None:
    """Raise ConfigError for a credential in what is installed for a job, as in an index's address.

    `${NAME}` is none: pip puts in the variable of the node.
    """
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            refuse_in_packages(each)
    elif isinstance(value, str) and holds_secret(_VARIABLE.sub("", value)):
        raise ConfigError(
            f"{RUNTIME_ENV} gives the job a credential",
            got=hidden(value),
            rule="A job's environment stands on the cluster's dashboard in plain text",
            fix="Write ${NAME} in its place, and set NAME where the cluster's nodes are started",
        )
