"""pyspark's private names that raypipe needs, all in one file.

tests/train/test_spark_launch.py trains through each of them and fails when an upgrade moves one.

`TorchDistributor` runs a function by torchrun on barrier tasks. What it leaves open is closed here
(read and run in pyspark 4.1):

1. It opens a port on all interfaces of the driver, asks for no token, and prints on our stderr what
   arrives there. There is no setting. So it gets a server that does nothing; what workers print
   stays in the executor's log.
2. It writes the function's arguments to a file on the executor's disk. So there are none: `around`
   brings them.
3. It leaves its own variables in Spark's Python process, which Spark uses again for other tasks.
   `around` puts them back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any


class _NoServer:
    """In place of LogStreamingServer. Port -1 is that of a server which did not start."""

    port = -1

    def start(self, **_: Any) -> None:
        pass

    def shutdown(self) -> None:
        pass


class _ChosenServer:
    """No server in threads of ours, and TorchDistributor's own for anybody else's."""

    ours = threading.local()

    def __init__(self, theirs: Callable[[], Any]) -> None:
        self._theirs = theirs

    def __call__(self) -> Any:
        return _NoServer() if hasattr(self.ours, "no_server") else self._theirs()


# Called on an executor, in Spark's Python process, with the task's BarrierTaskContext.
Around = Callable[[Any], AbstractContextManager[None]]


def run(function: Callable[[], Any], workers: int, gpu: bool, around: Around) -> Any:
    """Run `function` in one process a barrier task, within `around`; what rank 0 returns.

    around: pickled, and entered in each task before torchrun starts. Publicly, nothing of ours runs
    in the task itself. Call it in a thread of its own.
    """
    from pyspark.ml.torch import distributor

    # The class names the logger, which is told to print on stderr.
    class RaypipeDistributor(distributor.TorchDistributor):
        def _get_spark_task_function(self, *args: Any, **named: Any) -> Any:
            inner = super()._get_spark_task_function(*args, **named)

            def task(batches: Any) -> Iterator[Any]:
                from pyspark import BarrierTaskContext

                with around(BarrierTaskContext.get()):
                    yield from inner(batches)

            return task

    own = logging.getLogger(RaypipeDistributor.__name__)
    own.propagate = False
    own.addHandler(logging.NullHandler())
    if not isinstance(distributor.LogStreamingServer, _ChosenServer):
        distributor.LogStreamingServer = _ChosenServer(distributor.LogStreamingServer)
    # For the rest of this thread.
    _ChosenServer.ours.no_server = True
    return RaypipeDistributor(workers, local_mode=False, use_gpu=gpu).run(function)
