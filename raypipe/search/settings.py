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
    """Epochs between two exchanges. At an exchange, weak trials copy the weights of strong ones."""

    quantile: float = Field(default=0.25, gt=0, le=0.5)
    """The share of the trials that counts as weak at an exchange, and the share that counts as
    strong."""

    resample_probability: float = Field(default=0.25, ge=0, le=1)
    """Probability that a weak trial draws a new value. Otherwise it perturbs the strong trial's
    value.

    PB2 chooses values itself. It uses this only where it cannot.
    """


class SearchConfig(Section):
    """How many trials over which space, and which of them continue."""

    # What it may take.
    preset: Preset | None = None
    """Sets the fields of `search` that you leave out: a first answer, an ensemble, and a budget.
    fast: 3 minutes. good: 20 minutes, with a refit at more pixels. best: the same in an hour."""

    budget_s: float | None = Field(default=None, gt=0)
    """Seconds for the whole of `raypipe tune`, from the start of its process (in Python: of the
    call) to the registered model: reading, trials, refit, test, registration. After a kill the same
    command begins a new budget, and reads finished work from disk. null: unlimited."""

    refit_share: float = Field(default=0.5, gt=0, lt=1)
    """The share of the budget for a refit. The rest is for trials. The time of start and end is
    subtracted first."""

    # How many trials, and over what.
    samples: int = Field(default=16, ge=1, le=100_000)
    """Number of trials. If the space has a grid, the whole grid runs this number of times, as in
    Ray Tune; but no trial that would repeat another one, since all have the same seed.

    With budget_s and without samples, trials begin until the time is over.
    """

    space: dict[str, str] | None = None
    """The fields to search, and how each is drawn.

    grid(a, b), choice(a, b), uniform(low, high), loguniform(low, high), quniform(low, high, step)
    or randint(low, high) without high. Each may have `if CONDITION`. null: a default space for the
    task, without the fields that you set.
    """

    searcher: Literal["random", "tpe", "gp", "bohb"] = "random"
    """What chooses a trial's values: chance, or a model of earlier trials' results.

    tpe: a tree-structured Parzen estimator. gp: a Gaussian process. bohb: TPE on results after the
    same number of epochs, for the schedulers asha and pasha. These three need raypipe[optuna].
    """

    first_answer: bool = False
    """Before the first trial, fit heads (classifiers) on frozen features of the installed
    backbones, at two resolutions, within a minute: enough for about 2,600 images on two cores. The
    best head is registered if no trial is better. model.mode and settings of step-by-step training
    have no effect on heads."""

    warm_start: bool = False
    """Start from the results of earlier searches on the same table in the same run.dir."""

    # Which trials continue.
    scheduler: Literal[
        "asha", "pasha", "freeze_thaw", "hyperband", "median", "pbt", "pb2", "none"
    ] = "asha"
    """Which trials continue, and for how long.

    asha: at each rung (`grace` epochs, `grace` * `reduction`, …) trials pause, and the best
    1/`reduction` continue. pasha: the same, with later rungs only while rankings still change.
    freeze_thaw: after each epoch a model of all learning curves chooses the trial that trains the
    next one; it draws all `samples` at the start, and ends the search when the metric has not
    improved for long. hyperband, median: Ray Tune's; hyperband draws all trials at the start. pbt,
    pb2: weak trials copy the weights of strong ones. none: every trial trains to its end.
    """

    grace: int = Field(default=3, ge=1)
    """Epochs that every trial may train before asha, pasha or median can end it."""

    reduction: int = Field(default=3, ge=2)
    """At each rung, one of this number of trials continues."""

    pauses: bool = True
    """True: asha and pasha pause trials, and may continue them later.

    False: they stop trials for good. Useful if a trial takes long to start again.
    """

    # What trials take of the cluster.
    concurrent: int | None = Field(default=None, ge=1)
    """Number of trials that run at a time. null: as many as the cluster has room for."""

    gpus_per_trial: float = Field(default=1.0, gt=0)
    """GPUs for a trial of one worker, if the cluster has any. 0.5 lets two trials share one.

    A trial of several workers takes one GPU for each worker.
    """

    # Which model the search registers, and which it keeps.
    keep: int = Field(default=3, ge=1)
    """Number of best trials whose checkpoints are kept, beside those that a soup averages or an
    ensemble may choose.

    While the search runs, trials that train, wait or have failed keep theirs too. To get deleted
    weights back, train the trial again.
    """

    soup: int = Field(default=1, ge=1)
    """Average the weights of at most this number of the best trials. 1: no average.

    The mean is registered if it is better on validation than the best trial.
    """

    ensemble: int = Field(default=1, ge=1)
    """Combine at most this number of trials: the model predicts the weighted mean of their scores.
    1: no ensemble.

    Candidates are the best trials (twice this number), the best trial of each backbone, mode and
    resolution, and the heads of a first answer. They are chosen greedily on validation. The
    ensemble is registered only if it is better than the best candidate. A prediction takes as long
    as those of all members together. search.limits apply to the ensemble.
    """

    start: dict[str, Any] | None = None
    """Values of the first trial. Fields that are left out are drawn."""

    starts: tuple[dict[str, Any], ...] | None = None
    """Values of the trials after the first one, each as in `start`. At most a third of
    `samples` are starts. null: none; with the default space those of a learned portfolio."""

    refit: dict[str, Any] | Literal["heads"] | None = None
    """Train the best trial's settings again on training and validation images, and register that
    model.

    null: no refit. {}: the same settings. {model.side_px: 224, train.epochs: 20}: more pixels and
    epochs than trials could afford. Of an ensemble, raypipe trains the heads on frozen features
    and one fine-tuned member again; the other fine-tuned members leave it. heads: the heads on
    frozen features alone, which takes seconds; fine-tuned members stay as they are. Where too few
    other images test the model, heads stay as they are, too.
    """

    # When it ends, and settings of single schedulers.
    stopping: SearchStoppingConfig = SearchStoppingConfig()
    """When the whole search ends before its last trial."""

    limits: SearchLimits = SearchLimits()
    """Limits of the registered model and of the cost of the trials."""

    pbt: PbtConfig = PbtConfig()
    """Settings of the schedulers pbt and pb2."""

    @property
    def refit_changes(self) -> dict[str, Any] | None:
        """What a refit changes, beside the images; None: there is none. One of heads changes
        nothing."""
        return {} if self.refit == "heads" else self.refit

    @property
    def trains_again(self) -> bool:
        """May a refit train for long? One of heads takes seconds."""
        return self.refit is not None and self.refit != "heads"

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
    def _bracketed(self) -> SearchConfig:
        if self.scheduler != "hyperband":
            return self
        if self.searcher != "random":
            raise ValueError(
                "search.scheduler=hyperband compares trials that are drawn before the first one"
                f" starts, so search.searcher={self.searcher} would learn from none. Set"
                " search.searcher=random, or another scheduler"
            )
        if self.concurrent is not None:
            raise ValueError(
                "search.scheduler=hyperband starts all trials as soon as there is room. Leave out"
                f" search.concurrent={self.concurrent}, or set another scheduler"
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
