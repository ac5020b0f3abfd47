"""One YAML and `section.key=value` overrides become a frozen, validated model.

Each room owns the `Section` that configures it; a job composes them. Defaults are replaced by the
YAML, the YAML by overrides. An unknown key fails and names the nearest known one, because an
ignored `lerning_rate` costs a night of training. The resolved config is saved with each run, and
loads again to the same run.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from typing_extensions import Self

from raypipe import yaml_scalars
from raypipe.errors import (
    ConfigError,
    DataError,
    closest,
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
        # The docstring below a field is its description in the reference of settings. It costs
        # 0.1 s where the whole Job is imported: pydantic reads the source of each section.
        use_attribute_docstrings=True,
    )

    @model_validator(mode="after")
    def _no_credential(self) -> Self:
        """Refuse credentials: the config is written to the run's folder, MLflow and reports.

        `storage_options` have checks of their own.
        """
        section = type(self).__name__.removesuffix("Config").lower()
        for name, value in self.__dict__.items():
            if name != "storage_options":
                _refuse_credentials(f"{section}.{name}", value)
        return self


def _refuse_credentials(name: str, value: Any) -> None:
    """Raise ConfigError if the value of setting `name`, or a value inside it, is a credential."""
    if isinstance(value, str) and holds_secret(value):
        keep_secrets_of(value)
        raise ConfigError(
            f"{name} holds a credential",
            got=hidden(value),
            rule="The configuration is written down with the run, in MLflow "
            "and in the model package",
            fix="Leave it out of the address and put it into the environment: "
            "AWS_*, AZURE_*, GOOGLE_* for tables, MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD, or PGPASSWORD, for MLflow; "
            "registry.uri=env:NAME takes a whole address from the variable NAME",
        )
    if isinstance(value, Mapping):
        for key, inner in value.items():
            # `options` go to other libraries: a name alone tells that a value is secret.
            is_filled = isinstance(inner, str) and inner != ""
            if name.endswith(".options") and is_filled and is_secret_name(str(key)):
                raise ConfigError(
                    f"{name}.{key} holds a credential",
                    rule="The configuration is kept with the run and in the model package",
                    fix="Put it into the environment, as its library reads it there "
                    "(HF_TOKEN for Hugging Face)",
                )
            _refuse_credentials(f"{name}.{key}", inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _refuse_credentials(name, inner)


S = TypeVar("S", bound=Section)
# Thirty years. Locks, joins and torch's groups refuse to wait for about ten times as long.
LONGEST_S = 1e9


class RunConfig(Section):
    """Where a run keeps its files, and its seed."""

    name: str = "run"
    """Name of the run in MLflow and reports, and of its registered model."""

    dir: str = "runs/default"
    """Folder of everything that the run makes. On several nodes it must be shared."""

    seed: int = Field(default=7, ge=0, lt=2**32)
    """Seed of every random choice. The range is what all random generators accept."""

    @field_validator("dir")
    @classmethod
    def _folder(cls, dir: str) -> str:
        if not dir.strip():
            raise ValueError("a run needs a folder, and an empty name would be the current one")
        if "://" in dir:
            raise ValueError(
                "a run keeps its files in a folder of this machine, or on several nodes in one "
                "that all of them share, not behind a URL: files are locked and renamed there. "
                "Mount a shared disk (NFS, FSx, Azure Files) and name its folder. Copies go to an "
                "object store with artifacts.uri"
            )
        folder = Path(dir).expanduser().absolute()
        try:
            is_file = any(p.is_file() for p in (folder, *folder.parents))
        except PermissionError:
            return dir  # the error comes from whoever writes there
        except OSError as e:
            raise ValueError(f"no folder can have this name: {e.strerror}") from None
        if is_file:
            raise ValueError(
                "a run keeps its files in a folder, and this is a file or lies below one"
            )
        return dir

    @property
    def path(self) -> Path:
        folder = Path(self.dir).expanduser().absolute()
        # LINK/.. is what the link's target lies in. MLflow would drop both words.
        return folder.resolve() if ".." in folder.parts else folder


def load(
    kind: type[S],
    path: str | Path | None,
    overrides: Sequence[str] = (),
    given: Mapping[str, Any] | None = None,
) -> S:
    """Read `path`, apply `section.key=value` overrides (values are YAML), validate as `kind`.

    given: sections of a Python caller, which replace the file's settings before the overrides do.
    Raises ConfigError for a missing file, YAML that does not parse, unknown keys, and values of
    the wrong type or range.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        tree = _read_yaml(Path(path))
    merge(tree, given or {})
    for override in overrides:
        _override(tree, override)
    try:
        resolved = yaml_scalars.resolve(kind, tree)
    except RecursionError:
        raise ConfigError(
            "The configuration holds itself", rule="An anchor may not lie within itself"
        ) from None
    _refuse_variables(resolved)
    return validate(kind, resolved)


# Settings that say where something is, and a variable as a shell writes it.
_PLACES = {"uri", "dir", "images", "labels", "out"}
# $NAME only as a whole part of a path: c$/x is a name.
# And not where a container may be called so: az://$web.
_VARIABLE = re.compile(r"\$\{[A-Za-z_]\w*\}|(?:(?<=[^/]/)|^)\$[A-Za-z_]\w*(?=/|$)|^/\$\w+(?=/|$)")


def _refuse_variables(tree: Mapping[str, Any]) -> None:
    """Raise ConfigError for ${NAME} or $NAME in a setting that is a place: a run would make a
    folder of this name.
    """
    for name, value in leaves(tree):
        if not isinstance(value, str) or ".where." in name:
            continue
        found = _VARIABLE.search(value)
        if found and (name.rpartition(".")[2] in _PLACES or "/" in value):
            raise ConfigError(
                f"{name} holds a variable",
                got=hidden(value),
                rule=f"raypipe puts nothing in the place of {found[0]}",
                fix="Write out the place, or give it on the command line, where the shell puts the "
                f'value in: {name}="{found[0]}…"',
            )


def merge(tree: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Put the settings of `given` into `tree`, in place; returns the tree.

    Sections are merged, values replaced. Paths become text.
    """
    for name, value in given.items():
        if isinstance(value, Mapping):
            inner = tree.get(name)
            # A copy: an alias of YAML is one object in two places, and only one of them is meant.
            tree[name] = merge(dict(inner) if isinstance(inner, dict) else {}, value)
        else:
            tree[name] = str(value) if isinstance(value, PurePath) else value
    return tree


def _override(tree: dict[str, Any], override: str) -> None:
    """Apply one `section.key=value`, in place."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(
            "An override is not section.key=value",
            got=override,
            fix="Write it like train.lr=0.001",
        )
    try:
        value = yaml_scalars.read(text) if text else None
        ignored = yaml_scalars.ignored(text)
    except yaml.YAMLError as e:
        problem = getattr(e, "problem", None) or ""
        doubled = problem if "stands in line" in problem else ""
        raise ConfigError(
            f"The value of {key} is not YAML",
            got=_unless_secret(key, text),
            rule=doubled,
            fix="" if doubled else "Quote it",
        ) from e
    if ignored:
        raise ConfigError(
            f"The value of {key} holds a comment",
            got=_unless_secret(key, text),
            rule=f"YAML would ignore {ignored!r}",
            fix=f"Quote it for YAML and the shell: {key}='\"…\"'",
        )
    set_field(tree, key.strip(), value)


def validate(kind: type[S], tree: dict[str, Any]) -> S:
    """A `kind` from a nested dict. Raises one ConfigError that names the first few problems."""
    try:
        return kind.model_validate(tree)
    except ValidationError as e:
        raise _explain(kind, e) from None


def replace(cfg: S, changes: dict[str, Any]) -> S:
    """A copy of `cfg` with dotted fields changed, validated again.

    A search sets hyperparameters this way.
    """
    tree = cfg.model_dump()
    for key, value in changes.items():
        set_field(tree, key, value)
    return validate(type(cfg), tree)


def changes_nothing(cfg: Section, changes: dict[str, Any]) -> bool:
    """Has `cfg` these values already, in its dotted fields? "3" is 3, as where they are set."""
    try:
        return replace(cfg, changes).model_dump() == cfg.model_dump()
    except ConfigError:
        return False


def field_names(kind: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted name in `kind`: sections and single settings."""
    names: list[str] = []
    for attribute, field in kind.model_fields.items():
        name = field.alias or attribute
        names.append(prefix + name)
        # A section may be optional: `Section | None`. One of many in a list has no name of its own.
        is_list = get_origin(field.annotation) is tuple
        for inner in (field.annotation, *(() if is_list else get_args(field.annotation))):
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
    """`set_field({}, "train.lr", 0.1)` -> {"train": {"lr": 0.1}}, in place.

    A section that is null begins to exist.
    """
    *sections, last = key.split(".")
    for section in sections:
        inner = tree.get(section)
        if inner is None:
            inner = {}
        if not isinstance(inner, dict):
            raise ConfigError(
                f"{key} goes through {section}, which is a value and not a section",
                got=_unless_secret(key, yaml_scalars.resolve(Any, inner)),
            )
        # A copy: an alias of YAML is one object in two places, and only one of them is meant.
        tree[section] = dict(inner)
        tree = tree[section]
    tree[last] = value


def dump(cfg: Section, **more: Section) -> str:
    """The resolved config as YAML; `load` reads it back to an equal config.

    more: further sections, by name.
    """
    tree = cfg.model_dump(mode="json")
    for name, section in more.items():
        tree[name] = section.model_dump(mode="json")
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def save(cfg: Section, path: Path, **more: Section) -> Path:
    """Write the resolved config, and `more` sections; a reader never sees half of it."""
    return write_atomic(path, dump(cfg, **more))


def key_of(*parts: Any) -> str:
    """12 hex digits that name a piece of work by its inputs.

    A rerun with the same inputs gets the same key, and reuses what is stored under it.
    """
    values = [p.model_dump(mode="json") if isinstance(p, BaseModel) else p for p in parts]
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def to_json(value: Any, indent: int | None = None, default: Callable[[Any], Any] = str) -> str:
    """Standard JSON: NaN and infinities, which the standard lacks, become null."""
    # Python writes NaN and Infinity. Reading that back calls parse_constant for each of them.
    text = json.dumps(value, default=default)
    standard = json.loads(text, parse_constant=lambda name: None)
    return json.dumps(standard, indent=indent, allow_nan=False)


def require_format(read: Mapping[str, Any], newest: int, where: object) -> int:
    """The format version of a stored file; 1 if it names none.

    Raises DataError for a version above `newest`, because this raypipe could misread the file.
    """
    version = read.get("format", 1)
    if not isinstance(version, int) or not 1 <= version <= newest:
        raise DataError(
            f"{where} is of a format that this raypipe does not know",
            got=version,
            rule=f"It reads formats 1 to {newest}",
            fix="Install the raypipe that made it, or a newer one",
        )
    return version


def metrics_of(read: Mapping[str, Any]) -> dict[str, float]:
    """Metrics from JSON that `to_json` wrote: null becomes NaN again."""
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
    except IsADirectoryError:
        raise ConfigError(
            "This is a folder, and no config file",
            got=str(path),
            fix=f"Name a YAML file. For a table: --table {path} --label COLUMN",
        ) from None
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"The config file cannot be read: {e}", got=str(path)) from None
    except yaml.YAMLError as e:
        # Not str(e): it quotes the line, which may hold a credential.
        problem, mark = getattr(e, "problem", None), getattr(e, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        raise ConfigError(
            f"The config file is not YAML: {problem or 'it cannot be read'}{where}", got=str(path)
        ) from None
    if not isinstance(tree or {}, dict):
        raise ConfigError(
            "The config file is not a mapping of sections",
            got=type(yaml_scalars.resolve(Any, tree)).__name__,
            rule="Its top level is `section:` lines",
        )
    return tree or {}


def _explain(kind: type[BaseModel], error: ValidationError) -> ConfigError:
    """The first problem, with up to three more in brackets."""
    # A value that fits no member of a union is a problem of each member.
    by_name: dict[str, list[Any]] = {}
    for problem in error.errors():
        name = yaml_scalars.dotted(kind, problem["loc"])
        by_name.setdefault(name, []).append(problem)
    first, *others = [_explain_one(kind, name, found) for name, found in by_name.items()]
    if not others:
        return first
    shown = "; ".join(str(other).rstrip(".") for other in others[:3])
    what = f"{first.what} ({len(others)} more: {shown})"
    return ConfigError(what, got=first.got, rule=first.rule, fix=first.fix)


def _explain_one(kind: type[BaseModel], name: str, found: Sequence[Any]) -> ConfigError:
    """One problem of pydantic's, in our words. found: more than one are those of a union."""
    problem = found[0]
    got = _unless_secret(name, problem["input"])
    if problem["type"] == "extra_forbidden":
        key = str(problem["loc"][-1])
        if "." in key:
            # On the command line a dot is a step into a section; in a file it is part of the key.
            path = name.split(".")
            nested = ": {".join(path) + ": …" + "}" * (len(path) - 1)
            return ConfigError(
                f"Unknown config key {name}", got=got, fix=f"In a file, write {nested}"
            )
        return ConfigError(f"Unknown config key {name}", got=got, fix=_nearest_key(kind, name))
    if problem["type"] == "missing":
        return ConfigError(
            f"Config key {name} is missing",
            rule="It has no default",
            fix=f"Add {name}=… to the command or the YAML",
        )
    # Our own validators raise ValueError; pydantic adds the prefix.
    rules = [str(each["msg"]).removeprefix("Value error, ") for each in found]
    rule = "; or: ".join(dict.fromkeys(rules))
    if not name:
        # A rule about several sections together.
        return ConfigError("The configuration contradicts itself", rule=rule)
    return ConfigError(f"Config key {name} is wrong", got=got, rule=rule)


SLIP = 0.8  # so alike are a name and its plural, or two with a letter changed


def _nearest_key(kind: type[BaseModel], name: str) -> str:
    """`Did you mean …?` with a key of the same section that is nearly the same, or one of this very
    name in another section, or a similar one of the same section; else the known keys of that.
    """
    names = field_names(kind)
    section, _, last = name.rpartition(".")
    elsewhere = [key for key in names if key.rpartition(".")[2] == last]
    elsewhere.sort(key=lambda key: not key.startswith(f"{section}."))
    # By their own names: a long section makes all of its keys look alike, and like the section.
    siblings = {key.rpartition(".")[2]: key for key in names if key.rpartition(".")[0] == section}
    least = SLIP if elsewhere else 0.5
    close = siblings.get(closest(last, list(siblings), least))
    close = close or next(iter(elsewhere), None)
    if close is not None:
        return f"Did you mean {close!r}?"
    if section and siblings:
        return f"Known: {', '.join(sorted(siblings.values()))}"
    return nearest(name, names)


def _unless_secret(name: str, value: Any) -> Any:
    """The part of a value that an error may show.

    It is the keys of a section, nothing of a possible credential, else the value.
    """
    if isinstance(value, dict):
        return sorted(map(str, value))
    if re.search("key|secret|token|password|storage_opt", name, re.IGNORECASE):
        return None
    return value
