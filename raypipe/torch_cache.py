"""Locks in torch's cache of compiled operators, without importing torch.

A process that is killed while it compiles an operator (DeepSpeed does on first use) leaves its
lock. All later ones would wait for it without end and without a message.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

# A compilation took 30 to 100 s on two busy cores. An older lock belongs to a dead process.
COMPILES_WITHIN_S = 600.0


def dead_locks() -> list[Path]:
    """The locks of compilations that died."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    # Torch's own rule; tests/test_torch_private.py compares.
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(cache) / "torch_extensions")
    found = []
    for lock in root.glob("**/lock"):
        # OSError: another rank has removed it already.
        with suppress(OSError):
            if time.time() - lock.stat().st_mtime > COMPILES_WITHIN_S:
                found.append(lock)
    return found
