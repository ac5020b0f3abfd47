"""raypipe cost: one training on several node types."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from raypipe.costs import compare, rates
from raypipe.costs.compare import Offer
from raypipe.costs.nodes import AS_OF, NODES
from raypipe.costs.spent import duration
from raypipe.job import Job
from raypipe.models.zoo import ImageModel
from raypipe.train.measure.flops import flops_per_image
from raypipe.train.parallel.memory import activation_bytes
from raypipe.work.dry_run import at
from raypipe.work.result import Facts, Result
from raypipe.work.show import Show
from raypipe.work.tables import Table

COLUMNS = [
    "node",
    "GPUs",
    "CPUs",
    "$/hour",
    "a run",
    "$ a run",
    "$ a trial",
    "$ a million predictions",
    "limit",
    "rate",
]


@dataclass(frozen=True, repr=False)
class Compared(Result):
    """A training on several node types, cheapest first."""

    job: str
    found: tuple[Offer, ...]

    def facts(self) -> Facts:
        return {
            "job": self.job,
            "prices": f"list prices of {AS_OF}, or yours (cost.price_per_hour)",
            "rates": "CPUs: measured here. GPUs: published for ResNet-50, scaled by FLOPs and "
            "activations; small models reach less",
        }

    def summary(self) -> Facts:
        return {
            "job": self.job,
            "prices_of": AS_OF,
            "nodes": [asdict(one) | {"run_usd": one.run_usd} for one in self.found],
        }

    def tables(self) -> list[Table]:
        rows = []
        for one in self.found:
            gpus = f"{one.node.gpus} {one.node.gpu}" if one.node.gpu else ""
            took = "" if one.run_s is None else duration(one.run_s)
            money = [_usd(one.run_usd), _usd(one.trial_usd), _usd(one.million_usd)]
            price = f"{one.usd_per_hour:.2f}"
            rows.append([one.name, gpus, one.node.cpus, price, took, *money, one.limit, one.source])
        return [Table("Cheapest run first", COLUMNS, rows)]


def _usd(amount: float | None) -> str:
    return "" if amount is None else f"{amount:.2f}" if amount >= 1 else f"{amount:.2g}"


def cost(job: Job, nodes: Sequence[str], show: Show) -> Compared:
    """Compare node types for the job's training. Raises ConfigError for unknown ones."""
    # A wrong name must not cost a measurement.
    compare.require_known(nodes)
    training, counts, pinned = at.training_job(job.training)
    show.say("Measuring some images on this machine")
    found = rates.measure(training, pinned, int(training.train.batch_size))
    side_px = training.model.pixels
    example = torch.empty((1, side_px, side_px, 3), dtype=torch.uint8, device="meta")
    network = ImageModel(training.model, len(pinned.classes))
    model = compare.Model(
        flops=flops_per_image(network, example),
        activations=activation_bytes(network, example),
        frozen=training.model.mode == "frozen",
        cached=at.carrier_of(training, pinned, {}) == "cache",
    )
    is_fitted = training.train.solver != "steps"
    epochs, most_s = 1 if is_fitted else training.train.epochs, training.train.most_s
    offers = compare.offers(
        nodes or list(NODES), job.cost, counts, epochs, model, found, most_s or math.inf
    )
    what = f"{training.model.name}, {training.model.mode}, {side_px} px"
    job_text = f"{what}, {epochs} epochs of {counts.train:,} images"
    if is_fitted:
        job_text = f"{what}, {counts.train:,} images; without fitting the head"
    if most_s is not None:
        job_text += f", {most_s:,.0f} s at most"
    return Compared(job_text, tuple(offers))
