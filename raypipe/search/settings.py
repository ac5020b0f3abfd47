"""What a user says about a search. The fields are read as `search.samples`, `search.space`, …"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from raypipe.config import Section, leaves
from raypipe.train.job import TrainJob
from raypipe.train.stopping import SearchStoppingConfig


class PbtConfig(Section):
    """Population based training. Every `every` epochs a trial among the worst `quantile` takes the weights of one among the
    best and goes on with that one's values, each drawn anew with `resample_probability`, else moved. PB2 chooses them."""

    every: int = Field(default=2, ge=1)
    quantile: float = Field(default=0.25, gt=0, le=0.5)
    resample_probability: float = Field(default=0.25, ge=0, le=1)


class SearchConfig(Section):
    """How many trials over which space. A grid is run `samples` times, as in Ray Tune.

    space: dotted fields -> grid(a, b), choice(a, b), uniform(low, high), loguniform(low, high), quniform(low, high, q),
    randint(low, high) without high, each with `if CONDITION` if you like (samplers.py); null: a default for the task
    (defaults.py), which leaves fields alone that the job sets. searcher: random, or from what earlier trials came to, tpe, gp,
    or bohb, which goes with a scheduler that halves (they need raypipe[optuna]). warm_start: begin from what earlier searches
    on the same table, in the same run.dir, found. scheduler: asha and pasha pause trials at `grace` epochs, at `reduction`
    times as many, …, and let the best 1/`reduction` of them go on; pasha goes only as far as rankings still disagree.
    `pauses: false` stops trials instead, where they take long to start again. hyperband (which draws all trials at the start),
    median: Ray Tune's. pbt, pb2: trials of a population take over each other's weights (pbt.py). none: every trial runs to its
    end. gpus_per_trial: of a trial of one worker, where the cluster has GPUs; several take one each. soup: register the mean of
    the weights of up to so many of the best trials, where validation says that it is better than the best (soup.py). start:
    fields and values of the first trial, as far as the space has them; the rest is drawn. refit: train the best trial's job
    once more, on training and validation images, and register that; {} as it was, {model.side_px: 224, train.epochs: 20}
    larger and longer than trials could afford (refit.py).
    """

    samples: int = Field(default=16, ge=1)
    space: dict[str, str] | None = None
    searcher: Literal["random", "tpe", "gp", "bohb"] = "random"
    warm_start: bool = False
    scheduler: Literal["asha", "pasha", "hyperband", "median", "pbt", "pb2", "none"] = "asha"
    grace: int = Field(default=3, ge=1)
    reduction: int = Field(default=3, ge=2)
    pauses: bool = True
    concurrent: int | None = Field(default=None, ge=1)
    gpus_per_trial: float = Field(default=1.0, gt=0)
    soup: int = Field(default=1, ge=1)
    start: dict[str, Any] | None = None
    refit: dict[str, Any] | None = None
    stopping: SearchStoppingConfig = SearchStoppingConfig()
    pbt: PbtConfig = PbtConfig()

    @property
    def populated(self) -> bool:
        """Do trials learn from each other, so that all must be alive at once?"""
        return self.scheduler in ("pbt", "pb2")

    @field_validator("space", mode="before")
    @classmethod
    def _dotted(cls, space: Any) -> Any:
        """Nested names become dotted ones: `search.space.train.lr=…` on the command line is one. null takes a field out."""
        return dotted(space) if isinstance(space, dict) else space

    @field_validator("start", "refit", mode="before")
    @classmethod
    def _dotted_too(cls, changes: Any) -> Any:
        """null is a value here."""
        return dict(leaves(changes)) if isinstance(changes, dict) else changes

    @model_validator(mode="after")
    def _one_model(self) -> SearchConfig:
        if self.refit is not None and self.soup > 1:
            raise ValueError(
                "search.soup and search.refit each make the model that is registered. Leave one out"
            )
        return self


def dotted(space: dict[str, Any]) -> dict[str, Any]:
    """A space whose nested names have become dotted ones, without the fields that are null."""
    return {name: text for name, text in leaves(space) if text is not None}


class SearchJob(TrainJob):
    """A training job and the space around it."""

    search: SearchConfig = SearchConfig()
