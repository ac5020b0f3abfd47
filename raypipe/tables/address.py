"""The address of a table, as every worker understands it."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

from raypipe.errors import DataError
from raypipe.files import is_there

# deltalake asks the catalog for the table's address and for short-lived credentials, on every
# worker anew.
UNITY = "uc://"


def resolve(uri: str) -> str:
    """The address as every worker understands it: local paths become absolute, URLs stay.

    A name of three parts (main.vision.photos) that is no folder here is a name of Unity Catalog, as
    is unity://main.vision.photos. Raises DataError for a folder that deltalake would take for
    another one.
    """
    name = uri.removeprefix("unity://").removeprefix(UNITY)
    if name != uri:
        return UNITY + name
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*){2}", uri) and not is_there(uri):
        return UNITY + uri
    if uri.startswith("file://"):
        _refuse_folder(unquote(uri.removeprefix("file://")))
    if "://" in uri:
        return uri
    scheme = re.match(r"([A-Za-z][\w+.-]+):/(?!/)", uri)
    if scheme and not is_there(uri):
        # As Spark and Databricks write it.
        raise DataError(
            "This is no address of a table",
            got=uri,
            rule=f"{scheme[1]}:/ with one slash would be a folder of the working directory",
            fix=f"A path of this machine: /…; of DBFS: /dbfs/…; of a store: {scheme[1]}://…",
        )
    # An empty address would mean the working directory, whatever lies there.
    if not uri.strip():
        raise DataError(
            "This is no address of a table",
            got=uri,
            rule="It is a folder, a URL, or a name of Unity Catalog",
            fix="Set table.uri",
        )
    folder = str(Path(uri).expanduser().absolute())
    _refuse_folder(folder)
    escaped = re.search(r"%[0-9A-Fa-f]{2}", folder)
    if escaped:
        raise _no_folder(folder, f"takes {escaped[0]} for another character")
    return folder


def _refuse_folder(folder: str) -> None:
    """Raise DataError for a folder with a character that deltalake 1.6 cannot have in a path.

    Brackets end the process with a panic of Rust, and a backslash leads to another folder.
    """
    wrong = re.search(r"[\[\]\\\x00-\x1f\x7f]", folder)
    if wrong:
        raise _no_folder(folder, f"cannot have {wrong[0]!r} in a path, or takes it for a slash")


def _no_folder(folder: str, why: str) -> DataError:
    return DataError(
        "No table can be in a folder of this name",
        got=folder,
        rule=f"deltalake {why}: it fails, or writes to another folder",
        fix="Rename the folder",
    )
