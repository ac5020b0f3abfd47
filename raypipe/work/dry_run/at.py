"""A job, what it would run on, and what its plan says of data and model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from raypipe.cluster.resources import resources_by_node
from raypipe.config import replace as changed
from raypipe.costs import rates
from raypipe.costs.estimate import Counts, Where
from raypipe.costs.rates import Rates
from raypipe.feed import feed
from raypipe.feed.dataset import Pinned, pin
from raypipe.job import Job
from raypipe.models.tasks import NUMERIC
from raypipe.models.zoo import ImageModel
from raypipe.registry import tracking
from raypipe.registry.store import open_store
from raypipe.train.auto import finders
from raypipe.train.job import TrainJob
from raypipe.train.launch import wants_gpu
from raypipe.train.losses import check_weights
from raypipe.train.parallel.memory import device_memory
from raypipe.train.trainer import check_start
from raypipe.work.result import Facts, prepared_from
from raypipe.work.show import Show

AUTO_BATCH = 64  # for train.batch_size=auto that no run has found yet
STORE_SHARE = 0.3  # of the memory: the object store that Ray makes by default


@dataclass(frozen=True)
class At:
    """A job and what it would run on."""

    job: Job
    show: Show
    resources: Mapping[str, float]
    nodes: int
    place: str
    calibrated: list[float]
    """Seconds of each measurement on this machine."""

    def measured(self, job: TrainJob, pinned: Pinned, batch: int, neighbours: int = -1) -> Rates:
        found = rates.measure(job, pinned, batch, neighbours)
        self.calibrated.append(found.seconds)
        return found

    def where(self, job: TrainJob) -> Where:
        gpu = wants_gpu(job.train, dict(self.resources))
        return Where(self.resources.get("CPU", 1), job.train.most_workers, gpu)

    def gpus_by_node(self) -> list[int]:
        """GPUs of each node; of this machine where no cluster is joined."""
        found = [int(node.get("GPU", 0)) for node in resources_by_node()]
        return found or [int(self.resources.get("GPU", 0))]

    def facts(self) -> Facts:
        cpus, gpus = self.resources.get("CPU", 0), self.resources.get("GPU", 0)
        return {"runs on": f"{self.place}: {cpus:g} CPUs, {gpus:g} GPUs"}


def training_job(job: TrainJob) -> tuple[TrainJob, Counts, Pinned]:
    """The training with numbers for `auto`, as far as they are known, and its images.

    Raises ConfigError and DataError as a training does before its first step.
    """
    pinned = pin(job.table, job.feed, kind=job.model.task)
    check_weights(job.train.class_weights, pinned.classes)
    check_start(job)
    training = finders.found(job, pinned)
    if training.train.batch_size == "auto":
        training = changed(training, {"train.batch_size": AUTO_BATCH})
    counts = pinned.counts
    feed_ = job.feed
    trained, judged, tested = (counts[name] for name in (feed_.train, feed_.val, feed_.test))
    read = trained if feed_.train == feed_.val else trained + judged
    return training, Counts(trained, judged, tested, read), pinned


def carrier_of(job: TrainJob, pinned: Pinned, resources: Mapping[str, float]) -> str:
    """The loader that the training will choose. resources: of the cluster, if it runs."""
    if job.cluster.address == "none" or job.train.launcher != "ray":
        return "threads"
    images = sum(pinned.counts[split] for split in {job.feed.train, job.feed.val})
    decoded_mb = images * job.model.pixels**2 * 3 / 2**20
    store_mb = resources.get("object_store_memory", 0) / 2**20 or job.cluster.object_store_mb
    memory_mb = device_memory(torch.device("cpu"), 1) / 2**20
    return feed.choose(job.feed, decoded_mb, float(store_mb or memory_mb * STORE_SHARE))


def data(pinned: Pinned) -> Facts:
    version = pinned.version
    facts: Facts = {"table": str(version), **prepared_from(version, "prepared from")}
    facts["images"] = pinned.counts
    kind, classes = pinned.task.kind, len(pinned.classes)
    # A number is no class.
    facts["task"] = kind if kind in NUMERIC else f"{kind}, {classes} classes"
    return facts


def check_registry(job: Job) -> None:
    """Raise ConfigError for names that MLflow refuses, and for a store that does not answer.

    A store that does not exist yet is not made.
    """
    tracking.check_names(job.run, job.registry)
    file = tracking.store_file(job.run, job.registry)
    if file is None or file.exists():
        open_store(job.run, job.registry, job.artifacts, create=False)


def unfound(job: TrainJob, pinned: Pinned, drawn: Collection[str] = ()) -> list[str]:
    """The fields that are `auto` and that no earlier run found, less those that a search draws."""
    known = finders.found(job, pinned).train
    fields = {"train.batch_size": known.batch_size, "train.lr": known.lr}
    return [name for name in fields if fields[name] == "auto" and name not in drawn]


def model_facts(job: TrainJob, pinned: Pinned) -> Facts:
    model = job.model
    size = sum(p.numel() for p in ImageModel(model, len(pinned.classes)).parameters())
    words = f"{model.name}, {model.mode}, {model.pixels} px, {size / 1e6:.1f} million parameters"
    return {"model": words, "batch": int(job.train.batch_size)}
