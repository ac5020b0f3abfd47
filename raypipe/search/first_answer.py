"""The first answer of a search: heads on frozen features, fitted at once, before any trial begins.

Within about a minute of a table of 2,600 images there is a model that trials have to beat. Heads
are trainings like any other (train/solve/), and lines of the leaderboard by the name FIRST-N: the
best of all is registered, so the first answer is, if nothing beats it. Which features are read is
contenders.py's to say.

    search/KEY/reached.json         when each head was fitted (trial_files.py)
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch

from raypipe.cluster.resources import cluster_cpus
from raypipe.config import key_of, replace, to_json
from raypipe.errors import ConfigError, RaypipeError, one_line
from raypipe.feed.dataset import Pinned
from raypipe.files import write_atomic
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.search import contenders
from raypipe.search.contenders import Reading
from raypipe.search.leaderboard import FIRST, Trial
from raypipe.search.trial_files import read_first_s, read_reached, write_reached
from raypipe.search.trials.epoch_result import metric_of
from raypipe.search.trials.standing import Reached
from raypipe.search.trials.trial import data_key
from raypipe.search.trials.trial_data import embedded_here
from raypipe.serve.latency import one_thread
from raypipe.tables import scan
from raypipe.train.checkpoint import name as epoch_name
from raypipe.train.checkpoint.saver import Saver, newest
from raypipe.train.job import TrainJob
from raypipe.train.trainer import prepare
from raypipe.train.worker import Data, train_rank

log = logging.getLogger("raypipe")
FILE = "first_answer.json"
SECONDS = 60.0  # for a search that has no budget of its own
_PROBED = 16  # images: their rate is known to a fifth

Told = Callable[[Trial], None]
LeftForOne = Callable[[float], float | None]


@dataclass
class FirstAnswer:
    """trials: in the order in which they were fitted. data: what they were fitted to, by data_key.

    seconds: what all of it took, with what came before a kill. reached: when each was fitted, in
    seconds of it.
    works_per_s: images of work 1 a second of this process with all its threads, as far as they were
    measured. It predicts alone when trials have ended.
    """

    trials: list[Trial] = field(default_factory=list)
    data: dict[str, Data] = field(default_factory=dict)
    seconds: float = 0.0
    reached: list[Reached] = field(default_factory=list)
    works_per_s: float | None = None

    def learn_rate(self, works_per_s: float) -> None:
        """A whole reading came to so many. It starts processes and decodes, too, so networks are no
        slower. The sixteen images that were timed before may have met another process."""
        if works_per_s > 0:
            self.works_per_s = max(self.works_per_s or 0.0, works_per_s)


def make(
    job: TrainJob,
    pinned: Pinned,
    folder: Path,
    seconds: float | None = None,
    told: Told = lambda trial: None,
    barred: Mapping[str, str] | None = None,
    left_for_one_s: LeftForOne = lambda images_per_s: None,
    clock: Callable[[], float] = time.monotonic,
    found: FirstAnswer | None = None,
    most_s: float | None = None,
) -> FirstAnswer:
    """Fit the heads that fit into so many seconds; None: all.

    folder: of the search. told: called with each head that was fitted. barred: by shape, why a
    model may not be trained ("": it may).
    left_for_one_s: if nothing fits, the seconds that the reading of least work may take. It is
    called with this reading's images a second in this process; None: no seconds.
    found: to be filled in, for who may interrupt this.
    most_s: device seconds of all heads, as the leaderboard counts them; None: as many as they take.
    The first one is fitted in any case: nobody knows before what a head takes.
    Without a head there are no trials, and the log says why.
    """
    began = clock()
    found = FirstAnswer() if found is None else found
    # What was reached before a kill, whose seconds count. If other backbones are installed now,
    # another head may have the name.
    earlier = {(one.by, one.value): one for one in read_reached(folder)[0]}
    before_s = read_first_s(folder)

    def noted(trial: Trial) -> None:
        found.seconds = before_s + clock() - began
        now = Reached(found.seconds, trial.metric, trial.name)
        # What is no number has reached nothing.
        if math.isfinite(trial.metric):
            found.reached.append(earlier.get((trial.name, trial.metric), now))
            write_reached(folder, found.reached, found.seconds)
        told(trial)

    allowed = [heads for heads in _of_readings(job, pinned) if heads.without(barred or {}).jobs]
    chosen, found.works_per_s = _chosen(allowed, job, pinned, folder, seconds, left_for_one_s)
    for heads in chosen:
        # The rate was a guess: one that is over its time ends the readings.
        if seconds is not None and clock() - began > seconds and found.trials:
            break
        if _is_spent(found, most_s):
            break
        try:
            _read_and_fit(heads.without(barred or {}), pinned, folder, found, noted, most_s)
        except RaypipeError as e:
            log.warning("The first answer does without %s: %s", heads.reading.name, one_line(e))
    found.seconds = before_s + clock() - began
    if found.reached:
        # What came after the last head counts, too.
        write_reached(folder, found.reached, found.seconds)
    return found


def models(job: TrainJob, pinned: Pinned) -> list[ModelConfig]:
    """The models that a first answer may fit."""
    return [one.model for heads in _of_readings(job, pinned) for one, _ in heads.jobs.values()]


@dataclass(frozen=True)
class _Heads:
    """A reading, and by trial the job of each head with its changes."""

    reading: Reading
    jobs: dict[str, tuple[TrainJob, dict[str, Any]]]

    def without(self, barred: Mapping[str, str]) -> _Heads:
        """Without those whose models are barred."""
        left = {name: one for name, one in self.jobs.items() if not barred.get(one[0].model.shape)}
        return _Heads(self.reading, left)


def _of_readings(job: TrainJob, pinned: Pinned) -> list[_Heads]:
    """All heads. Their names count them, so that after a kill each has its own again."""
    found, number = [], 0
    for reading in contenders.readings(job.model, _images_px(pinned)):
        jobs = {}
        for changes in contenders.heads(reading, job.model, job.train):
            number += 1
            try:
                jobs[f"{FIRST}-{number}"] = replace(job, changes), changes
            except ConfigError as e:
                # A setting of the user's that frozen features or a solver refuse.
                log.warning("The first answer does without a head: %s", one_line(e))
        found.append(_Heads(reading, jobs))
    return found


def _images_px(pinned: Pinned) -> int | None:
    """The median of the longer sides of all images; None where the table does not say."""
    fields = pinned.table.at(pinned.version).schema().fields
    if not {"width", "height"} <= {field.name for field in fields}:
        return None
    sides = scan.rows(pinned.table, pinned.version, ["width", "height"])
    longer = pc.max_element_wise(sides["width"], sides["height"])
    median = pc.approximate_median(longer).as_py()
    return None if median is None else round(median)


def _chosen(
    among: Sequence[_Heads],
    job: TrainJob,
    pinned: Pinned,
    folder: Path,
    seconds: float | None,
    left_for_one_s: LeftForOne,
) -> tuple[list[_Heads], float | None]:
    """(the readings that fit, FirstAnswer.works_per_s), as the first call for this folder found."""
    file = folder / FILE
    by_name = {heads.reading.name: heads for heads in among}
    if file.exists():
        kept = json.loads(file.read_text())
        names = kept["readings"]
        # Older versions kept no rate, or the whole cluster's.
        by_thread = kept.get("thread_works_per_s")
        here = None if by_thread is None else by_thread * torch.get_num_threads()
        return [by_name[name] for name in names if name in by_name], here
    splits = {job.feed.train, job.feed.val}
    images = sum(pinned.counts.get(split, 0) for split in splits)
    readings = [heads.reading for heads in among]
    rate: float | None = None
    own: float | None = None
    if seconds is not None and readings:
        rate, cheapest = thread_works_per_s(readings[0]), readings[:1]
        # All nodes read features, and this process alone predicts in the end.
        everywhere, own = rate * cluster_cpus(), rate * torch.get_num_threads()
        readings = contenders.fitting(readings, images, everywhere, seconds)
        if not readings:
            # Some answer is worth more than trials.
            left_s = left_for_one_s(own / cheapest[0].work)
            readings = contenders.fitting(cheapest, images, everywhere, left_s) if left_s else []
    if not readings:
        why = f"none of them fits into {seconds:g} s" if among else "no backbone may be read"
        log.warning("There is no first answer: %s", why)
    names = [reading.name for reading in readings]
    write_atomic(file, to_json({"readings": names, "thread_works_per_s": rate}))
    return [by_name[name] for name in names], own


def thread_works_per_s(reading: Reading) -> float:
    """Images of work 1 a second of one thread, measured on a few drawn ones of a reading."""
    cfg = ModelConfig(name=reading.backbone, side_px=reading.side_px)
    shape = (_PROBED, reading.side_px, reading.side_px, 3)
    pixels_NHWC = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    with one_thread():  # as the tasks that embed
        model = ImageModel(cfg, 2).for_inference()
        model.predict(pixels_NHWC)
        began = time.perf_counter()
        model.predict(pixels_NHWC)
        took_s = time.perf_counter() - began
    return _PROBED * reading.work / took_s


def _read_and_fit(
    heads: _Heads,
    pinned: Pinned,
    folder: Path,
    found: FirstAnswer,
    told: Told,
    most_s: float | None,
) -> None:
    """Read the features, and fit every head of them that can be paid."""
    for name, (job, changes) in heads.jobs.items():
        if _is_spent(found, most_s):
            break
        try:
            key = data_key(job)
            if key not in found.data:
                began = time.perf_counter()
                found.data[key] = prepare(job, pinned)
                took_s = time.perf_counter() - began
                read = embedded_here({key: found.data[key]})
                found.learn_rate(read * heads.reading.work / max(took_s, 1e-3))
            trial = _fitted(job, changes, found.data[key], folder, name)
        # Of a library too: an eigenvalue that does not converge, memory that is not there.
        except Exception as e:
            log.warning("The first answer does without %s: %s", name, one_line(e))
            continue
        found.trials.append(trial)
        told(trial)


def _is_spent(found: FirstAnswer, most_s: float | None) -> bool:
    """Might another head, as long as the longest one so far, take more than most_s with them?"""
    took = [trial.device_s for trial in found.trials]
    return most_s is not None and sum(took) + max(took, default=0.0) > most_s


def _fitted(job: TrainJob, changes: dict[str, Any], data: Data, folder: Path, name: str) -> Trial:
    """The trial of one head, with its checkpoint. One that was finished is read again."""
    began = time.perf_counter()
    target = folder / "trials" / name / key_of(changes)
    # One process, whatever the job's trials take; and a checkpoint that exists when it is named.
    alone = {"strategy": "single", "checkpoint_async": False}
    job = job.model_copy(update={"train": job.train.model_copy(update=alone)})
    with Saver(target, job.train, recent=1) as saver:
        state = train_rank(job, data, newest(target), saver, lambda metrics, state: None)
    metric = metric_of(state.history[0], job.train.stopping.metric)
    usable = state.best_epoch >= 0 and not math.isnan(metric)
    # One that is read again took what its fit took.
    seconds = max(time.perf_counter() - began, state.seconds)
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
