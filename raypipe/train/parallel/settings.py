"""Settings of strategy, precision and memory. They are part of `train`: `train.strategy`, …"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from raypipe.config import Section

Strategy = Literal["auto", "single", "ddp", "fsdp", "zero1", "zero2", "zero3"]


class ParallelConfig(Section):
    """How one model and its optimizer live on the devices."""

    strategy: Strategy = "auto"
    """How ranks share a model. `auto` takes the least sharding that fits the devices' memory:
    single or ddp if the whole model fits, else fsdp, else zero3 with offloading."""

    batch_size: int = Field(default=64, ge=1)
    """Images in the global batch of one step. Ranks and micro batches share it."""

    lr: float = Field(default=1e-3, gt=0)
    """Learning rate of the head; AdamW's usual 0.001 by default."""

    weight_decay: float = Field(default=1e-4, ge=0)
    """AdamW's decoupled weight decay."""

    layer_decay: float = Field(default=1.0, gt=0, le=1)
    """The learning rate of a block of the backbone, divided by that of the block above it. `lr` is
    the head's. 1: all have the same rate."""

    unfreeze_epochs: int = Field(default=0, ge=0)
    """Epochs over which blocks are unfrozen, from the top down; the head trains first. 0: all train
    from the start."""

    clip_norm: float | None = Field(default=None, gt=0)
    """Largest norm of a step's gradient; a larger gradient is scaled down. null: no clipping."""

    accumulate: int = Field(default=1, ge=1)
    """Micro batches in one step. The gradient stays the same; activations take 1/accumulate of the
    memory."""

    precision: Literal["auto", "bf16", "fp16", "tf32", "fp32"] = "auto"
    """Format of matrix products: fp32 is IEEE, tf32 rounds inside products, bf16 and fp16 are
    autocast over fp32 weights. `auto`: bf16 if the device computes it fast, else fp32."""

    activation_checkpointing: bool = False
    """Compute activations inside each block again in the backward pass: about a third more compute,
    for less memory."""

    offload: Literal["none", "optimizer", "parameters"] = "none"
    """Keep the optimizer, or the parameters too, in CPU memory (fsdp and zero1 to zero3). It saves
    memory of the device and costs time."""

    compile: bool = False
    """Compile the model with torch.compile. The first steps take longer, the later ones less."""

    channels_last: bool = True
    """Store images in memory as batch, height, width, channels, which makes convolutions faster."""

    ema: float | None = Field(default=None, gt=0, lt=1)
    """Decay of an exponential moving average of the weights, which is evaluated and saved. null: no
    average."""

    sync_bn: bool = False
    """Batch norms use the global batch, not the batch of each rank. Each norm then costs messages
    between ranks."""

    @model_validator(mode="after")
    def _possible(self) -> ParallelConfig:
        if self.offload != "none" and self.strategy in ("single", "ddp"):
            raise ValueError(
                f"{self.strategy} keeps everything on its device. "
                "Set strategy=fsdp or zero3 to offload"
            )
        if self.offload == "parameters" and self.strategy in ("zero1", "zero2"):
            raise ValueError(
                f"{self.strategy} shards no parameters. Set offload=optimizer, or strategy=zero3"
            )
        # In a training's config batch_size may be `auto`.
        if isinstance(self.batch_size, int) and self.accumulate > self.batch_size:
            raise ValueError(
                f"accumulate={self.accumulate} cuts a batch of {self.batch_size} "
                "into parts smaller than an image"
            )
        return self
