"""The work of stored features, as Ray tasks: embed the images of a row group."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import ray
import torch

from raypipe.cluster.tasks import cancel
from raypipe.errors import DataError, without_secrets
from raypipe.feed.decoding import try_decode
from raypipe.feed.encoded import Broken, encoded
from raypipe.feed.kept_features import FORMAT, build
from raypipe.models.allocator import keep_memory
from raypipe.models.fingerprint import backbone_hash
from raypipe.models.predictor import together
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.tables.fragment import Fragment

AT_ONCE = 4  # so many batches of a prediction are decoded before they are embedded


def embed_group(
    fragment: Fragment,
    column: str,
    storage_options: dict[str, str] | None,
    row_n: np.ndarray,
    model_json: str,
    expected: str,
) -> tuple[list[bytes], np.ndarray, Broken]:
    """(contents of these rows, features of the readable ones, which are not readable and why).

    A Ray task. row_n: physical rows of the row group. expected: the backbone's hash, under which
    the features will be kept.
    """
    images = encoded(fragment, column, storage_options)
    backbone = _backbone(model_json, expected)
    side_px = ModelConfig.model_validate_json(model_json).pixels
    broken: Broken = []
    no_images = np.empty((0, side_px, side_px, 3), np.uint8)
    features = [backbone.predict(no_images)[0]]

    # Fill a batch with the images that decode, and embed it when it is full.
    at_once = AT_ONCE * together("cpu", side_px)
    pixels_BHWC = np.empty((at_once, side_px, side_px, 3), np.uint8)
    used = 0
    for n, row in enumerate(row_n.tolist()):
        reason = try_decode(images[row], pixels_BHWC[used])
        if reason is not None:
            broken.append((n, reason))
            continue
        used += 1
        if used == at_once:
            features.append(backbone.predict(pixels_BHWC)[0])
            used = 0
    if used:
        features.append(backbone.predict(pixels_BHWC[:used])[0])

    contents = [images.digest(row) for row in row_n.tolist()]
    return contents, np.concatenate(features), broken


def run_tasks(function: Any, calls: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
    """The results of a function's calls, in order: as Ray tasks, or here without a cluster.

    Two tasks a CPU are started at a time, so that the object store holds neither all arguments nor
    all results.
    """
    if not ray.is_initialized():
        for call in calls:
            yield function(*call)
        return
    task = ray.remote(without_secrets(function)).options(
        num_cpus=1, scheduling_strategy="SPREAD", max_retries=5
    )
    most = 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))
    started: deque[Any] = deque()
    try:
        for call in calls:
            started.append(task.remote(*call))
            if len(started) >= most:
                yield _next(started)
        while started:
            yield _next(started)
    finally:
        cancel(started)  # a budget is over, or a task has failed


def _next(started: deque[Any]) -> Any:
    """The oldest task's result. A task that is still waited for stays among those that started."""
    result = ray.get(started[0])
    started.popleft()
    return result


@lru_cache(maxsize=1)
def _backbone(model_json: str, expected: str) -> ImageModel:
    """The model of a ModelConfig as JSON (hashable), built once in each worker process.

    Raises DataError if its hash is another one here.
    """
    if ray.is_initialized():
        # Ray runs one task a CPU, so each takes one thread.
        torch.set_num_threads(1)
        keep_memory()
    cfg = ModelConfig.model_validate_json(model_json)
    model = build(cfg)
    if backbone_hash(cfg, model.backbone, FORMAT) != expected:
        raise DataError(
            "A worker has another backbone than the process that asked for its features",
            got=cfg.name,
            rule="Weights, code and options must be the same everywhere, and each time it is built",
            fix="Install the same files on all nodes; a file: factory draws no weights at random",
        )
    return model.for_inference()
