"""The command line in a process that kills itself at a chosen call.

    python -m tests.chaos.killed_at MODULE:NAME before|after raypipe-arguments…

NAME is a function or a method of the module (`Class.method`). At its first call the process gets
SIGKILL, before the call or when it has returned.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
from typing import Any

from raypipe import main as command_line


def arm(where: str, when: str) -> None:
    module, _, name = where.partition(":")
    *path, last = name.split(".")
    owner: Any = functools.reduce(getattr, path, importlib.import_module(module))
    real = getattr(owner, last)

    @functools.wraps(real)
    def called(*given: Any, **named: Any) -> Any:
        if when == "after":
            real(*given, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, last, called)


if __name__ == "__main__":
    arm(*sys.argv[1:3])
    sys.exit(command_line.main(sys.argv[3:]))
