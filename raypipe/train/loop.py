"""The training loop: plain torch. It knows neither Ray nor MLflow nor Delta, and fits one screen.

`fit` runs epochs of `feed`, evaluates, and hands (metrics, state) to `report` after each, and the state alone to `save`
whenever a resume should be possible from there; whoever calls decides what these are. Everything that a resume needs is in
`LoopState` and the engine's own state: (epoch, step) is the feed's token too.

Shapes: inputs are pixels_BHWC uint8 or features_BD float32, labels_B as the task encodes them, logits_BC float32.
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
from raypipe.train.parallel import Engine
from raypipe.train.parallel.engine import Criterion
from raypipe.train.schedule import factor, scaled
from raypipe.train.settings import TrainConfig
from raypipe.train.stopping import StoppingConfig, best_of, improved, unusable, why_stop

if TYPE_CHECKING:  # it brings Ray and deltalake, which a loop over other batches does without
    from raypipe.feed.feed import Feed


@dataclass
class LoopState:
    """What a resume continues from: finished epochs and steps of the next, their metrics, which epoch was best, the time and
    the workers' time in the loop so far (what was repeated after a kill not counted), and why it stopped before its end.
    `problem` says why the newest unusable epoch is unusable."""

    epoch: int = 0
    step: int = 0
    loss_sum: float = 0.0
    seen: float = 0
    best: float | None = None
    best_epoch: int = -1
    history: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0
    worker_s: float = 0.0
    stopped: str | None = None
    problem: str | None = None

    @classmethod
    def of(cls, read: dict[str, Any]) -> LoopState:
        """From `to_dict`, through JSON or not."""
        history = [metrics_of(line) for line in read["history"]]
        loss_sum = math.nan if read["loss_sum"] is None else read["loss_sum"]
        return cls(**read | {"history": history, "loss_sum": loss_sum})

    def judged_again(self, rule: StoppingConfig, last: bool) -> LoopState:
        """The same state if its best epoch is usable. Older versions called an epoch of NaN the best: then the best usable."""
        if self.best_epoch < 0 or unusable(self.history[self.best_epoch]) is None:
            return self
        best = best_of(self.history, rule, last)
        value = self.history[best][rule.metric] if best >= 0 else None
        return dataclasses.replace(self, best=value, best_epoch=best)

    def finished(self, epochs: int) -> bool:
        """Did the training end, by its epochs or its rule?"""
        return self.epoch >= epochs or self.stopped is not None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


Report = Callable[[dict[str, float], LoopState], None]
Save = Callable[[LoopState], None]
Leaving = Callable[[], bool]  # asked by every rank after each step; all hear the same


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
    """Train from (state.epoch, state.step) to `cfg.epochs`, until the stopping rule says so, or until `leaving` does.
    `until`: not beyond so many epochs."""
    rule, lr = (
        cfg.stopping,
        scaled(float(cfg.lr), int(cfg.batch_size), cfg.lr_batch, cfg.lr_scaling),
    )
    counted = time.perf_counter()
    while not state.finished(cfg.epochs) and state.epoch != until:
        started, before = time.perf_counter(), state.seen
        losses = torch.tensor(state.loss_sum, dtype=torch.float64, device=engine.device)
        engine.train()
        for batch in engine.meter.steps(feed, state.epoch, state.step):
            done = state.epoch * feed.steps + state.step
            engine.set_lr(
                lr * factor(cfg.schedule, done, cfg.epochs * feed.steps, cfg.warmup), state.epoch
            )
            torch.manual_seed(
                _seed(seed, state.epoch, state.step, engine.rank)
            )  # dropout: a resume draws what this run would
            inputs = batch.inputs
            targets = objective.task.targets(batch.labels_B)
            if inputs.ndim == 4:
                # By position: a copy of a sample that weighted sampling draws again is changed in another way.
                inputs = augment(inputs, augmentation, seed, state.epoch, batch.positions_B)
                inputs, targets = mix(
                    inputs, targets, augmentation, seed, state.epoch, batch.positions_B
                )
            share = batch.share
            weighed = partial(_weighed, objective.loss, share.weight)
            losses += engine.step(inputs, targets, weighed, share.least) * share.even
            state.seen += share.images
            state.step += 1
            left = leaving()
            if left or (
                cfg.checkpoint_steps
                and state.step % cfg.checkpoint_steps == 0
                and state.step < feed.steps
            ):
                counted = _settle(state, engine, losses, counted)
                save(state)
            if left:
                return state
        metrics = evaluate(engine, feed, objective)
        counted = _settle(state, engine, losses, counted)
        metrics |= {
            "train_loss": state.loss_sum / max(1, state.seen),
            "images_per_s": (state.seen - before) * engine.world / (time.perf_counter() - started),
            **engine.meter.epoch(),
        }
        problem = _problem(metrics, engine)
        if problem is not None:
            state.problem = f"epoch {state.epoch + 1} is unusable: {problem} (train.lr={cfg.lr:g})"
            metrics |= {
                name: math.nan for name in metrics if name.startswith("val_")
            }  # argmax of NaN looks like an accuracy
        elif cfg.result == "last" or improved(
            metrics[rule.metric], state.best, rule.mode, rule.min_delta
        ):
            state.best, state.best_epoch = metrics[rule.metric], state.epoch
        state.history.append(metrics)
        state.epoch, state.step, state.loss_sum, state.seen = state.epoch + 1, 0, 0.0, 0
        if state.epoch < cfg.epochs:
            lost = state.problem if problem and rule.nan_guard else None
            state.stopped = lost or why_stop(rule, state.history, state.seconds, state.worker_s)
        save(state)
        report(metrics, state)
    return state


def _settle(state: LoopState, engine: Engine, losses: Tensor, since: float) -> float:
    """Count the time since `since`; returns now. What ranks count apart (losses, images, clocks) becomes their mean on all of
    them: all have to stop for one reason, after one epoch, and go on from one state."""
    now = time.perf_counter()
    spent = now - since
    counts = [
        float(losses),
        state.seen,
        state.seconds + spent,
        state.worker_s + spent * engine.world,
    ]
    means = torch.tensor(counts, dtype=torch.float64, device=engine.device) / engine.world
    if engine.world > 1:
        dist.all_reduce(means)
    state.loss_sum, state.seen, state.seconds, state.worker_s = means.tolist()
    losses.fill_(state.loss_sum)
    return now


def _problem(metrics: dict[str, float], engine: Engine) -> str | None:
    """What is not finite: a loss, a logit (then val_loss is not), a weight. The same words on every rank."""
    weight = engine.not_finite()
    found = [unusable(metrics), f"the weights {weight} hold NaN or infinity" if weight else None]
    return ", ".join(words for words in found if words) or None


def _weighed(criterion: Criterion, weight: float, logits_BC: Tensor, targets: Tensor) -> Tensor:
    """This rank's mean loss by what its part of the batch counts: engines take the mean over the ranks."""
    return criterion(logits_BC, targets) * weight


def _seed(*parts: int) -> int:
    mixed = 0
    for part in parts:
        mixed = (mixed * 1_000_003 + part + 1) % 2**63
    return mixed


@torch.no_grad()
def evaluate(engine: Engine, feed: Feed, objective: Objective) -> dict[str, float]:
    """The metrics of the task over every rank's share of validation; exact, nothing padded."""
    engine.eval()
    totals = sum(
        objective.totals(engine.forward(batch.inputs), batch.labels_B) for batch in feed.val()
    )
    assert isinstance(
        totals, torch.Tensor
    )  # order.evaluation gives each rank a batch, if an empty one
    if engine.world > 1:
        dist.all_reduce(totals)
    return objective.metrics(totals)
