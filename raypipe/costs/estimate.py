"""From rates and counts to seconds: arithmetic alone, so a test can check it by hand.

A verb is a list of parts. Each part has seconds by the clock, CPU seconds of all processes, and
device seconds: those in which a training or a prediction task holds a device, that is a GPU, or
where there is none a CPU worker.

What does not depend on the images is START and the constants beside it. They are the CPU seconds of
verbs on a few tiny images, on the machine of REFERENCE_S in rates.py. They grow with
`Rates.slowness`. benchmarks/costs.py compares whole estimates with what verbs take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raypipe.costs.rates import Rate, Rates


@dataclass(frozen=True)
class Part:
    """One part of what a verb does."""

    name: str
    seconds: float
    cpu_s: float
    device_s: float = 0.0


@dataclass(frozen=True)
class Fixed:
    """CPU seconds and seconds by the clock of something that is the same for each job."""

    cpu_s: float
    seconds: float

    def part(self, name: str, slowness: float, times: float = 1.0) -> Part:
        factor = slowness * times
        return Part(name, self.seconds * factor, self.cpu_s * factor)


# Measured on the machine of REFERENCE_S.
START = Fixed(cpu_s=8.6, seconds=8.5)  # imports, the MLflow store, and Ray on this machine
PUBLISH = Fixed(cpu_s=5.2, seconds=3.5)  # package, card, the version in MLflow
WORKER = Fixed(cpu_s=2.0, seconds=2.0)  # a process of Ray that imports torch
SEARCH = Fixed(cpu_s=6.4, seconds=5.0)  # Tune, its store of trials, the report
TRIAL = Fixed(cpu_s=0.2, seconds=0.3)  # beside its epochs
EPOCH = Fixed(cpu_s=0.04, seconds=0.04)  # beside its images: checkpoint, report


@dataclass(frozen=True)
class Where:
    """What the parts run on: CPUs of all nodes, and devices that train or predict."""

    cpus: float
    devices: int
    gpu: bool

    def spread(self, rate: Rate, images: float) -> tuple[float, float]:
        """(seconds, CPU seconds) of work that tasks of one CPU each share."""
        cpu_s = rate.cpu_s * images
        return cpu_s / max(1.0, self.cpus), cpu_s


def total(parts: Sequence[Part]) -> Part:
    return Part(
        "total",
        sum(part.seconds for part in parts),
        sum(part.cpu_s for part in parts),
        sum(part.device_s for part in parts),
    )


@dataclass(frozen=True)
class Counts:
    """Images of a training: those of an epoch, of validation, of the test split, and how many
    different ones training and validation read.
    """

    train: int
    val: int
    test: int
    read: int


def training(
    counts: Counts, epochs: float, rates: Rates, where: Where, carrier: str, frozen: bool
) -> list[Part]:
    """The parts of one training: what comes before its first epoch, and its epochs.

    carrier: threads decodes in each epoch, cache and offload elsewhere. Workers share the images of
    a step evenly; what they tell each other is not counted.
    """
    parts = []
    if frozen:
        seconds, cpu_s = where.spread(rates.decode + rates.embed, counts.read)
        parts.append(Part("features, unless they are kept", seconds, cpu_s))
    elif carrier == "cache":
        seconds, cpu_s = where.spread(rates.decode, counts.read)
        parts.append(Part("decoding once", seconds, cpu_s))
    decode = Rate(0, 0) if frozen or carrier == "cache" else rates.decode
    parts.append(epochs_of(counts, epochs, rates, where, decode))
    return parts


def epochs_of(counts: Counts, epochs: float, rates: Rates, where: Where, decode: Rate) -> Part:
    """Training and validation of some epochs. decode: of each image in each epoch."""
    stepped = rates.step.wall_s * counts.train + rates.look.wall_s * counts.val
    images = counts.train + counts.val
    computed = rates.step.cpu_s * counts.train + rates.look.cpu_s * counts.val
    decoded = decode.cpu_s * images
    # Images are decoded while the device computes; on CPUs both want the same cores.
    if where.gpu:
        seconds = max(stepped / where.devices, decode.wall_s * images / where.devices)
    else:
        seconds = max(stepped, (computed + decoded) / where.cpus)
    beside = EPOCH.part("", rates.slowness)
    seconds = (seconds + beside.seconds) * epochs
    cpu_s = (computed + decoded + beside.cpu_s) * epochs
    return Part("epochs", seconds, cpu_s, seconds * where.devices)


def looking(name: str, images: int, rates: Rates, where: Where) -> Part:
    """Predicting images with the whole model, in this process."""
    rate = rates.decode + rates.embed
    cpu_s = rate.cpu_s * images
    seconds = max(rates.embed.wall_s * images, cpu_s / min(2.0, where.cpus))
    return Part(name, seconds, cpu_s)


def predicting(images: int, image: Rate, workers: float) -> Part:
    """Predicting images in tasks with one CPU each, `workers` at a time."""
    cpu_s = image.cpu_s * images
    return Part("predictions", cpu_s / workers, cpu_s, cpu_s)


def halving_epochs(trials: int, rungs: Sequence[int], reduction: int) -> float:
    """Epochs of a search by successive halving: each rung is reached by 1/reduction of the one
    before, and at least by one trial.

    rungs: epochs at which trials are compared, as `halving.rungs` gives them.
    """
    epochs = 0.0
    before, left = 0, float(trials)
    for rung in rungs:
        epochs += (rung - before) * left
        before, left = rung, max(1.0, left / reduction)
    return epochs
