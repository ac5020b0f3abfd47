"""An open MLflow store: the client, the experiment of the runs, and the name of the models.

Only this room imports MLflow.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, cast

from raypipe import stores
from raypipe.config import RunConfig
from raypipe.errors import ConfigError, hidden, one_line
from raypipe.registry import catalog, patience
from raypipe.registry.made_whole import make_whole
from raypipe.registry.tracking import (
    Place,
    RegistryConfig,
    addresses,
    check_names,
    file_of,
    for_mlflow,
    moves_of,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger("raypipe")
# Questions by which a server's speed is known. The first one opens the connection.
ASKED = 3


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
    runs, models = for_mlflow(uri), for_mlflow(registry)
    mlflow.set_tracking_uri(runs)
    mlflow.set_registry_uri(models)
    began = time.monotonic()
    try:
        if create:
            for address in {uri, registry}:
                file = file_of(address)
                if file is not None:
                    file.parent.mkdir(parents=True, exist_ok=True)  # as MLflow would
                make_whole(address)
        client = mlflow.MlflowClient(runs, models)
        artifacts = (folder / "artifacts").as_uri() if uri.startswith("sqlite") else None
        with patience.opening(), patience.told(uri):
            experiment_id = _experiment_id(client, cfg.experiment, artifacts, create)
    except ConfigError:
        raise
    except Exception as e:
        # No address is wrong where the disk of a store in a file is full.
        if stores.is_full(e):
            raise
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
    patient = cast("MlflowClient", patience.Told(client, runs, models))
    return Store(
        patient,
        hidden(uri),
        experiment_id,
        cfg.model or run.name,
        cfg.alias,
        folder,
        runs,
        models,
        moves.uri,
        moves.options,
        moves.is_shared,
    )


def answer_s(store: Store) -> float:
    """Seconds that the server of runs takes for a question; 0: the store is a file, which is asked
    as fast as our own code runs.
    """
    if not patience.host_of(store.address):
        return 0.0
    took_s = []
    try:
        for _ in range(ASKED):
            began = time.perf_counter()
            store.client.get_experiment(store.experiment_id)
            took_s.append(time.perf_counter() - began)
    # An estimate ends no search: whoever needs the answer says what is wrong.
    except Exception as e:
        log.info("How fast MLflow's server answers is not known: %s", one_line(e))
        return 0.0
    return median(took_s)


def _experiment_id(client: MlflowClient, name: str, artifacts: str | None, create: bool) -> str:
    """The id of an experiment; if it does not exist, it is created, or has the id "".

    Raises ConfigError for one that somebody has deleted: MLflow keeps its name, and takes no run.
    """
    experiment = client.get_experiment_by_name(name)
    if experiment and create and experiment.lifecycle_stage == "deleted":
        raise ConfigError(
            "The MLflow experiment was deleted",
            got=f"registry.experiment={name}",
            rule="MLflow keeps a deleted experiment under its name, and takes no run into it",
            fix=f"Restore it (mlflow experiments restore -x {experiment.experiment_id}), or set "
            "registry.experiment to another name",
        )
    if experiment:
        return str(experiment.experiment_id)
    if not create:
        return ""
    return str(client.create_experiment(name, artifact_location=artifacts))
