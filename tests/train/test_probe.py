"""What runs out of memory in a probe stays there; whatever else goes wrong is said."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from raypipe.errors import RaypipeError
from raypipe.train.auto.probe import in_process, ran_out
from raypipe.train.schedule import find_batch_size

EXBIBYTE = 1 << 60


def up_to_twelve(batch_size: int) -> None:
    torch.empty(batch_size if batch_size <= 12 else EXBIBYTE, dtype=torch.uint8)


def killed(batch_size: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def broken(batch_size: int) -> None:
    raise ValueError("no such layer")


def gone(batch_size: int) -> None:
    os._exit(7)


def endless(batch_size: int) -> None:
    time.sleep(600)


def up_to_the_gpu(batch_size: int) -> None:
    """One GiB an image. No sum of them: it would first copy all as int64, eight times as large."""
    torch.zeros(batch_size, 1 << 30, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()


def test_the_largest_batch_is_found_through_processes_that_run_out() -> None:
    assert find_batch_size(in_process(up_to_twelve), start=12, limit=13) == 12


def test_a_probe_that_the_kernel_kills_did_not_fit() -> None:
    assert in_process(killed)(8) is False


@pytest.mark.parametrize(
    ("work", "says"),
    [
        (broken, r"The probe failed: ValueError: no such layer \(got 'batch of 8'\)"),
        (gone, "The probe failed: exit code 7"),
    ],
)
def test_another_failure_is_said(work: object, says: str) -> None:
    with pytest.raises(RaypipeError, match=says):
        in_process(work)(8)  # type: ignore[arg-type]


def test_a_probe_that_hangs_is_ended() -> None:
    with pytest.raises(RaypipeError, match=r"The probe did not end.*It has 1 s"):
        in_process(endless, timeout_s=1)(8)


def test_torchs_own_words_for_no_memory_are_known() -> None:
    with pytest.raises(RuntimeError, match="allocate") as caught:
        torch.empty(EXBIBYTE, dtype=torch.uint8)
    assert ran_out(caught.value) and ran_out(MemoryError()) and not ran_out(ValueError("shape"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_nothing_of_the_probes_stays_and_the_result_is_within_its_share() -> None:
    before, total = torch.cuda.mem_get_info()
    found = find_batch_size(in_process(up_to_the_gpu), within=0.1)
    assert 0.75 * before < found * (1 << 30) <= total
    assert torch.cuda.mem_get_info()[0] > before - (1 << 28)
