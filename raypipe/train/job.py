"""The configuration of one training, the key that names it, and its result."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from raypipe.cluster.connect import ClusterConfig
from raypipe.config import RunConfig, Section, field_names, key_of, leaves, replace
from raypipe.errors import ConfigError
from raypipe.feed import order
from raypipe.feed.dataset import FeedConfig, parts
from raypipe.files import by_content
from raypipe.images.augment import AugmentConfig
from raypipe.models import fingerprint
from raypipe.models.zoo import ModelConfig
from raypipe.registry import package
from raypipe.registry.tracking import RegistryConfig
from raypipe.tables.table import TableConfig, TableVersion
from raypipe.train import objective as objectives
from raypipe.train.settings import TrainConfig

# Settings that may change while a training runs. The model's shape, the data and what the
# optimizer's state describes may not.
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

# Settings that change how a training runs, but not what it learns: not part of its key.
_NOT_IN_KEY: dict[str, set[str]] = {
    "feed": {"carrier", "cache_mb", "threads", "prefetch", "trace"},
    "train": {
        "workers",
        "launcher",
        "gpu",
        "timeout_s",
        "max_failures",
        "checkpoint_steps",
        "checkpoint_async",
        "keep_best",
        "strategy",
        "offload",
        "activation_checkpointing",
        "compile",
        "channels_last",
        "profile",
        "tensorboard",
    },
}


class TrainSections(Section):
    """The sections of a configuration that a training depends on, and their rules."""

    table: TableConfig
    """The table of images and labels."""
    run: RunConfig = RunConfig()
    """Where results are stored, and the seed."""
    cluster: ClusterConfig = ClusterConfig()
    """The Ray cluster."""
    feed: FeedConfig = FeedConfig()
    """How images are split, sampled and read."""
    model: ModelConfig = ModelConfig()
    """The network and its input."""
    augment: AugmentConfig = AugmentConfig()
    """Random changes of training images. They have no effect on frozen features, which are made
    once, of the images as they are: set `model.mode=finetune`."""
    train: TrainConfig = TrainConfig()
    """How the model is trained."""
    registry: RegistryConfig = RegistryConfig()
    """Where runs and models are registered."""
    by_epoch: dict[Annotated[int, Field(ge=1)], dict[str, Any]] = Field(default_factory=dict)
    """Other values for some fields from an epoch on: `{4: {train.lr: 0.001}}` changes the learning
    rate after 4 epochs. Weights and optimizer state are kept, as in a resumed run. best.yaml of a
    population based training has the winner's values here."""

    @field_validator("by_epoch", mode="before")
    @classmethod
    def _dotted(cls, given: Any) -> Any:
        """Nested names become dotted ones, and texts numbers.

        The command line gives `by_epoch.4.train.lr=…` as nested names and texts.
        """
        if not isinstance(given, dict):
            return given
        stages: dict[Any, Any] = {}
        for epoch, values in given.items():
            # Python counts True as 1, but it is no epoch.
            if not isinstance(values, dict) or isinstance(epoch, bool):
                raise ValueError("it gives fields by epoch, as in {4: {train.lr: 0.001}}")
            key = epoch
            if isinstance(epoch, str) and epoch.isdecimal():
                key = int(epoch)
            # "4" from the command line adds to 4 from the file.
            earlier = stages.get(key, {})
            stages[key] = earlier | dict(leaves(values))
        return stages

    @field_validator("by_epoch")
    @classmethod
    def _mutable(cls, by_epoch: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        for values in by_epoch.values():
            for name, value in values.items():
                if name not in MUTABLE:
                    known = ", ".join(n for n in MUTABLE if not n.startswith("augment."))
                    raise ValueError(
                        f"{name} cannot change under a training that has begun. "
                        f"It can change {known} and augment.*"
                    )
                if value == "auto":
                    raise ValueError(
                        f"{name}=auto is found once, before the training. Give a number"
                    )
        return dict(sorted(by_epoch.items()))

    @model_validator(mode="after")
    def _fits_task(self) -> Self:
        """Loss, metric and sampling must fit the task; an unset metric becomes the task's own."""
        task, train = self.model.task, self.train
        objectives.check(task, train.class_weights, train.label_smoothing, train.focal_gamma)
        known = objectives.METRICS[task]
        stopping = train.stopping
        is_set = "metric" in stopping.model_fields_set
        # On which side of 0.5 a number lies says little of it, and nothing if all lie on one.
        if stopping.metric not in known or (task == "probability" and not is_set):
            if is_set:
                raise ValueError(
                    f"model.task={task} has no {stopping.metric}. "
                    f"Set train.stopping.metric to one of {', '.join(known)}"
                )
            # Nobody set a metric. The model is frozen, so its field is set past pydantic.
            of_task = stopping.model_copy(update={"metric": known[1]})
            self.__dict__["train"] = train.model_copy(update={"stopping": of_task})
        self._require_solvable()
        if self.model.calibrate and set(parts(self.feed.val)) <= set(parts(self.feed.train)):
            raise ValueError(
                "model.calibrate fits a temperature on validation images, and all of feed.val="
                f"{self.feed.val} are trained on. Set model.calibrate=false"
            )
        if self.feed.sampling == "balanced" and task != "single_label":
            raise ValueError(
                f"feed.sampling=balanced needs one class an image, and model.task={task}. "
                "Set it to weighted"
            )
        return self

    @property
    def idle_augment(self) -> str:
        """Which settings of `augment` change nothing, in words; "" if they all count."""
        return self.idle_if_frozen() if self.model.mode == "frozen" else ""

    def idle_if_frozen(self, drawn: Collection[str] = ()) -> str:
        """Which settings of `augment` frozen features do not have, in words; "": none is set.

        drawn: dotted fields that a search sets.
        """
        usual = AugmentConfig().model_dump()
        given = self.augment.model_dump()
        is_set = [name for name in usual if given[name] != usual[name]]
        names = [f"augment.{n}" for n in usual if n in is_set or f"augment.{n}" in drawn]
        if not names:
            return ""
        has = "has" if len(names) == 1 else "have"
        return f"{', '.join(names)} {has} no effect on frozen features: set model.mode=finetune"

    def _require_solvable(self) -> None:
        """Raise ValueError for a setting that train.solver cannot honour."""
        model, train = self.model, self.train
        if train.solver == "steps":
            if model.head == "kernel" and model.mode == "frozen":
                raise ValueError(
                    "model.head=kernel cannot be trained with train.solver=steps. "
                    "Set train.solver to closed or lbfgs, or model.head=linear"
                )
            if model.head == "kernel":
                raise ValueError(
                    "model.head=kernel needs frozen features, and "
                    f"model.mode={model.mode} trains the backbone. Set model.head=linear"
                )
            return
        solver = f"train.solver={train.solver}"
        if model.mode != "frozen":
            raise ValueError(
                f"{solver} fits a head on frozen features, and "
                f"model.mode={model.mode} trains the backbone. Set train.solver=steps"
            )
        if "auto" in (train.lr, train.batch_size):
            raise ValueError(
                f"{solver} takes no steps: there is no train.lr=auto or train.batch_size=auto to "
                "find. Give numbers"
            )
        if train.start_from is not None:
            raise ValueError(
                f"{solver} starts from nothing and cannot use train.start_from. "
                "Set train.start_from=null"
            )
        if self.by_epoch:
            raise ValueError(
                f"{solver} has no epochs that by_epoch could change. Set by_epoch={{}}"
            )
        if train.solver == "closed" and train.focal_gamma:
            raise ValueError(
                "train.solver=closed minimises a squared error, which has no focal_gamma. "
                "Set train.solver=lbfgs, or train.focal_gamma=0"
            )
        if train.solver == "closed" and train.class_weights and model.task == "multi_label":
            raise ValueError(
                "train.solver=closed weighs images, and class_weights of tags weigh a part of one. "
                "Set train.solver=lbfgs, or train.class_weights=null"
            )

    @model_validator(mode="after")
    def _every_stage(self) -> Self:
        """Each stage must be a valid job by itself."""
        if not self.by_epoch:
            return self
        # A stage that would never begin is a mistake.
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
                self.training.stage(epoch)
            except ConfigError as e:
                raise ValueError(f"by_epoch {epoch}: {e}") from None
        return self

    @property
    def training(self) -> TrainJob:
        """These sections alone; of a larger configuration, what a training gets of it."""
        sections = {name: getattr(self, name) for name in TrainSections.model_fields}
        return TrainJob.model_construct(**sections)


class TrainJob(TrainSections):
    """Everything that one training depends on."""

    def stage(self, epoch: int) -> tuple[TrainJob, int | None]:
        """The job in force after `epoch` epochs, and the epoch at which it changes (None:
        never)."""
        if not self.by_epoch:
            return self, None
        # All stages up to now add up; the first one after now says when the job changes.
        changes: dict[str, Any] = {}
        until = None
        for start, values in self.by_epoch.items():  # sorted by epoch
            if start <= epoch:
                changes |= values
            elif until is None:
                until = start
        return replace(self, changes | {"by_epoch": {}}), until

    @property
    def needs_cluster(self) -> bool:
        """Several workers need one, and so do Ray's tasks, which embed or decode images."""
        if self.train.launcher != "ray":
            return False
        return (
            self.train.workers != 1
            or self.model.mode == "frozen"
            or self.feed.carrier in ("cache", "offload")
        )

    def training_key(self, version: TableVersion) -> str:
        """Names the result: the same key means the same data, settings and seed.

        The number of workers, the loader and how often checkpoints are written are not part of it:
        a run may be resumed with others. order.FORMAT is: another order of samples is another run.
        """
        feed = self.feed.model_dump(mode="json", exclude=_NOT_IN_KEY["feed"])
        train = self.train.model_dump(mode="json", exclude=_NOT_IN_KEY["train"])
        train["start_from"] = self._started_from
        # Without it, the key is the same as before the setting was there.
        if train["anneal_s"] is None:
            del train["anneal_s"]
        # Without it, the key is the same as before the setting was there.
        if feed.pop("leave_out") is not None:
            feed["leave_out"] = self._left_out
        # What the calibration changes comes after the training.
        model = self.model.model_dump(mode="json", exclude={"calibrate"})
        # As for leave_out: keys of linear heads and of steps are as before there were others.
        if self.model.head == "linear":
            del model["head"], model["landmarks"]
        if self.train.solver == "steps":
            del train["solver"]
        # Keys of other names are as before files were hashed.
        if files := fingerprint.source(self.model.name):
            model["source"] = files
        # Without stages, the key is the same as before jobs could have any.
        stages = (self.by_epoch,) if self.by_epoch else ()
        return key_of(
            order.FORMAT,
            version.identity,
            self.table.where,
            self.table.sample_key,
            self.table.columns,
            feed,
            model,
            self.augment,
            train,
            self.run.seed,
            *stages,
        )

    @property
    def _started_from(self) -> str | None:
        """What train.start_from means in a key: the weights of a checkpoint, the seal of a package.

        The folder may be moved, and somebody may put other weights into it. Its own path stands for
        it if it is gone.
        """
        path, named = self.train.start_from, by_content(self.train.start_from)
        if path is None or named != path:
            return named
        # Not at the top: it imports all ways to train.
        from raypipe.train import checkpoint

        folder = Path(path)
        with suppress(OSError, ValueError, KeyError, TypeError):
            if (folder / "package.json").is_file():
                return package.seal_of(folder)
            return checkpoint.weights_digest(folder)
        return path

    @property
    def _left_out(self) -> str | None:
        """What feed.leave_out means in a key: the ids in the file, which somebody may edit."""
        with suppress(OSError, ValueError):
            return hashlib.sha256(Path(str(self.feed.leave_out)).read_bytes()).hexdigest()
        return by_content(self.feed.leave_out)

    def folder(self, key: str) -> Path:
        """The folder of the run with that key.

        It holds config.yaml, checkpoints/ and result.json, and if asked for profile/ and
        tensorboard/.
        """
        return self.run.path / "train" / key


@dataclass(frozen=True)
class TrainResult:
    """A finished run. Its epoch is the best one, or the last if `train.result=last`."""

    key: str
    version: TableVersion
    classes: tuple[str, ...]
    metrics: dict[str, float]
    """Of the run's epoch."""
    history: tuple[dict[str, float], ...]
    """Metrics of all epochs."""
    best_epoch: int
    """The run's epoch, counted from 0."""
    checkpoint: str
    """Its checkpoint folder."""
    seconds: float
    stopped: str | None = None
    """Why it stopped before its last epoch, if it did."""
    device_s: float = 0.0
    """Seconds in the training loop times workers, of all calls that the training took; 0: not
    known."""
