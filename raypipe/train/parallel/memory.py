"""`auto`: which strategy a model needs, by arithmetic alone. Fits one device: single or ddp. Does not fit: shard it.

What training keeps (Rajbhandari et al. 2020, section 3): each parameter; of a trained one also its gradient, AdamW's two
moments and, under EMA, one copy more; and what the forward pass keeps for the backward pass, which grows with a rank's micro
batch and which no strategy shards. That last part is counted on shapes alone (`activation_bytes`).
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from raypipe.train.parallel.blocks import blocks
from raypipe.train.shapes import without_values

log = logging.getLogger("raypipe")
RESERVE = 0.2  # of a device's memory, for gathered layers, messages, the allocator and the context
ADAMW = 2.0  # optimizer state, in units of the trained parameters


@dataclass(frozen=True)
class Need:
    """Bytes of trained and of frozen parameters, of what is kept of a micro batch; and is there an EMA?"""

    trained: int
    frozen: int = 0
    activations: int = 0
    ema: bool = False

    @property
    def state(self) -> float:
        """What sharding divides."""
        return self.trained * (2 + ADAMW + self.ema) + self.frozen


@dataclass(frozen=True)
class Choice:
    """A strategy, whether to offload, the bytes a device then keeps, and why in one sentence."""

    strategy: str
    offload: str
    bytes_a_device: float
    reason: str


def choose(need: Need, devices: int, memory_bytes: int) -> Choice:
    """The least sharding that fits `devices` of `memory_bytes` each."""
    room, own = memory_bytes * (1 - RESERVE), float(need.activations)
    total, share = need.state + own, need.state / devices + own
    ema = ", mean of the weights" if need.ema else ""
    words = (
        f"Parameters, gradients, optimizer{ema} take {_size(need.state)}, the activations of a micro batch {_size(own)}; a "
        f"device has room for {_size(room)}"
    )
    if total <= room:
        how = (
            ("single", "one device")
            if devices == 1
            else ("ddp", f"a copy on each of {devices} devices")
        )
        return Choice(how[0], "none", total, f"{words}: {how[0]}, {how[1]}")
    smaller = "" if own <= room else "; its activations alone do not fit: raise train.accumulate"
    if devices == 1:
        alone = "it does not fit, and one device has nobody to shard with; add workers"
        return Choice("single", "none", total, f"{words}: {alone}{smaller}")
    if share <= room:
        return Choice(
            "fsdp",
            "none",
            share,
            f"{words}: fsdp, sharded over {devices} devices to {_size(share)} each",
        )
    # Offloaded, a device holds the layers in use only; what it computes with travels over the bus at each use.
    last = f"{_size(share)} sharded over {devices}: zero3, kept in CPU memory{smaller}"
    return Choice("zero3", "parameters", own, f"{words}, and {last}")


def need_of(
    model: nn.Module,
    example: Tensor | None,
    micro_batch: int,
    dtype: torch.dtype,
    ema: bool,
    checkpointing: bool,
) -> Need:
    """What training this model by micro batches of so many images keeps; without an `example` no activations."""
    trained, frozen = (
        sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad == wanted)
        for wanted in (True, False)
    )
    kept = 0.0
    if example is not None:
        kept = activation_bytes(model, example) * micro_batch * dtype.itemsize / 4
        if checkpointing:  # the input of each block, and the inside of one
            kept *= min(1.0, 2 / max(1, len(blocks(model))))
    return Need(trained, frozen, int(kept), ema)


def activation_bytes(model: nn.Module, example: Tensor) -> float:
    """What the backward pass needs of one image in float32, counted on shapes alone; 0 for a model that needs values."""
    seen: dict[int, int] = {}
    kept: list[Tensor] = []  # alive, so that no two have one id

    def keep(t: Tensor) -> Tensor:
        if t.untyped_storage()._cdata not in own:
            seen[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
            kept.append(t)
        return t

    shapes = without_values(model).train()
    own = {t.untyped_storage()._cdata for t in (*shapes.parameters(), *shapes.buffers())}
    two = torch.zeros(2, *example.shape[1:], dtype=example.dtype, device="meta")
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
        ):
            shapes(two)
    except Exception as e:  # a model of the user's own may branch on values
        log.debug("Activations are unknown: %s", e)
        return 0.0
    return sum(seen.values()) / 2


def device_memory(device: torch.device, ranks_here: int) -> int:
    """Bytes that one of so many ranks of this machine may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(host, container_limit() or host) // ranks_here


def container_limit(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """The least memory limit of this process's cgroup and of those above it, cgroup v2 and v1; None where there is none.

    A container sees its host's memory, and is killed when it takes more than its own.
    """
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return None
    limits: list[int] = []
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controllers == "":
            root, name = mount, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = mount / "memory", "memory.limit_in_bytes"
        else:
            continue
        # Inside a container the path may be the host's, of which only the mount's root is shown.
        parts = [p for p in path.split("/") if p not in ("", "..")]
        for count in range(len(parts) + 1):
            limits += _limit(root.joinpath(*parts[:count]) / name)
    return min(limits, default=None)


def _limit(file: Path) -> list[int]:
    """v2 says `max` where nothing is set, v1 a number near 2^63."""
    try:
        text = file.read_text().strip()
    except OSError:
        return []
    return [int(text)] if text.isdigit() and int(text) < 2**60 else []


def _size(n: float) -> str:
    return f"{n / 2**30:.1f} GiB" if n >= 2**30 else f"{n / 2**20:.1f} MiB"
