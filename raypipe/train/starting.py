"""While a group of workers has not started: say that it waits, and let SIGTERM end the wait.

Ray Train waits for ever until there is room for all workers, at first and again after a failure:
the node of some may be gone. They see the file that asks them to leave (worker_group.py) only when
they run.
"""

from __future__ import annotations

import _thread
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from raypipe.cluster.ray_private import free_resources
from raypipe.failures import on_sigterm

log = logging.getLogger("raypipe")
# A group needs 18 to 26 s on two cores (elastic.RESTART_S). What takes longer may wait for room.
PATIENCE_S = 45.0
# Whose wait SIGTERM ends now, by the file `leave`.
_waits: set[Path] = set()


class StoppedBeforeStart(Exception):
    """SIGTERM came before the workers ran. What they would go on from is the newest checkpoint."""


@contextmanager
def watched(
    started: threading.Event, leave: Path, workers: int, worker: dict[str, float]
) -> Iterator[None]:
    """Starts a group of `workers` in the block. started: set while they run. leave: see above.

    worker: what each of them needs, as Ray names it. Raises StoppedBeforeStart.
    """
    stopped = threading.Event()

    def stop() -> None:
        leave.touch()
        if not started.is_set():
            stopped.set()
            # Ray makes a KeyboardInterrupt of any error that a signal raises while it waits.
            raise KeyboardInterrupt

    ended = threading.Event()
    notice = threading.Thread(target=_tell, args=(started, ended, workers, worker), daemon=True)
    notice.start()
    try:
        with on_sigterm(stop):
            if leave.exists():
                raise StoppedBeforeStart
            # In other threads nobody hears a signal here.
            if threading.current_thread() is threading.main_thread():
                _waits.add(leave)
            try:
                yield
            finally:
                _waits.discard(leave)
    except KeyboardInterrupt:
        if stopped.is_set():
            raise StoppedBeforeStart from None
        # In a notebook the cluster stays: the workers must not train on.
        leave.touch()
        raise
    finally:
        ended.set()
        notice.join(timeout=10)


def workers_lost(started: threading.Event, leave: Path) -> None:
    """The workers run no more, and Ray Train may wait for others. May be called in any thread.

    A SIGTERM that came while they ran has asked them alone to leave: it ends the wait, too.
    """
    started.clear()
    # Elsewhere the signal would be Ray's, which ends the process.
    if leave in _waits and leave.exists():
        _thread.interrupt_main(signal.SIGTERM)


def _tell(
    started: threading.Event, ended: threading.Event, workers: int, worker: dict[str, float]
) -> None:
    """Log every PATIENCE_S that the workers do not run, if they have not for so long."""
    kinds = {kind: need for kind, need in worker.items() if need > 0}
    needs = " and ".join(f"{need:g} {kind}" for kind, need in kinds.items())
    waited = True  # before the first look, for the whole of PATIENCE_S
    while not ended.wait(PATIENCE_S):
        waits, waited = waited, not started.is_set()
        if not (waits and waited):
            continue
        try:
            nodes = free_resources().values()
        except Exception as e:
            # A look that fails must not end the thread.
            log.debug("Could not look for room: %s", e)
            continue
        free = " and ".join(
            f"{sum(node.get(kind, 0) for node in nodes):g} {kind}" for kind in kinds
        )
        log.info(
            "%d workers of %s each have not started yet. Free are %s: they may wait for others on "
            "this cluster. Ctrl-C or SIGTERM ends the wait.",
            workers,
            needs,
            free,
        )
