"""What decodes as a task is there at once."""

from __future__ import annotations

import subprocess
import sys


def test_decoding_brings_neither_torch_nor_ray() -> None:
    """They take a fresh worker process four seconds, before the first image of the first epoch."""
    code = (
        "import sys, raypipe.feed.decoding; "
        "print([m for m in ('torch', 'ray', 'pandas') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"
