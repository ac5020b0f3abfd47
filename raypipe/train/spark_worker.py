"""What happens on a Spark executor while a training runs there (train.launcher=torch_distributor).

    Spark's Python process -- Around --> torchrun -- run --> one rank of the training

1. `Around` is pickled into the Spark task. It brings what no other place may show: credentials go
   into the environment of the processes below, and options of the storage into a file in memory.
   The rest (`Setup`) is a broadcast variable, which Spark may write to the executor's disk.
2. `run` is called by torchrun. It trains as a worker of Ray does.
3. What it has to tell the driver it writes into the folder `inbox` (spark_messages.py), which the
   driver removes in the end.
4. A worker leaves when the file `leave` appears, or when the inbox is gone: then nobody waits for
   it any more.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raypipe import guard
from raypipe.config import to_json
from raypipe.errors import ClusterError, RaypipeError, hidden
from raypipe.feed.feed import Source, fetch
from raypipe.tables import storage
from raypipe.train.checkpoint.saver import Saver, agreed_newest
from raypipe.train.job import TrainJob
from raypipe.train.loop import LoopState
from raypipe.train.spark_messages import AGAIN, MARK, Outbox, as_dict
from raypipe.train.worker import Data, meter_of, train_stages

BROUGHT = "RAYPIPE_BROUGHT"  # names the file in memory
Options = dict[str, str] | None


@dataclass(frozen=True, repr=False)
class Setup:
    """What every worker of a group is started with; no credentials."""

    job: dict[str, Any]
    """The fields of TrainJob as JSON types."""
    data: Data
    checkpoints: Path
    leave: Path
    inbox: Path
    gpu: bool


def without_options(data: Data) -> tuple[Data, Options]:
    """The data without options of the storage, which may hold credentials; and these options."""
    rows = fetch(data.train.rows)
    return _with_options(data, None), rows.storage_options


def _with_options(data: Data, options: Options) -> Data:
    def given(source: Source) -> Source:
        return replace(source, rows=replace(fetch(source.rows), storage_options=options))

    return replace(data, train=given(data.train), val=given(data.val))


@dataclass(frozen=True, repr=False)
class Around:
    """Entered in Spark's Python process, around the process that trains."""

    variables: dict[str, str]
    """Environment variables of the processes below."""
    options: Options
    setup: Any
    """Spark's Broadcast of a pickled Setup."""
    inbox: Path

    @contextmanager
    def __call__(self, task: Any) -> Iterator[None]:
        if not self.inbox.is_dir():
            raise RuntimeError(
                MARK + to_json(as_dict(_not_seen("run.dir", str(self.inbox.parent))))
            )
        # Spark starts a failed stage again, four times in all; here train.max_failures counts.
        try:
            (self.inbox / f"task-{task.partitionId()}").touch(exist_ok=False)
        except FileExistsError:
            raise RuntimeError(AGAIN) from None
        before = dict(os.environ)
        memory = os.memfd_create("raypipe")
        try:
            with open(memory, "wb", closefd=False) as file:
                pickle.dump((self.setup.value, self.options, _neighbours(task)), file)
            brought = {BROUGHT: f"/proc/{os.getpid()}/fd/{memory}"}
            os.environ.update(self.variables | brought)
            yield
        finally:
            os.close(memory)
            os.environ.clear()
            os.environ.update(before)


def _neighbours(task: Any) -> int:
    """Workers on this machine, this one included."""
    hosts = [info.address.rpartition(":")[0] for info in task.getTaskInfos()]
    return hosts.count(hosts[task.partitionId()])


def _not_seen(setting: str, path: str) -> RaypipeError:
    return ClusterError(
        f"A Spark executor does not see {setting}: {socket.gethostname()}",
        got=path,
        rule="The driver and all executors share it",
        fix=f"Set {setting} to a place that all of them see",
    )


def _require_table(data: Data) -> None:
    """Raise ClusterError if the table is a folder that is not here."""
    rows = [fetch(source.rows) for source in (data.train, data.val)]
    for uri in {fragment.uri for part in rows for fragment in part.fragments}:
        if "://" not in uri and not Path(uri).is_dir():
            raise _not_seen("table.uri", uri)


def run() -> dict[str, Any]:
    """One rank of the training, called by torchrun. Returns the loop's state."""
    # If torchrun is killed, nobody else ends this process.
    guard.die_with(os.getppid())
    pickled, options, neighbours = pickle.loads(Path(os.environ.pop(BROUGHT)).read_bytes())
    setup: Setup = pickle.loads(pickled)
    # torchrun counts those of its own task.
    os.environ["LOCAL_WORLD_SIZE"] = str(neighbours)
    outbox = Outbox(setup.inbox, int(os.environ["RANK"]))
    try:
        return _train(setup, _with_options(setup.data, options), outbox).to_dict()
    except BaseException as e:
        outbox.error(e)
        # Spark shows what is printed here as the reason of the failure.
        print(hidden(traceback.format_exc()), file=sys.stderr, flush=True)
        sys.exit(1)
    finally:
        outbox.close()


def _train(setup: Setup, data: Data, outbox: Outbox) -> LoopState:
    job = TrainJob.model_validate(setup.job)
    # From here on no message shows the options that are secret.
    storage.check(job.table.uri, fetch(data.train.rows).storage_options)
    _require_table(data)
    if setup.gpu:
        # Spark shows a task its own GPU alone.
        torch.cuda.set_device(0)
    timeout = timedelta(seconds=job.train.waits_s)
    dist.init_process_group("nccl" if setup.gpu else "gloo", timeout=timeout)
    first = dist.get_rank() == 0
    meter = meter_of(job, setup.checkpoints.parent, outbox.position if first else None)
    with Saver(setup.checkpoints, job.train) as saver:
        state = train_stages(
            job,
            data,
            partial(agreed_newest, setup.checkpoints),
            saver,
            outbox.epoch if first else lambda metrics, state: None,
            lambda: setup.leave.exists() or not setup.inbox.exists(),
            meter,
        )
    # Not after an error: the others would see that this rank is gone before its reason is written.
    dist.destroy_process_group()
    return state
