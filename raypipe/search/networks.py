"""What a prediction by several trials takes: the seconds of all the networks that run for it.

A fine-tuned trial has a network of its own, whose forward pass was timed while it trained. Heads
have frozen backbones, and those of the same backbone and side share one: that takes its work
(contenders.py) at the rate that the first answer measured. Where the work of a backbone is not
known, Forecast.network_per_s times it.

Pure: it knows no trial, no clock and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from raypipe.models.ensemble import Member
from raypipe.models.zoo import ModelConfig
from raypipe.search import budget, contenders
from raypipe.search.budget import Speed

PerSecond = Callable[[ModelConfig], float]
"""Images a second, of one view each, through the network of a model on the CPUs of this process."""


def of_works(works_per_s: float | None) -> PerSecond:
    """By the networks' work. works_per_s: images of work 1 a second; None: not measured."""
    return lambda model: (works_per_s or budget.GUESSED_IMAGES_PER_S) / contenders.work(model)


def others_s(
    models: Mapping[str, ModelConfig],
    speeds: Mapping[str, Speed],
    leader: str,
    per_s: PerSecond,
) -> float:
    """Seconds that an image takes beside the leader's own network.

    models: of the ensemble's members, by trial. speeds: of those that were measured.
    """
    alone = {leader: models[leader]}
    return seconds(models, speeds, per_s) - seconds(alone, speeds, per_s)


def heads_s(models: list[ModelConfig], most: int, per_s: PerSecond) -> float:
    """Seconds that an image takes in the frozen backbones of these heads: of the `most` slowest."""
    takes_s = {Member(model).shared: 1 / per_s(model) for model in models}
    return sum(sorted(takes_s.values(), reverse=True)[:most])


def unmeasured(speed: Speed, model: ModelConfig, per_s: PerSecond) -> Speed:
    """The speed with that of its network: of a head, which no image passed while it was fitted, and
    where nothing was measured."""
    return replace(speed, forward_images_per_s=per_s(model))


def on_cpus(speed: Speed, model: ModelConfig, per_s: PerSecond) -> Speed:
    """The speed of a trial, with what its network takes where it predicts when trials have ended.

    That is on CPUs, of which a forward pass on a GPU says nothing.
    """
    if model.mode == "frozen" or speed.forward_images_per_s is not None:
        return speed
    return unmeasured(speed, model, per_s)


def seconds(
    models: Mapping[str, ModelConfig], speeds: Mapping[str, Speed], per_s: PerSecond
) -> float:
    """Seconds that an image takes in all these models together; see `others_s`."""
    total = 0.0
    known: set[str] = set()
    for name, model in models.items():
        shared = Member(model).shared
        if shared and shared in known:
            continue
        known.add(shared)
        speed = speeds.get(name)
        rate = speed.forward_images_per_s if speed is not None else None
        one_s = 1 / rate if rate and not shared else 1 / per_s(model)
        total += model.views * one_s
    return total
