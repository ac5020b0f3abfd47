"""A folder of files that no decoder should trust, and the program that decodes them where a crash
hurts nobody.

`generate` draws its own: truncations, flipped bytes, bombs, lies about format and size.
`pillows_own` brings the 1,060 odd and hostile images that Pillow tests itself with, from its
source package: fetched with pip once, kept under ~/.cache/raypipe.

python -m tests.images.hostile FOLDER    one JSON line a file:
    {name, seconds, verdicts: {inspect, decode, small, any}}
"""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import PIL
from filelock import FileLock
from PIL import Image

from raypipe.images.decode import BadImage, Format, decode, inspect

CACHE = Path.home() / ".cache" / "raypipe" / "hostile"


def pillows_own(cache: Path = CACHE) -> Path:
    """The folder Tests/images of the installed Pillow's source. Raises OSError when it cannot be
    fetched.
    """
    folder = cache / f"pillow-{PIL.__version__}"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "fetching"):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                _unpack(_source_package(Path(scratch)), Path(scratch) / "images")
                (Path(scratch) / "images").rename(folder)
    return folder


def _source_package(scratch: Path) -> Path:
    command = [
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary",
        ":all:",
        f"pillow=={PIL.__version__}",
    ]
    try:
        subprocess.run(
            [sys.executable, *command, "--dest", scratch],
            check=True,
            capture_output=True,
            timeout=300,
        )
        return next(scratch.glob("pillow-*.tar.gz"))
    except (subprocess.SubprocessError, StopIteration) as e:
        raise OSError(f"pip cannot fetch Pillow's source: {e}") from None


def _unpack(package: Path, folder: Path) -> None:
    with tarfile.open(package) as tar:
        for member in tar:
            _, _, name = member.name.partition("/Tests/images/")
            if name and member.isfile():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(tar.extractfile(member).read())  # type: ignore[union-attr]


def generate(folder: Path) -> int:
    """Fill the folder; how many files."""
    files = dict(_files())
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return len(files)


def _files() -> Iterator[tuple[str, bytes]]:
    rng = np.random.default_rng(0)
    picture = Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)).resize(
        (96, 72), Image.Resampling.BICUBIC
    )
    for kind in get_args(Format):
        data = encode(picture, kind)
        for keep in np.linspace(1, len(data) - 32, 40).astype(
            int
        ):  # the last bytes of a PNG hold no pixel
            yield f"cut-{keep}.{kind.lower()}", data[:keep]
        for i in range(60):
            flipped = bytearray(data)
            for at in rng.integers(0, len(data) if i % 2 else min(64, len(data)), 3):
                flipped[at] ^= int(rng.integers(1, 256))
            yield f"flip-{i}.{kind.lower()}", bytes(flipped)
        yield f"tail-{kind}.jpg", data + bytes(5_000)
        yield f"renamed-{kind}.png", data
    yield "empty.jpg", b""
    yield "words.jpg", b"These are only words.\n" * 40
    yield "noise.png", rng.bytes(5_000)
    yield "zeros.webp", bytes(5_000)
    yield "bomb-30000.png", png_bomb(30_000)
    text = zlib.compress(bytes(300_000_000))
    yield "bomb-text.png", png_bomb(8, text)
    yield "bomb-nested-text.png", png_bomb(8, zlib.compress(text))
    yield "bomb-scans.jpg", scan_bomb(4_000, 2_000)
    yield "bomb-webp.webp", b"RIFF\x1e\0\0\0WEBPVP8X\n\0\0\0\0\0\0\0" + b"\xff" * 6
    yield "wide.png", encode(Image.new("1", (60_000, 1)), "PNG")
    yield "tall.png", encode(Image.new("1", (1, 60_000)), "PNG")
    yield "pixel.png", encode(Image.new("RGB", (1, 1)), "PNG")


def encode(image: Image.Image, kind: str = "PNG", **how: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **how)
    return out.getvalue()


def png_bomb(side_px: int, text: bytes = b"") -> bytes:
    """A PNG of side_px x side_px one-bit pixels in a few kilobytes, with compressed text in front
    of them.
    """

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    deflate = zlib.compressobj(9)
    row = bytes(1 + side_px // 8)
    pixels = b"".join(deflate.compress(row) for _ in range(side_px)) + deflate.flush()
    header = struct.pack(">IIBBBBB", side_px, side_px, 1, 0, 0, 0, 0)
    words = chunk(b"zTXt", b"words\0\0" + text) if text else b""
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + words
        + chunk(b"IDAT", pixels)
        + chunk(b"IEND", b"")
    )


def scan_bomb(side_px: int, scans: int) -> bytes:
    """A progressive JPEG that refines its last coefficients again and again, 100 bytes a time."""
    data = encode(Image.new("L", (side_px, side_px), 128), "JPEG", progressive=True)
    last, end = data.rfind(b"\xff\xda"), data.rfind(b"\xff\xd9")
    return data[:last] + data[last:end] * scans + data[end:]


def _verdict(read: Callable[[], object]) -> str:
    try:
        read()
        return "accepted"
    except BadImage as bad:
        return bad.reason


def main(folder: Path) -> None:
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        data, started = path.read_bytes(), time.perf_counter()
        verdicts = {
            "inspect": _verdict(lambda: inspect(data)),  # noqa: B023
            "decode": _verdict(lambda: decode(data)),  # noqa: B023
            "small": _verdict(lambda: decode(data, 32)),  # noqa: B023
            "any": _verdict(lambda: decode(data, 32, formats=get_args(Format))),  # noqa: B023
        }
        line = {
            "name": str(path.relative_to(folder)),
            "seconds": time.perf_counter() - started,
            "verdicts": verdicts,
        }
        print(
            json.dumps(line), flush=True
        )  # a line at a time: after a crash the last one says how far it came


if __name__ == "__main__":
    main(Path(sys.argv[1]))
