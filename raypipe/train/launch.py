"""One training on a cluster: start a group of workers, and another when it failed or left.

A group ends in one of four ways:

1. The training ended: its last epoch, or its stopping rule.
2. A worker failed. Up to `train.max_failures` times a new group resumes from the newest checkpoint.
3. A node is taken away and gave notice. The workers save the step they are in and leave; a new
   group resumes elsewhere. That is not a failure.
4. An elastic training (`train.workers=[2, 8]`) found room for more workers. They save and leave in
   the same way, and a larger group resumes (elastic.py).

The file `leave` asks for an early end: the workers save, leave, and no new group starts.
worker_group.py runs one group.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from raypipe.cluster import ray_private
from raypipe.cluster.connect import connect, nodes
from raypipe.cluster.folder import require_shared
from raypipe.cluster.resources import resources_by_node
from raypipe.errors import ClusterError, RaypipeError, one_line
from raypipe.feed.feed import await_decoded
from raypipe.train import checkpoint, elastic, spark_place
from raypipe.train.checkpoint.saver import newest
from raypipe.train.job import TrainJob
from raypipe.train.loop import LoopState, Report
from raypipe.train.measure.meter import ReportPosition
from raypipe.train.settings import TrainConfig
from raypipe.train.starting import StoppedBeforeStart
from raypipe.train.topology import settled
from raypipe.train.worker import Data
from raypipe.train.worker_group import Callbacks, Share, run_group

if TYPE_CHECKING:
    from ray.train import TrainingFailedError

log = logging.getLogger("raypipe")
FEWEST_CPUS = 0.1  # of a worker, where all CPUs are taken


def join(job: TrainJob) -> TrainJob:
    """Connect to what will train the job; the job with a number for `train.workers=auto`.

    Raises ClusterError when there is too little room, ConfigError for what the launcher refuses.
    """
    if job.train.launcher != "ray":
        spark_place.check(job)
        spark_place.require_room(job)
        return job
    resources = connect(job.cluster, job.needs_cluster)
    job = settled(job)
    check_workers(job.train, resources)
    return job


def nodes_of(job: TrainJob) -> int:
    """How many machines the training has."""
    return nodes() if job.train.launcher == "ray" else spark_place.nodes()


def check_workers(cfg: TrainConfig, resources: dict[str, float]) -> None:
    """Raise ClusterError when the cluster has too few CPUs or GPUs.

    The training would wait for them forever.
    """
    kind = "GPU" if wants_gpu(cfg, resources) else "CPU"
    have = int(resources.get(kind, 0))
    if cfg.fewest_workers > have:
        workers = f"Set train.workers={max(1, have)}"
        raise ClusterError(
            "More workers than the cluster has",
            got=f"train.workers={cfg.workers}",
            rule=f"It has {have} {kind}s",
            fix="Set train.gpu=auto" if kind == "GPU" and not have else workers,
        )


def wants_gpu(cfg: TrainConfig, resources: dict[str, float]) -> bool:
    """Does each worker get a GPU? `train.gpu=auto`: yes if the cluster has one."""
    return resources.get("GPU", 0) > 0 if cfg.gpu == "auto" else cfg.gpu


def on_workers(
    job: TrainJob,
    data: Data,
    checkpoints: Path,
    leave: Path,
    progress: Report,
    report_position: ReportPosition | None = None,
    share: Share | None = None,
) -> LoopState:
    """Train until the end, through failures and resizes; the state the training ended with.

    progress: called after each epoch. report_position: called with the position in the epoch, about
    once a second. share: what the training may use; None means the whole cluster, and then an
    elastic training may grow while it runs. The state is unfinished when the file `leave` appeared.

    Raises RaypipeError when more workers failed than `train.max_failures`, ConfigError if the nodes
    do not share run.dir.
    """
    from ray.train import TrainingFailedError

    cfg = job.train
    failures = 0
    left_to_grow = False
    vain_growths = 0
    size_before = 0
    # The workers also leave when this file appears. Growth makes it.
    leave_to_grow = leave.with_name(f"{leave.name}-more")
    while True:
        # A driver that was killed may have left the file.
        leave_to_grow.unlink(missing_ok=True)
        if share is None:
            # Each time: a node may have joined. A search has asked for its trials.
            require_shared_folder(job)
        workers = _workers_to_start(job, data, share)
        if cfg.elastic:
            bounds = (cfg.fewest_workers, cfg.most_workers)
            log.info("Starting %d of %d to %d workers", workers, *bounds)
        if left_to_grow and workers <= size_before:
            # Somebody else took the room that we left for: wait twice as long before the next try.
            vain_growths += 1
        given = share or _whole_cluster(job, data, workers)
        growth = elastic.Growth(
            workers,
            # Trials of one search keep the size that they started with.
            most=cfg.most_workers if share is None else workers,
            worker=given.worker,
            decoding=_decodes_in_tasks(data),
            epochs=cfg.epochs,
            after_s=elastic.GROW_AFTER_S * 2**vain_growths,
        )
        callbacks = Callbacks(growth.started, _with_growth(progress, growth), report_position)
        leave_files = (leave, leave_to_grow)
        try:
            with growth.watched(leave_to_grow):
                state = run_group(job, data, checkpoints, leave_files, callbacks, given, workers)
        except StoppedBeforeStart:
            return _newest_state(checkpoints)
        except TrainingFailedError as e:
            if not _is_lost_node(e):
                failures += 1
            # A group of fixed size was restarted by Ray itself, as often as max_failures allows.
            if not cfg.elastic or failures > cfg.max_failures:
                raise _cause(e, checkpoints) from e
            if leave.exists():
                return _newest_state(checkpoints)
            log.info("Workers were lost: going on from the newest checkpoint")
            continue
        finally:
            left_to_grow = leave_to_grow.exists()
            size_before = workers
            leave_to_grow.unlink(missing_ok=True)
        if state.finished(cfg.epochs) or leave.exists():
            return state
        if left_to_grow:
            why = "There is room for more workers: going on"
        else:
            why = "A node is being taken away: going on elsewhere"
        log.info("%s from epoch %d, step %d", why, state.epoch, state.step)


def require_shared_folder(job: TrainJob) -> None:
    """Raise ConfigError if a node that may train does not share run.dir with this one."""
    worker = {"CPU": FEWEST_CPUS} | _gpu(job, ray.cluster_resources())
    fix = "Set run.dir to a folder that all nodes share, or cluster.address=local for this one"
    require_shared(job.run.path, worker, "run.dir", fix)


def _with_growth(progress: Report, growth: elastic.Growth) -> Report:
    def report(metrics: dict[str, float], state: LoopState) -> None:
        growth.epoch_ended(state.epoch)
        progress(metrics, state)

    return report


def _workers_to_start(job: TrainJob, data: Data, share: Share | None) -> int:
    """How many workers to start.

    An elastic training starts as many as there is room for. It waits until its fewest fit.
    """
    cfg = job.train
    if not cfg.elastic:
        return cfg.most_workers
    if share is None:
        worker = {"CPU": 1.0} | _gpu(job, ray.cluster_resources())
        decoding = _decodes_in_tasks(data)
    else:
        # A training that shares the cluster keeps no CPU free for decode tasks.
        worker = share.worker
        decoding = False
    blocks = [*data.train.blocks, *data.val.blocks]
    images = [pixels for pixels, _ in blocks]
    if images and elastic.room(ray_private.free_resources(), worker, decoding) < cfg.most_workers:
        # Tasks that fill the cache hold CPUs which are free soon. To grow later would cost
        # RESTART_S, so this wait may take as long.
        ray.wait(images, num_returns=len(images), timeout=elastic.RESTART_S, fetch_local=False)
    fits = elastic.steady_room(worker, decoding, cfg.most_workers)
    return min(cfg.most_workers, max(cfg.fewest_workers, fits))


def _decodes_in_tasks(data: Data) -> bool:
    """Do Ray tasks decode the images? They need a CPU, or the workers would wait forever."""
    return data.train.carrier in ("cache", "offload")


def _gpu(job: TrainJob, resources: dict[str, float]) -> dict[str, float]:
    return {"GPU": 1.0} if wants_gpu(job.train, resources) else {}


def _whole_cluster(job: TrainJob, data: Data, workers: int) -> Share:
    """All of the cluster for these workers, less one CPU if tasks decode.

    Raises ClusterError where no CPU is left for tasks that decode all the time.
    """
    nodes = resources_by_node()
    gpu = _gpu(job, ray.cluster_resources())
    cpus = elastic.cpus_of_each(nodes, workers, gpu, _decodes_in_tasks(data))
    if not cpus and data.train.carrier == "offload":
        raise ClusterError(
            "No CPU is left for the tasks that decode",
            got=f"feed.carrier=offload with {workers} workers",
            rule="A task takes a whole CPU of one node, beside those of the workers",
            fix="Set feed.carrier=threads, or fewer train.workers",
        )
    if not cpus:
        # The workers would take the last CPU from what still decodes.
        await_decoded([data.train, data.val])
    return Share({"CPU": cpus or FEWEST_CPUS} | gpu)


def _is_lost_node(error: TrainingFailedError) -> bool:
    """Did the group lose its place, rather than fail? Then no worker did wrong.

    Either the room was gone before the group had started, or a node was taken away.
    """
    from ray.train import ControllerError, PreemptionError

    if isinstance(error, ControllerError):
        return isinstance(error.controller_failure, ray_private.late_starts())
    if isinstance(error, PreemptionError):
        return True
    failures = getattr(error, "worker_failures", {}).values()
    return any(getattr(failure, "preempted", False) for failure in failures)


def _newest_state(checkpoints: Path) -> LoopState:
    folder = newest(checkpoints)
    return checkpoint.read(folder, verified=True).state if folder else LoopState()


def _cause(error: TrainingFailedError, checkpoints: Path) -> RaypipeError:
    """The error to show of those of all ranks.

    A RaypipeError is preferred: "connection lost" on other ranks is only its consequence.
    """
    failures = getattr(error, "worker_failures", {}).values()
    causes = [getattr(failure, "_base_exc", failure) for failure in failures]
    for cause in causes:
        if isinstance(cause, RaypipeError):
            return cause
    first = causes[0] if causes else error
    reason = one_line(first, 400)
    return RaypipeError(
        f"Training failed on a worker: {reason}", fix=f"Checkpoints are kept in {checkpoints}"
    )
