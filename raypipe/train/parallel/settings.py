"""What a user says about strategy, precision and memory. The fields are read as `train.strategy`, `train.accumulate`, …"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from raypipe.config import Section

Strategy = Literal["auto", "single", "ddp", "fsdp", "zero1", "zero2", "zero3"]


class ParallelConfig(Section):
    """How one model and its optimizer live on the devices. `batch_size` is global: ranks and micro batches share it.

    layer_decay: each block of the backbone learns so many times as fast as the one above it; `lr` is the head's.
    unfreeze_epochs: the head learns first, the blocks join from the top down over so many epochs.
    accumulate: micro batches a step; the gradient is the same, the activations take 1/accumulate of the memory.
    precision: fp32 is IEEE, tf32 rounds inside matrix products, bf16 and fp16 are autocast over fp32 weights.
    offload (fsdp, zero): keep the optimizer, or the parameters too, in CPU memory.
    ema: decay of an exponential mean of the weights; evaluation and the saved weights are the mean's.
    sync_bn: batch norms see the global batch instead of each rank's.
    """

    strategy: Strategy = "auto"
    batch_size: int = Field(default=64, ge=1)
    lr: float = Field(default=1e-3, gt=0)
    weight_decay: float = Field(default=1e-4, ge=0)
    layer_decay: float = Field(default=1.0, gt=0, le=1)
    unfreeze_epochs: int = Field(default=0, ge=0)
    clip_norm: float | None = Field(default=None, gt=0)
    accumulate: int = Field(default=1, ge=1)
    precision: Literal["auto", "bf16", "fp16", "tf32", "fp32"] = "auto"
    activation_checkpointing: bool = False
    offload: Literal["none", "optimizer", "parameters"] = "none"
    compile: bool = False
    channels_last: bool = True
    ema: float | None = Field(default=None, gt=0, lt=1)
    sync_bn: bool = False

    @model_validator(mode="after")
    def _possible(self) -> ParallelConfig:
        if self.offload != "none" and self.strategy in ("single", "ddp"):
            raise ValueError(
                f"{self.strategy} keeps everything on its device. Set strategy=fsdp or zero3 to offload"
            )
        if self.offload == "parameters" and self.strategy in ("zero1", "zero2"):
            raise ValueError(
                f"{self.strategy} shards no parameters. Set offload=optimizer, or strategy=zero3"
            )
        if (
            isinstance(self.batch_size, int) and self.accumulate > self.batch_size
        ):  # a training may say auto
            raise ValueError(
                f"accumulate={self.accumulate} cuts a batch of {self.batch_size} into parts smaller than an image"
            )
        return self
