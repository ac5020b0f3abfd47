"""The labelled rows of one split: what every worker gets of them, and what it reads when needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import pyarrow as pa

from raypipe.errors import DataError
from raypipe.feed import stored
from raypipe.feed.dataset import FeedConfig
from raypipe.feed.order import Order
from raypipe.feed.sampling import balanced_weights
from raypipe.tables.fragment import Fragment, Options


def drawn(count: int, most: int | None) -> np.ndarray | None:
    """The samples that `Rows.sampled` takes of so many, in their order; None: all of them."""
    if most is None or count <= most:
        return None
    chosen: np.ndarray = np.sort(np.random.default_rng(0).choice(count, most, replace=False))
    return chosen


@dataclass(frozen=True)
class Rows:
    """The labelled rows of one split, without their images.

    Samples are numbered 0..N-1 through the row groups, in table order.

    labels_N: whole numbers in a small type, or labels_NC float32; `labels` gives them as a task
    wants them.
    sizes_F: samples in each row group. fragments: where each row group lies.
    row_N: each sample's physical row in its row group.
    weights_N: only where sampling is weighted by a column or by sources.
    column: the name of the image column.
    id_field, hash_field: the columns of ids and of hashes, which are read when needed. None: there
    is none, or nothing is compared.
    ids, sha256_N32: those of all rows, where they are in memory anyway; else None.
    """

    labels_N: np.ndarray
    sizes_F: np.ndarray
    fragments: tuple[Fragment, ...] = ()
    row_N: np.ndarray | None = None
    weights_N: np.ndarray | None = None
    column: str = ""
    id_field: pa.Field | None = None
    hash_field: pa.Field | None = None
    ids: pa.Array | None = None
    sha256_N32: np.ndarray | None = None
    storage_options: Options = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.labels_N)

    @cached_property
    def bounds(self) -> np.ndarray:
        """The first sample of each row group, and then the number of samples."""
        return np.concatenate(([0], np.cumsum(self.sizes_F, dtype=np.int64)))

    def samples(self, group: int) -> slice:
        """The samples of a row group."""
        first, end = self.bounds[group : group + 2].tolist()
        return slice(first, end)

    def sampled(self, most: int | None) -> Rows:
        """These rows, or `most` of them, drawn evenly and always the same ones."""
        chosen = drawn(len(self), most)
        if chosen is None:
            return self
        group_of = np.searchsorted(self.bounds, chosen, side="right") - 1
        groups, sizes_F = np.unique(group_of, return_counts=True)

        def of_chosen(values: np.ndarray | None) -> np.ndarray | None:
            return None if values is None else values[chosen]

        return replace(
            self,
            labels_N=self.labels_N[chosen],
            sizes_F=sizes_F,
            fragments=tuple(self.fragments[group] for group in groups.tolist()),
            row_N=of_chosen(self.row_N),
            weights_N=of_chosen(self.weights_N),
            ids=None if self.ids is None else self.ids.take(chosen),
            sha256_N32=of_chosen(self.sha256_N32),
        )

    def labels(self, samples: np.ndarray | slice) -> np.ndarray:
        """Labels of some samples, as Task.encode gives them: int64, or float32 of shape nC."""
        labels = self.labels_N[samples]
        return labels if labels.dtype.kind == "f" else labels.astype(np.int64)

    def ids_of(self, samples: Sequence[int] | np.ndarray) -> list[str | None]:
        """The ids of some samples, which need not be unique. Reads them, if they are not in memory.

        Raises DataError for a file that cannot be read.
        """
        wanted = np.asarray(samples, np.int64)
        if self.ids is not None:
            return list(self.ids.take(wanted).to_pylist())
        if self.id_field is None or self.row_N is None:
            return [None] * len(wanted)
        # Each row group is read once.
        groups = np.searchsorted(self.bounds, wanted, side="right") - 1
        ids: list[str | None] = [None] * len(wanted)
        for group in np.unique(groups).tolist():
            places = np.flatnonzero(groups == group)
            rows, inverse = np.unique(self.row_N[wanted[places]], return_inverse=True)
            fragment = self.fragments[group]
            read = stored.values(fragment, self.id_field, rows, self.storage_options).to_pylist()
            for place, at in zip(places.tolist(), inverse.tolist(), strict=True):
                ids[place] = read[at]
        return ids

    def name(self, sample: int) -> str:
        """What messages call a sample. Its file may be damaged, and then its id is too."""
        try:
            found = self.ids_of([sample])[0]
        except DataError:
            found = None
        return f"number {sample}" if found is None else found

    def digests(self, group: int) -> np.ndarray | None:
        """sha256_n32 of a row group's samples, zeros where a row has none; None: not compared."""
        samples = self.samples(group)
        if self.sha256_N32 is not None:
            return self.sha256_N32[samples]
        if self.row_N is None:
            return None
        return stored.digests(
            self.fragments[group], self.hash_field, self.row_N[samples], self.storage_options
        )

    def weights(self, cfg: FeedConfig) -> np.ndarray | None:
        """How often each sample is drawn, relative to the others; None: equally often."""
        return balanced_weights(self.labels_N) if cfg.sampling == "balanced" else self.weights_N

    def order(self, cfg: FeedConfig, batch_size: int, seed: int) -> Order:
        """The order of these samples in training. batch_size is global."""
        weights_N = self.weights(cfg)
        return Order(
            self.sizes_F, batch_size, seed, cfg.shards, cfg.window, cfg.drop_last, weights_N
        )
