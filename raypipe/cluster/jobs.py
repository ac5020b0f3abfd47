"""The jobs of a Ray cluster, through its dashboard: submit, follow, stop and list.

A job does not depend on whoever follows it. When the connection is lost, following begins again:
Ray sends a job's log from its beginning, and what was shown already is skipped.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from raypipe.cluster import head, ray_private
from raypipe.cluster.connect import prepare_environment
from raypipe.errors import ClusterError, ConfigError, RaypipeError, nearest, one_line

log = logging.getLogger("raypipe")
ADDRESSES = "RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"
ANSWER_S = 30.0  # to wait for an answer of the dashboard
AGENT_TRIES, AGENT_S = 6, 5.0
POLL_S = 5.0
LAST_LINES_S = 10.0  # of the log, after the job has ended
PATIENCE_S = 300.0  # without a connection
STOPS_S = 60  # for a job to end by itself, once it was asked to
KILLED_S = 15.0  # for Ray to kill it then
VERB_CODES = 0, 1, 2, 3


@dataclass(frozen=True)
class JobState:
    """A job as the cluster describes it. code: the verb's exit code, if it ended with one.

    status: PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED. verb: "" for jobs of others.
    """

    job: str
    status: str
    verb: str
    entrypoint: str
    began: datetime | None
    seconds: float
    code: int | None
    message: str

    @property
    def has_ended(self) -> bool:
        return self.status in ("STOPPED", "SUCCEEDED", "FAILED")


class Lost(Exception):
    """The cluster does not answer now; it may later."""


class Jobs:
    """The jobs of one cluster. address: its dashboard's, like http://HOST:8265."""

    def __init__(self, address: str, patience_s: float = PATIENCE_S) -> None:
        """Raises ConfigError for an address of another kind, ClusterError if nobody answers."""
        prepare_environment()
        self.address = dashboard(address)
        self._patience_s = patience_s
        # Lines like "WebSocket closed" tell users nothing.
        logging.getLogger("ray.dashboard").setLevel(logging.ERROR)
        try:
            with _own_address():
                self._client = ray_private.jobs_client(self.address, ANSWER_S)
        except Exception as e:
            raise _no_answer(self.address, e) from e

    def submit(self, verb: str, entrypoint: str, runtime_env: dict[str, Any]) -> str:
        """Submit once; returns the job's id.

        The id is chosen here: where the answer is lost, the cluster is asked whether it has the
        job. Raises ClusterError.
        """
        job = f"raypipe-{verb}-{uuid.uuid4().hex[:8]}"
        tries = AGENT_TRIES
        while True:
            try:
                self._client.submit_job(
                    entrypoint=entrypoint,
                    runtime_env=runtime_env,
                    submission_id=job,
                    metadata={"raypipe": verb},
                )
                return job
            except Exception as e:
                if self._has(job):
                    return job
                # On a cluster that has just started, the dashboard answers before its agents do.
                tries -= 1
                if "No available agent" not in str(e):
                    raise _no_answer(self.address, e) from e
                if not tries:
                    raise _no_agent(self.address) from e
                time.sleep(AGENT_S)

    def state(self, job: str) -> JobState:
        """Raises Lost if the cluster does not answer, ConfigError for an unknown job."""
        try:
            return _state(self._client.get_job_info(job))
        except Exception as e:
            if "does not exist" not in str(e):
                raise Lost(one_line(e)) from e
        known = [each.job for each in self.listed()]
        raise ConfigError(f"There is no job {job!r}", fix=nearest(job, known))

    def known(self, job: str) -> JobState:
        """`state`, for who does not wait. Raises ClusterError if the cluster does not answer."""
        try:
            return self.state(job)
        except Lost as e:
            raise _no_answer(self.address, e) from e

    def listed(self) -> list[JobState]:
        """Jobs that were submitted, the last one first. Raises ClusterError."""
        try:
            found = [_state(info) for info in self._client.list_jobs() if info.submission_id]
        except Exception as e:
            raise _no_answer(self.address, e) from e
        oldest = datetime.min.replace(tzinfo=timezone.utc)
        return sorted(found, key=lambda state: state.began or oldest, reverse=True)

    def stop(self, job: str, wait_s: float = STOPS_S + KILLED_S) -> JobState:
        """Ask the job to end, and wait for it. Raises ConfigError, ClusterError.

        The state may be one that has not ended: a job that others submitted may take longer.
        """
        try:
            state = self.state(job)
            if not state.has_ended:
                self._client.stop_job(job)
            # SIGTERM first; Ray kills what has not ended after STOPS_S (submit.py).
            until = time.monotonic() + wait_s
            while not state.has_ended and time.monotonic() < until:
                time.sleep(0.5)
                state = self.state(job)
        except (Lost, RuntimeError) as e:
            raise _no_answer(self.address, e) from e
        return state

    def follow(
        self, job: str, write: Callable[[str], None], say: Callable[[str], None]
    ) -> JobState:
        """Pass on the job's output until it has ended. Raises ClusterError, ConfigError.

        write: takes text as it comes, not always whole lines. say: takes a line about the
        connection.
        """
        shown = _Shown(write)
        lost_at: float | None = None
        was_cut = False

        def found() -> None:
            nonlocal lost_at
            if lost_at is not None:
                say(f"Connected again to {self.address}")
                lost_at = None

        while True:
            try:
                state, cut = asyncio.run(self._follow_once(job, shown, found))
                if state.has_ended:
                    if cut:
                        self._show_rest(job, shown.again(), say)
                    return state
                # Some proxies pass no WebSocket on, and others cut one that is quiet for a minute.
                if cut:
                    if not was_cut:
                        say(f"The log of {job} was cut off: {cut}. It is read again")
                        was_cut = True
                    time.sleep(POLL_S)
            except Lost as e:
                if lost_at is None:
                    lost_at = time.monotonic()
                    log.debug("%s: %s", self.address, e)
                    say(f"The connection to {self.address} is lost; {job} goes on there")
                if time.monotonic() - lost_at > self._patience_s:
                    raise self._gone(job) from e
                time.sleep(1)

    def _gone(self, job: str) -> RaypipeError:
        return RaypipeError(
            f"{self.address} has not answered for {self._patience_s:.0f} s",
            rule=f"{job} may still run there",
            fix=f"raypipe jobs {self.address} --follow {job}",
        )

    def _show_rest(self, job: str, take: Callable[[str], None], say: Callable[[str], None]) -> None:
        """The log of a job that has ended, in one piece: it could not be followed to its end."""
        try:
            text = self._client.get_job_logs(job)
        except Exception as e:
            say(f"The rest of the log of {job}, if there is one, does not arrive: {one_line(e)}")
            return
        take(text)

    async def _follow_once(
        self, job: str, shown: _Shown, found: Callable[[], None]
    ) -> tuple[JobState, str]:
        """Follow over one connection. Returns when the log ends, with what cut it off, if anything
        did; raises Lost with the connection.

        found: called when the cluster has answered. A connection may die without a word, so the
        job's state is asked for beside it.
        """
        state = await asyncio.to_thread(self.state, job)
        found()
        tail = asyncio.ensure_future(self._tail(job, shown.again()))
        cut = ""
        try:
            while not tail.done():
                taken = shown.taken
                await asyncio.wait([tail], timeout=LAST_LINES_S if state.has_ended else POLL_S)
                if not state.has_ended:
                    state = await asyncio.to_thread(self.state, job)
                elif shown.taken == taken and not tail.done():
                    # The job has ended, and its log not: the connection may have died.
                    cut = f"nothing has come for {LAST_LINES_S:g} s"
                    break
        finally:
            if not tail.done():
                tail.cancel()
            try:
                with suppress(asyncio.CancelledError):
                    await tail
            except Lost as e:
                cut = str(e) or "without a word"
        state = await asyncio.to_thread(self.state, job)
        if not cut and not state.has_ended:
            cut = "it ended before the job"
        return state, cut

    async def _tail(self, job: str, take: Callable[[str], None]) -> None:
        texts = self._client.tail_job_logs(job)
        while True:
            try:
                text = await anext(texts)
            except StopAsyncIteration:
                return
            except Exception as e:
                raise Lost(one_line(e)) from e
            # Not above: what nobody takes any more is no lost connection.
            take(text)

    def _has(self, job: str) -> bool:
        with suppress(Exception):
            self._client.get_job_info(job)
            return True
        return False


class _Shown:
    """Passes on the text of a log that is read again from its beginning after each cut."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write, self._count = write, 0
        self.taken = 0  # characters that came, also those that were shown before

    def again(self) -> Callable[[str], None]:
        """Takes the log from its beginning; what was written before is skipped."""
        position = 0

        def take(text: str) -> None:
            nonlocal position
            self.taken += len(text)
            new = text[max(0, self._count - position) :]
            position += len(text)
            self._count = max(self._count, position)
            if new:
                self._write(new)

        return take


def dashboard(address: str) -> str:
    """The address of a dashboard. Raises ConfigError for another kind of address."""
    address = address.strip()
    if not address:
        raise ConfigError(
            "The address of the cluster is blank",
            rule="It is the dashboard's, like http://HOST:8265",
            fix="Is its variable set? Without --submit the verb runs here",
        )
    if re.match(r"https?://[^/]", address):
        return address.rstrip("/")
    if re.fullmatch(r"([\w.\-]+|\[[\da-fA-F:]+\]):\d+", address):
        return _of_head(address)
    raise ConfigError(
        "This is no address of a dashboard",
        got=address,
        rule="It is like http://HOST:8265, or a head's HOST:6379. ray:// is Ray Client, which "
        "cannot run Ray Train",
    )


def _of_head(address: str) -> str:
    """The dashboard of the cluster whose head is at HOST:PORT. Raises ClusterError."""
    try:
        # Ray would wait 35 s for a head that is not there.
        reason = head.silence(address)
        if reason:
            raise ConnectionError(reason)
        return ray_private.dashboard_of(address)
    except Exception as e:
        raise ClusterError(
            f"No head of a Ray cluster answers: {one_line(e)}",
            got=address,
            rule="HOST:PORT is where a head listens (6379), http://HOST:PORT its dashboard (8265)",
        ) from e


def from_environment() -> str:
    """The dashboard that the environment names. Raises ConfigError if it names none."""
    for name in ADDRESSES:
        # RAY_ADDRESS may also be a head's HOST:PORT, of a host that is called http-head.
        if os.environ.get(name, "").startswith(("http://", "https://")):
            return os.environ[name]
    raise ConfigError(
        "There is no address of a cluster",
        fix="raypipe jobs http://HOST:8265, or set RAY_API_SERVER_ADDRESS",
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


def _no_agent(address: str) -> ClusterError:
    return ClusterError(
        "The cluster has no agent that could start a job",
        got=address,
        rule="Each node runs one, on port 52365 unless ray start says otherwise: a second cluster "
        "on the host finds the port taken",
        fix="Start that cluster with --dashboard-agent-listen-port=52366",
    )


def _no_answer(address: str, error: Exception) -> ClusterError:
    # Ray's advice on tokens is longer than a line; the rule below says the same.
    reason = one_line(str(error).partition("Ensure that the token")[0])
    return ClusterError(
        f"The cluster refuses, or does not answer: {reason}",
        got=address,
        rule="The address is the dashboard's, and RAY_AUTH_MODE=token needs the cluster's token "
        "in ~/.ray/auth_token",
    )


def _state(info: Any) -> JobState:
    began = ended = None
    # Milliseconds since 1970.
    if info.start_time:
        began = datetime.fromtimestamp(info.start_time / 1000, timezone.utc)
        ended = (info.end_time or time.time() * 1000) / 1000
    code = info.driver_exit_code
    status = str(getattr(info.status, "value", info.status))
    # A signal's number is negative; above 3 is no code of raypipe's.
    is_code = status in ("SUCCEEDED", "FAILED") and code in VERB_CODES
    return JobState(
        info.submission_id,
        status,
        (info.metadata or {}).get("raypipe", ""),
        info.entrypoint,
        began,
        max(0.0, ended - began.timestamp()) if began and ended else 0.0,
        int(code) if is_code else None,
        info.message or "",
    )
