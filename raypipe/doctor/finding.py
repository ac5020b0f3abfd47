"""What a check is asked about, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field

from raypipe.cluster.connect import ClusterConfig
from raypipe.config import RunConfig, Section
from raypipe.errors import RaypipeError
from raypipe.registry.tracking import RegistryConfig
from raypipe.serve.online.settings import ServeConfig
from raypipe.tables.table import TableConfig

State = Literal["ok", "warn", "fail", "skipped"]


class Settings(Section):
    """The sections of a configuration that a check looks at.

    It is no Job: that would import torch, which may be what is broken. The check `config` loads the
    whole configuration in a process of its own.
    """

    model_config = ConfigDict(extra="ignore")

    run: RunConfig = RunConfig()
    table: TableConfig | None = None
    registry: RegistryConfig = RegistryConfig()
    cluster: ClusterConfig = ClusterConfig()
    serve: ServeConfig = ServeConfig()
    train: dict[str, Any] = Field(default={})
    model: dict[str, Any] = Field(default={})


@dataclass(frozen=True)
class Asked:
    """What is examined: this machine and, with a configuration, the places that it names."""

    config: Path | None = None
    overrides: tuple[str, ...] = ()
    settings: Settings = field(default_factory=Settings)

    @property
    def has_config(self) -> bool:
        return self.config is not None or bool(self.overrides)


@dataclass(frozen=True)
class Mend:
    """A safe and local way out that `--fix` takes. says: what it is about to do."""

    says: str
    do: Callable[[], object]


@dataclass(frozen=True)
class Finding:
    """What one check saw. rule and way_out are empty where all is well."""

    name: str
    state: State
    seen: str
    rule: str = ""
    way_out: str = ""
    mend: Mend | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Check:
    """A check and how long it may take.

    late: the state if it has not ended by then. A network that does not answer is a failure; an
    import that takes long on a busy machine is not. of_config: it looks at places that only a
    configuration names.
    """

    name: str
    look: Callable[[Asked], Sequence[Finding]]
    limit_s: float = 10.0
    late: State = "fail"
    of_config: bool = False


def ok(name: str, seen: str) -> Finding:
    return Finding(name, "ok", seen)


def skipped(name: str, why: str) -> Finding:
    return Finding(name, "skipped", why)


def of_error(name: str, error: RaypipeError, state: State = "fail") -> Finding:
    """A finding with the four parts of an error."""
    got = "" if error.got is None else f" (got {error.got!r})"
    return Finding(name, state, f"{error.what}{got}", error.rule, error.fix)
