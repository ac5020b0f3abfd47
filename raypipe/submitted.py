"""`python -m raypipe.submitted FOLDER CONFIG VERB …`: a verb that was submitted begins here.

FOLDER is where it was submitted. Relative paths mean what they mean there, if this node has that
folder: it is the same machine, or it shares a file system. CONFIG is the configuration's path
among what travelled; - for none.

Ray's job runs the `python` of the PATH that the cluster was started with. That is another one than
Ray's own if `ray start` was called by its full path, outside of its environment. Then Ray's own
takes over. So nothing but the standard library is imported before that is known.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

NEEDED = "ray", "typer"
_TAKEN_OVER = "RAYPIPE_JOB_PYTHON"


def arguments(given: list[str]) -> list[str]:
    """The verb's arguments; the current folder is FOLDER afterwards, where there is one."""
    folder, config, verb, *more = given
    # The configuration is looked for before the folder changes.
    named = [] if config == "-" else [str(Path(config).absolute())]
    # Not on this node, or of a user whose folder this one may not enter.
    with suppress(OSError):
        os.chdir(folder)
    return [verb, *named, *more]


def missing() -> list[str]:
    """The packages that this Python lacks, so that no verb can run in it."""
    return [name for name in NEEDED if find_spec(name) is None]


def python_of_ray(processes: Path = Path("/proc")) -> str | None:
    """The interpreter of the raylet that started this job; None if there is none to be seen."""
    process = str(os.getpid())
    while process not in ("0", "1"):
        try:
            command = (processes / process / "cmdline").read_text(errors="replace")
            status = (processes / process / "status").read_text(errors="replace")
        except OSError:
            return None
        found = re.search(r"--python_worker_command=(\S+)", command)
        if found:
            return found[1]
        parent = re.search(r"^PPid:\s*(\d+)", status, re.MULTILINE)
        if parent is None:
            return None
        process = parent[1]
    return None


def take_over() -> None:
    """Run this module again with Ray's own Python if this one lacks packages; else return.

    Exits with 2 and one message if there is no other.
    """
    lacking = missing()
    if not lacking:
        return
    other = python_of_ray()
    if other is None or _TAKEN_OVER in os.environ:
        sys.exit(_refuse(lacking))
    os.environ[_TAKEN_OVER] = other
    os.execv(other, [other, "-m", "raypipe.submitted", *sys.argv[1:]])


def _refuse(lacking: list[str]) -> int:
    print(
        f"raypipe: The cluster's Python cannot run raypipe: it has no {' and no '.join(lacking)} "
        f"(got {sys.executable!r}). A job runs in the Python environment of the node. Install "
        "raypipe there, activate that environment before `ray start`, or name its packages in "
        "infra/ray/runtime_env.yaml.",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    take_over()
    from raypipe.main import entry

    entry(arguments(sys.argv[1:]))
