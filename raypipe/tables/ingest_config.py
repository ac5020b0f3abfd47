"""The settings of an ingest: what it reads, how it splits the images, what it stores, and on how
many workers.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from raypipe.config import Section
from raypipe.images import decode
from raypipe.tables.sources import SourceConfig


class IngestConfig(Section):
    """What to ingest, under which name, how to split it, what to store, and on how many workers."""

    source: SourceConfig = Field(default=SourceConfig(), alias="from")
    """Where the images and labels come from; in YAML this section is called `from`."""

    name: str = "ingest"
    """Name of this source: the value of the column `source` in every row that this ingest adds."""

    share: tuple[float, float] = (0.0, 1.0)
    """Take only a part of the source: the files whose path hashes into [low, high) of [0, 1)."""

    splits: dict[str, float] = Field(default={"train": 0.7, "val": 0.15, "test": 0.15})
    """Shares of the splits, on average, for images whose split the source does not give.
    """

    stratify: bool = False
    """Keep the shares of `splits` within every label, with a difference of an image or two.
    Near-duplicates stay together, so the difference may be as large as a group of them.
    """

    seed: int = 0
    """Another seed draws other splits."""

    near_bits: int = Field(default=12, ge=0, lt=16)
    """Images whose perceptual hashes differ in at most this number of 256 bits go to one split. 0:
    only equal hashes. A group has at most half as many images as the smallest split should have,
    and at least room for 16; further images like it may go to other splits. An image that looks
    like images of two splits goes to that of the nearest.
    """

    formats: tuple[decode.Format, ...] = Field(default=decode.FORMATS, min_length=1)
    """Image formats to accept; other files go to the quarantine."""

    max_pixels: int = Field(default=decode.MAX_PIXELS, gt=0)
    """Largest image to accept, width x height in pixels: a small file may decode to gigabytes."""

    max_side: int | None = Field(default=None, ge=16)
    """Most pixels of a side of a stored image; larger images are made smaller. null: store the
    bytes as they are.
    """

    quality: int = Field(default=90, ge=1, le=100)
    """Quality of images that are encoded again because of `max_side`, 1-100."""

    dry_run: bool = False
    """Show classes, counts and splits of the source, and write nothing."""

    workers: int | Literal["auto"] = "auto"
    """Ray tasks at a time; 0: threads of this process. `auto` chooses by the number of images."""

    threads: int | None = Field(default=None, ge=1)
    """Threads of this process, if no Ray tasks are used. null: one for each core."""

    @field_validator("splits")
    @classmethod
    def _shares(cls, splits: dict[str, float]) -> dict[str, float]:
        if not splits or any(share <= 0 for share in splits.values()):
            raise ValueError(
                "splits is a mapping of names to positive shares, "
                "like {train: 0.7, val: 0.15, test: 0.15}"
            )
        return splits

    @field_validator("share")
    @classmethod
    def _part(cls, share: tuple[float, float]) -> tuple[float, float]:
        low, high = share
        if not 0 <= low < high <= 1:
            raise ValueError("share is [low, high) of [0, 1), like [0, 0.5]")
        return share

    @field_validator("workers")
    @classmethod
    def _workers(cls, workers: int | str) -> int | str:
        if isinstance(workers, int) and workers < 0:
            raise ValueError(
                "workers is auto, 0 for threads in this process, or a number of Ray tasks"
            )
        return workers
