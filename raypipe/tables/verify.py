"""Candidates -> verified rows, chunk by chunk in the source's order, on threads here or on Ray
tasks anywhere.

Verifying reads an image, hashes it, decodes it to its last row and, if asked, makes it smaller.
Decisions that need the other images (is it in the table, which group, which split) are made by one
driver from this stream. So the result does not depend on the parallelism.

Memory: a chunk is at most 32 files (or 1,024 rows of a table) and about 32 MB. Two chunks for each
worker are on their way.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import pyarrow as pa

from raypipe.cluster.connect import ClusterConfig, connect
from raypipe.errors import without_secrets
from raypipe.images import decode, measure, shrink
from raypipe.tables.sources.candidate import Candidate, Part, Read

CHUNK_BYTES = 32 * 2**20
AHEAD = 2  # chunks for each worker
# From so many candidates on `workers: auto` uses Ray: with a cluster at hand (2 s of work), and
# without one.
RAY_WITH_CLUSTER = 2_000
RAY_WITHOUT_CLUSTER = 50_000
SCHEMA = pa.schema(
    [
        ("image_id", pa.string()),
        ("sha256", pa.string()),
        ("path", pa.string()),
        ("label", pa.string()),
        # the split that the source gives, or null
        ("given", pa.string()),
        ("format", pa.string()),
        ("look", pa.string()),
        # why the image is rejected, or null
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("bytes", pa.int64()),
        # the file has further pages or frames, which are not read
        ("more", pa.bool_()),
        # its 16-bit samples are those of 12 bits
        ("dark", pa.bool_()),
        ("image", pa.binary()),
    ]
)
T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Verifier:
    """How to verify: limits of decoding, what to store, and the ids of images that need no second
    look.
    """

    formats: tuple[decode.Format, ...]
    max_pixels: int
    max_side: int | None
    quality: int
    known: frozenset[str]

    def __call__(self, chunk: Part) -> pa.Table:
        """One row of SCHEMA for each candidate. With a `reason` it is rejected; without an `image`
        it was known.

        Raises DataError when the source cannot be read.
        """
        rows = []
        # The source gives the bytes of all candidates that are not shut, in order.
        images = chunk.read([c for c in chunk.candidates if not c.shut])
        for candidate in chunk.candidates:
            row = {} if candidate.shut else self._row(next(images), candidate)
            if candidate.reason:
                # The source rejects it (its label, its path). A damaged image keeps the reason that
                # decoding gave.
                row = {"reason": candidate.reason, "detail": candidate.detail} | row
            row |= {"path": candidate.path, "label": candidate.label, "given": candidate.split}
            rows.append(row)
        return pa.Table.from_pylist(rows, SCHEMA)

    def _row(self, data: Read, candidate: Candidate) -> dict[str, Any]:
        """The columns that depend on the image's bytes."""
        if isinstance(data, decode.BadImage):
            return {"reason": data.reason, "detail": str(data)}
        image_id = hashlib.sha256(data).hexdigest()
        if candidate.reason:
            return {"image_id": image_id, "image": data}
        if image_id in self.known:
            return {"image_id": image_id}
        try:
            info, gray_HW = decode.inspect(data, self.max_pixels, self.formats)
            stored, info = shrink.stored(
                data, info, self.max_side, self.quality, self.max_pixels, self.formats
            )
            _require_readable(info)
        except decode.BadImage as bad:
            return {"image_id": image_id, "reason": bad.reason, "detail": str(bad), "image": data}
        return {
            "image_id": image_id,
            "sha256": image_id if stored is data else hashlib.sha256(stored).hexdigest(),
            "format": info.format,
            "width": info.width,
            "height": info.height,
            "bytes": len(stored),
            "more": info.more,
            "dark": info.dark,
            "look": measure.difference_hash(gray_HW).hex(),
            "image": stored,
        }


def _require_readable(info: decode.ImageInfo) -> None:
    """Raise BadImage for an image that every reader would refuse, although ingest.max_pixels allows
    it.
    """
    pixels = info.width * info.height
    if pixels > decode.MAX_PIXELS:
        detail = f"{info.width}x{info.height}; training and prediction read {decode.MAX_PIXELS:,}"
        raise decode.BadImage(
            "too_large", f"{detail} pixels at most: set ingest.max_side to store it smaller"
        )


def chunks(parts: Iterable[Part]) -> Iterator[Part]:
    """The parts, cut to what one call of a Verifier takes: at most `part.rows` candidates and
    CHUNK_BYTES.
    """
    for part in parts:
        chunk: list[Candidate] = []
        size = 0
        for candidate in part.candidates:
            full = len(chunk) >= part.rows or size + candidate.bytes > CHUNK_BYTES
            if chunk and full:
                yield Part(part.read, chunk)
                chunk, size = [], 0
            chunk.append(candidate)
            size += candidate.bytes
        if chunk:
            yield Part(part.read, chunk)


def stream(
    verify: Verifier,
    parts: list[Part],
    workers: int | Literal["auto"],
    threads: int,
    cluster: ClusterConfig,
) -> Iterator[pa.Table]:
    """Verified chunks in the source's order: by `workers` Ray tasks at a time, or 0: by threads of
    this process.
    """
    if workers == "auto":
        candidates = sum(len(part.candidates) for part in parts)
        use_ray = wants_ray(candidates, cluster)
    else:
        use_ray = workers > 0
    if not use_ray:
        return by_threads(verify, parts, threads)

    cpus = int(connect(cluster).get("CPU", 1))
    tasks = max(1, cpus) if workers == "auto" else workers
    return by_ray(verify, parts, tasks)


def by_threads(verify: Verifier, parts: Iterable[Part], threads: int) -> Iterator[pa.Table]:
    """Verified chunks in order, by threads of this process."""
    with ThreadPoolExecutor(threads) as pool:
        pending = _ahead(lambda chunk: pool.submit(verify, chunk), chunks(parts), threads * AHEAD)
        try:
            for future in pending:
                yield future.result()
        finally:
            # A consumer that stops early does not wait for the rest.
            pool.shutdown(wait=False, cancel_futures=True)


def by_ray(verify: Verifier, parts: Iterable[Part], workers: int) -> Iterator[pa.Table]:
    """Verified chunks in order, by `workers` tasks of one CPU at a time on the connected cluster.

    A chunk whose worker dies is verified again.
    """
    import ray

    verifier = ray.put(verify)  # the known ids travel once, not with every task
    task = ray.remote(num_cpus=1, max_retries=3)(without_secrets(_verified))
    references = _ahead(lambda chunk: task.remote(verifier, chunk), chunks(parts), workers * AHEAD)
    for reference in references:
        table = ray.get(reference)
        # A copy: rows wait for their commit here, and the object store may be smaller than a batch.
        yield table.take(pa.array(range(len(table)), pa.int64()))


def wants_ray(candidates: int, cluster: ClusterConfig) -> bool:
    """Should `workers: auto` use Ray? A cluster takes seconds to start, and pays when there is work
    for many cores.

    With a cluster at hand from 2,000 images on. Without one from 50,000 on more than eight cores:
    below that threads keep pace.
    """
    import ray

    address = os.environ.get("RAY_ADDRESS", "")
    by_environment = bool(address) and not address.startswith(("http://", "https://"))
    by_config = cluster.address not in ("auto", "local")
    if ray.is_initialized() or by_environment or by_config:
        return candidates >= RAY_WITH_CLUSTER
    return candidates >= RAY_WITHOUT_CLUSTER and cores() > 8


def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _verified(verify: Verifier, chunk: Part) -> pa.Table:
    return verify(chunk)


def _ahead(start: Callable[[T], U], work: Iterable[T], ahead: int) -> Iterator[U]:
    """Start each piece of work, and yield what was started, in order; up to `ahead` pieces are
    started in advance.
    """
    started: deque[U] = deque()
    for piece in work:
        started.append(start(piece))
        if len(started) > ahead:
            yield started.popleft()
    yield from started
