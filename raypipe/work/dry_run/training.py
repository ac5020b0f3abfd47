"""The plan of a training."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from raypipe.config import replace as replaced
from raypipe.costs import estimate
from raypipe.costs.estimate import Counts, Part, Where
from raypipe.costs.rates import Rates
from raypipe.feed.dataset import Pinned
from raypipe.models.zoo import ImageModel
from raypipe.train import spark_place
from raypipe.train.job import TrainJob
from raypipe.train.launch import check_workers, wants_gpu
from raypipe.train.parallel.memory import Choice, choose, device_memory, need_of
from raypipe.train.parallel.precision import compute_dtype
from raypipe.train.stopping import BudgetConfig
from raypipe.train.topology import choose as choose_workers
from raypipe.train.topology import spans_nodes
from raypipe.work.dry_run.at import (
    At,
    carrier_of,
    check_registry,
    data,
    model_facts,
    training_job,
    unfound,
)
from raypipe.work.planned import Planned
from raypipe.work.result import Facts

LOOPS = "epochs", "trials"  # the parts that a budget ends


def train(at: At) -> Planned:
    check_registry(at.job)
    parts, facts, missing = parts_of(at, at.job.training)
    return Planned("train", facts, parts, most=True, missing=", ".join(missing))


def parts_of(at: At, given: TrainJob) -> tuple[tuple[Part, ...], Facts, list[str]]:
    """The parts of a training, its facts, and what is not estimated."""
    job, counts, pinned = training_job(given)
    workers, why = job.train.most_workers, _topology(at, job)
    if job.train.workers == "auto":
        gpus = [] if job.train.gpu is False else at.gpus_by_node()
        workers, why = choose_workers(gpus, int(job.train.batch_size))
        job = replaced(job, {"train.workers": workers})
    if job.train.launcher == "ray":
        check_workers(job.train, dict(at.resources))
    else:
        spark_place.check(job)
    where = at.where(job)
    at.show.say("Measuring some images on this machine")
    found = at.measured(job, pinned, max(1, int(job.train.batch_size) // workers))

    # What it takes.
    carrier = carrier_of(job, pinned, at.resources)
    frozen = job.model.mode == "frozen"
    parts = [estimate.START.part("start", found.slowness)]
    if workers > 1 or job.train.launcher != "ray":
        parts.append(estimate.WORKER.part("workers", found.slowness, workers))
    # Other solvers have no epochs: they look once at all images.
    is_fitted = job.train.solver != "steps"
    epochs = 1 if is_fitted else job.train.epochs
    parts += estimate.training(counts, epochs, found, where, carrier, frozen)
    parts += afterwards(job, counts, found, where)

    # What it would do.
    choice = _memory(job, pinned, where)
    facts = data(pinned) | model_facts(job, pinned) | at.facts()
    facts["workers"] = f"{workers} ({why})"
    facts["launcher"] = job.train.launcher
    facts["images come from"] = "kept features" if frozen else carrier
    facts["strategy"] = choice.reason
    facts["memory of a worker"] = f"{choice.bytes_a_device / 2**20:,.0f} MB beside Python's own"
    facts["epochs"] = f"none: train.solver={job.train.solver}" if is_fitted else epochs
    facts |= _kept(job, pinned)
    auto = unfound(given, pinned)
    if "train.batch_size" in auto:
        facts["batch"] = f"{job.train.batch_size} assumed: train.batch_size=auto is not found yet"
    missing = [f"finding {name}" for name in auto]
    if is_fitted:
        missing.append("fitting the head")
    if job.train.launcher != "ray":
        missing.append("the start of Spark")
    stopping = job.train.stopping.model_copy(update={"seconds": job.train.most_s})
    return tuple(within(parts, stopping, workers)), facts, missing


def afterwards(job: TrainJob, counts: Counts, found: Rates, where: Where) -> list[Part]:
    """The reference of drift checks, the test split, and the registered package."""
    # A frozen backbone has embedded the validation images before.
    images = counts.test if job.model.mode == "frozen" else counts.val + counts.test
    return [
        estimate.looking("reference and test images", images, found, where),
        estimate.PUBLISH.part("package and registry", found.slowness),
    ]


def within(parts: list[Part], cfg: BudgetConfig, workers: float) -> list[Part]:
    """The parts, with epochs cut off where a budget ends them. workers: that train at a time."""
    limits = []
    if cfg.seconds is not None:
        limits.append(cfg.seconds)
    if cfg.gpu_hours is not None:
        limits.append(cfg.gpu_hours * 3600 / workers)
    if cfg.money is not None:
        limits.append(cfg.money / (cfg.price_per_hour or math.inf) * 3600 / workers)
    if not limits:
        return parts
    seconds = min(limits)
    cut = []
    for part in parts:
        share = min(1.0, seconds / part.seconds) if part.name in LOOPS and part.seconds else 1.0
        amounts = (part.seconds * share, part.cpu_s * share, part.device_s * share)
        cut.append(Part(part.name, *amounts))
    return cut


def _memory(job: TrainJob, pinned: Pinned, where: Where) -> Choice:
    """The strategy that memory calls for, as the workers will choose it."""
    device = torch.device("cuda" if where.gpu and torch.cuda.is_available() else "cpu")
    whole = ImageModel(job.model, len(pinned.classes))
    is_frozen = job.model.mode == "frozen"
    # A frozen backbone embeds the images once, in tasks of its own. Workers hold the head.
    model: torch.nn.Module = whole.head if is_frozen else whole
    side_px = job.model.pixels
    example = torch.empty((1, side_px, side_px, 3), dtype=torch.uint8, device="meta")
    workers = job.train.most_workers
    need = need_of(
        model,
        None if is_frozen else example,
        -(-int(job.train.batch_size) // (workers * job.train.accumulate)),
        compute_dtype(job.train.precision, device),
        ema=job.train.ema is not None,
        checkpointing=job.train.activation_checkpointing,
    )
    choice = choose(need, workers, device_memory(device, workers))
    if job.train.strategy != "auto":
        given = f"train.strategy={job.train.strategy}"
        return replace(choice, strategy=job.train.strategy, reason=given)
    return choice


def _topology(at: At, job: TrainJob) -> str:
    """Why so many workers, and whether another number would be better."""
    workers, cpus = job.train.most_workers, at.resources.get("CPU", 1)
    if job.train.launcher != "ray":
        return "barrier tasks on the executors of Spark"
    spans = spans_nodes(workers, at.gpus_by_node())
    if spans is not None:
        return spans
    if wants_gpu(job.train, dict(at.resources)):
        gpus = int(at.resources.get("GPU", 0))
        if workers < gpus:
            return f"the cluster has {gpus} GPUs: train.workers={gpus} uses them all"
        return "a GPU each"
    if workers == 1:
        return "one process uses all CPUs of its machine"
    return f"on CPUs one process is as fast: {workers} share {cpus:g} CPUs"


def _kept(job: TrainJob, pinned: Pinned) -> Facts:
    """Whether an earlier run has the result, or a part of it."""
    if "auto" in (job.train.lr, job.train.batch_size):
        return {}
    folder = job.folder(job.training_key(pinned.version))
    if (folder / "result.json").exists():
        return {"kept": f"this training is finished already, in {folder}: it takes its result"}
    if (folder / "checkpoints").exists():
        return {"kept": f"an interrupted training goes on, in {folder}"}
    return {}
