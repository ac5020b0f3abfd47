"""Each change is the one Pillow makes; each picture draws its own; what is drawn for one does not
touch the others.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from raypipe.images import policy
from raypipe.images.augment import AugmentConfig, augment
from raypipe.images.draws import Draws
from raypipe.images.policy import COLOURS, NAMES, RANDAUGMENT, TRIVIAL, Step

Enhance = Callable[[Image.Image], Image.Image]


def photo() -> Image.Image:
    coarse = np.random.default_rng(3).integers(30, 226, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((48, 40), Image.Resampling.BICUBIC)


def one(name: str, magnitude: float, sign: float = 1.0) -> Step:
    return Step(np.array([NAMES.index(name)]), np.array([magnitude]), np.array([sign]), RANDAUGMENT)


@pytest.mark.parametrize(
    ("name", "magnitude", "sign", "by_pillow"),
    [
        ("brightness", 0.5, -1, lambda i: ImageEnhance.Brightness(i).enhance(0.55)),
        ("brightness", 1.0, 1, lambda i: ImageEnhance.Brightness(i).enhance(1.9)),
        ("contrast", 0.5, 1, lambda i: ImageEnhance.Contrast(i).enhance(1.45)),
        ("saturation", 1.0, -1, lambda i: ImageEnhance.Color(i).enhance(0.1)),
        ("sharpness", 1.0, 1, lambda i: ImageEnhance.Sharpness(i).enhance(1.9)),
        ("sharpness", 1.0, -1, lambda i: ImageEnhance.Sharpness(i).enhance(0.1)),
        ("posterize", 1.0, 1, lambda i: ImageOps.posterize(i, 4)),
        ("solarize", 0.5, 1, lambda i: ImageOps.solarize(i, 128)),
        ("autocontrast", 0.5, 1, ImageOps.autocontrast),
        ("equalize", 0.5, 1, ImageOps.equalize),
    ],
)
def test_colours_change_as_pillow_changes_them(
    name: str, magnitude: float, sign: float, by_pillow: Enhance
) -> None:
    pixels_BHWC = torch.from_numpy(np.array(photo()))[None].float()
    changed = one(name, magnitude, sign).colour(pixels_BHWC)
    apart = (changed[0] - torch.from_numpy(np.array(by_pillow(photo())))).abs()
    assert apart.max() <= 2  # Pillow rounds between its steps
    assert (changed - pixels_BHWC).abs().mean() > 0.5


@pytest.mark.parametrize("name", COLOURS)
@pytest.mark.parametrize("gray", [0, 128, 255])
def test_a_picture_of_one_colour_stays_finite_and_in_range(name: str, gray: int) -> None:
    changed = one(name, 1.0).colour(torch.full((1, 8, 8, 3), float(gray)))
    assert bool(torch.isfinite(changed).all()) and changed.min() >= 0 and changed.max() <= 255


def test_moves_are_of_the_size_and_direction_they_say() -> None:
    assert np.allclose(one("identity", 1).moves(), np.eye(3))
    assert np.allclose(one("shear_x", 1).moves()[0, 0], [1, 0.3, 0])
    assert np.allclose(one("shear_y", 0.5, -1).moves()[0, 1], [-0.15, 1, 0])
    assert np.allclose(one("translate_x", 1).moves()[0, :, 2], [300 / 331, 0, 1])
    assert np.allclose(one("translate_y", 1, -1).moves()[0, :, 2], [0, -300 / 331, 1])
    turned = one("rotate", 1).moves()[0, :2, :2]
    assert np.allclose(turned, [[np.cos(np.pi / 6), -0.5], [0.5, np.cos(np.pi / 6)]])
    for name in COLOURS:
        assert np.allclose(one(name, 1).moves(), np.eye(3))


def test_a_step_changes_each_picture_as_if_it_were_alone() -> None:
    pixels_BHWC = torch.from_numpy(np.array(photo()))[None].float().repeat(len(NAMES), 1, 1, 1)
    many = Step(np.arange(len(NAMES)), np.full(len(NAMES), 0.7), np.ones(len(NAMES)), RANDAUGMENT)
    together = many.colour(pixels_BHWC)
    for i, name in enumerate(NAMES):
        assert torch.allclose(together[i], one(name, 0.7).colour(pixels_BHWC[:1])[0], atol=1e-3), (
            name
        )
    assert torch.equal(together[: len(policy.GEOMETRY)], pixels_BHWC[: len(policy.GEOMETRY)])


def test_every_change_is_drawn_equally_often_and_trivial_at_any_strength() -> None:
    draws = Draws(0, 0, np.arange(14_000))
    (step,) = policy.choose("trivial", 2, 0.3, draws)
    assert np.bincount(step.change_B, minlength=14).min() > 850
    assert (
        step.ranges == TRIVIAL and step.magnitude_B.min() < 0.01 and step.magnitude_B.max() > 0.99
    )
    steps = policy.choose("randaugment", 3, 0.3, draws)
    assert len(steps) == 3 and all(
        (s.magnitude_B == 0.3).all() and s.ranges == RANDAUGMENT for s in steps
    )
    assert abs(np.mean(steps[0].change_B == steps[1].change_B) - 1 / 14) < 0.02
    assert policy.choose("none", 2, 0.3, draws) == []


@pytest.mark.parametrize("name", ["randaugment", "trivial"])
def test_whole_policies_keep_the_range_and_change_most_pictures(name: str) -> None:
    pixels: Tensor = torch.from_numpy(np.array(photo()))[None].repeat(200, 1, 1, 1)
    changed = augment(pixels, AugmentConfig(policy=name), 1, 0, np.arange(200))
    assert changed.min() >= 0 and changed.max() <= 255 and bool(torch.isfinite(changed).all())
    apart = (changed - pixels.float()).abs().mean(dim=(1, 2, 3))
    assert (apart > 0.5).float().mean() > 0.6
    assert (apart == 0).any()  # identity is a change too
