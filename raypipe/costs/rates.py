"""How fast this machine decodes, trains and predicts a job's own images: measured in some seconds.

Nothing is kept: neither weights nor features. The model starts as the job's does, and sees images
of the training split.
"""

from __future__ import annotations

import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from raypipe.feed.dataset import Pinned
from raypipe.feed.feed import Batch, Feed, fetch, prepare
from raypipe.models.allocator import keep_memory
from raypipe.models.zoo import ImageModel
from raypipe.registry.package import Package
from raypipe.serve.predicted_rows import predicted
from raypipe.serve.workers import Reading
from raypipe.tables import fragment
from raypipe.tables.fragment import Fragment
from raypipe.train.auto.steps import one_device_engine
from raypipe.train.job import TrainJob
from raypipe.train.loop import augmented
from raypipe.train.worker import Data, objective_of, trainable

# Seconds for each measurement. One call that takes longer is still finished.
DECODE_S, STEP_S, LOOK_S, EMBED_S = 1.0, 3.0, 0.8, 1.2
HEAD_STEP_S = 1.5  # a head's step takes milliseconds
PREDICT_S = 4.0
PREDICT_ROWS = 64  # of a row group
EMBED_BATCH = 64  # as the tasks that compute features, and as predict.batch_size is by default
Now = Callable[[], float]  # a clock of CPU seconds
REFERENCE_S = 0.0237  # CPU seconds of `_python_work` on the machine where estimate.py was measured


@dataclass(frozen=True)
class Rate:
    """What one image takes: CPU seconds of all cores, and seconds by the clock."""

    cpu_s: float
    wall_s: float

    def __add__(self, other: Rate) -> Rate:
        return Rate(self.cpu_s + other.cpu_s, self.wall_s + other.wall_s)


@dataclass(frozen=True)
class Rates:
    """Of one job on one device of this machine."""

    decode: Rate
    """Read, check, decode and resize, in `feed.threads` threads."""

    step: Rate
    """A training step, on ready pixels, or on features where the backbone is frozen."""

    look: Rate
    """A forward pass of what is trained: validation."""

    embed: Rate
    """A forward pass of the whole model: features, predictions, references."""

    device: str
    """cpu, or the GPU's name."""

    slowness: float
    """CPU seconds of Python code here, for one on the machine where estimate.py was measured."""

    seconds: float
    """That the measurement took."""


@dataclass(frozen=True)
class Prediction:
    """What it takes to read, decode and predict one image; the rest is as in Rates."""

    image: Rate
    slowness: float
    seconds: float


def measure(job: TrainJob, pinned: Pinned, batch_size: int, neighbours: int = -1) -> Rates:
    """Measure one device of this machine, in about 8 s.

    batch_size: images of a step on one device. neighbours: how many others like it train at the
    same time, each with one thread, as trials do; -1: it trains alone, with all threads. Raises
    DataError as a training does.
    """
    began = time.perf_counter()
    # As workers and tasks do.
    keep_memory()
    images = _images(job, pinned)
    decode, batch = _decoding(job, images, batch_size)
    # Features are computed by tasks with one CPU each, side by side.
    tasks = (os.cpu_count() or 1) - 1 if job.model.mode == "frozen" else neighbours
    with _crowd(tasks) as now:
        embed, width = _embedding(job, batch, len(pinned.classes), now)
    data = images
    if job.model.mode == "frozen":
        data = _random_features(images, width)
    with _crowd(neighbours) as now:
        step, look, device = _training(job, data, batch_size, now)
    slowness = _python_work() / REFERENCE_S
    return Rates(decode, step, look, embed, device, slowness, time.perf_counter() - began)


@contextmanager
def _crowd(neighbours: int) -> Iterator[Now]:
    """One thread for torch, and so many others that compute, too: they share caches and memory.

    -1: all threads, and nobody else. Gives the clock of the CPU seconds that count: in a crowd
    those of this thread alone.
    """
    if neighbours < 0:
        yield time.process_time
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    done = threading.Event()
    busy = [threading.Thread(target=_compute, args=(done,), daemon=True) for _ in range(neighbours)]
    for thread in busy:
        thread.start()
    try:
        yield time.thread_time
    finally:
        done.set()
        for thread in busy:
            thread.join()
        torch.set_num_threads(before)


@torch.inference_mode()
def _compute(done: threading.Event) -> None:
    """What trains beside a trial: convolutions over more memory than a cache has."""
    layer = torch.nn.Conv2d(32, 32, 3, padding=1)
    images = torch.zeros(16, 32, 96, 96)
    while not done.is_set():
        layer(images)


def _images(job: TrainJob, pinned: Pinned) -> Data:
    """The training split, decoded by threads of this process when it is read."""
    feed = job.feed.model_copy(update={"carrier": "threads", "trace": None})
    found = prepare(pinned, [feed.train], job.model.pixels, feed, job.run.seed, here=True)
    source = found[feed.train]
    return Data(pinned.classes, False, source, source)


def _decoding(job: TrainJob, data: Data, batch_size: int) -> tuple[Rate, Batch]:
    """What it takes to make an image ready, and a batch of them."""
    feed = Feed(data.train, data.val, batch_size, job.run.seed)
    stream = _endless(feed)
    try:
        # The first batch opens files, and fills the stream's buffers.
        batch = next(stream)
        images = 0
        clock = _Clock(DECODE_S)
        while clock.goes_on():
            images += len(next(stream).samples_B)
        return clock.rate(images), batch
    finally:
        feed.close()


def _endless(feed: Feed) -> Iterator[Batch]:
    epoch = 0
    while True:
        yield from feed.train(epoch)
        epoch += 1


def _embedding(job: TrainJob, batch: Batch, classes: int, now: Now) -> tuple[Rate, int]:
    """A forward pass of the whole model, and how many features it gives."""
    pixels_BHWC = np.resize(batch.inputs.numpy(), (EMBED_BATCH, *batch.inputs.shape[1:]))
    model = ImageModel(job.model, classes).for_inference()
    if torch.cuda.is_available():
        model = model.to("cuda")
    features_BD, _ = model.predict(pixels_BHWC)
    rate = _rate(lambda: model.predict(pixels_BHWC), EMBED_BATCH, EMBED_S, now)
    return rate, features_BD.shape[1]


def _random_features(data: Data, width: int) -> Data:
    """The same rows with features of no image: how long a head trains does not depend on them."""
    rows = fetch(data.train.rows)  # in the object store, where a cluster is joined
    features_ND = np.random.default_rng(0).standard_normal((len(rows), width), np.float32)
    source = replace(data.train, carrier="memory", inputs=features_ND)
    return Data(data.classes, True, source, source)


def _training(job: TrainJob, data: Data, batch_size: int, now: Now) -> tuple[Rate, Rate, str]:
    """A training step, validation, and the device that they ran on."""
    torch.manual_seed(job.run.seed)
    objective = objective_of(job, data)
    engine = one_device_engine(job, trainable(job.model, data, objective), batch_size)
    objective = objective.to(engine.device)
    feed = Feed(data.train, data.val, batch_size, job.run.seed, device=engine.device)
    try:
        batch = next(_endless(feed))
        # A head's step is so short that the batch counts, too: its order, and copying its rows.
        feeding = _feeding(feed, now) if data.features else Rate(0.0, 0.0)
    finally:
        feed.close()
    # As in an epoch in which all blocks that will ever learn are unfrozen.
    engine.set_lr(1e-6, job.train.unfreeze_epochs)

    def step() -> Any:
        inputs, targets = augmented(batch, objective, job.augment, job.run.seed, 0)
        return float(engine.step(inputs, targets, objective.loss))

    def look() -> Any:
        return objective.totals(engine.forward(batch.inputs), batch.labels_B).cpu()

    images = len(batch.samples_B)
    stepped = _rate(step, images, HEAD_STEP_S if data.features else STEP_S, now)
    engine.eval()
    with torch.no_grad():
        looked = _rate(look, images, LOOK_S, now)
    device = engine.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return stepped + feeding, looked, name


def _feeding(feed: Feed, now: Now) -> Rate:
    """What it takes to order an epoch and to hand out its batches of ready features."""
    clock = _Clock(0.0, now)
    images = sum(len(batch.samples_B) for batch in feed.train(1))
    return clock.rate(images)


def of_package(package: Package, groups: Sequence[Fragment], reading: Reading) -> Prediction:
    """What it takes to read and predict an image of these row groups in a task with one CPU."""
    began = time.perf_counter()
    keep_memory()
    with _crowd((os.cpu_count() or 1) - 1) as now:
        # Loads the model, and allocates.
        _predicted(package, groups[0], reading, 1)
        images = 0
        clock = _Clock(PREDICT_S, now)
        for group in groups:
            if not clock.goes_on():
                break
            images += _predicted(package, group, reading, PREDICT_ROWS)
        rate = clock.rate(max(1, images))
    slowness = _python_work() / REFERENCE_S
    return Prediction(rate, slowness, time.perf_counter() - began)


def _predicted(package: Package, group: Fragment, reading: Reading, most: int) -> int:
    """Predict the first rows of a row group; returns how many."""
    columns = reading.columns
    wanted = list(dict.fromkeys([columns.id, columns.image]))
    rows, _ = fragment.read([group], reading.schema, wanted, reading.where, reading.storage_options)
    rows = rows.slice(0, most)
    if len(rows):
        predicted(package, rows, columns)
    return len(rows)


def _rate(call: Callable[[], Any], images: int, seconds: float, now: Now) -> Rate:
    """The median of calls that wait for their result.

    The first one, which allocates, does not count. A mean would count what other processes do: a
    core that is taken away for a moment makes all threads of a step wait for it.
    """
    call()
    cpu_s, wall_s = [], []
    whole = _Clock(seconds)
    while whole.goes_on():
        clock = _Clock(0.0, now)
        call()
        taken = clock.rate(images)
        cpu_s.append(taken.cpu_s)
        wall_s.append(taken.wall_s)
    return Rate(statistics.median(cpu_s), statistics.median(wall_s))


class _Clock:
    """Goes on for some seconds, and at least once."""

    def __init__(self, seconds: float, now: Now = time.process_time) -> None:
        self._seconds = seconds
        self._asked = False
        self._now = now
        self._cpu, self._wall = self._now(), time.perf_counter()

    def goes_on(self) -> bool:
        first, self._asked = not self._asked, True
        return first or time.perf_counter() - self._wall < self._seconds

    def rate(self, images: int) -> Rate:
        cpu_s, wall_s = self._now() - self._cpu, time.perf_counter() - self._wall
        return Rate(cpu_s / images, wall_s / images)


def _python_work() -> float:
    """CPU seconds of plain Python code, the least of three: what a verb's start is made of."""
    least = float("inf")
    for _ in range(3):
        began = time.process_time()
        for n in range(400):
            json.loads(json.dumps({str(i): [i, n] for i in range(100)}))
        least = min(least, time.process_time() - began)
    return least
