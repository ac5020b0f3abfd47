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
    """Name of the batch in results and reports."""
    window: Literal["since_last", "last_n", "all"] = "since_last"
    """Which images of watch.batch a check looks at. since_last: those that came after the last
    check, each once. last_n: the newest. all: every one, as for a batch with a version."""
    last_n: int = Field(default=1000, ge=LEAST_ROWS)
    """Number of images of window=last_n. A commit is not split, so it may be many more."""
    min_images: int = Field(default=LEAST_ROWS, ge=LEAST_ROWS)
    """With fewer new images there is no check. They are part of the next one."""
    ask: int = Field(default=100, ge=0)
    """After drift, a CSV beside the report lists this number of images whose labels help most."""
    feedback: int = Field(default=30, ge=0, le=1000)
    """Compare labels that come later, in the label column of watch.batch, with the champion's
    predictions: for the images of a check and of this number of windows before it. 0: off."""
    power: int = Field(default=200, ge=LEAST_ROWS)
    """Images of each window of `raypipe drift --power`: as many as a check usually has."""
    horizon: WatchHorizon | None = None
    """A false-alarm rate over many checks, in place of drift.alpha for each: `{checks: 365,
    false_alarm: 0.03}`. null: drift.alpha."""
    every_h: float | None = Field(default=None, ge=0.001, le=1e6)
    """Hours between scheduled checks. A late check says how many checks did not run or failed. Only
    with window=since_last."""
    out: str | None = None
    """The folder, on any store, of the tables of checks, windows and decisions. null: the run's
    folder."""
    storage_options: StorageOptions = Field(default=None, repr=False)
    """Options of object_store for watch.out. Credentials may be in the environment instead."""
    domain: str | None = None
    """Column with the domain of an image, for example its camera or its site. A registered model
    has a reference of each domain that it was trained for. A batch of one domain, or of any
    mixture, is no drift. null: the source column, if the table has one."""
    group: str | None = None
    """Column with the group of an image, for example the module of a cell. If both the champion's
    table and the batch have it, drift checks compare whole groups: cells of one module differ from
    others without drift. null: each image is independent."""
    arrived: str | None = None
    """Column of watch.batch that says when an image came: a time or a number. The detector online
    takes images in this order, and leaves out those without a value."""
    retrain_workers: int = Field(default=1, ge=1)
    """Workers of each trial of a retrain; with search.refit, workers of its refit."""
    retrain_samples: int = Field(default=8, ge=1)
    """Trials of a retrain. The first has the champion's settings, the others are near them. 1: the
    champion's settings alone."""
    retrain_space: Annotated[dict[str, str], Field(min_length=1)] | None = None
    """Fields that the trials draw, written as search.space. null: learning rate, weight decay and
    dropout, near the champion's."""
    retrain_sampling: Literal["auto", "natural", "balanced", "sources", "weighted"] = "auto"
    """feed.sampling of the challenger. auto: if the champion's is natural, old and new sources are
    drawn equally often, or by feed.mix; else as for the champion."""
    retrain_from: Literal["auto", "champion", "pretrained"] = "auto"
    """The weights that a challenger starts from: the champion's, with new classes added to its
    head, or the pretrained ones. auto: the champion's, if a backbone is trained; a head on
    frozen features starts from zero. A backbone that was trained on validation images, as after a
    refit, starts from pretrained weights, with all old rows. If the champion's weights do not fit,
    raypipe says why and takes the pretrained ones."""
    replay: Literal["all"] | Annotated[float, Field(gt=0, allow_inf_nan=False)] = "all"
    """Old rows, which the champion was trained on, that a challenger trains on again. all: every
    one. A number: this many for each new row, the same number of every label, drawn by run.seed."""
    clean: Literal["off", "stop", "go_on"] = "off"
    """Clean the table (section clean) before a retrain, and train without the dropped images. If
    fastdup cannot start: `stop` ends with an error, `go_on` trains on what ingest has checked."""
    policy: PolicyConfig = PolicyConfig()
    """When checks call for a retrain."""
    force: bool = False
    """Retrain even without drift and against the policy."""
    sinks: tuple[SinkConfig, ...] = (LogConfig(),)
    """Where events go: finished checks, missed windows, decisions, retrains, promotions, ends of
    runs. `{type: log}`, `{type: webhook, url: …, secret_env: …}`. `{type: azure_monitor, endpoint:
    https://…, rule: dcr-…}` also gets epochs of trainings and counts of served requests. If a sink
    fails, there is one warning, and the work continues."""

    def place(self, run: RunConfig, table: str) -> str:
        """The address of one of the tables of checks, windows and decisions."""
        return f"{(self.out or str(run.path)).rstrip('/')}/{table}"

    @field_validator("retrain_space", mode="before")
    @classmethod
    def _dotted(cls, space: Any) -> Any:
        """Nested names become dotted ones, as in search.space."""
        return dotted(space) if isinstance(space, dict) else space
