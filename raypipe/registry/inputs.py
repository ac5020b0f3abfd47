"""What callers of the MLflow model may send as an image, told apart so that nothing is guessed.

bytes         an encoded image. MLflow's REST server hands on the ASCII of a base64 text for
              `inputs` and `instances`; it is decoded. No image of an accepted format is all ASCII.
text          base64, or an address with a scheme: file:///a.jpg, s3://bucket/a.jpg. Base64 has no
              colon, so no text can be both. A path without a scheme is refused: `/data/a` is base64
uint8 array   pixels HWC, RGB, of any size; nested lists of numbers, too

An address makes the server read a file for whoever asks. So none is read unless whoever *loads* the
model names the folders: `model_config={"addresses": ["s3://bucket/cells/"]}`. Callers cannot set
that, over REST or otherwise. A local address counts after links and `..` are followed.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from raypipe.errors import DataError, hidden, one_line
from raypipe.images.decode import Picture

MAX_BYTES = 256 * 2**20  # of a file at an address
_BASE64 = re.compile(rb"[A-Za-z0-9+/\s]+={0,2}\s*")
_DATA = re.compile(r"data:image/[\w.+-]+;base64,")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://")


@dataclass(frozen=True)
class Given:
    """The images of a call, None where one cannot be had, and why not, by place."""

    images: list[Picture | None]
    errors: dict[int, str]


@dataclass(frozen=True)
class Addresses:
    """Folders whose files callers may name; none by default. Raises DataError for no address."""

    folders: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for folder in self.folders:
            if not _SCHEME.match(folder):
                raise DataError(
                    "A folder of images is named by an address",
                    got=folder,
                    rule="addresses=['file:///data/cells', 's3://bucket/cells']",
                )

    def read(self, address: str) -> bytes:
        """The bytes at an address. Raises DataError if it is not allowed or cannot be read."""
        try:
            folder = next((folder for folder in self.folders if _is_below(address, folder)), None)
        except (OSError, ValueError, RuntimeError) as e:
            # Half a host in brackets, a zero character, links in a circle.
            raise DataError(f"The address cannot be read: {one_line(e)}", got=address) from None
        if folder is None:
            raise DataError(
                "This address is not read",
                got=address,
                rule="Whoever loads the model says which: model_config={'addresses': […]}",
                fix="Send the image's bytes, or base64",
            )
        # Not at the top: most servers read no address.
        from pyarrow.fs import FileSystem

        try:
            # Options, as an endpoint, are the folder's: a caller's could lead to another server.
            options = urlsplit(folder).query
            files, path = FileSystem.from_uri(f"{address}?{options}" if options else address)
            with files.open_input_stream(path) as stream:
                data: bytes = stream.read(MAX_BYTES + 1)
        except (OSError, ValueError, NotImplementedError) as e:
            raise DataError(f"The address cannot be read: {one_line(e)}", got=address) from None
        if len(data) > MAX_BYTES:
            raise DataError(f"The file is over {MAX_BYTES:,} bytes", got=address)
        return data


def given(values: Sequence[Any], addresses: Addresses, threads: int) -> Given:
    """The images among these values; a value that is none costs its own place only."""
    images: list[Picture | None] = [None] * len(values)
    errors: dict[int, str] = {}

    def take(place: int) -> None:
        try:
            images[place] = _image(values[place], addresses)
        except DataError as e:
            errors[place] = hidden(one_line(e))

    # Threads, because addresses wait for a network.
    with ThreadPoolExecutor(max(1, threads)) as pool:
        list(pool.map(take, range(len(values))))
    return Given(images, errors)


def _image(value: Any, addresses: Addresses) -> Picture | None:
    """Encoded bytes or pixels_HWC; None for a missing value. Raises DataError for anything else."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _undone(bytes(value))
    if isinstance(value, str):
        if _SCHEME.match(value):
            return addresses.read(value)
        # Half of a surrogate pair, which JSON may hold, has no bytes: it is no base64 either.
        return _decoded(_DATA.sub("", value, count=1).encode(errors="replace"))
    if isinstance(value, (np.ndarray, list)):
        return _pixels(value)
    # pandas has several nulls: NaN is not itself, and NA answers no question.
    if value is None or type(value).__name__ == "NAType" or value != value:
        return None
    raise DataError(
        "This is no image",
        got=type(value).__name__,
        rule="It is encoded bytes, base64, an address with a scheme, or uint8 pixels HWC",
    )


def _undone(data: bytes) -> bytes:
    """Bytes as they are, unless they are the ASCII of a base64 text."""
    if not _BASE64.fullmatch(data):
        return data
    try:
        return _decoded(data)
    except DataError:
        # The decoder says what is wrong with them.
        return data


def _decoded(text: bytes) -> bytes:
    """The bytes of a base64 text, with or without line ends."""
    try:
        return base64.b64decode(b"".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        raise DataError(
            "This text is no base64",
            got=text[:40].decode(errors="replace"),
            rule="A text is base64, or an address with a scheme, as file:///data/a.jpg",
        ) from None


def _pixels(value: Any) -> np.ndarray:
    """An array; of nested lists of whole numbers from 0 to 255, one of uint8."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value
    try:
        array = np.asarray(value.tolist() if isinstance(value, np.ndarray) else value)
    except ValueError:
        raise DataError("These lists are no pixels", rule="All rows have one length") from None
    # Lists from JSON are of int64.
    if array.dtype.kind in "iu" and array.size and array.min() >= 0 and array.max() <= 255:
        return array.astype(np.uint8)
    return array


def _is_below(address: str, folder: str) -> bool:
    """Is the address inside the folder? Percent signs and dots cannot lead out of it."""
    wanted, allowed = urlsplit(address), urlsplit(folder)
    is_elsewhere = (wanted.scheme, wanted.netloc) != (allowed.scheme, allowed.netloc)
    if is_elsewhere or "?" in address or "#" in address:
        return False
    if wanted.scheme == "file":
        inside = Path(unquote(wanted.path)).resolve()
        return inside.is_relative_to(Path(unquote(allowed.path)).resolve())
    # Twice: a percent sign may itself be percent-encoded.
    parts = unquote(unquote(wanted.path)).split("/")
    return ".." not in parts and wanted.path.startswith(allowed.path.rstrip("/") + "/")
