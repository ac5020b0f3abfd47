"""`auto` becomes a number, once, before the training: first the batch size, then the learning rate that suits it.

On a GPU the batch is the largest of which a training step fits, tried in processes of their own; on a CPU the smallest that is
nearly fastest. Features of a frozen backbone fit at any size and take no time: there, steps an epoch are what counts. The rate
comes from a range test on the training data. What was found lies in the run's folder under all that the training depends on: a
resumed or repeated run reads it, with other workers too. Saved config, key and package name the numbers.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import ray
import torch

from raypipe import config
from raypipe.config import to_json
from raypipe.errors import RaypipeError
from raypipe.feed.dataset import Pinned
from raypipe.feed.feed import Batch, Feed, fetch
from raypipe.images.augment import augment
from raypipe.images.mix import mix
from raypipe.models.tasks import Task
from raypipe.models.zoo import ImageModel
from raypipe.train import parallel
from raypipe.train.auto.probe import in_process
from raypipe.train.job import TrainJob
from raypipe.train.launch import wants_gpu
from raypipe.train.objective import Objective
from raypipe.train.schedule import fastest_batch_size, find_batch_size, lr_range
from raypipe.train.worker import Data, trainable

log = logging.getLogger("raypipe")
Job = TypeVar("Job", bound=TrainJob)

FEWEST_STEPS = 10  # an epoch keeps at least so many, however large a batch would fit
FALLBACK_LR = 1e-3  # AdamW's, and TrainConfig's


@dataclass(frozen=True)
class Found:
    """What `auto` became, and why."""

    value: float
    reason: str


def settle(
    job: Job,
    pinned: Pinned,
    data: Callable[[], Data],
    drawn: tuple[str, ...] = (),
    gpu_share: float = 1.0,
) -> Job:
    """The job with numbers where it says auto, except for fields that a search draws. `data` is called
    only if no earlier result is stored. `gpu_share`: of a GPU's memory, which trials may have to
    share; a batch that fills the whole of it would let all but the first of them fail."""
    autos = tuple(name for name in ("batch_size", "lr") if getattr(job.train, name) == "auto")
    wanted = tuple(name for name in autos if f"train.{name}" not in drawn)
    if not wanted:
        return job
    part = f"-{gpu_share:g}-of-a-gpu" if gpu_share < 1 else ""
    path = (
        job.run.path / "found" / f"{job.training_key(pinned.version)}-{'-'.join(wanted)}{part}.json"
    )
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(".partial")
        written.write_text(
            to_json(
                {
                    name: asdict(found)
                    for name, found in _find(job, data(), wanted, gpu_share).items()
                }
            )
        )
        written.replace(path)
    found = {name: Found(**told) for name, told in json.loads(path.read_text()).items()}
    for name in wanted:
        log.info("train.%s=%g: %s", name, found[name].value, found[name].reason)
    return config.replace(job, {f"train.{name}": found[name].value for name in wanted})


def _find(job: TrainJob, data: Data, wanted: tuple[str, ...], gpu_share: float) -> dict[str, Found]:
    """Where one worker trains in this process, here; else on a worker's device, which this machine may not have."""
    if job.train.workers == 1 or not wants_gpu(job.train, ray.cluster_resources()):
        return find(job, data, wanted, gpu_share)
    told = job.model_dump(mode="json", include=set(TrainJob.model_fields))
    elsewhere = ray.remote(num_gpus=1, max_retries=0)(
        lambda told, *rest: find(TrainJob.model_validate(told), *rest)
    )
    return ray.get(elsewhere.remote(told, data, wanted, gpu_share))  # type: ignore[no-any-return]


def find(
    job: TrainJob, data: Data, wanted: tuple[str, ...], gpu_share: float = 1.0
) -> dict[str, Found]:
    """The batch size, which the rate depends on, and the rate if it is wanted."""
    given = job.train.batch_size
    found = {
        "batch_size": _batch_size(job, data, gpu_share)
        if given == "auto"
        else Found(given, "given")
    }
    if "lr" in wanted:
        found["lr"] = _lr(job, data, int(found["batch_size"].value))
    return found


def _batch_size(job: TrainJob, data: Data, gpu_share: float) -> Found:
    labels_N, workers = fetch(data.train.rows).labels_N, job.train.fewest_workers
    most = max(1, job.train.accumulate, len(labels_N) // FEWEST_STEPS)
    if data.features:
        size = min(most, max(16, min(256, 2 ** int(np.log2(max(1, len(labels_N) / 40))))))
        return Found(
            size,
            f"features of a frozen backbone fit at any size; {len(labels_N)} images make {len(labels_N) // size} steps",
        )
    objective = _objective(job, data)
    if torch.cuda.is_available():
        tried = partial(_try, job=job, objective=objective, label=labels_N[:1], gpu_share=gpu_share)
        fits = in_process(tried)
        each = find_batch_size(fits, start=min(8, most), limit=max(1, most // workers))
        size = max(1, int(0.9 * each)) * workers
        where = f"{gpu_share:.0%} of " if gpu_share < 1 else ""
        where += torch.cuda.get_device_name()
        return Found(size, f"a step of {each} fits {where}; a tenth less, times {workers} workers")
    rates: dict[int, float] = {}
    step = _random_steps(job, objective, labels_N[:1])
    size = fastest_batch_size(
        lambda n: rates.setdefault(n, _images_per_s(step, n)), min(8, most), min(256, most)
    )
    return Found(
        size,
        "the smallest that is nearly fastest; images/s: "
        + ", ".join(f"{n}: {r:.0f}" for n, r in rates.items()),
    )


def _lr(job: TrainJob, data: Data, batch_size: int) -> Found:
    objective, seed = _objective(job, data), job.run.seed
    engine = _engine(job, trainable(job.model, data, objective), batch_size)
    objective = objective.to(engine.device)
    untraced = replace(data.train, cfg=data.train.cfg.model_copy(update={"trace": None}))
    feed = Feed(untraced, data.val, batch_size, seed, device=engine.device)
    batches = _endless(feed)

    def train(lr: float) -> float:
        epoch, batch = next(batches)
        engine.set_lr(lr, job.train.unfreeze_epochs)  # with all blocks that will ever learn
        inputs, targets = batch.inputs, objective.task.targets(batch.labels_B)
        if inputs.ndim == 4:
            inputs = augment(inputs, job.augment, seed, epoch, batch.positions_B)
            inputs, targets = mix(inputs, targets, job.augment, seed, epoch, batch.positions_B)
        return float(engine.step(inputs, targets, objective.loss))

    try:
        found = lr_range(train)
    except RaypipeError as e:
        return Found(FALLBACK_LR, f"{e} So it is the usual one")
    finally:
        feed.close()
    rate = float(f"{found.lr:.2g}")
    return Found(
        rate,
        f"the loss falls fastest there, of {found.lrs[0]:g} to {found.lrs[-1]:g} in {len(found.lrs)} steps",
    )


def _endless(feed: Feed) -> Iterator[tuple[int, Batch]]:
    for epoch in itertools.count():
        for batch in feed.train(epoch):
            yield epoch, batch


def _objective(job: TrainJob, data: Data) -> Objective:
    cfg, labels_N = job.train, fetch(data.train.rows).labels_N
    return Objective.of(
        Task(job.model.task, data.classes),
        labels_N,
        cfg.class_weights,
        cfg.label_smoothing,
        cfg.focal_gamma,
    )


def _engine(job: TrainJob, model: torch.nn.Module, batch_size: int) -> parallel.Engine:
    """One device, whatever the strategy: who shards has more room than this finds, and learns at the same rate."""
    plain = {
        "strategy": "single",
        "offload": "none",
        "compile": False,
        "batch_size": batch_size,
        "lr": FALLBACK_LR,
    }
    torch.manual_seed(job.run.seed)
    engine = parallel.build(model, job.train.model_copy(update=plain))
    engine.train()
    return engine


def _random_steps(job: TrainJob, objective: Objective, label: np.ndarray) -> Callable[[int], None]:
    """`step(n)`: one training step of n random pictures that all have this label."""
    engine = _engine(job, ImageModel(job.model, len(objective.task.classes)), 1)
    objective, side_px = objective.to(engine.device), job.model.pixels

    def step(n: int) -> None:
        images_BHWC = torch.randint(
            0, 256, (n, side_px, side_px, 3), dtype=torch.uint8, device=engine.device
        )
        targets = objective.task.targets(torch.from_numpy(label.repeat(n, 0)).to(engine.device))
        engine.step(augment(images_BHWC, job.augment, 0, 0, np.arange(n)), targets, objective.loss)

    return step


def _try(
    batch_size: int, job: TrainJob, objective: Objective, label: np.ndarray, gpu_share: float = 1.0
) -> None:
    """Two steps, in a process of their own: the optimizer's state is there from the second on."""
    if gpu_share < 1 and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(gpu_share)  # beyond it, torch says out of memory
    step = _random_steps(job, objective, label)
    step(batch_size)
    step(batch_size)


def _images_per_s(step: Callable[[int], None], n: int, least_s: float = 1.0) -> float:
    step(n)  # the first of its size allocates
    started, steps = time.perf_counter(), 0
    while steps < 2 or time.perf_counter() - started < least_s:
        step(n)
        steps += 1
    return steps * n / (time.perf_counter() - started)
