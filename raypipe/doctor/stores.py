"""Checks of the places that a configuration names: run folder, table, MLflow; and of the clock."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from raypipe.doctor.finding import Asked, Finding, Mend, State, of_error, ok, skipped
from raypipe.doctor.machine import existing
from raypipe.doctor.process import Died, ask
from raypipe.doctor.web import get
from raypipe.errors import ConfigError, RaypipeError, hidden
from raypipe.files import has_locks
from raypipe.registry.store_check import migrate
from raypipe.registry.tracking import addresses, for_mlflow, in_file
from raypipe.tables import storage

STORE_S = 40.0
MLFLOW_S = 40.0
# S3 and Azure refuse requests that are signed 15 minutes off.
REFUSED_AT_S, SKEWED_AT_S = 600.0, 5.0
NO_TABLE = "the configuration names no table"
# Variables that object_store reads and people misspell.
VARIABLES = [
    *(f"AWS_{each}" for each in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN")),
    *(f"AWS_{each}" for each in ("REGION", "DEFAULT_REGION", "ENDPOINT_URL", "ALLOW_HTTP")),
    *(f"AZURE_STORAGE_{each}" for each in ("ACCOUNT_NAME", "ACCOUNT_KEY", "SAS_TOKEN")),
    *(f"AZURE_{each}" for each in ("CLIENT_ID", "CLIENT_SECRET", "TENANT_ID")),
    *(f"GOOGLE_{each}" for each in ("APPLICATION_CREDENTIALS", "SERVICE_ACCOUNT")),
    "GOOGLE_SERVICE_ACCOUNT_KEY",
]
# Other variables of the same libraries, which look like one of those.
OTHERS = {"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL_STS", "AWS_REGIONS", "AZURE_STORAGE_ACCOUNT"}
PREFIXES = "AWS_", "AZURE_", "GOOGLE_"


def run_folder(asked: Asked) -> Sequence[Finding]:
    """Can the run's folder be written, renamed in and locked?"""
    folder = asked.settings.run.path
    above = existing(folder)
    probe = above / f".raypipe-doctor-{os.getpid()}-{time.monotonic_ns()}"
    done = probe.with_suffix(".done")
    # What a run does there: write, rename into place, lock.
    try:
        probe.write_text("raypipe doctor removes this", encoding="utf-8")
        probe.rename(done)
        has_locks.cache_clear()
        is_lockable = has_locks(above)
    except OSError as e:
        rule = "Checkpoints, logs and MLflow's own store are written there"
        way_out = "Set run.dir to a folder that this user may write, or mend its rights or its disk"
        seen = f"{above} cannot be written: {e.strerror or e}"
        return [Finding("run.dir", "fail", seen, rule, way_out)]
    finally:
        # A disk that may not be written says so again here.
        for left in (probe, done):
            with suppress(OSError):
                left.unlink()
    where = "" if is_lockable else "; it has no locks, so they lie on this machine's disk"
    return [ok("run.dir", f"{folder}{where}")]


def table(asked: Asked) -> Sequence[Finding]:
    """Can the table be read, and does its store take, list, give out and delete objects?"""
    cfg = asked.settings.table
    if cfg is None:
        return [skipped("table", NO_TABLE), skipped("store", NO_TABLE)]
    # JSON leaves credentials out: they travel apart, and only through a pipe.
    settings = cfg.model_dump(mode="json")
    try:
        facts = ask(
            "raypipe.tables.store_check:examine",
            STORE_S,
            settings=settings,
            options=cfg.storage_options,
        )
    except Died as e:
        rule = "A store answers within seconds"
        way_out = "Check the endpoint and the region in table.uri and table.storage_options"
        seen = f"{cfg.uri}: {e}"
        return [Finding("store", "fail", seen, rule, way_out)]
    return [_table(cfg.uri, facts), _store(cfg.uri, cfg.storage_options or {}, facts)]


def _table(uri: str, facts: Mapping[str, Any]) -> Finding:
    if facts["table_error"]:
        what, got, rule, fix = facts["table_error"]
        return of_error("table", RaypipeError(what, got=got, rule=rule, fix=fix))
    if facts["table"]:
        return ok("table", facts["table"])
    return skipped("table", f"there is none at {uri} yet; raypipe ingest makes it")


def _store(uri: str, options: Mapping[str, str], facts: Mapping[str, Any]) -> Finding:
    errors, left = facts["store_error"], facts["left"]
    keys = _where_keys_are(uri, options)
    if not errors:
        return ok("store", f"writes, lists, reads and deletes{keys}")
    # The first step that failed; the later ones often fail for the same reason.
    step, (what, _, rule, fix) = next(iter(errors.items()))
    refused = f"{what}{keys}" + (f"; {left} stays there" if left else "")
    # Without reading nothing works. Who may only read can train, but not ingest, clean or tag.
    readable = not facts["table_error"] and facts["table"] and step in ("write", "delete")
    if readable and "list" not in errors:
        rule = "train, tune and evaluate read only; ingest, clean and tags write"
        return Finding("store", "warn", f"read-only: {refused}", rule, fix)
    return Finding("store", "fail", refused, rule or "Every verb lists and reads there", fix)


def _where_keys_are(uri: str, options: Mapping[str, str]) -> str:
    """Where the credentials come from; never what they are."""
    if "://" not in uri or uri.startswith("file://"):
        return ""
    if any("key" in name.lower() or "token" in name.lower() for name in options):
        return " (credentials: table.storage_options)"
    names = [name for name in VARIABLES if name in os.environ and "REGION" not in name]
    return f" (credentials: {', '.join(names) or 'none in the environment'})"


def variables(asked: Asked) -> Sequence[Finding]:
    """Is a variable of an object store misspelt?"""
    wrong = misspelt(os.environ)
    if not wrong:
        return [ok("variables", "none of AWS_*, AZURE_* and GOOGLE_* is misspelt")]
    seen = ", ".join(f"{name} (did you mean {meant}?)" for name, meant in wrong.items())
    rule = "The store's library ignores a name that it does not know, and asks the real cloud"
    way_out = "; ".join(f'export {meant}="${name}"; unset {name}' for name, meant in wrong.items())
    return [Finding("variables", "fail", seen, rule, way_out)]


def misspelt(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that look like one of object_store's, and the one that was meant."""
    found = {}
    for name in environment:
        if name in VARIABLES or name in OTHERS or not name.startswith(PREFIXES):
            continue
        if storage.is_option(name):
            continue
        close = get_close_matches(name, VARIABLES, n=1, cutoff=0.9)
        # Whoever has set the right one, too, does not need this one.
        if close and close[0] not in environment:
            found[name] = close[0]
    return found


def mlflow(asked: Asked) -> Sequence[Finding]:
    """Does the MLflow store answer, can it be written, and is it of this MLflow's release?"""
    return [_examined("mlflow", "registry.uri", asked.settings.registry.uri, asked)]


def registry(asked: Asked) -> Sequence[Finding]:
    """The same of the model registry, where that is another store."""
    cfg = asked.settings.registry
    runs, models = addresses(asked.settings.run, cfg)
    if runs == models:
        return [ok("registry", "models are in the store of runs")]
    # As it is set: a password may be in an environment variable.
    uri = cfg.registry_uri or models
    return [_examined("registry", "registry.registry_uri", uri, asked)]


def _examined(name: str, of: str, uri: str | None, asked: Asked) -> Finding:
    """The finding `name` about the store at `uri`, the value of the setting `of`."""
    folder = str(asked.settings.run.path / "mlflow")
    try:
        facts = ask("raypipe.registry.store_check:examine", MLFLOW_S, uri=uri, folder=folder, of=of)
    except Died as e:
        rule = "Runs and models are registered there"
        way_out = f"Check {of}; python -m pip install --force-reinstall mlflow if it breaks"
        return Finding(name, "fail", str(e), rule, way_out)
    if facts["kind"] == "none":
        return ok(name, f"{facts['file']}, which the first run makes")
    if facts["revision"] == facts["expected"]:
        seen = f"schema {facts['revision']}" if facts["revision"] else "the server answers"
        return ok(name, f"{hidden(uri or facts['file'])}: {seen}")
    return _of_other_release(uri, facts, name, of)


def _of_other_release(
    uri: str | None, facts: Mapping[str, Any], name: str = "mlflow", of: str = "registry.uri"
) -> Finding:
    revision, expected, file = facts["revision"], facts["expected"], facts["file"]
    seen = f"its schema is {revision or 'empty'}, this MLflow's is {expected}"
    rule = "MLflow opens only a store of its own release"
    if facts["is_newer"]:
        seen = f"{hidden(uri or file)}: {seen}, which is older"
        way_out = f"Install the MLflow that made it, or set {of} to another store"
        return Finding(name, "fail", seen, rule, way_out)
    if not file:
        way_out = "Copy the database first, then mlflow db upgrade ADDRESS"
        return Finding(name, "fail", f"{hidden(uri or '')}: {seen}", rule, way_out)
    mend = Mend(
        f"copies {file} to {file}.before-{revision}, then migrates it to schema {expected}",
        lambda: migrate(file, revision),
    )
    copied = shlex.join(["cp", file, f"{file}.before-{revision}"])
    way_out = f"{copied}; mlflow db upgrade {shlex.quote(for_mlflow(in_file(Path(file))))}"
    return Finding(name, "fail", f"{file}: {seen}", rule, way_out, mend)


def clock(asked: Asked) -> Sequence[Finding]:
    """Does this clock agree with those of the stores?"""
    servers = _servers(asked)
    # At the same time: each that is silent takes seconds.
    with ThreadPoolExecutor(max_workers=max(1, len(servers))) as pool:
        answers = zip(servers, pool.map(get, servers.values()), strict=True)
        skews = {name: answer.skew_s for name, answer in answers if answer.skew_s is not None}
    skews["run.dir's file system"] = _skew_of_files(existing(asked.settings.run.path))
    # The one that is furthest off.
    name, skew = max(skews.items(), key=lambda item: abs(item[1]))
    if abs(skew) < SKEWED_AT_S:
        return [ok("clock", f"within {max(1.0, abs(skew)):.0f} s of {', '.join(skews)}")]
    seen = f"{abs(skew):,.0f} s {'ahead of' if skew > 0 else 'behind'} {name}"
    rule = "Stores refuse requests that are signed minutes off; versions by time would be others"
    way_out = "Set the clocks by NTP, this host's or the store's: timedatectl set-ntp true"
    state: State = "fail" if abs(skew) > REFUSED_AT_S else "warn"
    return [Finding("clock", state, seen, rule, way_out)]


def _servers(asked: Asked) -> dict[str, str]:
    """HTTP servers whose time counts: MLflow's, and the endpoint of the table's store."""
    found = {}
    # An address that cannot be found out is the finding of another check.
    with suppress(ConfigError):
        runs, models = addresses(asked.settings.run, asked.settings.registry)
        for uri, name in {models: "the model registry", runs: "MLflow"}.items():
            if uri.startswith(("http://", "https://")):
                found[name] = uri
    cfg = asked.settings.table
    options = {k.lower(): v for k, v in ((cfg.storage_options if cfg else None) or {}).items()}
    if cfg is not None and cfg.uri.startswith(("s3://", "s3a://")):
        found["the object store"] = (
            options.get("aws_endpoint_url")
            or options.get("endpoint_url")
            or os.environ.get("AWS_ENDPOINT_URL")
            or "https://s3.amazonaws.com"
        )
    elif cfg is not None and urlsplit(cfg.uri).scheme in ("az", "abfs", "abfss", "azure"):
        account = options.get("azure_storage_account_name") or options.get("account_name")
        endpoint = options.get("azure_storage_endpoint")
        if endpoint or account:
            found["the object store"] = endpoint or f"https://{account}.blob.core.windows.net"
    elif cfg is not None and cfg.uri.startswith("gs://"):
        found["the object store"] = "https://storage.googleapis.com"
    return found


def _skew_of_files(folder: Path) -> float:
    """Seconds by which this clock is ahead of the one that stamps files in `folder`."""
    probe = folder / f".raypipe-doctor-clock-{time.monotonic_ns()}"
    try:
        probe.touch()
        return time.time() - probe.stat().st_mtime
    except OSError:
        # The check of the run folder says it.
        return 0.0
    finally:
        with suppress(OSError):
            probe.unlink()
