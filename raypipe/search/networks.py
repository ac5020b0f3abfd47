"""What a prediction by several trials takes: the seconds of all the networks that run for it.

A fine-tuned trial has a network of its own, whose forward pass was timed while it trained. Heads
have frozen backbones, and those of the same backbone and side share one: that takes its work
(contenders.py) at the rate that the first answer measured.

Pure: it knows no trial, no clock and no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from raypipe.models.ensemble import Member
from raypipe.models.zoo import ModelConfig
from raypipe.search import budget, contenders
from raypipe.search.budget import Speed


def others_s(
    models: Mapping[str, ModelConfig],
    speeds: Mapping[str, Speed],
    leader: str,
    works_per_s: float | None,
) -> float:
    """Seconds that an image takes beside the leader's own network.

    models: of the ensemble's members, by trial. speeds: of those that were measured. works_per_s:
    images of work 1 a second; None: not measured.
    """
    alone = {leader: models[leader]}
    return seconds(models, speeds, works_per_s) - seconds(alone, speeds, works_per_s)


def heads_s(models: list[ModelConfig], most: int, works_per_s: float | None) -> float:
    """Seconds that an image takes in the frozen backbones of these heads: of the `most` slowest."""
    works = {Member(model).shared: contenders.work(model) for model in models}
    slowest = sorted(works.values(), reverse=True)[:most]
    return sum(slowest) / _rate(works_per_s)


def by_work(speed: Speed, model: ModelConfig, works_per_s: float | None) -> Speed:
    """The speed with that of the backbone by its work: of a head, which no image passed while it
    was fitted, and where nothing was measured."""
    rate = _rate(works_per_s) / contenders.work(model)
    return replace(speed, forward_images_per_s=rate)


def on_cpus(speed: Speed, model: ModelConfig, works_per_s: float | None) -> Speed:
    """The speed of a trial, with what its network takes where it predicts when trials have ended.

    That is on CPUs. A forward pass on a GPU says nothing of them, so its network's work is taken.
    """
    if model.mode == "frozen" or speed.forward_images_per_s is not None:
        return speed
    return by_work(speed, model, works_per_s)


def seconds(
    models: Mapping[str, ModelConfig], speeds: Mapping[str, Speed], works_per_s: float | None
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
        one_s = 1 / rate if rate and not shared else contenders.work(model) / _rate(works_per_s)
        total += model.views * one_s
    return total


def _rate(works_per_s: float | None) -> float:
    return works_per_s or budget.GUESSED_IMAGES_PER_S
