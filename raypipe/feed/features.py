"""Features of a frozen backbone.

They are computed once per image and backbone, and kept in a Delta table beside the run: a search,
the final training and a retrain on old plus new rows all read them, and only images never seen
before cost a forward pass (30-50 images/s on two cores, against 200,000/s for reading a feature).

Kept under content: the sha256 of an image's stored bytes, and a hash of all that turns bytes into
features. Ids play no part, so several photographs under one id have several vectors, and a new
photograph under an old id has a new one. The bytes are hashed in every run, which also finds
images that have rotted; with feed.verify=false the table's column sha256 is believed instead, and
only images without a kept feature are read.

FORMAT is part of that hash and of every row. What earlier versions kept under ids (format 1) lies
in folders of other names: it is never read, and made again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import torch

from raypipe.errors import DataError
from raypipe.feed.dataset import FeedConfig, Pinned, Rows, locate
from raypipe.feed.decoding import hash_group, try_decode
from raypipe.feed.encoded import Broken, encoded
from raypipe.feed.feed import Source
from raypipe.feed.groups import stand_ins
from raypipe.feed.loaders import none_readable, note_bad
from raypipe.models.allocator import keep_memory
from raypipe.models.zoo import ImageModel, ModelConfig, backbone_hash
from raypipe.tables import scan
from raypipe.tables.fragment import Fragment
from raypipe.tables.table import ImageTable, append

log = logging.getLogger("raypipe")

FORMAT = 2  # of the kept table: rows of (content, features, format)
SAVE_EVERY = 4096  # images: a kill costs no more of them, one or two minutes of two cores
AT_ONCE = 64  # images decoded before they are embedded
Vectors = dict[bytes, np.ndarray]  # by content


def feature_sources(
    pinned: Pinned, splits: list[str], model: ModelConfig, feed: FeedConfig, store: str
) -> dict[str, Source]:
    """The labelled rows of each split as one array of features in the object store. Computes only
    what is not kept. Raises DataError for a broken image under feed.on_bad=stop."""
    kept = Kept(store, model)
    vectors = kept.read()
    found = {split: _Split(locate(pinned, split, feed, hashes=True)) for split in splits}
    for part in found.values():
        part.hash(vectors, feed.verify)
    new = _complete(found.values(), vectors, model, kept, f"features of {pinned.version}")
    return {
        split: part.source(vectors, new, kept.width, model, feed) for split, part in found.items()
    }


@dataclass
class _Split:
    """A split's rows, what each holds, and which cannot be used."""

    rows: Rows
    contents: list[bytes] = field(default_factory=list)
    bad: dict[int, str] = field(default_factory=dict)
    groups: list[slice] = field(default_factory=list)  # the samples of each row group

    def __post_init__(self) -> None:
        ends = np.cumsum(self.rows.sizes_F).tolist()
        self.groups = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]

    def hash(self, vectors: Mapping[bytes, Any], verify: bool) -> None:
        """Find every row's content: by its bytes, or, where nothing is to be verified and all that
        the table says of a row group is known, by that."""
        said = self.rows.sha256_N32
        self.contents = [b""] * len(self.rows) if said is None else [d.tobytes() for d in said]
        work = [
            mine
            for mine in range(len(self.groups))
            if verify or not all(c in vectors for c in self.contents[self.groups[mine]])
        ]
        calls = (self._asked(group, said if verify else None) for group in work)
        for group, (digests_n32, broken) in zip(work, _ahead(hash_group, calls), strict=True):
            self.contents[self.groups[group]] = [digest.tobytes() for digest in digests_n32]
            first = self.groups[group].start
            self.bad |= {first + n: reason for n, reason in broken}

    def lacking(self, vectors: Mapping[bytes, Any], taken: set[bytes]) -> Iterator[tuple[Any, ...]]:
        """What `_embed_group` is to do, row group by row group; each content once, as `taken` says."""
        rows = self.rows
        for group, mine in enumerate(self.groups):
            wanted = []
            for sample in range(mine.start, mine.stop):
                content = self.contents[sample]
                if sample not in self.bad and content not in vectors and content not in taken:
                    taken.add(content)
                    wanted.append(sample)
            if wanted:
                assert rows.row_N is not None
                yield rows.fragments[group], rows.column, rows.storage_options, rows.row_N[wanted]

    def source(
        self,
        vectors: Vectors,
        new: dict[bytes, str | None],
        width: int,
        model: ModelConfig,
        feed: FeedConfig,
    ) -> Source:
        """`new` says of each content that was looked at now why it has no features, or None."""
        rows = self.rows
        for sample, content in enumerate(self.contents):
            if sample not in self.bad and content not in vectors:
                why = new.get(content) or "its bytes changed while they were read"
                self.bad[sample] = why
        noted: dict[int, str] = {}
        for sample in sorted(self.bad):
            note_bad(rows, feed, noted, sample, self.bad[sample])
        broken = {sample: (self._stand_in(sample), reason) for sample, reason in self.bad.items()}
        used = [broken[n][0] if n in broken else n for n in range(len(rows))]
        inputs_ND = np.empty((len(rows), width), np.float32)
        for n, sample in enumerate(used):
            inputs_ND[n] = vectors[self.contents[sample]]
        # No windows: all is here.
        alone = replace(
            rows, sizes_F=np.ones(len(rows), np.int64), fragments=(), row_N=None, sha256_N32=None
        )
        computed = len(new.keys() & set(self.contents))
        return Source(
            *("memory", _shared(alone), model.pixels, feed),
            inputs=_shared(inputs_ND),
            decoded=computed,
            broken=broken,
        )

    def _stand_in(self, sample: int) -> int:
        bounds = np.concatenate(([0], np.cumsum(self.rows.sizes_F)))
        for _, other in stand_ins(bounds, sample):
            if other not in self.bad:
                return other
        raise none_readable(self.rows, self.bad[sample])

    def _asked(self, group: int, digests: np.ndarray | None) -> tuple[Any, ...]:
        rows, mine = self.rows, self.groups[group]
        assert rows.row_N is not None
        said = None if digests is None else digests[mine]
        return rows.fragments[group], rows.column, rows.storage_options, rows.row_N[mine], said


class Kept:
    """The table of one backbone's features."""

    def __init__(self, store: str, model: ModelConfig) -> None:
        built = ImageModel(model, classes=2)
        self.width = built.head.linear.in_features
        self._store, self._slug = Path(store), f"{model.slug}-{model.pixels}px-"
        self.uri = f"{store}/{self._slug}{backbone_hash(model, built.backbone, FORMAT)}"

    def read(self) -> Vectors:
        """All that is kept. Raises DataError for a table of another format."""
        if not ImageTable.exists(self.uri):
            self._tell_of_old_ones()
            return {}
        table = ImageTable(self.uri)
        pinned = table.pin()
        names = [f.name for f in table.delta(pinned.version).schema().fields]
        found = scan.rows(table, pinned, names)
        if set(names) == {"content", "features", "format"}:
            rows = zip(
                *(found[n].to_pylist() for n in ("content", "features", "format")), strict=True
            )
            vectors = {
                key: np.frombuffer(row, np.float32) for key, row, kind in rows if kind == FORMAT
            }
            right = all(len(k) == 32 and len(v) == self.width for k, v in vectors.items())
            if right and len(vectors) == len(found["content"].unique()):
                return vectors
        raise DataError(
            f"These kept features are not of format {FORMAT}, or not of this backbone",
            got=self.uri,
            rule="Nothing kept is guessed at",
            fix="Remove this folder: they are made again",
        )

    def add(self, vectors: Vectors, why: str) -> None:
        """Keep more. Two runs at once may keep a content twice, which does no harm."""
        columns = {
            "content": pa.array(list(vectors), pa.binary()),
            "features": pa.array(
                [v.astype(np.float32).tobytes() for v in vectors.values()], pa.binary()
            ),
            "format": pa.array([FORMAT] * len(vectors), pa.int32()),
        }
        try:
            append(self.uri, pa.table(columns), why)
        except (
            Exception
        ):  # another run made the table a moment ago; deltalake's errors share no base
            if not ImageTable.exists(self.uri):
                raise
            append(self.uri, pa.table(columns), why)

    def _tell_of_old_ones(self) -> None:
        for folder in sorted(self._store.glob(f"{self._slug}*")):
            if not ImageTable.exists(str(folder)):
                continue
            names = [f.name for f in ImageTable(str(folder)).delta().schema().fields]
            if "image_id" in names:
                log.info(
                    "Features that an earlier raypipe kept under ids are made again: %s may be removed",
                    folder,
                )


def _complete(
    parts: Iterable[_Split], vectors: Vectors, model: ModelConfig, kept: Kept, why: str
) -> dict[bytes, str | None]:
    """Embed what `vectors` lacks, into it and into the kept table. Returns the contents looked at,
    with the reason where one has no features."""
    taken: set[bytes] = set()
    calls = [call for part in parts for call in part.lacking(vectors, taken)]
    if not taken:
        return {}
    log.info("Computing features of %d images (%d are kept already)", len(taken), len(vectors))
    told = model.model_dump_json()
    looked: dict[bytes, str | None] = {}
    fresh: Vectors = {}
    for contents, features_nD, reasons in _ahead(_embed_group, ((*c, told) for c in calls)):
        bad = dict(reasons)
        looked |= {content: bad.get(n) for n, content in enumerate(contents)}
        good = [content for n, content in enumerate(contents) if n not in bad]
        # A copy: a view would hold the task's result in the object store.
        fresh |= dict(zip(good, np.array(features_nD), strict=True))
        if len(fresh) >= SAVE_EVERY:
            kept.add(fresh, why)
            vectors |= fresh
            fresh = {}
    if fresh:
        kept.add(fresh, why)
        vectors |= fresh
    return looked


def _embed_group(
    fragment: Fragment,
    column: str,
    storage_options: dict[str, str] | None,
    row_n: np.ndarray,
    model: str,
) -> tuple[list[bytes], np.ndarray, Broken]:
    """(contents of these rows, features of the readable ones, which are not readable and why)."""
    images, backbone = encoded(fragment, column, storage_options), _backbone(model)
    side_px = ModelConfig.model_validate_json(model).pixels
    bad: Broken = []
    features = [backbone.predict(np.empty((0, side_px, side_px, 3), np.uint8))[0]]
    pixels_BHWC = np.empty((AT_ONCE, side_px, side_px, 3), np.uint8)
    used = 0
    for n, row in enumerate(row_n.tolist()):
        reason = try_decode(images[row], pixels_BHWC[used])
        if reason is not None:
            bad.append((n, reason))
            continue
        used += 1
        if used == AT_ONCE:
            features.append(backbone.predict(pixels_BHWC)[0])
            used = 0
    if used:
        features.append(backbone.predict(pixels_BHWC[:used])[0])
    return [images.digest(row) for row in row_n.tolist()], np.concatenate(features), bad


def _ahead(work: Any, calls: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
    """The results of Ray tasks in order, two started for each CPU: neither all arguments nor all
    results lie in the object store at once. Without a cluster they are worked out here."""
    if not ray.is_initialized():
        yield from (work(*call) for call in calls)
        return
    task = ray.remote(work).options(num_cpus=1, scheduling_strategy="SPREAD", max_retries=5)
    most = 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))
    started: deque[Any] = deque()
    for call in calls:
        started.append(task.remote(*call))
        if len(started) >= most:
            yield ray.get(started.popleft())
    while started:
        yield ray.get(started.popleft())


def _shared(value: Any) -> Any:
    return ray.put(value) if ray.is_initialized() else value


@lru_cache(maxsize=1)
def _backbone(model: str) -> ImageModel:
    """Of a ModelConfig as JSON, which hashes. Built once in each worker process; Ray runs one task
    a CPU, so each takes one thread."""
    if ray.is_initialized():
        torch.set_num_threads(1)
        keep_memory()
    return ImageModel(ModelConfig.model_validate_json(model), classes=2).for_inference()
