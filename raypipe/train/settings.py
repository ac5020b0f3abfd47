"""What a user says about a training: the `train` section."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from raypipe.train.losses import ClassWeights
from raypipe.train.measure.profile import steps_of
from raypipe.train.parallel import ParallelConfig
from raypipe.train.schedule import Scaling, ScheduleName
from raypipe.train.stopping import StoppingConfig

_EITHER = {
    "batch_size": "a whole number from 1 up, or auto",
    "lr": "a number above 0, or auto",
    "workers": "a whole number from 1 up, or the fewest and the most, as in [2, 8]",
}


class TrainConfig(ParallelConfig):
    """One training run. `batch_size` is global: ranks share it. `workers: 1` trains in the calling process, `[2, 8]` with as
    many of these as there is room for: when it starts, when workers were lost, and when room for more appears and pays.

    A checkpoint is written after every epoch, and every `checkpoint_steps` steps where that is set, beside the training if
    `checkpoint_async`; those of the newest and of the `keep_best` best epochs are kept. Workers that wait `timeout_s` for
    another have failed; up to `max_failures` failures the training goes on from the newest checkpoint.

    `warmup` is a share of the training (null: 0.05, for one_cycle 0.3). `lr_batch` is the batch size that `lr` is meant for:
    with another one the rate is scaled by `lr_scaling` (null: it is not). `batch_size` and `lr` may be `auto`: finders.py
    makes numbers of them before anything else sees them. `profile: step:10-13` traces these steps, `tensorboard: true` writes
    event files, both into the run's folder. `result`: the epoch whose weights are the run's, the best by stopping.metric or
    the last, whatever validation says. `start_from`: the folder of a checkpoint of the same model, perhaps at another
    resolution, whose weights the training starts from; every worker must see it.
    """

    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = 64  # type: ignore[assignment]  # the engines see numbers
    lr: Annotated[float, Field(gt=0)] | Literal["auto"] = 1e-3  # type: ignore[assignment]
    workers: Annotated[int, Field(ge=1)] | tuple[Annotated[int, Field(ge=1)], int] = 1
    epochs: int = Field(default=20, ge=1)
    lr_batch: int | None = Field(default=None, ge=1)
    lr_scaling: Scaling = "sqrt"
    schedule: ScheduleName = "cosine"
    warmup: float | None = Field(default=None, ge=0, lt=1)
    class_weights: ClassWeights = None
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    focal_gamma: float = Field(default=0.0, ge=0, le=10)
    stopping: StoppingConfig = StoppingConfig()
    result: Literal["best", "last"] = "best"
    start_from: str | None = None
    checkpoint_steps: int | None = Field(default=None, ge=1)
    checkpoint_async: bool = False
    keep_best: int = Field(default=1, ge=1)
    timeout_s: float = Field(default=120.0, gt=0)
    max_failures: int = Field(default=1, ge=0)
    gpu: bool | Literal["auto"] = "auto"
    profile: str | None = None
    tensorboard: bool = False

    @field_validator("profile")
    @classmethod
    def _steps(cls, profile: str | None) -> str | None:
        if profile is not None:
            steps_of(profile)
        return profile

    @property
    def fewest_workers(self) -> int:
        return self.workers if isinstance(self.workers, int) else self.workers[0]

    @property
    def most_workers(self) -> int:
        return self.workers if isinstance(self.workers, int) else self.workers[1]

    @property
    def elastic(self) -> bool:
        """May the number of workers change?"""
        return self.fewest_workers < self.most_workers

    @field_validator("batch_size", "lr", "workers", mode="wrap")
    @classmethod
    def _number_or_auto(
        cls, value: Any, validate: Callable[[Any], Any], info: ValidationInfo
    ) -> Any:
        """One message, where pydantic has one for each type that it might have been."""
        try:
            return validate(value)
        except ValidationError:
            raise ValueError(f"It is {_EITHER[str(info.field_name)]}") from None

    @model_validator(mode="after")
    def _fewest_first(self) -> TrainConfig:
        if self.fewest_workers > self.most_workers:
            raise ValueError(f"workers={list(self.workers)} says the most before the fewest")  # type: ignore[arg-type]
        return self

    @model_validator(mode="after")
    def _one_rate(self) -> TrainConfig:
        if self.lr == "auto" and self.lr_batch is not None:
            raise ValueError(
                "lr=auto is found with the batch that it trains. Remove lr_batch, or give lr as a number"
            )
        return self
