"""The process group of Ray Train workers that share a node: its store stays on loopback.

Ray gives every group a TCPStore that listens on all addresses of the node, by IPv6 with IPv4 inside.
Anyone who reaches the node may write to that store, and torch asks DNS for the name of each peer:
::ffff:127.0.0.1 stands in no /etc/hosts, so the question leaves the host. Here the store listens on
127.0.0.1 alone. Groups that span nodes are Ray's own.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

from ray.train.backend import Backend
from ray.train.torch import TorchConfig

LOOPBACK = "127.0.0.1"

_listening: socket.socket | None = None  # in the worker of rank 0, until the store takes it


class NodeConfig(TorchConfig):
    """Ray's TorchConfig, with the store on loopback where one node holds all workers."""

    @property
    def backend_cls(self) -> type[Backend]:
        return _Node


class _Node(Backend):
    share_cuda_visible_devices = True

    def __init__(self) -> None:
        self._theirs: Backend = TorchConfig().backend_cls()

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        if len(set(worker_group.execute(_node))) > 1:
            self._theirs.on_start(worker_group, backend_config)
            return
        port = worker_group.execute_single(0, _listen)
        worker_group.execute(_begin, backend_config.backend, port, backend_config.timeout_s)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        self._theirs.on_shutdown(worker_group, backend_config)


def _node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def _listen() -> int:
    """In rank 0: take a free port of loopback; the store's clients may connect from now on."""
    global _listening
    _listening = socket.create_server((LOOPBACK, 0))
    return int(_listening.getsockname()[1])


def _begin(backend: str, port: int, timeout_s: int) -> None:
    """In every worker: join the group."""
    import ray.train
    import torch.distributed as dist

    global _listening
    context = ray.train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    # As torchrun sets them: DeepSpeed reads some.
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "NODE_RANK": "0",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
    }
    timeout = timedelta(seconds=timeout_s)
    taken, _listening = _listening, None
    store = dist.TCPStore(
        LOOPBACK,
        port,
        workers,
        is_master=rank == 0,
        timeout=timeout,
        # The store closes the socket at its end.
        master_listen_fd=taken.detach() if taken else None,
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=workers, timeout=timeout)
