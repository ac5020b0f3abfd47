"""`auto`: which strategy a model needs, by arithmetic alone. Fits one device: single or ddp. Does not fit: shard it.

The estimate counts what training keeps for each parameter: itself, its gradient, and the optimizer's state (AdamW: two more of
its size), as in Rajbhandari et al. 2020, section 3. Activations depend on the batch and are met by a reserve.
"""

from __future__ import annotations

from dataclasses import dataclass

RESERVE = 0.3  # of a device's memory, for activations, gathered layers, the allocator and the context
ADAMW = 2.0  # optimizer state, in units of the parameters


@dataclass(frozen=True)
class Choice:
    """A strategy, whether to offload, the bytes a device then keeps, and why in one sentence."""

    strategy: str
    offload: str
    bytes_a_device: float
    reason: str


def choose(parameter_bytes: int, optimizer_factor: float, devices: int, memory_bytes: int) -> Choice:
    """The least sharding that fits `devices` of `memory_bytes` each."""
    total, room = parameter_bytes * (2 + optimizer_factor), memory_bytes * (1 - RESERVE)
    need = f"Parameters, gradients and optimizer take {_size(total)}, a device has room for {_size(room)}"
    if total <= room:
        how = ("single", "one device") if devices == 1 else ("ddp", f"a copy on each of {devices} devices")
        return Choice(how[0], "none", total, f"{need}: {how[0]}, {how[1]}")
    if devices == 1:
        return Choice("single", "none", total, f"{need}: it does not fit, and one device has nobody to shard with; add workers")
    share = total / devices
    if share <= room:
        return Choice("fsdp", "none", share, f"{need}: fsdp, sharded over {devices} devices to {_size(share)} each")
    # Offloaded, a device holds the layers in use only; what it computes with travels over the bus at each use.
    return Choice("zero3", "parameters", 0.0, f"{need}, and {_size(share)} sharded over {devices}: zero3, kept in CPU memory")


def _size(n: float) -> str:
    return f"{n / 2**30:.1f} GiB" if n >= 2**30 else f"{n / 2**20:.1f} MiB"
