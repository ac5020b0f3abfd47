"""The process group of Ray Train workers that share a node: its store is a file.

Ray gives every group a TCPStore, which listens on all addresses of the node: whoever reaches the
node may write to it. And each of its clients asks DNS for the name of ::ffff:127.0.0.1, which
stands in no /etc/hosts, so the question leaves the host. Listening on loopback alone does not help:
the clients still go by IPv6 (measured). Groups that span nodes are Ray's own.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

from ray.train.backend import Backend
from ray.train.torch import TorchConfig

REMOVE_S = 10.0  # until a worker is taken for dead


class NodeConfig(TorchConfig):
    """Ray's TorchConfig, with the store in a file where one node holds all workers."""

    @property
    def backend_cls(self) -> type[Backend]:
        return _Node


class _Node(Backend):
    share_cuda_visible_devices = True

    def __init__(self) -> None:
        self._theirs: Backend = TorchConfig().backend_cls()
        self._folder = ""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        if len(set(worker_group.execute(_node))) > 1:
            self._theirs.on_start(worker_group, backend_config)
            return
        # A new one for each group: a file of an earlier group would say that all are there.
        self._folder = worker_group.execute_single(0, _make_folder)
        worker_group.execute(_begin, backend_config.backend, self._folder, backend_config.timeout_s)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        try:
            # It fails if any worker is dead.
            self._theirs.on_shutdown(worker_group, backend_config)
        finally:
            self._remove_folder(worker_group)

    def _remove_folder(self, worker_group: Any) -> None:
        """By the first worker that still answers. If none does, the folder stays: a few bytes."""
        import ray

        for rank in range(len(worker_group)) if self._folder else ():
            try:
                done = worker_group.execute_single_async(
                    rank, shutil.rmtree, self._folder, ignore_errors=True
                )
                ray.get(done, timeout=REMOVE_S)
            except ray.exceptions.RayError:
                continue
            self._folder = ""
            return


def _node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def _make_folder() -> str:
    # On the node's own disk: a network's may have no file locks.
    return tempfile.mkdtemp(prefix="raypipe-group-")


def _begin(backend: str, folder: str, timeout_s: int) -> None:
    """In every worker: join the group."""
    import ray.train
    import torch.distributed as dist

    context = ray.train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    # As torchrun sets them: DeepSpeed reads some.
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
        "NODE_RANK": "0",
    }
    path = str(Path(folder) / "store")
    store = dist.FileStore(path, workers)  # type: ignore[attr-defined]  # torch has no stub of it
    timeout = timedelta(seconds=timeout_s)
    store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=workers, timeout=timeout)
