"""MLflow runs: config, metrics, the table version as dataset input, the code's commit.

Every run has the tag `raypipe.key`, a hash of what determines its result. If a finished run with
the key exists, it is reused, so a rerun after a kill adds no second run.

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
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from raypipe.files import file_lock
from raypipe.registry import made_by
from raypipe.registry.store import Store
from raypipe.tables.table import TableVersion

KEY = "raypipe.key"
PREPARED_FROM = "raypipe.prepared_from"  # the version that a prepared table stands for
OF_TEST = "test_", "eval.", "gate."  # how names of metrics of test images begin
OWNER = "raypipe.owner"  # host and folder whose lock guards the run


def finished_run(store: Store, key: str) -> str | None:
    """The id of the finished run with this key, or None."""
    # A store that was not to be made may have no experiment yet.
    if not store.experiment_id:
        return None
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
    # Delete what a killed process left behind, but no run that another host is writing.
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
    commit = made_by.commit()
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
    """Log metrics of no epoch, in one request: a server far away takes long for each."""
    log_history(store, run_id, [metrics])


def log_once(store: Store, key: str, metrics: Mapping[str, float]) -> None:
    """Log metrics into the finished run of this key, except those that it has.

    They are times and costs: a rerun finds its results and takes less.
    """
    run_id = finished_run(store, key)
    if run_id is None:
        return
    logged = store.client.get_run(run_id).data.metrics
    log_metrics(store, run_id, {k: v for k, v in metrics.items() if allowed_name(k) not in logged})


def log_text(store: Store, run_id: str, text: str, name: str) -> None:
    store.client.log_text(run_id, text, name)


def looks(store: Store, version: TableVersion) -> int:
    """How many runs of the experiment have metrics of test images of this table, in any version.

    A prepared table and its source have the same test images. Trainings and evaluations of this
    table are counted. So are the gate's comparisons, which name no table: the number may be too
    high.
    """
    found = 0
    token = None
    while True:
        runs = store.client.search_runs([store.experiment_id], page_token=token)
        for logged in runs:
            inputs = logged.inputs.dataset_inputs if logged.inputs else []
            # Others may share the experiment, and log data sets of other kinds.
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


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"train": {"lr": 1}} -> {"train.lr": 1}"""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            leaves |= flat(value, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = value
    return leaves
