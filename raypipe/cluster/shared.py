"""The cluster that `ray start` left running on this host for everybody, if it may be joined.

`ray start` records its address in `ray_current_cluster` below Ray's temporary folder; `ray.init` of
a program does not, and says in the cluster's own metadata that the cluster is private. Who joins a
private cluster dies with the program that owns it, so all three must hold: the address is recorded,
a raylet of this user runs here for it, and its metadata says that no program owns it.
Ray's own `auto` takes any raylet it finds on the host.
"""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

log = logging.getLogger("raypipe")
PROBE_S = (
    3  # a GCS on this host answers in milliseconds; Ray's client would wait 40 s for a dead one
)


def shared_cluster() -> str | None:
    """The address of a live cluster of this user that `ray start` began, or None."""
    address = _recorded()
    if address is None or not _raylet_here(address) or not _listens(address):
        return None
    try:
        return None if _is_private(address) else address
    except (
        Exception
    ) as e:  # an old Ray, another token: a cluster that cannot be asked is not joined
        reason = " ".join(f"{type(e).__name__}: {e}".split())[:200]
        log.warning(
            "The Ray cluster at %s cannot be joined (%s). Another one is started; RAY_ADDRESS=%s insists",
            address,
            reason,
            address,
        )
        return None


def _recorded() -> str | None:
    """What the last `ray start` wrote; None where there was none or it was another user's."""
    from ray._common.utils import get_ray_address_file

    record = Path(get_ray_address_file(None))
    try:
        if record.stat().st_uid != os.getuid():
            return None
        return record.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def _raylet_here(address: str) -> bool:
    """A killed cluster leaves its record behind; a living one has a raylet of ours here."""
    import psutil  # type: ignore[import-untyped]

    for process in psutil.process_iter(["cmdline", "uids"]):
        command, uids = process.info["cmdline"], process.info["uids"]
        ours = uids is not None and uids.real == os.getuid()
        raylet = command and Path(command[0]).name == "raylet"
        if ours and raylet and f"--gcs-address={address}" in command:
            return True
    return False


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S):
            return True
    except (OSError, ValueError):
        return False


def _is_private(address: str) -> bool:
    """Whether `ray.init` of some program started the cluster, by the cluster's own metadata."""
    from ray._common.usage.usage_lib import is_ray_init_cluster
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    return bool(is_ray_init_cluster(GcsClient(address=address)))
