"""Mixed pictures and their targets tell the same story: what share of the pixels is whose."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from raypipe.images.augment import AugmentConfig
from raypipe.images.mix import mix

BATCH = 32
SAMPLES = np.arange(100, 100 + BATCH)
KINDS = [{"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 1.0, "cutmix": 1.0}]


def flat() -> tuple[Tensor, Tensor]:
    """Picture i is all i, and of class i, so that a mixed picture's mean is what its targets
    expect.
    """
    numbers = torch.arange(BATCH, dtype=torch.float32)
    return numbers.view(-1, 1, 1, 1).repeat(1, 16, 16, 3), torch.eye(BATCH)


def same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@pytest.mark.parametrize("how", KINDS, ids=str)
def test_targets_are_the_shares_of_the_pixels(how: dict[str, float]) -> None:
    images, targets = mix(*flat(), AugmentConfig(**how), 1, 0, SAMPLES)
    assert torch.allclose(targets.sum(dim=1), torch.ones(BATCH), atol=1e-5)
    assert torch.allclose(
        images.mean(dim=(1, 2, 3)), targets @ torch.arange(BATCH, dtype=torch.float32), atol=1e-3
    )
    assert bool(((targets > 0).sum(dim=1) <= 2).all())
    assert int((targets.amax(dim=1) < 0.999).sum()) > BATCH // 2


def test_mixup_blends_every_pixel_and_cutmix_moves_whole_ones() -> None:
    blended, _ = mix(*flat(), AugmentConfig(mixup=1.0), 1, 0, SAMPLES)
    assert torch.allclose(blended, blended[:, :1, :1].expand_as(blended))
    cut, _ = mix(*flat(), AugmentConfig(cutmix=1.0), 1, 0, SAMPLES)
    assert torch.equal(cut, cut.round())
    assert max(len(picture.unique()) for picture in cut) == 2


def test_every_picture_is_partner_once_and_never_its_own() -> None:
    _, targets = mix(*flat(), AugmentConfig(mixup=2.0), 1, 0, SAMPLES)
    partners = targets.clone().fill_diagonal_(0) > 0
    assert torch.equal(partners.sum(dim=0), torch.ones(BATCH, dtype=torch.long))
    assert torch.equal(partners.sum(dim=1), torch.ones(BATCH, dtype=torch.long))


@pytest.mark.parametrize("how", KINDS, ids=str)
def test_the_same_batch_mixes_the_same_way_and_another_epoch_otherwise(
    how: dict[str, float],
) -> None:
    cfg = AugmentConfig(**how)
    first = mix(*flat(), cfg, 1, 0, SAMPLES)
    assert same(first, mix(*flat(), cfg, 1, 0, torch.from_numpy(SAMPLES)))
    for seed, epoch, samples in ((2, 0, SAMPLES), (1, 1, SAMPLES), (1, 0, SAMPLES + 1)):
        assert not same(first, mix(*flat(), cfg, seed, epoch, samples))


def test_only_the_share_asked_for_is_mixed() -> None:
    images, targets = mix(*flat(), AugmentConfig(mixup=1.0, mix_share=0.25), 1, 0, SAMPLES)
    alone = targets.diagonal() == 1
    assert 18 <= int(alone.sum()) <= 30
    assert torch.equal(images[alone], flat()[0][alone])


def test_nothing_asked_for_or_nobody_to_mix_with_changes_nothing() -> None:
    assert same(mix(*flat(), AugmentConfig(), 1, 0, SAMPLES), flat())
    alone = (flat()[0][:1], flat()[1][:1])
    assert same(mix(*alone, AugmentConfig(mixup=1.0), 1, 0, SAMPLES[:1]), alone)
