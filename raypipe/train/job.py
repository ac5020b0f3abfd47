"""What one training depends on, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import model_validator

from raypipe.cluster.connect import ClusterConfig
from raypipe.config import RunConfig, Section, key_of
from raypipe.feed import order
from raypipe.feed.dataset import FeedConfig
from raypipe.images.augment import AugmentConfig
from raypipe.models.zoo import ModelConfig
from raypipe.registry.tracking import RegistryConfig
from raypipe.tables.table import TableConfig, TableVersion
from raypipe.train import objective as objectives
from raypipe.train.settings import TrainConfig


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

    @property
    def needs_cluster(self) -> bool:
        """Several workers do, and Ray's tasks, which embed or decode for others."""
        return self.train.workers != 1 or self.model.mode == "frozen" or self.feed.carrier in ("cache", "offload")

    def training_key(self, version: TableVersion) -> str:
        """Names the result: same key, same data, same settings, same seed.

        How many workers, which carrier and how often a checkpoint is written do not change what is learned, so a run may
        be taken up with others. What an earlier raypipe began under another order is begun anew.
        """
        feed = self.feed.model_dump(mode="json", exclude=_HOW["feed"])
        train = self.train.model_dump(mode="json", exclude=_HOW["train"])
        return key_of(
            order.FORMAT,
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

    def folder(self, key: str) -> Path:
        """What the run of that key keeps: config.yaml, checkpoints/, result.json; profile/ and tensorboard/ if asked for."""
        return self.run.path / "train" / key


_HOW: dict[str, set[str]] = {
    "feed": {"carrier", "cache_mb", "threads", "prefetch", "trace"},
    "train": {
        *("workers", "gpu", "timeout_s", "max_failures", "checkpoint_steps", "checkpoint_async", "keep_best"),
        *("strategy", "offload", "activation_checkpointing", "compile", "channels_last"),
        *("profile", "tensorboard"),
    },
}


@dataclass(frozen=True)
class TrainResult:
    """A finished run: the metrics of its best epoch (of its last, if train.result says so) and where its checkpoint lies."""

    key: str
    version: TableVersion
    classes: tuple[str, ...]
    metrics: dict[str, float]
    history: tuple[dict[str, float], ...]
    best_epoch: int
    checkpoint: str
    seconds: float
    stopped: str | None = None  # why, when before its last epoch
