"""The default search space, for a search without `search.space`.

It depends on the task, the table's size and whether there is a GPU. It has backbone, transfer mode,
resolution, batch size, learning rate, weight decay, schedule, augmentation and the number of frozen
blocks. A field that depends on another one is drawn only with it.

- A field that the job sets is not searched.
- Only backbones that are installed with their weights, or need none, take part: no hub is asked.
- A backbone from scratch seldom wins against ImageNet weights: one trial in seven draws it.
- The first trials are not drawn. They are the starts of portfolio.py, as far as the space has their
  fields.
- With search.first_answer all trials fine-tune, if they may: its heads on frozen features are
  fitted at once, and better than those that trials would train step by step. Unless search.start or
  search.starts has a trial on frozen features.
- A population (search.scheduler=pbt or pb2) changes values while its trials train. It draws what
  can change then, under the job's own backbone, mode and resolution; pb2 draws ranges alone.
- Without a GPU, fine-tuning is light: 96 or 128 px, the lower blocks frozen. It is left out if a
  trial's epochs would see more than MOST_PASSES images, which takes about ten minutes at the 50 to
  100 images/s of two cores. With search.budget_s it is left out if a trial's first rung would take
  more than RUNG of it, and epochs that nobody has set are as many as let TRAININGS trials end.
- Where a rung would take too long and a first answer has heads, trials may train by the clock: as
  many as run side by side, each until the search's time is over (trains_by_clock). Heads and a few
  fine-tuned networks make a better ensemble than heads and hundreds of other heads
  (benchmarks/results/2026-11-26-fast.md).
- All arrays are made before the first trial. With search.budget_s there are only as many as two
  cores make in a part of it (READING): features of a lower resolution, fewer resolutions to
  fine-tune at, nothing from scratch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raypipe.search.presets import MANY
from raypipe.search.settings import SearchConfig
from raypipe.search.space import portfolio
from raypipe.search.space.samplers import read
from raypipe.search.space.space import Field, Space
from raypipe.train.job import MUTABLE, TrainJob

MOST_PASSES = 50_000  # images in a trial's epochs, on CPUs
READING = 0.2  # of a budget, for features, and as much for decoded images
EMBEDDED_PER_S = 80.0  # images, at 224 px by EfficientNet-Lite0 on two cores
FINETUNED_PER_S = 80.0  # images, at 96 to 128 px with frozen lower blocks, on two cores
RUNG = 1 / 6  # of a budget
TRAININGS = 6  # whole ones, in what a budget leaves for trials
TRIALS = 0.8  # of a budget without a refit: what start and end leave
FEWEST_EPOCHS = 4
CLOCKED = 0.6  # of a budget: what the start, a first answer and the end leave for one training
CLOCKED_EPOCHS = 5  # of all images; without those for testing there is time for more
# Images/s of one CPU beside others, by side: EfficientNet-Lite0 with three frozen blocks.
CLOCKED_PER_S = {128: 75.0, 96: 130.0}
DECODED_PER_S = 400.0  # images of 300 px, to one resolution, on two cores
FROZEN_SIDES = (160, 128, 96)  # of features, where the backbone's own takes too long
SCRATCH = "small_cnn"  # the backbone that is trained from scratch
RATE = {"train.lr": "loguniform(1e-4, 3e-2)"}
_FINETUNE = "model.mode == 'finetune'"


def with_default_space(
    job: TrainJob, cfg: SearchConfig, counts: Mapping[str, int], gpu: bool
) -> SearchConfig:
    """The search with a default space and first trials; one that has a space stays as it is.

    counts: labelled images of each split.
    """
    if cfg.space is not None:
        return cfg
    drawn = space(job, sum(counts.values()), gpu, cfg)
    learned = portfolio.allowed(job, drawn, gpu)
    # What the user sets wins in the first trial. The rest of it is a start of the same mode, if
    # possible one beside which all of it is drawn.
    own = cfg.start or {}
    mode = own.get("model.mode")
    bases = [one for one in learned if mode in (None, one.get("model.mode"))]
    fitting = (one for one in bases if _all_drawn(own, one | own, drawn, job))
    base = next(fitting, bases[0] if bases else {})
    first = base | own
    starts = cfg.starts
    if starts is None:
        starts = tuple(one for one in learned if one is not base)
    filled: dict[str, Any] = {"space": drawn, "start": first, "starts": starts}
    if trains_by_clock(job, cfg, counts, gpu):
        # They all have the same time, so nobody is compared before it is over.
        filled["scheduler"] = "none"
    if job.train.solver != "steps" and not cfg.populated:
        # Nearly all that is drawn are settings of steps, and a solver takes none.
        filled["samples"] = 1
    return cfg.model_copy(update=filled)


def _all_drawn(
    own: Mapping[str, Any], values: Mapping[str, Any], drawn: Mapping[str, str], job: TrainJob
) -> bool:
    """Does a trial with these values draw all of `own` that some trial may draw?"""
    value_of = Space((), job).known(values)
    for name in own.keys() & drawn.keys():
        field = Field(name, read(name, drawn[name]))
        able = [one for one in field.branches if one.sampler.code(own[name]) is not None]
        if able and field.branch(value_of) not in able:
            return False
    return True


def within_budget(
    job: TrainJob, cfg: SearchConfig, counts: Mapping[str, int], gpu: bool
) -> TrainJob:
    """The job with fewer epochs, where trials of all of them would not end within the budget.

    A trial whose rate has not fallen is worth little, however soon it was ahead. Only on CPUs,
    whose rate is known well enough, and only of epochs that nobody has set. SCRATCH is many times
    as fast. counts: as above.
    """
    if cfg.budget_s is None or gpu or not _finetunes(job, cfg, counts):
        return job
    is_set = "epochs" in job.train.model_fields_set or "train.epochs" in (cfg.space or {})
    images = sum(counts.get(split, 0) for split in (job.feed.train, job.feed.val))
    if is_set or not images:
        return job
    trials_s = TRIALS * cfg.budget_s
    if cfg.trains_again:
        trials_s *= 1 - cfg.refit_share
    fitting = int(trials_s * FINETUNED_PER_S / (TRAININGS * images))
    epochs = min(job.train.epochs, max(FEWEST_EPOCHS, fitting))
    # Not config.replace: it would mark every field as set.
    return job.model_copy(update={"train": job.train.model_copy(update={"epochs": epochs})})


def trains_by_clock(job: TrainJob, cfg: SearchConfig, counts: Mapping[str, int], gpu: bool) -> bool:
    """Does each trial train until the search's time is over? Then no other one follows it.

    cfg: without its default space. counts: as above.
    """
    return _clocked_side(job, cfg, sum(counts.values()), gpu) is not None


# What says how trials are to train: where a user has said it, they do not train by the clock.
_OWN = {
    "model": {"name", "mode", "frozen_blocks"},
    "train": {"epochs", "solver", "anneal_s"},
    "search": {"scheduler", "searcher", "space"},
}


def _clocked_side(job: TrainJob, cfg: SearchConfig, images: int, gpu: bool) -> int | None:
    """The side in px at which trials train by the clock; None: they do not.

    images: of all splits.
    """
    if gpu or not cfg.first_answer or cfg.budget_s is None or cfg.trains_again:
        return None
    if _may_finetune(job, images, gpu, cfg) or _is_own(job, cfg):
        return None
    sides = CLOCKED_PER_S
    if "side_px" in job.model.model_fields_set:
        sides = {job.model.pixels: CLOCKED_PER_S[128] * (128 / job.model.pixels) ** 2}
    for side_px, images_per_s in sides.items():
        epochs = CLOCKED * cfg.budget_s * images_per_s / max(1, images)
        fits = _megabytes(images, {"": (side_px,)}) <= job.feed.cache_mb
        # Trials that have trained all of their epochs would leave the rest of the time unused.
        if fits and CLOCKED_EPOCHS <= epochs < job.train.epochs:
            return side_px
    return None


def _is_own(job: TrainJob, cfg: SearchConfig) -> bool:
    """Has somebody said how trials are to train, or what else ends them?"""
    sections = {"model": job.model, "train": job.train, "search": cfg}
    if any(section.model_fields_set & _OWN[name] for name, section in sections.items()):
        return True
    limits = cfg.stopping.model_fields_set - {"price_per_hour"}
    if limits or cfg.limits.money is not None or job.train.workers not in (1, "auto"):
        return True
    has_starts = bool(cfg.starts) or cfg.warm_start or _starts_frozen(cfg)
    return has_starts or cfg.samples < MANY or not job.model.pretrained


def _finetunes(job: TrainJob, cfg: SearchConfig, counts: Mapping[str, int]) -> bool:
    """May trials on CPUs fine-tune a pretrained backbone?"""
    if job.model.name == SCRATCH and "model.name" not in (cfg.space or {}):
        return False
    if cfg.space is None:
        return _may_finetune(job, sum(counts.values()), False, cfg) and (
            "mode" not in job.model.model_fields_set or job.model.mode == "finetune"
        )
    return "finetune" in cfg.space.get("model.mode", job.model.mode)


def _may_finetune(job: TrainJob, images: int, gpu: bool, cfg: SearchConfig) -> bool:
    """Do trials of a default space have the time to fine-tune?"""
    if job.train.solver != "steps":
        return False  # it fits heads on features that stay as they are
    if gpu or "mode" in job.model.model_fields_set:
        return True
    if cfg.budget_s is None:
        return images * job.train.epochs <= MOST_PASSES
    return images * cfg.grace / FINETUNED_PER_S <= RUNG * cfg.budget_s


def space(job: TrainJob, images: int, gpu: bool, cfg: SearchConfig | None = None) -> dict[str, str]:
    """The default space for a table of `images` labelled images.

    If the job sets every field of it, only the learning rate is searched.
    """
    cfg = cfg or SearchConfig()
    given = _given(job)
    # Fine-tuning on CPUs takes too long for large tables, unless the user asks for it.
    clocked = _clocked_side(job, cfg, images, gpu)
    may_finetune = clocked is not None or _may_finetune(job, images, gpu, cfg)
    backbone = _backbone(job, images, gpu, given, may_finetune, cfg.budget_s, clocked)
    drawn = backbone | _training(job, images)
    if may_finetune and cfg.first_answer and not _starts_frozen(cfg):
        drawn["model.mode"] = "choice(finetune)"
    if may_finetune:
        drawn |= _pixels(gpu)
    searched = {name: text for name, text in drawn.items() if name not in given}
    if cfg.populated:
        searched = _of_population(searched, job, cfg.scheduler)
    return searched or RATE


def _of_population(drawn: Mapping[str, str], job: TrainJob, scheduler: str) -> dict[str, str]:
    """What can change while a trial trains, drawn as the job's other settings have it."""
    value_of = Space((), job).known({})
    found = {}
    for name, text in drawn.items():
        field = Field(name, read(name, text))
        if name not in MUTABLE or any(other in MUTABLE for other in field.needs):
            continue
        branch = field.branch(value_of)
        if branch is not None and (scheduler == "pbt" or branch.sampler.finite is None):
            found[name] = branch.text
    return found


def _starts_frozen(cfg: SearchConfig) -> bool:
    """Has somebody given a first trial on frozen features?"""
    starts = (cfg.start or {}, *(cfg.starts or ()))
    return any(start.get("model.mode") == "frozen" for start in starts)


def _given(job: TrainJob) -> set[str]:
    """The dotted fields that the user set in the sections that are searched."""
    given = set()
    for section in ("model", "augment", "train"):
        for name in getattr(job, section).model_fields_set:
            given.add(f"{section}.{name}")
    return given


def _backbone(
    job: TrainJob,
    images: int,
    gpu: bool,
    given: set[str],
    may_finetune: bool,
    budget_s: float | None = None,
    clocked: int | None = None,
) -> dict[str, str]:
    """Which backbone, how it is transferred, and at which resolution.

    Fields in `given` are removed by the caller. clocked: the side of trials that train by the
    clock.
    """
    drawn = {}
    read_s = None if budget_s is None or gpu else READING * budget_s
    # So many resolutions can be decoded in time.
    fitting = 4 if read_s is None else int(read_s * DECODED_PER_S / max(1, images))
    scratch = may_finetune and fitting >= 4 and _from_scratch_too(job, given)
    scratch = scratch and clocked is None
    if may_finetune:
        drawn["model.mode"] = "choice(frozen, finetune)"
    if scratch:
        name = job.model.name
        # Three to one. Half of the draws are frozen, which SCRATCH refuses: so one accepted trial
        # in seven has it.
        drawn["model.name"] = f"choice({name}, {name}, {name}, {SCRATCH})"
        drawn["model.pretrained"] = f"choice(False) if model.name == '{SCRATCH}'"

    # Condition -> sides in px.
    pretrained = f"model.name != '{SCRATCH}'"
    frozen = _frozen_side(job, images, read_s)
    if gpu:
        sides: dict[str, tuple[int, ...]] = {pretrained: (160, 224)}
    else:
        finetuned = (96, 128) if fitting >= 2 else (96,)
        finetuned = (clocked,) if clocked is not None else finetuned
        sides = {_all_of(_FINETUNE, pretrained): finetuned}
    if scratch or read_s is None:
        sides[f"model.name == '{SCRATCH}'"] = (32, 64)
    # A search keeps the pixels of every side in the cache: if they do not fit, the side is not
    # searched.
    fits = may_finetune and _megabytes(images, sides) <= job.feed.cache_mb
    sides = sides if fits else {}
    if frozen is not None:
        sides["model.mode == 'frozen'"] = (frozen,)
    if sides:
        branches = [f"choice({_listed(some)}) if {if_}" for if_, some in sides.items()]
        drawn["model.side_px"] = " else ".join(branches)
    return drawn


def _frozen_side(job: TrainJob, images: int, read_s: float | None) -> int | None:
    """The resolution of features that are made in so many seconds; None: the backbone's own."""
    if read_s is None:
        return None
    most = read_s * EMBEDDED_PER_S / max(1, images)  # of the pixels of 224 px
    if job.model.pixels**2 <= most * 224**2:
        return None
    for side_px in FROZEN_SIDES:
        if side_px**2 <= most * 224**2:
            return min(side_px, job.model.pixels)
    return min(FROZEN_SIDES[-1], job.model.pixels)


def _listed(sides: tuple[int, ...]) -> str:
    return ", ".join(map(str, sides))


def _from_scratch_too(job: TrainJob, given: set[str]) -> bool:
    """May a trial train SCRATCH instead of the job's backbone?"""
    if given & {"model.name", "model.pretrained"} or not job.model.pretrained:
        return False
    # A backbone from scratch must be trained, from its first block.
    frozen = "model.mode" in given and job.model.mode == "frozen"
    return not frozen and not job.model.frozen_blocks


def _training(job: TrainJob, images: int) -> dict[str, str]:
    """Fields that every training has. Batch sizes leave about ten steps in an epoch."""
    # About ten steps: an epoch has fewer images than the table.
    largest = max(16, images // 15)
    sizes = [size for size in (16, 32, 64, 128) if size <= largest]
    drawn = {
        "train.lr": "loguniform(3e-4, 3e-2) if model.mode == 'frozen' else loguniform(1e-4, 5e-3)",
        "train.weight_decay": "loguniform(1e-4, 0.3)",
        "train.batch_size": f"choice({', '.join(map(str, sizes[-3:]))})",
        "train.schedule": "choice(cosine, one_cycle)",
        "model.dropout": "choice(0.0, 0.2, 0.5)",
    }
    if job.model.task == "single_label":
        drawn["train.label_smoothing"] = "choice(0.0, 0.1)"
    return drawn


def _pixels(gpu: bool) -> dict[str, str]:
    """Fields of a training on pixels; one on frozen features does not have them."""
    pretrained = _all_of(_FINETUNE, "model.pretrained")
    frozen_blocks = "randint(0, 8)" if gpu else "randint(3, 12)"
    return {
        "model.frozen_blocks": f"{frozen_blocks} if {pretrained}",
        # A search's trainings are short, and a backbone's own momentum may be too slow for them.
        "model.norm_momentum": f"choice(0.1) if {pretrained}",
        "train.layer_decay": f"choice(1.0, 0.9, 0.8) if {pretrained}",
        "augment.flip_horizontal": f"choice(True, False) if {_FINETUNE}",
        "augment.flip_vertical": f"choice(True, False) if {_FINETUNE}",
        "augment.crop_area": f"uniform(0.4, 1.0) if {_FINETUNE}",
        "augment.policy": f"choice(none, randaugment, trivial) if {_FINETUNE}",
        "augment.policy_magnitude": "uniform(0.1, 0.6) if augment.policy == 'randaugment'",
    }


def _all_of(*conditions: str) -> str:
    return " and ".join(conditions)


def _megabytes(images: int, sides: Mapping[str, tuple[int, ...]]) -> float:
    """MiB of all images, decoded at each of these sides: a search keeps all of them."""
    bytes_per_image = 0
    for some in sides.values():
        bytes_per_image += sum(3 * side_px**2 for side_px in some)
    return images * bytes_per_image / 2**20
