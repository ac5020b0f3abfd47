"""What a task on the cluster returned, or raised."""

from __future__ import annotations

from typing import Any

from raypipe.errors import RaypipeError


def result(reference: Any) -> Any:
    """The value of a task. Raises its RaypipeError as it was raised, without Ray's wrapping."""
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as e:
        if isinstance(e.cause, RaypipeError):
            raise e.cause from None
        raise
