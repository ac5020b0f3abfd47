"""One group of Ray Train workers: start it, relay what rank 0 reports, ask it to leave.

Messages from the workers to the driver go through one queue. It is an actor on the driver's node:

    rank 0 -- put --> queue -- get --> relay thread of the driver --> the caller's callbacks

1. Rank 0 puts `Started` once, `EpochEnded` after each epoch, and a `Position` about once a second
   if the caller wants it. Where workers fail, Ray Train puts `Lost` (lost_workers.py): if it starts
   the group again, that begins with another `Started`.
2. The queue holds `Share.ahead` messages. When it is full, rank 0 waits with its epoch, and a
   `Position` is dropped.
3. Messages are pickled bytes: to hold a class, the queue's process would have to import torch.
4. When the group has ended, the driver puts None. The relay thread then ends, and the queue is shut
   down.

The driver speaks to the workers through files, because workers may be on other nodes that share the
folder. All ranks look for these files after a step, agree (preemption.py), save that step and
return an unfinished state.
"""

from __future__ import annotations

import math
import pickle
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch

from raypipe.cluster import ray_private
from raypipe.errors import without_secrets
from raypipe.train import starting
from raypipe.train.checkpoint.saver import Saver, agreed_newest
from raypipe.train.job import TrainJob
from raypipe.train.loop import LoopState, Report
from raypipe.train.measure.meter import Position, ReportPosition
from raypipe.train.settings import TrainConfig
from raypipe.train.worker import Data, meter_of, train_stages

if TYPE_CHECKING:
    from ray.train import FailureConfig
    from ray.util.queue import Queue

# Ranks ask each other about once a second (preemption.py). Ray is asked in every fifth of these
# rounds: its answer takes a round trip of all ranks.
ASK_RAY_EVERY = 5


@dataclass(frozen=True)
class Share:
    """What one of several trainings side by side may use."""

    worker: dict[str, float]
    """Resources of each worker, as Ray names them: {"CPU": 1.0, "GPU": 1.0}."""
    ahead: int = 0
    """Epochs it may run ahead of the consumer; 0: unlimited."""
    recent: int = 0
    """Checkpoints of so many last epochs are kept."""


@dataclass(frozen=True)
class Callbacks:
    """What the driver calls with the messages of rank 0, in the thread that relays them."""

    started: Callable[[], None]
    epoch: Report
    position: ReportPosition | None = None
    """None: rank 0 sends no positions."""


@dataclass(frozen=True, repr=False)
class WorkerSetup:
    """What every worker of a group is started with.

    Ray Train's dashboard shows its train_loop_config as text. Without a `repr` that is the class
    name, and not the job with its storage options.
    """

    job: dict[str, Any]
    """The fields of TrainJob as JSON types."""
    data: Data
    checkpoints: Path
    leave: tuple[Path, ...]
    """The workers leave when one of these files appears."""
    queue: Queue
    positions: bool
    """Does rank 0 send positions?"""
    recent: int
    """See Share.recent."""


@dataclass(frozen=True)
class Started:
    """Rank 0 runs: the process group exists."""


@dataclass(frozen=True)
class Lost:
    """Workers have failed: what rank 0 said no longer holds."""


@dataclass(frozen=True)
class EpochEnded:
    metrics: dict[str, float]
    state: LoopState


def run_group(
    job: TrainJob,
    data: Data,
    checkpoints: Path,
    leave: tuple[Path, ...],
    callbacks: Callbacks,
    share: Share,
    workers: int,
) -> LoopState:
    """Start `workers` workers and wait until they end or leave; the state they ended with.

    Raises TrainingFailedError of Ray Train, StoppedBeforeStart if SIGTERM came before they ran.
    """
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from raypipe.train.lost_workers import TellLost
    from raypipe.train.one_node import NodeConfig

    cfg = job.train
    gpu = "GPU" in share.worker
    queue = _queue_beside_driver(share.ahead)
    setup = WorkerSetup(
        job=job.model_dump(mode="json"),
        data=data,
        checkpoints=checkpoints,
        leave=leave,
        queue=queue,
        positions=callbacks.position is not None,
        recent=share.recent,
    )
    trainer = TorchTrainer(
        run_worker,
        train_loop_config={"setup": setup},
        scaling_config=ScalingConfig(
            num_workers=workers, use_gpu=gpu, resources_per_worker=share.worker
        ),
        # Not rounded down: half a second would be none.
        torch_config=NodeConfig("nccl" if gpu else "gloo", timeout_s=math.ceil(cfg.waits_s)),
        run_config=RunConfig(
            # A new name each time. Under an old name Ray would resume its own record of that run,
            # or refuse to start when a kill left the record torn. We resume from our checkpoints.
            name=f"{checkpoints.parent.name}-{uuid.uuid4().hex[:8]}",
            storage_path=str(job.run.path / "ray"),
            failure_config=_restarts_by_ray(cfg),
            callbacks=[TellLost(queue, pickle.dumps(Lost()))],
        ),
    )
    started = threading.Event()
    with (
        _relayed(queue, callbacks, started, leave[0]),
        ray_private.plain_interrupts(),
        starting.watched(started, leave[0], workers, share.worker),
    ):
        return LoopState(**trainer.fit().return_value)


def _restarts_by_ray(cfg: TrainConfig) -> FailureConfig:
    """How often Ray restarts a failed group, which it does with the same number of workers.

    An elastic group may have lost a node. launch.py restarts it and counts the free places first.
    """
    from ray.train import FailureConfig

    if cfg.elastic:
        return FailureConfig(max_failures=0, controller_failure_limit=0, max_preemption_failures=0)
    return FailureConfig(max_failures=cfg.max_failures)


def _queue_beside_driver(maxsize: int) -> Queue:
    """A queue on the driver's node. On a worker's node it would die with that node."""
    from ray.util.queue import Queue
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return Queue(maxsize=maxsize, actor_options={"num_cpus": 0, "scheduling_strategy": here})


@contextmanager
def _relayed(
    queue: Queue, callbacks: Callbacks, started: threading.Event, leave: Path
) -> Iterator[None]:
    """While the block runs, a thread passes each message from the queue to its callback.

    started: set while the workers run. leave: the file that asks them to leave.
    """

    def relay() -> None:
        # No timeout: to ask twice a second took 2 % of a core from the workers.
        while (received := queue.get()) is not None:
            message = pickle.loads(received)
            if isinstance(message, Started):
                started.set()
                callbacks.started()
            elif isinstance(message, Lost):
                starting.workers_lost(started, leave)
            elif isinstance(message, EpochEnded):
                callbacks.epoch(message.metrics, message.state)
            elif callbacks.position is not None:
                callbacks.position(message)

    # A daemon: a callback that hangs must not keep the process alive.
    thread = threading.Thread(target=relay, daemon=True)
    thread.start()
    try:
        yield
    finally:
        # None ends the thread after the messages before it.
        queue.put(None)
        thread.join(timeout=10)
        queue.shutdown(force=True)


@without_secrets
def run_worker(config: dict[str, Any]) -> dict[str, Any]:
    """Ray Train runs this on each worker. Returns the loop's state.

    config: {"setup": WorkerSetup}.
    """
    import ray.train
    import ray.train.torch

    setup: WorkerSetup = config["setup"]
    device = ray.train.torch.get_device()
    if device.type == "cuda":
        # Ray shows a worker all GPUs of its node.
        torch.cuda.set_device(device)
    # Only rank 0 sends messages to the driver.
    job = TrainJob.model_validate(setup.job)
    first = ray.train.get_context().get_world_rank() == 0

    def report(metrics: dict[str, float], state: LoopState) -> None:
        if first:
            setup.queue.put(pickle.dumps(EpochEnded(metrics, state)))
        # Every rank: Ray Train waits for all of them.
        ray.train.report(metrics)

    def report_position(position: Position) -> None:
        # Nobody waits for the answer: a training step must not wait for the queue.
        setup.queue.actor.put_nowait.remote(pickle.dumps(position))

    if first:
        setup.queue.put(pickle.dumps(Started()))
    meter = meter_of(
        job, setup.checkpoints.parent, report_position if first and setup.positions else None
    )
    with Saver(setup.checkpoints, job.train, setup.recent) as saver:
        resume = partial(agreed_newest, setup.checkpoints)
        must_leave = _MustLeave(setup.leave)
        state = train_stages(job, setup.data, resume, saver, report, must_leave, meter)
        return state.to_dict()


class _MustLeave:
    """Must this worker leave? If a leave file is there, or its node is being taken away."""

    def __init__(self, leave: tuple[Path, ...]) -> None:
        self._leave = leave
        self._calls = 0
        self._node_taken = False

    def __call__(self) -> bool:
        import ray.train

        self._calls += 1
        if not self._node_taken and self._calls % ASK_RAY_EVERY == 0:
            self._node_taken = ray.train.get_preemption_info() is not None
        return self._node_taken or any(file.exists() for file in self._leave)
