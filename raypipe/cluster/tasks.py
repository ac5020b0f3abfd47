"""What a task on the cluster returned, or raised, and the end of tasks that nobody waits for."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from raypipe.errors import RaypipeError

ASKED_EVERY_S, ASKED_S = 0.5, 1.5


def result(reference: Any) -> Any:
    """The value of a task. Raises its RaypipeError as it was raised, without Ray's wrapping."""
    import ray

    with own_errors():
        return ray.get(reference)


@contextmanager
def own_errors() -> Iterator[None]:
    """Raise a task's RaypipeError as it was raised: in Ray's wrapping the message comes last, after
    the traceback."""
    from ray.exceptions import RayTaskError

    try:
        yield
    except RayTaskError as e:
        if isinstance(e.cause, RaypipeError):
            raise e.cause from None
        raise


def cancel(references: Iterable[Any], within_s: float = 3.0) -> None:
    """End tasks whose results nobody wants: what follows would wait for their CPUs.

    A worker that is just starting misses the call, so it is repeated. After ASKED_S the worker's
    process is ended, until all tasks have ended or `within_s` is over. Never raises: a cluster that
    is gone runs no tasks.
    """
    import ray

    left = list(references)
    began = time.monotonic()
    with suppress(Exception):
        # Without Ray nothing runs, and to ask it would start it again.
        while left and ray.is_initialized() and time.monotonic() < began + within_s:
            for reference in left:
                ray.cancel(reference, force=time.monotonic() > began + ASKED_S)
            _, left = ray.wait(
                left, num_returns=len(left), timeout=ASKED_EVERY_S, fetch_local=False
            )
