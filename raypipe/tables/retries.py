"""How often a commit is attempted while others write to the same table, and the error when that is
not enough.
"""

from __future__ import annotations

import random
import time

from raypipe.errors import DataError, Unreachable

ATTEMPTS = 20


def pause(attempt: int) -> None:
    """Wait before the next attempt: at random, and longer each time, or rivals would meet again."""
    time.sleep(random.uniform(0, 0.02 * min(attempt, 10)))


def busy(uri: str, got: str = f"{ATTEMPTS} attempts") -> DataError:
    """The error for a commit that other writers overtook each time; `got` says how long it was
    attempted.
    """
    return Unreachable(f"Others keep writing to {uri}", got=got, fix="Run again when they are done")
