"""By what a version was made: the code that ran, the packages beside it, and this machine.

A commit alone proves little: files may have been changed since, and an installed raypipe has no
checkout. So the code's own sha256 stands beside it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from raypipe.version import VERSION

ROOT = Path(__file__).resolve().parent.parent  # of the package raypipe


def commit() -> str | None:
    """The commit of the code that runs, or None.

    RAYPIPE_COMMIT names it where there is no checkout; otherwise git does.
    """
    return os.environ.get("RAYPIPE_COMMIT") or _checkout()[0]


def code() -> dict[str, Any]:
    """The code that runs.

    commit: see `commit`. dirty: has a file of the package been changed since that commit? None:
    not known, as without a checkout. sha256: of all its files; see `_sha256_of`. raypipe: version.
    """
    at, dirty = _checkout()
    named = commit()
    return {
        "commit": named,
        "dirty": dirty if named == at else None,
        "sha256": _sha256_of(ROOT),
        "raypipe": VERSION,
    }


def packages() -> dict[str, str]:
    """The version of each installed package, by its name."""
    found = {}
    for one in metadata.distributions():
        # Each `one.metadata` reads and parses the whole file again.
        about = one.metadata
        # A package that was half removed has no name, or no version.
        name, version = about["Name"], about["Version"]
        if name and version:
            found[str(name).lower()] = str(version)
    return dict(sorted(found.items()))


def machine() -> dict[str, Any]:
    """This machine, without its name: a package travels."""
    import torch

    gpus = []
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "memory_mb": _memory_mb(),
        "gpus": gpus,
        "cuda": torch.version.cuda,
    }


@lru_cache(maxsize=1)
def _checkout() -> tuple[str | None, bool | None]:
    """The commit of the checkout that holds this code, and whether files of it were changed.

    (None, None) without a checkout. Asked once: a search of 1,000 trials would ask as often.
    """
    # A raypipe that is installed below somebody's own checkout is no part of it.
    if _git("ls-files", "--error-unmatch", Path(__file__).name, cwd=Path(__file__).parent) is None:
        return None, None
    at = _git("rev-parse", "HEAD", cwd=ROOT)
    changed = _git("status", "--porcelain", "--", ".", cwd=ROOT)
    return at or None, None if changed is None else bool(changed)


def _git(*arguments: str, cwd: Path) -> str | None:
    """What git says; None where it fails."""
    try:
        git = subprocess.run(
            ["git", *arguments], cwd=cwd, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return git.stdout.strip() if git.returncode == 0 else None


@lru_cache(maxsize=1)
def _sha256_of(root: Path) -> str:
    """sha256 of the lines `NAME SHA256` of all .py and .j2 files, sorted by name."""
    lines = []
    for file in sorted(root.rglob("*")):
        if file.suffix in (".py", ".j2"):
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            lines.append(f"{file.relative_to(root).as_posix()} {digest}\n")
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def _cpu() -> str:
    """The model of the CPU, as Linux names it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.processor()


def _memory_mb() -> int | None:
    """Of the whole host."""
    try:
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 10**6)
    except (ValueError, OSError):  # no Linux
        return None
