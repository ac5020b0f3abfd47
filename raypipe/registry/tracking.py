"""Where runs and models are registered: the section `registry`, and the addresses that it means.

The default store is SQLite in the run folder. `databricks` or an http address works as well;
MLflow 3 refuses file stores. Models may be registered elsewhere than runs, as in Unity Catalog
(catalog.py). store.py opens the store, and runs.py writes into it.

A search's saved state (search/KEY/tune/tuner.pkl) names the class `RegistryConfig` of this module.
So the class stays here.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from pydantic import Field, model_validator
from typing_extensions import Self

from raypipe.config import RunConfig, Section
from raypipe.errors import ConfigError, hidden, keep_secrets_of
from raypipe.registry import catalog
from raypipe.tables import storage
from raypipe.tables.address import resolve
from raypipe.tables.storage import StorageOptions

MOVES = "raypipe-moves"  # the table of alias moves, where no setting names it

LEAST_COPIED = 40  # images, of whose changed copies an accuracy can be estimated

_SQLITE, _DRIVEN = "sqlite:///", "sqlite+pysqlite:///"
_TRUE = "true", "yes", "on", "y", "t", "1"  # as SQLAlchemy reads an option


class RegistryConfig(Section):
    """Where runs and models are registered."""

    uri: str | None = None
    """Address of the MLflow store. `env:NAME`: the address is in the environment variable NAME.
    Only there it may contain a password. null: SQLite in the run folder."""

    registry_uri: str | None = None
    """Address of the model registry, if it is not in the same store. `databricks-uc` or
    `databricks-uc://PROFILE`: Unity Catalog. `env:NAME` as for uri. null: the store of uri; Unity
    Catalog if that is Databricks."""

    experiment: str = "raypipe"
    """MLflow experiment of all runs; it is created if it does not exist. On Databricks a path in
    the workspace, as /Shared/raypipe or /Users/NAME/raypipe."""

    model: str | None = None
    """Name under which models are registered; in Unity Catalog catalog.schema.model. null: the
    run's name."""

    intended_use: str = ""
    """What the model is for and what it is not for, in words, for the model's card."""

    data_licence: str = ""
    """Licence of the training images, for the model's card."""

    judged_images: int | None = Field(default=100_000, ge=1)
    """When a model is registered, it predicts at most this number of images of the validation split
    and of the test split, for its metrics and for the reference of drift checks. A larger split is
    sampled evenly, and the card says so. One process holds the features of these images. null:
    all."""

    severity_images: int = Field(default=200, ge=0, le=2_000)
    """Number of validation images that a `single_label` model predicts in nine changed copies when
    it is registered. From these, drift checks estimate the accuracy on images without labels. More:
    narrower intervals, and more time. 0: no estimate; 1 to 39 are too few for one."""

    severity_s: float = Field(default=60.0, gt=0)
    """Most seconds for predicting the changed copies. If that is not enough for 40 images, there is
    no estimate, and drift checks say so."""

    domain: str | None = None
    """Column with the domain of an image, for example its camera or its site. The reference has the
    domain of each image, and a batch drifts if it fits no mixture of the domains. null:
    `watch.domain`; else the source column, if the table has one."""

    group: str | None = None
    """Column with the group of an image, for example the module of a cell. Images of a group are
    not independent, and drift checks count whole groups. null: `watch.group`; else each image is
    independent."""

    alias: str = "champion"
    """Alias of the version in use. Promotion moves it; predictions and drift checks follow it."""

    moves: str | None = None
    """Delta table of all moves of aliases: a folder or an address in an object store. If all hosts
    share it, only one of two simultaneous promotions succeeds. null: `raypipe-moves` beside the
    registry, if that is SQLite; else (a server, Unity Catalog) below `artifacts.uri`, if that is
    set; else in the run folder, which protects only hosts that share the folder."""

    moves_storage_options: StorageOptions = Field(default=None, repr=False)
    """Options of the store of `registry.moves`, as those of a table. Credentials among them are
    never written; they may be in the environment instead."""

    @model_validator(mode="after")
    def _moves_fit(self) -> Self:
        if self.moves is not None:
            if not self.moves.strip():
                raise ValueError("moves is empty. Name a folder or an object store, or set null")
            storage.check(self.moves, self.moves_storage_options)
        return self


def addresses(run: RunConfig, cfg: RegistryConfig) -> tuple[str, str]:
    """(where runs are, where models are registered).

    Raises ConfigError for addresses that Databricks does not have, and as address_of does.
    """
    uri = address_of(cfg.uri) if cfg.uri else f"{_SQLITE}{run.path / 'mlflow' / 'mlflow.db'}"
    registry = catalog.default_registry(uri)
    if cfg.registry_uri is not None:
        registry = address_of(cfg.registry_uri, "registry.registry_uri")
    catalog.check_addresses(uri, registry)
    return uri, registry


def address_of(uri: str, of: str = "registry.uri") -> str:
    """The address itself, or for `env:NAME` the value of that environment variable.

    of: the setting that has it. Raises ConfigError for a variable that is not set, for an address
    by which the store would be in a folder called `file:`, and for one of a store in memory.
    """
    # MLflow keeps in MLFLOW_TRACKING_URI what it was given (for_mlflow).
    address = re.sub(r"^sqlite\+pysqlite:", "sqlite:", _from_environment(uri, of))
    if _is_in_memory(address):
        raise ConfigError(
            "The MLflow store would be in memory",
            got=f"{of}={address}",
            rule="It ends with the process, and the models that are registered there with it",
            fix=f"Write sqlite:////FOLDER/mlflow.db, or set {of}=null",
        )
    if address.startswith(f"{_SQLITE}file:") and not _is_sqlite_uri(address):
        raise ConfigError(
            "The MLflow store would be in a folder called file:",
            got=f"{of}={hidden(uri)}",
            rule="sqlite:///file:PATH is SQLite's own way to name a file only with ?uri=true",
            fix="Write sqlite:////FOLDER/mlflow.db, or append uri=true to the options after ?. "
            "If a folder here is called so: sqlite:///./file:…",
        )
    return address


def _from_environment(uri: str, of: str) -> str:
    name = uri.removeprefix("env:")
    if name == uri:
        return uri
    address = os.environ.get(name)
    if not address:
        raise ConfigError(
            f"The environment variable {name} is not set",
            got=f"{of}={uri}",
            rule="env:NAME takes MLflow's address from the variable NAME",
            fix=f"export {name}=…, or set {of}",
        )
    keep_secrets_of(address)
    return address


def store_file(run: RunConfig, cfg: RegistryConfig) -> Path | None:
    """The database of a store in a file; None for a store elsewhere."""
    return file_of(addresses(run, cfg)[0])


def file_of(address: str) -> Path | None:
    """The file of a SQLite store; None for another one."""
    if not address.startswith(_SQLITE):
        return None
    # SQLAlchemy reads what comes after ? as options, and %41 as A.
    name = unquote(address.removeprefix(_SQLITE).partition("?")[0])
    if _is_sqlite_uri(address) and name.startswith("file:"):
        # SQLite does so, too, with what it was given.
        name = unquote(urlsplit(name).path)
    return Path(name)


def in_file(file: Path) -> str:
    """The address of a SQLite store, as `file_of` reads it."""
    return _SQLITE + str(file).replace("%", "%25").replace("?", "%3F")


def _is_in_memory(address: str) -> bool:
    name, _, options = address.partition("?")
    if name in ("sqlite://", _SQLITE) or str(file_of(address)) == ":memory:":
        return True
    return _is_sqlite_uri(address) and ("mode", "memory") in parse_qsl(options)


def _is_sqlite_uri(address: str) -> bool:
    """Is the part before ? SQLite's own file:PATH? The option `uri` says it."""
    options = parse_qsl(address.partition("?")[2])
    return any(name == "uri" and value.strip().lower() in _TRUE for name, value in options)


def for_mlflow(address: str) -> str:
    """The same store as MLflow has to be given it.

    Before it opens sqlite:///PATH, MLflow makes the folders of PATH, as if it was no more than a
    path. Of sqlite:///file:PATH it makes a folder `file:`, wherever the command runs, and of x%20y
    one of that name beside `x y`. An address that names the driver, too, means the same file, and
    MLflow makes no folder for it.
    """
    if set("?%") & set(address):
        return re.sub(f"^{_SQLITE}", _DRIVEN, address)
    return address


class Place(Protocol):
    """A place in an object store that hosts share: the section `artifacts`."""

    @property
    def uri(self) -> str | None: ...

    @property
    def storage_options(self) -> dict[str, str] | None: ...


@dataclass(frozen=True)
class MovesPlace:
    """The table of alias moves, and whether all hosts of the registry share it."""

    uri: str
    options: dict[str, str] | None = field(repr=False, default=None)
    is_shared: bool = True


def moves_of(run: RunConfig, cfg: RegistryConfig, beside: Place | None = None) -> MovesPlace:
    """The table of alias moves. beside: a place that the hosts of a remote registry share."""
    if cfg.moves is not None:
        return MovesPlace(cfg.moves, cfg.moves_storage_options)
    file = file_of(addresses(run, cfg)[1])
    if file is not None:
        # The same folder by whichever link: two runs that share the store share the table.
        return MovesPlace(str(file.absolute().resolve().parent / MOVES), cfg.moves_storage_options)
    if beside is not None and beside.uri is not None:
        options = cfg.moves_storage_options or beside.storage_options
        return MovesPlace(f"{beside.uri.rstrip('/')}/{MOVES}", options)
    mine = str(run.path / "mlflow" / MOVES)
    return MovesPlace(mine, cfg.moves_storage_options, is_shared=False)


def placed(run: RunConfig, cfg: RegistryConfig, beside: Place) -> RegistryConfig:
    """The section with its table of moves filled in, for code that knows no other section."""
    moves = moves_of(run, cfg, beside)
    if not moves.is_shared:
        return cfg
    named = {"moves": moves.uri, "moves_storage_options": moves.options}
    return cfg.model_copy(update=named)


def check_names(run: RunConfig, cfg: RegistryConfig) -> None:
    """Raise ConfigError for names that MLflow refuses later, when a training is over.

    In an SQLite address the part after `?` is options, and SQLAlchemy reads `%41` as `A`. So with ?
    or % in the run's folder the database would be a file elsewhere, which other runs may share.
    """
    if cfg.uri is None and set("?%") & set(str(run.path)):
        raise ConfigError(
            "MLflow's SQLite store cannot be in this folder",
            got=f"run.dir={run.path}",
            rule="In its address, sqlite:///FOLDER/mlflow.db, ? and % have a meaning",
            fix="Choose a run.dir without ? and %, or set registry.uri",
        )
    model = cfg.model or run.name
    # As a path they would lead elsewhere: MLflow refuses these as well.
    is_dots = model == "." or model.startswith("..")
    if not model.strip() or is_dots or set("/:'\"") & set(model):
        raise ConfigError(
            "MLflow cannot register a model under this name",
            got=model,
            rule="A model's name has no / : ' or \", and does not begin with two dots",
            fix="Set registry.model, or another run.name",
        )
    if not re.fullmatch(r"[\w-]+", cfg.alias) or re.fullmatch(r"(?i)latest|v\d+", cfg.alias):
        raise ConfigError(
            "MLflow cannot give a version this alias",
            got=f"registry.alias={cfg.alias}",
            rule="An alias has letters, digits, _ and -, and is neither `latest` nor like v1",
            fix="Set registry.alias=champion",
        )
    uri, registry = addresses(run, cfg)
    catalog.check_experiment(uri, cfg.experiment)
    if catalog.is_catalog(registry):
        catalog.check_names(model, cfg.alias)


def absolute(cfg: RegistryConfig) -> RegistryConfig:
    """The section for another process, whose current folder is another one."""
    changes = {} if cfg.moves is None else {"moves": resolve(cfg.moves)}
    for name in ("uri", "registry_uri"):
        uri = getattr(cfg, name)
        address = address_of(uri, f"registry.{name}") if uri else ""
        file = file_of(address)
        # What is whole stays as it is: a variable's options may hold a password.
        if file is None or file.is_absolute():
            continue
        whole = in_file(file.absolute())
        if address.startswith(f"{_SQLITE}file:"):
            # It is read twice: see file_of.
            whole = f"{_SQLITE}file:{quote(quote(str(file.absolute())))}"
        changes[name] = "".join([whole, *address.partition("?")[1:]])
    return cfg.model_copy(update=changes)
