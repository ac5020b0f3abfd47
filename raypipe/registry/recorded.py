"""What MLflow recorded of a version, a training or a comparison; nothing is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raypipe.registry import catalog
from raypipe.registry.runs import finished_run
from raypipe.registry.store import Store
from raypipe.registry.versions import DECISION, ModelVersion


@dataclass(frozen=True)
class Recorded:
    """One MLflow run: its last metrics, its tags, and its start and end in ms (0: none).

    is_deleted: somebody deleted it, and MLflow has not purged it yet.
    """

    run_id: str
    status: str
    metrics: Mapping[str, float]
    tags: Mapping[str, str]
    began_ms: int = 0
    ended_ms: int = 0
    is_deleted: bool = False

    @property
    def source(self) -> str:
        deleted = " (deleted, and gone once MLflow purges it)" if self.is_deleted else ""
        return f"MLflow run {self.run_id}{deleted}"


def of_version(store: Store, version: ModelVersion) -> Recorded | None:
    """The run that registered a version; None if it was deleted."""
    entity = store.client.get_model_version(version.name, str(version.version))
    return _run(store, entity.run_id) if entity.run_id else None


def of_key(store: Store, key: str) -> Recorded | None:
    """The finished run with this key, as of a drift check or a comparison; None if none is."""
    if not key.isalnum():
        return None  # no key of raypipe's: it would be part of a query
    run_id = finished_run(store, key)
    return _run(store, run_id) if run_id else None


def text_of(store: Store, run: Recorded, name: str) -> str | None:
    """A text that the run keeps; None if it does not."""
    from mlflow.artifacts import load_text
    from mlflow.exceptions import MlflowException

    try:
        address = store.client.get_run(run.run_id).info.artifact_uri
        return str(load_text(f"{address}/{name}"))
    except (OSError, MlflowException):
        return None


def decision_of(store: Store, version: ModelVersion) -> str:
    """The key of the comparison that was noted on a challenger; "" without one."""
    tags = store.client.get_model_version(version.name, str(version.version)).tags
    return str(catalog.read(tags).get(DECISION, "")).partition(" ")[0]


def _run(store: Store, run_id: str) -> Recorded | None:
    from mlflow.exceptions import MlflowException

    try:
        run = store.client.get_run(run_id)
    except MlflowException as e:
        if e.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise
    info = run.info
    return Recorded(
        run_id,
        str(info.status),
        dict(run.data.metrics),
        dict(run.data.tags),
        int(info.start_time or 0),
        int(info.end_time or 0),
        info.lifecycle_stage == "deleted",
    )
