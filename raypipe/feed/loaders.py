"""Loaders that decode batches from the table as they are needed, and the interface of all loaders.

A loader turns planned steps into batches, in order. The config key `feed.carrier` chooses one:

- threads    threads of this process decode (`Streaming` with `ThreadDecoder`)
- offload    Ray tasks on other CPUs of the cluster decode (`Streaming` with `TaskDecoder`)
- cache      all images are decoded once and kept in the object store (feed/cache.py)

All give the same pixels in the same order. `Streaming` reads encoded images with `RowGroups` and
starts to decode a few batches before the consumer needs them.

Offloading sends encoded bytes (2 MB for a batch of 64) and receives pixels through the object
store. It uses plain Ray tasks: on two cores they reach 0.65 of a bare decode loop, Ray Data 0.34.

A batch is (pixels_BHWC uint8, samples_B, step). samples_B are the samples that the batch holds:
those of the step, except where an image was broken and another one replaces it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import ray
from torch import Tensor

from raypipe.errors import DataError
from raypipe.feed.buffers import Buffers
from raypipe.feed.dataset import FeedConfig
from raypipe.feed.decoding import decode_bytes, decode_many, try_decode
from raypipe.feed.encoded import Broken
from raypipe.feed.groups import RowGroups
from raypipe.feed.order import Step
from raypipe.feed.rows import Rows

log = logging.getLogger("raypipe")

CHUNK = 32  # images a decode task: 60 us to hand over, 32 ms of work
Loaded = tuple[Tensor, np.ndarray, Step]
Decoding = Callable[[], tuple[Tensor, Broken]]  # waits: (pixels, which images do not decode)


class Loader(Protocol):
    """Turns steps into (inputs, samples_B, step), in order.

    replaced: the reason by broken sample. in_flight_bytes: the peak of encoded bytes held.
    """

    replaced: dict[int, str]
    in_flight_bytes: int

    def batches(self, steps: Iterator[Step]) -> Iterator[Loaded]: ...


class _Decoder(Protocol):
    """Starts to decode a batch; calling the result waits for the pixels."""

    def start(self, encoded: list[memoryview]) -> Decoding: ...
    def close(self) -> None: ...


@dataclass
class Streaming:
    """The loader of `threads` and `offload`: it decodes batches from the table as needed.

    intact: checksum by row group whose images matched their sha256; kept from pass to pass.
    """

    rows: Rows
    cfg: FeedConfig
    decoder: Callable[[], _Decoder]
    replaced: dict[int, str] = field(default_factory=dict)
    in_flight_bytes: int = 0
    intact: dict[int, int] = field(default_factory=dict)

    def batches(self, steps: Iterator[Step]) -> Iterator[Loaded]:
        decoder = self.decoder()
        pending: deque[tuple[Step, Broken, Decoding]] = deque()
        with RowGroups(self.rows, self.intact) as groups:
            try:
                for step, encoded, broken in groups.steps(steps):
                    pending.append((step, broken, decoder.start(encoded)))
                    self.in_flight_bytes = groups.peak_bytes
                    # So many batches are decoded ahead; the oldest is due.
                    if len(pending) > self.cfg.prefetch:
                        yield self._finish(*pending.popleft(), groups)
                while pending:
                    yield self._finish(*pending.popleft(), groups)
            finally:
                decoder.close()

    def _finish(self, step: Step, broken: Broken, wait: Decoding, groups: RowGroups) -> Loaded:
        """Wait for a batch's pixels and replace its broken images."""
        pixels_BHWC, undecoded = wait()
        if not broken and not undecoded:
            return pixels_BHWC, step.samples_B, step

        # An image may be both; a wrong sha256 says more than a decoder's error.
        reasons = dict(undecoded)
        reasons.update(broken)
        samples_B = step.samples_B.copy()
        for slot, reason in reasons.items():
            sample = int(samples_B[slot])
            pixels_HWC = pixels_BHWC[slot].numpy()
            samples_B[slot] = self._replace(sample, reason, pixels_HWC, groups)
        return pixels_BHWC, samples_B, step

    def _replace(self, sample: int, reason: str, out_HWC: np.ndarray, groups: RowGroups) -> int:
        """Decode the next readable image into the slot; returns its sample number."""
        report_broken(self.rows, self.cfg, self.replaced, sample, reason)
        for other, encoded in groups.alternatives(sample):
            if try_decode(encoded, out_HWC) is None:
                return other
        raise none_readable(self.rows, reason)


def report_broken(
    rows: Rows, cfg: FeedConfig, replaced: dict[int, str], sample: int, reason: str
) -> None:
    """Log a broken image once and enter it in `replaced`. Raises DataError under on_bad=stop."""
    if cfg.on_bad == "stop":
        raise DataError(
            f"Image {rows.name(sample)} is broken: {reason}",
            rule="feed.on_bad=stop ends a run at the first one",
            fix="Restore it, drop it with raypipe clean, or set feed.on_bad=replace",
        )
    if sample not in replaced:
        log.warning(
            "Image %s is broken (%s): in training the next readable one takes its place",
            rows.name(sample),
            reason,
        )
    replaced[sample] = reason


def none_readable(rows: Rows, reason: str) -> DataError:
    """The error to raise when no image can replace a broken one. reason: that of the last one."""
    return DataError(
        f"None of the {len(rows)} images of a split is readable. The last one: {reason}",
        fix="Restore the table; or set feed.verify=false, if its column sha256 hashes other bytes",
    )


class ThreadDecoder:
    """Decodes in threads of this process: decoding and resizing release the GIL."""

    def __init__(self, side_px: int, threads: int, pinned_memory: bool) -> None:
        self._side = side_px
        self._pinned = pinned_memory
        self._buffers = Buffers()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")

    def start(self, encoded: list[memoryview]) -> Decoding:
        shape = (len(encoded), self._side, self._side, 3)
        pixels_BHWC = self._buffers.tensor(shape, self._pinned)
        out_BHWC = pixels_BHWC.numpy()

        # Each chunk is decoded straight into its slots of the batch.
        chunks: list[Future[Broken]] = []
        for first in range(0, len(encoded), CHUNK):
            chunk = encoded[first : first + CHUNK]
            chunks.append(self._pool.submit(decode_many, chunk, out_BHWC[first:], first))

        def wait() -> tuple[Tensor, Broken]:
            broken: Broken = []
            for chunk in chunks:
                broken += chunk.result()
            return pixels_BHWC, broken

        return wait

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class TaskDecoder:
    """Decodes in Ray tasks, one a batch, on any CPUs that a training run has not reserved."""

    def __init__(self, side_px: int, pinned_memory: bool) -> None:
        self._side = side_px
        self._pinned = pinned_memory
        self._buffers = Buffers()
        self._decode = ray.remote(decode_bytes).options(
            num_cpus=1, num_returns=2, scheduling_strategy="SPREAD", max_retries=5
        )

    def start(self, encoded: list[memoryview]) -> Decoding:
        # One array for the whole batch, and where each image ends in it.
        ends = np.cumsum([0] + [len(image) for image in encoded])
        data = np.frombuffer(b"".join(encoded), np.uint8)
        pixels_ref, broken_ref = self._decode.remote(data, ends, self._side)

        def wait() -> tuple[Tensor, Broken]:
            # The result is read-only, in shared memory: replacing an image needs a copy.
            decoded = ray.get(pixels_ref)
            pixels_BHWC = self._buffers.tensor(decoded.shape, self._pinned)
            np.copyto(pixels_BHWC.numpy(), decoded)
            return pixels_BHWC, ray.get(broken_ref)

        return wait

    def close(self) -> None:
        """Nothing to do: running tasks end by themselves."""
