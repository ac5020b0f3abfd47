"""The model versions that a replica holds, and how it follows an alias without a gap.

A new version is loaded beside the old one, on the thread of its role. It tries one image, and only
then takes its place: the next batch is predicted with it, the running one ends with the old. A
version that cannot be loaded changes nothing but `problem`, which health, metrics and log show. It
is tried again after a while, less and less often, because a network may come back.

A server has one task for its whole life: clients rely on the form of its answers. A version of
another task is refused.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from raypipe.errors import DataError, RaypipeError, one_line, traced
from raypipe.models.labels import Kind
from raypipe.registry.package import Package

log = logging.getLogger("raypipe")
Role = Literal["champion", "challenger"]
FIRST_RETRY_S, LAST_RETRY_S = 5.0, 300.0
# A path or an address in quotes, which may hold blanks; one without quotes; and hosts, as clients
# of HTTP write them.
_QUOTED = r"""(?<!\w)(['"])(?:(?!\1).)*[/\\](?:(?!\1).)*\1(?!\w)"""
_PLAIN = r"""[^\s'"(),;]*[/\\][^\s'"(),;]*"""
_HOST = r"""\bhost=[^\s,)]+|(?<=resolve )'[^']*'|[\w.-]+:\d{2,5}\b"""
_PLACE = re.compile(f"{_QUOTED}|{_PLAIN}|{_HOST}")


@dataclass(frozen=True)
class Target:
    """What a role should be: a registered version; None where the alias names none.

    problem: why the registry could not say.
    """

    version: str | None
    seal: str | None = None
    problem: str = ""


@dataclass(frozen=True)
class Served:
    """A loaded version. version: NAME/NUMBER."""

    version: str
    package: Package


@dataclass(frozen=True)
class Problem:
    """Why a role is not at its target. version: the one that was refused; "" for the registry."""

    version: str
    why: str
    tries: int
    retry_at: float

    @property
    def said(self) -> str:
        """`why` for everybody, as /ready asks for no token; the log has it whole."""
        # What MLflow's client says of a registry names its host.
        return without_places(self.why, self.version) if self.version else _begins(self.why)


class Source(Protocol):
    """Where versions come from: the registry's actor, or a folder in tests."""

    def targets(self) -> Mapping[Role, Target]: ...

    def files(self, role: Role, version: str) -> Mapping[str, bytes]:
        """The files of the version. Raises RaypipeError if they are not what was registered."""


class Models:
    """The versions in use by role. `of` may be called from any thread."""

    def __init__(
        self,
        source: Source,
        task: Kind,
        roles: Sequence[Role],
        every_s: float,
        told: Callable[[str, str], None],
    ) -> None:
        """told: called with (version, what became of it): "loaded" or "refused" after an attempt
        to load, "left" of a challenger without its alias, "stays" where a problem is over."""
        self.task = task
        self._source = source
        self._every_s = every_s
        self._told = told
        self._served: dict[Role, Served] = {}
        self._problems: dict[Role, Problem] = {}
        self._stop = threading.Event()
        # A challenger that never finishes loading must not keep the champion from being followed.
        self._threads = [
            threading.Thread(target=self._follow, args=(role,), name=f"follow-{role}", daemon=True)
            for role in roles
        ]

    def start(self) -> None:
        """Load the champion, then follow. Raises DataError if there is no champion to load."""
        self.look("champion")
        if "champion" not in self._served:
            problem = self._problems.get("champion")
            raise DataError(
                "The champion cannot be loaded", got=problem.why if problem else "no such alias"
            )
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()

    def of(self, role: Role) -> Served | None:
        """The version in use; None for a challenger that does not exist or could not be loaded."""
        return self._served.get(role)

    def problem(self, role: Role) -> Problem | None:
        return self._problems.get(role)

    def look(self, role: Role) -> None:
        """Ask for the role's target once, and load it if it is new. Raises nothing."""
        target = Target(None)
        try:
            target = self._source.targets().get(role, target)
        except Exception as e:
            # The registry's actor may be starting again; what is loaded stays.
            target = Target(None, problem=f"the registry does not answer: {one_line(e)}")
        try:
            self._move(role, target)
        except Exception as e:
            # Nothing may end this thread. Our own mistakes keep their traceback in the log.
            if not isinstance(e, RaypipeError):
                log.error("Loading %s failed: %s", target.version, traced(e))
            self._refuse(role, target.version or "", one_line(e))

    def _follow(self, role: Role) -> None:
        # At once, and then every few seconds: the challenger was not loaded before.
        while True:
            self.look(role)
            if self._stop.wait(self._every_s):
                return

    def _move(self, role: Role, target: Target) -> None:
        """Bring a role to its target, if that is another version than the one in use."""
        if target.problem:
            self._refuse(role, "", target.problem)
            return
        if target.version is None:
            # A champion stays when its alias is removed; a challenger leaves with its alias.
            if role == "challenger":
                left = self._served.pop(role, None)
                problem = self._problems.pop(role, None)
                if left or problem:
                    self._told(left.version if left else "", "left")
            else:
                self._refuse(role, "", "the alias names no version")
            return
        served = self._served.get(role)
        if served is not None and _same(served, target):
            if self._problems.pop(role, None):
                self._told(served.version, "stays")
            return
        # A version that was refused is tried again later, less and less often.
        problem = self._problems.get(role)
        if problem and problem.version == target.version and time.monotonic() < problem.retry_at:
            return

        # Another role may hold this version already: a challenger that was promoted.
        for other in list(self._served.values()):
            if _same(other, target):
                self._install(role, other)
                return
        loaded = load(self._source.files(role, target.version), target)
        _require_task(loaded, self.task)
        self._install(role, loaded)

    def _install(self, role: Role, served: Served) -> None:
        # One assignment: a batch sees the old version or the new one.
        self._served[role] = served
        self._problems.pop(role, None)
        self._told(served.version, "loaded")
        log.info("The %s is now %s", role, served.version)

    def _refuse(self, role: Role, version: str, why: str) -> None:
        before = self._problems.get(role)
        again = before is not None and before.version == version
        tries = before.tries + 1 if before and again else 1
        # The exponent has an end: a registry that is away is asked thousands of times.
        wait_s = min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** min(tries - 1, 10))
        self._problems[role] = Problem(version, why, tries, time.monotonic() + wait_s)
        if version:
            self._told(version, "refused")
        if not again:
            served = self._served.get(role)
            stays = f"; {served.version} stays" if served else ""
            log.warning("The %s %s is not served: %s%s", role, version, why, stays)


def without_places(text: str, version: str = "") -> str:
    """A text without paths and addresses. version: NAME/NUMBER, which stays."""
    parts = text.split(version) if version else [text]
    return version.join(_PLACE.sub("…", part) for part in parts)


def _begins(text: str) -> str:
    return text.partition(":")[0]


def load(files: Mapping[str, bytes], target: Target) -> Served:
    """A version, ready to predict. Raises DataError for files that are not those registered, and
    for a model that cannot predict an image."""
    package = Package.of(files, target.seal or "")
    side = package.side_px
    shape = 1, side, side, 3
    try:
        package.predict_pixels(np.full(shape, 128, np.uint8))
    except DataError:
        # Some models divide by the contrast. Noise says whether they have any answer.
        package.predict_pixels(np.random.default_rng(0).integers(0, 256, shape, np.uint8))
    # The model is built: its files need not stay in memory.
    package.files = {}
    return Served(str(target.version), package)


def _require_task(served: Served, task: Kind) -> None:
    kind = served.package.task.kind
    if kind != task:
        raise DataError(
            "This version is of another task",
            got=f"{served.version} has model.task={kind}",
            rule=f"This server answers model.task={task}, and clients rely on that",
            fix="Start a server of its own for it",
        )


def _same(served: Served, target: Target) -> bool:
    return served.version == target.version and served.package.seal == target.seal
