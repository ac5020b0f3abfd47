"""The first answer of a search: heads on frozen features, fitted at once, before any trial begins.

Within about a minute of a table of 2,600 images there is a model that trials have to beat. Heads
are trainings like any other (train/solve/), and lines of the leaderboard by the name FIRST-N: the
best of all is registered, so the first answer is, if nothing beats it. Which features are read is
contenders.py's to say.

    search/KEY/first_answer.json    which readings were chosen, so that a rerun chooses them again
    search/KEY/trials/FIRST-N/      their checkpoints, as a trial's

A kill costs little: features are kept by content, a finished head has a checkpoint, and another one
takes seconds. What cannot be fitted is left out: a first answer never ends a search.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from raypipe.config import key_of, replace, to_json
from raypipe.errors import RaypipeError, one_line
from raypipe.feed.dataset import Pinned
from raypipe.files import write_atomic
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.search import contenders
from raypipe.search.contenders import Reading
from raypipe.search.leaderboard import FIRST, Trial
from raypipe.search.trials.epoch_result import metric_of
from raypipe.search.trials.trial import data_key
from raypipe.train.checkpoint import name as epoch_name
from raypipe.train.checkpoint.saver import Saver, newest
from raypipe.train.job import TrainJob
from raypipe.train.trainer import prepare
from raypipe.train.worker import Data, train_rank

log = logging.getLogger("raypipe")
FILE = "first_answer.json"
_PROBED = 16  # images: their rate is known to a fifth

Told = Callable[[Trial], None]


@dataclass
class FirstAnswer:
    """trials: in the order in which they were fitted. data: what they were fitted to, by data_key.

    seconds: what all of it took in this call. attempts: heads that were tried.
    """

    trials: list[Trial] = field(default_factory=list)
    data: dict[str, Data] = field(default_factory=dict)
    seconds: float = 0.0
    attempts: int = 0


def make(
    job: TrainJob,
    pinned: Pinned,
    folder: Path,
    seconds: float | None = None,
    told: Told = lambda trial: None,
    clock: Callable[[], float] = time.monotonic,
) -> FirstAnswer:
    """Fit the heads that fit into so many seconds; None: all.

    folder: of the search. told: called with each head that was fitted. Without a head there are no
    trials, and the log says why.
    """
    began = clock()
    found = FirstAnswer()
    splits = {job.feed.train, job.feed.val}
    images = sum(pinned.counts.get(split, 0) for split in splits)
    for reading in _chosen(job, images, folder, seconds):
        # The rate was a guess. A reading that fits no more was not begun either.
        if seconds is not None and clock() - began > seconds and found.trials:
            break
        try:
            _read_and_fit(job, pinned, reading, folder, found, told)
        except RaypipeError as e:
            log.warning("The first answer does without %s: %s", reading.name, one_line(e))
    found.seconds = clock() - began
    return found


def _chosen(job: TrainJob, images: int, folder: Path, seconds: float | None) -> list[Reading]:
    """The readings that fit, as the first call for this folder chose them."""
    among = contenders.readings(job.model)
    file = folder / FILE
    if file.exists():
        names = json.loads(file.read_text())["readings"]
        return [reading for reading in among if reading.name in names]
    chosen = among
    if seconds is not None and among:
        chosen = contenders.fitting(among, images, works_per_s(among[0]), seconds)
    if not chosen:
        log.warning("There is no first answer: no backbone fits into %.0f s", seconds or 0)
    write_atomic(file, to_json({"readings": [reading.name for reading in chosen]}))
    return chosen


def works_per_s(reading: Reading) -> float:
    """Images of work 1 a second of the whole cluster, measured on a few drawn ones of a reading."""
    cfg = ModelConfig(name=reading.backbone, side_px=reading.side_px)
    shape = (_PROBED, reading.side_px, reading.side_px, 3)
    pixels_NHWC = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the tasks that embed
    try:
        model = ImageModel(cfg, 2).for_inference()
        model.predict(pixels_NHWC)
        began = time.perf_counter()
        model.predict(pixels_NHWC)
        took_s = time.perf_counter() - began
    finally:
        torch.set_num_threads(threads)
    cpus = ray.cluster_resources().get("CPU", 1.0) if ray.is_initialized() else 1.0
    return _PROBED * reading.work / took_s * max(1.0, cpus)


def _read_and_fit(
    job: TrainJob, pinned: Pinned, reading: Reading, folder: Path, found: FirstAnswer, told: Told
) -> None:
    """Read the features, and fit every head of them."""
    images = pinned.counts.get(job.feed.train, 0)
    classes = len(pinned.classes)
    for changes in contenders.heads(reading, job.model, job.train, images, classes):
        # By attempts: after a kill each head has its number again.
        found.attempts += 1
        try:
            # Beside the user's settings of steps, some of which a solver refuses.
            head_job = replace(job, changes)
            key = data_key(head_job)
            if key not in found.data:
                found.data[key] = prepare(head_job, pinned)
            name = f"{FIRST}-{found.attempts}"
            trial = _fitted(head_job, changes, found.data[key], folder, name)
        except RaypipeError as e:
            log.warning("The first answer does without a head: %s", one_line(e))
            continue
        found.trials.append(trial)
        told(trial)


def _fitted(job: TrainJob, changes: dict[str, Any], data: Data, folder: Path, name: str) -> Trial:
    """The trial of one head, with its checkpoint. One that was finished is read again."""
    began = time.perf_counter()
    target = folder / "trials" / name / key_of(changes)
    # One process, whatever the job's trials take; and a checkpoint that exists when it is named.
    alone = {"strategy": "single", "checkpoint_async": False}
    job = job.model_copy(update={"train": job.train.model_copy(update=alone)})
    with Saver(target, job.train) as saver:
        state = train_rank(job, data, newest(target), saver, lambda metrics, state: None)
    metric = metric_of(state.history[0], job.train.stopping.metric)
    usable = state.best_epoch >= 0 and not math.isnan(metric)
    seconds = time.perf_counter() - began
    return Trial(
        name=name,
        changes=changes,
        metric=metric if usable else math.nan,
        epochs=1,
        stopped_early=False,
        history=tuple(state.history),
        checkpoint=str(target / epoch_name(1)) if usable else None,
        stopped=state.stopped,
        seconds=seconds,
        device_s=seconds,
    )
