"""`train.lr=auto`: a learning-rate range test on the training data (schedule.py)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from raypipe.errors import RaypipeError
from raypipe.feed.feed import Batch, Feed
from raypipe.train import start
from raypipe.train.auto.steps import FALLBACK_LR, AutoValue, one_device_engine
from raypipe.train.job import TrainJob
from raypipe.train.loop import augmented
from raypipe.train.schedule import lr_range
from raypipe.train.worker import Data, objective_of, trainable


def find(job: TrainJob, data: Data, batch_size: int) -> AutoValue:
    """The rate at which the loss falls fastest; FALLBACK_LR if it falls at no rate."""
    seed = job.run.seed
    objective = objective_of(job, data)
    model = trainable(job.model, data, objective)
    if job.train.start_from is not None:
        start.load_into(model, Path(job.train.start_from), job.model, data.classes)
    engine = one_device_engine(job, model, batch_size, job.train.fewest_workers)
    objective = objective.to(engine.device)
    # `feed.trace` records the samples of the training; the test must not write to it.
    train = replace(data.train, cfg=data.train.cfg.model_copy(update={"trace": None}))
    feed = Feed(train, data.val, batch_size, seed, device=engine.device)
    batches = _endless(feed)

    def train_step(lr: float) -> float:
        epoch, batch = next(batches)
        # As in an epoch in which all blocks that will ever learn are unfrozen.
        engine.set_lr(lr, job.train.unfreeze_epochs)
        inputs, targets = augmented(batch, objective, job.augment, seed, epoch)
        return float(engine.step(inputs, targets, objective.loss))

    # If no rate makes the loss fall, the usual one is taken, and the reason says so.
    try:
        tested = lr_range(train_step)
    except RaypipeError as e:
        return AutoValue(FALLBACK_LR, f"{e} So it is the usual one")
    finally:
        feed.close()
    low, high = tested.lrs[0], tested.lrs[-1]
    return AutoValue(
        float(f"{tested.lr:.2g}"),
        f"the loss falls fastest there, of {low:g} to {high:g} in {len(tested.lrs)} steps",
    )


def _endless(feed: Feed) -> Iterator[tuple[int, Batch]]:
    for epoch in itertools.count():
        for batch in feed.train(epoch):
            yield epoch, batch
