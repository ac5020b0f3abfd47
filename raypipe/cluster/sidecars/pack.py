"""Packs the archive of sidecars: pip downloads the wheels, for this Python or another one.

Everything is downloaded and zipped below RAYPIPE_HOME first; the archive then appears in one step.
The same pins give the same bytes. Cost: 320 MB and about a minute from a near index.
"""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from raypipe import stores
from raypipe.cluster.sidecars import pip
from raypipe.cluster.sidecars.archive import MANIFEST, absolute, check
from raypipe.cluster.sidecars.build import home
from raypipe.cluster.sidecars.manifest import WHEELS, Manifest, Member
from raypipe.cluster.sidecars.pins import Target, digest, names, pins
from raypipe.errors import ConfigError, RaypipeError
from raypipe.files import owned

# Versions of glibc, 2.N: fastdup needs 2.31. Older systems than Debian 11 are left out.
GLIBC = range(31, 16, -1)


@dataclass(frozen=True)
class Packed:
    """A finished archive. sha256: of its manifest. missing: by sidecar, why it is left out."""

    address: str
    sha256: str
    size: int
    wheels: int
    sidecars: list[str]
    missing: dict[str, str]

    @property
    def pinned(self) -> str:
        """The address with the hash, as nodes should get it."""
        return f"{self.address}#sha256={self.sha256}"


def pack(out: str, target: Target, only: Sequence[str] = ()) -> Packed:
    """Pack the sidecars for a Python and a machine into one archive at `out`.

    only: their names; all that the target can have, if empty. Two packers of one archive wait for
    each other. Raises ConfigError for what the target cannot have, RaypipeError if pip fails or if
    the archive cannot be written.
    """
    check(out)
    if "#" in out:
        raise ConfigError("The hash of an archive is known when it is packed", got=out)
    address = absolute(out)
    wanted, missing = _choose(target, only)
    key = hashlib.sha256(f"{address} {target}".encode()).hexdigest()[:12]
    folder = home() / f"pack-{key}"
    with owned(folder):
        work = folder / "work"
        # Of a packer that was killed.
        shutil.rmtree(work, ignore_errors=True)
        try:
            for name, lines in wanted.items():
                _download(name, lines, target, work / name)
            manifest, sources = _describe(work, wanted, target)
            file = work / "archive.zip"
            _zip(file, manifest, sources)
            _put(file, address)
            size = file.stat().st_size
        except OSError as e:
            raise _unwritten(e, str(work)) from None
        finally:
            shutil.rmtree(work, ignore_errors=True)
    sha256 = hashlib.sha256(manifest.to_json()).hexdigest()
    wheels = sum(path.startswith(WHEELS) for path in manifest.members)
    return Packed(address, sha256, size, wheels, list(wanted), missing)


def _choose(target: Target, only: Sequence[str]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The pins of each sidecar, and why others are left out."""
    wanted, missing = {}, {}
    for name in only or names():
        try:
            wanted[name] = pins(name, target)
        except ConfigError as e:
            if only:
                raise
            missing[name] = str(e)
    return wanted, missing


def _download(name: str, lines: list[str], target: Target, folder: Path) -> None:
    """Raises RaypipeError if pip cannot get every wheel."""
    folder.mkdir(parents=True)
    command = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    command += ["--python-version", target.python, "--implementation", "cp"]
    platforms = [f"manylinux_2_{glibc}_{target.machine}" for glibc in GLIBC]
    for platform in [*platforms, f"manylinux2014_{target.machine}"]:
        command += ["--platform", platform]
    try:
        pip.pip([*command, *lines])
    except pip.Failed as e:
        raise RaypipeError(
            f"The wheels of {name} for {target} cannot be downloaded:\n{e}",
            fix="pip must reach a package index: set PIP_INDEX_URL to your mirror",
        ) from None


def _describe(
    work: Path, wanted: dict[str, list[str]], target: Target
) -> tuple[Manifest, dict[str, Path]]:
    """The manifest, and where each file of the archive lies now."""
    from packaging.utils import parse_wheel_filename

    sources: dict[str, Path] = {}
    members: dict[str, Member] = {}
    files: dict[str, list[str]] = {}
    for name in wanted:
        lines, files[name] = [], []
        for wheel in sorted((work / name).glob("*.whl")):
            path = f"{WHEELS}/{wheel.name}"
            sources[path], members[path] = wheel, _member(wheel)
            package, version, *_ = parse_wheel_filename(wheel.name)
            lines.append(f"{package}=={version} --hash=sha256:{members[path].sha256}\n")
            files[name].append(path)
        listed = work / f"{name}.txt"
        listed.write_text("".join(lines), encoding="utf-8")
        sources[listed.name], members[listed.name] = listed, _member(listed)
        files[name].append(listed.name)
    hashes = {name: digest(lines) for name, lines in wanted.items()}
    return Manifest(target, hashes, files, members), sources


def _member(file: Path) -> Member:
    with file.open("rb") as opened:
        return Member(hashlib.file_digest(opened, "sha256").hexdigest(), file.stat().st_size)


def _zip(file: Path, manifest: Manifest, sources: dict[str, Path]) -> None:
    """Without dates: the same wheels are the same archive."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo(MANIFEST), manifest.to_json())
        for path in sorted(sources):
            with sources[path].open("rb") as source, archive.open(zipfile.ZipInfo(path), "w") as to:
                shutil.copyfileobj(source, to, stores.CHUNK)


def _put(file: Path, address: str) -> None:
    try:
        stores.put(file, address)
    except OSError as e:
        raise _unwritten(e, address) from None


def _unwritten(error: Exception, where: str) -> RaypipeError:
    message = stores.brief(stores.message_of(error))
    if stores.is_full(error):
        return RaypipeError(
            "The archive of sidecars cannot be written: the disk is full",
            got=where,
            rule="It takes 320 MB below RAYPIPE_HOME, and as much where it goes",
            fix="Make room, or set RAYPIPE_HOME to another disk",
        )
    known = stores.cause(error, where)
    why = f"{known.cause} ({message})" if known else message
    return RaypipeError(
        f"The archive of sidecars cannot be written: {why}",
        got=where,
        fix="Check the address, the network, and AWS_*, AZURE_* or GOOGLE_* in the environment"
        if known
        else "Check that this user may write there",
    )
