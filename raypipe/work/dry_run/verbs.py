"""The plan of each verb."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from raypipe.cluster.connect import expected
from raypipe.costs.spent import Price
from raypipe.errors import ConfigError
from raypipe.job import Job
from raypipe.train import spark_place
from raypipe.work.dry_run import predicting, searching, training
from raypipe.work.dry_run.at import At
from raypipe.work.planned import Planned
from raypipe.work.show import Show

PLANS: dict[str, Callable[[At], Planned]] = {
    "clean": predicting.clean,
    "train": training.train,
    "tune": searching.tune,
    "predict": predicting.predict,
    "evaluate": predicting.evaluate,
    "drift": predicting.drift,
    "retrain": searching.retrain,
}


def plan(verb: str, job: Job, show: Show) -> Planned:
    """The plan of a verb. Raises what the verb raises before its work begins."""
    if verb not in PLANS:
        known = ", ".join(PLANS)
        raise ConfigError(
            "This verb has no plan", got=f"{verb} --dry-run", rule=f"These have: {known}"
        )
    at = At(job, show, *_place(verb, job), calibrated=[])
    with _few_retries():
        found = PLANS[verb](at)
    price = Price.of(job.cost, at.nodes)
    return replace(found, verb=verb, price=price, calibration_s=sum(at.calibrated))


def _place(verb: str, job: Job) -> tuple[dict[str, float], int, str]:
    """What the verb would run on: resources by name, nodes, and where."""
    if verb == "tune":
        spark_place.refuse(job.training, "A search")
    if verb == "train" and job.train.launcher != "ray":
        return spark_place.expected(job.training)
    return expected(job.cluster, verb != "train" or job.training.needs_cluster)


@contextmanager
def _few_retries() -> Iterator[None]:
    """MLflow asks a server that does not answer eight times, for minutes. A plan asks twice."""
    name = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
    given = os.environ.get(name)
    os.environ.setdefault(name, "1")
    try:
        yield
    finally:
        if given is None:
            del os.environ[name]
