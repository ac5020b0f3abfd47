"""MLflow runs: config, metrics, the table version as dataset input, the code's commit.

Only this room imports MLflow. Every run has the tag `raypipe.key`, a hash of what determines its
result. If a finished run with the key exists, it is reused, so a rerun after a kill adds no second
run. The default store is SQLite in the run folder. `databricks` or an http address works as well;
MLflow 3 refuses file stores. Models may be registered elsewhere than runs, as in Unity Catalog
(catalog.py).

Several processes may want a run of the same key. The protocol:

1. Whoever writes a run holds a file lock of its key, in `mlflow/locks` of the run folder (or on
   this machine's disk: files.file_lock). The system frees the lock when its process dies.
2. Under the lock, `once` looks for a finished run and returns it. So a second process waits, and
   then finds the run of the first.
3. Otherwise earlier runs of the key are deleted, and a new one is created. A run that MLflow still
   calls running is deleted only if its tag `raypipe.owner` names this host and folder: this
   process holds their lock, so the writer is dead. Other owners have other locks.
4. The run is terminated as FINISHED, or as FAILED if its block raised.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast
from urllib.parse import unquote, urlsplit

from filelock import FileLock
from pydantic import Field, model_validator
from typing_extensions import Self

from raypipe.config import RunConfig, Section
from raypipe.errors import ConfigError, hidden, keep_secrets_of, one_line
from raypipe.files import file_lock
from raypipe.registry import catalog, made_by, patience
from raypipe.registry.made_whole import make_whole
from raypipe.tables import storage
from raypipe.tables.storage import StorageOptions
from raypipe.tables.table import TableVersion

if TYPE_CHECKING:
    from mlflow import MlflowClient

KEY = "raypipe.key"
MOVES = "raypipe-moves"  # the table of alias moves, where no setting names it
PREPARED_FROM = "raypipe.prepared_from"  # the version that a prepared table stands for
OF_TEST = "test_", "eval.", "gate."  # how names of metrics of test images begin
OWNER = "raypipe.owner"  # host and folder whose lock guards the run


class RegistryConfig(Section):
    """Where runs and models are registered."""

    uri: str | None = None
    """Address of the MLflow store. null: SQLite in the run folder. `env:NAME`: the address in the
    environment variable NAME, which may hold a password as no other address may."""

    registry_uri: str | None = None
    """Address of the model registry, where it is not in the same store. `databricks-uc` or
    `databricks-uc://PROFILE`: Unity Catalog. `env:NAME` as for uri. null: the store of uri, and
    Unity Catalog if that is Databricks."""

    experiment: str = "raypipe"
    """MLflow experiment of all runs; it is created if it does not exist. On Databricks a path in
    the workspace, as /Shared/raypipe or /Users/NAME/raypipe."""

    model: str | None = None
    """Name under which models are registered; in Unity Catalog catalog.schema.model. null: the
    run's name."""

    intended_use: str = ""
    """What the model is for and what it is not for, in words; its card says it."""

    data_licence: str = ""
    """Licence of the training images, for the model's card."""

    judged_images: int | None = Field(default=100_000, ge=1)
    """So many images of a split at most judge a model when it is published: its validation split,
    whose features and scores are also the reference that drift is compared with, and its test
    split. A larger split is sampled evenly, and the card says so. They are predicted by one process
    that holds their features. null: all."""

    severity_images: int = Field(default=200, ge=0, le=2_000)
    """So many validation images are shifted on purpose, nine ways each, and predicted when a model
    of single labels is published. From these, drift checks estimate the accuracy on images without
    labels. More: narrower intervals, and more time. 0: no estimate."""

    severity_s: float = Field(default=60.0, gt=0)
    """Seconds that predicting the shifted images may take at most. Where they are not enough for
    40 images, there is no estimate, and drift checks say so."""

    domain: str | None = None
    """Column that names the known domain of an image, as its camera or its site. The reference
    keeps the domain of each image, and a batch drifts if it fits no mixture of them. null: the
    job's `watch.domain`; else the source column, if the table has one."""

    group: str | None = None
    """Column that names the images that belong together, as the cells of one module. Such images
    are not independent, and drift checks know it. null: the job's `watch.group`; else each image
    stands alone."""

    alias: str = "champion"
    """Alias of the version in use. Promotion moves it; predictions and drift checks follow it."""

    moves: str | None = None
    """Delta table of all moves of aliases, a folder or an address in an object store. It fences
    promotions of several hosts. null: `raypipe-moves` beside the registry, if that is SQLite; else
    (a server, Unity Catalog) below `artifacts.uri`, if that is set; else in the run folder, which
    fences only the hosts that share it."""

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


@dataclass(frozen=True)
class Store:
    """An open MLflow store, one experiment in it, and the name models are registered under."""

    client: MlflowClient
    uri: str  # for people and records: without its password
    experiment_id: str
    model: str
    alias: str
    folder: Path  # the run's own files of the store, and its locks
    address: str = field(repr=False, default="")  # for MLflow alone: may hold a password
    registry: str = field(repr=False, default="")  # the same, of the model registry
    moves: str = ""  # the Delta table of alias moves
    moves_options: dict[str, str] | None = field(repr=False, default=None)
    is_shared: bool = True  # do all hosts of the MLflow store share that table?

    @property
    def is_catalog(self) -> bool:
        """Are the models in Unity Catalog?"""
        return catalog.is_catalog(self.registry)


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


def open_store(
    run: RunConfig, cfg: RegistryConfig, beside: Place | None = None, *, create: bool = True
) -> Store:
    """Open or create the store. Raises ConfigError if MLflow cannot open it.

    beside: where the table of moves may lie; see moves_of. create: false leaves a store as it is;
    one in a file must exist.

    The first use of a SQLite store migrates it, which takes some seconds; see make_whole.
    """
    import mlflow

    check_names(run, cfg)
    folder = run.path / "mlflow"
    if create:
        folder.mkdir(parents=True, exist_ok=True)
    uri, registry = addresses(run, cfg)
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(registry)
    began = time.monotonic()
    try:
        if create:
            for address in {uri, registry}:
                make_whole(address)
        client = mlflow.MlflowClient(uri, registry)
        artifacts = (folder / "artifacts").as_uri() if uri.startswith("sqlite") else None
        with patience.opening(), patience.told(uri):
            experiment_id = _experiment_id(client, cfg.experiment, artifacts, create)
    except Exception as e:
        if patience.no_answer(e):
            raise ConfigError(
                f"MLflow's server at {patience.host_of(uri)} does not answer",
                got=f"registry.uri={hidden(uri)}, asked for {time.monotonic() - began:.0f} s",
                rule="Runs and models are registered there",
                fix="Start it (mlflow server), or check registry.uri and the network. To wait "
                f"longer: {patience.RETRIES} and {patience.TIMEOUT_S}",
            ) from e
        raise ConfigError(
            f"The MLflow store cannot be opened: {one_line(e)}",
            got=uri,
            fix="Check registry.uri",
        ) from e
    moves = moves_of(run, cfg, beside)
    # A caller cannot tell the two apart.
    patient = cast("MlflowClient", patience.Told(client, uri, registry))
    return Store(
        patient,
        hidden(uri),
        experiment_id,
        cfg.model or run.name,
        cfg.alias,
        folder,
        uri,
        registry,
        moves.uri,
        moves.options,
        moves.is_shared,
    )


def addresses(run: RunConfig, cfg: RegistryConfig) -> tuple[str, str]:
    """Where runs are, and where models are registered. Raises ConfigError for addresses that
    Databricks does not have."""
    uri = address_of(cfg.uri) if cfg.uri else f"sqlite:///{run.path / 'mlflow' / 'mlflow.db'}"
    registry = catalog.default_registry(uri)
    if cfg.registry_uri is not None:
        registry = address_of(cfg.registry_uri, "registry.registry_uri")
    catalog.check_addresses(uri, registry)
    return uri, registry


def store_file(run: RunConfig, cfg: RegistryConfig) -> Path | None:
    """The database of a store in a file; None for a store elsewhere."""
    return _file(addresses(run, cfg)[0])


def _file(address: str) -> Path | None:
    if not address.startswith("sqlite:///"):
        return None
    # What follows ? are options. With uri=true, what stands before it is SQLite's own file:PATH.
    name, _, options = address.removeprefix("sqlite:///").partition("?")
    if "uri=true" in options.split("&"):
        name = unquote(urlsplit(name).path)
    return Path(name)


def moves_of(run: RunConfig, cfg: RegistryConfig, beside: Place | None = None) -> MovesPlace:
    """The table of alias moves. beside: a place that the hosts of a remote registry share."""
    if cfg.moves is not None:
        return MovesPlace(cfg.moves, cfg.moves_storage_options)
    file = _file(addresses(run, cfg)[1])
    if file is not None:
        # The same folder by whichever link: two runs that share the store share the table.
        return MovesPlace(str(file.absolute().resolve().parent / MOVES), cfg.moves_storage_options)
    if beside is not None and beside.uri is not None:
        options = cfg.moves_storage_options or beside.storage_options
        return MovesPlace(f"{beside.uri.rstrip('/')}/{MOVES}", options)
    mine = str(run.path / "mlflow" / MOVES)
    return MovesPlace(mine, cfg.moves_storage_options, is_shared=False)


def placed(run: RunConfig, cfg: RegistryConfig, beside: Place) -> RegistryConfig:
    """The section with its table of moves named, for those who know no other section."""
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
    if not model.strip() or set("/:'\"") & set(model):
        raise ConfigError(
            "MLflow cannot register a model under this name",
            got=model,
            rule="A model's name has no / : ' or \"",
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


def _experiment_id(client: MlflowClient, name: str, artifacts: str | None, create: bool) -> str:
    """The id of an experiment; if it does not exist, it is created, or has the id ""."""
    experiment = client.get_experiment_by_name(name)
    if experiment:
        return str(experiment.experiment_id)
    if not create:
        return ""
    return str(client.create_experiment(name, artifact_location=artifacts))


def address_of(uri: str, of: str = "registry.uri") -> str:
    """The address itself, or for `env:NAME` the value of that environment variable.

    of: the setting that has it.
    """
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


def finished_run(store: Store, key: str) -> str | None:
    """The id of the finished run with this key, or None."""
    runs = store.client.search_runs(
        [store.experiment_id],
        f"tags.`{KEY}` = '{key}' and attributes.status = 'FINISHED'",
        max_results=1,
    )
    return runs[0].info.run_id if runs else None


def once(
    store: Store,
    key: str,
    name: str,
    params: Mapping[str, Any],
    version: TableVersion | None,
    fill: Callable[[str], None],
    parent: str | None = None,
) -> str:
    """The id of the finished run with this key; if there is none, `fill` logs into a new one.

    A second process that asks meanwhile waits. `params` are the config, `version` is the table's.
    """
    # Looked up under the lock, or two processes would both find nothing.
    with _lock(store, key):
        done = finished_run(store, key)
        if done is not None:
            return done
        with _logged(store, key, name, params, version, parent) as run_id:
            fill(run_id)
        return run_id


@contextmanager
def run(
    store: Store,
    key: str,
    name: str,
    params: Mapping[str, Any],
    version: TableVersion | None,
    parent: str | None = None,
) -> Iterator[str]:
    """A new run to log into; finished when the block ends, failed when it raises.

    Earlier runs of the key are deleted, as the module's protocol says.
    """
    with _lock(store, key), _logged(store, key, name, params, version, parent) as run_id:
        yield run_id


def _lock(store: Store, key: str) -> FileLock:
    """The lock to hold while a run of this key is written."""
    locks = store.folder / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    return file_lock(locks / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.lock")


@contextmanager
def _logged(
    store: Store,
    key: str,
    name: str,
    params: Mapping[str, Any],
    version: TableVersion | None,
    parent: str | None,
) -> Iterator[str]:
    """A new run of the key, in place of earlier ones. The caller holds the key's lock."""
    # What a killed process left behind; but another host's running run is not ours to delete.
    for earlier in store.client.search_runs([store.experiment_id], f"tags.`{KEY}` = '{key}'"):
        running = earlier.info.status in ("RUNNING", "SCHEDULED")
        is_own = earlier.data.tags.get(OWNER) == _owner(store)
        if not running or is_own:
            store.client.delete_run(earlier.info.run_id)
    # mlflow.* are MLflow's own tags; its pages show them.
    tags = {
        KEY: key,
        OWNER: _owner(store),
        "mlflow.runName": name,
        "mlflow.source.name": "raypipe",
    }
    commit = code_commit()
    if commit:
        tags["mlflow.source.git.commit"] = commit
    if parent:
        tags["mlflow.parentRunId"] = parent
    if version is not None and version.origin:
        tags[PREPARED_FROM] = version.origin
    run_id = store.client.create_run(store.experiment_id, tags=tags, run_name=name).info.run_id
    # KeyboardInterrupt and SystemExit fail the run as well.
    try:
        _log_params(store, run_id, params)
        if version is not None:
            _log_dataset(store, run_id, version)
        yield run_id
        store.client.set_terminated(run_id, "FINISHED")
    except BaseException:
        store.client.set_terminated(run_id, "FAILED")
        raise


def _owner(store: Store) -> str:
    """The host and the folder whose lock guards a run of this store."""
    return f"{socket.gethostname()}:{store.folder}"


def log_history(store: Store, run_id: str, history: Sequence[Mapping[str, float]]) -> None:
    """Log every metric of every epoch; the step is the epoch."""
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    metrics = []
    for step, epoch in enumerate(history):
        for name, value in epoch.items():
            metrics.append(Metric(allowed_name(name), float(value), now, step))
    # The REST API takes at most 1,000 metrics a call.
    for start in range(0, len(metrics), 1000):
        store.client.log_batch(run_id, metrics=metrics[start : start + 1000])


def log_metrics(store: Store, run_id: str, metrics: Mapping[str, float]) -> None:
    for name, value in metrics.items():
        store.client.log_metric(run_id, allowed_name(name), float(value))


def log_once(store: Store, key: str, metrics: Mapping[str, float]) -> None:
    """Log metrics into the finished run of this key, unless it has them: a rerun takes less."""
    run_id = finished_run(store, key)
    if run_id is None:
        return
    logged = store.client.get_run(run_id).data.metrics
    log_metrics(store, run_id, {k: v for k, v in metrics.items() if allowed_name(k) not in logged})


def looks(store: Store, version: TableVersion) -> int:
    """How many runs of the experiment have metrics of test images of this table, in any version.

    A prepared table and its source have the same test images. Counted are trainings, evaluations of
    this table, and the gate's comparisons, which name no table: so it is rather too many than too
    few.
    """
    found = 0
    token = None
    while True:
        runs = store.client.search_runs([store.experiment_id], page_token=token)
        for logged in runs:
            inputs = logged.inputs.dataset_inputs if logged.inputs else []
            # Whoever shares the experiment may log data sets of other kinds.
            sources = [entry.dataset.source or "" for entry in inputs]
            named = any(json.dumps(uri) in source for uri in version.uris for source in sources)
            is_of_table = named or not sources
            of_test = any(name.startswith(OF_TEST) for name in logged.data.metrics)
            found += is_of_table and of_test
        token = runs.token
        if not token:
            return found


def allowed_name(name: str) -> str:
    """The name of a metric or parameter as MLflow takes it.

    Names hold what users chose: columns, sources, slices. `line+1` becomes `line_1-` with the first
    digits of its hash, so that it stays apart from `line 1`.
    """
    allowed = re.sub(r"[^\w. -]|^\.", "_", name)[:200]
    if allowed == name:
        return name
    return f"{allowed}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def log_text(store: Store, run_id: str, text: str, name: str) -> None:
    store.client.log_text(run_id, text, name)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"train": {"lr": 1}} -> {"train.lr": 1}"""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            leaves |= flat(value, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = value
    return leaves


def code_commit() -> str | None:
    """The commit of the code that runs, or None; see made_by.commit."""
    return made_by.commit()


def _log_params(store: Store, run_id: str, params: Mapping[str, Any]) -> None:
    from mlflow.entities import Param

    # The REST API takes at most 100 parameters a call, of at most 6,000 characters each.
    entries = [Param(allowed_name(name), str(value)[:6000]) for name, value in flat(params).items()]
    for start in range(0, len(entries), 100):
        store.client.log_batch(run_id, params=entries[start : start + 100])


def _log_dataset(store: Store, run_id: str, version: TableVersion) -> None:
    """Record the table and its version as the run's training data; and what it stands for."""
    from mlflow.data.delta_dataset_source import DeltaDatasetSource
    from mlflow.data.meta_dataset import MetaDataset
    from mlflow.entities import Dataset, DatasetInput, InputTag

    named = [(version.uri, version.version, "training")]
    if version.origin:
        uri, _, number = version.origin.rpartition("@v")
        named.append((uri, int(number), "source"))
    entries: list[DatasetInput] = []
    for uri, number_of_version, role in named:
        source = DeltaDatasetSource(path=uri, delta_table_version=number_of_version)
        dataset = MetaDataset(source, name=Path(uri).name)  # type: ignore[abstract]
        context = InputTag("mlflow.data.context", role)
        entries.append(DatasetInput(Dataset(**dataset.to_dict()), [context]))
    store.client.log_inputs(run_id, datasets=entries)
