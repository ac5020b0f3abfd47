"""Augmentation changes what it is asked to change, within range, and equally for equal seeds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raypipe.config import validate
from raypipe.errors import ConfigError
from raypipe.images.augment import AugmentConfig, augment

ALL = AugmentConfig(
    flip_horizontal=True,
    flip_vertical=True,
    quarter_turns=True,
    degrees=30,
    zoom=0.3,
    shift=0.2,
    brightness=0.5,
    contrast=0.5,
)


def pictures(count: int = 16, height: int = 12, width: int = 12, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (count, height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a.float() - b.float()).abs().max() < 0.02)


def test_all_zero_changes_nothing() -> None:
    pixels = pictures()
    changed = augment(pixels, AugmentConfig(), 7, 0, 0)
    assert changed.dtype == torch.float32
    assert torch.equal(changed, pixels.float())


def test_the_pixels_given_are_left_alone() -> None:
    pixels = pictures()
    before = pixels.clone()
    augment(pixels, ALL, 1)
    assert torch.equal(pixels, before)


def test_equal_seeds_give_equal_pixels_and_each_part_of_a_seed_counts() -> None:
    pixels = pictures()
    torch.manual_seed(1)
    first = augment(pixels, ALL, 7, 3, 2, 1)
    torch.manual_seed(2)  # the process's own generator must not matter
    assert torch.equal(augment(pixels, ALL, 7, 3, 2, 1), first)
    for other in ((8, 3, 2, 1), (7, 4, 2, 1), (7, 3, 3, 1), (7, 3, 2, 0), (3, 7, 2, 1), (7, 3, 2)):
        assert not torch.equal(augment(pixels, ALL, *other), first), other


def test_drawing_leaves_the_processs_own_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    augment(pictures(), ALL, 1)
    assert torch.equal(torch.rand(3), expected)


@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        AugmentConfig,
        flip_horizontal=st.booleans(),
        flip_vertical=st.booleans(),
        quarter_turns=st.booleans(),
        degrees=st.floats(0, 180),
        zoom=st.floats(0, 0.99),
        shift=st.floats(0, 0.99),
        brightness=st.floats(0, 0.99),
        contrast=st.floats(0, 0.99),
    ),
    st.integers(0, 2**40),
    st.sampled_from([(8, 8), (5, 9)]),
)
def test_pixels_stay_finite_and_between_0_and_255(cfg: AugmentConfig, seed: int, size: tuple[int, int]) -> None:
    pixels = pictures(4, *size)
    changed = augment(pixels, cfg, seed)
    assert changed.shape == pixels.shape
    assert bool(torch.isfinite(changed).all())
    assert changed.min() >= 0 and changed.max() <= 255


@pytest.mark.parametrize(("field", "axis"), [("flip_horizontal", 1), ("flip_vertical", 0)])
def test_a_flip_mirrors_some_images_exactly_and_leaves_the_others(field: str, axis: int) -> None:
    pixels = pictures(64)
    changed = augment(pixels, AugmentConfig(**{field: True}), 3)
    flipped = [same(new, old.flip(axis)) for new, old in zip(changed, pixels, strict=True)]
    kept = [same(new, old) for new, old in zip(changed, pixels, strict=True)]
    assert all(f != k for f, k in zip(flipped, kept, strict=True))
    assert 16 <= sum(flipped) <= 48  # a fair coin leaves this range once in 20,000 draws


def test_quarter_turns_are_exact_and_all_four_happen() -> None:
    pixels = pictures(64)
    changed = augment(pixels, AugmentConfig(quarter_turns=True), 3)
    turns = [[same(new, torch.rot90(old, k)) for k in range(4)] for new, old in zip(changed, pixels, strict=True)]
    assert all(sum(t) == 1 for t in turns)
    assert {t.index(True) for t in turns} == {0, 1, 2, 3}


def test_turning_by_degrees_changes_every_image_a_little() -> None:
    smooth = torch.nn.functional.interpolate(pictures(8, 3, 3).permute(0, 3, 1, 2).float(), size=(32, 32), mode="bilinear")
    pixels = smooth.permute(0, 2, 3, 1).round().to(torch.uint8)
    apart = (augment(pixels, AugmentConfig(degrees=5), 1) - pixels.float()).abs().mean(dim=(1, 2, 3))
    assert bool((apart > 0).all())
    assert apart.max() < 10


def test_brightness_scales_and_contrast_keeps_the_mean() -> None:
    pixels = torch.full((32, 4, 4, 3), 100, dtype=torch.uint8)
    pixels[:, ::2] = 120
    brighter = augment(pixels, AugmentConfig(brightness=0.2), 1)
    factors = (brighter / pixels.float()).amax(dim=(1, 2, 3))
    assert torch.allclose(brighter, pixels.float() * factors.view(-1, 1, 1, 1), atol=1e-3)
    assert factors.min() >= 0.8 and factors.max() <= 1.2 and factors.std() > 0.05
    contrasted = augment(pixels, AugmentConfig(contrast=0.5), 1)
    assert torch.allclose(contrasted.mean(dim=(1, 2, 3)), torch.full((32,), 110.0), atol=1e-3)
    spread = (contrasted.amax(dim=(1, 2, 3)) - contrasted.amin(dim=(1, 2, 3))) / 20
    assert spread.min() >= 0.5 and spread.max() <= 1.5 and spread.std() > 0.1


def test_images_of_one_batch_are_changed_differently() -> None:
    pixels = pictures(1).repeat(8, 1, 1, 1)
    changed = augment(pixels, AugmentConfig(degrees=20, shift=0.2), 1)
    assert len({tuple(image.flatten().tolist()) for image in changed}) == 8


@pytest.mark.parametrize("wrong", [{"degrees": 181}, {"zoom": 1}, {"shift": -0.1}, {"brightness": 2}, {"contrast": "much"}])
def test_settings_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"Config key {next(iter(wrong))} is wrong"):
        validate(AugmentConfig, wrong)
