"""The one process of a server that talks to MLflow: which version is wanted, and its files.

Replicas ask it, so none of them imports MLflow (0.25 GB each), and only its node needs to reach the
registry. Ray Serve starts it again when it dies; replicas go on with what they have loaded.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from raypipe.config import RunConfig
from raypipe.errors import DataError, RaypipeError, one_line
from raypipe.registry import fetching, promote, versions
from raypipe.registry.store import Store, open_store
from raypipe.registry.tracking import RegistryConfig
from raypipe.registry.versions import ModelVersion
from raypipe.serve.online.models import Role, Target
from raypipe.serve.online.settings import ServeConfig

REMEMBERED = 16  # versions whose files may still be asked for
# A replica that has missed so many looks at the alias, and these seconds, is gone.
FEWEST_ASKS, SILENT_S = 10, 10.0


class Registry:
    """Answers replicas; several may ask at once."""

    def __init__(
        self,
        run: RunConfig,
        registry: RegistryConfig,
        cfg: ServeConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = open_store(run, registry)
        self._cfg = cfg
        self._clock = clock
        self._lock = threading.Lock()
        self._asked_at = -math.inf
        self._targets: dict[Role, Target] = {}
        self._versions: dict[str, ModelVersion] = {}
        # By replica: when it asked last, and what it serves, for who started the server.
        self._reports: dict[str, tuple[float, Mapping[str, str]]] = {}

    def targets(
        self, replica: str = "", report: Mapping[str, str] | None = None
    ) -> dict[Role, Target]:
        """What each role should be. Many replicas cost one question to MLflow."""
        if report is not None:
            self._reports[replica] = self._clock(), report
        with self._lock:
            if self._clock() - self._asked_at > self._cfg.follow_s / 2:
                self._targets = self._ask()
                self._asked_at = self._clock()
            return self._targets

    def files(self, role: Role, version: str) -> dict[str, bytes]:
        """The files of a version that `targets` named. Raises DataError for an altered package."""
        named = self._versions.get(version)
        if named is None:
            raise DataError("This version is no target any more", got=version)
        try:
            return dict(fetching.fetch(self._store, named).files)
        except RaypipeError:
            raise
        except Exception as e:
            # Beyond this process it would be a traceback of Ray's.
            raise RaypipeError(f"The registry does not give its files: {one_line(e)}") from e

    def reports(self) -> dict[str, Mapping[str, str]]:
        """What the replicas reported last, without those that have not asked for long: one that was
        replaced would be heard for ever beside its successor."""
        since = self._clock() - FEWEST_ASKS * self._cfg.follow_s - SILENT_S
        told = list(self._reports.items())
        return {replica: report for replica, (at, report) in told if at >= since}

    def _ask(self) -> dict[Role, Target]:
        targets: dict[Role, Target] = {"champion": self._target("")}
        if self._cfg.challenger is not None:
            targets["challenger"] = self._target(self._cfg.challenger.alias)
        return targets

    def _target(self, alias: str) -> Target:
        """The version that an alias names; "": the champion's, or the one that is pinned."""
        try:
            found = self._find(alias)
        except Exception as e:
            # MLflow raises what its store does: a lock, a lost connection, a refused login.
            return Target(None, problem=f"the registry does not answer: {one_line(e)}")
        if found is None:
            return Target(None)
        name = str(found)
        # Replicas ask for the files soon after; older versions are forgotten.
        self._versions.pop(name, None)
        self._versions[name] = found
        while len(self._versions) > REMEMBERED:
            self._versions.pop(next(iter(self._versions)))
        return Target(name, found.seal)

    def _find(self, alias: str) -> ModelVersion | None:
        if not alias and self._cfg.version is not None:
            return pinned(self._store, self._cfg.version)
        store = replace(self._store, alias=alias) if alias else self._store
        return promote.champion(store)


def pinned(store: Store, number: int) -> ModelVersion:
    """The version with this number. Raises DataError if there is none."""
    fix = "Set serve.version to one of them, or leave it out to follow the alias"
    return versions.require(store, number, fix)
