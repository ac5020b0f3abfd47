"""The archive from which nodes without internet build their sidecars (`raypipe sidecars pack`).

It is a zip:

- `manifest.json`: what it is for, what is in it, and the hash of each file (`manifest.py`).
- `NAME.txt`: a sidecar's wheels as a requirements file with hashes. People can install it by hand:
  `pip install --no-index --find-links wheels --no-deps --require-hashes -r NAME.txt`.
- `wheels/*.whl`, each once. Nothing is compressed: wheels are.

A node reads the manifest and the files of the one sidecar that it builds, by range requests. A zip
has its index at the end, so a half-written archive is none. Each file is compared with its hash
before pip sees it.

Hashes in the archive find damage. They do not stop somebody who may write to the store: that does
`#sha256=…` behind the address, the hash of the manifest.
"""

from __future__ import annotations

import hashlib
import re
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from lzma import LZMAError
from pathlib import Path
from typing import Any

from raypipe import stores
from raypipe.cluster.sidecars.manifest import Manifest, Unreadable
from raypipe.cluster.sidecars.pins import Target, digest, here, pins
from raypipe.errors import (
    ConfigError,
    DataError,
    FullDisk,
    RaypipeError,
    Unreachable,
    hidden,
    holds_secret,
    keep_secrets_of,
    one_line,
)

MANIFEST = "manifest.json"
PACK = "raypipe sidecars pack"
SCHEMES = "s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "file"
_MOST_MANIFEST = 2**20  # bytes
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Archive:
    """An open archive."""

    address: str
    manifest: Manifest
    zip: zipfile.ZipFile

    def require(self, name: str, target: Target) -> None:
        """Raise DataError unless the sidecar can be built from this archive on the target."""
        wanted = digest(pins(name, target))
        if self.manifest.target != target:
            raise DataError(
                f"The archive of sidecars is for {self.manifest.target}, and this is {target}",
                got=self.address,
                fix=f"{PACK} --python {target.python} --machine {target.machine}",
            )
        if name not in self.manifest.files:
            raise DataError(
                f"The archive of sidecars is without {name}",
                got=self.address,
                rule=f"It holds {', '.join(self.manifest.files) or 'none'}",
                fix=f"{PACK}, without --only or with --only {name}",
            )
        if self.manifest.pins[name] != wanted:
            raise DataError(
                f"The archive of sidecars has other versions of {name} than this raypipe wants",
                got=self.address,
                rule="An archive fits the raypipe that packed it, and those with the same pins",
                fix=f"{PACK}, with this version of raypipe",
            )

    def extract(self, name: str, folder: Path) -> None:
        """Write the sidecar's files below `folder`. Raises DataError for one that is missing or is
        not as the manifest says, and FullDisk.
        """
        with _explained(self.address):
            for path in self.manifest.files[name]:
                self._extract(path, folder / path)

    def _extract(self, path: str, target: Path) -> None:
        member = self.manifest.members[path]
        target.parent.mkdir(parents=True, exist_ok=True)
        seen, left = hashlib.sha256(), member.size
        try:
            source = self.zip.open(path)
        except KeyError:
            raise _damaged(self.address, f"{path} is missing in it") from None
        with source, target.open("wb") as out:
            # One byte more than there should be shows a file that has grown.
            while chunk := source.read(min(stores.CHUNK, left + 1)):
                left -= len(chunk)
                if left < 0:
                    break
                seen.update(chunk)
                out.write(chunk)
        if left or seen.hexdigest() != member.sha256:
            raise _damaged(self.address, f"{path} is not the file that was packed")


def check(address: str) -> None:
    """Raise ConfigError for what is no address of an archive."""
    uri, _, fragment = address.partition("#")
    if holds_secret(address):
        keep_secrets_of(address)
        raise ConfigError(
            "The address of the sidecars' archive holds a credential",
            got=hidden(address),
            fix="Put it into the environment of every node: AWS_*, AZURE_*, GOOGLE_*",
        )
    scheme = uri.partition("://")[0] if "://" in uri else "file"
    if scheme not in SCHEMES or not uri.strip() or uri.endswith("/"):
        raise ConfigError(
            "This is no address of an archive of sidecars",
            got=address,
            rule=f"It is a file or an object ({'://, '.join(SCHEMES)}://)",
            fix=f"{PACK} --out ADDRESS makes one",
        )
    value = fragment.removeprefix("sha256=")
    if fragment and (value == fragment or not _SHA256.fullmatch(value)):
        raise ConfigError(
            "Behind # stands the hash of the archive's manifest",
            got=address,
            rule="It is #sha256= and 64 hexadecimal digits, as `raypipe sidecars pack` prints them",
        )


def absolute(address: str) -> str:
    """The address as every process understands it; a local path becomes absolute."""
    uri, mark, fragment = address.partition("#")
    return address if "://" in uri else f"{Path(uri).expanduser().absolute()}{mark}{fragment}"


@contextmanager
def opened(address: str) -> Iterator[Archive]:
    """The archive at an address, its manifest checked.

    Raises ConfigError for what is no address, Unreachable if the store does not give it out, and
    DataError for an archive that is missing, half-written or not the one that `#sha256=` names.
    """
    check(address)
    uri, _, fragment = address.partition("#")
    with _explained(uri), stores.opened(uri) as file, zipfile.ZipFile(file) as archive:
        if archive.getinfo(MANIFEST).file_size > _MOST_MANIFEST:
            raise _damaged(uri, "its manifest is too long")
        text = archive.read(MANIFEST)
        wanted = fragment.removeprefix("sha256=")
        if wanted and hashlib.sha256(text).hexdigest() != wanted:
            raise DataError(
                "The archive of sidecars is another one than its address names",
                got=address,
                rule="The hash behind # is that of its manifest",
                fix="Find out who wrote it. If you packed it again, use the new hash",
            )
        yield Archive(uri, Manifest.of_json(text), archive)


def look(address: str, name: str) -> dict[str, Any]:
    """For the doctor: raise RaypipeError unless the sidecar can be built here from the archive."""
    with opened(address) as archive:
        archive.require(name, here())
        return {"files": len(archive.manifest.files[name])}


@contextmanager
def _explained(uri: str) -> Iterator[None]:
    """Turn what goes wrong with the archive into one message."""
    try:
        yield
    except RaypipeError:
        raise
    except Unreadable as e:
        raise _damaged(uri, str(e)) from None
    except KeyError:
        raise _damaged(uri, "it has no manifest") from None
    # One flipped bit says that a file is encrypted (RuntimeError), or compressed.
    except (zipfile.BadZipFile, RuntimeError, EOFError, zlib.error, LZMAError) as e:
        raise _damaged(uri, f"half-written, or damaged ({one_line(e)})") from None
    except FileNotFoundError:
        where = "" if stores.is_remote(uri) else " on this node"
        raise DataError(
            f"There is no archive of sidecars{where}",
            got=uri,
            rule="Every node reads it: cluster.sidecars, or RAYPIPE_SIDECARS, says where it is",
            fix=f"{PACK} --out {uri}",
        ) from None
    except Exception as e:
        known = stores.cause(e, uri)
        if known is None and not isinstance(e, OSError):
            raise
        raise _refusal(e, known, uri) from None


def _refusal(error: Exception, known: stores.Cause | None, uri: str) -> RaypipeError:
    message = one_line(stores.brief(stores.message_of(error)))
    if stores.is_full(error):
        what = f"A sidecar's files cannot be written: {message}"
        return FullDisk(what, rule="The disk is full", fix=stores.MAKE_ROOM)
    why = f"{known.cause} ({message})" if known else message
    return Unreachable(
        f"The archive of sidecars cannot be read: {why}",
        got=uri,
        fix="Check the address and the network. Every node needs AWS_*, AZURE_* or GOOGLE_* of its "
        "store in its environment",
    )


def _damaged(uri: str, why: str) -> DataError:
    return DataError(
        f"The archive of sidecars is not whole: {why}",
        got=uri,
        rule="Its manifest has the hash of each file; nothing was installed from it",
        fix=f"{PACK} --out {uri}",
    )
