"""The process group of a single Ray Train worker, which needs no server.

Ray gives every group a TCPStore. That listens on all addresses of the node, and torch asks DNS for
the name of each peer, 127.0.0.1 among them: a question that leaves the host and waits for an answer
that nobody needs. Groups of several workers still ask it.
"""

from __future__ import annotations

from typing import Any

from ray.train.backend import Backend
from ray.train.torch import TorchConfig


class OneWorkerConfig(TorchConfig):
    """A process group of one rank, with a store in its own memory."""

    @property
    def backend_cls(self) -> type[Backend]:
        return _OneWorker


class _OneWorker(Backend):
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(_begin, backend_config.backend)


def _begin(backend: str) -> None:
    import torch.distributed as dist

    store = dist.HashStore()  # type: ignore[attr-defined]  # torch exports it without a stub
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
