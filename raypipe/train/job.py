"""What one training depends on, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from raypipe.cluster.connect import ClusterConfig
from raypipe.config import RunConfig, Section, field_names, key_of, leaves, replace
from raypipe.errors import ConfigError
from raypipe.feed import order
from raypipe.feed.dataset import FeedConfig
from raypipe.images.augment import AugmentConfig
from raypipe.models.zoo import ModelConfig
from raypipe.registry.tracking import RegistryConfig
from raypipe.tables.table import TableConfig, TableVersion
from raypipe.train import objective as objectives
from raypipe.train.settings import TrainConfig

# What may change under a training that has begun: neither the model's shape, nor its data, nor
# what an optimizer's state is of.
_OPTIMIZER = (
    "lr",
    "weight_decay",
    "layer_decay",
    "unfreeze_epochs",
    "clip_norm",
    "schedule",
    "warmup",
)
_BATCH = ("batch_size", "accumulate", "label_smoothing", "focal_gamma")
MUTABLE = (
    "model.dropout",
    *(f"train.{n}" for n in (*_OPTIMIZER, *_BATCH)),
    *(f"augment.{n}" for n in field_names(AugmentConfig)),
)


class TrainJob(Section):
    """Everything one training run depends on.

    `by_epoch: {4: {train.lr: 0.001}}` gives fields other values after 4 epochs; fields that it does
    not name keep theirs. Weights and optimizer state go on, as they do in a resumed run. This is
    how population based training writes down what its winner was trained with.
    """

    table: TableConfig
    run: RunConfig = RunConfig()
    cluster: ClusterConfig = ClusterConfig()
    feed: FeedConfig = FeedConfig()
    model: ModelConfig = ModelConfig()
    augment: AugmentConfig = AugmentConfig()
    train: TrainConfig = TrainConfig()
    registry: RegistryConfig = RegistryConfig()
    by_epoch: dict[Annotated[int, Field(ge=1)], dict[str, Any]] = Field(default_factory=dict)

    @field_validator("by_epoch", mode="before")
    @classmethod
    def _dotted(cls, given: Any) -> Any:
        """Nested names become dotted ones, and texts numbers: the command line gives
        `by_epoch.4.train.lr=…` as both."""
        if not isinstance(given, dict):
            return given
        found: dict[Any, Any] = {}
        for epoch, values in given.items():
            key = int(epoch) if isinstance(epoch, str) and epoch.isdecimal() else epoch
            if not isinstance(values, dict) or isinstance(epoch, bool):
                raise ValueError("it gives fields by epoch, as in {4: {train.lr: 0.001}}")
            found[key] = found.get(key, {}) | dict(leaves(values))
        return found

    @field_validator("by_epoch")
    @classmethod
    def _mutable(cls, by_epoch: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        known = f"{', '.join(n for n in MUTABLE if not n.startswith('augment.'))} and augment.*"
        for name, value in (field for values in by_epoch.values() for field in values.items()):
            if name not in MUTABLE:
                raise ValueError(
                    f"{name} cannot change under a training that has begun. It can change {known}"
                )
            if value == "auto":
                raise ValueError(f"{name}=auto is found once, before the training. Give a number")
        return dict(sorted(by_epoch.items()))

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
            judged = train.model_copy(
                update={"stopping": stopping.model_copy(update={"metric": known[1]})}
            )
            self.__dict__["train"] = judged
        if self.feed.sampling == "balanced" and task != "single_label":
            raise ValueError(
                f"feed.sampling=balanced needs one class an image, and model.task={task}. Set it to weighted"
            )
        return self

    @model_validator(mode="after")
    def _every_stage(self) -> TrainJob:
        """Each stage is a job that would be accepted by itself."""
        if not self.by_epoch:
            return self
        last = max(self.by_epoch)
        if last >= self.train.epochs:
            raise ValueError(
                f"by_epoch changes values after epoch {last}, and train.epochs={self.train.epochs}"
            )
        if self.train.strategy.startswith("zero"):
            raise ValueError(
                "by_epoch rebuilds the optimizer; DeepSpeed's cannot be. Set train.strategy=ddp"
            )
        for epoch in self.by_epoch:
            try:
                self.stage(epoch)
            except ConfigError as e:
                raise ValueError(f"by_epoch {epoch}: {e}") from None
        return self

    def stage(self, epoch: int) -> tuple[TrainJob, int | None]:
        """The job in force after `epoch` epochs, and the epoch at which it changes (None: never)."""
        if not self.by_epoch:
            return self, None
        changes = {
            name: value
            for at, values in self.by_epoch.items()
            if at <= epoch
            for name, value in values.items()
        }
        plain = {
            name: getattr(self, name) for name in TrainJob.model_fields
        }  # of a larger job, the part that trains
        until = min((at for at in self.by_epoch if at > epoch), default=None)
        return replace(TrainJob.model_construct(**plain), changes | {"by_epoch": {}}), until

    @property
    def needs_cluster(self) -> bool:
        """Several workers do, and Ray's tasks, which embed or decode for others."""
        return (
            self.train.workers != 1
            or self.model.mode == "frozen"
            or self.feed.carrier in ("cache", "offload")
        )

    def training_key(self, version: TableVersion) -> str:
        """Names the result: same key, same data, same settings, same seed.

        How many workers, which carrier and how often a checkpoint is written do not change what is learned, so a run may
        be taken up with others. What an earlier raypipe began under another order is begun anew.
        """
        feed = self.feed.model_dump(mode="json", exclude=_HOW["feed"])
        train = self.train.model_dump(mode="json", exclude=_HOW["train"])
        stages = (
            (self.by_epoch,) if self.by_epoch else ()
        )  # without, the key is what it was before there were any
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
            *stages,
        )

    def folder(self, key: str) -> Path:
        """What the run of that key keeps: config.yaml, checkpoints/, result.json; profile/ and tensorboard/ if asked for."""
        return self.run.path / "train" / key


_HOW: dict[str, set[str]] = {
    "feed": {"carrier", "cache_mb", "threads", "prefetch", "trace"},
    "train": {
        *(
            "workers",
            "gpu",
            "timeout_s",
            "max_failures",
            "checkpoint_steps",
            "checkpoint_async",
            "keep_best",
        ),
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
