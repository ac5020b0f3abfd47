"""What one rank of a training does: in this process, in a trial of a search, on a worker."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from raypipe.feed.feed import Feed, Source, fetch
from raypipe.models import finite
from raypipe.models.heads import Head, KernelHead
from raypipe.models.tasks import Task
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.train import checkpoint, parallel, start
from raypipe.train.checkpoint.saver import Saver
from raypipe.train.job import TrainJob
from raypipe.train.loop import LoopState, Report, evaluate, fit, fitted
from raypipe.train.measure.flops import flops_per_image
from raypipe.train.measure.meter import Meter, ReportPosition
from raypipe.train.measure.profile import profiler
from raypipe.train.objective import Objective
from raypipe.train.preemption import Notice
from raypipe.train.settings import TrainConfig
from raypipe.train.solve import fit as solving

log = logging.getLogger("raypipe")
SaveEngine = Callable[[LoopState, parallel.Engine], None]


@dataclass(frozen=True)
class Data:
    """What every rank and every trial trains on."""

    classes: tuple[str, ...]
    features: bool
    """Are the inputs the outputs of a frozen backbone, rather than pixels?"""
    train: Source
    val: Source


class Prepared:
    """What a job trains on, made when it is first asked for, and held until `release`."""

    def __init__(self, make: Callable[[], Data]) -> None:
        self._make = make
        self._data: Data | None = None

    def __call__(self) -> Data:
        if self._data is None:
            self._data = self._make()
        return self._data

    def release(self) -> None:
        """Forget the data: decoded images fill the object store."""
        self._data = None


def train_rank(
    job: TrainJob,
    data: Data,
    resume: Path | None,
    save: SaveEngine,
    report: Report,
    must_leave: Callable[[], bool] | None = None,
    meter: Meter | None = None,
    until: int | None = None,
) -> LoopState:
    """Build the model and the feed, resume from a verified checkpoint, and fit; the loop's state.

    save: called by every rank. must_leave: was this rank told to leave? If any rank was, all save
    the step they are in and return an unfinished state. meter: trials have none, and then FLOPs are
    not counted, because many trials are shorter than the counting. until: return after so many
    epochs, where another stage of the job begins.
    """
    # Every rank starts with the same weights.
    torch.manual_seed(job.run.seed)
    cfg = job.train
    objective = objective_of(job, data)
    model = trainable(job.model, data, objective)
    # A resumed run has trained these weights further already.
    if cfg.start_from is not None and resume is None:
        start.load_into(model, Path(cfg.start_from), job.model, data.classes)
    fit_s = 0.0
    if cfg.solver != "steps":
        # Its sums are of features as they are: bf16 would be no similarity.
        cfg = cfg.model_copy(update={"precision": "fp32", "ema": None})
        if resume is None:
            fit_s = _solve(model, data, objective, job)
    example = _example(job, data)
    if meter is not None and cfg.solver == "steps":
        meter.flops = flops_per_image(model, example)
    engine = parallel.build(model, cfg, meter, example)
    state = LoopState()
    if resume is not None:
        saved = checkpoint.read(resume, verified=True)
        engine.load(saved.weights, saved.optimizer, saved.facts)
        state = saved.state.with_usable_best(cfg.stopping, cfg.result == "last")
        state = state.among(engine.world, saved.world)
    feed = Feed(
        data.train,
        data.val,
        int(cfg.batch_size),
        job.run.seed,
        engine.rank,
        engine.world,
        engine.device,
        cfg.accumulate,
    )
    if cfg.solver != "steps":
        try:
            return _validated(engine, feed, objective, cfg, state, report, save, fit_s)
        finally:
            feed.close()
            engine.meter.close()
    leaving = Notice(must_leave, engine.device, engine.world) if must_leave else lambda: False
    # False only if a next stage follows: it goes on with the same meter.
    last_stage = True
    try:
        state = fit(
            engine,
            feed,
            objective.to(engine.device),
            cfg,
            job.augment,
            state,
            report,
            lambda state: save(state, engine),
            job.run.seed,
            leaving,
            until,
        )
        last_stage = state.epoch != until or state.finished(cfg.epochs)
        return state
    finally:
        feed.close()
        if last_stage:
            engine.meter.close()
        if feed.replaced:
            log.warning(
                "%d images cannot be read: in training others stand for them, and validation is of "
                "the other images",
                feed.replaced,
            )


def _solve(model: nn.Module, data: Data, objective: Objective, job: TrainJob) -> float:
    """Fit the head of frozen features at once; the seconds that it took.

    Every rank does it, and rank 0's weights count.
    """
    assert isinstance(model, Head)
    started = time.perf_counter()
    rows = fetch(data.train.rows)
    # A broken image has the features of the one that replaces it, and so its label.
    samples_N = np.arange(len(rows))
    for sample, (other, _) in data.train.broken.items():
        samples_N[sample] = other
    examples = solving.Examples(
        fetch(data.train.inputs), rows.labels(samples_N), rows.weights(data.train.cfg)
    )
    solving.fit(model, examples, objective, job.train.solver, job.run.seed)
    return time.perf_counter() - started


def _validated(
    engine: parallel.Engine,
    feed: Feed,
    objective: Objective,
    cfg: TrainConfig,
    state: LoopState,
    report: Report,
    save: SaveEngine,
    fit_s: float,
) -> LoopState:
    return fitted(
        engine,
        feed,
        objective.to(engine.device),
        cfg,
        state,
        report,
        lambda state: save(state, engine),
        fit_s,
    )


def train_stages(
    job: TrainJob,
    data: Data,
    newest: Callable[[], Path | None],
    saver: Saver,
    report: Report,
    must_leave: Callable[[], bool] | None = None,
    meter: Meter | None = None,
) -> LoopState:
    """`train_rank` for each stage of `job.by_epoch`, from the newest checkpoint on.

    Between two stages, weights and optimizer go through a checkpoint. A trial of a population does
    the same when it goes on with other values: so both end with equal weights.
    """
    while True:
        resume = newest()
        epoch = 0
        if resume is not None:
            epoch = checkpoint.read(resume, verified=True).state.epoch
        stage, until = job.stage(epoch)
        state = train_rank(stage, data, resume, saver, report, must_leave, meter, until)
        stage_ended = until is not None and state.epoch >= until
        if not stage_ended or state.finished(job.train.epochs):
            return state
        # The next stage reads the checkpoint of this one.
        saver.wait()


def validate(job: TrainJob, data: Data, weights: Mapping[str, Tensor]) -> dict[str, float]:
    """The validation metrics of these weights, computed in this process alone."""
    objective = objective_of(job, data)
    model = trainable(job.model, data, objective)
    model.load_state_dict(dict(weights))
    # Whatever the strategy of the training is.
    cfg = job.train.model_copy(update={"strategy": "single"})
    engine = parallel.build(model, cfg)
    # As many images at once as a worker of the training had.
    micro = cfg.accumulate * cfg.fewest_workers
    feed = Feed(
        data.train, data.val, int(cfg.batch_size), job.run.seed, device=engine.device, micro=micro
    )
    try:
        return evaluate(engine, feed, objective.to(engine.device))
    finally:
        feed.close()


def objective_of(job: TrainJob, data: Data) -> Objective:
    """The loss and the metrics of a job, from all its training labels."""
    cfg = job.train
    labels_N = fetch(data.train.rows).labels_N
    task = Task(job.model.task, data.classes)
    return Objective.of(task, labels_N, cfg.class_weights, cfg.label_smoothing, cfg.focal_gamma)


def meter_of(job: TrainJob, folder: Path, report_position: ReportPosition | None) -> Meter:
    """A meter for this rank; it writes the profile that the job asks for into the run's folder."""
    if job.train.profile is None:
        return Meter(report_position)
    rank, _ = parallel.ranks()
    return Meter(report_position, profiler(job.train.profile, folder / "profile", rank))


def _example(job: TrainJob, data: Data) -> torch.Tensor:
    """The shape of one input, without its values."""
    if data.features:
        features_ND = fetch(data.train.inputs)
        return torch.empty((1, *features_ND.shape[1:]), device="meta")
    side_px = job.model.pixels
    return torch.empty((1, side_px, side_px, 3), dtype=torch.uint8, device="meta")


def trainable(model: ModelConfig, data: Data, objective: Objective) -> nn.Module:
    """The module to optimise: the whole model, or on frozen features the head alone.

    The head of frozen features standardises them by the training set.
    """
    whole: ImageModel | None = None
    if data.features:
        inputs = fetch(data.train.inputs)
        finite.require_rows(
            inputs, "features", "Check the weights of model.name, or take another backbone"
        )
        head = model.head_of(inputs.shape[1], len(data.classes), len(inputs))
        if isinstance(head, KernelHead):
            # A copy: arrays of the object store are read-only, and torch warns of it.
            inputs = head.prepared(torch.from_numpy(np.array(inputs))).numpy()
        mean_D, std_D = inputs.mean(0), inputs.std(0)
        head.standardise_by(torch.from_numpy(mean_D), torch.from_numpy(std_D))
    else:
        whole = ImageModel(model, len(data.classes))
        head = whole.head
    # Regression: outputs start at the labels' mean and in units of their spread.
    if head.scaled:
        head.scale_by(objective.mean, objective.spread)
    return whole or head
