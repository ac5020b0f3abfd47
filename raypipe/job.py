"""The whole configuration: what one YAML may hold. Each section belongs to one room."""

from __future__ import annotations

from raypipe.tables.clean import CleanConfig
from raypipe.tables.ingest import IngestConfig
from raypipe.watch.check import WatchJob


class Job(WatchJob):
    """Every verb takes the same YAML and reads the sections it needs."""

    ingest: IngestConfig = IngestConfig()
    """Which images are added to the table, and how."""
    clean: CleanConfig = CleanConfig()
    """What counts as a duplicate or a bad image, and which of these are dropped."""
