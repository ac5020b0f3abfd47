"""`train.batch_size=auto`.

On a GPU: a tenth less than the largest batch of which a training step fits into memory. Each size
is tried in a process of its own (probe.py), which takes ten seconds and more. So the first one is
what should fit by arithmetic: of a small table that is the most, and one try is enough.

On a CPU: the smallest batch whose images/s are nearly the best. On features of a frozen backbone
any size fits and no step takes long: there, the number of steps in an epoch decides.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from raypipe.feed.feed import fetch
from raypipe.images.augment import augment
from raypipe.models.zoo import ImageModel
from raypipe.train.auto.probe import in_process
from raypipe.train.auto.steps import AutoValue, one_device_engine
from raypipe.train.job import TrainJob
from raypipe.train.objective import Objective
from raypipe.train.parallel.memory import RESERVE, device_memory, need_of
from raypipe.train.parallel.precision import compute_dtype
from raypipe.train.schedule import fastest_batch_size, find_batch_size
from raypipe.train.worker import Data, objective_of

log = logging.getLogger("raypipe")

FEWEST_STEPS = 10  # an epoch keeps at least so many, however large a batch would fit


def find(job: TrainJob, data: Data, gpu_share: float) -> AutoValue:
    """The global batch size. gpu_share: the part of a GPU's memory that may be used."""
    found = _find(job, data, gpu_share)
    # A micro batch has an image at least.
    return replace(found, value=max(found.value, job.train.accumulate))


def _find(job: TrainJob, data: Data, gpu_share: float) -> AutoValue:
    # At least one image per micro batch, and FEWEST_STEPS steps an epoch.
    rows = fetch(data.train.rows)
    most = max(1, job.train.accumulate, len(rows) // FEWEST_STEPS)
    if data.features:
        return _for_features(len(rows), most)
    # Memory and time do not depend on the label: one is enough.
    objective = objective_of(job, data)
    label = rows.labels(slice(1))
    if torch.cuda.is_available():
        return _largest_that_fits(job, objective, label, most, gpu_share)
    return _fastest(job, objective, label, most)


def _for_features(images: int, most: int) -> AutoValue:
    """A power of two that makes about 40 steps an epoch, from 16 to 256, and `most` at most."""
    forty_steps = max(1, images / 40)
    power_of_two = 2 ** int(np.log2(forty_steps))
    bounded = max(16, min(256, power_of_two))
    size = min(most, bounded)
    return AutoValue(
        size,
        "features of a frozen backbone fit at any size; "
        f"{images} images make {images // size} steps",
    )


def _largest_that_fits(
    job: TrainJob, objective: Objective, label: np.ndarray, most: int, gpu_share: float
) -> AutoValue:
    workers = job.train.fewest_workers
    fits = in_process(
        partial(try_batch, job=job, objective=objective, label=label, gpu_share=gpu_share)
    )
    # Each worker has a GPU of its own; `most` is for all of them together.
    limit = max(1, most // workers)
    device = torch.device("cuda", torch.cuda.current_device())
    start = min(limit, expected(job, len(objective.task.classes), device, gpu_share))
    log.info("Trying which batch fits the GPU, %d images first", start)
    largest = find_batch_size(fits, start=start, limit=limit)
    # A tenth stays free as a reserve.
    per_worker = max(1, int(0.9 * largest))
    size = per_worker * workers
    where = torch.cuda.get_device_name()
    if gpu_share < 1:
        where = f"{gpu_share:.0%} of {where}"
    return AutoValue(
        size, f"a step of {largest} fits {where}; a tenth less, times {workers} workers"
    )


def expected(job: TrainJob, classes: int, device: torch.device, gpu_share: float = 1.0) -> int:
    """How many images of a step should fit into `gpu_share` of the device's memory.

    Counted on shapes alone, as `train.strategy=auto` does it (parallel/memory.py). 8 where shapes
    do not say it.
    """
    model = ImageModel(job.model, classes)
    side_px = job.model.pixels
    image = torch.zeros(1, side_px, side_px, 3, dtype=torch.uint8)
    need = need_of(
        model,
        image,
        1,
        compute_dtype(job.train.precision, device),
        ema=job.train.ema is not None,
        checkpointing=job.train.activation_checkpointing,
    )
    room = device_memory(device, 1) * gpu_share * (1 - RESERVE) - need.state
    # Of the images of a step, only a micro batch has its activations in memory.
    each = need.activations / job.train.accumulate
    if not each or room <= 0:
        return 8  # the model cannot run without values, or the estimate leaves it no room
    return max(1, int(room / each))


def _fastest(job: TrainJob, objective: Objective, label: np.ndarray, most: int) -> AutoValue:
    step = _random_steps(job, objective, label)
    rates: dict[int, float] = {}

    # Every rate is kept, because the reason names them all.
    def measured(size: int) -> float:
        rates[size] = images_per_s(step, size)
        return rates[size]

    size = fastest_batch_size(measured, start=min(8, most), limit=min(256, most))
    shown = ", ".join(f"{n}: {rate:.0f}" for n, rate in rates.items())
    return AutoValue(size, f"the smallest that is nearly fastest; images/s: {shown}")


def _random_steps(job: TrainJob, objective: Objective, label: np.ndarray) -> Callable[[int], None]:
    """`step(n)`: one training step of n random images that all have this label."""
    model = ImageModel(job.model, len(objective.task.classes))
    engine = one_device_engine(job, model, batch_size=1)
    objective = objective.to(engine.device)
    side_px = job.model.pixels

    def step(n: int) -> None:
        shape = (n, side_px, side_px, 3)
        images_BHWC = torch.randint(0, 256, shape, dtype=torch.uint8, device=engine.device)
        labels_B = torch.from_numpy(label.repeat(n, 0))
        targets = objective.task.targets(labels_B.to(engine.device))
        # Augmented too: it takes memory and time in the training.
        positions_B = np.arange(n)
        inputs = augment(images_BHWC, job.augment, seed=0, epoch=0, positions_B=positions_B)
        engine.step(inputs, targets, objective.loss)

    return step


def try_batch(
    batch_size: int, job: TrainJob, objective: Objective, label: np.ndarray, gpu_share: float = 1.0
) -> None:
    """Train two steps of `batch_size` images; the probe calls it in a process of its own.

    Two, because the optimizer's state takes memory from the second step on.
    """
    if gpu_share < 1 and torch.cuda.is_available():
        # Beyond this share, torch raises OutOfMemoryError.
        torch.cuda.set_per_process_memory_fraction(gpu_share)
    step = _random_steps(job, objective, label)
    step(batch_size)
    step(batch_size)


def images_per_s(step: Callable[[int], None], n: int, least_s: float = 1.0) -> float:
    """The rate over at least two steps and `least_s` seconds."""
    # The first step of a size allocates its memory.
    step(n)
    started = time.perf_counter()
    steps = 0
    while steps < 2 or time.perf_counter() - started < least_s:
        step(n)
        steps += 1
    return steps * n / (time.perf_counter() - started)
