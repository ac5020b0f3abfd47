"""Who decodes: `threads` of this process, or `offload` to tasks on other CPUs of the cluster. One order, same pixels.

Both get the same steps with the same bytes from `RowGroups`, a few batches ahead of the consumer, and give back whole batches
in order. Offloading ships encoded bytes (2 MB a batch of 64) and gets pixels back through the object store, in plain Ray
tasks: Ray Data's blocks and scheduling reached 0.40 of a bare decode loop on two cores, tasks 0.85.

A batch is pixels_BHWC (uint8) and the samples it holds: those of the plan, except where an image was broken.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import ray
import torch
from torch import Tensor

from raypipe.errors import DataError
from raypipe.feed.dataset import FeedConfig, Rows
from raypipe.feed.groups import RowGroups
from raypipe.feed.order import Step
from raypipe.images.decode import BadImage, decode_into

log = logging.getLogger("raypipe")
CHUNK = 16  # images a decode task: 30 us of hand-over for 16 ms of work
Bad = list[tuple[int, str]]  # (slot in the batch, reason)
Pixels = tuple[Tensor, np.ndarray]


class Carrier(Protocol):
    """Turns steps into (inputs, samples_B), in order. `replaced` counts broken images; `in_flight_bytes` is the peak."""

    replaced: dict[int, str]
    in_flight_bytes: int

    def batches(self, wanted: Iterator[Step]) -> Iterator[Pixels]: ...


class _Decoder(Protocol):
    """Starts decoding a batch; the handle it returns waits for the pixels."""

    def start(self, encoded: list[memoryview], digests: np.ndarray | None) -> Callable[[], tuple[Tensor, Bad]]: ...
    def close(self) -> None: ...


@dataclass
class Streaming:
    """`threads` and `offload`: batches decoded from the table as they are needed."""

    rows: Rows
    cfg: FeedConfig
    decoder: Callable[[], _Decoder]
    replaced: dict[int, str] = field(default_factory=dict)
    in_flight_bytes: int = 0

    def batches(self, wanted: Iterator[Step]) -> Iterator[Pixels]:
        decoder = self.decoder()
        pending: deque[tuple[Step, Callable[[], tuple[Tensor, Bad]]]] = deque()
        with RowGroups(self.rows) as groups:
            try:
                for step, encoded in groups.steps(wanted):
                    digests = None if self.rows.sha256_N32 is None else self.rows.sha256_N32[step.samples_B]
                    pending.append((step, decoder.start(encoded, digests)))
                    self.in_flight_bytes = groups.peak_bytes
                    if len(pending) > self.cfg.prefetch:
                        yield self._finish(*pending.popleft(), groups)
                while pending:
                    yield self._finish(*pending.popleft(), groups)
            finally:
                decoder.close()

    def _finish(self, step: Step, wait: Callable[[], tuple[Tensor, Bad]], groups: RowGroups) -> Pixels:
        pixels_BHWC, bad = wait()
        if not bad:
            return pixels_BHWC, step.samples_B
        samples_B = step.samples_B.copy()
        for slot, reason in bad:
            samples_B[slot] = self._replace(int(samples_B[slot]), reason, pixels_BHWC[slot].numpy(), groups)
        return pixels_BHWC, samples_B

    def _replace(self, sample: int, reason: str, out_HWC: np.ndarray, groups: RowGroups) -> int:
        note_bad(self.rows, self.cfg, self.replaced, sample, reason)
        digests = self.rows.sha256_N32
        for other, encoded in groups.alternatives(sample):
            if try_decode(encoded, out_HWC, None if digests is None else digests[other]) is None:
                return other
        raise DataError("No image of a row group is readable", got=self.rows.ids[sample].as_py(), fix="raypipe clean")


def note_bad(rows: Rows, cfg: FeedConfig, replaced: dict[int, str], sample: int, reason: str) -> None:
    """Count and report a broken image once, or stop the run over it."""
    image = rows.ids[sample].as_py()
    if cfg.on_bad == "stop":
        raise DataError(
            f"Image {image} is broken: {reason}",
            rule="feed.on_bad=stop ends a run at the first one",
            fix="Restore it, drop it with raypipe clean, or set feed.on_bad=replace",
        )
    if sample not in replaced:
        log.warning("Image %s is broken (%s); the next one of its row group takes its place", image, reason)
    replaced[sample] = reason


def try_decode(encoded: memoryview | bytes, out_HWC: np.ndarray, digest_32: np.ndarray | None) -> str | None:
    """Decode into one slot; why it could not be done, or None. Hashing costs 2 % of decoding and sees flipped bits."""
    if digest_32 is not None and hashlib.sha256(encoded).digest() != digest_32.tobytes():
        return "its bytes do not match their sha256"
    try:
        decode_into(encoded, out_HWC)
    except BadImage as e:
        return f"{e.reason}: {e.detail}"
    return None


def decode_many(encoded: Sequence[memoryview | bytes], out_BHWC: np.ndarray, digests: np.ndarray | None, first: int = 0) -> Bad:
    tried = ((i, try_decode(e, out_BHWC[i], None if digests is None else digests[i])) for i, e in enumerate(encoded))
    return [(first + i, reason) for i, reason in tried if reason is not None]


class ThreadDecoder:
    """Threads of this process: Pillow lets go of the interpreter's lock while it decodes."""

    def __init__(self, side_px: int, threads: int, pinned_memory: bool) -> None:
        self._side, self._pinned = side_px, pinned_memory
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")

    def start(self, encoded: list[memoryview], digests: np.ndarray | None) -> Callable[[], tuple[Tensor, Bad]]:
        pixels = torch.empty((len(encoded), self._side, self._side, 3), dtype=torch.uint8, pin_memory=self._pinned)
        out = pixels.numpy()
        parts: list[Future[Bad]] = [
            self._pool.submit(
                decode_many, encoded[i : i + CHUNK], out[i:], None if digests is None else digests[i : i + CHUNK], i
            )
            for i in range(0, len(encoded), CHUNK)
        ]
        return lambda: (pixels, [bad for part in parts for bad in part.result()])

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class TaskDecoder:
    """Ray tasks, one a batch, spread over the cluster and outside a training run's own reservation."""

    def __init__(self, side_px: int, pinned_memory: bool) -> None:
        self._side, self._pinned = side_px, pinned_memory
        self._decode = ray.remote(_decode_task).options(num_cpus=1, num_returns=2, scheduling_strategy="SPREAD", max_retries=5)

    def start(self, encoded: list[memoryview], digests: np.ndarray | None) -> Callable[[], tuple[Tensor, Bad]]:
        ends = np.cumsum([0] + [len(e) for e in encoded])
        data = np.frombuffer(b"".join(encoded), np.uint8)
        pixels, bad = self._decode.remote(data, ends, self._side, digests)

        def wait() -> tuple[Tensor, Bad]:
            decoded = ray.get(pixels)  # read-only, in shared memory
            out = torch.empty(decoded.shape, dtype=torch.uint8, pin_memory=self._pinned)
            np.copyto(out.numpy(), decoded)
            return out, ray.get(bad)

        return wait

    def close(self) -> None:
        """Tasks under way end by themselves."""


def _decode_task(data: np.ndarray, ends: np.ndarray, side_px: int, digests: np.ndarray | None) -> tuple[Any, Bad]:
    view = data.data
    pixels = np.empty((len(ends) - 1, side_px, side_px, 3), np.uint8)
    bad = decode_many([view[a:b] for a, b in itertools.pairwise(ends)], pixels, digests)
    return pixels, bad
