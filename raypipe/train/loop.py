"""The training loop: plain torch. It knows neither Ray nor MLflow nor Delta, and fits one screen.

`fit` trains epochs of `feed` and validates after each. After each epoch it calls `report` with the
metrics and the state. It calls `save` whenever a resume should be possible from there. The caller
decides what both do. Everything that a resume needs is in `LoopState` and in the engine's own
state; (epoch, step) is the feed's position too.

Shapes: inputs are pixels_BHWC uint8 or features_BD float32, labels_B as the task encodes them,
logits_BC float32.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from raypipe.config import metrics_of
from raypipe.images.augment import AugmentConfig, augment
from raypipe.images.mix import mix
from raypipe.train.objective import Objective
from raypipe.train.pace import Pace
from raypipe.train.parallel import Engine
from raypipe.train.parallel.engine import Criterion
from raypipe.train.schedule import factor_at, scaled
from raypipe.train.settings import TrainConfig
from raypipe.train.stopping import (
    FITTED,
    IN_TIME,
    OF_BUDGET,
    StoppingConfig,
    best_of,
    improved,
    unusable,
    why_stop,
)

if TYPE_CHECKING:  # the feed imports Ray and deltalake; a loop over other batches needs neither
    from raypipe.feed.feed import Batch, Feed


@dataclass
class LoopState:
    """What a resume continues from. `loss_sum` and `seen` are means over the ranks when saved."""

    epoch: int = 0  # finished epochs
    step: int = 0  # finished steps of the next epoch
    loss_sum: float = 0.0  # over the images of that epoch so far
    seen: float = 0  # images of that epoch so far
    best: float | None = None  # stopping.metric of the best epoch
    best_epoch: int = -1  # counted from 0; -1: no usable epoch yet
    history: list[dict[str, float]] = field(default_factory=list)  # metrics of finished epochs
    seconds: float = 0.0  # in the loop; what was repeated after a kill does not count
    worker_s: float = 0.0  # the same, times workers
    stopped: str | None = None  # why training ended before its last epoch
    problem: str | None = None  # why the newest unusable epoch is unusable
    progress: float | None = None  # of the schedule, if train.anneal_s plans it by the clock

    @classmethod
    def from_dict(cls, read: dict[str, Any]) -> LoopState:
        """The inverse of `to_dict`, also after JSON, which has no NaN and writes null."""
        state = cls(**read)
        state.history = [metrics_of(epoch) for epoch in read["history"]]
        if read["loss_sum"] is None:
            state.loss_sum = math.nan
        return state

    def with_usable_best(self, rule: StoppingConfig, last: bool) -> LoopState:
        """The same state, with a usable epoch as its best, or with none if all are unusable.

        Older versions could call an epoch of NaN the best. last: `train.result` is `last`, so the
        last usable epoch is the best one, whatever its metric.
        """
        has_best = self.best_epoch >= 0
        if not has_best or unusable(self.history[self.best_epoch]) is None:
            return self

        # An older version's best: choose again among the epochs that are usable.
        best_epoch = best_of(self.history, rule, last)
        best = None
        if best_epoch >= 0:
            best = self.history[best_epoch][rule.metric]
        return dataclasses.replace(self, best=best, best_epoch=best_epoch)

    def among(self, ranks: int, before: int) -> LoopState:
        """The same state for so many ranks; `before` had saved it.

        The sums of the epoch so far are means over the ranks: of four they are half those of two.
        """
        if ranks == before:
            return self
        share = before / ranks
        return dataclasses.replace(self, loss_sum=self.loss_sum * share, seen=self.seen * share)

    def finished(self, epochs: int) -> bool:
        """Did the training end, by its number of epochs or by its stopping rule?"""
        return self.epoch >= epochs or self.stopped is not None

    def to_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        # Without it, the state is what an older raypipe reads.
        if self.progress is None:
            del fields["progress"]
        return fields


Report = Callable[[dict[str, float], LoopState], None]
Save = Callable[[LoopState], None]
Leaving = Callable[[], bool]  # every rank calls it after each step; all get the same answer


def fit(
    engine: Engine,
    feed: Feed,
    objective: Objective,
    cfg: TrainConfig,
    augmentation: AugmentConfig,
    state: LoopState,
    report: Report,
    save: Save,
    seed: int,
    leaving: Leaving = lambda: False,
    until: int | None = None,
) -> LoopState:
    """Train from (state.epoch, state.step) until the state is `finished`; returns that state.

    It returns earlier, unfinished, when `leaving` returns True or after `until` epochs. A single
    worker leaves its validation, too, but that of the first epoch.
    """
    # `lr` may be meant for another batch size.
    peak_lr = scaled(float(cfg.lr), int(cfg.batch_size), cfg.lr_batch, cfg.lr_scaling)
    all_steps = cfg.epochs * feed.steps
    pace = _pace(cfg, feed, state, engine)
    counted_at = time.perf_counter()
    while not state.finished(cfg.epochs) and state.epoch != until:
        started = time.perf_counter()
        seen_before = state.seen
        # The sum stays on the device: to read it after each step would wait for the device.
        losses = torch.tensor(state.loss_sum, dtype=torch.float64, device=engine.device)
        engine.train()
        for batch in engine.meter.steps(feed, state.epoch, state.step):
            done = state.epoch * feed.steps + state.step
            progress: float | None = (done + 0.5) / all_steps
            if pace is not None:
                progress = pace.next(all_steps - done)
            if progress is None:
                break  # the time is over, and the epoch ends here
            lr = peak_lr * factor_at(cfg.schedule, progress, cfg.warmup)
            engine.set_lr(lr, state.epoch)
            # Dropout: a resumed run draws what an uninterrupted one would.
            _seed(engine.device, seed, state.epoch, state.step, engine.rank)
            inputs, targets = augmented(batch, objective, augmentation, seed, state.epoch)
            # Ranks may get parts of different sizes; `share` makes the mean that of all images.
            share = batch.share
            criterion = partial(_weighted_loss, objective.loss, share.weight)
            loss = engine.step(inputs, targets, criterion, share.least)
            losses += loss * share.even
            state.seen += share.images
            state.step += 1
            if pace is not None:
                pace.stepped()
                state.progress = pace.progress
            left = leaving()
            # A rank that leaves saves first; `leaving` is the same on all ranks.
            if left or _checkpoint_due(state.step, feed.steps, cfg.checkpoint_steps):
                counted_at = _average_counts(state, engine, losses, counted_at)
                save(state)
            if left:
                return state
        # All steps of the epoch are done, or those for which there was time.
        # The first epoch may be the only answer that there will be: it is judged in any case.
        metrics = _evaluated(engine, feed, objective, leaving if state.history else None)
        counted_at = _average_counts(state, engine, losses, counted_at)
        if metrics is None:
            save(state)  # a resume repeats the validation alone
            return state
        metrics["train_loss"] = state.loss_sum / max(1, state.seen)
        epoch_s = time.perf_counter() - started
        images = (state.seen - seen_before) * engine.world
        metrics["images_per_s"] = images / epoch_s
        _end_epoch(state, metrics | engine.meter.epoch(), engine, cfg)
        if pace is not None:
            pace.evaluated()
            _end_in_time(state, pace, cfg)
        save(state)
        report(state.history[-1], state)
    return state


@torch.no_grad()
def fitted(
    engine: Engine,
    feed: Feed,
    objective: Objective,
    cfg: TrainConfig,
    state: LoopState,
    report: Report,
    save: Save,
    fit_s: float,
) -> LoopState:
    """Validate a model that was fitted at once, as its only epoch; returns the state at its end.

    fit_s: seconds that the fit took. A state that is `finished` is returned as it is.
    """
    if state.finished(cfg.epochs):
        return state
    started = time.perf_counter() - fit_s
    metrics = evaluate(engine, feed, objective)
    losses = torch.zeros((), dtype=torch.float64, device=engine.device)
    for batch in feed.train(0, 0):
        targets = objective.task.targets(batch.labels_B)
        losses += objective.losses(engine.forward(batch.inputs), targets).sum()
        state.seen += len(batch.labels_B)
    images = state.seen * engine.world
    counted_at = _average_counts(state, engine, losses, started)
    metrics["train_loss"] = state.loss_sum / max(1, state.seen)
    metrics["images_per_s"] = images / (counted_at - started)
    _end_epoch(state, metrics | engine.meter.epoch(), engine, cfg)
    # There is no second epoch that a rule could have ended.
    state.stopped = (state.problem and state.stopped) or FITTED
    save(state)
    report(state.history[-1], state)
    return state


def _pace(cfg: TrainConfig, feed: Feed, state: LoopState, engine: Engine) -> Pace | None:
    """What ends a training with `train.anneal_s` in time; None for any other."""
    if cfg.anneal_s is None:
        return None

    def of_first_rank(own: list[float]) -> list[float]:
        if engine.world == 1:
            return own
        said = torch.tensor(own, dtype=torch.float64, device=engine.device)
        dist.broadcast(said, 0)
        return list(said.tolist())

    left_s = max(0.0, cfg.anneal_s - state.seconds)
    progress = state.progress or 0.0
    return Pace(left_s, feed.steps, progress, state.step, agreed=of_first_rank)


def _end_in_time(state: LoopState, pace: Pace, cfg: TrainConfig) -> None:
    """Stop after this epoch if no further one fits into the time."""
    is_over = pace.is_over()
    if state.epoch < cfg.epochs and state.stopped is None and is_over:
        cut = f"{OF_BUDGET}{cfg.anneal_s:.3g} s is spent"
        state.stopped = IN_TIME if pace.is_annealed else cut


def augmented(
    batch: Batch, objective: Objective, augmentation: AugmentConfig, seed: int, epoch: int
) -> tuple[Tensor, Tensor]:
    """(inputs, targets) of a batch as the model sees them. Features are not augmented."""
    inputs = batch.inputs
    targets = objective.task.targets(batch.labels_B)
    if inputs.ndim == 4:
        # Draws depend on the position, not on the sample: weighted sampling may draw a sample
        # twice, and the copies are then augmented in different ways.
        inputs = augment(inputs, augmentation, seed, epoch, batch.positions_B)
        inputs, targets = mix(inputs, targets, augmentation, seed, epoch, batch.positions_B)
    return inputs, targets


def _checkpoint_due(step: int, steps: int, every: int | None) -> bool:
    """Is this a checkpoint inside an epoch? Its last step is saved with the epoch."""
    return every is not None and step % every == 0 and step < steps


def _average_counts(state: LoopState, engine: Engine, losses: Tensor, since: float) -> float:
    """Add the time since `since`, and average losses, images and clocks over the ranks.

    All ranks must stop for one reason after one epoch, and resume from one state. Returns now.
    """
    now = time.perf_counter()
    spent_s = now - since
    counts = [
        float(losses),
        state.seen,
        state.seconds + spent_s,
        state.worker_s + spent_s * engine.world,
    ]
    # Each rank's part of the mean; the all-reduce adds them.
    means = torch.tensor(counts, dtype=torch.float64, device=engine.device) / engine.world
    if engine.world > 1:
        dist.all_reduce(means)
    state.loss_sum, state.seen, state.seconds, state.worker_s = means.tolist()
    losses.fill_(state.loss_sum)
    return now


def _end_epoch(
    state: LoopState, metrics: dict[str, float], engine: Engine, cfg: TrainConfig
) -> None:
    """Append the epoch's metrics, update the best epoch, and decide whether training stops."""
    rule = cfg.stopping
    value = metrics[rule.metric]
    problem = _problem(metrics, engine)
    if problem is not None:
        state.problem = f"epoch {state.epoch + 1} is unusable: {problem} (train.lr={cfg.lr:g})"
        # argmax of NaN is class 0, so val_accuracy would look like an accuracy.
        metrics |= {name: math.nan for name in metrics if name.startswith("val_")}
    elif cfg.result == "last" or improved(value, state.best, rule.mode, rule.min_delta):
        state.best = value
        state.best_epoch = state.epoch
    # From here on the state is that of the next epoch.
    state.history.append(metrics)
    state.epoch += 1
    state.step, state.loss_sum, state.seen = 0, 0.0, 0
    # After the last epoch there is nothing to stop.
    if state.epoch < cfg.epochs:
        if problem is not None and rule.nan_guard:
            state.stopped = state.problem
        else:
            state.stopped = why_stop(rule, state.history, state.seconds, state.worker_s)


def _problem(metrics: dict[str, float], engine: Engine) -> str | None:
    """Which loss or weight is not finite, in the same words on every rank; None: all are finite.

    A logit that is not finite makes val_loss not finite.
    """
    problems = []
    if (loss := unusable(metrics)) is not None:
        problems.append(loss)
    if (weight := engine.not_finite()) is not None:
        problems.append(f"the weights {weight} hold NaN or infinity")
    return ", ".join(problems) or None


def _weighted_loss(
    criterion: Criterion, weight: float, logits_BC: Tensor, targets: Tensor
) -> Tensor:
    """This rank's mean loss times the weight of its part; engines average it over the ranks."""
    return criterion(logits_BC, targets) * weight


def _seed(device: torch.device, *parts: int) -> None:
    """Seed what draws on the CPU and on `device`, by several numbers: seed, epoch, step and rank.

    Not torch.manual_seed: for each kind of device that is not in use it keeps the call for later,
    with a traceback. That took 1.1 ms, a third of the step of a head on frozen features.
    """
    mixed = 0
    for part in parts:
        mixed = (mixed * 1_000_003 + part + 1) % 2**63
    torch.default_generator.manual_seed(mixed)
    if device.type == "cuda":
        torch.cuda.manual_seed(mixed)


def evaluate(engine: Engine, feed: Feed, objective: Objective) -> dict[str, float]:
    """The task's metrics over every rank's share of validation; exact, nothing is padded."""
    metrics = _evaluated(engine, feed, objective)
    assert metrics is not None, "nobody asked it to leave"
    return metrics


@torch.no_grad()
def _evaluated(
    engine: Engine, feed: Feed, objective: Objective, leaving: Leaving | None = None
) -> dict[str, float] | None:
    """As `evaluate`; None if `leaving`, which a single worker asks before each batch, was True.

    A thousand validation images take one thread ten seconds or more. Several workers do not ask
    here: all of them would have to hear it before the same batch.
    """
    engine.eval()
    totals: Tensor | int = 0
    for batch in feed.val():
        if leaving is not None and engine.world == 1 and leaving():
            return None
        totals = totals + objective.totals(engine.forward(batch.inputs), batch.labels_B)
    # order.evaluation gives each rank at least one batch, perhaps an empty one.
    assert isinstance(totals, Tensor)
    if engine.world > 1:
        dist.all_reduce(totals)
    return objective.metrics(totals)
