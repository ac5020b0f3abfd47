"""Reports within a second that the cluster's head or this machine's raylet has ended.

Ray notices too, and ends the process from C++ with exit code 1: at once if the raylet dies, after
60 s if the head (GCS) dies; until then `ray.get` waits. No Python code can catch that. So a daemon
thread looks at the processes five times a second, and reports before Ray acts:

1. If a process has ended, the thread waits one more round. Meanwhile `close` may stop the watch,
   or Ray may disconnect because this process itself stops the cluster; then nothing is lost.
2. Otherwise the thread calls `lost` with a message, once, and ends. `guard.abort`, which `connect`
   passes, ends the process.
3. At exit, the watch stops before Ray's own exit handler stops the processes it looks at.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Any

from raypipe.cluster import ray_private

EVERY_S = 0.2
NAMES = {"gcs_server": "head (gcs_server)", "raylet": "raylet"}
# Returns the name of a process that has ended, or "".
FindEnded = Callable[[], str]


def start(lost: Callable[[str], None], below: FindEnded = str) -> Callable[[], None]:
    """Watch the cluster that this process is connected to; returns a function that stops it.

    `lost` is called at most once, from a thread. below: asks for what the cluster itself runs on.
    """
    import ray

    find_ended = _of_own_cluster() or _of_node()
    stopped = threading.Event()
    if find_ended is None:
        return stopped.set

    def look() -> None:
        while not stopped.wait(EVERY_S):
            ended = find_ended() or below()
            if not ended or stopped.wait(EVERY_S):
                continue
            # Not connected: somebody has left it, as by ray.shutdown in a notebook. A watch that
            # went on would take the next cluster for this one, and end the process.
            if ray.is_initialized():
                lost(
                    f"The Ray cluster of this command is gone: its {ended} has ended. "
                    "What was finished is kept. Run the same command again to go on."
                )
            return

    # Handlers run in reverse order, so this one runs before Ray's.
    atexit.register(stopped.set)
    threading.Thread(target=look, name="raypipe-cluster-watch", daemon=True).start()
    return stopped.set


def _of_own_cluster() -> FindEnded | None:
    """For a cluster that this process started: its head and raylet are child processes."""
    children = ray_private.own_processes(list(NAMES))
    if children is None:
        return None

    def find_ended() -> str:
        for name, processes in children.items():
            if any(process.poll() is not None for process in processes):
                return NAMES[name]
        return ""

    return find_ended


def _of_node() -> FindEnded | None:
    """For a cluster that was joined: the raylet of this process's node, if it runs here."""
    import ray

    raylet = ray_private.raylet_of(ray.get_runtime_context().get_node_id())
    if raylet is None:
        return None
    return lambda: "" if lives(raylet) else NAMES["raylet"]


def lives(process: Any) -> bool:
    """Does this psutil.Process still run? One that nobody has waited for does not."""
    import psutil  # type: ignore[import-untyped]

    try:
        is_zombie = process.status() == psutil.STATUS_ZOMBIE
        return bool(process.is_running() and not is_zombie)
    except psutil.Error:
        return False
