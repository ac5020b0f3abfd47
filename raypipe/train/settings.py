"""The `train` section of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from raypipe.config import LONGEST_S
from raypipe.train.losses import ClassWeights
from raypipe.train.measure.profile import steps_of
from raypipe.train.parallel import ParallelConfig
from raypipe.train.schedule import Scaling, ScheduleName
from raypipe.train.stopping import StoppingConfig

SolverName = Literal["steps", "lbfgs", "closed"]

_RULES = {
    "batch_size": "a whole number from 1 up, or auto",
    "lr": "a number above 0, or auto",
    "workers": "a whole number from 1 up, the fewest and the most as in [2, 8], or auto",
}


class TrainConfig(ParallelConfig):
    """How one model is trained."""

    # ParallelConfig has numbers here: engines never see `auto`.
    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = 64  # type: ignore[assignment]
    """Images in a step, of all workers together. `auto`: raypipe finds it before the training; on a
    GPU it is a tenth less than the largest that fits into memory."""
    lr: Annotated[float, Field(gt=0)] | Literal["auto"] = 1e-3  # type: ignore[assignment]
    """Peak learning rate of the head; 0.001 is usual with AdamW. `auto`: raypipe finds it by a
    range test on the training data."""
    workers: (
        Annotated[int, Field(ge=1)] | tuple[Annotated[int, Field(ge=1)], int] | Literal["auto"]
    ) = 1
    """Processes that train. 1: the calling process. `[2, 8]`: 2 to 8, as many as the cluster has
    room for, at the start, after workers were lost, and when a restart with more saves time.
    `auto`: one for each GPU of the cluster's largest node, else 1."""
    launcher: Literal["ray", "torch_distributor"] = "ray"
    """What starts the workers: `ray`, or PySpark's `torch_distributor`, on the executors of a
    Spark cluster without Ray. There a single worker trains on an executor, too."""
    solver: SolverName = "steps"
    """How weights are found. `steps`: epochs of optimizer steps. Two more, with model.mode=frozen,
    take seconds: `lbfgs` minimises the loss, with a cross-validated weight decay; `closed` is ridge
    regression, whose scores a temperature turns into probabilities. They ignore the settings of
    steps: epochs, lr, schedule, weight_decay, dropout, precision and so on."""
    epochs: int = Field(default=20, ge=1)
    """The most epochs; `stopping` may end the training earlier."""
    lr_batch: int | None = Field(default=None, ge=1)
    """The batch size that `lr` is meant for. With another one, `lr_scaling` scales the rate. null:
    it is not scaled."""
    lr_scaling: Scaling = "sqrt"
    """How the rate grows with the batch: sqrt keeps the size of AdamW's noise, linear that of
    SGD's."""
    schedule: ScheduleName = "cosine"
    """How the rate falls after the warm-up: to zero (cosine, one_cycle), by steps, or not at
    all."""
    warmup: float | None = Field(default=None, ge=0, lt=1)
    """The share of the training in which the rate rises. null: 0.05, and 0.3 for one_cycle."""
    anneal_s: float | None = Field(default=None, gt=0)
    """Seconds of the training loop after which the schedule ends, whatever the speed: raypipe plans
    it again at each step. `epochs` is then the most. A search with a budget sets it for its refit,
    and for trials that train by the clock. null: the schedule ends with the last epoch."""
    class_weights: ClassWeights = None
    """Weights of the classes in the loss: `balanced`, or one positive number per class."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """The part of each target that is spread over all classes. 0: none."""
    focal_gamma: float = Field(default=0.0, ge=0, le=10)
    """Exponent of the focal loss: easy images count less. 0: cross-entropy."""
    stopping: StoppingConfig = StoppingConfig()
    """When the training ends before its last epoch."""
    result: Literal["best", "last"] = "best"
    """The epoch whose weights are the result: the best by `stopping.metric`, or the last."""
    start_from: str | None = None
    """Folder of a checkpoint of the same model, or of a model package: the training starts from its
    weights. Its resolution may differ, and a package may have other classes. Every worker must see
    the folder."""
    checkpoint_steps: int | None = Field(default=None, ge=1)
    """Steps between checkpoints inside an epoch. null: one checkpoint after each epoch."""
    checkpoint_async: bool = False
    """Write checkpoints in a thread while the training continues. A kill may then cost one more
    interval."""
    keep_best: int = Field(default=1, ge=1)
    """Number of best epochs whose checkpoints are kept, beside the newest one and the one before
    it."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Seconds that a worker waits for another; then the group of workers has failed."""
    max_failures: int = Field(default=1, ge=0)
    """Number of failures after which the training resumes from the newest checkpoint; one more ends
    it."""
    gpu: bool | Literal["auto"] = "auto"
    """Whether each worker takes a GPU. auto: yes, if the cluster has one."""
    profile: str | None = None
    """Steps to trace with torch's profiler, as in `step:10-13`; the traces go to the run's
    folder."""
    tensorboard: bool = False
    """Write TensorBoard event files into the run's folder."""

    @field_validator("profile")
    @classmethod
    def _steps(cls, profile: str | None) -> str | None:
        if profile is not None:
            steps_of(profile)
        return profile

    @property
    def fewest_workers(self) -> int:
        """`auto` counts as 1, until the cluster is known (topology.py)."""
        if self.workers == "auto":
            return 1
        return self.workers if isinstance(self.workers, int) else self.workers[0]

    @property
    def most_workers(self) -> int:
        if self.workers == "auto":
            return 1
        return self.workers if isinstance(self.workers, int) else self.workers[1]

    @property
    def most_s(self) -> float | None:
        """Seconds of its loop at most; None: nothing limits them."""
        limits = [seconds for seconds in (self.anneal_s, self.stopping.seconds) if seconds]
        return min(limits, default=None)

    @property
    def too_few_images(self) -> str:
        """Why not each worker has an image of a batch, in words; "" if that does no harm.

        A worker without one computes another's, and norms of all workers count it.
        """
        size = self.batch_size
        if not self.sync_bn or not isinstance(size, int) or size >= self.most_workers:
            return ""
        return (
            "train.sync_bn=true takes statistics of the whole batch, and of "
            f"train.batch_size={size} not each of {self.most_workers} workers has an image. "
            "Raise train.batch_size, or set train.sync_bn=false"
        )

    def newly_too_few(self, before: TrainConfig) -> str:
        """`too_few_images`, unless `before` had too few already, as a champion of an older
        raypipe may have: it may go on with that."""
        return "" if before.too_few_images else self.too_few_images

    @property
    def waits_s(self) -> float:
        """`timeout_s`, at most LONGEST_S. A larger one is not refused, because packages keep it."""
        return min(self.timeout_s, LONGEST_S)

    @property
    def elastic(self) -> bool:
        """May the number of workers change?"""
        return self.fewest_workers < self.most_workers

    @field_validator("batch_size", "lr", "workers", mode="wrap")
    @classmethod
    def _number_or_auto(
        cls, value: Any, validate: Callable[[Any], Any], info: ValidationInfo
    ) -> Any:
        """Give one message, where pydantic gives one for each type of the union."""
        try:
            return validate(value)
        except ValidationError:
            raise ValueError(f"It is {_RULES[str(info.field_name)]}") from None

    @model_validator(mode="after")
    def _fewest_first(self) -> TrainConfig:
        if self.fewest_workers > self.most_workers:
            both = [self.fewest_workers, self.most_workers]
            raise ValueError(f"workers={both}: the smaller number comes first")
        return self

    @model_validator(mode="after")
    def _known_to_spark(self) -> TrainConfig:
        if self.launcher == "ray":
            return self
        if not isinstance(self.workers, int):
            raise ValueError(
                f"workers={self.workers} asks Ray for room as it trains. "
                f"launcher={self.launcher} takes one number of workers"
            )
        if self.batch_size == "auto":
            raise ValueError(
                "batch_size=auto is found on a device of the Ray cluster. "
                f"Give a number for launcher={self.launcher}"
            )
        return self

    @model_validator(mode="after")
    def _one_rate(self) -> TrainConfig:
        if self.lr == "auto" and self.lr_batch is not None:
            raise ValueError(
                "lr=auto is found with the batch that it trains. "
                "Remove lr_batch, or give lr as a number"
            )
        return self
