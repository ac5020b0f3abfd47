"""Measures the variants of a search: how long models of each shape take, and how large they are.

All variants are timed in turns on the same images (serve/latency.py), so that a busy machine slows
all of them. The figures are kept in the search's folder: a restored search draws the same trials.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save

from raypipe.config import replace as changed
from raypipe.config import to_json
from raypipe.errors import ConfigError
from raypipe.feed.dataset import Pinned
from raypipe.files import write_atomic
from raypipe.images.decode import decode_batch, encode_png
from raypipe.models.ensemble import EnsembleModel, Member, bodies_of
from raypipe.models.predictor import Predictor, stored_weights
from raypipe.models.spread import Spread
from raypipe.models.zoo import NOT_SHAPE, ImageModel, ModelConfig
from raypipe.search import limits, refit
from raypipe.search.limits import Variant
from raypipe.search.result import SearchResult
from raypipe.search.settings import SearchConfig
from raypipe.search.space.space import Space
from raypipe.serve import latency
from raypipe.train import trainer
from raypipe.train.job import TrainJob

FILE = "variants.json"
MOST_S = 4.0
"""Seconds that timing may take beyond its fewest rounds."""

BATCH = 32
"""Images that a network predicts at once where its rate is timed."""

SLOW_S = 1.0
"""A batch that takes longer says enough: no other one is timed."""

TOO_SLOW_S = 4.0
"""Nor is one timed that would take longer: of a large transformer, an image may take a second."""

FOR_A_PAGE = 5
"""Rounds that are enough where nothing is decided by them: on a machine with four times as much to
do as it has cores, a round of three sizes of efficientnet_lite0 takes a second."""


@dataclass(frozen=True)
class _Timed:
    """A model that is timed as a package is: from encoded images to scores."""

    model: Predictor

    def predict(self, images: Sequence[bytes], threads: int) -> object:
        return self.model.predict(decode_batch(images, self.model.side_px, threads))


def shaping(space: Space) -> list[str]:
    """The fields of a space on which a model's time and size depend.

    Raises ConfigError for one that takes no finite number of values.
    """
    names = []
    for field in space.fields:
        section, _, name = field.name.partition(".")
        if section != "model" or name in NOT_SHAPE:
            continue
        if any(branch.sampler.finite is None for branch in field.branches):
            raise ConfigError(
                f"search.limits measures every model of a search, and {field.name} is continuous",
                fix=f"Give search.space.{field.name} as choice(…) or grid(…)",
            )
        names.append(field.name)
    return names


def limited(
    space: Space,
    cfg: SearchConfig,
    pinned: Pinned,
    folder: Path,
    heads: Sequence[ModelConfig] = (),
) -> Space:
    """The space without the models that break search.limits; without any, if only heads keep them.

    folder: of the search, which keeps what was measured. heads: what a first answer may fit. Raises
    ConfigError if nothing is left, and for a refit whose model would break a limit.
    """
    if not cfg.limits.of_models:
        return space
    # A space without such fields has the job's model alone.
    trials = space.variants(shaping(space)) or [{}]
    jobs = [changed(space.job, trial) for trial in trials]

    def measure(models: Sequence[ModelConfig]) -> dict[str, Variant]:
        return measured(models, len(pinned.classes), pinned, space.job, folder)

    models = [job.model for job in jobs]
    found = measure([*models, *heads])  # all of them in turns
    of_trials = {model.shape: found[model.shape] for model in models}
    barred = limits.barred(of_trials, cfg.limits, [found[head.shape] for head in heads])
    if cfg.trains_again:
        wanted = cfg.refit_changes or {}
        again = [refit.replaced(j, wanted) for j in jobs if not barred[j.model.shape]]
        for one in measure([job.model for job in again]).values():
            fix = "Set a smaller search.refit.model.side_px, or search.refit={}, or raise the limit"
            limits.require(one, cfg.limits, "The model of search.refit", fix)
    return replace(space, barred=barred)


def measured(
    models: Sequence[ModelConfig],
    classes: int,
    pinned: Pinned,
    job: TrainJob,
    folder: Path,
    rounds: int = latency.FEWEST,
) -> dict[str, Variant]:
    """What models of these shapes take, by shape; those that the folder knows are not timed again.

    job: the search's, of whose training images some are taken. rounds: of timing, at least.
    """
    known = read(folder)
    missing = {model.shape: model for model in models if model.shape not in known}
    if missing:
        built = [_built(_fitting(one, pinned, job), classes) for one in missing.values()]
        sizes = [size_mb(model) for model in built]
        images = latency.images(pinned, job.feed.train, job.model.pixels, job.feed.cpu_threads)
        times = timed([model.for_inference() for model in built], images, rounds)
        for shape, one, size in zip(missing, times, sizes, strict=True):
            known[shape] = replace(one, text=words(missing[shape]), size_mb=size)
        write_atomic(folder / FILE, to_json({shape: asdict(one) for shape, one in known.items()}))
    return {model.shape: known[model.shape] for model in models}


def of_members(members: Sequence[Member], pinned: Pinned, job: TrainJob, folder: Path) -> Variant:
    """What an ensemble of these takes as a whole; one that the folder knows is not timed again.

    Its weights are random: they take as long as any others.
    """
    # Of equal shapes, heads share a backbone, and fine-tuned members do not.
    shapes = zip(members, bodies_of(members), strict=True)
    key = " + ".join(f"{member.model.shape} of {body}" for member, body in shapes)
    known = read(folder)
    if key not in known:
        fitting = [replace(one, model=_fitting(one.model, pinned, job)) for one in members]
        model = EnsembleModel(fitting, len(pinned.classes)).eval()
        images = latency.images(pinned, job.feed.train, model.side_px, job.feed.cpu_threads)
        time = timed([model.for_inference()], images)[0]
        text = f"An ensemble of {len(members)} at {model.side_px} px"
        known[key] = replace(time, text=text, size_mb=size_mb(model))
        write_atomic(folder / FILE, to_json({shape: asdict(one) for shape, one in known.items()}))
    return known[key]


def of_result(result: SearchResult) -> tuple[dict[str, Variant], Variant | None]:
    """What the trials' models take, by shape; and the registered ensemble, if it is one.

    For the page, so it may be rough: half a second of CPU, unless it was measured for limits.
    """
    pinned = result.pinned
    if pinned is None:
        return {}, None
    with_model = [trial.name for trial in result.trials if trial.checkpoint is not None]
    models = [result.models[name] for name in with_model if name in result.models]
    classes = len(pinned.classes)
    found = measured(models, classes, pinned, result.job, result.folder, FOR_A_PAGE)
    # A refit has no validation metric to be shown beside its time.
    if not result.shares or result.refitted:
        return found, None
    ensemble = trainer.assemble(result.job, result.best)
    images = latency.images(pinned, result.job.feed.train, ensemble.side_px, 1)
    time = timed([ensemble.for_inference()], images, FOR_A_PAGE)[0]
    text = f"{len(result.members)} trials together"
    return found, replace(time, text=text, size_mb=size_mb(ensemble))


def timed(
    models: Sequence[Predictor], images: Sequence[bytes], rounds: int = latency.FEWEST
) -> list[Variant]:
    """The time of each model, ready for inference; of no name and no size.

    images: encoded; a drawn one where there is none. rounds: at least so many.
    """
    some = images or [encode_png(np.full((256, 256, 3), 128, np.uint8))]
    most_s = MOST_S if rounds >= latency.FEWEST else 0.0
    packages = [_Timed(model) for model in models]
    times = latency.measure(packages, some, 1, most_s=most_s, fewest=rounds)
    found = []
    for number in range(len(models)):
        spread = Spread.of([took[number] for took in times.times_RM])
        found.append(Variant("", spread.median, spread.low, spread.high, 0.0))
    return found


def predictions_per_s(model: ModelConfig, classes: int) -> float:
    """Predictions a second by a network of this shape: in batches, with this process's threads.

    Its weights are random: they take as long as any others. Two views are two predictions. Its head
    is a linear one, since a kernel head without landmarks says nothing finite.
    """
    alone = model.model_copy(update={"views": 1, "head": "linear"})
    network = _built(alone, classes).for_inference()
    pixels_NHWC = np.random.default_rng(0).integers(
        0, 256, (BATCH, model.pixels, model.pixels, 3), np.uint8
    )
    rates: list[float] = []
    # Much is made at a first call. The second one says how long eight images would take.
    for images in (1, 1, BATCH // 4, BATCH, BATCH):
        if len(rates) > 1 and images / max(rates) > TOO_SLOW_S:
            break
        began = time.perf_counter()
        network.predict(pixels_NHWC[:images])
        took_s = time.perf_counter() - began
        rates.append(images / took_s)
        if images > 1 and took_s > SLOW_S:
            break  # and the next one would take longer
    return max(rates)


def size_mb(model: torch.nn.Module) -> float:
    """MB of the weights, as a package stores them: names and shapes are 30 kB of a backbone's."""
    return len(save(stored_weights(model))) / limits.MB


def weights_mb(model: ModelConfig, classes: int) -> float:
    """`size_mb` of a network of this shape with a linear head."""
    return size_mb(_built(model.model_copy(update={"head": "linear"}), classes))


def words(model: ModelConfig) -> str:
    """The shape for people."""
    text = f"{model.name} at {model.pixels} px"
    return text if model.views == 1 else f"{text} with {model.views} views"


def read(folder: Path) -> dict[str, Variant]:
    """What was measured in this folder, by shape."""
    file = folder / FILE
    if not file.exists():
        return {}
    kept: Mapping[str, dict[str, float | str | None]] = json.loads(file.read_text())
    # JSON has no infinity: an open end is null.
    ends = {"low_ms": -np.inf, "high_ms": np.inf, "latency_ms": np.nan}
    found = {}
    for shape, fields in kept.items():
        whole = {name: ends[name] if value is None else value for name, value in fields.items()}
        found[shape] = Variant(**whole)  # type: ignore[arg-type]
    return found


def _fitting(model: ModelConfig, pinned: Pinned, job: TrainJob) -> ModelConfig:
    """The model with no more landmarks than there are images to draw them from.

    A refit draws from validation images, too: for its sake the search counts these.
    """
    images = sum(pinned.counts[split] for split in {job.feed.train, job.feed.val})
    return model.model_copy(update={"landmarks": min(model.landmarks, max(1, images))})


def _built(model: ModelConfig, classes: int) -> Predictor:
    """The model with random weights, which take as long as any others."""
    bare = {"pretrained": False, "mode": "finetune", "frozen_blocks": 0}
    return ImageModel(model.model_copy(update=bare), classes)
