"""The name and the folder of a run without a config file: those of its table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import yaml
from pydantic import ConfigDict

from raypipe.config import Section, key_of, load
from raypipe.files import claim


class Table(Section):
    """The address in the section `table`."""

    model_config = ConfigDict(extra="ignore")

    uri: str | None = None


class Named(Section):
    """The table that overrides name. The configuration looks at all else."""

    model_config = ConfigDict(extra="ignore")

    table: Table = Table()


def table_of(overrides: Sequence[str]) -> str | None:
    """The address of the table in these `section.key=value`; None without one.

    Raises ConfigError for what is no override, and for an address that is no text.
    """
    return load(Named, None, overrides).table.uri


def run_of(uri: str) -> dict[str, str]:
    """The settings `run.name` and `run.dir` for the table at `uri`: runs/NAME.

    Two tables of one name share no folder and no registered model: the second one that is used gets
    a name with a hash of its address, and the same again on a rerun. A run that has only begun has
    nothing in its folder yet, so it claims it (`files.claim`).
    """
    last = uri.rstrip("/").rpartition("/")[2]
    name = re.sub(r"[^\w.-]+", "-", last)
    # A file system counts bytes, and most allow 255.
    name = name.encode()[:100].decode(errors="ignore").strip("-.") or "run"
    table = _absolute(uri)
    runs, own = Path("runs"), f"{name}-{key_of(table)[:6]}"
    if (
        (runs / own).exists()
        or _is_of_another_table(runs / name, table)
        or not claim(runs / name, table)
    ):
        name = own
    return {"name": name, "dir": f"runs/{name}"}


def _is_of_another_table(folder: Path, table: str) -> bool:
    """Does the folder hold trainings or searches, and none of them on this table?

    table: its absolute address.
    """
    tables = set()
    for config in sorted(folder.glob("*/*/config.yaml")):
        # A damaged file, or one of somebody else's, says nothing of a table.
        with suppress(OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
            saved = yaml.safe_load(config.read_text(encoding="utf-8"))
            tables.add(_absolute(saved["table"]["uri"]))
    return bool(tables) and table not in tables


def _absolute(uri: str) -> str:
    return uri if "://" in uri else str(Path(uri).expanduser().resolve())
