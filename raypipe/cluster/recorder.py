"""Records what the nodes do while a training or a search runs, in a file of its folder.

    with recorded(folder / FILE, every_s=5):
        train()
    nodes = read(folder / FILE)

1. A daemon thread of the driver reads the driver's node (node_reader.py) every few seconds: 0.7 ms
   of CPU time each. Without Ray that is all.
2. On each other node of the cluster one actor without resources reads it, if something runs there.
   Nobody waits for an actor: an answer that is late counts at the next turn, an actor whose node
   has left is forgotten, and a node that joined gets one. A node on which nothing has a CPU or a
   GPU loses its actor, because an actor would keep an autoscaler from taking the node away; its
   time counts as unused.
3. Values stay below MOST_VALUES: when there are more, pairs of samples become one, and the next
   ones are taken half as often. So the file stays small, and so does what MLflow gets of it.
4. The file is written about once a minute and at the end. A run that was killed and goes on adds
   to it.

Nothing here may fail or hold up a run: an error ends the recording, silently but for the debug log.
If the cluster cannot be asked, the driver's node is still recorded.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from raypipe.cluster import usage
from raypipe.cluster.node_reader import NodeReader
from raypipe.cluster.other_nodes import PATIENCE_S, OtherNodes
from raypipe.config import LONGEST_S

log = logging.getLogger("raypipe")
MOST_VALUES = 20_000
# A node keeps so many samples at least, in a cluster of however many nodes.
FEWEST = 20
WRITE_EVERY_S = 60.0


@contextmanager
def recorded(file: Path, every_s: float | None) -> Iterator[None]:
    """Record the nodes into `file` while the block runs. every_s: None records nothing."""
    if every_s is None:
        yield
        return
    recorder = _Recorder(file, every_s)
    recorder.start()
    try:
        yield
    finally:
        recorder.stop()


class _Recorder:
    """The thread that asks, keeps and writes."""

    def __init__(self, file: Path, every_s: float) -> None:
        self._file = file
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raypipe-usage", daemon=True)

    def start(self) -> None:
        # No thread can be started where a process has too many.
        with suppress(RuntimeError):
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        # A head that died holds up the thread, and must not hold up the run.
        with suppress(RuntimeError):
            self._thread.join(PATIENCE_S * 2)

    def _run(self) -> None:
        others = OtherNodes()
        try:
            self._record(others)
        except Exception:
            log.debug("Recording the nodes ended early", exc_info=True)
        finally:
            others.close()

    def _record(self, others: OtherNodes) -> None:
        nodes = usage.read(self._file)
        reader = NodeReader()
        here = socket.gethostname()
        own = nodes.setdefault(here, usage.Node(reader.size()))
        own.size = reader.size()
        written_at = time.monotonic()
        ended = False
        while not ended:
            ended = self._stop.wait(min(self._every_s, LONGEST_S))
            usage.add(own, time.time(), reader.read())
            try:
                others.turn(nodes, here, self._every_s, last=ended)
            except Exception:
                log.debug("The other nodes cannot be asked", exc_info=True)
            if sum(map(usage.values, nodes.values())) > MOST_VALUES:
                self._every_s *= 2
                for node in nodes.values():
                    if len(node.samples) > FEWEST:
                        node.samples = usage.merged(node.samples)
            if ended or time.monotonic() - written_at > WRITE_EVERY_S:
                written_at = time.monotonic()
                usage.write(self._file, nodes)
