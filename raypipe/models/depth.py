"""The depth of each parameter in a model, and the learning rate of each depth.

Depth 0 is what comes before the first block (stem, embeddings). Then each block of the backbone is
one depth; what comes after the last block belongs to it. The head is the deepest.

Layer-wise decay: each depth learns `decay` times as fast as the one above it (J. Clark et al.,
"ELECTRA" (2020); for images, H. Bao et al., "BEiT" (2022), with 0.65 to 0.9). Gradual unfreezing:
the head learns first, then block by block downwards (J. Howard and S. Ruder, "ULMFiT" (2018)).

A depth that is not yet unfrozen has learning rate 0, but keeps its gradient. AdamW then neither
moves nor decays it, its moments warm up, and DDP, FSDP and ZeRO keep the buckets they were built
with. This saves no time: frozen blocks (`freeze`), or frozen features, do that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from raypipe.errors import ConfigError


def blocks(backbone: nn.Module) -> list[nn.Module]:
    """What a backbone repeats, from the image on.

    These are the items of its lists of composite modules. Where such an item (a stage) holds a list
    of modules of one kind, that list's items are taken instead. Without any list: the backbone's
    direct children.
    """
    return _listed(backbone, levels=2) or list(backbone.children())


def depths(model: nn.Module) -> dict[str, int]:
    """Depth by parameter name, from 0 without gaps.

    model: an ImageModel, whose head is the deepest; or a head alone, which is all of depth 0.
    """
    backbone = getattr(model, "backbone", None)
    if not isinstance(backbone, nn.Module):
        return {name: 0 for name, _ in model.named_parameters()}

    backbone_blocks = blocks(backbone)
    last = len(backbone_blocks)
    block_of: dict[int, int] = {}  # by id of the parameter, blocks counted from 1
    for number, block in enumerate(backbone_blocks, start=1):
        for parameter in block.parameters():
            block_of[id(parameter)] = number

    # From the end on: a parameter between two blocks belongs to the block after it.
    depth = 0
    backwards: list[tuple[str, int]] = []
    for name, parameter in reversed(list(backbone.named_parameters())):
        depth = block_of.get(id(parameter), depth or last)
        backwards.append((f"backbone.{name}", depth))
    ordered = backwards[::-1]

    # What comes before the first block is the stem: depth 0.
    stem = 0
    for place, parameter in enumerate(backbone.parameters()):
        if id(parameter) in block_of:
            stem = place
            break
    ordered = [(name, 0 if i < stem else depth) for i, (name, depth) in enumerate(ordered)]

    for name, _ in model.named_parameters():
        if not name.startswith("backbone."):
            ordered.append((name, last + 1))
    return _without_gaps(ordered)


def scales(count: int, epoch: int, decay: float = 1.0, unfreeze_epochs: int = 0) -> list[float]:
    """Factors of the learning rate in an epoch (from 0), one for each of `count` depths.

    The deepest, the head, always has 1. The others are unfrozen evenly over `unfreeze_epochs`, from
    the deepest down.
    """
    below_head = count - 1
    share = min(1.0, epoch / unfreeze_epochs) if unfreeze_epochs else 1.0
    frozen = below_head - math.ceil(below_head * share)

    factors = []
    for depth in range(count):
        factors.append(0.0 if depth < frozen else decay ** (below_head - depth))
    return factors


def freeze(model: nn.Module, count: int) -> list[nn.Module]:
    """Take the stem and the lowest `count` blocks of a backbone out of training.

    No gradient is computed there and no activation kept. Batch norms must use the statistics they
    were pretrained with: the caller keeps the returned modules in eval mode.

    Raises ConfigError for more blocks than there are.
    """
    backbone_blocks = blocks(model.get_submodule("backbone"))
    if count > len(backbone_blocks):
        raise ConfigError(
            "model.frozen_blocks is more than the backbone has",
            got=count,
            rule=f"It has {len(backbone_blocks)} blocks",
        )
    frozen_blocks = backbone_blocks[:count]
    in_frozen_blocks: set[int] = set()
    for block in frozen_blocks:
        in_frozen_blocks.update(id(parameter) for parameter in block.parameters())

    # Freeze by depth, so that what lies between the blocks is frozen, too.
    depth_of = depths(model)
    last = -1
    for name, parameter in model.named_parameters():
        if id(parameter) in in_frozen_blocks:
            last = max(last, depth_of[name])
    for name, parameter in model.named_parameters():
        if depth_of[name] <= last:
            parameter.requires_grad_(False)

    # Modules whose parameters are all frozen. A root that owns a frozen token is none: `eval` goes
    # down to the blocks that learn.
    frozen_modules = []
    for module in model.modules():
        inside = list(module.parameters())
        if inside and not any(p.requires_grad for p in inside):
            frozen_modules.append(module)
    return [*frozen_modules, *frozen_blocks]


def parameter_groups(
    model: nn.Module, weight_decay: float, by_name: Mapping[str, int] | None = None
) -> list[dict[str, Any]]:
    """Optimizer groups, each with its `depth`, in the order of depth.

    by_name: depth by parameter name; None: the model's `depths`. Weight decay is on matrices and
    filters only, not on biases and norms (Goyal et al. 2017). Parameters that need no gradient are
    left out.
    """
    by_name = depths(model) if by_name is None else by_name
    members: dict[tuple[int, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decayed = parameter.ndim > 1
            members.setdefault((by_name[name], decayed), []).append(parameter)

    # Within a depth, the decayed group comes first.
    groups: list[dict[str, Any]] = []
    for depth, decayed in sorted(members, key=lambda key: (key[0], not key[1])):
        decay = weight_decay if decayed else 0.0
        params = members[depth, decayed]
        groups.append({"params": params, "weight_decay": decay, "depth": depth})
    return groups


def _listed(module: nn.Module, levels: int) -> list[nn.Module]:
    """The blocks below a module; none where it has no list of composite modules.

    levels: 2 while no list was met. A list below a list counts only if its items are of one kind.
    """
    children = list(module.children())
    composite = bool(children) and all(list(child.children()) for child in children)
    one_kind = len({type(child) for child in children}) == 1
    is_list = isinstance(module, nn.Sequential | nn.ModuleList)

    # No list of blocks: look for one farther down.
    below: list[nn.Module] = []
    if not (is_list and composite and (levels == 2 or one_kind)):
        for child in children:
            below += _listed(child, levels)
        return below

    # A list: each child is a stage of blocks, or a block itself.
    if levels == 0:
        return []
    for child in children:
        below += _listed(child, levels - 1) or [child]
    return below


def _without_gaps(depth_of: list[tuple[str, int]]) -> dict[str, int]:
    """The same order, numbered from 0: blocks without parameters have no depth."""
    used = sorted({depth for _, depth in depth_of})
    number = {depth: i for i, depth in enumerate(used)}
    return {name: number[depth] for name, depth in depth_of}
