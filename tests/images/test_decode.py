"""Whatever the encoding, decode gives uint8 RGB of the right picture; whatever the damage, it
gives one named reason.
"""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from raypipe.images.decode import (
    BadImage,
    Format,
    decode,
    decode_batch,
    decode_into,
    encode_png,
    inspect,
    open_image,
)
from raypipe.images.shrink import stored
from raypipe.images.smaller import Shape, prepared
from tests.images.hostile import encode, png_bomb

Draw = Callable[..., bytes]


def corners(width: int = 24, height: int = 16) -> Image.Image:
    """Red, green, blue and white quarters: top left, top right, bottom left, bottom right."""
    image = Image.new("RGB", (width, height), "red")
    image.paste((0, 255, 0), (width // 2, 0, width, height))
    image.paste((0, 0, 255), (0, height // 2, width, height))
    image.paste("white", (width // 2, height // 2, width, height))
    return image


def close(a: np.ndarray, b: np.ndarray, by: float = 6.0) -> bool:
    return a.shape == b.shape and float(np.abs(a.astype(int) - b.astype(int)).mean()) < by


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_lossless_pixels_come_back_exactly(kind: str) -> None:
    pixels_HWC = decode(encode(corners(), kind, lossless=True))
    assert (pixels_HWC.dtype, pixels_HWC.shape) == (np.uint8, (16, 24, 3))
    np.testing.assert_array_equal(pixels_HWC, np.asarray(corners()))
    np.testing.assert_array_equal(decode(encode_png(pixels_HWC)), pixels_HWC)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_gray_is_spread_over_three_equal_channels(kind: str) -> None:
    ramp = np.tile(np.arange(0, 256, 4, dtype=np.uint8), (16, 1))
    pixels_HWC = decode(encode(Image.fromarray(ramp), kind))
    assert (pixels_HWC == pixels_HWC[..., :1]).all()
    assert close(pixels_HWC[..., 0], ramp, 2)


def test_what_alpha_hides_is_white_whatever_colour_lies_under_it() -> None:
    rgba = np.zeros((4, 4, 4), np.uint8)
    rgba[..., 0], rgba[:2, :, 3], rgba[2:, :, 3] = 200, 255, 0
    pixels_HWC = decode(encode(Image.fromarray(rgba)))
    assert (pixels_HWC[:2] == [200, 0, 0]).all()
    assert (pixels_HWC[2:] == 255).all()


def test_gray_with_alpha_and_palettes_with_transparency_are_laid_on_white() -> None:
    gray_alpha = np.array([[[10, 255], [10, 0]]], np.uint8)
    np.testing.assert_array_equal(
        decode(encode(Image.fromarray(gray_alpha, "LA"))), [[[10] * 3, [255] * 3]]
    )
    palette = Image.new("P", (2, 1))
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.putdata([0, 1])
    np.testing.assert_array_equal(decode(encode(palette)), [[[255, 0, 0], [0, 0, 255]]])
    np.testing.assert_array_equal(
        decode(encode(palette, transparency=1)), [[[255, 0, 0], [255, 255, 255]]]
    )


def test_a_cmyk_jpeg_keeps_its_colours() -> None:
    pixels_HWC = decode(encode(corners().convert("CMYK"), "JPEG", quality=95, subsampling=0))
    assert close(pixels_HWC, np.asarray(corners()))


def test_sixteen_bits_keep_the_high_byte_and_do_not_saturate() -> None:
    ramp = np.linspace(0, 65535, 256).astype(np.uint16).reshape(1, -1)
    pixels_HWC = decode(encode(Image.fromarray(ramp)))
    assert close(pixels_HWC[..., 0], np.arange(256).reshape(1, -1), 1)
    assert (pixels_HWC[0, 0, 0], pixels_HWC[0, -1, 0]) == (0, 255)


def test_sixteen_bit_colour_keeps_the_high_byte_too() -> None:
    row = np.array([[0x12FF, 0xFF00, 0x00FF]], ">u2").tobytes()
    header = struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0" + row)), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks
    )
    np.testing.assert_array_equal(decode(b"\x89PNG\r\n\x1a\n" + body), [[[0x12, 0xFF, 0x00]]])


def test_samples_without_a_range_are_refused_not_guessed() -> None:
    data = encode(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF")
    with pytest.raises(BadImage, match=r"unsupported: 32-bit samples have no range"):
        decode(data, formats=("TIFF",))


def test_of_moving_pictures_and_phones_series_the_first_one_counts() -> None:
    series = [corners(64, 48), Image.new("RGB", (64, 48), "black")]
    for kind in ("PNG", "WEBP", "MPO"):
        out = io.BytesIO()
        series[0].save(out, kind, save_all=True, append_images=series[1:])
        assert close(decode(out.getvalue()), np.asarray(series[0])), kind
        assert inspect(out.getvalue())[0].format == kind.replace("MPO", "JPEG")


@pytest.mark.parametrize("kind", ["TIFF", "JPEG"])
def test_a_picture_on_its_side_is_stored_upright_and_whole(kind: Format) -> None:
    """Pillow gives a TIFF's size upright, and a JPEG's as it is stored."""
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(Image.new("L", (40, 30)), kind, exif=exif)
    info, pixels = inspect(data, formats=(kind,))
    assert pixels.shape[:2] == (40, 30)
    copy, said = stored(data, info, 20, 90, formats=(kind,))
    assert (said.width, said.height) == (15, 20) == Image.open(io.BytesIO(copy)).size


@pytest.mark.parametrize("kind", ["TIFF", "BMP"])
def test_more_formats_on_request(kind: Format) -> None:
    data = encode(corners(), kind)
    np.testing.assert_array_equal(decode(data, formats=(kind,)), np.asarray(corners()))
    assert inspect(data, formats=("PNG", kind))[0].format == kind
    with pytest.raises(BadImage, match=f"no {kind} header"):
        decode(encode(corners(), "JPEG"), formats=(kind,))


def test_one_bit_images_are_black_and_white() -> None:
    bits = np.array([[0, 255, 255, 0]], np.uint8)
    np.testing.assert_array_equal(decode(encode(Image.fromarray(bits).convert("1")))[..., 0], bits)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_exif_orientation_is_applied_so_that_the_eye_and_the_model_see_the_same(
    kind: str, orientation: int
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,  # stored a quarter turn to the left, shown to the right
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = (
        corners(96, 64).transpose(undo[orientation]) if orientation in undo else corners(96, 64)
    )
    assert close(decode(encode(stored, kind, exif=exif)), np.asarray(corners(96, 64)))


def test_orientation_in_xmp_counts_too_and_metadata_that_cannot_be_read_do_not() -> None:
    turned = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf tiff:Orientation="3"/></x:xmpmeta>'
    assert close(
        decode(encode(corners(96, 64), "JPEG", xmp=turned)), np.asarray(corners(96, 64))[::-1, ::-1]
    )
    assert close(
        decode(encode(corners(96, 64), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")),
        np.asarray(corners(96, 64)),
    )


@pytest.mark.parametrize("size", [(1, 40), (40, 1), (1, 1), (1, 300)], ids=str)
@pytest.mark.parametrize("orientation", range(0, 10))
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_picture_of_one_row_or_column_can_be_turned(
    kind: str, orientation: int, size: tuple[int, int]
) -> None:
    """Strides that torch refuses are left behind on an axis of one pixel, if one asks only for
    contiguous memory.
    """
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(Image.new("RGB", size, (90, 120, 200)), kind, exif=exif)
    for side_px in (None, 16, 1):
        pixels_HWC = decode(data, side_px)
        assert min(pixels_HWC.strides) > 0 and torch.from_numpy(pixels_HWC).sum() > 0
    assert decode(data).shape[:2] == (size if orientation in (5, 6, 7, 8) else size[::-1])
    info, _ = inspect(data)
    kept, small = stored(data, info, 16, 90)
    assert max(small.width, small.height) <= 16 and min(decode(kept).shape[:2]) == 1


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize(
    "exif",
    [b"Exif\0\0MM\0*\xff\xff\xff\xff", b"Exif\0\0II", b"Exif\0\0" + b"\xff" * 40, b"nonsense"],
)
def test_metadata_that_cannot_be_read_do_not_stop_a_picture_from_being_made_smaller(
    kind: str, exif: bytes
) -> None:
    data = encode(corners(96, 64), kind, exif=exif)
    info, _ = inspect(data)
    kept, small = stored(data, info, 48, 90)
    assert (small.width, small.height) == (48, 32)
    assert close(decode(kept), np.asarray(corners(48, 32)), 12)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_the_hash_sees_a_picture_upright(kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    info, gray_HW = inspect(
        encode(corners(96, 64).transpose(Image.Transpose.ROTATE_90), kind, exif=exif)
    )
    assert (info.width, info.height) == (64, 96)  # as stored
    assert close(gray_HW, np.asarray(corners(96, 64).convert("L")))


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.95])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_truncated_image_is_broken_even_where_only_its_last_rows_are_missing(
    kind: str, keep: float, textured: Draw
) -> None:
    data = textured(3, kind=kind)
    assert inspect(data)[0].format == kind
    for read in (inspect, decode):
        with pytest.raises(BadImage, match=r"broken|not_an_image") as caught:
            read(data[: int(len(data) * keep)])
        assert caught.value.reason in ("broken", "not_an_image")


def test_a_truncated_jpeg_keeps_its_header_and_is_called_broken(textured: Draw) -> None:
    data = textured(3, kind="JPEG")
    with pytest.raises(BadImage, match=r"broken: JPEG header, but the pixels do not decode"):
        decode(data[: len(data) // 2], side_px=16)


@pytest.mark.parametrize(
    ("data", "reason", "says"),
    [
        (b"", "empty", "0 bytes"),
        (b"These are only words.\n" * 40, "not_an_image", "no JPEG/PNG/WEBP header in 880 bytes"),
        (encode(corners(), "GIF"), "not_an_image", "no JPEG/PNG/WEBP header"),
        (encode(corners(), "TIFF"), "not_an_image", "no JPEG/PNG/WEBP header"),
        (encode(corners(), "BMP"), "not_an_image", "no JPEG/PNG/WEBP header"),
        (
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
            "not_an_image",
            "no JPEG/PNG/WEBP header",
        ),
        (b"\xff\xd8\xff\xe0", "not_an_image", "4 bytes"),
        (b"\x89PNG\r\n\x1a\n", "not_an_image", "8 bytes"),
    ],
    ids=[
        "empty",
        "text renamed .jpg",
        "gif",
        "tiff",
        "bmp",
        "postscript",
        "jpeg marker alone",
        "png signature alone",
    ],
)
def test_bytes_that_are_no_accepted_image_say_why(data: bytes, reason: str, says: str) -> None:
    with pytest.raises(BadImage, match=says) as caught:
        decode(data)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "side_px", [8_192, 16_384], ids=["over our limit", "over Pillow's limit too"]
)
def test_a_small_file_of_many_pixels_is_refused_before_anything_is_allocated(side_px: int) -> None:
    data = png_bomb(side_px)
    assert len(data) < 64_000
    tracemalloc.start()
    with pytest.raises(BadImage, match=r"too_large: .*pixels"):
        decode(data)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_the_pixel_limit_is_inclusive_and_can_be_set() -> None:
    data = encode(corners(24, 16))
    assert decode(data, max_pixels=24 * 16).shape == (16, 24, 3)
    with pytest.raises(BadImage, match=r"too_large: 24x16 is over 383 pixels"):
        decode(data, max_pixels=24 * 16 - 1)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("side_px", [16, 60, 300])
def test_the_side_asked_for_comes_back_squeezed_not_cut(kind: str, side_px: int) -> None:
    pixels_HWC = decode(encode(corners(400, 200), kind), side_px)
    assert pixels_HWC.shape == (side_px, side_px, 3)
    assert close(pixels_HWC, np.asarray(corners(side_px, side_px)), 8)


def test_inspect_tells_format_size_and_mode_as_stored_and_gives_gray_pixels() -> None:
    info, gray_HW = inspect(encode(corners().convert("LA"), "PNG"))
    assert (info.format, info.width, info.height, info.mode) == ("PNG", 24, 16, "LA")
    assert (gray_HW.dtype, gray_HW.shape) == (np.uint8, (16, 24))


def test_opening_decodes_nothing_yet() -> None:
    data = encode(corners(), "PNG")
    assert open_image(data[:60]).size == (24, 16)


@pytest.mark.parametrize(
    "wrap",
    [bytes, bytearray, memoryview, pa.py_buffer],
    ids=["bytes", "bytearray", "view", "arrow"],
)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_any_buffer_decodes_into_its_slot_and_no_further(
    kind: str, wrap: Callable[[bytes], memoryview], textured: Draw
) -> None:
    data, batch_BHWC = textured(5, 80, kind=kind), np.full((3, 48, 48, 3), 7, np.uint8)
    decode_into(wrap(data), batch_BHWC[1])
    np.testing.assert_array_equal(batch_BHWC[1], decode(data, 48))
    assert (batch_BHWC[[0, 2]] == 7).all()
    assert inspect(wrap(data))[0] == inspect(data)[0]


def test_a_bad_image_leaves_its_slot_as_it_was(textured: Draw) -> None:
    slot_HWC = np.full((16, 16, 3), 7, np.uint8)
    for bad in (b"", b"words", textured(1, kind="JPEG")[:900]):
        with pytest.raises(BadImage, match=r"empty|not_an_image|broken"):
            decode_into(memoryview(bad), slot_HWC)
    assert (slot_HWC == 7).all()


@pytest.mark.parametrize(
    ("width", "height"), [(500, 375), (223, 91), (31, 700), (2000, 3), (1, 1), (224, 224)]
)
def test_sizes_change_as_pillows_antialiased_bilinear_changes_them(width: int, height: int) -> None:
    pixels_HWC = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    by_pillow = Image.fromarray(pixels_HWC).resize((224, 224), Image.Resampling.BILINEAR)
    apart = np.abs(decode(encode_png(pixels_HWC), 224).astype(int) - np.asarray(by_pillow))
    assert apart.max() <= 1  # none on x86


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_a_batch_is_its_images_in_order_whatever_the_threads(threads: int, textured: Draw) -> None:
    encoded = [textured(seed, kind=("PNG", "JPEG", "WEBP")[seed % 3]) for seed in range(7)]
    batch_BHWC = decode_batch(encoded, 40, threads)
    assert (batch_BHWC.dtype, batch_BHWC.shape) == (np.uint8, (7, 40, 40, 3))
    np.testing.assert_array_equal(batch_BHWC, np.stack([decode(data, 40) for data in encoded]))
    assert decode_batch([], 40, threads).shape == (0, 40, 40, 3)


@pytest.mark.parametrize("bad", [b"", None, b"words"])
def test_a_batch_with_a_bad_image_says_what_to_do(bad: bytes | None, textured: Draw) -> None:
    with pytest.raises(BadImage, match=r"empty|missing|not_an_image") as caught:
        decode_batch([textured(0), bad], 16)
    assert "raypipe clean" in str(caught.value)
    assert caught.value.exit_code == 2


def png(depth: int, kind: int, row: bytes, key: tuple[int, ...], width: int) -> bytes:
    """One row of a PNG in which the colour `key` is transparent."""
    header = struct.pack(">IIBBBBB", width, 1, depth, kind, 0, 0, 0)
    chunks = [
        (b"IHDR", header),
        (b"tRNS", struct.pack(f">{len(key)}H", *key)),
        (b"IDAT", zlib.compress(b"\0" + row)),
        (b"IEND", b""),
    ]
    body = b"".join(
        struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (png(8, 2, bytes([10, 20, 30, 40, 50, 60]), (10, 20, 30), 2), [[255] * 3, [40, 50, 60]]),
        (png(2, 0, bytes([0b00011011]), (1,), 4), [[0] * 3, [255] * 3, [170] * 3, [255] * 3]),
        (png(4, 0, bytes([0x3F]), (3,), 2), [[255] * 3, [255] * 3]),
        (png(8, 0, bytes([3, 200]), (3,), 2), [[255] * 3, [200] * 3]),
        (png(16, 0, struct.pack(">2H", 300, 600), (300,), 2), [[255] * 3, [2] * 3]),
        # Pillow keeps eight of sixteen bits: other colours would be taken for the transparent one.
        (png(16, 2, struct.pack(">3H", 0, 1, 2), (0, 0, 0), 1), [[0] * 3]),
        (
            png(16, 2, struct.pack(">6H", 300, 1, 65535, 300, 257, 65535), (300, 1, 65535), 2),
            [[255] * 3, [1, 1, 255]],
        ),
    ],
    ids=["rgb", "gray2", "gray4", "gray8", "gray16", "rgb16", "rgb16-alike"],
)
def test_a_transparent_colour_is_white_too(data: bytes, expected: list[list[int]]) -> None:
    np.testing.assert_array_equal(decode(data), [expected])


def tiff(bits: int, photometric: int, packed: bytes, width: int) -> bytes:
    """One row of gray samples, uncompressed."""
    tags = [
        *((256, 3, width), (257, 3, 1), (258, 3, bits), (259, 3, 1), (262, 3, photometric)),
        *((273, 4, 8), (277, 3, 1), (278, 3, 1), (279, 4, len(packed))),
    ]
    place = 8 + len(packed) + len(packed) % 2
    body = packed.ljust(place - 8, b"\0") + struct.pack("<H", len(tags))
    for tag, kind, value in tags:
        body += struct.pack("<HHII", tag, kind, 1, value)
    return struct.pack("<2sHI", b"II", 42, place) + body + bytes(4)


def test_twelve_bits_are_as_bright_as_eight_and_white_may_be_zero() -> None:
    packed = bytes([0xFF, 0xF8, 0x00])  # 4095, 2048
    np.testing.assert_array_equal(
        decode(tiff(12, 1, packed, 2), formats=("TIFF",))[..., 0], [[255, 128]]
    )
    values = struct.pack("<2H", 0, 0xFF00)
    for photometric, expected in ((1, [[0, 255]]), (0, [[255, 0]])):
        data = tiff(16, photometric, values, 2)
        np.testing.assert_array_equal(decode(data, formats=("TIFF",))[..., 0], expected)


def test_a_strip_that_a_format_cannot_hold_keeps_its_own() -> None:
    """An image of 20,000 pixels ended a preparation as WebP in a traceback."""
    strip = encode(Image.new("RGB", (20_000, 4), "red"))
    assert prepared(strip, Shape(256, "webp")).format == "PNG"
    assert prepared(strip, Shape(256, "jpeg")).format == "JPEG"


@pytest.mark.parametrize(("alpha", "expected"), [(0, [30, 20, 10]), (255, [30, 20, 10])])
def test_a_bmp_whose_alpha_nobody_wrote_is_not_white(alpha: int, expected: list[int]) -> None:
    header = struct.pack("<IiiHHIIiiII", 108, 1, 1, 1, 32, 3, 4, 2835, 2835, 0, 0)
    header += struct.pack("<IIII", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
    data = header.ljust(108, b"\0") + bytes([10, 20, 30, alpha])
    start = struct.pack("<2sIHHI", b"BM", 14 + len(data), 0, 0, 14 + 108)
    np.testing.assert_array_equal(decode(start + data, formats=("BMP",)), [[expected]])
