"""Small text files that are replaced in one step."""

from __future__ import annotations

from pathlib import Path


def write_atomic(path: Path, text: str) -> Path:
    """Write `text` to `path` as UTF-8; a reader sees the old file or the new one, never half.

    Makes the parent folder. The text goes to `NAME.partial` first, which then takes the name.
    Two processes that write the same path at the same time are not supported.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    return partial.replace(path)
