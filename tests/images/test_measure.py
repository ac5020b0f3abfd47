"""Hashes of one picture stay together through re-encoding and resizing; hashes of different
pictures lie far apart.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFilter

from raypipe.images.decode import inspect
from raypipe.images.measure import BITS, difference_hash, hamming, statistics

Draw = Callable[..., bytes]
HASHES = st.binary(min_size=32, max_size=32)


def look(data: bytes) -> np.ndarray:
    return np.frombuffer(difference_hash(inspect(data)[1]), np.uint8)


def saved(data: bytes, side_px: int, kind: str, **how: object) -> bytes:
    out = io.BytesIO()
    Image.open(io.BytesIO(data)).resize((side_px, side_px), Image.Resampling.LANCZOS).save(
        out, kind, **how
    )
    return out.getvalue()


def test_a_hash_has_256_bits_whatever_the_size() -> None:
    for shape in ((1, 1), (16, 17), (300, 7)):
        assert len(difference_hash(np.zeros(shape, np.uint8))) * 8 == BITS


def test_bits_say_where_it_gets_brighter_to_the_right() -> None:
    rising = np.tile(np.arange(17, dtype=np.uint8) * 10, (16, 1))
    assert difference_hash(rising) == b"\xff" * 32
    assert difference_hash(rising[:, ::-1]) == b"\x00" * 32
    assert difference_hash(np.full((40, 40), 90, np.uint8)) == b"\x00" * 32


def test_the_same_pixels_in_another_file_have_the_same_hash(textured: Draw) -> None:
    png = textured(1, 128)
    assert hamming(look(png), look(saved(png, 128, "PNG", compress_level=1))) == 0


@pytest.mark.parametrize("seed", range(8))
def test_re_saving_flips_few_bits_and_another_picture_flips_many(seed: int, textured: Draw) -> None:
    png = textured(seed, 160)
    assert hamming(look(png), look(saved(png, 160, "JPEG", quality=85))) <= 24
    assert hamming(look(png), look(saved(png, 120, "PNG"))) <= 40
    others = np.stack([look(textured(other, 160)) for other in range(100, 130)])
    assert hamming(look(png), others).min() > 60


@given(st.lists(HASHES, min_size=1, max_size=6), HASHES)
def test_hamming_is_a_distance(many: list[bytes], one: bytes) -> None:
    a, rest = np.frombuffer(one, np.uint8), np.stack([np.frombuffer(m, np.uint8) for m in many])
    apart = hamming(a, rest)
    assert apart.tolist() == [
        (int.from_bytes(one, "big") ^ int.from_bytes(m, "big")).bit_count() for m in many
    ]
    assert hamming(a, a) == 0
    assert hamming(a, ~a) == BITS
    assert all(hamming(r, a) == d for r, d in zip(rest, apart, strict=True))


def test_statistics_follow_what_they_are_named_after() -> None:
    rng = np.random.default_rng(1)
    noise_HWC = rng.integers(0, 256, (64, 64, 3)).astype(np.uint8)
    dark, flat = noise_HWC // 4, np.full_like(noise_HWC, 128)
    blurred = np.asarray(Image.fromarray(noise_HWC).filter(ImageFilter.GaussianBlur(3)))
    found = statistics(np.stack([noise_HWC, dark, flat, blurred]))
    brightness, contrast, sharpness = found.values()
    assert brightness[0] == pytest.approx(0.5, abs=0.02) and brightness[1] < 0.13
    assert brightness[2] == pytest.approx(128 / 255, abs=1e-4)
    assert contrast[2] < 1e-4 < contrast[1] < contrast[0]
    assert sharpness[2] < 1e-4 and sharpness[3] < sharpness[0] / 5
    assert statistics(np.zeros((0, 8, 8, 3), np.uint8))["contrast"].shape == (0,)
    assert statistics(np.zeros((1, 1, 5, 3), np.uint8))["sharpness"].tolist() == [0.0]
