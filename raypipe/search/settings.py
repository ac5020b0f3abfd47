"""The settings of a search: `search.samples`, `search.space`, …"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from raypipe.config import Section, leaves
from raypipe.search import presets
from raypipe.search.limits import SearchLimits
from raypipe.search.presets import Preset
from raypipe.train.stopping import SearchStoppingConfig


class PbtConfig(Section):
    """Population based training."""

    every: int = Field(default=2, ge=1)
    """Epochs between two turns. At a turn, weak trials take over the weights of strong ones."""

    quantile: float = Field(default=0.25, gt=0, le=0.5)
    """Share of the trials that are weak, and share that are strong, at a turn."""

    resample_probability: float = Field(default=0.25, ge=0, le=1)
    """Probability that a weak trial draws a value again; else it moves the strong trial's value.

    PB2 chooses all values itself, and needs this only where it has no choice.
    """


class SearchConfig(Section):
    """How many trials over which space, and which of them continue."""

    # What it may take.
    preset: Preset | None = None
    """Sets the fields of `search` that you leave out: a first answer, an ensemble, and a budget.
    fast: 3 minutes. good: 20 minutes, and a refit with more pixels. best: an hour."""

    budget_s: float | None = Field(default=None, gt=0)
    """Seconds for the whole of `raypipe tune`, from the start of its process (in Python: of the
    call) to the registered model: reading, trials, refit, test, registration. After a kill the same
    command counts anew, and reads what was finished from disk. null: unlimited."""

    refit_share: float = Field(default=0.5, gt=0, lt=1)
    """The part of a budget that trials leave for a refit, of what start and end leave."""

    # How many trials, and over what.
    samples: int = Field(default=16, ge=1, le=100_000)
    """Number of trials. A space with a grid runs the whole grid so many times, as in Ray Tune.

    With budget_s and without samples, trials begin until the time is over.
    """

    space: dict[str, str] | None = None
    """What is searched: dotted fields, each with how it is drawn.

    grid(a, b), choice(a, b), uniform(low, high), loguniform(low, high), quniform(low, high, step)
    or randint(low, high) without high. Each may have `if CONDITION`. null: a default space for the
    task, without the fields that the job sets.
    """

    searcher: Literal["random", "tpe", "gp", "bohb"] = "random"
    """What chooses a trial's values: chance, or a model of earlier trials' results.

    tpe: a tree-structured Parzen estimator. gp: a Gaussian process. bohb: TPE on results of equally
    many epochs, for the schedulers asha and pasha. These three need raypipe[optuna].
    """

    first_answer: bool = False
    """Before the first trial, fit heads on frozen features of the installed backbones, at two
    resolutions, as far as that takes a minute; 2,600 images on two cores are about the most. Trials
    have to beat it; it is registered if none does. The settings of model.mode and of steps play no
    part in it."""

    warm_start: bool = False
    """Start from the results of earlier searches on the same table in the same run.dir."""

    # Which trials continue.
    scheduler: Literal[
        "asha", "pasha", "freeze_thaw", "hyperband", "median", "pbt", "pb2", "none"
    ] = "asha"
    """Which trials continue, and for how long.

    asha: at each rung (`grace` epochs, `grace` * `reduction`, …) trials pause, and the best
    1/`reduction` continue. pasha: the same, with later rungs only while rankings still change.
    freeze_thaw: after each epoch a model of all curves chooses who trains the next one; `samples`
    are drawn at the start, and the search ends when the metric has not improved for long.
    hyperband, median: Ray Tune's; hyperband draws all trials at the start. pbt, pb2: trials take
    over each other's weights. none: every trial trains to its end.
    """

    grace: int = Field(default=3, ge=1)
    """Epochs that every trial may train before asha, pasha or median can end it."""

    reduction: int = Field(default=3, ge=2)
    """One trial in so many continues at each rung."""

    pauses: bool = True
    """True: asha and pasha pause trials, and may continue them later.

    False: they stop them for good. Useful where a trial takes long to start again.
    """

    # What trials take of the cluster.
    concurrent: int | None = Field(default=None, ge=1)
    """How many trials run at a time; null: as many as the cluster has room for."""

    gpus_per_trial: float = Field(default=1.0, gt=0)
    """GPUs for a trial of one worker, where the cluster has any; 0.5 lets two trials share one.

    A trial of several workers takes one GPU for each worker.
    """

    # Which model the search registers, and which it keeps.
    keep: int = Field(default=3, ge=1)
    """Checkpoints of so many best trials are kept, beside those that a soup averages or an ensemble
    may choose.

    Trials that run, or that wait to be continued, keep theirs too. So does a trial that failed,
    until the search has ended. Deleted weights come back only by training.
    """

    soup: int = Field(default=1, ge=1)
    """Average the weights of up to so many of the best trials; 1: no average.

    The mean is registered if validation says that it is better than the best trial.
    """

    ensemble: int = Field(default=1, ge=1)
    """Combine up to so many of the trials: the model predicts the weighted mean of their scores; 1:
    no ensemble.

    It is chosen greedily among twice as many of the best trials, the best of each backbone, mode
    and resolution, and the heads of a first answer: by the metric or by the loss, whichever gains
    more on halves of validation that it was not chosen on. It is registered if it gains there by
    the metric, and if it is better than each of them on all of validation by what it was chosen by.
    One that was chosen by the loss may be one standard error less accurate there than the luckiest.
    It takes as long as its members together, and stays within search.limits.
    """

    start: dict[str, Any] | None = None
    """Values of the first trial, by dotted field. Fields that are left out are drawn."""

    starts: tuple[dict[str, Any], ...] | None = None
    """Values of the trials after the first one, each as in `start`. At most a third of
    `samples` are starts. null: none, or with a default space those of a learned portfolio."""

    refit: dict[str, Any] | None = None
    """Train the best trial's job again on training and validation images, and register that model.

    null: no refit. {}: with the same settings. {model.side_px: 224, train.epochs: 20}: larger and
    longer than trials could afford. Of an ensemble, the heads on frozen features and one fine-tuned
    member are trained again, and the other fine-tuned ones leave it.
    """

    # When it ends, and settings of single schedulers.
    stopping: SearchStoppingConfig = SearchStoppingConfig()
    """When the whole search ends before its last trial."""

    limits: SearchLimits = SearchLimits()
    """What the registered model and its search must keep."""

    pbt: PbtConfig = PbtConfig()
    """Settings of the schedulers pbt and pb2."""

    @property
    def populated(self) -> bool:
        """Do trials learn from each other, so that all must be started at once?"""
        return self.scheduler in ("pbt", "pb2")

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, given: Any) -> Any:
        return presets.filled(given) if isinstance(given, dict) else given

    @field_validator("space", mode="before")
    @classmethod
    def _dotted_space(cls, space: Any) -> Any:
        """Nested names become dotted ones; a field that is null is removed.

        `search.space.train.lr=…` on the command line is a nested name.
        """
        return dotted(space) if isinstance(space, dict) else space

    @field_validator("start", "refit", mode="before")
    @classmethod
    def _dotted_changes(cls, changes: Any) -> Any:
        """Nested names become dotted ones; null is a value here."""
        return dict(leaves(changes)) if isinstance(changes, dict) else changes

    @field_validator("starts", mode="before")
    @classmethod
    def _dotted_starts(cls, starts: Any) -> Any:
        if not isinstance(starts, list | tuple):
            return starts
        return tuple(dict(leaves(one)) if isinstance(one, dict) else one for one in starts)

    @model_validator(mode="after")
    def _thawed(self) -> SearchConfig:
        if self.scheduler != "freeze_thaw":
            return self
        if self.searcher != "random":
            raise ValueError(
                "search.scheduler=freeze_thaw chooses among trials that are drawn before the first"
                f" one starts, so search.searcher={self.searcher} would learn from none. Set"
                " search.searcher=random, or another scheduler"
            )
        if not self.pauses:
            raise ValueError(
                "search.scheduler=freeze_thaw pauses trials. Leave out search.pauses=false, or set"
                " another scheduler"
            )
        return self

    @model_validator(mode="after")
    def _one_model(self) -> SearchConfig:
        if self.refit is not None and self.soup > 1:
            raise ValueError(
                "search.soup and search.refit each make the model that is registered. Leave one out"
            )
        return self

    @model_validator(mode="after")
    def _priced(self) -> SearchConfig:
        if self.limits.money is None:
            return self
        if self.stopping.price_per_hour is None:
            raise ValueError(
                "search.limits.money needs to know what a worker costs. Set "
                "search.stopping.price_per_hour too"
            )
        if self.refit is not None:
            raise ValueError(
                "search.limits.money is for the trials, and what search.refit costs is not known "
                "before. Leave one out"
            )
        return self


def dotted(space: dict[str, Any]) -> dict[str, Any]:
    """A search space with dotted names for its nested ones, without the fields that are null."""
    names = {}
    for name, text in leaves(space):
        if text is not None:
            names[name] = text
    return names
