"""Who decodes: `threads` of this process, or `offload` to tasks on other CPUs of the cluster. One order, same pixels.

Both get the same steps with the same bytes from `RowGroups`, a few batches ahead of the consumer, and give back whole batches
in order. Offloading ships encoded bytes (2 MB a batch of 64) and gets pixels back through the object store, in plain Ray
tasks: Ray Data's blocks and scheduling reach 0.34 of a bare decode loop on two cores, tasks 0.65.

A batch is pixels_BHWC (uint8), the samples it holds (those of the plan, except where an image was broken), and the plan's step.
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
from raypipe.feed.dataset import FeedConfig, Rows
from raypipe.feed.decoding import decode_bytes, decode_many, try_decode
from raypipe.feed.encoded import Broken
from raypipe.feed.groups import RowGroups
from raypipe.feed.order import Step

log = logging.getLogger("raypipe")
CHUNK = 32  # images a decode task: 60 us of hand-over for 32 ms of work
Pixels = tuple[Tensor, np.ndarray, Step]


class Carrier(Protocol):
    """Turns steps into (inputs, samples_B, step), in order. `replaced` counts broken images; `in_flight_bytes` is the peak."""

    replaced: dict[int, str]
    in_flight_bytes: int

    def batches(self, wanted: Iterator[Step]) -> Iterator[Pixels]: ...


class _Decoder(Protocol):
    """Starts decoding a batch; the handle it returns waits for the pixels."""

    def start(self, encoded: list[memoryview]) -> Callable[[], tuple[Tensor, Broken]]: ...
    def close(self) -> None: ...


@dataclass
class Streaming:
    """`threads` and `offload`: batches decoded from the table as they are needed."""

    rows: Rows
    cfg: FeedConfig
    decoder: Callable[[], _Decoder]
    replaced: dict[int, str] = field(default_factory=dict)
    in_flight_bytes: int = 0
    intact: dict[int, int] = field(default_factory=dict)

    def batches(self, wanted: Iterator[Step]) -> Iterator[Pixels]:
        decoder = self.decoder()
        pending: deque[tuple[Step, Broken, Callable[[], tuple[Tensor, Broken]]]] = deque()
        with RowGroups(self.rows, self.intact) as groups:
            try:
                for step, encoded, broken in groups.steps(wanted):
                    pending.append((step, broken, decoder.start(encoded)))
                    self.in_flight_bytes = groups.peak_bytes
                    if len(pending) > self.cfg.prefetch:
                        yield self._finish(*pending.popleft(), groups)
                while pending:
                    yield self._finish(*pending.popleft(), groups)
            finally:
                decoder.close()

    def _finish(
        self,
        step: Step,
        broken: Broken,
        wait: Callable[[], tuple[Tensor, Broken]],
        groups: RowGroups,
    ) -> Pixels:
        pixels_BHWC, undecoded = wait()
        if not broken and not undecoded:
            return pixels_BHWC, step.samples_B, step
        samples_B = step.samples_B.copy()
        for slot, reason in {**dict(undecoded), **dict(broken)}.items():
            samples_B[slot] = self._replace(
                int(samples_B[slot]), reason, pixels_BHWC[slot].numpy(), groups
            )
        return pixels_BHWC, samples_B, step

    def _replace(self, sample: int, reason: str, out_HWC: np.ndarray, groups: RowGroups) -> int:
        note_bad(self.rows, self.cfg, self.replaced, sample, reason)
        for other, encoded in groups.alternatives(sample):
            if try_decode(encoded, out_HWC) is None:
                return other
        raise none_readable(self.rows, reason)


def note_bad(
    rows: Rows, cfg: FeedConfig, replaced: dict[int, str], sample: int, reason: str
) -> None:
    """Count and report a broken image once, or stop the run over it."""
    image = rows.ids[sample].as_py()
    if cfg.on_bad == "stop":
        raise DataError(
            f"Image {image} is broken: {reason}",
            rule="feed.on_bad=stop ends a run at the first one",
            fix="Restore it, drop it with raypipe clean, or set feed.on_bad=replace",
        )
    if sample not in replaced:
        log.warning("Image %s is broken (%s); the next readable one takes its place", image, reason)
    replaced[sample] = reason


def none_readable(rows: Rows, reason: str) -> DataError:
    """What is raised where nothing can take a broken image's place."""
    return DataError(
        f"None of the {len(rows)} images of a split is readable; of the last it is said: {reason}",
        fix="Restore the table; or set feed.verify=false, if its column sha256 is of something else",
    )


class ThreadDecoder:
    """Threads of this process: decoding and resizing let go of the interpreter's lock."""

    def __init__(self, side_px: int, threads: int, pinned_memory: bool) -> None:
        self._side, self._pinned, self._buffers = side_px, pinned_memory, Buffers()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")

    def start(self, encoded: list[memoryview]) -> Callable[[], tuple[Tensor, Broken]]:
        pixels = self._buffers.tensor((len(encoded), self._side, self._side, 3), self._pinned)
        out = pixels.numpy()
        parts: list[Future[Broken]] = [
            self._pool.submit(decode_many, encoded[i : i + CHUNK], out[i:], i)
            for i in range(0, len(encoded), CHUNK)
        ]
        return lambda: (pixels, [bad for part in parts for bad in part.result()])

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class TaskDecoder:
    """Ray tasks, one a batch, spread over the cluster and outside a training run's own reservation."""

    def __init__(self, side_px: int, pinned_memory: bool) -> None:
        self._side, self._pinned, self._buffers = side_px, pinned_memory, Buffers()
        self._decode = ray.remote(decode_bytes).options(
            num_cpus=1, num_returns=2, scheduling_strategy="SPREAD", max_retries=5
        )

    def start(self, encoded: list[memoryview]) -> Callable[[], tuple[Tensor, Broken]]:
        ends = np.cumsum([0] + [len(e) for e in encoded])
        data = np.frombuffer(b"".join(encoded), np.uint8)
        pixels, bad = self._decode.remote(data, ends, self._side)

        def wait() -> tuple[Tensor, Broken]:
            decoded = ray.get(pixels)  # read-only, in shared memory
            out = self._buffers.tensor(decoded.shape, self._pinned)
            np.copyto(out.numpy(), decoded)
            return out, ray.get(bad)

        return wait

    def close(self) -> None:
        """Tasks under way end by themselves."""
