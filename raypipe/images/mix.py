"""MixUp and CutMix: pictures and their targets blended with those of a partner in the batch.

Strengths belong to the sample (`draws`), partners to the batch: they are whoever stands next in a random order of the rank's
batch, so a mixed picture depends on which samples share its rank, and a resume with the same world size sees the same ones.
Sources: H. Zhang et al., "mixup" (2017); S. Yun et al., "CutMix" (2019).
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.special import betaincinv
from torch import Tensor

from raypipe.images.augment import AugmentConfig, box_mask
from raypipe.images.draws import Draws


def mix(
    images_BHWC: Tensor,
    targets_BC: Tensor,
    cfg: AugmentConfig,
    seed: int,
    epoch: int,
    positions_B: Tensor | np.ndarray,
) -> tuple[Tensor, Tensor]:
    """(images, targets) mixed: float pixels after `augment`, targets as shares of classes that still sum to what they did."""
    if not (cfg.mixup or cfg.cutmix) or len(images_BHWC) < 2:
        return images_BHWC, targets_BC
    draws = Draws(seed, epoch, positions_B)
    mixed_B = draws.chance("mix", cfg.mix_share)
    cuts_B = draws.chance(
        "mix by cutting", 0.5 if cfg.mixup and cfg.cutmix else float(cfg.cutmix > 0)
    )
    kept_B = np.where(cuts_B, _kept(cfg.cutmix, "cutmix", draws), _kept(cfg.mixup, "mixup", draws))
    kept_B = np.where(mixed_B, kept_B, 1.0)
    partner_B = torch.from_numpy(_partners(draws)).to(images_BHWC.device)

    box_BHW1 = box_mask(
        np.where(cuts_B, 1 - kept_B, 0.0), np.ones(len(kept_B)), draws, "mix at", images_BHWC
    )
    blend_B = torch.from_numpy(np.where(cuts_B, 1.0, kept_B)).float().to(images_BHWC.device)
    weight_BHW1 = torch.where(box_BHW1, 0.0, blend_B.view(-1, 1, 1, 1))
    share_B1 = weight_BHW1.mean(dim=(1, 2))  # of pixels: a box has whole ones
    others_BHWC, others_BC = images_BHWC[partner_B], targets_BC[partner_B]
    return torch.lerp(others_BHWC, images_BHWC, weight_BHW1), torch.lerp(
        others_BC, targets_BC, share_B1
    )


def _kept(alpha: float, name: str, draws: Draws) -> np.ndarray:
    """Share of itself that each sample keeps, Beta(alpha, alpha) by its inverse."""
    return (
        betaincinv(alpha, alpha, draws.uniform(name)) if alpha else np.ones(len(draws.positions_B))
    )


def _partners(draws: Draws) -> np.ndarray:
    """Who is mixed into whom: the next in a random circle, never itself."""
    order = np.argsort(draws.uniform("mix order"), kind="stable")
    partner_B = np.empty_like(order)
    partner_B[order] = np.roll(order, -1)
    return partner_B
