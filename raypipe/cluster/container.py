"""What the container of this process may use of CPU time and memory, and what it uses of them.

A container sees the whole host, and the kernel holds it to less. The limits stand in the control
groups of this process (man 7 cgroups), version 1 or 2. A group is held to the limits of all groups
above it, so the smallest of them counts. What is used is read where that limit is: everything in
that group shares it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MEMBERSHIP = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Limit:
    """most: CPUs, or bytes of memory. group: the folder of the control group that has the limit."""

    most: float
    group: Path


def host_memory() -> int:
    """Bytes of memory that the host has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usable_memory() -> int:
    """Bytes of memory that this process may use: the host's, or what its container may."""
    limit = memory_limit()
    return min(host_memory(), int(limit.most)) if limit else host_memory()


def memory_limit(membership: Path = MEMBERSHIP, mount: Path = MOUNT) -> Limit | None:
    """The smallest limit of memory, in bytes; None if there is none."""
    limits = []
    for group in _groups("memory", membership, mount):
        for name in ("memory.max", "memory.limit_in_bytes"):
            # Unlimited is `max` in version 2, and a number near 2^63 in version 1.
            most = _number(group / name)
            if most is not None and most < 2**60:
                limits.append(Limit(most, group))
    return min(limits, key=lambda limit: limit.most, default=None)


def cpu_limit(membership: Path = MEMBERSHIP, mount: Path = MOUNT) -> Limit | None:
    """The smallest quota of CPU time, in CPUs; None if there is none."""
    limits = []
    for group in _groups("cpu", membership, mount):
        quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        of_version_2 = _text(group / "cpu.max").split()
        if len(of_version_2) == 2 and of_version_2[0] != "max":
            quota, period = float(of_version_2[0]), float(of_version_2[1])
        if quota and period:
            limits.append(Limit(quota / period, group))
    return min(limits, key=lambda limit: limit.most, default=None)


def memory_used(group: Path) -> int | None:
    """Bytes that a group uses, without file cache that the kernel may drop at once."""
    used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes")
    if used is None:
        return None
    for line in _text(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        # `total_` is version 1's word for a group with all groups below it.
        is_own = name == "inactive_file" and (group / "memory.current").exists()
        if is_own or name == "total_inactive_file":
            used -= float(value)
    return max(0, int(used))


def cpu_used_s(group: Path, mount: Path = MOUNT) -> float | None:
    """Seconds of CPU time that a group has used."""
    for line in _text(group / "cpu.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == "usage_usec":
            return float(value) / 1e6
    # Version 1 counts in a tree of its own, which is often the same one.
    if mount in group.parents:
        _, *path = group.relative_to(mount).parts
        nanoseconds = _number(mount.joinpath("cpuacct", *path) / "cpuacct.usage")
        return None if nanoseconds is None else nanoseconds / 1e9
    return None


def usable_cpus() -> set[int]:
    """The numbers of the CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _groups(controller: str, membership: Path, mount: Path) -> Iterator[Path]:
    """The folders of this process's group and of all groups above it, for one controller."""
    for line in _text(membership).splitlines():
        # HIERARCHY:CONTROLLERS:PATH; version 2 names no controllers.
        fields = line.split(":", 2)
        if len(fields) != 3:
            continue
        _, controllers, path = fields
        if controllers == "":
            root = mount
        elif controller in controllers.split(","):
            root = mount / controller
        else:
            continue
        # Inside a container the path may be the host's. Only a part of it exists there.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for count in range(len(parts) + 1):
            yield root.joinpath(*parts[:count])


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""


def _number(file: Path) -> float | None:
    """The number in a file; None for a word, -1 (no quota) or no file."""
    text = _text(file).strip()
    return float(text) if text.isdecimal() else None
