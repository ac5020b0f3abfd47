"""The space that is searched when `search.space` says none: what matters by experience, for this task, table and machine.

Backbone, transfer mode, resolution, batch size, rate, weight decay, schedule, augmentation and how much of the backbone stays
frozen; what depends on another field is drawn only with it. Fields that the job sets are left as they are set. Only backbones
that are installed with their weights or need none take part: no hub is asked. A backbone from scratch seldom wins against
ImageNet weights, so it is drawn in one trial of seven. The first trial is no draw but START, as far as the space has its
fields: what was set by hand for fine-tuning on the solar cells (jobs/configs/solar_finetune.yaml), with light crops and
smoothing where that had none.

Without a GPU, fine-tuning is light (96 or 128 px, the lower blocks frozen), and left out where a trial's epochs would see more
than MOST_PASSES images: at the 50 to 100 images/s of two cores that takes some ten minutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raypipe.config import replace
from raypipe.search.settings import SearchJob
from raypipe.train.job import TrainJob

MOST_PASSES = 50_000
SCRATCH = "small_cnn"
START: dict[str, Any] = {
    "model.mode": "finetune",
    "train.weight_decay": 0.02,
    "train.batch_size": 32,
    "train.schedule": "one_cycle",
    "train.label_smoothing": 0.1,
    "model.dropout": 0.2,
    "model.frozen_blocks": 3,
    "model.norm_momentum": 0.1,
    "train.layer_decay": 0.9,
    "augment.flip_horizontal": True,
    "augment.flip_vertical": False,
    "augment.crop_area": 0.9,
    "augment.policy": "none",
}
RATE = {"train.lr": "loguniform(1e-4, 3e-2)"}


def with_default_space(job: SearchJob, counts: Mapping[str, int], gpu: bool) -> SearchJob:
    """The job with a space and a start. `counts`: labelled images of each split."""
    if job.search.space is not None:
        return job
    drawn = space(job, sum(counts.values()), gpu)
    return replace(
        job,
        {"search.space": drawn, "search.start": start(job, drawn, gpu) | (job.search.start or {})},
    )


def start(job: TrainJob, drawn: Mapping[str, str], gpu: bool) -> dict[str, Any]:
    """The first trial's values, of the fields that are drawn."""
    mode = START["model.mode"] if "model.mode" in drawn else job.model.mode
    rate, side_px = 1e-3 if mode == "finetune" else 3e-3, 224 if gpu else 128
    values = START | {"model.name": job.model.name, "train.lr": rate, "model.side_px": side_px}
    return {name: value for name, value in values.items() if name in drawn}


def space(job: TrainJob, images: int, gpu: bool) -> dict[str, str]:
    """What is searched for a table of so many labelled images; the rate alone where the job sets everything else."""
    given = {
        f"{s}.{name}"
        for s in ("model", "augment", "train")
        for name in getattr(job, s).model_fields_set
    }
    tuned = "model.mode" in given or gpu or images * job.train.epochs <= MOST_PASSES
    drawn = (
        _backbone(job, images, gpu, given, tuned)
        | _head(job, images)
        | (_image(gpu) if tuned else {})
    )
    return {name: text for name, text in drawn.items() if name not in given} or RATE


def _backbone(
    job: TrainJob, images: int, gpu: bool, given: set[str], tuned: bool
) -> dict[str, str]:
    """Which one, how it is transferred, at which resolution."""
    scratch = tuned and job.model.pretrained and not given & {"model.name", "model.pretrained"}
    scratch = (
        scratch
        and not ("model.mode" in given and job.model.mode == "frozen")
        and not job.model.frozen_blocks
    )
    drawn = {"model.mode": "choice(frozen, finetune)"} if tuned else {}
    if scratch:
        drawn["model.name"] = (
            f"choice({job.model.name}, {job.model.name}, {job.model.name}, {SCRATCH})"
        )
        drawn["model.pretrained"] = f"choice(False) if model.name == '{SCRATCH}'"
    sides = (
        {"model.name != 'small_cnn'": (160, 224)}
        if gpu
        else {_and_tuned("model.name != 'small_cnn'"): (96, 128)}
    )
    sides |= {f"model.name == '{SCRATCH}'": (32, 64)}
    if tuned and _megabytes(images, sides) <= job.feed.cache_mb:
        drawn["model.side_px"] = " else ".join(
            f"choice{some} if {condition}" for condition, some in sides.items()
        )
    return drawn


def _head(job: TrainJob, images: int) -> dict[str, str]:
    """What training has to be told whatever is trained; an epoch keeps some ten steps."""
    sizes = [size for size in (16, 32, 64, 128) if size <= max(16, images // 15)][-3:]
    drawn = {
        "train.lr": "loguniform(3e-4, 3e-2) if model.mode == 'frozen' else loguniform(1e-4, 5e-3)",
        "train.weight_decay": "loguniform(1e-4, 0.3)",
        "train.batch_size": f"choice({', '.join(map(str, sizes))})",
        "train.schedule": "choice(cosine, one_cycle)",
        "model.dropout": "choice(0.0, 0.2, 0.5)",
    }
    return drawn | (
        {"train.label_smoothing": "choice(0.0, 0.1)"} if job.model.task == "single_label" else {}
    )


def _image(gpu: bool) -> dict[str, str]:
    """What there is to say when pixels are trained on."""
    return {
        "model.frozen_blocks": _if_tuned(
            "randint(0, 8)" if gpu else "randint(3, 12)", "model.pretrained"
        ),
        "model.norm_momentum": _if_tuned(
            "choice(0.1)", "model.pretrained"
        ),  # a search's trainings are short
        "train.layer_decay": _if_tuned("choice(1.0, 0.9, 0.8)", "model.pretrained"),
        "augment.flip_horizontal": _if_tuned("choice(True, False)"),
        "augment.flip_vertical": _if_tuned("choice(True, False)"),
        "augment.crop_area": _if_tuned("uniform(0.4, 1.0)"),
        "augment.policy": _if_tuned("choice(none, randaugment, trivial)"),
        "augment.policy_magnitude": "uniform(0.1, 0.6) if augment.policy == 'randaugment'",
    }


def _if_tuned(text: str, *also: str) -> str:
    return f"{text} if {_and_tuned(*also)}"


def _and_tuned(*also: str) -> str:
    return " and ".join(("model.mode == 'finetune'", *also))


def _megabytes(images: int, sides: Mapping[str, tuple[int, ...]]) -> float:
    """Of every image decoded at each of these sides, as a search keeps them."""
    return images * sum(3 * side**2 for some in sides.values() for side in some) / 2**20
