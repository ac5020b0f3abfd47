"""The fast decoder gives Pillow's pixels or none: what it declines, and only that, costs time and
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from raypipe.images import decode as room
from raypipe.images import jpeg
from tests.images.hostile import encode, scan_bomb

Draw = Callable[..., bytes]
WAYS: list[dict[str, object]] = [
    {},
    {"quality": 100, "subsampling": 0},
    {"subsampling": 1},
    {"progressive": True},
    {"restart_marker_rows": 1},
    {"quality": 5, "optimize": True},
]


def by_pillow(data: bytes) -> np.ndarray:
    return room._load(room.open_image(data))


def photo(mode: str = "RGB", width: int = 161, height: int = 122) -> Image.Image:
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8))
    return image.resize((width, height), Image.Resampling.BICUBIC).convert(mode)


@pytest.mark.parametrize("how", WAYS, ids=str)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_pixels_are_pillows_to_the_last_bit(mode: str, how: dict[str, object]) -> None:
    data = encode(photo(mode), "JPEG", **how)
    plain = jpeg.decode(data, 10**6)
    assert plain is not None and plain[1:] == (161, 122, mode, False)
    np.testing.assert_array_equal(plain.pixels, by_pillow(data))


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_whatever_is_cut_off_is_declined(how: dict[str, object]) -> None:
    data = encode(photo(), "JPEG", **how)
    for length in [*range(0, len(data), 37), len(data) - 2, len(data) - 1]:
        assert jpeg.decode(data[:length], 10**6) is None, length


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_whatever_is_damaged_is_declined_or_is_what_pillow_sees(how: dict[str, object]) -> None:
    data, rng, taken = encode(photo(), "JPEG", **how), np.random.default_rng(1), 0
    for at in rng.integers(0, len(data), 200):
        damaged = bytearray(data)
        damaged[at] ^= int(rng.integers(1, 256))
        plain = jpeg.decode(bytes(damaged), 10**6)
        if plain is not None:
            taken += 1
            np.testing.assert_array_equal(plain.pixels, by_pillow(bytes(damaged)))
    assert taken > 20  # most flips are in coded pixels, and decode


@pytest.mark.parametrize(
    ("least", "scale"), [(None, 1), (91, 1), (90, 2), (46, 2), (45, 4), (22, 8), (1, 8)]
)
def test_the_scale_is_the_smallest_that_leaves_enough_and_pillow_agrees(
    least: int | None, scale: int
) -> None:
    data = encode(photo(width=241, height=181), "JPEG", quality=95)
    plain = jpeg.decode(data, 10**6, least)
    assert plain is not None and plain.pixels.shape == (-(-181 // scale), -(-241 // scale), 3)
    image = room.open_image(data)
    if least:
        image.draft(None, (least, least))
    np.testing.assert_array_equal(plain.pixels, np.asarray(image))


def test_what_is_not_plain_is_declined() -> None:
    assert jpeg.decode(encode(photo("CMYK"), "JPEG"), 10**6) is None
    assert jpeg.decode(encode(photo(), "JPEG", keep_rgb=True), 10**6) is None
    assert jpeg.decode(encode(photo(), "JPEG"), 161 * 122 - 1) is None
    for data in (
        b"",
        b"\xff\xd8",
        b"\xff\xd8\xff",
        bytes(10**6),
        b"\xff\xd8" + b"\xff" * 10**6,
        encode(photo(), "PNG"),
    ):
        assert jpeg.decode(data, 10**6) is None


def test_metadata_are_noticed_wherever_they_stand() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    for how in ({"exif": exif}, {"xmp": b"<x/>"}, {"exif": exif, "icc_profile": bytes(200_000)}):
        plain = jpeg.decode(encode(photo(), "JPEG", **how), 10**6)
        assert plain is not None and plain.tagged


def test_a_file_of_a_thousand_scans_is_refused_before_any_is_decoded() -> None:
    # The film of a motion photo lies behind the picture, and has such bytes by chance.
    for exif in (b"", Image.Exif().tobytes()):
        film = encode(Image.new("RGB", (64, 48)), "JPEG", exif=exif) + jpeg.SCAN * 200
        assert room.decode(film).shape == (48, 64, 3)
        film = encode(photo(), "JPEG", exif=exif, progressive=True) + jpeg.SCAN * 200
        assert jpeg.scans(film) < 20 and room.decode(film).shape == (122, 161, 3)
    data = scan_bomb(512, jpeg.MAX_SCANS)
    second = data.index(jpeg.SCAN, data.index(jpeg.SCAN) + 2)
    # An end that is the text of a comment, and one that is none, hide no scan.
    for hidden in (b"", b"\xff\xfe\0\4\xff\xd9", b"\xff\1\xff\xff\xfe\0\2", b"\xff\xd0"):
        bomb = data[:second] + hidden + data[second:]
        assert jpeg.decode(bomb, 10**6) is None
        with pytest.raises(room.BadImage, match=r"too_many_scans: \d+ scans of 512x512"):
            room.decode(bomb)
    assert room.decode(scan_bomb(64, 50)).shape == (64, 64, 3)


def test_one_scan_of_all_components_is_told_from_many() -> None:
    """Counting scans reads the whole file, so baseline files must not need it."""
    header = jpeg._header(encode(photo(), "JPEG"))
    assert header is not None and header.one_scan
    header = jpeg._header(encode(photo("L"), "JPEG"))
    assert header is not None and header.one_scan
    header = jpeg._header(encode(photo(), "JPEG", progressive=True))
    assert header is not None and not header.one_scan
