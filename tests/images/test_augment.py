"""Augmentation changes what it is asked to change, within range, and each sample in its own way
wherever it stands.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raypipe.config import validate
from raypipe.errors import ConfigError
from raypipe.images.augment import AugmentConfig, augment
from raypipe.images.draws import Draws

ALL = AugmentConfig(
    flip_horizontal=True,
    flip_vertical=True,
    quarter_turns=True,
    degrees=30,
    zoom=0.3,
    shift=0.2,
    brightness=0.5,
    contrast=0.5,
    saturation=0.5,
    hue=0.2,
    crop_area=0.4,
    erase=0.5,
    policy="trivial",
)


def pictures(count: int = 16, height: int = 12, width: int = 12, seed: int = 0) -> Tensor:
    return torch.randint(
        0,
        256,
        (count, height, width, 3),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )


def after(pixels: Tensor, cfg: AugmentConfig, seed: int = 1, epoch: int = 0) -> Tensor:
    return augment(pixels, cfg, seed, epoch, np.arange(len(pixels)))


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a.float() - b.float()).abs().max() < 0.02)


def test_all_zero_changes_nothing() -> None:
    pixels = pictures()
    changed = after(pixels, AugmentConfig(), 7)
    assert changed.dtype == torch.float32
    assert torch.equal(changed, pixels.float())


def test_the_pixels_given_are_left_alone() -> None:
    pixels = pictures()
    before = pixels.clone()
    after(pixels, ALL, 1)
    assert torch.equal(pixels, before)


def test_equal_seeds_give_equal_pixels_and_each_part_of_a_seed_counts() -> None:
    pixels, samples = pictures(), np.arange(16)
    torch.manual_seed(1)
    first = augment(pixels, ALL, 7, 3, samples)
    torch.manual_seed(2)  # the process's own generator must not matter
    assert torch.equal(augment(pixels, ALL, 7, 3, torch.from_numpy(samples)), first)
    for seed, epoch, others in (
        (8, 3, samples),
        (7, 4, samples),
        (3, 7, samples),
        (7, 3, samples + 16),
    ):
        assert not torch.equal(augment(pixels, ALL, seed, epoch, others), first), (seed, epoch)


@pytest.mark.parametrize("policy", ["none", "randaugment", "trivial"])
def test_a_sample_looks_the_same_whatever_batch_it_is_in(policy: str) -> None:
    cfg, pixels, samples = (
        ALL.model_copy(update={"policy": policy}),
        pictures(24, seed=1),
        np.arange(100, 124),
    )
    whole = augment(pixels, cfg, 7, 3, samples)
    order = np.random.default_rng(0).permutation(24)
    parts = [
        augment(pixels[part], cfg, 7, 3, samples[part]) for part in np.split(order, [1, 6, 16])
    ]
    assert torch.allclose(torch.cat(parts), whole[order], atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_pixels_are_the_same_on_a_gpu() -> None:
    pixels = pictures(64, 32, 32)
    apart = (after(pixels.cuda(), ALL).cpu() - after(pixels, ALL)).abs()
    assert (
        apart < 0.5
    ).float().mean() > 0.999  # a change with steps (posterize) may round the other way


def test_drawing_leaves_the_processs_own_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    after(pictures(), ALL, 1)
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
        contrast=st.floats(0, 1),
        saturation=st.floats(0, 1),
        hue=st.floats(0, 0.5),
        crop_area=st.floats(0.01, 1),
        crop_aspect=st.floats(1, 4),
        policy=st.sampled_from(["none", "randaugment", "trivial"]),
        policy_magnitude=st.floats(0, 1),
        erase=st.floats(0, 1),
        erase_area=st.floats(0.03, 0.9),
    ),
    st.integers(0, 2**40),
    st.sampled_from([(8, 8), (5, 9)]),
)
def test_pixels_stay_finite_and_between_0_and_255(
    cfg: AugmentConfig, seed: int, size: tuple[int, int]
) -> None:
    pixels = pictures(4, *size)
    changed = after(pixels, cfg, seed)
    assert changed.shape == pixels.shape
    assert bool(torch.isfinite(changed).all())
    assert changed.min() >= 0 and changed.max() <= 255


@pytest.mark.parametrize(("field", "axis"), [("flip_horizontal", 1), ("flip_vertical", 0)])
def test_a_flip_mirrors_some_images_exactly_and_leaves_the_others(field: str, axis: int) -> None:
    pixels = pictures(64)
    changed = after(pixels, AugmentConfig(**{field: True}), 3)
    flipped = [same(new, old.flip(axis)) for new, old in zip(changed, pixels, strict=True)]
    kept = [same(new, old) for new, old in zip(changed, pixels, strict=True)]
    assert all(f != k for f, k in zip(flipped, kept, strict=True))
    assert 16 <= sum(flipped) <= 48  # a fair coin leaves this range once in 20,000 draws


def test_quarter_turns_are_exact_and_all_four_happen() -> None:
    pixels = pictures(64)
    changed = after(pixels, AugmentConfig(quarter_turns=True), 3)
    turns = [
        [same(new, torch.rot90(old, k)) for k in range(4)]
        for new, old in zip(changed, pixels, strict=True)
    ]
    assert all(sum(t) == 1 for t in turns)
    assert {t.index(True) for t in turns} == {0, 1, 2, 3}


def test_turning_by_degrees_changes_every_image_a_little() -> None:
    smooth = torch.nn.functional.interpolate(
        pictures(8, 3, 3).permute(0, 3, 1, 2).float(), size=(32, 32), mode="bilinear"
    )
    pixels = smooth.permute(0, 2, 3, 1).round().to(torch.uint8)
    apart = (after(pixels, AugmentConfig(degrees=5), 1) - pixels.float()).abs().mean(dim=(1, 2, 3))
    assert bool((apart > 0).all())
    assert apart.max() < 10


def test_brightness_scales_and_contrast_keeps_the_mean() -> None:
    pixels = torch.full((32, 4, 4, 3), 100, dtype=torch.uint8)
    pixels[:, ::2] = 120
    brighter = after(pixels, AugmentConfig(brightness=0.2), 1)
    factors = (brighter / pixels.float()).amax(dim=(1, 2, 3))
    assert torch.allclose(brighter, pixels.float() * factors.view(-1, 1, 1, 1), atol=1e-3)
    assert factors.min() >= 0.8 and factors.max() <= 1.2 and factors.std() > 0.05
    contrasted = after(pixels, AugmentConfig(contrast=0.5), 1)
    assert torch.allclose(contrasted.mean(dim=(1, 2, 3)), torch.full((32,), 110.0), atol=1e-3)
    spread = (contrasted.amax(dim=(1, 2, 3)) - contrasted.amin(dim=(1, 2, 3))) / 20
    assert spread.min() >= 0.5 and spread.max() <= 1.5 and spread.std() > 0.1


def test_a_crop_keeps_at_least_its_area_and_stays_inside() -> None:
    """Pixels that hold their own place tell where they came from."""
    at = torch.arange(64, dtype=torch.uint8) * 3
    pixels = torch.stack(
        torch.broadcast_tensors(at[None, :], at[:, None], torch.zeros((), dtype=torch.uint8)),
        dim=-1,
    )
    cropped = after(pixels.repeat(200, 1, 1, 1), AugmentConfig(crop_area=0.25, crop_aspect=2))
    width, height = ((cropped[:, -1, -1, i] - cropped[:, 0, 0, i]) / (63 * 3) for i in (0, 1))
    area, aspect = width * height, width / height
    assert area.min() > 0.2 and area.max() <= 1.001 and area.std() > 0.1
    assert aspect.min() >= 0.49 and aspect.max() <= 2.04 and aspect.log().std() > 0.2
    assert cropped.min() >= 0 and cropped.max() <= 63 * 3
    assert (
        cropped[:, 0, 0, 0].min() < 6 and cropped[:, -1, -1, 0].max() > 61 * 3
    )  # both edges are reached


def test_a_shift_moves_by_at_most_its_share_of_the_side() -> None:
    at = (torch.arange(100, dtype=torch.float32) * 2).to(torch.uint8)
    pixels = at.view(1, 1, -1, 1).repeat(100, 100, 1, 3)
    moved = after(pixels, AugmentConfig(shift=0.2))[:, 50, 50, 0] / 2 - 50
    assert moved.abs().max() <= 20.01 and moved.min() < -15 and moved.max() > 15


def test_hue_and_saturation_leave_gray_and_brightness_alone() -> None:
    gray = torch.randint(0, 256, (16, 8, 8, 1), dtype=torch.uint8).repeat(1, 1, 1, 3)
    cfg = AugmentConfig(hue=0.5, saturation=1)
    assert torch.allclose(after(gray, cfg), gray.float(), atol=0.05)
    soft = (pictures(32).float() / 8 + 112).to(torch.uint8)  # nothing is clipped
    luma = torch.tensor([0.299, 0.587, 0.114])
    assert torch.allclose(after(soft, cfg) @ luma, soft.float() @ luma, atol=0.05)
    assert (after(soft, cfg) - soft.float()).abs().mean() > 5


def test_the_order_of_brightness_contrast_and_colour_is_that_of_pillow_applied_one_by_one() -> None:
    """One matrix for all is an economy, not another result."""
    pixels = (pictures(8).float() / 4 + 96).to(torch.uint8)
    draws, luma = Draws(1, 0, np.arange(8)), torch.tensor([0.299, 0.587, 0.114])
    brightness, contrast, saturation = (
        torch.from_numpy(1 + draws.uniform(name, -0.3, 0.3)).float().view(-1, 1, 1, 1)
        for name in ("brightness", "contrast", "saturation")
    )
    expected = pixels * brightness
    mean = (expected @ luma).mean(dim=(1, 2)).view(-1, 1, 1, 1)
    expected = mean + (expected - mean) * contrast
    gray = (expected @ luma).unsqueeze(-1)
    expected = gray + (expected - gray) * saturation
    assert torch.allclose(
        after(pixels, AugmentConfig(brightness=0.3, contrast=0.3, saturation=0.3)),
        expected,
        atol=0.01,
    )


def test_erasing_takes_one_rectangle_of_the_area_asked_for_from_the_share_asked_for() -> None:
    pixels = pictures(400, 32, 32)
    gone = (after(pixels, AugmentConfig(erase=0.5, erase_area=0.4)) != pixels.float()).any(dim=-1)
    area = gone.float().mean(dim=(1, 2))
    erased = area > 0
    assert 160 <= int(erased.sum()) <= 240
    assert area[erased].max() <= 0.45 and area[erased].mean() > 0.15
    rows, columns = gone.any(dim=2).sum(dim=1), gone.any(dim=1).sum(dim=1)
    assert torch.equal(rows * columns, gone.sum(dim=(1, 2)))  # a whole rectangle, nothing else


def test_images_of_one_batch_are_changed_differently() -> None:
    pixels = pictures(1).repeat(8, 1, 1, 1)
    changed = after(pixels, AugmentConfig(degrees=20, shift=0.2), 1)
    assert len({tuple(image.flatten().tolist()) for image in changed}) == 8


@pytest.mark.parametrize(
    "wrong",
    [
        {"degrees": 181},
        {"zoom": 1},
        {"shift": -0.1},
        {"brightness": 2},
        {"contrast": "much"},
        {"crop_area": 0},
        {"hue": 0.6},
        {"policy": "auto"},
        {"erase": 2},
        {"erase_area": 0.01},
        {"mixup": -1},
        {"mix_share": 1.5},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"Config key {next(iter(wrong))} is wrong"):
        validate(AugmentConfig, wrong)
