"""How deep each parameter of a model lies, and how fast each depth learns: what transfer keeps near the image and bends near
the head.

Layer-wise decay: each depth learns `decay` times as fast as the one above it (J. Clark et al., "ELECTRA" (2020); for images,
H. Bao et al., "BEiT" (2022), with 0.65 to 0.9). Gradual unfreezing: the head learns first, then block by block downwards
(J. Howard and S. Ruder, "ULMFiT" (2018)). A frozen depth has learning rate 0 rather than no gradient: AdamW then neither moves
nor decays it, its moments warm up, and DDP, FSDP and ZeRO keep the buckets they were built with. It saves no time: frozen
blocks (`freeze`), or frozen features, do that.

Depth 0 is what comes before the first block (stem, embeddings); what comes after the last block belongs to it. The head is
deepest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from raypipe.errors import ConfigError


def blocks(backbone: nn.Module) -> list[nn.Module]:
    """What a backbone repeats, from the image on: the items of its lists of composite modules, or of lists of one kind
    inside them (stages of blocks). Where there is no such list, its direct children."""
    return _listed(backbone, levels=2) or list(backbone.children())


def depths(model: nn.Module) -> dict[str, int]:
    """Depth by parameter name, 0 and up without gaps. An ImageModel's head is the deepest; a head alone is all of depth 0."""
    backbone = getattr(model, "backbone", None)
    if not isinstance(backbone, nn.Module):
        return {name: 0 for name, _ in model.named_parameters()}
    found = blocks(backbone)
    inside = {id(p): i for i, block in enumerate(found, start=1) for p in block.parameters()}
    at, ordered = 0, []
    for name, p in reversed(
        list(backbone.named_parameters())
    ):  # what stands between two blocks belongs to the one after it
        at = inside.get(id(p), at or len(found))
        ordered.append(("backbone." + name, at))
    return _numbered(
        [
            *_stem_apart(ordered[::-1], inside, backbone),
            *((n, len(found) + 1) for n in _others(model)),
        ]
    )


def scales(count: int, epoch: int, decay: float = 1.0, unfreeze_epochs: int = 0) -> list[float]:
    """Factors of the learning rate by depth in an epoch (from 0), for `count` depths. The deepest, the head, always has 1; the
    others open evenly over `unfreeze_epochs`, from the deepest down, and all are open from then on."""
    share = min(1.0, epoch / unfreeze_epochs) if unfreeze_epochs else 1.0
    frozen = count - 1 - math.ceil((count - 1) * share)
    return [0.0 if depth < frozen else decay ** (count - 1 - depth) for depth in range(count)]


def freeze(model: nn.Module, count: int) -> list[nn.Module]:
    """Take the stem and the lowest `count` blocks of a backbone out of training; returns the modules to keep in eval mode.

    No gradient is computed down there and no activation kept, and batch norms use the statistics they were pretrained with.
    Raises ConfigError for more blocks than there are.
    """
    found, at = blocks(model.get_submodule("backbone")), depths(model)
    if count > len(found):
        raise ConfigError(
            "model.frozen_blocks is more than the backbone has",
            got=count,
            rule=f"It has {len(found)} blocks",
        )
    inside = {id(p) for block in found[:count] for p in block.parameters()}
    last = max((at[name] for name, p in model.named_parameters() if id(p) in inside), default=-1)
    for name, p in model.named_parameters():
        if at[name] <= last:
            p.requires_grad_(False)
    stem = [
        m
        for m in model.modules()
        if (own := list(m.parameters(recurse=False))) and not any(p.requires_grad for p in own)
    ]
    return [*stem, *found[:count]]


def parameter_groups(
    model: nn.Module, weight_decay: float, by_name: Mapping[str, int] | None = None
) -> list[dict[str, Any]]:
    """Optimizer groups that know their `depth` (by parameter name; the model's `depths` unless told). Weight decay is on
    matrices and filters only, not on biases and norms (Goyal et al. 2017); parameters that need no gradient are left out."""
    groups: dict[tuple[int, bool], list[nn.Parameter]] = {}
    by_name = depths(model) if by_name is None else by_name
    for name, p in model.named_parameters():
        if p.requires_grad:
            groups.setdefault((by_name[name], p.ndim > 1), []).append(p)
    return [
        {"params": params, "weight_decay": weight_decay if decayed else 0.0, "depth": depth}
        for (depth, decayed), params in sorted(
            groups.items(), key=lambda item: (item[0][0], not item[0][1])
        )
    ]


def _listed(module: nn.Module, levels: int) -> list[nn.Module]:
    children = list(module.children())
    composite = bool(children) and all(any(True for _ in child.children()) for child in children)
    alike = levels == 2 or len({type(child) for child in children}) == 1
    if isinstance(module, nn.Sequential | nn.ModuleList) and composite and alike:
        return (
            [b for child in children for b in (_listed(child, levels - 1) or [child])]
            if levels
            else []
        )
    return [b for child in children for b in _listed(child, levels)]


def _stem_apart(
    ordered: list[tuple[str, int]], inside: dict[int, int], backbone: nn.Module
) -> list[tuple[str, int]]:
    """What comes before the first block gets depth 0."""
    first = next((i for i, (_, p) in enumerate(backbone.named_parameters()) if id(p) in inside), 0)
    return [(name, 0 if i < first else depth) for i, (name, depth) in enumerate(ordered)]


def _others(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters() if not name.startswith("backbone.")]


def _numbered(found: list[tuple[str, int]]) -> dict[str, int]:
    """The same order without gaps: blocks without parameters have no depth."""
    rank = {depth: i for i, depth in enumerate(sorted({depth for _, depth in found}))}
    return {name: rank[depth] for name, depth in found}
