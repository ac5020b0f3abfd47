"""One training on the workers of a cluster, by Ray Train: start them, tell what they report, outlive what they die of.

A worker that fails is started again by Ray up to `train.max_failures` times, and the training goes on from its newest whole
checkpoint with as many of `train.workers` as the cluster then has. A node that is taken away gives notice: the workers save
the step they are in and leave, and the training goes on elsewhere; that is no failure.
"""

from __future__ import annotations

import logging
import pickle
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch

from raypipe.errors import ClusterError, RaypipeError
from raypipe.train.job import TrainJob
from raypipe.train.loop import LoopState, Report
from raypipe.train.meter import Position, Tell
from raypipe.train.rank import Data, meter_of, train_stages
from raypipe.train.saving import Saver, agreed_newest
from raypipe.train.settings import TrainConfig

log = logging.getLogger("raypipe")
ASK_RAY_EVERY = 5  # of the ranks' own questions (train/notice.py): Ray's answer takes a round trip of all ranks


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

    Raises RaypipeError when more workers failed than `train.max_failures`.
    """
    while True:
        state = _attempt(job, data, checkpoints, leave, progress, steps, share or _whole_cluster(job, data))
        if state.finished(job.train.epochs) or leave.exists():
            return state
        log.info("A node is being taken away: going on elsewhere from epoch %d, step %d", state.epoch, state.step)


def _whole_cluster(job: TrainJob, data: Data) -> Share:
    resources = ray.cluster_resources()
    # Cached and offloaded images are decoded by tasks: they need a CPU, or workers wait for ever.
    spare = resources.get("CPU", 1) - (data.train.carrier in ("cache", "offload"))
    gpu = {"GPU": 1.0} if wants_gpu(job.train, resources) else {}
    return Share({"CPU": max(0.1, min(1.0, spare / job.train.fewest_workers))} | gpu)


def _attempt(
    job: TrainJob, data: Data, checkpoints: Path, leave: Path, progress: Report, steps: Tell | None, share: Share
) -> LoopState:
    from ray.train import FailureConfig, ScalingConfig, TrainingFailedError
    from ray.train import RunConfig as RayRunConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.util.queue import Queue

    gpu = "GPU" in share.worker
    epochs = Queue(maxsize=share.ahead, actor_options={"num_cpus": 0})
    trainer = TorchTrainer(
        rank,
        train_loop_config={
            "job": job.model_dump(mode="json", include=set(TrainJob.model_fields)),
            "epochs": epochs,
            "data": data,
            "checkpoints": str(checkpoints),
            "leave": str(leave),
            "tells": steps is not None,
            "recent": share.recent,
        },
        scaling_config=ScalingConfig(num_workers=job.train.workers, use_gpu=gpu, resources_per_worker=share.worker),
        torch_config=TorchConfig(backend="nccl" if gpu else "gloo", timeout_s=int(job.train.timeout_s)),
        run_config=RayRunConfig(
            # A name of its own each time: Ray would take up the old run of that name, or refuse to start when the kill left its
            # snapshot torn. Our checkpoints say where to go on.
            name=f"{checkpoints.parent.name}-{uuid.uuid4().hex[:8]}",
            storage_path=str(job.run.path / "ray"),
            failure_config=FailureConfig(max_failures=job.train.max_failures),
        ),
    )
    try:
        with _relayed(epochs, progress, steps or (lambda position: None)):
            result = trainer.fit()
    except TrainingFailedError as e:  # of the errors of all ranks, ours says most; a rank that only lost its peers says least
        causes = [getattr(c, "_base_exc", c) for c in getattr(e, "worker_failures", {}).values()]
        if ours := [c for c in causes if isinstance(c, RaypipeError)]:
            raise ours[0] from None
        reason = " ".join(str(causes[0] if causes else e).split())[:400]
        raise RaypipeError(f"Training failed on a worker: {reason}", fix=f"Checkpoints are kept in {checkpoints}") from e
    return LoopState(**result.return_value)


@contextmanager
def _relayed(epochs: Any, progress: Report, steps: Tell) -> Iterator[None]:
    """Tell `progress` of each epoch that rank 0 puts into the queue, and `steps` of positions, while the block runs."""

    def relay() -> None:  # waits without a timeout: asking twice a second took 2 % of a core from the workers
        while (told := epochs.get()) is not None:
            told = pickle.loads(told)
            if isinstance(told, Position):
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
            queue.put(pickle.dumps((metrics, state)))  # bytes: the queue's process would import torch to hold a class
        ray.train.report(metrics)

    def tell(position: Position) -> None:
        queue.actor.put_nowait.remote(pickle.dumps(position))  # nobody waits for the answer: a step must not

    meter = meter_of(job, checkpoints.parent, tell if first and config["tells"] else None)
    with Saver(checkpoints, job.train, config["recent"]) as saver:
        told = _Told(Path(config["leave"]))
        resume = partial(agreed_newest, checkpoints)
        return train_stages(job, config["data"], resume, saver, report, told, meter).to_dict()


class _Told:
    """Has this run been told to stop, or is a worker's node being taken away?"""

    def __init__(self, leave: Path) -> None:
        self._leave, self._asked, self._taken = leave, 0, False

    def __call__(self) -> bool:
        import ray.train

        self._asked += 1
        if self._asked % ASK_RAY_EVERY == 0:
            self._taken = self._taken or ray.train.get_preemption_info() is not None
        return self._taken or self._leave.exists()
