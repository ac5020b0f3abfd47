"""`train.strategy=auto`: the strategy that a model's memory needs, by arithmetic alone.

If a model fits one device, it trains by single or ddp; if not, it is sharded. Training keeps in
memory (Rajbhandari et al. 2020, section 3):

- each parameter; for a trained one also its gradient, AdamW's two moments and, under EMA, a copy;
- activations: tensors that the forward pass keeps for the backward pass. They grow with a rank's
  micro batch, and no strategy shards them. `activation_bytes` counts them on shapes alone.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raypipe.cluster import container
from raypipe.torch_private import storage_id
from raypipe.train.parallel.blocks import blocks
from raypipe.train.shapes import without_values

log = logging.getLogger("raypipe")
# Share of a device's memory for gathered layers, messages, the allocator and the context.
RESERVE = 0.2
# Optimizer state, in units of the trained parameters.
ADAMW = 2.0


@dataclass(frozen=True)
class Need:
    """Bytes of trained parameters, of frozen ones, and of a micro batch's activations.

    `ema`: is an average of the weights kept?
    """

    trained: int
    frozen: int = 0
    activations: int = 0
    ema: bool = False

    @property
    def state(self) -> float:
        """Bytes that sharding divides: parameters, gradients, optimizer state, EMA."""
        return self.trained * (2 + ADAMW + self.ema) + self.frozen


@dataclass(frozen=True)
class Choice:
    """A strategy, what to offload, the bytes that a device then keeps, and why in one sentence."""

    strategy: str
    offload: str
    bytes_a_device: float
    reason: str


def choose(need: Need, devices: int, memory_bytes: int) -> Choice:
    """The least sharding that fits `devices` of `memory_bytes` each."""
    room = memory_bytes * (1 - RESERVE)
    activations = float(need.activations)
    whole = need.state + activations
    sharded = need.state / devices + activations
    ema = ", mean of the weights" if need.ema else ""
    facts = (
        f"Parameters, gradients, optimizer{ema} take {_size(need.state)}, "
        f"the activations of a micro batch {_size(activations)}; "
        f"a device has room for {_size(room)}"
    )

    # The whole model fits one device.
    if whole <= room:
        if devices == 1:
            return Choice("single", "none", whole, f"{facts}: single, one device")
        reason = f"{facts}: ddp, a copy on each of {devices} devices"
        return Choice("ddp", "none", whole, reason)

    # It does not fit; sharding helps if there are several devices.
    hint = ""
    if activations > room:
        hint = "; its activations alone do not fit: raise train.accumulate"
    if devices == 1:
        alone = "it does not fit, and one device cannot shard; add workers"
        return Choice("single", "none", whole, f"{facts}: {alone}{hint}")
    if sharded <= room:
        reason = f"{facts}: fsdp, sharded over {devices} devices to {_size(sharded)} each"
        return Choice("fsdp", "none", sharded, reason)

    # Offloaded, a device holds only the layers in use. They travel over the bus at each use.
    reason = (
        f"{facts}, and {_size(sharded)} sharded over {devices}: zero3, kept in CPU memory{hint}"
    )
    return Choice("zero3", "parameters", activations, reason)


def need_of(
    model: nn.Module,
    example: Tensor | None,
    micro_batch: int,
    dtype: torch.dtype,
    ema: bool,
    checkpointing: bool,
) -> Need:
    """The bytes that training keeps; `micro_batch` is in images.

    Without an `example` (one input), activations are not counted. `checkpointing`: blocks compute
    their activations again.
    """
    trained, frozen = 0, 0
    for p in model.parameters():
        size = p.numel() * p.element_size()
        if p.requires_grad:
            trained += size
        else:
            frozen += size
    activations = 0.0
    if example is not None:
        activations = activation_bytes(model, example) * micro_batch * dtype.itemsize / 4
        if checkpointing:
            # Kept are the input of each block and the inside of one.
            activations *= min(1.0, 2 / max(1, len(blocks(model))))
    return Need(trained, frozen, int(activations), ema)


def activation_bytes(model: nn.Module, example: Tensor) -> float:
    """Bytes of one image's activations in float32, counted on shapes alone.

    It is 0 for a model that cannot run without values.
    """
    sizes: dict[int, int] = {}  # bytes by id of the storage
    alive: list[Tensor] = []  # tensors stay alive, so that no two storages get the same id

    def count(t: Tensor) -> Tensor:
        if storage_id(t) not in own:
            sizes[storage_id(t)] = t.untyped_storage().nbytes()
            alive.append(t)
        return t

    shapes = without_values(model).train()
    # The model's own tensors are saved for the backward pass too, and are no activations.
    own = {storage_id(t) for t in (*shapes.parameters(), *shapes.buffers())}
    # Two images, because batch norms may refuse one; the sum is halved at the end.
    two = torch.zeros(2, *example.shape[1:], dtype=example.dtype, device="meta")
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.autograd.graph.saved_tensors_hooks(count, lambda t: t),
        ):
            shapes(two)
    except Exception as e:
        # A user's model may branch on values, which `meta` does not have.
        log.debug("Activations are unknown: %s", e)
        return 0.0
    return sum(sizes.values()) / 2


def device_memory(device: torch.device, ranks_here: int) -> int:
    """Bytes that one rank may use, if `ranks_here` share this machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return container.usable_memory() // ranks_here


def _size(n: float) -> str:
    return f"{n / 2**30:.1f} GiB" if n >= 2**30 else f"{n / 2**20:.1f} MiB"
