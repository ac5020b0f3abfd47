"""Notice within a second that the cluster's head or this machine's raylet is gone, and say so.

Ray notices too, and ends the process from C++ with exit code 1: at once when the raylet dies,
after 60 s when the head (GCS) dies, and until then `ray.get` waits. Nothing in Python can catch
that. A thread that looks at the processes five times a second can speak before.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

EVERY_S = 0.2
NAMES = {"gcs_server": "head (gcs_server)", "raylet": "raylet"}
Ended = Callable[[], str]  # what has ended, or nothing


def start(lost: Callable[[str], None]) -> Callable[[], None]:
    """Watch the cluster that this process is connected to; returns how to stop. Calls `lost` once, from a thread."""
    import ray

    ended, stopped = _of_own() or _of_node(), threading.Event()
    if ended is None:
        return stopped.set

    def look() -> None:
        while not stopped.wait(EVERY_S):
            what = ended()
            # A cluster that this process stops itself is not lost: Ray disconnects before it does.
            if what and not stopped.wait(EVERY_S) and ray.is_initialized():
                lost(
                    f"The Ray cluster of this command is gone: its {what} has ended. What was finished is kept. "
                    "Run the same command again to go on."
                )
                return

    atexit.register(stopped.set)  # runs before Ray's own, which stops what is watched here
    threading.Thread(target=look, name="raypipe-cluster-watch", daemon=True).start()
    return stopped.set


def _of_own() -> Ended | None:
    """Of a cluster that this process started: its own children."""
    from ray._private import worker

    node = worker._global_node
    if node is None or not node.is_head() or not getattr(node, "ray_init_cluster", False):
        return None
    children = {n: [i.process for i in node.all_processes.get(n, [])] for n in NAMES}
    return lambda: next(
        (NAMES[n] for n, ps in children.items() if any(p.poll() is not None for p in ps)), ""
    )


def _of_node() -> Ended | None:
    """Of a cluster that was joined: the raylet of the node that this process runs on, if it runs here."""
    import psutil  # type: ignore[import-untyped]
    import ray

    flag = f"--node_id={ray.get_runtime_context().get_node_id()}"
    for process in psutil.process_iter(["cmdline"]):
        if flag in (process.info["cmdline"] or []):
            return lambda: "" if _lives(process) else NAMES["raylet"]
    return None


def _lives(process: object) -> bool:
    import psutil

    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)  # type: ignore[attr-defined]
    except psutil.Error:
        return False
