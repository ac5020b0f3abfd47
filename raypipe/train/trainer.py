"""One training run: run(job) -> TrainResult. Training, search and retraining all come through here.

With one worker the loop runs in this process; with more, Ray Train starts that many and each runs the same `train_rank`. The
run's folder is named by everything that determines it, so running the same command again resumes an interrupted run and
returns a finished one.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch import nn

from raypipe.cluster.connect import ClusterConfig
from raypipe.config import RunConfig, Section, key_of, save
from raypipe.errors import ClusterError, RaypipeError
from raypipe.feed import read
from raypipe.feed.dataset import CacheFeed, Feed, FeedConfig, OffloadFeed, Pinned, Samples, pin
from raypipe.images.augment import AugmentConfig
from raypipe.models.zoo import BACKBONES, Head, ImageModel, ModelConfig
from raypipe.registry.package import Reference
from raypipe.registry.tracking import RegistryConfig
from raypipe.tables.table import TableConfig, TableVersion
from raypipe.train import checkpoint, parallel
from raypipe.train.loop import LoopState, Report, TrainConfig, fit

log = logging.getLogger("raypipe")


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

    def training_key(self, version: TableVersion) -> str:
        """Names the result: same key, same data, same settings, same seed."""
        return key_of(
            str(version), self.table.where, self.table.columns, self.feed, self.model, self.augment, self.train, self.run.seed
        )


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


@dataclass(frozen=True)
class Data:
    """What every rank and every trial trains on. Samples live in the object store; streams are Ray Data sets."""

    classes: tuple[str, ...]
    kind: str  # "features" | "pixels" | "stream"
    train: Any
    val: Any
    train_rows: int


def run(job: TrainJob, classes: tuple[str, ...] | None = None, progress: Report = lambda metrics, state: None) -> TrainResult:
    """Train as `job` says on the pinned version of its table.

    Raises DataError, ClusterError, or RaypipeError when a worker died.
    """
    check_workers(job.train, ray.cluster_resources())
    pinned = pin(job.table, job.feed, classes)
    key = job.training_key(pinned.version)
    folder = job.run.path / "train" / key
    finished = folder / "result.json"
    if finished.exists():
        return _result(key, pinned, json.loads(finished.read_text()), 0.0)
    save(job, folder / "config.yaml")
    started = time.perf_counter()
    data = prepare(job, pinned)
    if job.train.workers == 1:
        outcome = _in_process(job, data, folder, progress)
    else:
        outcome = _on_ray_train(job, data, folder, key, progress)
    rule = job.train.stopping
    value = outcome["history"][outcome["best_epoch"]][rule.metric]
    if value != value:
        raise RaypipeError(
            "Training diverged", got=f"{rule.metric} was never a number", fix="Lower train.lr, or set train.clip_norm"
        )
    partial = finished.with_suffix(".partial")
    partial.write_text(json.dumps(outcome))
    partial.replace(finished)
    return _result(key, pinned, outcome, time.perf_counter() - started)


def prepare(job: TrainJob, pinned: Pinned) -> Data:
    """Read, decode and (frozen) embed the rows once, for however many trials and epochs follow."""
    feed, model = job.feed, job.model
    if model.mode == "frozen":
        store = str(job.run.path / "features")
        samples = read.feature_samples(pinned, [feed.train, feed.val], model, feed, store)
        return _in_store(pinned.classes, "features", samples[feed.train], samples[feed.val])
    mb = (pinned.counts[feed.train] + pinned.counts[feed.val]) * model.pixels**2 * 3 / 2**20
    carrier = ("cache" if mb <= feed.cache_mb else "offload") if feed.carrier == "auto" else feed.carrier
    log.info("Feed: %s (decoded images take %.0f MB, feed.cache_mb is %d)", carrier, mb, feed.cache_mb)
    if carrier == "cache":
        return _in_store(
            pinned.classes, "pixels", *(read.pixel_samples(pinned, s, model, feed) for s in (feed.train, feed.val))
        )
    train, val = (read.pixels(pinned, s, model, feed) for s in (feed.train, feed.val))
    return Data(pinned.classes, "stream", train, val, pinned.counts[feed.train])


def train_rank(
    job: TrainJob, data: Data, resume: Path | None, report: Callable[[dict[str, float], LoopState, parallel.Engine], None]
) -> LoopState:
    """What one rank does, wherever it runs: build the model and the feed, resume, and fit."""
    torch.manual_seed(job.run.seed)
    model = trainable(job.model, data)
    cfg = job.train
    engine = parallel.build(
        model, len(data.classes), cfg.strategy, cfg.lr, cfg.weight_decay, cfg.clip_norm, cfg.precision, cfg.batch_size
    )
    state = LoopState()
    if resume is not None:
        weights, optimizer_state, state = checkpoint.read(resume)
        engine.load(weights, optimizer_state)
    feed = _feed(job, data, engine)
    return fit(engine, feed, cfg, job.augment, state, lambda metrics, state: report(metrics, state, engine), job.run.seed)


def trainable(model: ModelConfig, data: Data) -> nn.Module:
    """The module to optimise: the head alone on frozen features, standardised by the training set, or the whole model."""
    if data.kind != "features":
        return ImageModel(model, len(data.classes))
    head = Head(BACKBONES[model.name].features, len(data.classes), model.dropout)
    inputs = _fetch(data.train).inputs
    head.standardise_by(torch.from_numpy(inputs.mean(0)), torch.from_numpy(inputs.std(0)))
    return head


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
    if data.kind == "features":
        val = _fetch(data.val)
        with torch.inference_mode():
            scores_NC = model.head(torch.from_numpy(np.array(val.inputs))).softmax(1).numpy()
        return Reference(val.inputs, scores_NC, val.ids)
    predictor = model.for_inference()
    if data.kind == "pixels":
        val = _fetch(data.val)
        return Reference(*predictor.predict(val.inputs), val.ids)
    parts = [(*predictor.predict(b["pixels"]), b["id"]) for b in data.val.iter_batches(batch_size=256, batch_format="numpy")]
    features_ND, scores_NC, ids = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Reference(features_ND, scores_NC, tuple(ids.tolist()))


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


def _in_process(job: TrainJob, data: Data, folder: Path, progress: Report) -> dict[str, Any]:
    checkpoints = folder / "checkpoints"
    resume, skipped = checkpoint.newest(checkpoints.glob("epoch-*")) if checkpoints.exists() else (None, [])
    for problem in skipped:
        log.warning("Skipped checkpoint %s", problem)

    def report(metrics: dict[str, float], state: LoopState, engine: parallel.Engine) -> None:
        checkpoint.write(checkpoints / f"epoch-{state.epoch - 1:04d}", engine.weights(), engine.optimizer_state(), state)
        checkpoint.keep(checkpoints, {state.best_epoch, state.epoch - 1})
        progress(metrics, state)

    state = train_rank(job, data, resume, report)
    return {
        "history": state.history,
        "best_epoch": state.best_epoch,
        "checkpoint": str(checkpoints / f"epoch-{state.best_epoch:04d}"),
    }


def _on_ray_train(job: TrainJob, data: Data, folder: Path, key: str, progress: Report) -> dict[str, Any]:
    from ray.train import CheckpointConfig, FailureConfig, ScalingConfig, TrainingFailedError
    from ray.train import RunConfig as RayRunConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.util.queue import Queue

    resources = ray.cluster_resources()
    gpu = wants_gpu(job.train, resources)
    stream = data.kind == "stream"
    spare = resources.get("CPU", 1) - (1 if stream else 0)  # a stream needs a CPU to decode on, or workers wait for ever
    per_worker = {"CPU": max(0.1, min(1.0, spare / job.train.workers))} | ({"GPU": 1} if gpu else {})
    rule = job.train.stopping
    epochs = Queue(actor_options={"num_cpus": 0})
    trainer = TorchTrainer(
        _ray_rank,
        train_loop_config={
            "job": job.model_dump(mode="json", include=set(TrainJob.model_fields)),
            "epochs": epochs,
            "data": dataclasses.replace(data, train=None, val=None) if stream else data,
        },
        scaling_config=ScalingConfig(num_workers=job.train.workers, use_gpu=gpu, resources_per_worker=per_worker),
        torch_config=TorchConfig(backend="nccl" if gpu else "gloo", timeout_s=int(job.train.timeout_s)),
        datasets={"train": data.train, "val": data.val} if stream else None,
        run_config=RayRunConfig(
            name=key,  # the same name resumes the same run: a rerun after a kill goes on from its last epoch
            storage_path=str(folder.parent),
            failure_config=FailureConfig(max_failures=job.train.max_failures),
            checkpoint_config=CheckpointConfig(
                num_to_keep=2, checkpoint_score_attribute=rule.metric, checkpoint_score_order=rule.mode
            ),
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
        raise RaypipeError(f"Training failed on a worker: {reason}", fix=f"Checkpoints are kept in {folder}") from e
    kept = [Path(c.path) for c, _ in result.best_checkpoints]
    states = [(json.loads((p / "state.json").read_text()), p) for p in kept if checkpoint.verify(p) is None]
    if not states:
        raise RaypipeError("Training ended without a checkpoint that verifies", got=str(folder))
    history = max(states, key=lambda s: s[0]["epoch"])[0]["history"]
    sign = 1 if rule.mode == "max" else -1  # of equally good epochs Ray keeps the latest ones: take the best that is there
    best, path = max(states, key=lambda s: (sign * history[s[0]["epoch"] - 1][rule.metric], -s[0]["epoch"]))
    return {"history": history, "best_epoch": best["epoch"] - 1, "checkpoint": str(path)}


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


def _ray_rank(config: dict[str, Any]) -> None:
    """Runs on a Ray Train worker: rank 0 attaches the checkpoint, every rank reports."""
    import ray.train
    import ray.train.torch

    device = ray.train.torch.get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Ray shows a worker all GPUs of its node
    job, data = TrainJob.model_validate(config["job"]), config["data"]
    if data.kind == "stream":
        data = Data(
            data.classes, "stream", ray.train.get_dataset_shard("train"), ray.train.get_dataset_shard("val"), data.train_rows
        )
    found = ray.train.get_checkpoint()

    def report(metrics: dict[str, float], state: LoopState, engine: parallel.Engine) -> None:
        weights, optimizer_state = (
            engine.weights(),
            engine.optimizer_state(),
        )  # collective for sharded strategies: every rank calls
        if engine.rank != 0:
            ray.train.report(metrics, checkpoint=None)
            return
        config["epochs"].put((metrics, state))
        with tempfile.TemporaryDirectory() as scratch:
            checkpoint.write(Path(scratch), weights, optimizer_state, state)
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(scratch))

    train_rank(job, data, Path(found.path) if found else None, report)


def _feed(job: TrainJob, data: Data, engine: parallel.Engine) -> Feed:
    if data.kind == "stream":
        return OffloadFeed(data.train, data.val, data.train_rows, job.train.batch_size, engine.world, engine.device)
    train, val = _fetch(data.train), _fetch(data.val)
    return CacheFeed(train, val, job.train.batch_size, job.run.seed, engine.rank, engine.world, engine.device)


def _in_store(classes: tuple[str, ...], kind: str, train: Samples, val: Samples) -> Data:
    return Data(classes, kind, ray.put(train), ray.put(val), len(train))


def _fetch(samples: Any) -> Samples:
    return ray.get(samples) if isinstance(samples, ray.ObjectRef) else samples  # type: ignore[no-any-return]


def _result(key: str, pinned: Pinned, outcome: dict[str, Any], seconds: float) -> TrainResult:
    history, best = outcome["history"], outcome["best_epoch"]
    return TrainResult(key, pinned.version, pinned.classes, history[best], tuple(history), best, outcome["checkpoint"], seconds)
