"""Memory that was used once is not asked of the kernel again."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from raypipe.models.allocator import keep_memory
if "keep" in sys.argv and not keep_memory():
    print(-1)
    sys.exit()
for i in range(20):
    if i == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(16 * 2**20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*arguments: str) -> int:
    return int(
        subprocess.run(
            [sys.executable, "-c", FAULTS, *arguments], capture_output=True, text=True, check=True
        ).stdout
    )


def test_tensors_of_64_mb_cost_page_faults_once_and_not_each_time() -> None:
    kept = faults("keep")
    if kept < 0:
        pytest.skip("this C library has no mallopt")
    pages = 64 * 2**20 // resource.getpagesize()
    assert kept < pages / 10 and faults() > 2 * kept
