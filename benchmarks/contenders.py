"""Who races in benchmarks/feed.py: each turns the same table into pixels_BHWC batches (uint8, 64 x
224 x 224 x 3).

A contender is a context manager. What it does before it yields is planning (imports, the log,
footers, a cluster), not timed; then `epoch(n)` starts the n-th pass, and what that starts (worker
processes, tasks) counts. Imports stand inside the contenders so that none pays for another's. All
but `ray_stock` decode with images/decode.py.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from raypipe.images.decode import decode_batch, decode_into

BATCH, SIDE_PX, WORKERS = 64, 224, 2
WINDOW = 8  # row groups that the DataLoader shuffles at a time


@dataclass(frozen=True)
class Loader:
    """`epoch(n)` yields batches; `processes` tells that others help; `in_flight_bytes` is a peak,
    where it is known.
    """

    epoch: Callable[[int], Iterable[Any]]
    processes: bool = True
    in_flight_bytes: Callable[[], int] | None = None


class Skip(Exception):
    """This contender cannot race here, and why."""


@contextmanager
def bare(uri: str) -> Iterator[Loader]:
    """The limit: encoded bytes in memory, each of two threads decodes whole batches into a buffer
    that it uses again.
    """
    encoded = [image for path, group, _ in row_groups(uri) for image in encoded_images(path, group)]
    spans = [encoded[i : i + BATCH] for i in range(0, len(encoded), BATCH)]
    own = threading.local()

    def decoded(span: list[memoryview]) -> np.ndarray:
        if not hasattr(own, "buffer"):
            own.buffer = _empty(BATCH)
        return _decode(span, own.buffer[: len(span)])

    with ThreadPoolExecutor(WORKERS) as pool:
        yield Loader(lambda epoch: pool.map(decoded, spans), processes=False)


@contextmanager
def ours(carrier: str, uri: str) -> Iterator[Loader]:
    """One of our loaders, in the order of a training epoch. `cache` plans and starts to decode in
    its first epoch.

    `threads` needs no cluster: an idle one takes 3 % of two cores.
    """
    with nullcontext() if carrier == "threads" else _cluster():
        from raypipe.feed import dataset
        from raypipe.feed.feed import Feed, prepare
        from raypipe.tables.table import TableConfig

        cfg = dataset.FeedConfig(
            carrier=carrier, cache_mb=8192, val="train", test="train", threads=WORKERS
        )
        pinned = dataset.pin(TableConfig(uri=uri), cfg)

        @lru_cache
        def feed() -> Feed:
            source = prepare(pinned, ["train"], SIDE_PX, cfg, seed=0)["train"]
            if source.carrier != carrier:
                raise Skip(f"{carrier} fell back to {source.carrier}")
            return Feed(source, source, BATCH, seed=0)

        if carrier != "cache":
            feed()
        yield Loader(
            lambda epoch: (batch.inputs for batch in feed().train(epoch)),
            processes=carrier != "threads",
            in_flight_bytes=(lambda: feed().in_flight_bytes) if carrier == "threads" else None,
        )
        feed().close()


@contextmanager
def dataloader(uri: str) -> Iterator[Loader]:
    """torch DataLoader over row groups, shuffled in windows, one call a batch. Spawned: deltalake
    hangs after a fork.
    """
    from torch.utils.data import DataLoader

    groups = row_groups(uri)
    loader: DataLoader[Any] = DataLoader(
        RowGroupImages(groups),  # type: ignore[arg-type]
        batch_sampler=_shuffled([rows for *_, rows in groups]),
        num_workers=WORKERS,  # each runs torch.set_num_threads(1) by itself
        collate_fn=_as_tensor,
        multiprocessing_context="spawn",
        persistent_workers=True,
    )
    yield Loader(lambda epoch: loader)


@contextmanager
def ray_stock(uri: str) -> Iterator[Loader]:
    """Ray Data as its documentation shows it: read_delta, a Pillow function a row, iter_batches.
    Not shuffled, kept uint8.
    """
    with _cluster():
        import ray.data

        stream = ray.data.read_delta(uri, columns=["image"]).map(_pillow)
        yield Loader(
            lambda epoch: (batch["pixels"] for batch in stream.iter_batches(batch_size=BATCH))
        )


@contextmanager
def ray_tuned(uri: str) -> Iterator[Loader]:
    """Ray Data over our distributed read: a task a row group, batches decoded into one uint8 array.
    Not shuffled.
    """
    with _cluster():
        from raypipe.tables import scan
        from raypipe.tables.table import ImageTable

        table = ImageTable(uri)
        stream = scan.dataset(table, table.pin(), ["image"]).map_batches(
            _decode_column, batch_size=BATCH
        )
        yield Loader(
            lambda epoch: (batch["pixels"] for batch in stream.iter_batches(batch_size=BATCH))
        )


@contextmanager
def streaming(uri: str) -> Iterator[Loader]:
    """MosaicML Streaming: the same bytes as MDS shards, its own shuffle, two worker processes.
    Skipped where not installed.
    """
    try:
        from streaming import MDSWriter, StreamingDataset
        from streaming.base.util import clean_stale_shared_memory
    except ImportError as e:
        raise Skip(f"mosaicml-streaming is not importable: {e}") from None
    from torch.utils.data import DataLoader

    shards = Path(f"{uri}-mds")
    if not (shards / "index.json").exists():
        with MDSWriter(out=str(shards), columns={"image": "bytes"}, exist_ok=True) as out:
            for path, group, _ in row_groups(uri):
                for image in encoded_images(path, group):
                    out.write({"image": bytes(image)})
    clean_stale_shared_memory()
    images = StreamingDataset(local=str(shards), shuffle=True, batch_size=BATCH)
    loader = DataLoader(
        images,
        BATCH,
        num_workers=WORKERS,
        collate_fn=_decode_samples,
        multiprocessing_context="spawn",
        persistent_workers=True,
    )
    yield Loader(lambda epoch: loader)


CONTENDERS: dict[str, Callable[[str], AbstractContextManager[Loader]]] = {
    "bare": bare,
    "threads": partial(ours, "threads"),
    "offload": partial(ours, "offload"),
    "cache": partial(ours, "cache"),
    "dataloader": dataloader,
    "ray_stock": ray_stock,
    "ray_tuned": ray_tuned,
    "streaming": streaming,
}


def row_groups(uri: str) -> list[tuple[str, int, int]]:
    """(file, row group, rows) of the table's newest version."""
    from deltalake import DeltaTable

    footers = [(path, pq.read_metadata(path)) for path in DeltaTable(uri).file_uris()]
    return [
        (path, g, footer.row_group(g).num_rows)
        for path, footer in footers
        for g in range(footer.num_row_groups)
    ]


def encoded_images(path: str, group: int) -> list[memoryview]:
    """The encoded images of one row group, views into one buffer."""
    with pq.ParquetFile(path) as file:
        column = file.read_row_group(group, columns=["image"], use_threads=False)[
            "image"
        ].combine_chunks()
    return [memoryview(image.as_buffer()) for image in column]


_held = lru_cache(maxsize=WINDOW + 1)(encoded_images)  # in each worker process


class RowGroupImages:
    """A map-style data set: an index is (row group, row)."""

    def __init__(self, groups: list[tuple[str, int, int]]) -> None:
        self._groups = groups

    def __getitems__(self, indices: list[tuple[int, int]]) -> np.ndarray:
        encoded = [_held(*self._groups[group][:2])[row] for group, row in indices]
        return _decode(encoded, _empty(len(encoded)))


def _shuffled(sizes: list[int]) -> list[list[tuple[int, int]]]:
    """Batches of (row group, row): samples shuffled among WINDOW row groups, so that a worker
    rereads little.
    """
    rng, order = np.random.default_rng(0), []
    groups = rng.permutation(len(sizes)).tolist()
    for start in range(0, len(groups), WINDOW):
        window = [(g, row) for g in groups[start : start + WINDOW] for row in range(sizes[g])]
        order += [window[i] for i in rng.permutation(len(window))]
    return [order[i : i + BATCH] for i in range(0, len(order), BATCH)]


@contextmanager
def _cluster() -> Iterator[None]:
    """A local Ray cluster of two CPUs, this process's own."""
    from raypipe.cluster.connect import ClusterConfig, close, connect

    connect(ClusterConfig(address="local", cpus=WORKERS))
    try:
        yield
    finally:
        close()


def _empty(images: int) -> np.ndarray:
    return np.empty((images, SIDE_PX, SIDE_PX, 3), np.uint8)


def _decode(encoded: Sequence[memoryview], out_BHWC: np.ndarray) -> np.ndarray:
    for data, slot in zip(encoded, out_BHWC, strict=True):
        decode_into(data, slot)
    return out_BHWC


def _as_tensor(batch: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(batch)


def _decode_samples(samples: list[dict[str, bytes]]) -> Any:
    return _as_tensor(_decode([memoryview(s["image"]) for s in samples], _empty(len(samples))))


def _decode_column(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"pixels": decode_batch(list(batch["image"]), SIDE_PX, threads=1)}


def _pillow(row: dict[str, Any]) -> dict[str, Any]:
    from PIL import Image

    return {
        "pixels": np.asarray(
            Image.open(io.BytesIO(row["image"])).convert("RGB").resize((SIDE_PX, SIDE_PX))
        )
    }
