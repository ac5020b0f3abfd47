"""The rival of benchmarks/step.py: DDP as one writes it by hand, from pixels in memory. Knows
nothing of raypipe but the model.

torchrun --nproc-per-node 2 -m benchmarks.bare_ddp '{"model": {…}, "pixels": "pixels.npz",
"batch_size": 32, "steps": 40}'
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from raypipe.models.zoo import ImageModel, ModelConfig


def main() -> None:
    asked = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)

    with np.load(asked["pixels"]) as stored:
        pixels_NHWC, labels_N = (
            torch.from_numpy(stored["pixels"]),
            torch.from_numpy(stored["labels"]),
        )
    order = torch.randperm(len(pixels_NHWC))
    mine = order[rank::world].split(asked["batch_size"] // world)

    model = ImageModel(ModelConfig(**asked["model"]), int(labels_N.max()) + 1).to(
        memory_format=torch.channels_last
    )
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4, fused=True)

    total = torch.zeros(())
    for rows in mine[: asked["steps"]]:
        loss = cross_entropy(model(pixels_NHWC[rows]), labels_N[rows])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
