"""The work of stored features, as Ray tasks: embed the images of a row group."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import ray
import torch

from raypipe.errors import without_secrets
from raypipe.feed.decoding import try_decode
from raypipe.feed.encoded import Broken, encoded
from raypipe.models.allocator import keep_memory
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.tables.fragment import Fragment

AT_ONCE = 64  # images decoded before they are embedded


def embed_group(
    fragment: Fragment,
    column: str,
    storage_options: dict[str, str] | None,
    row_n: np.ndarray,
    model_json: str,
    on_gpu: bool = False,
) -> tuple[list[bytes], np.ndarray, Broken]:
    """(contents of these rows, features of the readable ones, which are not readable and why).

    A Ray task. row_n: physical rows of the row group.
    """
    images = encoded(fragment, column, storage_options)
    backbone = _backbone(model_json, on_gpu)
    side_px = ModelConfig.model_validate_json(model_json).pixels
    broken: Broken = []
    no_images = np.empty((0, side_px, side_px, 3), np.uint8)
    features = [backbone.predict(no_images)[0]]

    # Fill a batch with the images that decode, and embed it when it is full.
    pixels_BHWC = np.empty((AT_ONCE, side_px, side_px, 3), np.uint8)
    used = 0
    for n, row in enumerate(row_n.tolist()):
        reason = try_decode(images[row], pixels_BHWC[used])
        if reason is not None:
            broken.append((n, reason))
            continue
        used += 1
        if used == AT_ONCE:
            features.append(backbone.predict(pixels_BHWC)[0])
            used = 0
    if used:
        features.append(backbone.predict(pixels_BHWC[:used])[0])

    contents = [images.digest(row) for row in row_n.tolist()]
    return contents, np.concatenate(features), broken


def run_tasks(function: Any, calls: Iterable[tuple[Any, ...]], gpus: float = 0.0) -> Iterator[Any]:
    """The results of a function's calls, in order: from Ray, or from here without a cluster.

    Twice as many calls are started as run at a time, so that the object store holds neither all
    arguments nor all results. gpus: the share of one for each process that works; 0: CPUs alone.
    """
    if not ray.is_initialized():
        for call in calls:
            yield function(*call)
        return
    pool = _on_gpus(function, gpus) if gpus else _on_cpus(function)
    started: deque[Any] = deque()
    try:
        for call in calls:
            started.append(pool.start(*call))
            if len(started) >= 2 * pool.workers:
                yield ray.get(started.popleft())
        while started:
            yield ray.get(started.popleft())
    finally:
        pool.close()


class _Pool(NamedTuple):
    workers: int
    start: Callable[..., Any]
    close: Callable[[], None]


def _on_cpus(function: Any) -> _Pool:
    task = ray.remote(without_secrets(function)).options(
        num_cpus=1, scheduling_strategy="SPREAD", max_retries=5
    )
    workers = max(1, int(ray.cluster_resources().get("CPU", 1)))
    return _Pool(workers, task.remote, lambda: None)


def _on_gpus(function: Any, gpus: float) -> _Pool:
    """Actors, because Ray ends the process of a task that had a GPU."""
    have = ray.cluster_resources()
    workers = max(1, min(int(have.get("CPU", 1)), int(have.get("GPU", 0) / gpus)))
    cls = ray.remote(_OnGpu).options(
        num_cpus=1,
        num_gpus=gpus,
        scheduling_strategy="SPREAD",
        max_restarts=5,
        max_task_retries=5,
    )
    actors = itertools.cycle([cls.remote() for _ in range(workers)])

    def start(*call: Any) -> Any:
        return next(actors).call.remote(function, *call)

    def close() -> None:
        # They would keep memory of the GPU, which the training is about to need.
        for actor in itertools.islice(actors, workers):
            ray.kill(actor)

    return _Pool(workers, start, close)


class _OnGpu:
    """A process that keeps a backbone on its share of a GPU from call to call."""

    @without_secrets
    def call(self, function: Any, *call: Any) -> Any:
        return function(*call)


@lru_cache(maxsize=1)
def _backbone(model_json: str, on_gpu: bool) -> ImageModel:
    """The model of a ModelConfig as JSON (hashable), built once in each worker process."""
    if ray.is_initialized():
        # Ray runs one task a CPU, so each takes one thread.
        torch.set_num_threads(1)
        keep_memory()
    model = ImageModel(ModelConfig.model_validate_json(model_json), classes=2).for_inference()
    # A cluster may only pretend to have a GPU.
    if on_gpu and torch.cuda.is_available():
        # TF32 keeps 10 bits. Features are kept, and read beside those that a CPU computed.
        torch.backends.cudnn.allow_tf32 = False
        model.to("cuda")
    return model
