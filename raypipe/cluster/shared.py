"""Looks for a cluster that `ray start` left running on this host for everybody.

`ray start` records its address in `ray_current_cluster` below Ray's temporary folder. `ray.init` of
a program records nothing, and marks its cluster as private in the cluster's own metadata. A process
in a private cluster ends with the program that owns it. So all three conditions must hold: the
address is recorded, a raylet of this user runs here for it, and its metadata names no owner.

Ray's own `auto` joins any raylet on the host.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from raypipe.cluster import head, ray_private
from raypipe.errors import one_line

log = logging.getLogger("raypipe")


def shared_cluster() -> str | None:
    """The address of a running cluster that this user began with `ray start`, or None."""
    address = recorded()
    if address is None or not _raylet_here(address) or head.silence(address):
        return None
    # Without its metadata, a cluster is not joined.
    if head.refuses_token(address):
        reason = "it refuses this user's token, ~/.ray/auth_token with RAY_AUTH_MODE=token"
    else:
        try:
            return None if ray_private.is_of_program(address) else address
        except Exception as e:  # for example an old Ray
            reason = one_line(f"{type(e).__name__}: {e}", 200)
    log.warning(
        "The Ray cluster at %s cannot be joined (%s). Another one is started; "
        "set RAY_ADDRESS=%s to insist",
        address,
        reason,
        address,
    )
    return None


def recorded() -> str | None:
    """The address that this user's last `ray start` wrote, or None."""
    record = Path(ray_private.address_file())
    try:
        if record.stat().st_uid != os.getuid():
            return None
        return record.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def _raylet_here(address: str) -> bool:
    """Does a raylet of this user run here for the cluster?

    A killed cluster leaves only its record.
    """
    return any(f"--gcs-address={address}" in command for command in _raylets())


def here() -> dict[str, list[str]]:
    """recorded: the address that `ray start` wrote, if any. running: the addresses of all clusters
    with a raylet of this user on this host, private ones too.
    """
    found = []
    for command in _raylets():
        for word in command:
            if word.startswith("--gcs-address="):
                found.append(word.partition("=")[2])
    return {"recorded": [each for each in [recorded()] if each], "running": sorted(set(found))}


def _raylets() -> Iterator[list[str]]:
    """The command lines of this user's raylets."""
    import psutil  # type: ignore[import-untyped]

    for process in psutil.process_iter(["cmdline", "uids"]):
        command, uids = process.info["cmdline"], process.info["uids"]
        is_own = uids is not None and uids.real == os.getuid()
        if is_own and command and Path(command[0]).name == "raylet":
            yield command
