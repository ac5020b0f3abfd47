"""What a task on the cluster returned, or raised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from raypipe.errors import RaypipeError


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
