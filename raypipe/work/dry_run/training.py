"""The plan of a training."""

from __future__ import annotations

from dataclasses import replace

import torch

from raypipe.config import replace as replaced
from raypipe.costs import estimate
from raypipe.costs.estimate import Counts, Part, Where
from raypipe.costs.rates import Rates
from raypipe.feed.dataset import Pinned
from raypipe.models.zoo import ImageModel
from raypipe.train.job import TrainJob
from raypipe.train.launch import check_workers, wants_gpu
from raypipe.train.parallel.memory import Choice, choose, device_memory, need_of
from raypipe.train.parallel.precision import compute_dtype
from raypipe.train.topology import choose as choose_workers
from raypipe.train.topology import spans_nodes
from raypipe.work.dry_run.at import At, carrier_of, data, model_facts, training_job
from raypipe.work.planned import Planned
from raypipe.work.result import Facts

LOOPS = "epochs", "trials"  # the parts that a budget ends


def train(at: At) -> Planned:
    job, counts, pinned = training_job(at.job)
    workers, why = job.train.most_workers, _topology(at, job)
    if job.train.workers == "auto":
        workers, why = choose_workers(at.gpus_by_node(), int(job.train.batch_size))
        job = replaced(job, {"train.workers": workers})
    check_workers(job.train, dict(at.resources))
    where = at.where(job)
    at.show.say("Measuring some images on this machine")
    found = at.measured(job, pinned, max(1, int(job.train.batch_size) // workers))

    # What it takes.
    carrier = carrier_of(job, pinned, at.resources)
    frozen = job.model.mode == "frozen"
    parts = [estimate.START.part("start", found.slowness)]
    if workers > 1:
        parts.append(estimate.WORKER.part("workers", found.slowness, workers))
    parts += estimate.training(counts, job.train.epochs, found, where, carrier, frozen)
    parts += afterwards(job, counts, found, where)

    # What it would do.
    choice = _memory(job, pinned, where)
    facts = data(pinned) | model_facts(job, pinned) | at.facts()
    facts["workers"] = f"{workers} ({why})"
    facts["images come from"] = "kept features" if frozen else carrier
    facts["strategy"] = choice.reason
    facts["memory of a worker"] = f"{choice.bytes_a_device / 2**20:,.0f} MB"
    facts["epochs"] = job.train.epochs
    facts |= _kept(job, pinned)
    return Planned("train", facts, tuple(within(parts, job.train.stopping.seconds)), most=True)


def afterwards(job: TrainJob, counts: Counts, found: Rates, where: Where) -> list[Part]:
    """The reference of drift checks, the test split, and the registered package."""
    # A frozen backbone has embedded the validation images before.
    images = counts.test if job.model.mode == "frozen" else counts.val + counts.test
    return [
        estimate.looking("reference and test images", images, found, where),
        estimate.PUBLISH.part("package and registry", found.slowness),
    ]


def within(parts: list[Part], seconds: float | None) -> list[Part]:
    """The parts, with epochs cut off where a budget in seconds ends them."""
    if seconds is None:
        return parts
    cut = []
    for part in parts:
        share = min(1.0, seconds / part.seconds) if part.name in LOOPS and part.seconds else 1.0
        amounts = (part.seconds * share, part.cpu_s * share, part.device_s * share)
        cut.append(Part(part.name, *amounts))
    return cut


def _memory(job: TrainJob, pinned: Pinned, where: Where) -> Choice:
    """The strategy that memory calls for, as the workers will choose it."""
    device = torch.device("cuda" if where.gpu and torch.cuda.is_available() else "cpu")
    model: torch.nn.Module = ImageModel(job.model, len(pinned.classes))
    side_px = job.model.pixels
    example = torch.empty((1, side_px, side_px, 3), dtype=torch.uint8, device="meta")
    workers = job.train.most_workers
    need = need_of(
        model,
        None if job.model.mode == "frozen" else example,
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
