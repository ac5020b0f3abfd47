"""How an MLflow store looks from here, for `raypipe doctor`. It changes nothing.

MLflow refuses a database of another release of its own, in the middle of a run's start. The release
is a revision of alembic's; MLflow compares it under private names, which stand here alone.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from raypipe.errors import ConfigError, hidden, one_line
from raypipe.registry import catalog
from raypipe.registry.tracking import address_of, file_of, for_mlflow, in_file

DATABASES = "sqlite", "postgresql", "mysql", "mssql"
SQLITE = "sqlite:///"


def examine(uri: str | None, folder: str, of: str = "registry.uri") -> dict[str, Any]:
    """What kind of store it is, and the revision of its schema.

    uri: the value of the setting `of`, registry.uri or registry.registry_uri; None means SQLite in
    `folder`. kind: database, server or none (not made yet). revision, expected: of its schema, ""
    for a server. is_newer: a revision that this MLflow does not know. file: of a SQLite database.
    Raises ConfigError for a store that MLflow or every verb refuses, that does not answer, or that
    cannot be written.
    """
    address = address_of(uri, of) if uri else f"{SQLITE}{Path(folder) / 'mlflow.db'}"
    scheme = address.partition("://")[0].partition("+")[0]
    if scheme in DATABASES:
        return _database(address, of)
    if scheme in ("http", "https", "databricks", "databricks-uc"):
        return _server(address, of)
    raise ConfigError(
        "MLflow 3 keeps no store in plain files",
        got=hidden(address),
        rule="It refuses file: and ./mlruns",
        fix=f"Set {of}=null for SQLite in the run folder, or sqlite:////FOLDER/mlflow.db"
        if of == "registry.uri"
        else f"Set {of}=null for the store of registry.uri, or sqlite:////FOLDER/mlflow.db",
    )


def _database(address: str, of: str) -> dict[str, Any]:
    path = file_of(address)
    file = "" if path is None else str(path)
    if path is not None:
        _require_writable(path, of)
        if not path.exists():
            return {"kind": "none", "revision": "", "expected": "", "file": file}
    # MLflow exports no name that looks at a schema without changing it.
    from mlflow.store.db.utils import (
        _get_latest_schema_revision,
        _get_schema_version,
        create_sqlalchemy_engine,
    )

    try:
        engine = create_sqlalchemy_engine(address)  # type: ignore[no-untyped-call]
        revision = _get_schema_version(engine)  # type: ignore[no-untyped-call]
    except Exception as e:
        raise _unreachable(address, of, e) from e
    expected = _get_latest_schema_revision()  # type: ignore[no-untyped-call]
    found = {"kind": "database", "revision": revision or "", "expected": expected, "file": file}
    return found | {"is_newer": bool(revision) and not _is_known(revision)}


def _require_writable(file: Path, of: str) -> None:
    """Raise ConfigError if the database cannot be written, or made. What is tried is taken back."""
    why = ""
    if file.exists():
        try:
            address = f"file:{quote(str(file.absolute()))}?mode=rw"
            with closing(sqlite3.connect(address, uri=True, isolation_level=None)) as store:
                store.execute("BEGIN IMMEDIATE")
                # SQLite needs a file beside it, too.
                store.execute("CREATE TABLE raypipe_doctor (x)")
                store.execute("ROLLBACK")
        except sqlite3.OperationalError as e:
            # Whoever writes just now shows that it can be written.
            why = "" if "locked" in str(e) else str(e)
        except sqlite3.DatabaseError:
            return  # it is no database: MLflow says so
    else:
        folder = file.absolute().parent
        while not folder.exists():
            folder = folder.parent
        why = "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} may not be written"
    if why:
        raise ConfigError(
            f"The MLflow store cannot be written: {why}",
            got=str(file),
            rule="Runs and models are registered there",
            fix=f"Mend the rights of the file and its folder, or set {of} to another store",
        )


def _is_known(revision: str) -> bool:
    """Is it a revision of this MLflow, or of an older one?"""
    from alembic.script import ScriptDirectory
    from alembic.util import CommandError
    from mlflow.store.db.utils import _get_alembic_config

    scripts = ScriptDirectory.from_config(_get_alembic_config(""))  # type: ignore[no-untyped-call]
    try:
        return scripts.get_revision(revision) is not None
    except CommandError:
        return False


def _server(address: str, of: str) -> dict[str, Any]:
    # What every verb refuses is refused here, before anybody is asked.
    runs = address
    if of == "registry.uri":
        catalog.check_addresses(address, catalog.default_registry(address))
    else:
        catalog.check_addresses("", address)
        # Unity Catalog has models and no runs: MLflow refuses it as a store of these.
        if catalog.is_catalog(address):
            runs = address.replace(catalog.CATALOG, "databricks", 1)
    # A dead server would be tried for minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    import mlflow

    try:
        client = mlflow.MlflowClient(runs, address)
        if of == "registry.uri":
            client.search_experiments(max_results=1)
        else:
            client.search_registered_models(max_results=1)
    except Exception as e:
        raise _unreachable(address, of, e) from e
    return {"kind": "server", "revision": "", "expected": "", "file": ""}


def _unreachable(address: str, of: str, error: Exception) -> ConfigError:
    fix = f"Start it (mlflow server), or check {of}"
    # Its own code, not its text: there, a port may hold these digits.
    status = getattr(error, "get_http_status_code", lambda: None)()
    if status in (401, 403):
        fix = "Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
    return ConfigError(
        f"The MLflow store does not answer: {one_line(error, 200)}",
        got=hidden(address),
        rule="Runs and models are registered there",
        fix=fix,
    )


def migrate(file: str, revision: str) -> Path:
    """Bring a SQLite store to this MLflow's schema; returns the copy of the old one beside it.

    Raises ConfigError if MLflow cannot.
    """
    copy = Path(f"{file}.before-{revision or 'migration'}")
    if copy.exists():
        raise ConfigError("There is a copy of an earlier try", got=str(copy), fix="Move it away")
    # SQLite's own backup: whole even while others write.
    with closing(sqlite3.connect(file)) as old, closing(sqlite3.connect(copy)) as new:
        old.backup(new)
    # In a process of its own, because MLflow sets up logging and engines for good.
    command = [sys.executable, "-m", "mlflow", "db", "upgrade", for_mlflow(in_file(Path(file)))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        # Not a copy of the file: others may have it open.
        with closing(sqlite3.connect(copy)) as old, closing(sqlite3.connect(file)) as new:
            old.backup(new)
        raise ConfigError(
            f"MLflow cannot migrate its store: {one_line(hidden(done.stderr)[-300:])}"
        )
    return copy
