"""Features of a frozen backbone: computed once per image, then read by every later run.

A search, the final training, and a retrain on old plus new rows all read the same features. Only an
image that was never seen before costs a forward pass: 30-50 images/s on two cores, against
200,000/s for reading a feature. Features are kept by content, the sha256 of an image's stored bytes
(feed/kept_features.py).

`feature_sources` works in four steps:
1. Read the kept features.
2. Hash the stored bytes of every row. This also detects damaged images. With feed.verify=false the
   column sha256 is trusted, and only row groups without kept features are read.
3. Compute the missing features in Ray tasks, and keep them.
4. Lay the features of each split into one array in the object store.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray

from raypipe.feed.by_content import ByContent
from raypipe.feed.dataset import FeedConfig, Pinned
from raypipe.feed.decoding import hash_group
from raypipe.feed.feature_tasks import embed_group, run_tasks
from raypipe.feed.feed import Source
from raypipe.feed.groups import stand_ins
from raypipe.feed.kept_features import KeptFeatures, as_contents
from raypipe.feed.loaders import none_readable, report_broken
from raypipe.feed.locate import locate
from raypipe.feed.rows import Rows
from raypipe.models.zoo import ModelConfig

log = logging.getLogger("raypipe")

SAVE_EVERY = 4096  # images: a kill loses no more, one or two minutes of two cores


def feature_sources(
    pinned: Pinned,
    splits: list[str],
    model: ModelConfig,
    feed: FeedConfig,
    store: str,
    most: int | None = None,
) -> dict[str, Source]:
    """The labelled rows of each split as one array of features in the object store.

    store: the folder of the kept features. Computes only what is not kept. most: rows of each
    split; None: all. Raises DataError for a broken image under feed.on_bad=stop.
    """
    keeper = KeptFeatures(store, model)
    kept = keeper.read()
    parts: dict[str, _Split] = {}
    # Validation may be the training split again.
    for split in dict.fromkeys(splits):
        rows = locate(pinned, split, feed, contents=True).sampled(most)
        first = sum(len(part.rows) for part in parts.values())
        parts[split] = _Split(rows, first)
        parts[split].hash_rows(kept.contents, feed.verify)

    # All splits in one array, so that a content is computed once.
    contents_N32 = np.concatenate([part.contents_n32 for part in parts.values()])
    collected = ByContent(as_contents(contents_N32), keeper.width)
    collected.fill(kept.contents, kept.features)
    if not collected.has_U.all():
        _fill_from_larger(collected, model, store)
    reason = f"features of {pinned.version}"
    outcomes = _compute_missing(list(parts.values()), collected, model, keeper, reason)
    collected.spread()
    return {split: part.source(collected, outcomes, model, feed) for split, part in parts.items()}


def _fill_from_larger(collected: ByContent, model: ModelConfig, store: str) -> None:
    """Enter features that are kept as a part of another backbone's: they need no forward pass."""
    larger = model.backbone.within
    if not larger or model.options:
        return
    keeper = KeptFeatures(store, model.model_copy(update={"name": larger}))
    kept = keeper.read()
    width = collected.features_ND.shape[1]
    collected.fill(kept.contents, (part_nD[:, -width:] for part_nD in kept.features))


@dataclass
class _Split:
    """A split's rows while their features are collected.

    first: the place of its first sample among those of all splits. contents_n32: the sha256 of
    each sample's bytes. bad: the reason by unusable sample.
    """

    rows: Rows
    first: int
    contents_n32: np.ndarray = field(init=False)
    bad: dict[int, str] = field(default_factory=dict)

    @property
    def place(self) -> slice:
        """Its samples among those of all splits."""
        return slice(self.first, self.first + len(self.rows))

    def hash_rows(self, kept: pa.Array, verify: bool) -> None:
        """Fill in `contents_n32`: from the column sha256 first, then by hashing stored bytes.

        Without `verify`, a row group is hashed only where one of its features is not `kept`.
        """
        rows = self.rows
        column = rows.sha256_N32
        self.contents_n32 = np.zeros((len(rows), 32), np.uint8) if column is None else column.copy()

        # Which row groups must be read?
        to_hash = list(range(len(rows.sizes_F)))
        if not verify:
            is_kept = pc.is_in(as_contents(self.contents_n32), value_set=kept).to_numpy(False)
            to_hash = [group for group in to_hash if not is_kept[rows.samples(group)].all()]

        # Hash them, and compare with the column where that is asked for.
        calls = (self._hash_arguments(group, verify) for group in to_hash)
        results = run_tasks(hash_group, calls)
        for group, (sha256_n32, broken) in zip(to_hash, results, strict=True):
            samples = rows.samples(group)
            self.contents_n32[samples] = sha256_n32
            for n, reason in broken:
                self.bad[samples.start + n] = reason

    def calls(self, wanted_n: np.ndarray) -> Iterator[tuple[Any, ...]]:
        """Arguments of `embed_group`, less the model's, for the samples that are wanted (bools)."""
        rows = self.rows
        assert rows.row_N is not None
        for group in range(len(rows.sizes_F)):
            samples = rows.samples(group)
            wanted = wanted_n[samples]
            if wanted.any():
                fragment = rows.fragments[group].for_task()
                yield fragment, rows.column, rows.storage_options, rows.row_N[samples][wanted]

    def source(
        self, collected: ByContent, outcomes: _Outcomes, model: ModelConfig, feed: FeedConfig
    ) -> Source:
        """The split's features as a source. Reports its broken images."""
        rows = self.rows
        code_n = collected.code_N[self.place]
        read_n = code_n[outcomes.read_U[code_n]]

        # A sample without features could not be decoded, or its bytes are others by now.
        for sample in np.flatnonzero(~collected.known(self.place)).tolist():
            if sample not in self.bad:
                reason = outcomes.reasons.get(int(code_n[sample]))
                self.bad[sample] = reason or "its bytes changed while they were read"

        reported: dict[int, str] = {}
        for sample in sorted(self.bad):
            report_broken(rows, feed, reported, sample, self.bad[sample])

        # A broken image gets the features of the image that replaces it.
        inputs_nD = collected.features_ND[self.place]
        broken = {sample: (self._stand_in(sample), why) for sample, why in self.bad.items()}
        for sample, (other, _) in broken.items():
            inputs_nD[sample] = inputs_nD[other]

        # All inputs are in memory: row groups of one sample make a full shuffle.
        alone = replace(
            rows,
            sizes_F=np.ones(len(rows), np.int64),
            fragments=(),
            row_N=None,
            hash_field=None,
            sha256_N32=None,
        )
        return Source(
            "memory",
            _shared(alone),
            model.pixels,
            feed,
            inputs=_shared(inputs_nD),
            read=len(set(read_n.tolist()) - outcomes.reasons.keys()),
            broken=broken,
        )

    def _stand_in(self, sample: int) -> int:
        """The sample that replaces a broken one. Raises DataError where none is readable."""
        for _, other in stand_ins(self.rows.bounds, sample):
            if other not in self.bad:
                return other
        raise none_readable(self.rows, self.bad[sample])

    def _hash_arguments(self, group: int, verify: bool) -> tuple[Any, ...]:
        """The arguments of `hash_group` for one row group."""
        rows = self.rows
        assert rows.row_N is not None
        return (
            rows.fragments[group].for_task(),
            rows.column,
            rows.storage_options,
            rows.row_N[rows.samples(group)],
            rows.hash_field if verify else None,
        )


@dataclass(frozen=True)
class _Outcomes:
    """read_U: the contents that were read now. reasons: why one of them has no features."""

    read_U: np.ndarray
    reasons: dict[int, str]


def _compute_missing(
    parts: Sequence[_Split],
    collected: ByContent,
    model: ModelConfig,
    keeper: KeptFeatures,
    why: str,
) -> _Outcomes:
    """Compute the features that `collected` lacks, and enter them there and in the kept table."""
    outcomes = _Outcomes(np.zeros(len(collected.different), bool), {})
    wanted_N = _first_usable(parts, collected)
    if not wanted_N.any():
        return outcomes
    log.info(
        "Computing features of %d images (%d are kept already)",
        int(wanted_N.sum()),
        int(collected.has_U.sum()),
    )
    codes = np.unique(collected.code_N[wanted_N]).tolist()
    code_of = {collected.different[code].as_py(): code for code in codes}

    calls = itertools.chain.from_iterable(part.calls(wanted_N[part.place]) for part in parts)
    model_json = model.model_dump_json()
    results = run_tasks(embed_group, ((*call, model_json, keeper.backbone) for call in calls))
    # Keep what is computed from time to time, so that a kill costs little.
    fresh: list[bytes] = []
    fresh_nD: list[np.ndarray] = []
    for contents, features_nD, broken in results:
        reasons = dict(broken)
        good = [content for n, content in enumerate(contents) if n not in reasons]
        for n, content in enumerate(contents):
            # Bytes that changed since they were hashed are another content.
            if content in code_of:
                outcomes.read_U[code_of[content]] = True
                if n in reasons:
                    outcomes.reasons[code_of[content]] = reasons[n]
        expected = [n for n, content in enumerate(good) if content in code_of]
        collected.put(np.array([code_of[good[n]] for n in expected], int), features_nD[expected])
        # A copy: a view would hold the task's result in the object store.
        fresh += good
        fresh_nD.append(np.array(features_nD))
        if len(fresh) >= SAVE_EVERY:
            keeper.add(fresh, np.concatenate(fresh_nD), why)
            fresh, fresh_nD = [], []
    if fresh:
        keeper.add(fresh, np.concatenate(fresh_nD), why)
    return outcomes


def _first_usable(parts: Sequence[_Split], collected: ByContent) -> np.ndarray:
    """One bool a sample: its features are to be computed. Each content is computed once."""
    is_candidate = ~collected.known(slice(None))
    for part in parts:
        is_candidate[[part.first + sample for sample in part.bad]] = False
    candidates = np.flatnonzero(is_candidate)
    _, first = np.unique(collected.code_N[candidates], return_index=True)
    wanted_N = np.zeros(len(is_candidate), bool)
    wanted_N[candidates[first]] = True
    return wanted_N


def _shared(value: Any) -> Any:
    """A reference to the value in the object store; the value itself without a cluster."""
    return ray.put(value) if ray.is_initialized() else value
