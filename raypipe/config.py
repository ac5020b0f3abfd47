"""One YAML + `section.key=value` overrides -> a frozen, validated model.

Each room owns the `Section` that configures it; a job composes them. defaults < YAML < overrides. An unknown key fails and
names the nearest known one, because a silently ignored `lerning_rate` costs a night of training. The resolved config is
saved with each run and loads again to the same run.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from typing_extensions import Self

from raypipe import yaml_scalars
from raypipe.errors import (
    ConfigError,
    DataError,
    hidden,
    holds_secret,
    is_secret_name,
    keep_secrets_of,
    nearest,
)
from raypipe.files import write_atomic


class Section(BaseModel):
    """A frozen group of settings that refuses keys it does not know."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        protected_namespaces=(),
        populate_by_name=True,
        hide_input_in_errors=True,
        serialize_by_alias=True,
        allow_inf_nan=False,
    )

    @model_validator(mode="after")
    def _no_credential(self) -> Self:
        """A configuration is written down: in the run's folder, MLflow, packages, reports. storage_options see to their own."""
        section = type(self).__name__.removesuffix("Config").lower()
        for name, value in self.__dict__.items():
            if name != "storage_options":
                _refuse_credentials(f"{section}.{name}", value)
        return self


def _refuse_credentials(name: str, value: Any) -> None:
    if isinstance(value, str) and holds_secret(value):
        keep_secrets_of(value)
        raise ConfigError(
            f"{name} holds a credential",
            got=hidden(value),
            rule="The configuration is written down with the run, in MLflow and in the model package",
            fix="Leave it out of the address and put it into the environment: AWS_*, AZURE_*, GOOGLE_* for tables, "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or PGPASSWORD, for MLflow; registry.uri=env:NAME takes a "
            "whole address from the variable NAME",
        )
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if (
                name.endswith(".options")
                and isinstance(inner, str)
                and inner
                and is_secret_name(str(key))
            ):
                raise ConfigError(
                    f"{name}.{key} holds a credential",
                    rule="The configuration is kept with the run and in the model package",
                    fix="Put it into the environment, as its library reads it there (HF_TOKEN for Hugging Face)",
                )
            _refuse_credentials(f"{name}.{key}", inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _refuse_credentials(name, inner)


S = TypeVar("S", bound=Section)


class RunConfig(Section):
    """Where a run keeps what it makes, and the seed of every random choice in it."""

    name: str = "run"
    dir: str = "runs/default"
    seed: int = Field(default=7, ge=0, lt=2**32)  # what every generator of random numbers takes

    @field_validator("dir")
    @classmethod
    def _folder(cls, dir: str) -> str:
        if "://" in dir:
            raise ValueError(
                "a run keeps its files in a folder of this machine or one that all nodes share, not behind a URL"
            )
        folder = Path(dir).expanduser().absolute()
        with suppress(
            PermissionError
        ):  # what we may not look at is for whoever writes there to find out
            if any(p.is_file() for p in (folder, *folder.parents)):
                raise ValueError(
                    "a run keeps its files in a folder, and this is a file or lies below one"
                )
        return dir

    @property
    def path(self) -> Path:
        return Path(self.dir).expanduser().absolute()


def load(kind: type[S], path: str | Path | None, overrides: Sequence[str] = ()) -> S:
    """Read `path`, apply `section.key=value` overrides (values are YAML), validate as `kind`.

    Raises ConfigError for a missing file, YAML that does not parse, unknown keys, and values of the wrong type or range.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        tree = _read_yaml(Path(path))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(
                "An override is not section.key=value",
                got=override,
                fix="Write it like train.lr=0.001",
            )
        try:
            value = yaml_scalars.read(text) if text else None
        except yaml.YAMLError as e:
            raise ConfigError(
                f"The value of {key} is not YAML", got=_unless_secret(key, text), fix="Quote it"
            ) from e
        set_field(tree, key.strip(), value)
    try:
        settled = yaml_scalars.settle(kind, tree)
    except RecursionError:
        raise ConfigError(
            "The configuration holds itself", rule="An anchor may not lie within itself"
        ) from None
    return validate(kind, settled)


def validate(kind: type[S], tree: dict[str, Any]) -> S:
    """A validated `kind` from a nested dict; the first few problems in one ConfigError."""
    try:
        return kind.model_validate(tree)
    except ValidationError as e:
        raise _explain(kind, e) from None


def replace(cfg: S, changes: dict[str, Any]) -> S:
    """A copy of `cfg` with dotted fields changed and validated again: how a search sets hyperparameters."""
    tree = cfg.model_dump()
    for key, value in changes.items():
        set_field(tree, key, value)
    return validate(type(cfg), tree)


def field_names(kind: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted name below `kind`, sections and leaves."""
    names: list[str] = []
    for attribute, field in kind.model_fields.items():
        name = field.alias or attribute
        names.append(prefix + name)
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                names += field_names(inner, f"{prefix}{name}.")
    return names


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested sections as dotted fields: {"train": {"lr": 0.1}} -> ("train.lr", 0.1)."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def set_field(tree: dict[str, Any], key: str, value: Any) -> None:
    """`set_field({}, "train.lr", 0.1)` -> {"train": {"lr": 0.1}}, in place."""
    *sections, leaf = key.split(".")
    for section in sections:
        below = tree.setdefault(section, {})
        if not isinstance(below, dict):
            raise ConfigError(
                f"{key} goes through {section}, which is a value and not a section",
                got=_unless_secret(key, below),
            )
        tree = below
    tree[leaf] = value


def dump(cfg: Section) -> str:
    """The resolved config as YAML; `load` reads it back to an equal config."""
    return yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def save(cfg: Section, path: Path) -> Path:
    """Write the resolved config, whole or not at all."""
    return write_atomic(path, dump(cfg))


def key_of(*parts: Any) -> str:
    """12 hex digits that name a piece of work by its inputs, so that a rerun finds what an earlier one finished."""
    text = json.dumps(
        [p.model_dump(mode="json") if isinstance(p, BaseModel) else p for p in parts],
        sort_keys=True,
        default=str,
    )
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def to_json(value: Any, indent: int | None = None, default: Callable[[Any], Any] = str) -> str:
    """JSON that every reader understands: NaN and infinities, which the standard lacks, become null."""
    written = json.dumps(value, default=default)  # Python's dialect
    return json.dumps(
        json.loads(written, parse_constant=lambda name: None), indent=indent, allow_nan=False
    )


def require_format(read: Mapping[str, Any], newest: int, where: object) -> int:
    """The format version of something kept: 1 where it names none, as before there were numbers. Raises DataError for one
    that a newer raypipe wrote: half understood, it would be misread."""
    found = read.get("format", 1)
    if not isinstance(found, int) or not 1 <= found <= newest:
        raise DataError(
            f"{where} is of a format that this raypipe does not know",
            got=found,
            rule=f"It reads formats 1 to {newest}",
            fix="Install the raypipe that made it, or a newer one",
        )
    return found


def metrics_of(read: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as `to_json` wrote them: null is NaN again."""
    return {name: math.nan if value is None else value for name, value in read.items()}


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml_scalars.read(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            "No such config file",
            got=str(path),
            fix="jobs/configs/solar.yaml is an example to start from",
        ) from None
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"The config file cannot be read: {e}", got=str(path)) from None
    except yaml.YAMLError as e:
        for mark in (getattr(e, name, None) for name in ("context_mark", "problem_mark")):
            if mark:
                mark.buffer = None  # else the message quotes the line, which may hold a credential
        raise ConfigError(
            "The config file is not YAML: " + " ".join(str(e).split()), got=str(path)
        ) from None
    if not isinstance(tree or {}, dict):
        raise ConfigError(
            "The config file is not a mapping of sections",
            got=type(yaml_scalars.settle(Any, tree)).__name__,
            rule="Its top level is `section:` lines",
        )
    return tree or {}


def _explain(kind: type[BaseModel], error: ValidationError) -> ConfigError:
    problems = [_explain_one(kind, p) for p in error.errors()]
    more = (
        f" ({len(problems) - 1} more: {'; '.join(str(p) for p in problems[1:4])})"
        if len(problems) > 1
        else ""
    )
    first = problems[0]
    return ConfigError(
        first.what + more if more else first.what, got=first.got, rule=first.rule, fix=first.fix
    )


def _explain_one(kind: type[BaseModel], problem: Any) -> ConfigError:
    name = ".".join(str(part) for part in problem["loc"])
    got = _unless_secret(name, problem["input"])
    if problem["type"] == "extra_forbidden":
        return ConfigError(
            f"Unknown config key {name}", got=got, fix=nearest(name, field_names(kind))
        )
    if problem["type"] == "missing":
        return ConfigError(
            f"Config key {name} is missing",
            rule="It has no default",
            fix=f"Add {name}=… to the command or the YAML",
        )
    rule = problem["msg"].removeprefix("Value error, ")
    if not name:  # of several sections together
        return ConfigError("The configuration contradicts itself", rule=rule)
    return ConfigError(f"Config key {name} is wrong", got=got, rule=rule)


def _unless_secret(name: str, value: Any) -> Any:
    """What an error may show of a value: of a section its keys, of what may be a credential nothing."""
    if isinstance(value, dict):
        return sorted(map(str, value))
    return (
        None if re.search("key|secret|token|password|storage_opt", name, re.IGNORECASE) else value
    )
