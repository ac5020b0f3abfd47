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

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import ray
import torch

from raypipe.feed.dataset import FeedConfig, Pinned, Rows
from raypipe.feed.decoding import hash_group, try_decode
from raypipe.feed.encoded import Broken, encoded
from raypipe.feed.feed import Source
from raypipe.feed.groups import stand_ins
from raypipe.feed.kept_features import KeptFeatures, Vectors
from raypipe.feed.loaders import none_readable, report_broken
from raypipe.feed.locate import locate
from raypipe.models.allocator import keep_memory
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.tables.fragment import Fragment

log = logging.getLogger("raypipe")

SAVE_EVERY = 4096  # images: a kill loses no more, one or two minutes of two cores
AT_ONCE = 64  # images decoded before they are embedded

# By content that was read now: the reason why it has no features, or None where it has.
Outcomes = dict[bytes, str | None]


def feature_sources(
    pinned: Pinned, splits: list[str], model: ModelConfig, feed: FeedConfig, store: str
) -> dict[str, Source]:
    """The labelled rows of each split as one array of features in the object store.

    store: the folder of the kept features. Computes only what is not kept. Raises DataError for a
    broken image under feed.on_bad=stop.
    """
    kept = KeptFeatures(store, model)
    vectors = kept.read()

    parts = {split: _Split(locate(pinned, split, feed, hashes=True)) for split in splits}
    for part in parts.values():
        part.hash_rows(vectors, feed.verify)

    reason = f"features of {pinned.version}"
    outcomes = _compute_missing(parts.values(), vectors, model, kept, reason)

    sources = {}
    for split, part in parts.items():
        sources[split] = part.source(vectors, outcomes, kept.width, model, feed)
    return sources


@dataclass
class _Split:
    """A split's rows while their features are collected.

    contents: the sha256 of each sample's bytes. bad: the reason by unusable sample.
    groups: the samples of each row group.
    """

    rows: Rows
    contents: list[bytes] = field(default_factory=list)
    bad: dict[int, str] = field(default_factory=dict)
    groups: list[slice] = field(default_factory=list)

    def __post_init__(self) -> None:
        ends = np.cumsum(self.rows.sizes_F).tolist()
        starts = [0, *ends]
        self.groups = [slice(start, end) for start, end in zip(starts, ends, strict=False)]

    def hash_rows(self, vectors: Mapping[bytes, Any], verify: bool) -> None:
        """Fill in `contents`: from the column sha256 first, then by hashing stored bytes.

        Without `verify`, a row group is hashed only where one of its features is not kept.
        """
        column = self.rows.sha256_N32
        if column is None:
            self.contents = [b""] * len(self.rows)
        else:
            self.contents = [digest.tobytes() for digest in column]

        # Which row groups must be read?
        to_hash = []
        for group, samples in enumerate(self.groups):
            kept = all(content in vectors for content in self.contents[samples])
            if verify or not kept:
                to_hash.append(group)

        # Hash them, and compare with the column where that is asked for.
        digests = column if verify else None
        calls = (self._hash_arguments(group, digests) for group in to_hash)
        results = _run_tasks(hash_group, calls)
        for group, (sha256_n32, broken) in zip(to_hash, results, strict=True):
            samples = self.groups[group]
            self.contents[samples] = [digest.tobytes() for digest in sha256_n32]
            for n, reason in broken:
                self.bad[samples.start + n] = reason

    def missing(
        self, vectors: Mapping[bytes, Any], requested: set[bytes]
    ) -> Iterator[tuple[Any, ...]]:
        """Arguments of `_embed_group`, less the model, for each row group without all features.

        Each content is requested once: `requested` collects them over all splits.
        """
        rows = self.rows
        for group, samples in enumerate(self.groups):
            wanted = []
            for sample in range(samples.start, samples.stop):
                content = self.contents[sample]
                known = content in vectors or content in requested
                if sample not in self.bad and not known:
                    requested.add(content)
                    wanted.append(sample)
            if wanted:
                assert rows.row_N is not None
                fragment = rows.fragments[group].for_task()
                yield fragment, rows.column, rows.storage_options, rows.row_N[wanted]

    def source(
        self,
        vectors: Vectors,
        outcomes: Outcomes,
        width: int,
        model: ModelConfig,
        feed: FeedConfig,
    ) -> Source:
        """The split's features as a source. Reports its broken images."""
        rows = self.rows

        # A sample without features could not be decoded, or its bytes are others by now.
        for sample, content in enumerate(self.contents):
            if sample not in self.bad and content not in vectors:
                reason = outcomes.get(content)
                self.bad[sample] = reason or "its bytes changed while they were read"

        reported: dict[int, str] = {}
        for sample in sorted(self.bad):
            report_broken(rows, feed, reported, sample, self.bad[sample])

        # A broken image gets the features of the image that replaces it.
        broken = {sample: (self._stand_in(sample), why) for sample, why in self.bad.items()}
        inputs_ND = np.empty((len(rows), width), np.float32)
        for sample in range(len(rows)):
            used = broken[sample][0] if sample in broken else sample
            inputs_ND[sample] = vectors[self.contents[used]]

        # All inputs are in memory: row groups of one sample make a full shuffle.
        alone = replace(
            rows, sizes_F=np.ones(len(rows), np.int64), fragments=(), row_N=None, sha256_N32=None
        )
        computed = outcomes.keys() & set(self.contents)
        return Source(
            "memory",
            _shared(alone),
            model.pixels,
            feed,
            inputs=_shared(inputs_ND),
            decoded=len(computed),
            broken=broken,
        )

    def _stand_in(self, sample: int) -> int:
        """The sample that replaces a broken one. Raises DataError where none is readable."""
        bounds = np.concatenate(([0], np.cumsum(self.rows.sizes_F)))
        for _, other in stand_ins(bounds, sample):
            if other not in self.bad:
                return other
        raise none_readable(self.rows, self.bad[sample])

    def _hash_arguments(self, group: int, digests: np.ndarray | None) -> tuple[Any, ...]:
        """The arguments of `hash_group` for one row group."""
        rows = self.rows
        assert rows.row_N is not None
        samples = self.groups[group]
        group_digests = None if digests is None else digests[samples]
        return (
            rows.fragments[group].for_task(),
            rows.column,
            rows.storage_options,
            rows.row_N[samples],
            group_digests,
        )


def _compute_missing(
    parts: Iterable[_Split], vectors: Vectors, model: ModelConfig, kept: KeptFeatures, why: str
) -> Outcomes:
    """Compute the features that `vectors` lacks, and add them to it and to the kept table."""
    requested: set[bytes] = set()
    calls = []
    for part in parts:
        calls += list(part.missing(vectors, requested))
    if not requested:
        return {}
    log.info("Computing features of %d images (%d are kept already)", len(requested), len(vectors))

    # Keep what is computed from time to time, so that a kill costs little.
    model_json = model.model_dump_json()
    outcomes: Outcomes = {}
    fresh: Vectors = {}
    results = _run_tasks(_embed_group, ((*call, model_json) for call in calls))
    for contents, features_nD, broken in results:
        reasons = dict(broken)
        for n, content in enumerate(contents):
            outcomes[content] = reasons.get(n)
        good = [content for n, content in enumerate(contents) if n not in reasons]
        # A copy: a view would hold the task's result in the object store.
        fresh |= dict(zip(good, np.array(features_nD), strict=True))
        if len(fresh) >= SAVE_EVERY:
            kept.add(fresh, why)
            vectors |= fresh
            fresh = {}
    if fresh:
        kept.add(fresh, why)
        vectors |= fresh
    return outcomes


def _embed_group(
    fragment: Fragment,
    column: str,
    storage_options: dict[str, str] | None,
    row_n: np.ndarray,
    model_json: str,
) -> tuple[list[bytes], np.ndarray, Broken]:
    """(contents of these rows, features of the readable ones, which are not readable and why).

    A Ray task. row_n: physical rows of the row group.
    """
    images = encoded(fragment, column, storage_options)
    backbone = _backbone(model_json)
    side_px = ModelConfig.model_validate_json(model_json).pixels
    broken: Broken = []
    no_images = np.empty((0, side_px, side_px, 3), np.uint8)
    features = [backbone.predict(no_images)[0]]

    # Fill a batch with the images that decode, and embed it when it is full.
    pixels_BHWC = np.empty((AT_ONCE, side_px, side_px, 3), np.uint8)
    used = 0
    for n, row in enumerate(row_n.tolist()):
        reason = try_decode(images[row], pixels_BHWC[used])
        if reason is not None:
            broken.append((n, reason))
            continue
        used += 1
        if used == AT_ONCE:
            features.append(backbone.predict(pixels_BHWC)[0])
            used = 0
    if used:
        features.append(backbone.predict(pixels_BHWC[:used])[0])

    contents = [images.digest(row) for row in row_n.tolist()]
    return contents, np.concatenate(features), broken


def _run_tasks(function: Any, calls: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
    """The results of a function's calls, in order: as Ray tasks, or here without a cluster.

    Two tasks a CPU are started at a time, so that the object store holds neither all arguments nor
    all results.
    """
    if not ray.is_initialized():
        for call in calls:
            yield function(*call)
        return
    task = ray.remote(function).options(num_cpus=1, scheduling_strategy="SPREAD", max_retries=5)
    most = 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))
    started: deque[Any] = deque()
    for call in calls:
        started.append(task.remote(*call))
        if len(started) >= most:
            yield ray.get(started.popleft())
    while started:
        yield ray.get(started.popleft())


def _shared(value: Any) -> Any:
    """A reference to the value in the object store; the value itself without a cluster."""
    return ray.put(value) if ray.is_initialized() else value


@lru_cache(maxsize=1)
def _backbone(model_json: str) -> ImageModel:
    """The model of a ModelConfig as JSON (hashable), built once in each worker process."""
    if ray.is_initialized():
        # Ray runs one task a CPU, so each takes one thread.
        torch.set_num_threads(1)
        keep_memory()
    return ImageModel(ModelConfig.model_validate_json(model_json), classes=2).for_inference()
