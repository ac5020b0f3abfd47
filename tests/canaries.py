"""Looks for secrets that a test planted: in files, tables, archives, command lines and answers."""

from __future__ import annotations

import base64
import gzip
import json
import threading
import time
import zipfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from urllib.parse import quote, quote_plus

import pyarrow as pa
import pyarrow.parquet as pq


def forms(secret: str) -> set[bytes]:
    """How it may be written down: as it is, escaped, percent-encoded, in base64 at any offset."""
    texts = {secret, quote(secret, safe=""), quote(secret), quote_plus(secret)}
    texts |= {json.dumps(secret)[1:-1], repr(secret)[1:-1]}
    found = {text.encode() for text in texts}
    for code in (base64.b64encode, base64.urlsafe_b64encode):
        for offset in range(3):
            # The first and the last group depend on the text around it.
            whole = code(b"\0" * offset + secret.encode())
            found.add(whole[4 if offset else 0 : len(whole) // 4 * 4 - 4])
    return found


def leaks(secrets: Mapping[str, str], texts: Mapping[str, bytes]) -> list[str]:
    """`NAME in PLACE` for each secret in each text."""
    wanted = {name: forms(secret) for name, secret in secrets.items()}
    return [
        f"{name} in {place}"
        for place, text in texts.items()
        for name, written in wanted.items()
        if any(form in text for form in written)
    ]


def files(*folders: Path) -> dict[str, bytes]:
    """Every file below the folders, with what is inside of Parquet, gzip and zip files."""
    found = {}
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file():
                found |= opened(str(path), path.read_bytes())
    return found


def opened(name: str, content: bytes) -> dict[str, bytes]:
    """A file's bytes and, where it is packed, what is inside."""
    found = {name: content}
    if content[:4] == b"PAR1" and content[-4:] == b"PAR1":
        found[f"{name} (rows)"] = _rows(pq.read_table(BytesIO(content)))
    elif content[:2] == b"\x1f\x8b":
        found[f"{name} (unpacked)"] = gzip.decompress(content)
    elif content[:2] == b"PK" and zipfile.is_zipfile(BytesIO(content)):
        with zipfile.ZipFile(BytesIO(content)) as archive:
            for inner in archive.namelist():
                found |= opened(f"{name}:{inner}", archive.read(inner))
    return found


def _rows(table: pa.Table) -> bytes:
    """All that is not pixels, as text."""
    kept = [f.name for f in table.schema if not pa.types.is_large_binary(f.type)]
    return str(table.select(kept).to_pylist()).encode() + str(table.schema.metadata).encode()


class CommandLines:
    """The command lines of all processes of this host, while it is entered."""

    def __init__(self) -> None:
        self.seen: set[bytes] = set()
        self._stop = threading.Event()

    def __enter__(self) -> CommandLines:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.is_set():
            for file in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    self.seen.add(file.read_bytes().replace(b"\0", b" "))
                except OSError:
                    continue  # it has ended
            time.sleep(0.02)

    def holding(self, *texts: str) -> list[str]:
        """The command lines that hold any of these texts."""
        lines = [line.decode(errors="replace") for line in self.seen]
        return [line for line in lines if any(text in line for text in texts)]

    def as_texts(self) -> dict[str, bytes]:
        return {f"a command line ({line[:80]!r})": line for line in self.seen}
