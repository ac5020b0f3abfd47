"""One training run: run(job) -> TrainResult. Training, search and retraining all come through here.

With one worker the loop runs in this process; with more, Ray Train starts that many and each runs the same `train_rank`. The
run's folder is named by everything that determines it, so running the same command again resumes an interrupted run and
returns a finished one.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from pydantic import model_validator
from torch import nn

from raypipe.cluster.connect import ClusterConfig
from raypipe.config import RunConfig, Section, key_of, save
from raypipe.errors import ClusterError, RaypipeError
from raypipe.feed import feed as feeds
from raypipe.feed.dataset import FeedConfig, Pinned, pin
from raypipe.feed.features import feature_sources
from raypipe.feed.feed import Feed, Source, fetch
from raypipe.images.augment import AugmentConfig
from raypipe.models.tasks import Task
from raypipe.models.zoo import Head, ImageModel, ModelConfig
from raypipe.registry.package import Reference
from raypipe.registry.tracking import RegistryConfig
from raypipe.tables.table import TableConfig, TableVersion
from raypipe.train import checkpoint, parallel
from raypipe.train import objective as objectives
from raypipe.train.loop import LoopState, Report, TrainConfig, fit
from raypipe.train.objective import Objective

log = logging.getLogger("raypipe")
SaveEngine = Callable[[LoopState, parallel.Engine], None]


class TrainJob(Section):
    """Everything one training run depends on."""

    table: TableConfig
    run: RunConfig = RunConfig()
    cluster: ClusterConfig = ClusterConfig()
    feed: FeedConfig = FeedConfig()
    model: ModelConfig = ModelConfig()
    augment: AugmentConfig = AugmentConfig()
    train: TrainConfig = TrainConfig()
    registry: RegistryConfig = RegistryConfig()

    @model_validator(mode="after")
    def _one_task(self) -> TrainJob:
        task, train = self.model.task, self.train
        objectives.check(task, train.class_weights, train.label_smoothing, train.focal_gamma)
        known, stopping = objectives.METRICS[task], train.stopping
        if stopping.metric not in known and "metric" in stopping.model_fields_set:
            raise ValueError(
                f"model.task={task} has no {stopping.metric}. Set train.stopping.metric to one of {', '.join(known)}"
            )
        if stopping.metric not in known:  # nobody asked for one: the task's own
            judged = train.model_copy(update={"stopping": stopping.model_copy(update={"metric": known[1]})})
            self.__dict__["train"] = judged
        if self.feed.sampling == "balanced" and task != "single_label":
            raise ValueError(f"feed.sampling=balanced needs one class an image, and model.task={task}. Set it to weighted")
        return self

    def training_key(self, version: TableVersion) -> str:
        """Names the result: same key, same data, same settings, same seed.

        How many workers, which carrier and how often a checkpoint is written do not change what is learned, so a run may
        be taken up with others.
        """
        feed = self.feed.model_dump(mode="json", exclude=_HOW["feed"])
        train = self.train.model_dump(mode="json", exclude=_HOW["train"])
        return key_of(
            str(version),
            self.table.where,
            self.table.sample,
            self.table.columns,
            feed,
            self.model,
            self.augment,
            train,
            self.run.seed,
        )


_HOW: dict[str, set[str]] = {
    "feed": {"carrier", "cache_mb", "threads", "prefetch", "trace"},
    "train": {"workers", "gpu", "timeout_s", "max_failures", "checkpoint_steps"},
}


@dataclass(frozen=True)
class TrainResult:
    """A finished run: the best epoch's metrics and where its checkpoint lies."""

    key: str
    version: TableVersion
    classes: tuple[str, ...]
    metrics: dict[str, float]
    history: tuple[dict[str, float], ...]
    best_epoch: int
    checkpoint: str
    seconds: float
    stopped: str | None = None  # why, when before its last epoch


@dataclass(frozen=True)
class Data:
    """What every rank and every trial trains on. `features` says that inputs are a frozen backbone's outputs."""

    classes: tuple[str, ...]
    features: bool
    train: Source
    val: Source


def run(job: TrainJob, classes: tuple[str, ...] | None = None, progress: Report = lambda metrics, state: None) -> TrainResult:
    """Train as `job` says on the pinned version of its table.

    Raises DataError, ClusterError, or RaypipeError when a worker died.
    """
    check_workers(job.train, ray.cluster_resources())
    pinned = pin(job.table, job.feed, classes, job.model.task)
    key = job.training_key(pinned.version)
    folder = job.run.path / "train" / key
    finished = folder / "result.json"
    if finished.exists():
        return _result(key, pinned, json.loads(finished.read_text()), 0.0)
    save(job, folder / "config.yaml")
    started = time.perf_counter()
    data = prepare(job, pinned)
    checkpoints = folder / "checkpoints"
    if job.train.workers == 1:
        state = train_rank(job, data, newest(checkpoints), saver(checkpoints), progress)
    else:
        state = _on_ray_train(job, data, checkpoints, progress)
    best = checkpoints / checkpoint.name(state.best_epoch + 1)
    outcome: dict[str, Any] = {"history": state.history, "best_epoch": state.best_epoch, "checkpoint": str(best)}
    outcome["stopped"] = state.stopped
    rule = job.train.stopping
    value = outcome["history"][outcome["best_epoch"]][rule.metric]
    if value != value:
        raise RaypipeError(
            "Training diverged", got=f"{rule.metric} was never a number", fix="Lower train.lr, or set train.clip_norm"
        )
    if problem := checkpoint.verify(best):
        raise RaypipeError(
            f"The best checkpoint is not whole: {problem}", got=str(best), rule="All nodes share run.dir", fix="Set run.dir"
        )
    partial = finished.with_suffix(".partial")
    partial.write_text(json.dumps(outcome))
    partial.replace(finished)
    return _result(key, pinned, outcome, time.perf_counter() - started)


def prepare(job: TrainJob, pinned: Pinned) -> Data:
    """Find the rows, and (frozen) embed or (cache) decode them once, for however many trials and epochs follow."""
    feed, model = job.feed, job.model
    frozen = model.mode == "frozen"
    if frozen:
        sources = feature_sources(pinned, [feed.train, feed.val], model, feed, str(job.run.path / "features"))
    else:
        sources = feeds.prepare(pinned, [feed.train, feed.val], model.pixels, feed, job.run.seed)
    return Data(pinned.classes, frozen, sources[feed.train], sources[feed.val])


def train_rank(job: TrainJob, data: Data, resume: Path | None, save: SaveEngine, report: Report) -> LoopState:
    """What one rank does, wherever it runs: build the model and the feed, resume, and fit. Every rank calls `save`."""
    torch.manual_seed(job.run.seed)
    cfg = job.train
    labels_N = fetch(data.train.rows).labels_N
    task = Task(job.model.task, data.classes)
    objective = Objective.of(task, labels_N, cfg.class_weights, cfg.label_smoothing, cfg.focal_gamma)
    model = trainable(job.model, data, objective)
    engine = parallel.build(model, cfg)
    state = LoopState()
    if resume is not None:
        weights, optimizer_state, state = checkpoint.read(resume)
        engine.load(weights, optimizer_state)
    feed = Feed(data.train, data.val, cfg.batch_size, job.run.seed, engine.rank, engine.world, engine.device)
    try:
        return fit(
            engine,
            feed,
            objective.to(engine.device),
            cfg,
            job.augment,
            state,
            report,
            lambda state: save(state, engine),
            job.run.seed,
        )
    finally:
        feed.close()
        if feed.replaced:
            log.warning("%d broken images were replaced by their neighbours", feed.replaced)


def trainable(model: ModelConfig, data: Data, objective: Objective) -> nn.Module:
    """The module to optimise: the head alone on frozen features, standardised by the training set, or the whole model."""
    whole: ImageModel | None = None
    if data.features:
        inputs = fetch(data.train.inputs)
        head = Head(inputs.shape[1], len(data.classes), model.dropout, scaled=model.task == "regression")
        head.standardise_by(torch.from_numpy(inputs.mean(0)), torch.from_numpy(inputs.std(0)))
    else:
        whole = ImageModel(model, len(data.classes))
        head = whole.head
    if head.scaled:
        head.scale_by(objective.mean, objective.spread)
    return whole or head


def assemble(job: TrainJob, result: TrainResult) -> ImageModel:
    """The whole model, from pixels to logits, with the weights of the result's best epoch."""
    weights, _, _ = checkpoint.read(Path(result.checkpoint))
    model = ImageModel(job.model, len(result.classes))
    (model.head if job.model.mode == "frozen" else model).load_state_dict(weights)
    return model.eval()


def reference(job: TrainJob, model: ImageModel, pinned: Pinned) -> Reference:
    """Features and scores of the validation split: images of the training domain that the weights have not seen, which
    is what later batches are compared with. Training images would look too easy, and every new batch would drift."""
    data = prepare(job, pinned)
    feed = Feed(data.train, data.val, 256, job.run.seed)
    ids = tuple(fetch(data.val.rows).ids.to_pylist())
    if data.features:
        features_ND = np.array(fetch(data.val.inputs))
        with torch.inference_mode():
            return Reference(features_ND, model.scores(model.head(torch.from_numpy(features_ND))).numpy(), ids)
    predictor = model.for_inference()
    parts = [predictor.predict(batch.inputs.numpy()) for batch in feed.val()]
    features_ND, scores_NC = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Reference(features_ND, scores_NC, ids)


def check_workers(cfg: TrainConfig, resources: dict[str, float]) -> None:
    """Raise ClusterError when the cluster could never start that many workers: waiting would be forever."""
    kind = "GPU" if wants_gpu(cfg, resources) else "CPU"
    have = int(resources.get(kind, 0))
    if cfg.workers > have:
        raise ClusterError(
            "More workers than the cluster has",
            got=f"train.workers={cfg.workers}",
            rule=f"It has {have} {kind}s",
            fix=f"Set train.workers={max(1, have)}",
        )


def wants_gpu(cfg: TrainConfig, resources: dict[str, float]) -> bool:
    return resources.get("GPU", 0) > 0 if cfg.gpu == "auto" else cfg.gpu


def saver(checkpoints: Path) -> SaveEngine:
    """Publishes a checkpoint of each state it is given, and keeps the best epoch's and the newest."""

    def save(state: LoopState, engine: parallel.Engine) -> None:
        weights, optimizer_state = engine.weights(), engine.optimizer_state()  # collective for sharded strategies: all ranks
        if engine.rank == 0:
            name = checkpoint.name(state.epoch, state.step)
            checkpoint.write(checkpoints / name, weights, optimizer_state, state)
            checkpoint.keep(checkpoints, {checkpoint.name(state.best_epoch + 1), name})

    return save


def newest(checkpoints: Path) -> Path | None:
    """Where to resume: the furthest checkpoint that verifies. What is torn is named and left alone."""
    found, skipped = checkpoint.newest(checkpoints.glob("epoch-*")) if checkpoints.exists() else (None, [])
    for problem in skipped:
        log.warning("Skipped checkpoint %s", problem)
    return found


def _on_ray_train(job: TrainJob, data: Data, checkpoints: Path, progress: Report) -> LoopState:
    from ray.train import FailureConfig, ScalingConfig, TrainingFailedError
    from ray.train import RunConfig as RayRunConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.util.queue import Queue

    resources = ray.cluster_resources()
    gpu = wants_gpu(job.train, resources)
    # Cached and offloaded images are decoded by tasks: they need a CPU, or workers wait for ever.
    spare = resources.get("CPU", 1) - (data.train.carrier in ("cache", "offload"))
    per_worker = {"CPU": max(0.1, min(1.0, spare / job.train.workers))} | ({"GPU": 1} if gpu else {})
    epochs = Queue(actor_options={"num_cpus": 0})
    trainer = TorchTrainer(
        _ray_rank,
        train_loop_config={
            "job": job.model_dump(mode="json", include=set(TrainJob.model_fields)),
            "epochs": epochs,
            "data": data,
            "checkpoints": str(checkpoints),
        },
        scaling_config=ScalingConfig(num_workers=job.train.workers, use_gpu=gpu, resources_per_worker=per_worker),
        torch_config=TorchConfig(backend="nccl" if gpu else "gloo", timeout_s=int(job.train.timeout_s)),
        run_config=RayRunConfig(
            # A name of its own each time: Ray would take up the old run of that name, or refuse to start when the kill left its
            # snapshot torn. Our checkpoints say where to go on.
            name=f"{checkpoints.parent.name}-{uuid.uuid4().hex[:8]}",
            storage_path=str(job.run.path / "ray"),
            failure_config=FailureConfig(max_failures=job.train.max_failures),
        ),
    )
    try:
        with _relayed(epochs, progress):
            result = trainer.fit()
    except TrainingFailedError as e:  # of the errors of all ranks, ours says most; a rank that only lost its peers says least
        causes = [getattr(c, "_base_exc", c) for c in getattr(e, "worker_failures", {}).values()]
        if ours := [c for c in causes if isinstance(c, RaypipeError)]:
            raise ours[0] from None
        reason = " ".join(str(causes[0] if causes else e).split())[:400]
        raise RaypipeError(f"Training failed on a worker: {reason}", fix=f"Checkpoints are kept in {checkpoints}") from e
    return LoopState(**result.return_value)


@contextmanager
def _relayed(epochs: Any, progress: Report) -> Iterator[None]:
    """Tell `progress` of each epoch that rank 0 puts into the queue, while the block runs."""
    from ray.util.queue import Empty

    done = threading.Event()

    def relay() -> None:
        while not done.is_set() or epochs.qsize():
            try:
                progress(*epochs.get(timeout=0.5))
            except Empty:
                continue

    thread = threading.Thread(target=relay, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=10)
        epochs.shutdown(force=True)


def _ray_rank(config: dict[str, Any]) -> dict[str, Any]:
    """Runs on a Ray Train worker; rank 0 writes the checkpoints, into a folder that all nodes share. Returns the loop state."""
    import ray.train
    import ray.train.torch

    device = ray.train.torch.get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Ray shows a worker all GPUs of its node
    job, data = TrainJob.model_validate(config["job"]), config["data"]
    checkpoints = Path(config["checkpoints"])

    def report(metrics: dict[str, float], state: LoopState) -> None:
        if ray.train.get_context().get_world_rank() == 0:
            config["epochs"].put((metrics, state))
        ray.train.report(metrics)

    return train_rank(job, data, newest(checkpoints), saver(checkpoints), report).to_dict()


def _result(key: str, pinned: Pinned, outcome: dict[str, Any], seconds: float) -> TrainResult:
    history, best = outcome["history"], outcome["best_epoch"]
    where, stopped = outcome["checkpoint"], outcome["stopped"]
    return TrainResult(key, pinned.version, pinned.classes, history[best], tuple(history), best, where, seconds, stopped)
