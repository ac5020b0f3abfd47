"""Limits of control groups, version 1 and 2, and what is used of them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from raypipe.cluster import container


def grown(folder: Path, membership: str, files: dict[str, str]) -> tuple[Path, Path]:
    """The file of a process's groups, and a tree of groups with these files."""
    (folder / "cgroup").write_text(membership + "\n")
    for name, text in files.items():
        file = folder / "fs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return folder / "cgroup", folder / "fs"


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/", {"memory.max": "1073741824"}, 2**30),  # v2, in its own namespace
        (
            "0::/a/b",
            {"memory.max": "max", "a/memory.max": "2048", "a/b/memory.max": "4096"},
            2048,
        ),  # the least above it
        ("0::/a", {"a/memory.max": "max"}, None),
        (
            "5:cpu:/\n4:memory:/docker/x\n0::/",
            {"memory/memory.limit_in_bytes": "4096"},
            4096,
        ),  # v1: the host's path
        (
            "4:memory:/x",
            {"memory/x/memory.limit_in_bytes": "9223372036854771712"},
            None,
        ),  # v1: nothing set
        (
            "4:cpu,memory:/x",
            {"memory/memory.limit_in_bytes": "8192", "memory/x/memory.limit_in_bytes": "512"},
            512,
        ),
        ("nonsense", {}, None),
    ],
)
def test_a_containers_memory_limit_is_read(
    tmp_path: Path, membership: str, files: dict[str, str], limit: int | None
) -> None:
    found = container.memory_limit(*grown(tmp_path, membership, files))
    assert (found.most if found else None) == limit


@pytest.mark.parametrize(
    ("membership", "files", "cpus", "used_s"),
    [
        (
            "0::/pod/main",
            {
                "pod/cpu.max": "150000 100000",
                "pod/main/cpu.max": "max 100000",
                "pod/cpu.stat": "usage_usec 2500000\nuser_usec 1",
                "pod/main/cpu.stat": "usage_usec 7",
            },
            1.5,
            2.5,
        ),  # used is read where the limit is
        (
            "3:cpu,cpuacct:/docker/x",
            {
                "cpu/docker/x/cpu.cfs_quota_us": "200000",
                "cpu/docker/x/cpu.cfs_period_us": "100000",
                "cpuacct/docker/x/cpuacct.usage": "4000000000",
            },
            2.0,
            4.0,
        ),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None, None),
    ],
)
def test_a_containers_cpus_are_read(
    tmp_path: Path, membership: str, files: dict[str, str], cpus: float | None, used_s: float | None
) -> None:
    tree = grown(tmp_path, membership, files)
    found = container.cpu_limit(*tree)
    assert (found.most if found else None) == cpus
    assert (container.cpu_used_s(found.group, tree[1]) if found else None) == used_s


@pytest.mark.parametrize(
    "files",
    [
        {"memory.current": "900", "memory.stat": "anon 1\ninactive_file 300\ntotal_x 2"},
        {
            "memory.usage_in_bytes": "900",
            "memory.stat": "inactive_file 77\ntotal_inactive_file 300",
        },
    ],
)
def test_memory_in_use_is_without_droppable_cache(tmp_path: Path, files: dict[str, str]) -> None:
    _, group = grown(tmp_path, "", files)
    assert container.memory_used(group) == 600
    assert container.memory_used(tmp_path / "none") is None


def test_without_cgroups_there_is_no_limit(tmp_path: Path) -> None:
    nothing = tmp_path / "none", tmp_path
    assert container.memory_limit(*nothing) is None and container.cpu_limit(*nothing) is None


def test_this_machines_own_groups_count_what_this_process_uses() -> None:
    """Whatever version and limits this machine has: a busy second is seen, and memory is there."""
    roots = (container.MOUNT / "cpu", container.MOUNT)
    before = {root: container.cpu_used_s(root) for root in roots}
    until = time.process_time() + 0.5
    while time.process_time() < until:
        pass
    counted = [root for root in roots if before[root] is not None]
    if not counted:
        pytest.skip("this machine's root group counts no CPU time")
    for root in counted:
        after, earlier = container.cpu_used_s(root), before[root]
        assert after is not None and earlier is not None and after - earlier > 0.4
    assert 0 < container.usable_memory() <= container.host_memory()
    assert container.usable_cpus() <= set(range(os.cpu_count() or 1))
