"""Plain JPEGs, decoded by libjpeg-turbo directly: 1.5 times as fast as with Pillow.

It saves Pillow's reading in chunks, its pixels of four bytes, and its copies.

A plain JPEG is one that every libjpeg decodes to the same pixels: gray or YCbCr, nothing missing,
no warning. Everything else is declined (None) and left to Pillow. So this file never decides
whether bytes are an image.

Reduced scales are halves, quarters and eighths: they have SIMD code. The scales between (5/8) take
longer than the full size.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

import numpy as np
import simplejpeg

# A scan of 95 bytes still visits every block: 64 megapixels take 0.055 s a scan, and a file of 1 MB
# can hold 10,000 of them. Progressive encoders write about 10 scans; a picture with its previews
# has fewer than 60.
MAX_SCANS = 100
MAX_SEGMENTS = 200  # before the first scan; a 4 MB colour profile takes 64

START = b"\xff\xd8"
APP1 = b"\xff\xe1"  # EXIF or XMP
BASELINE = b"\xff\xc0"
PROGRESSIVE = b"\xff\xc2"
SCAN = b"\xff\xda"
# A marker that begins a segment, or ends the picture. FF 00 is a coded pixel; TEM, the restarts and
# a second start have no segment.
MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
END = 0xD9


class Jpeg(NamedTuple):
    """A decoded JPEG.

    pixels: HWC as stored; C is 3, or 1 for gray. width, height: in the header, before scaling.
    tagged: EXIF or XMP may ask for a turn.
    """

    pixels: np.ndarray
    width: int
    height: int
    mode: Literal["RGB", "L"]
    tagged: bool


class Header(NamedTuple):
    """What comes before the first scan.

    tagged: there is metadata. one_scan: the first scan holds the whole picture. first_scan: where
    it begins.
    """

    tagged: bool
    one_scan: bool
    first_scan: int


def decode(
    data: bytes, max_pixels: int, least_px: int | None = None, gray: bool = False
) -> Jpeg | None:
    """A plain JPEG; None for all that Pillow must look at.

    least_px: decode at the smallest scale with both sides >= least_px. None: at full size.
    """
    header = _header(data)
    if header is None:
        return None
    if scans(data) > MAX_SCANS:
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        if colours not in ("YCbCr", "Gray") or width * height > max_pixels:
            return None
        shrink = _shrink(min(height, width), least_px)
        pixels_HWC = simplejpeg.decode_jpeg(
            data,
            "GRAY" if gray else "RGB",
            min_height=-(-height // shrink),
            min_width=-(-width // shrink),
        )
    except ValueError:
        # Its only error: damage, also such as Pillow forgives.
        return None
    mode: Literal["RGB", "L"] = "L" if colours == "Gray" else "RGB"
    return Jpeg(pixels_HWC, width, height, mode, header.tagged)


def size(data: bytes) -> tuple[int, int] | None:
    """(width, height) in the header; None where it cannot be read."""
    try:
        height, width, *_ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    return width, height


def _shrink(shorter_px: int, least_px: int | None) -> int:
    """The largest factor that leaves the shorter side at least_px or more."""
    if least_px:
        for factor in (8, 4, 2):
            if shorter_px // factor >= least_px:
                return factor
    return 1


def scans(data: bytes) -> int:
    """1 if the first scan holds the whole picture.

    Else all start-of-scan markers, those of previews in the metadata included; the two bytes never
    follow each other in coded pixels. Behind the picture there may be a film, whose bytes look like
    markers by chance: where that makes too many, those of the picture alone.
    """
    header = _header(data)
    if header is not None and header.one_scan:
        return 1
    everywhere = data.count(SCAN)
    if header is None or everywhere <= MAX_SCANS:
        return everywhere
    return _scans_from(data, header.first_scan) or everywhere


def _scans_from(data: bytes, place: int) -> int | None:
    """The scans from the first one to the picture's end, by its segments, as a decoder goes; None
    where they are too many to count.
    """
    found = 0
    for _ in range(MAX_SEGMENTS * MAX_SCANS):
        marker = MARKER.search(data, place)
        if marker is None or data[marker.end() - 1] == END:
            return found
        found += marker[0] == SCAN
        if found > MAX_SCANS:
            return found
        # A segment may hold any bytes.
        length = int.from_bytes(data[marker.end() : marker.end() + 2], "big")
        place = marker.end() + length
    return None


def _header(data: bytes) -> Header | None:
    """Walk the segments up to the first scan; None where there is none.

    It takes 3 us. Searching the data instead would hold the GIL for 50.
    """
    if not data.startswith(START):
        return None
    place = len(START)
    tagged = False
    baseline = False
    components = b""  # of the picture, one byte
    for _ in range(MAX_SEGMENTS):
        marker = data[place : place + 2]
        if marker == SCAN:
            scanned = data[place + 4 : place + 5]
            return Header(tagged, baseline and scanned == components, place)
        if marker in (BASELINE, PROGRESSIVE):
            baseline = marker == BASELINE
            components = data[place + 9 : place + 10]
        tagged = tagged or marker == APP1
        length = int.from_bytes(data[place + 2 : place + 4], "big")
        place += 2 + length
    return None
