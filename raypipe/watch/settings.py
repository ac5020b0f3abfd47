"""The settings of a drift check and of the retrain after it (`watch.*`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from raypipe.config import RunConfig, Section
from raypipe.search.settings import dotted
from raypipe.tables.storage import StorageOptions
from raypipe.tables.table import TableConfig
from raypipe.watch.policy import PolicyConfig, WatchHorizon
from raypipe.watch.sinks import SinkConfig
from raypipe.watch.sinks.log import LogConfig

# Per side: below, the smallest drift that any test finds at alpha 0.01 is larger than two standard
# deviations.
LEAST_ROWS = 20


class WatchConfig(Section):
    """The table whose images are checked, what to call it, and how a retrain runs."""

    batch: TableConfig | None = None
    """The table of new images that is compared with the champion's reference."""
    name: str = "batch"
    """What the evidence and the report call the batch."""
    window: Literal["since_last", "last_n", "all"] = "since_last"
    """Which images of watch.batch a check looks at. since_last: those that came after the last
    check, each once. last_n: the newest. all: every one, as for a batch with a version."""
    last_n: int = Field(default=1000, ge=LEAST_ROWS)
    """Images of window=last_n, or a few more: a commit to the table stays whole."""
    min_images: int = Field(default=LEAST_ROWS, ge=LEAST_ROWS)
    """With fewer new images there is no check: they stay for the next one."""
    ask: int = Field(default=100, ge=0)
    """After drift: so many images that are most worth a label, in a CSV beside the report."""
    feedback: int = Field(default=30, ge=0, le=1000)
    """Labels that come later, in the label column of watch.batch, are compared with what the
    champion said: of the images of a check and of so many windows before it. 0: off."""
    power: int = Field(default=200, ge=LEAST_ROWS)
    """Images of each window of `raypipe drift --power`: as many as a check usually has."""
    horizon: WatchHorizon | None = None
    """A false-alarm rate over many checks, in place of drift.alpha for each: `{checks: 365,
    false_alarm: 0.03}`. null: drift.alpha."""
    every_h: float | None = Field(default=None, gt=0)
    """Hours between scheduled checks. A check that comes later names those that did not run."""
    out: str | None = None
    """The folder, on any store, of the tables of checks, windows and decisions. null: the run's
    folder."""
    storage_options: StorageOptions = Field(default=None, repr=False)
    """Options of object_store for watch.out. Credentials may be in the environment instead."""
    domain: str | None = None
    """Column that names the known domain of an image, as its camera or its site. A champion keeps a
    reference of each domain that it was trained for; a batch of one of them, or of any mixture, is
    no drift. It is read when a model is registered. null: the source column, if the table has one.
    """
    group: str | None = None
    """Column that names images that belong together, as the cells of one module. If both the
    champion's table and the batch have it, drift checks compare whole groups: the cells of one
    module differ from others without drift. null: each image stands alone."""
    arrived: str | None = None
    """Column of watch.batch that says when an image came: a time or a number. The detector online
    looks at images in this order; those without a value, it leaves out."""
    retrain_workers: int = Field(default=1, ge=1)
    """Workers of each trial of a retrain, or of its refit if the job has a search.refit."""
    retrain_samples: int = Field(default=8, ge=1)
    """Trials of a retrain. The first has the champion's settings, the others are near them. 1: the
    champion's settings alone."""
    retrain_space: Annotated[dict[str, str], Field(min_length=1)] | None = None
    """Fields that the trials draw, written as search.space. null: rate, weight decay and dropout,
    near the champion's."""
    retrain_sampling: Literal["auto", "natural", "balanced", "sources", "weighted"] = "auto"
    """feed.sampling of the challenger. auto: if the champion's is natural, old and new sources are
    drawn equally often, or by feed.mix; else the champion's is kept."""
    retrain_from: Literal["auto", "champion", "pretrained"] = "auto"
    """The weights that a challenger starts from: the champion's, whose head grows by new classes,
    or the pretrained ones. auto: the champion's where a backbone is trained; a head on frozen
    features starts anew, and so does a backbone that has learned from validation images, as after a
    refit (then all old rows are replayed). Where the champion's cannot be taken, raypipe says why,
    and takes the pretrained ones."""
    replay: Literal["all"] | Annotated[float, Field(gt=0, allow_inf_nan=False)] = "all"
    """Rows that the champion has learned from and a challenger trains on again. all: every one. A
    number: so many for each new row, equally many of every label, drawn by run.seed."""
    clean: Literal["off", "stop", "go_on"] = "off"
    """Clean the table (section clean) before a retrain, and train on the version without what was
    dropped. If fastdup cannot start: stop; or go_on with what ingest has checked, and say so."""
    policy: PolicyConfig = PolicyConfig()
    """When checks call for a retrain."""
    force: bool = False
    """Retrain without drift, and whatever the policy says."""
    sinks: tuple[SinkConfig, ...] = (LogConfig(),)
    """Who is told of finished checks, missed windows, decisions, retrains, promotions, and that a
    run has finished: `{type: log}`, `{type: webhook, url: …, secret_env: …}`. `{type:
    azure_monitor, endpoint: https://…, rule: dcr-…}` gets epochs of trainings and the counts of
    served requests, too. A sink that fails is one warning; the work goes on."""

    def place(self, run: RunConfig, table: str) -> str:
        """The address of one of the tables of checks, windows and decisions."""
        return f"{(self.out or str(run.path)).rstrip('/')}/{table}"

    @field_validator("retrain_space", mode="before")
    @classmethod
    def _dotted(cls, space: Any) -> Any:
        """Nested names become dotted ones, as in search.space."""
        return dotted(space) if isinstance(space, dict) else space
