"""MLflow runs: config, metrics, table version as dataset input, code commit. Only this room and its neighbours import MLflow.

Every run carries `raypipe.key`, a hash of what determines its result. Asking for a run whose key is there and finished
returns it, so a rerun after a kill adds no second run. The default store is SQLite in the run folder; a file store is
refused by MLflow 3, and `databricks` or an http address works as well.
"""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from raypipe.config import RunConfig, Section
from raypipe.errors import ConfigError, hidden, keep_secrets_of
from raypipe.tables.table import TableVersion

if TYPE_CHECKING:
    from mlflow import MlflowClient

KEY = "raypipe.key"
OWNER = "raypipe.owner"  # host and folder of who writes a run


class RegistryConfig(Section):
    """Where runs and models are registered. `uri: null` is SQLite in the run folder; `env:NAME` is the address in the
    environment variable NAME, which may hold a password as no other address may. `model: null` is the run's name."""

    uri: str | None = None
    experiment: str = "raypipe"
    model: str | None = None
    alias: str = "champion"


@dataclass(frozen=True)
class Store:
    """An open MLflow store, one experiment in it, and the name models are registered under. `uri` is for people and records;
    `address` may hold a password and is for MLflow alone."""

    client: MlflowClient
    uri: str
    experiment_id: str
    model: str
    alias: str
    folder: Path  # where this run keeps files that belong to the store, and its locks
    address: str = field(repr=False, default="")


def open_store(run: RunConfig, cfg: RegistryConfig) -> Store:
    """Open or create the store. The first use of a SQLite store migrates it, which takes some seconds."""
    import mlflow

    folder = run.path / "mlflow"
    folder.mkdir(parents=True, exist_ok=True)
    uri = _address(cfg.uri) if cfg.uri else f"sqlite:///{folder / 'mlflow.db'}"
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    try:
        client = mlflow.MlflowClient(uri, uri)
        found = client.get_experiment_by_name(cfg.experiment)
        artifacts = (folder / "artifacts").as_uri() if uri.startswith("sqlite") else None
        experiment_id = (
            found.experiment_id
            if found
            else client.create_experiment(cfg.experiment, artifact_location=artifacts)
        )
    except Exception as e:
        raise ConfigError(
            f"The MLflow store cannot be opened: {' '.join(str(e).split())[:300]}",
            got=uri,
            fix="Check registry.uri",
        ) from e
    return Store(client, hidden(uri), experiment_id, cfg.model or run.name, cfg.alias, folder, uri)


def _address(uri: str) -> str:
    name = uri.removeprefix("env:")
    if name == uri:
        return uri
    found = os.environ.get(name)
    if not found:
        raise ConfigError(
            f"The environment variable {name} is not set",
            got=f"registry.uri={uri}",
            rule="env:NAME takes MLflow's address from the variable NAME",
            fix=f"export {name}=…, or set registry.uri",
        )
    keep_secrets_of(found)
    return found


def finished_run(store: Store, key: str) -> str | None:
    """The id of the finished run with this key, if there is one."""
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
    """The id of the finished run with this key. Where there is none, `fill` logs into a new one; who asks meanwhile waits."""
    with _one_at_a_time(store, key):
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
    """A run to log into; finished when the block ends, failed when it raises. An earlier one of the same key that ended goes;
    one that is still running goes only when it was this folder's, for then its process is dead."""
    with _one_at_a_time(store, key), _logged(store, key, name, params, version, parent) as run_id:
        yield run_id


def _one_at_a_time(store: Store, key: str) -> FileLock:
    """Held while a run of this key is written. The system gives it up when its process dies."""
    locks = store.folder / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    return FileLock(locks / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.lock")


@contextmanager
def _logged(
    store: Store,
    key: str,
    name: str,
    params: Mapping[str, Any],
    version: TableVersion | None,
    parent: str | None,
) -> Iterator[str]:
    for earlier in store.client.search_runs([store.experiment_id], f"tags.`{KEY}` = '{key}'"):
        running = earlier.info.status in ("RUNNING", "SCHEDULED")
        if not running or earlier.data.tags.get(OWNER) == _owner(
            store
        ):  # we hold the lock: its writer is gone
            store.client.delete_run(earlier.info.run_id)
    tags = {
        KEY: key,
        OWNER: _owner(store),
        "mlflow.runName": name,
        "mlflow.source.name": "raypipe",
    } | _commit_tag()
    if parent:
        tags["mlflow.parentRunId"] = parent
    run_id = store.client.create_run(store.experiment_id, tags=tags, run_name=name).info.run_id
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
    """Whose locks guard a run: those of this folder on this host, or on all that share it."""
    return f"{socket.gethostname()}:{store.folder}"


def log_history(store: Store, run_id: str, history: Sequence[Mapping[str, float]]) -> None:
    """One step an epoch for every metric."""
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    metrics = [
        Metric(k, float(v), now, step)
        for step, epoch in enumerate(history)
        for k, v in epoch.items()
    ]
    for start in range(0, len(metrics), 1000):  # the REST API takes at most 1,000 a call
        store.client.log_batch(run_id, metrics=metrics[start : start + 1000])


def log_metrics(store: Store, run_id: str, metrics: Mapping[str, float]) -> None:
    for name, value in metrics.items():
        store.client.log_metric(run_id, name, float(value))


def log_text(store: Store, run_id: str, text: str, name: str) -> None:
    store.client.log_text(run_id, text, name)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"train": {"lr": 1}} -> {"train.lr": 1}"""
    out: dict[str, Any] = {}
    for name, value in tree.items():
        out |= (
            flat(value, f"{prefix}{name}.")
            if isinstance(value, Mapping) and value
            else {prefix + name: value}
        )
    return out


def code_commit() -> str | None:
    """The commit of the code that runs: RAYPIPE_COMMIT where there is no checkout, else git's answer."""
    if os.environ.get("RAYPIPE_COMMIT"):
        return os.environ["RAYPIPE_COMMIT"]
    try:
        git = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
        return git.stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None


def _commit_tag() -> dict[str, str]:
    commit = code_commit()
    return {"mlflow.source.git.commit": commit} if commit else {}


def _log_params(store: Store, run_id: str, params: Mapping[str, Any]) -> None:
    from mlflow.entities import Param

    entries = [Param(k, str(v)[:6000]) for k, v in flat(params).items()]
    for start in range(0, len(entries), 100):
        store.client.log_batch(run_id, params=entries[start : start + 100])


def _log_dataset(store: Store, run_id: str, version: TableVersion) -> None:
    from mlflow.data.delta_dataset_source import DeltaDatasetSource
    from mlflow.data.meta_dataset import MetaDataset
    from mlflow.entities import DatasetInput, InputTag

    dataset = MetaDataset(  # type: ignore[abstract]
        DeltaDatasetSource(path=version.uri, delta_table_version=version.version),
        name=Path(version.uri).name,
    )
    entity = dataset._to_mlflow_entity()
    store.client.log_inputs(
        run_id, datasets=[DatasetInput(entity, [InputTag("mlflow.data.context", "training")])]
    )
