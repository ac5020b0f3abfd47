"""Torch's private names still mean what torch_private.py takes them for. One test a name."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raypipe import torch_private


def test_the_resampling_is_that_of_interpolate() -> None:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (1, 3, 37, 53), generator=generator, dtype=torch.uint8)
    out = torch.zeros(1, 3, 16, 20, dtype=torch.uint8)
    torch_private.resize_antialiased(pixels, (16, 20), out)
    expected = nn.functional.interpolate(pixels, (16, 20), mode="bilinear", antialias=True)
    assert torch.equal(out, expected)


def test_tensors_of_one_storage_have_one_id_also_without_values() -> None:
    one, other = torch.zeros(4, 4, device="meta"), torch.zeros(4, 4, device="meta")
    assert torch_private.storage_id(one) == torch_private.storage_id(one[1:].t())
    assert torch_private.storage_id(one) != torch_private.storage_id(other)


def test_all_targets_move_and_are_copied() -> None:
    targets, sources = [torch.zeros(2), torch.ones(3)], [torch.ones(2), torch.full((3,), 5.0)]
    torch_private.lerp_all(targets, sources, 0.25)
    assert [t.tolist() for t in targets] == [[0.25] * 2, [2.0] * 3]
    torch_private.copy_all(targets, sources)
    assert [t.tolist() for t in targets] == [[1.0] * 2, [5.0] * 3]


def test_ddp_times_its_communication() -> None:
    """Among one rank too: the names of its figures are what may move."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(nn.Linear(64, 64))
        for _ in range(3):
            wrapped(torch.ones(8, 64)).sum().backward()
        logged = wrapped._get_ddp_logging_data()
        assert {"avg_backward_comm_time", "avg_backward_compute_comm_overlap_time"} <= set(logged)
        assert 0 <= torch_private.ddp_exposed_s(wrapped) < 1
    finally:
        dist.destroy_process_group()
