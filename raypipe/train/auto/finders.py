"""`auto` becomes a number, once, before the training: first the batch size, then the learning rate.

The learning rate depends on the batch size. Both are stored in the run's folder, under a key of
everything that the training depends on. So a resumed or repeated run reads them, with another
number of workers too. The saved config, the training key and the package hold the numbers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import ray

from raypipe import config
from raypipe.feed.dataset import Pinned
from raypipe.files import file_lock, write_atomic
from raypipe.train.auto import batch_size, learning_rate
from raypipe.train.auto.steps import AutoValue
from raypipe.train.job import TrainJob
from raypipe.train.launch import wants_gpu
from raypipe.train.worker import Data

log = logging.getLogger("raypipe")


def resolve(
    job: TrainJob,
    pinned: Pinned,
    data: Callable[[], Data],
    drawn: tuple[str, ...] = (),
    gpu_share: float = 1.0,
) -> TrainJob:
    """The job with numbers in place of `auto`, except for fields that a search draws.

    data: called only if no earlier result is stored. drawn: fields of the search space, as in
    "train.lr". gpu_share: the part of a GPU's memory that one trial may use; a batch that fills all
    of it would make every other trial on that GPU fail.
    """
    wanted = _wanted(job, drawn)
    if not wanted:
        return job
    path = _path(job, pinned, wanted, gpu_share)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Of two terminals, the second one takes what the first one finds: with another number it
        # would be another training.
        with file_lock(path.with_name(f"{path.name}.lock")):
            if not path.exists():
                values = _find_where_it_trains(job, data(), wanted, gpu_share)
                fields = {name: asdict(value) for name, value in values.items()}
                write_atomic(path, config.to_json(fields))
    # The first run reads its own file too: so all runs see the same numbers.
    return config.replace(job, _stored(path, wanted))


def _stored(path: Path, wanted: tuple[str, ...]) -> dict[str, float]:
    """The numbers in the file, by dotted field."""
    stored = json.loads(path.read_text())
    changes = {}
    for name in wanted:
        value = AutoValue(**stored[name])
        log.info("train.%s=%g: %s", name, value.value, value.reason)
        changes[f"train.{name}"] = value.value
    return changes


def found(
    job: TrainJob, pinned: Pinned, drawn: tuple[str, ...] = (), gpu_share: float = 1.0
) -> TrainJob:
    """The job with the numbers that an earlier run found; `auto` stays where none did.

    drawn, gpu_share: see `resolve`.
    """
    wanted = _wanted(job, drawn)
    path = _path(job, pinned, wanted, gpu_share)
    if not wanted or not path.exists():
        return job
    return config.replace(job, _stored(path, wanted))


def _wanted(job: TrainJob, drawn: tuple[str, ...]) -> tuple[str, ...]:
    """The fields of `train` that are `auto` and that no search draws."""
    wanted = []
    if job.train.batch_size == "auto" and "train.batch_size" not in drawn:
        wanted.append("batch_size")
    if job.train.lr == "auto" and "train.lr" not in drawn:
        wanted.append("lr")
    return tuple(wanted)


def _path(job: TrainJob, pinned: Pinned, wanted: tuple[str, ...], gpu_share: float) -> Path:
    """Where the numbers are stored. Those for a part of a GPU are not those for all of it."""
    key = job.training_key(pinned.version)
    parts = [key, *wanted]
    if gpu_share < 1:
        parts.append(f"{gpu_share:g}-of-a-gpu")
    return job.run.path / "found" / f"{'-'.join(parts)}.json"


def _find_where_it_trains(
    job: TrainJob, data: Data, wanted: tuple[str, ...], gpu_share: float
) -> dict[str, AutoValue]:
    """Run `find` in this process, or on a GPU of the cluster, which this machine may not have."""
    here = job.train.workers == 1 or job.train.launcher != "ray"
    if here or not wants_gpu(job.train, ray.cluster_resources()):
        return find(job, data, wanted, gpu_share)
    job_fields = job.model_dump(mode="json")
    find_remotely = ray.remote(num_gpus=1, max_retries=0)(
        lambda fields, *rest: find(TrainJob.model_validate(fields), *rest)
    )
    values: dict[str, AutoValue] = ray.get(
        find_remotely.remote(job_fields, data, wanted, gpu_share)
    )
    return values


def find(
    job: TrainJob, data: Data, wanted: tuple[str, ...], gpu_share: float = 1.0
) -> dict[str, AutoValue]:
    """The batch size, and the learning rate if it is wanted."""
    given = job.train.batch_size
    size = batch_size.find(job, data, gpu_share) if given == "auto" else AutoValue(given, "given")
    values = {"batch_size": size}
    if "lr" in wanted:
        values["lr"] = learning_rate.find(job, data, int(size.value))
    return values
