"""The settings of a drift check and of the retrain after it (`watch.*`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from raypipe.config import Section
from raypipe.search.settings import dotted
from raypipe.tables.table import TableConfig


class WatchConfig(Section):
    """The table whose images are checked, what to call it, and how a retrain runs."""

    batch: TableConfig | None = None
    """The table of new images that is compared with the champion's reference."""
    name: str = "batch"
    """What the evidence and the report call the batch."""
    domain: str | None = None
    """Column that names the known domain of an image, as its camera or its site. A champion keeps a
    reference of each domain that it was trained for; a batch of one of them, or of any mixture, is
    no drift. It is read when a model is registered. null: the source column, if the table has one.
    """
    group: str | None = None
    """Column that names images that belong together, as the cells of one module. If both the
    champion's table and the batch have it, drift checks compare whole groups: the cells of one
    module differ from others without drift. null: each image stands alone."""
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
    force: bool = False
    """Retrain without drift."""

    @field_validator("retrain_space", mode="before")
    @classmethod
    def _dotted(cls, space: Any) -> Any:
        """Nested names become dotted ones, as in search.space."""
        return dotted(space) if isinstance(space, dict) else space
