"""Candidates -> verified rows, chunk by chunk in the source's order, by threads here or by Ray tasks anywhere.

Verifying reads an image, hashes it, decodes it to its last row and, when asked to, makes it smaller. What needs to know the
other images (is it there already, which family, which split) is decided by one driver from this stream, so the result is the
same whatever the parallelism.

Memory: a chunk is at most 32 files (or 1,024 rows of a table) and about 32 MB, and two chunks a worker are on their way.
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
from raypipe.images import decode, measure, shrink
from raypipe.tables.sources.candidate import Candidate, Part, Read

CHUNK_BYTES = 32 * 2**20
AHEAD = 2  # chunks a worker
SCHEMA = pa.schema(
    [
        (n, pa.string())
        for n in (
            "image_id",
            "sha256",
            "path",
            "label",
            "given",
            "format",
            "look",
            "reason",
            "detail",
        )
    ]
    + [(n, pa.int32()) for n in ("width", "height")]
    + [("bytes", pa.int64()), ("image", pa.binary())]
)
T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Verifier:
    """How to verify: limits of decoding, what to store, and the ids whose bytes need no second look."""

    formats: tuple[decode.Format, ...]
    max_pixels: int
    max_side: int | None
    quality: int
    known: frozenset[str]

    def __call__(self, chunk: Part) -> pa.Table:
        """One row of SCHEMA a candidate: with a `reason` it is rejected; without an `image` it was known. Raises DataError."""
        rows = []
        images = chunk.read([c for c in chunk.candidates if not c.shut])
        for candidate in chunk.candidates:
            row = {} if candidate.shut else self._row(next(images), candidate)
            if (
                candidate.reason
            ):  # the source could not say what it is; a damaged image says that first
                row = {"reason": candidate.reason, "detail": candidate.detail} | row
            rows.append(
                row | {"path": candidate.path, "label": candidate.label, "given": candidate.split}
            )
        return pa.Table.from_pylist(rows, SCHEMA)

    def _row(self, data: Read, candidate: Candidate) -> dict[str, Any]:
        if isinstance(data, decode.BadImage):
            return {"reason": data.reason, "detail": str(data)}
        image_id = hashlib.sha256(data).hexdigest()
        if candidate.reason:
            return {"image_id": image_id, "image": data}
        if image_id in self.known:
            return {"image_id": image_id}
        try:
            info, gray_HW = decode.inspect(data, self.max_pixels, self.formats)
            kept, info = shrink.stored(
                data, info, self.max_side, self.quality, self.max_pixels, self.formats
            )
        except decode.BadImage as bad:
            return {"image_id": image_id, "reason": bad.reason, "detail": str(bad), "image": data}
        return {
            "image_id": image_id,
            "sha256": image_id if kept is data else hashlib.sha256(kept).hexdigest(),
            "format": info.format,
            "width": info.width,
            "height": info.height,
            "bytes": len(kept),
            "look": measure.difference_hash(gray_HW).hex(),
            "image": kept,
        }


def chunks(parts: Iterable[Part]) -> Iterator[Part]:
    """The parts cut to what one call verifies."""
    for part in parts:
        held: list[Candidate] = []
        size = 0
        for candidate in part.candidates:
            if held and (len(held) >= part.rows or size + candidate.bytes > CHUNK_BYTES):
                yield Part(part.read, held)
                held, size = [], 0
            held.append(candidate)
            size += candidate.bytes
        if held:
            yield Part(part.read, held)


def stream(
    verify: Verifier,
    parts: list[Part],
    workers: int | Literal["auto"],
    threads: int,
    cluster: ClusterConfig,
) -> Iterator[pa.Table]:
    """Verified chunks in the source's order: by `workers` Ray tasks at a time, or 0: by threads of this process."""
    if workers == 0 or (
        workers == "auto" and not wants_ray(sum(len(p.candidates) for p in parts), cluster)
    ):
        return by_threads(verify, parts, threads)
    cpus = int(connect(cluster).get("CPU", 1))
    return by_ray(verify, parts, max(1, cpus) if workers == "auto" else workers)


def by_threads(verify: Verifier, parts: Iterable[Part], threads: int) -> Iterator[pa.Table]:
    with ThreadPoolExecutor(threads) as pool:
        pending = _ahead(lambda chunk: pool.submit(verify, chunk), chunks(parts), threads * AHEAD)
        try:
            for future in pending:
                yield future.result()
        finally:
            pool.shutdown(
                wait=False, cancel_futures=True
            )  # whoever stops early does not wait for the rest


def by_ray(verify: Verifier, parts: Iterable[Part], workers: int) -> Iterator[pa.Table]:
    """On the connected cluster, `workers` tasks of one CPU at a time. A chunk whose worker dies is verified again."""
    import ray

    held = ray.put(verify)  # the known ids once, not with every task
    task = ray.remote(num_cpus=1, max_retries=3)(_verified)
    for reference in _ahead(lambda chunk: task.remote(held, chunk), chunks(parts), workers * AHEAD):
        table = ray.get(reference)
        # A copy: rows wait for their commit here, and the object store may be smaller than a batch.
        yield table.take(pa.array(range(len(table)), pa.int64()))


def wants_ray(candidates: int, cluster: ClusterConfig) -> bool:
    """What `workers: auto` means: a cluster costs seconds to start and pays when there is work for many cores.

    With a cluster at hand from 2,000 images (2 s of work) on; else from 50,000 on more than eight cores: up to there threads
    keep pace.
    """
    import ray

    address = os.environ.get("RAY_ADDRESS", "")
    there = (
        ray.is_initialized()
        or (address and not address.startswith("http"))
        or cluster.address not in ("auto", "local")
    )
    return candidates >= 2_000 if there else candidates >= 50_000 and cores() > 8


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _verified(verify: Verifier, chunk: Part) -> pa.Table:
    return verify(chunk)


def _ahead(start: Callable[[T], U], work: Iterable[T], ahead: int) -> Iterator[U]:
    """Start `work`, at most `ahead` pieces before the one that is asked for, in order."""
    started: deque[U] = deque()
    for piece in work:
        started.append(start(piece))
        if len(started) > ahead:
            yield started.popleft()
    yield from started
