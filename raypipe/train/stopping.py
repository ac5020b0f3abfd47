"""When to stop: pure rules over the history of one metric, usable inside a trial and across a search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from raypipe.config import Section


class StoppingConfig(Section):
    """Stop after `patience` epochs without an improvement of at least `min_delta`; `patience: null` never stops."""

    metric: Literal["val_accuracy", "val_balanced_accuracy", "val_loss"] = "val_accuracy"
    mode: Literal["max", "min"] = "max"
    patience: int | None = Field(default=5, ge=1)
    min_delta: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _direction(self) -> StoppingConfig:
        if self.metric == "val_loss" and self.mode == "max":  # the default mode, and it would keep the worst epoch
            raise ValueError("val_loss is better when it is lower: set mode=min too")
        return self


def improved(value: float, best: float | None, cfg: StoppingConfig) -> bool:
    """Is `value` better than `best` by more than min_delta? NaN never is."""
    if value != value:
        return False
    gain = value - best if best is not None else float("inf")
    return (gain if cfg.mode == "max" or best is None else -gain) > cfg.min_delta


def should_stop(history: Sequence[float], cfg: StoppingConfig) -> bool:
    """Has the metric failed to improve for `patience` epochs in a row?"""
    if cfg.patience is None:
        return False
    best: float | None = None
    waited = 0
    for value in history:
        if improved(value, best, cfg):
            best, waited = value, 0
        else:
            waited += 1
    return waited >= cfg.patience
