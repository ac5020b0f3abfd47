"""To which domain and which group each image of a split belongs: for the reference of a package.

Columns of the table say so: `registry.domain`, else the source column; and `registry.group`.
"""

from __future__ import annotations

import numpy as np

from raypipe.feed.dataset import Pinned
from raypipe.feed.locate import columns_of
from raypipe.feed.rows import Rows
from raypipe.registry.tracking import RegistryConfig


def name_of(value: object) -> str:
    """The name of a domain or a group as a package keeps it: blank for a null and for NaN."""
    return "" if value is None or value != value else str(value)


def names(
    cfg: RegistryConfig, pinned: Pinned, rows: Rows, samples_N: np.ndarray
) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """(domains, groups) of these samples, blank for a null and for NaN.

    No domain at all: no column is asked for, and the table has no source column. None: no column of
    groups is asked for. Raises DataError for a file that cannot be read.
    """
    source = pinned.table.columns.source
    has = {field.name for field in pinned.table.at(pinned.version).schema().fields}
    domain = cfg.domain or (source if source in has else None)
    asked = list(dict.fromkeys(name for name in (domain, cfg.group) if name))
    if not asked:
        return (), None
    read = columns_of(rows, pinned, asked)

    def texts(column: str) -> tuple[str, ...]:
        # Dates, numbers and truth values are names, too.
        values = [name_of(value) for value in read[column].to_pylist()]
        return tuple(values[sample] for sample in samples_N.tolist())

    return texts(domain) if domain else (), texts(cfg.group) if cfg.group else None
