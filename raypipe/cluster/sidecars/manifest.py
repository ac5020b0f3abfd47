"""What an archive of sidecars says of itself: what it is for, and the hash of each file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from raypipe.cluster.sidecars.pins import Target
from raypipe.errors import DataError

FORMAT = 1
WHEELS = "wheels"


_PATH = re.compile(rf"({WHEELS}/)?\w[\w.+!-]*")


class Unreadable(Exception):
    """This is no manifest. The text says why."""


@dataclass(frozen=True)
class Member:
    """A file of the archive. size: in bytes."""

    sha256: str
    size: int


@dataclass(frozen=True)
class Manifest:
    """What the archive says of itself. pins: by sidecar, their hash. files: by sidecar, paths."""

    target: Target
    pins: Mapping[str, str]
    files: Mapping[str, list[str]]
    members: Mapping[str, Member]

    def to_json(self) -> bytes:
        """The same bytes for the same content."""
        tree = {
            "format": FORMAT,
            "python": self.target.python,
            "machine": self.target.machine,
            "sidecars": {n: {"pins": self.pins[n], "files": self.files[n]} for n in self.files},
            "files": {p: {"sha256": m.sha256, "bytes": m.size} for p, m in self.members.items()},
        }
        return json.dumps(tree, indent=1, sort_keys=True).encode()

    @classmethod
    def of_json(cls, text: bytes) -> Manifest:
        """Raises Unreadable, and DataError for a format of a later raypipe."""
        try:
            tree = json.loads(text)
            if tree["format"] != FORMAT:
                raise DataError(
                    "The archive of sidecars is of a format that this raypipe does not know",
                    got=tree["format"],
                    rule=f"It reads format {FORMAT}",
                    fix="Pack it again with this version of raypipe: raypipe sidecars pack",
                )
            sidecars = tree["sidecars"].items()
            found = cls(
                Target(tree["python"], tree["machine"]),
                {name: str(each["pins"]) for name, each in sidecars},
                {name: [str(path) for path in each["files"]] for name, each in sidecars},
                {p: Member(str(m["sha256"]), int(m["bytes"])) for p, m in tree["files"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise Unreadable(f"its manifest cannot be read ({type(e).__name__})") from None
        for paths in found.files.values():
            found._require(paths)
        return found

    def _require(self, paths: list[str]) -> None:
        """Raise Unreadable for a path without a hash, and one that leads out of a folder."""
        for path in paths:
            if path not in self.members or not _PATH.fullmatch(path):
                raise Unreadable(f"its manifest names {path!r}")
