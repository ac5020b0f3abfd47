"""What needs sharding never lies whole on a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from raypipe.train import parallel

from .parallel_ranks import data, tiny


def test_fsdp_takes_one_tensor_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ba74455 moved the whole model to each device first, so a larger one could not be built."""
    model = tiny()
    whole = sum(t.numel() for t in model.state_dict().values())
    sent: list[int] = []
    real = dist.broadcast

    def moved(*how: Any, **more: Any) -> None:
        raise AssertionError("the whole model was moved to the device")

    def broadcast(tensor: torch.Tensor, *how: Any) -> Any:
        sent.append(tensor.numel())
        return real(tensor, *how)

    dist.init_process_group("gloo", f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        monkeypatch.setattr(model, "to", moved)
        monkeypatch.setattr(dist, "broadcast", broadcast)
        cfg = parallel.ParallelConfig(strategy="fsdp", batch_size=16, lr=0.01, precision="fp32")
        engine = parallel.build(model, cfg)
        assert sum(sent) == whole and max(sent) < whole / 2
        assert not any(p.numel() for p in model.parameters())  # given up, tensor by tensor
        expected = tiny()
        engine.train()
        images, labels_B = data(0)
        loss = engine.step(images, labels_B, cross_entropy)
        assert float(loss) == pytest.approx(
            cross_entropy(expected(images), labels_B).item(), rel=1e-5
        )
    finally:
        dist.destroy_process_group()
