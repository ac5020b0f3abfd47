"""The plan of each verb."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from raypipe.cluster.connect import expected
from raypipe.costs.spent import Price
from raypipe.errors import ConfigError
from raypipe.job import Job
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
    at = At(job, show, *expected(job.cluster), calibrated=[])
    found = PLANS[verb](at)
    price = Price.of(job.cost, at.nodes)
    return replace(found, verb=verb, price=price, calibration_s=sum(at.calibrated))
