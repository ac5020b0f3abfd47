"""One job on several node types: seconds and money of a run, a trial and a million predictions.

What this machine measured holds for CPUs: a node with four times the CPUs takes a quarter of the
seconds. A GPU's rate is a published one of ResNet-50, scaled by the model's FLOPs or by its
activations, whichever says slower: networks of depthwise convolutions wait for memory, and their
time follows their activations (Radosavovic et al. 2020, "Designing network design spaces"). Small
models reach less, because a GPU waits for each kernel's start.

Beside a GPU the slower of decoding and computing decides, so a fast GPU beside few CPUs is a slow
node. On CPUs both want the same cores: they add up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from raypipe.costs.estimate import PUBLISH, START, Counts
from raypipe.costs.nodes import NODES, RATES, RESNET50_BYTES, RESNET50_FLOPS, SCALING, Node
from raypipe.costs.rates import Rates
from raypipe.costs.settings import CostConfig
from raypipe.errors import ConfigError, nearest

FORWARD = 1 / 3  # of a training step's FLOPs


@dataclass(frozen=True)
class Model:
    """flops: of a training step on one image; 0: not counted. activations: the bytes that it keeps
    for the backward pass. frozen: are only heads trained?
    """

    flops: float
    activations: float
    frozen: bool
    cached: bool
    """Are images decoded once for all epochs?"""


@dataclass(frozen=True)
class Offer:
    """One node type. Seconds by the clock, dollars; None where no rate of its GPU is published."""

    name: str
    node: Node
    usd_per_hour: float
    run_s: float | None
    trial_usd: float | None
    million_usd: float | None
    limit: str
    source: str

    @property
    def run_usd(self) -> float | None:
        return None if self.run_s is None else self.run_s / 3600 * self.usd_per_hour


def require_known(names: Sequence[str]) -> None:
    """Raise ConfigError for a node type whose CPUs and GPUs are not known here."""
    for name in names:
        if name not in NODES:
            raise ConfigError(
                "This node type is not known",
                got=name,
                rule=nearest(name, list(NODES)),
                fix="raypipe cost --nodes list shows the known ones; take the one most like it, "
                "and give that your own price: cost.price_per_hour",
            )


def offers(
    names: Sequence[str],
    cfg: CostConfig,
    counts: Counts,
    epochs: int,
    model: Model,
    rates: Rates,
    most_s: float = math.inf,
) -> list[Offer]:
    """An offer of each node type, cheapest run first. most_s: seconds that epochs take at most.

    Raises ConfigError for unknown types.
    """
    require_known(names)
    made = [
        _offer(name, cfg, counts, epochs, model, rates, most_s) for name in dict.fromkeys(names)
    ]
    return sorted(made, key=lambda one: (one.run_usd is None, one.run_usd or 0.0))


def _offer(
    name: str,
    cfg: CostConfig,
    counts: Counts,
    epochs: int,
    model: Model,
    rates: Rates,
    most_s: float,
) -> Offer:
    node = NODES[name]
    usd = cfg.price(name)
    assert usd is not None, "known node types have a price"
    if node.gpu is not None and (node.gpu not in RATES or not model.flops):
        why = "no published rate" if model.flops else "the model's FLOPs are not known"
        return Offer(name, node, usd, None, None, None, "", why)
    if node.gpu is None and rates.device != "cpu":
        # The CPU seconds of a step are those that started its kernels.
        return Offer(name, node, usd, None, None, None, "", "measured on a GPU here")
    step_s, look_s, embed_s = _compute(node, model, rates)
    decode_s = rates.decode.cpu_s / node.cpus
    once = decode_s if model.cached else 0.0
    each = 0.0 if model.cached or model.frozen else decode_s
    if model.frozen:
        once = _together(node, decode_s, embed_s)
    stepped = _together(node, each, step_s) * counts.train
    looked = _together(node, each, look_s) * counts.val
    loop_s = min(most_s, epochs * (stepped + looked))
    fixed_s = (START.seconds + PUBLISH.seconds) * rates.slowness
    run_s = fixed_s + once * counts.read + loop_s
    predicted_s = _together(node, decode_s, embed_s)
    computed = embed_s if model.frozen else step_s
    decoded = decode_s if model.frozen else each
    per_second = usd / 3600
    return Offer(
        name=name,
        node=node,
        usd_per_hour=usd,
        run_s=run_s,
        # Trials share a node: each takes its part of the whole node's time.
        trial_usd=loop_s * per_second,
        million_usd=1e6 * predicted_s * per_second,
        limit=_limit(node, decoded, computed),
        source="published" if node.gpu else "measured here",
    )


def _compute(node: Node, model: Model, rates: Rates) -> tuple[float, float, float]:
    """Seconds an image of a whole node: a step, validation, and a pass of the whole model."""
    if node.gpu is None:
        cpus = node.cpus
        return rates.step.cpu_s / cpus, rates.look.cpu_s / cpus, rates.embed.cpu_s / cpus
    speed_up = node.gpus * (SCALING if node.gpus > 1 else 1.0)
    of_resnet50 = max(model.flops / RESNET50_FLOPS, model.activations / RESNET50_BYTES)
    step_s = of_resnet50 / (RATES[node.gpu] * speed_up)
    embed_s = step_s * FORWARD
    if model.frozen:
        # A head is trained on kept features, in much less time than these are made in.
        return rates.step.cpu_s / node.cpus, rates.look.cpu_s / node.cpus, embed_s
    return step_s, embed_s, embed_s


def _together(node: Node, decode_s: float, compute_s: float) -> float:
    """Seconds of an image that is decoded and computed: side by side only beside a GPU."""
    return decode_s + compute_s if node.gpu is None else max(decode_s, compute_s)


def _limit(node: Node, decode_s: float, compute_s: float) -> str:
    if node.gpu is None:
        return "CPU"
    return "decoding: its CPUs" if decode_s > compute_s else "GPU"
