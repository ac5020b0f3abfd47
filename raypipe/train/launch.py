"""One training on the workers of a cluster, by Ray Train: start them, tell what they report, outlive what they die of.

A worker that fails is started again up to `train.max_failures` times, and the training goes on from its newest whole
checkpoint. A node that is taken away gives notice: the workers save the step they are in and leave, and the training goes on
elsewhere; that is no failure. `train.workers=[2, 8]` starts with as many as there is room for. When room for more appears, the
workers save and leave in the same way, and more of them go on (elastic.py).
"""

from __future__ import annotations

import logging
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

from raypipe.errors import ClusterError, RaypipeError
from raypipe.train import checkpoint, elastic
from raypipe.train.checkpoint.saver import Saver, agreed_newest, newest
from raypipe.train.job import TrainJob
from raypipe.train.loop import LoopState, Report
from raypipe.train.measure.meter import Position, Tell
from raypipe.train.settings import TrainConfig
from raypipe.train.worker import Data, meter_of, train_stages

if TYPE_CHECKING:
    from ray.train import TrainingFailedError

log = logging.getLogger("raypipe")
STARTED = "started"  # what rank 0 says first
ASK_RAY_EVERY = (
    5  # of the ranks' own questions (train/notice.py): Ray's answer takes a round trip of all ranks
)


def check_workers(cfg: TrainConfig, resources: dict[str, float]) -> None:
    """Raise ClusterError when the cluster could never start that many workers: waiting would be forever."""
    kind = "GPU" if wants_gpu(cfg, resources) else "CPU"
    have = int(resources.get(kind, 0))
    if cfg.fewest_workers > have:
        raise ClusterError(
            "More workers than the cluster has",
            got=f"train.workers={cfg.workers}",
            rule=f"It has {have} {kind}s",
            fix=f"Set train.workers={max(1, have)}",
        )


def wants_gpu(cfg: TrainConfig, resources: dict[str, float]) -> bool:
    return resources.get("GPU", 0) > 0 if cfg.gpu == "auto" else cfg.gpu


@dataclass(frozen=True)
class Share:
    """What one of several trainings side by side may take. A training that has the cluster to itself has none of these bounds.

    worker: the resources of each of its workers. ahead: epochs that it may run before who listens has taken the last (0: any
    number). recent: checkpoints of so many last epochs are kept.
    """

    worker: dict[str, float]
    ahead: int = 0
    recent: int = 0


def on_workers(
    job: TrainJob,
    data: Data,
    checkpoints: Path,
    leave: Path,
    progress: Report,
    steps: Tell | None = None,
    share: Share | None = None,
) -> LoopState:
    """The state the training ended with. Ends early, and unfinished, when the file `leave` appears.

    Without a `share` the training has the cluster to itself, and an elastic one may grow while it runs.

    Raises RaypipeError when more workers failed than `train.max_failures`.
    """
    from ray.train import TrainingFailedError

    cfg, failures, before, in_vain = job.train, 0, 0, 0
    more = leave.with_name(f"{leave.name}-more")
    while True:
        more.unlink(missing_ok=True)  # a driver that was killed may have left it
        workers = _workers(job, data, share)
        if cfg.elastic:
            log.info(
                "Starting %d of %d to %d workers", workers, cfg.fewest_workers, cfg.most_workers
            )
        given = share or _whole_cluster(job, data, workers)
        # The trials of one search keep the size that they started with.
        most = cfg.most_workers if share is None else workers
        in_vain += (
            0 < workers <= before
        )  # it left to grow, and somebody else took the place: look half as often
        after_s = elastic.GROW_AFTER_S * 2**in_vain
        growth = elastic.Growth(workers, most, given.worker, _decoding(data), cfg.epochs, after_s)

        def told(
            metrics: dict[str, float], state: LoopState, growth: elastic.Growth = growth
        ) -> None:
            growth.heard(state.epoch)
            progress(metrics, state)

        try:
            with growth.watched(more):
                state = _attempt(
                    job,
                    data,
                    checkpoints,
                    [leave, more],
                    growth.started,
                    told,
                    steps,
                    given,
                    workers,
                )
        except TrainingFailedError as e:
            failures += not _no_failure(e)
            # Ray itself starts a group again whose size is fixed.
            if not cfg.elastic or failures > cfg.max_failures:
                raise _cause(e, checkpoints) from e
            if leave.exists():
                return _saved(checkpoints)
            log.info("Workers were lost: going on from the newest checkpoint")
            continue
        finally:
            before = workers if more.exists() else 0
            more.unlink(missing_ok=True)
        if state.finished(cfg.epochs) or leave.exists():
            return state
        why = (
            "There is room for more workers: going on"
            if before
            else "A node is being taken away: going on elsewhere"
        )
        log.info("%s from epoch %d, step %d", why, state.epoch, state.step)


def _workers(job: TrainJob, data: Data, share: Share | None) -> int:
    """How many to start: of an elastic training as many as there is room for. It waits where the fewest do not fit."""
    cfg = job.train
    if not cfg.elastic:
        return cfg.most_workers
    worker = share.worker if share else {"CPU": 1.0} | _gpu(job, ray.cluster_resources())
    decoding = share is None and _decoding(data)
    images = [pixels for source in (data.train, data.val) for pixels, _ in source.blocks]
    if images and elastic.room(elastic.free(), worker, decoding) < cfg.most_workers:
        # Tasks that fill the cache hold CPUs which are free soon. To grow later costs as much as this wait does at most.
        ray.wait(images, num_returns=len(images), timeout=elastic.RESTART_S, fetch_local=False)
    found = elastic.settled(worker, decoding, cfg.most_workers)
    return min(cfg.most_workers, max(cfg.fewest_workers, found))


def _decoding(data: Data) -> bool:
    """Are images decoded by tasks? They need a CPU, or the workers wait for ever."""
    return data.train.carrier in ("cache", "offload")


def _gpu(job: TrainJob, resources: dict[str, float]) -> dict[str, float]:
    return {"GPU": 1.0} if wants_gpu(job.train, resources) else {}


def _whole_cluster(job: TrainJob, data: Data, workers: int) -> Share:
    resources = ray.cluster_resources()
    spare = resources.get("CPU", 1) - _decoding(data)
    return Share({"CPU": max(0.1, min(1.0, spare / workers))} | _gpu(job, resources))


def _no_failure(error: TrainingFailedError) -> bool:
    """Was the room gone before the group was there, or was a node taken away? No worker did wrong."""
    from ray.train import ControllerError, PreemptionError
    from ray.train.v2._internal.exceptions import (
        WorkerGroupStartupFailedError,
        WorkerGroupStartupTimeoutError,
    )

    late = (WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError)
    if isinstance(error, ControllerError):
        return isinstance(error.controller_failure, late)
    taken = [getattr(c, "preempted", False) for c in getattr(error, "worker_failures", {}).values()]
    return isinstance(error, PreemptionError) or any(taken)


def _saved(checkpoints: Path) -> LoopState:
    found = newest(checkpoints)
    return checkpoint.read(found, verified=True).state if found else LoopState()


def _cause(error: TrainingFailedError, checkpoints: Path) -> RaypipeError:
    """Of the errors of all ranks ours says most; a rank that only lost its peers says least."""
    causes = [getattr(c, "_base_exc", c) for c in getattr(error, "worker_failures", {}).values()]
    if ours := [c for c in causes if isinstance(c, RaypipeError)]:
        return ours[0]
    reason = " ".join(str(causes[0] if causes else error).split())[:400]
    return RaypipeError(
        f"Training failed on a worker: {reason}", fix=f"Checkpoints are kept in {checkpoints}"
    )


def _attempt(
    job: TrainJob,
    data: Data,
    checkpoints: Path,
    leave: list[Path],
    started: Callable[[], None],
    progress: Report,
    steps: Tell | None,
    share: Share,
    workers: int,
) -> LoopState:
    """One group of workers, until it ends or leaves. Raises TrainingFailedError."""
    from ray.train import FailureConfig, ScalingConfig
    from ray.train import RunConfig as RayRunConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.util.queue import Queue
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    gpu, cfg = "GPU" in share.worker, job.train
    # Ray starts a group again with as many workers as before. An elastic one may have lost a node: on_workers counts anew.
    never = FailureConfig(max_failures=0, controller_failure_limit=0, max_preemption_failures=0)
    failing = never if cfg.elastic else FailureConfig(max_failures=cfg.max_failures)
    # Beside the driver: on a worker's node it would die with that node, and the training with it.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    epochs = Queue(maxsize=share.ahead, actor_options={"num_cpus": 0, "scheduling_strategy": here})
    trainer = TorchTrainer(
        rank,
        train_loop_config={
            "job": job.model_dump(mode="json", include=set(TrainJob.model_fields)),
            "epochs": epochs,
            "data": data,
            "checkpoints": str(checkpoints),
            "leave": [str(file) for file in leave],
            "tells": steps is not None,
            "recent": share.recent,
        },
        scaling_config=ScalingConfig(
            num_workers=workers, use_gpu=gpu, resources_per_worker=share.worker
        ),
        torch_config=TorchConfig(backend="nccl" if gpu else "gloo", timeout_s=int(cfg.timeout_s)),
        run_config=RayRunConfig(
            # A name of its own each time: Ray would take up the old run of that name, or refuse to start when the kill left its
            # snapshot torn. Our checkpoints say where to go on.
            name=f"{checkpoints.parent.name}-{uuid.uuid4().hex[:8]}",
            storage_path=str(job.run.path / "ray"),
            failure_config=failing,
        ),
    )
    with _relayed(epochs, started, progress, steps or (lambda position: None)):
        return LoopState(**trainer.fit().return_value)


@contextmanager
def _relayed(
    epochs: Any, started: Callable[[], None], progress: Report, steps: Tell
) -> Iterator[None]:
    """Tell `started` when rank 0 puts STARTED into the queue, `progress` of each epoch, and `steps` of positions, while the
    block runs."""

    def relay() -> (
        None
    ):  # waits without a timeout: asking twice a second took 2 % of a core from the workers
        while (told := epochs.get()) is not None:
            told = pickle.loads(told)
            if told == STARTED:
                started()
            elif isinstance(told, Position):
                steps(told)
            else:
                progress(*told)

    thread = threading.Thread(target=relay, daemon=True)
    thread.start()
    try:
        yield
    finally:
        epochs.put(None)
        thread.join(timeout=10)
        epochs.shutdown(force=True)


def rank(config: dict[str, Any]) -> dict[str, Any]:
    """Runs on each worker, in a folder that all nodes share. Returns the loop's state."""
    import ray.train
    import ray.train.torch

    device = ray.train.torch.get_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Ray shows a worker all GPUs of its node
    job, checkpoints = TrainJob.model_validate(config["job"]), Path(config["checkpoints"])
    queue, first = config["epochs"], ray.train.get_context().get_world_rank() == 0

    def report(metrics: dict[str, float], state: LoopState) -> None:
        if first:
            queue.put(
                pickle.dumps((metrics, state))
            )  # bytes: the queue's process would import torch to hold a class
        ray.train.report(metrics)

    def tell(position: Position) -> None:
        queue.actor.put_nowait.remote(
            pickle.dumps(position)
        )  # nobody waits for the answer: a step must not

    if first:
        queue.put(pickle.dumps(STARTED))
    meter = meter_of(job, checkpoints.parent, tell if first and config["tells"] else None)
    with Saver(checkpoints, job.train, config["recent"]) as saver:
        told = _Told([Path(file) for file in config["leave"]])
        resume = partial(agreed_newest, checkpoints)
        return train_stages(job, config["data"], resume, saver, report, told, meter).to_dict()


class _Told:
    """Has this run been told to stop or to grow, or is a worker's node being taken away?"""

    def __init__(self, leave: list[Path]) -> None:
        self._leave, self._asked, self._taken = leave, 0, False

    def __call__(self) -> bool:
        import ray.train

        self._asked += 1
        if self._asked % ASK_RAY_EVERY == 0:
            self._taken = self._taken or ray.train.get_preemption_info() is not None
        return self._taken or any(file.exists() for file in self._leave)
