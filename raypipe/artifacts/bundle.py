"""One folder in the store: the files of one run, and manifest.json, which is written last.

    URI/RUN-NAME/KEY/manifest.json     sizes and sha256 of all files below
    URI/RUN-NAME/KEY/report.html, package/…, logs/…

A reader that finds the manifest finds all of its files as they are listed. Files that are there
already are not sent again. If one of them is to be replaced (a report that was drawn again), the
manifest goes first and comes back last. Its `missing` names files that were gone before they could
be sent. Two processes that send to one place at once must take turns.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from raypipe.config import to_json
from raypipe.stores import chunks
from raypipe.tables.objects import Objects

MANIFEST = "manifest.json"
FORMAT = 1


def segment(name: str) -> str:
    """A name as a part of an address: names that differ stay apart."""
    allowed = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:80]
    if allowed == name and name.strip("."):
        return name
    return f"{allowed.strip('.') or '_'}-{hashlib.sha256(_bytes_of(name)).hexdigest()[:6]}"


def _bytes_of(name: str) -> bytes:
    # A name from the command line may hold bytes that are no UTF-8.
    return name.encode("utf-8", "surrogatepass")


def expanded(files: Mapping[str, Path]) -> dict[str, Path]:
    """Folders as their files; what does not exist is left out."""
    found: dict[str, Path] = {}
    for name, path in files.items():
        if path.is_dir():
            for file in sorted(p for p in path.rglob("*") if p.is_file()):
                found[f"{name}/{file.relative_to(path).as_posix()}"] = file
        elif path.is_file():
            found[name] = path
    return found


def upload(
    store: Objects,
    place: str,
    files: Mapping[str, Path],
    facts: Mapping[str, Any],
    timed: Callable[[float, float], None] = lambda mb, seconds: None,
) -> list[str]:
    """Bring the files to RUN-NAME/KEY (`place`), then the manifest.

    facts: what the manifest says beside its files. timed: takes MB and seconds of the largest file
    that was sent. Returns the files that exist neither here nor there; the manifest names them as
    `missing`. Raises DataError if the store fails, and OSError for a file that cannot be read; a
    later call sends what is missing.
    """
    earlier = _manifest(store, place)
    promised: dict[str, Any] = earlier.get("files", {})
    # Whoever may write there may also have deleted something.
    sizes = store.sizes(place)
    listed = {name: entry for name, entry in promised.items() if sizes.get(name) == _bytes(entry)}
    listed |= _unlisted_logs(store, place, sizes.keys() - promised.keys() - files.keys())
    unsent = []
    missing = []
    for name, path in files.items():
        try:
            if listed.get(name) != _Content(path).read():
                unsent.append(name)
        except FileNotFoundError:
            if name not in listed:
                missing.append(name)
    if any(name in promised for name in unsent):
        store.delete(f"{place}/{MANIFEST}")
    # Of many small files the seconds are those of answers, and say little of the line.
    largest = 0.0, 0.0
    for name in unsent:
        content, began = _Content(files[name]), time.monotonic()
        store.write(f"{place}/{name}", content)
        # Not what the file was before: somebody may have drawn a report again meanwhile.
        listed[name] = content.entry
        largest = max(largest, (content.entry["bytes"] / 1e6, time.monotonic() - began))
    timed(*largest)
    new: dict[str, Any] = {"format": FORMAT, "facts": dict(facts), "files": listed}
    if missing:
        new["missing"] = missing
    if unsent or new != earlier:
        store.write(f"{place}/{MANIFEST}", to_json(new, indent=1).encode())
    return missing


def _unlisted_logs(store: Objects, place: str, names: Iterable[str]) -> dict[str, Any]:
    """Entries of earlier runs' logs, of `names`, which no manifest lists.

    A kill between a manifest and the next one leaves some, and a run in another folder that ended
    at the same time.
    """
    found = {}
    for name in sorted(names):
        if name.startswith("logs/") and name.endswith(".log"):
            content = store.read(f"{place}/{name}")
            if content is not None:
                sha256 = hashlib.sha256(content).hexdigest()
                found[name] = {"bytes": len(content), "sha256": sha256}
    return found


def _bytes(entry: Any) -> int | None:
    return entry.get("bytes") if isinstance(entry, dict) else None


def _manifest(store: Objects, place: str) -> dict[str, Any]:
    """The manifest that is there; {} for none, or one that cannot be read."""
    content = store.read(f"{place}/{MANIFEST}")
    try:
        read = json.loads(content or b"{}")
    except ValueError:
        return {}
    known = isinstance(read, dict) and read.get("format") == FORMAT
    return read if known and isinstance(read.get("files"), dict) else {}


class _Content:
    """A file's content, in parts. entry: size and sha256 of what was read so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sha256 = hashlib.sha256()
        self._bytes = 0

    def __iter__(self) -> Iterator[bytes]:
        for chunk in chunks(self._path):
            self._sha256.update(chunk)
            self._bytes += len(chunk)
            yield chunk

    def read(self) -> dict[str, Any]:
        """Read all of it, and return its entry."""
        for _ in self:
            pass
        return self.entry

    @property
    def entry(self) -> dict[str, Any]:
        return {"bytes": self._bytes, "sha256": self._sha256.hexdigest()}
