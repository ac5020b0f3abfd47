"""Predicts pieces on the cluster: by tasks on its CPUs, or by actors that have a GPU.

A task's process keeps the model (shared_package.py), so it is loaded once in each. On CPUs tasks
are as fast as actors and take no memory when nothing is to do; a GPU is held by an actor, which
decodes on several threads.

Results come in the order of the pieces, and few tasks are ahead of the driver: where it is slow to
commit, the workers wait. A task gets about a second of work, so that what a task costs by itself
(3 ms) counts little, and a kill loses little.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import ray

from raypipe.cluster.resources import resources_by_node, room_for
from raypipe.cluster.tasks import cancel, result
from raypipe.errors import ClusterError, without_secrets
from raypipe.serve.pieces import Piece
from raypipe.serve.predicted_rows import predicted
from raypipe.serve.shared_package import SharedPackage
from raypipe.tables import fragment
from raypipe.tables.between import Rows
from raypipe.tables.fragment import Fragment, Options
from raypipe.tables.table import Columns

TASK_S = 1.0
MOST_PIECES = 16  # of a task: 4,096 rows, 20 MB where embeddings have 1,280 numbers
AHEAD = 3  # tasks for each worker: one runs, one waits beside it, one is on its way

Start = Callable[[tuple[Fragment, ...]], Any]
Done = tuple[tuple[Piece, ...], pa.Table, float]  # pieces, their rows, a worker's seconds


@dataclass(frozen=True)
class Reading:
    """How a worker reads rows and predicts them."""

    schema: pa.Schema
    columns: Columns
    where: dict[str, Any]
    batch_size: int
    storage_options: Options = field(repr=False)  # may hold secrets

    @classmethod
    def of(cls, rows: Rows, columns: Columns, batch_size: int, options: Options) -> Reading:
        return cls(rows.schema, columns, rows.where, batch_size, options)


def stream(
    pieces: list[Piece],
    reading: Reading,
    shared: SharedPackage,
    gpus: float,
    skip: Callable[[int], bool],
) -> Iterator[Done]:
    """The columns OF_ROWS of the pieces, in order. A task or actor that dies is started again.

    gpus: of each worker; 0: CPUs. skip: asked before a piece is started. Raises ClusterError if no
    node has so many GPUs, and what a worker raises.
    """
    pool = _gpu_pool(reading, shared, gpus) if gpus else _cpu_pool(reading, shared)
    waiting = deque(pieces)
    started: deque[tuple[tuple[Piece, ...], Any]] = deque()
    at_once = 1
    try:
        while waiting or started:
            while waiting and len(started) < AHEAD * pool.workers:
                some = _next(waiting, at_once, skip)
                if some:
                    groups = tuple(one for piece in some for one in piece.fragments)
                    started.append((some, pool.start(groups)))
            if not started:
                return
            done, reference = started.popleft()
            rows, seconds = result(reference)
            at_once = _pieces(seconds / len(done), len(waiting) / (2 * pool.workers))
            yield done, rows, seconds
    finally:
        # The consumer stops early, or a task has failed. Actors end at once.
        pool.close()
        cancel(reference for _, reference in started)


def _next(waiting: deque[Piece], most: int, skip: Callable[[int], bool]) -> tuple[Piece, ...]:
    """The next pieces, neighbours of each other, that need not be skipped."""
    some: list[Piece] = []
    while waiting and len(some) < most:
        if some and waiting[0].number != some[-1].number + 1:
            break
        piece = waiting.popleft()
        if skip(piece.number):
            break
        some.append(piece)
    return tuple(some)


def _pieces(piece_s: float, share: float) -> int:
    """Pieces of a task of TASK_S; fewer near the end, so that all workers end together."""
    by_time = TASK_S / max(piece_s, 1e-3)
    return max(1, int(min(by_time, share, MOST_PIECES)))


@dataclass(frozen=True)
class _Pool:
    workers: int
    start: Start
    close: Callable[[], None]


def _cpu_pool(reading: Reading, shared: SharedPackage) -> _Pool:
    how = ray.put(reading)
    task = ray.remote(num_cpus=1, max_retries=3)(_predict)

    def start(groups: tuple[Fragment, ...]) -> Any:
        return task.remote([one.for_task() for one in groups], how, shared, 1)

    return _Pool(max(1, int(ray.cluster_resources().get("CPU", 1))), start, lambda: None)


def require_gpus(gpus: float) -> None:
    """Raise ClusterError if no worker can have so many GPUs."""
    if gpus and not room_for(resources_by_node(), gpus)[0]:
        have = ray.cluster_resources().get("GPU", 0)
        raise ClusterError(
            "No node of the cluster has so many GPUs",
            got=f"predict.gpus={gpus:g}, the cluster has {have:g}",
            rule="A worker has its GPUs on one node, and a CPU there",
            fix="Set predict.gpus=0 to predict on CPUs",
        )


def _gpu_pool(reading: Reading, shared: SharedPackage, gpus: float) -> _Pool:
    """An actor for each share of a GPU; each has as many CPUs, to decode with."""
    require_gpus(gpus)
    count, cpus = room_for(resources_by_node(), gpus)
    # Two calls at a time: one decodes while the other computes.
    cls = ray.remote(num_gpus=gpus, num_cpus=cpus, max_concurrency=2, max_restarts=3)(_OnGpu)
    options = {"max_task_retries": 3}
    actors = [cls.options(**options).remote() for _ in range(count)]
    # With each call, not when it is made: an actor that died is made again without them.
    how = ray.put(reading)
    turn = [0]

    def start(groups: tuple[Fragment, ...]) -> Any:
        turn[0] += 1
        actor = actors[turn[0] % count]
        return actor.predict.remote([one.for_task() for one in groups], how, shared, cpus)

    def close() -> None:
        for actor in actors:
            ray.kill(actor)

    return _Pool(count, start, close)


class _OnGpu:
    """Holds a GPU and the model on it."""

    def predict(
        self, groups: list[Fragment], reading: Reading, shared: SharedPackage, threads: int
    ) -> tuple[pa.Table, float]:
        import torch

        # Ray gives it the GPU it asked for; a cluster may also only pretend to have one.
        if torch.cuda.is_available():
            shared.open().model.to("cuda")
        return _predict(groups, reading, shared, threads)


@without_secrets
def _predict(
    groups: list[Fragment], reading: Reading, shared: SharedPackage, threads: int
) -> tuple[pa.Table, float]:
    """The columns OF_ROWS of some row groups, and the seconds that they took."""
    package = shared.open()
    began = time.monotonic()
    wanted = list(dict.fromkeys([reading.columns.id, reading.columns.image]))
    options = reading.storage_options
    parts: list[pa.Table] = []
    for group in groups:
        rows, _ = fragment.read([group], reading.schema, wanted, reading.where, options)
        for start in range(0, len(rows), reading.batch_size):
            batch = rows.slice(start, reading.batch_size)
            parts.append(predicted(package, batch, reading.columns, threads))
    # In one piece: each chunk of each column travels by itself.
    return pa.concat_tables(parts).combine_chunks(), time.monotonic() - began
