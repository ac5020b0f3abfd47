"""Registered versions and the champion alias.

MLflow lets the last writer of an alias win. So a move is fenced by a commit in the table of moves
(moves.py), and the alias follows that table (follow.py). A promotion names the champion that the
challenger was compared with; it is refused if the alias has moved since. A version that was rolled
back is barred, and a decision is carried out once.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from raypipe.errors import DataError, RaypipeError, one_line
from raypipe.files import file_lock
from raypipe.models.tasks import Task
from raypipe.registry import catalog, follow, mlflow_model, moves, of_task, patience
from raypipe.registry.follow import Held
from raypipe.registry.moves import History, Why
from raypipe.registry.package import Package
from raypipe.registry.runs import KEY
from raypipe.registry.store import Store
from raypipe.tables import retries
from raypipe.tables.commits import TRIES, Moved

SEAL = "raypipe.manifest"  # tag of a registered version: sha256 of its package's manifest
MOST_VERSIONS = 2**31 - 1  # a column of MLflow's
DECISION = "raypipe.decision"  # tag of a challenger: key of its comparison, and how it ended


@dataclass(frozen=True)
class ModelVersion:
    """A registered model version. Predictions and drift checks record its name and number."""

    name: str
    version: int
    uri: str
    tags: dict[str, str]

    @property
    def seal(self) -> str | None:
        """sha256 of the registered package's manifest; None if an older raypipe registered it."""
        return self.tags.get(SEAL)

    def __str__(self) -> str:
        return f"{self.name}/{self.version}"


def _model_version(entity: Any) -> ModelVersion:
    """From MLflow's own record of a version."""
    # What was decided later says nothing about the version itself.
    later = follow.APPLIED, follow.MOVED_AT, DECISION
    tags = catalog.read(entity.tags)
    tags = {k: v for k, v in tags.items() if not k.startswith(later)}
    return ModelVersion(entity.name, int(entity.version), str(entity.source), tags)


def find(store: Store, key: str) -> ModelVersion | None:
    """The first version that was registered with this key, or None.

    A version without a seal does not count: registering it again gives one that can be checked.
    """
    for entity in _entities(store):
        version = _model_version(entity)
        if version.tags.get(KEY) == key and version.seal and _is_ready(entity):
            return version
    return None


def versions(store: Store) -> list[ModelVersion]:
    """Every registered version whose files are there, oldest first."""
    return [_model_version(entity) for entity in _entities(store) if _is_ready(entity)]


def _entities(store: Store) -> Iterator[Any]:
    """MLflow's own records of all versions, oldest first."""
    from mlflow.exceptions import MlflowException

    numbers: dict[int, Any] = {}
    token = None
    while True:
        try:
            page = store.client.search_model_versions(f"name = '{store.model}'", page_token=token)
        except MlflowException as e:
            # Unity Catalog says so of a model that does not exist yet; others find nothing.
            if follow.says_not_there(e):
                return
            raise
        numbers |= {int(entity.version): entity for entity in page}
        token = page.token
        if not token:
            break
    for number in sorted(numbers):
        entity = numbers[number]
        # What Unity Catalog finds has no tags: each version is asked for, and may be gone by now.
        if store.is_catalog:
            entity = _entity(store, number)
        if entity is not None:
            yield entity


def _entity(store: Store, number: int) -> Any:
    """MLflow's own record of one version; None if there is none."""
    from mlflow.exceptions import MlflowException

    # SQLite and its driver end in an error of theirs.
    if not 0 < number <= MOST_VERSIONS:
        return None
    try:
        return store.client.get_model_version(store.model, str(number))
    except MlflowException as e:
        if follow.says_not_there(e):
            return None
        raise


def _is_ready(entity: Any) -> bool:
    """Are its files there? In Unity Catalog a version comes first; its writer may have died."""
    return entity.status == "READY"


def require_version(store: Store, number: int, fix: str) -> ModelVersion:
    """The version with this number. Raises DataError with this `fix` if there is none."""
    found = _entity(store, number)
    if found is not None and _is_ready(found):
        return _model_version(found)
    numbers = ", ".join(str(version.version) for version in versions(store))
    raise DataError(
        f"The model {store.model!r} has no version {number}",
        got=store.uri,
        rule=f"Versions: {numbers or 'none'}",
        fix=fix,
    )


def register(
    store: Store, run_id: str, package: Path, key: str, tags: dict[str, str]
) -> ModelVersion:
    """Store the package as an MLflow model and register it with its seal.

    A key is registered once: if it is there already, its version is returned.
    """
    import mlflow

    # log_model takes its address from the process, which may have opened another store since.
    mlflow.set_tracking_uri(store.address)
    mlflow.set_registry_uri(store.registry)
    with file_lock(store.folder / "register.lock"):
        before = find(store, key)
        if before is not None:
            return before
        # Opening checks the files against their manifest before anything is uploaded.
        opened = Package(package)
        with patience.told(store.address, store.registry):
            logged = mlflow_model.log(run_id, opened)
        _ensure_name(store)
        marks = {KEY: key, SEAL: opened.seal} | tags
        created = store.client.create_model_version(
            store.model,
            source=logged.model_uri,
            run_id=run_id,
            tags=catalog.written(marks) if store.is_catalog else marks,
            model_id=logged.model_id,
        )
        # The lock holds on hosts that share the folder. If a host that does not share it has
        # registered the same key meanwhile, the first version counts. In Unity Catalog that one may
        # become ready after this look: then both stay, and the first counts from then on.
        first = find(store, key)
        if first is not None and first.version < int(created.version):
            store.client.delete_model_version(store.model, created.version)
            return first
        return _model_version(created)


def tag_decision(store: Store, version: ModelVersion, decision: str, promoted: bool) -> None:
    """Note on a challenger how the comparison with the key `decision` ended."""
    said = f"{decision} {'promoted' if promoted else 'refused'}"
    tag = catalog.written({DECISION: said}) if store.is_catalog else {DECISION: said}
    for key, value in tag.items():
        store.client.set_model_version_tag(version.name, str(version.version), key, value)


def champion(store: Store) -> ModelVersion | None:
    """The version that the alias points at, or None before the first promotion.

    The alias is brought in line with the table of moves first.
    """
    entity = follow.held(store).entity
    return None if entity is None else _model_version(entity)


def had_champion(store: Store) -> bool:
    """Has the alias ever named a version? By the moves, or, where their table is a new one, by the
    tag that an applied move has left on its version."""
    tag = follow.APPLIED + store.alias
    if moves.read(store).used():
        return True
    return any(tag in catalog.read(entity.tags) for entity in _entities(store))


def require_champion(store: Store) -> ModelVersion:
    """The champion. Raises DataError if there is none."""
    version = champion(store)
    if version is not None:
        return version
    what = f"There is no {store.alias} of {store.model!r}"
    there = versions(store)
    if not there:
        fix = "Train and register one first: raypipe tune CONFIG"
        raise DataError(what, got=store.uri, fix=fix)
    # Another alias is meant, or somebody has deleted this one in MLflow.
    raise DataError(
        what,
        got=store.uri,
        rule=f"The newest registered version is {there[-1].version}, and this alias names none",
        fix=f"raypipe promote CONFIG --version N registry.alias={store.alias}",
    )


class Lost(RaypipeError):
    """Somebody else moved the alias first."""


class Gone(DataError):
    """The files of a version are not where MLflow keeps them, or cannot be reached."""


class Barred(DataError):
    """The version was rolled back, or its decision was carried out before."""


class Unreadable(DataError):
    """The files of a version cannot be read, or are not those that were registered."""


def promote(
    store: Store,
    challenger: ModelVersion,
    expected: int | None,
    why: Why = "promotion",
    note: str = "",
    evidence: Mapping[str, Any] | None = None,
    unbar: bool = False,
) -> None:
    """Point the alias at `challenger`, if it still points at version `expected`.

    `expected` is None if there was no champion. evidence: keys of what called for it, as of its
    decision. unbar: also a version that was rolled back. Raises Lost if the alias has moved, Barred
    for a version that was rolled back and for a decision that was carried out before, DataError for
    a version of another task than the champion's, Unreadable for one that nobody could load.
    """

    def check(now: Held) -> None:
        if not unbar:
            _refuse_barred(store, now.history, challenger.version, evidence or {})
        if now.version != expected:
            raise _lost(store, now, challenger.version, expected, why)
        _require_same_task(now, challenger)

    _move(store, challenger, check, why, note, evidence)


def rollback(store: Store, to: int | None = None, note: str = "") -> tuple[int | None, int]:
    """Point the alias at version `to` (None: the one before), and bar the version it leaves.

    Returns (version before, version after). If the newest move is a rollback already, None
    changes nothing: the call may be repeated. Raises DataError without an earlier version, Barred
    for one that was rolled back itself, Lost if the alias moves meanwhile, Unreadable for one that
    nobody could load.
    """
    now = follow.held(store)
    done = _rolled_back(now) if to is None else None
    if done is not None:
        return done
    target = _target(store, now, to)

    def check(then: Held) -> None:
        _refuse_barred(store, then.history, target.version, {})
        if then.version != now.version:
            raise _lost(store, then, target.version, now.version, "rollback")

    _move(store, target, check, "rollback", note, None)
    return now.version, target.version


def plan(
    store: Store, version: int | None, unbar: bool = False, rolls_back: bool = False
) -> tuple[int | None, int, History]:
    """What a promotion of this version, or a rollback to it, would do: (from, to, the moves).

    Nothing is written; a crash that the next command would mend is not mended. version: None for
    the one before, of a rollback. Raises what the move itself would.
    """
    now = follow.look(store)
    if rolls_back:
        done = _rolled_back(now) if version is None else None
        if done is not None:
            return done[1], done[1], now.history
        challenger = _target(store, now, version)
    else:
        assert version is not None, "a promotion names its version"
        challenger = require_version(store, version, "raypipe promote CONFIG --version N")
    is_move = now.version != challenger.version
    if not unbar and is_move:
        _refuse_barred(store, now.history, challenger.version, {})
    if not rolls_back:
        _require_same_task(now, challenger)
    if is_move:
        _require_readable(store, challenger, "rollback" if rolls_back else "by hand")
    return now.version, challenger.version, now.history


def beside(store: Store, task: Task) -> str:
    """What to say before a version of this task is registered; "" if nothing. It writes nothing."""
    entity = follow.look(store).entity
    if entity is None:
        return ""
    version = _model_version(entity)
    return of_task.warning(str(version), version.tags, task)


def _require_same_task(now: Held, challenger: ModelVersion) -> None:
    if now.entity is not None:
        current = _model_version(now.entity)
        kinds = [version.tags.get(of_task.KIND) for version in (challenger, current)]
        of_task.require_same(f"The version {challenger}", kinds[0], str(current), kinds[1])


def _rolled_back(now: Held) -> tuple[int | None, int] | None:
    """The ends of the newest move, if that is a rollback already, and the alias is still there."""
    newest = now.history.newest
    if newest is None or newest.why != "rollback" or not newest.version_to:
        return None
    # Somebody has moved the alias in MLflow since, and nobody has recorded that yet.
    if newest.version_to != now.version:
        return None
    return newest.version_from, newest.version_to


def _target(store: Store, now: Held, to: int | None) -> ModelVersion:
    """The version that a rollback goes to. Raises DataError where there is none."""
    target = now.history.before(now.version) if to is None else to
    if target is None or (target not in now.history.used() and target != now.version):
        number = to or now.version
        raise DataError(
            f"There is no earlier {store.alias} of {store.model!r} to go back to",
            got=f"version {number}" if number else "no version is in use",
            rule="A rollback goes to a version that the table of moves has as an earlier one",
            fix="raypipe promote CONFIG --version N moves to any version",
        )
    return require_version(store, target, "Name another one: raypipe rollback CONFIG --to N")


def _move(
    store: Store,
    to: ModelVersion,
    check: Callable[[Held], None],
    why: Why,
    note: str,
    evidence: Mapping[str, Any] | None,
) -> None:
    """Move the alias if `check` does not refuse, and if the files of `to` can be read; again and
    again while others commit to the table."""
    is_read = False
    for attempt in range(1, TRIES + 1):
        now = follow.held(store)
        # Done already, perhaps by an earlier run of this command that was killed afterwards.
        if now.version == to.version:
            return
        check(now)
        if not is_read:
            _require_readable(store, to, why)
            is_read = True
        try:
            follow.move(store, now, to.version, why, note, evidence)
            return
        except Moved:
            # Perhaps a move of another model. If it was this one's, `check` says who won.
            retries.pause(attempt)
    raise retries.busy(store.moves, f"{TRIES} tries")


def _require_readable(store: Store, version: ModelVersion, why: Why) -> None:
    """Raise Unreadable if the package cannot be had, or is not the one that was registered.

    All of it is read and hashed, and nothing of it is run: 20 MB on a disk of this machine take 0.02 s
    (2026-11-27), elsewhere as long as their download. A server that follows the alias could not
    load such a version either, and would say so long after the move.
    """
    try:
        fetch(store, version)
    except DataError as e:
        verb = "rollback CONFIG --to N" if why == "rollback" else "promote CONFIG --version N"
        raise Unreadable(
            f"The {store.alias} is not moved to {version}: {e.what}",
            got=e.got,
            rule=e.rule or "A version is put in use only if its files can be read",
            fix=f"{e.fix or 'Bring the file back from a backup'}. Or take another version: "
            f"raypipe {verb}",
        ) from e


def _lost(store: Store, now: Held, version: int, expected: int | None, why: Why) -> Lost:
    newest = now.history.newest
    moved = f". The newest move: {newest}" if newest else ""
    if why == "promotion":
        doing, rule = "compared", f"It was compared with version {expected}"
        fix = "Run raypipe retrain again"
    else:
        doing, rule = "put in its place", f"It was version {expected}"
        fix = "See raypipe promote CONFIG --history, then run the command again"
    return Lost(
        f"The {store.alias} of {store.model!r} changed while version {version} was being {doing}",
        got=f"version {now.version}",
        rule=rule + moved,
        fix=fix,
    )


def _refuse_barred(
    store: Store, history: History, version: int, evidence: Mapping[str, Any]
) -> None:
    rolled_back = history.rolled_back(version)
    done = history.of_decision(evidence.get("decision"))
    if rolled_back is None and done is None:
        return
    what = f"Version {version} of {store.model!r} is not promoted again"
    rule = f"It was rolled back: {rolled_back}"
    if rolled_back is None:
        rule = f"This decision was carried out before, and the alias was moved since: {done}"
    raise Barred(what, rule=rule, fix=f"raypipe promote CONFIG --version {version} --unbar")


def fetch(store: Store, version: ModelVersion) -> Package:
    """The package of a registered version, checked against the version's seal.

    What a remote store has is read from a temporary folder, which goes afterwards. Raises DataError
    for a package that is not the registered one, or that cannot be checked because the version has
    no seal.
    """
    # Unity Catalog has a copy of its own, elsewhere than the run's.
    address = "models:" if store.is_catalog else _download_uri(store, version)
    if urlparse(address).scheme in ("", "file"):
        return _package(_files(store, version, None), version, store.is_catalog)
    with tempfile.TemporaryDirectory(prefix="raypipe-") as temporary:
        package = _package(_files(store, version, temporary), version, store.is_catalog)
    package.folder = None  # all of its files are in memory
    return package


def _download_uri(store: Store, version: ModelVersion) -> str:
    return store.client.get_model_version_download_uri(version.name, str(version.version))


def _files(store: Store, version: ModelVersion, into: str | None) -> Path:
    """The folder of the version's MLflow model; a local one where it is, unless `into` is given."""
    import mlflow

    # MLflow looks for a version's logged model in its global store: another one may be open, too.
    mlflow.set_tracking_uri(store.address)
    # A version in Unity Catalog names the logged model that it was copied from, which may be gone.
    uri = f"models:/{version}" if store.is_catalog else version.uri
    try:
        with patience.told(store.address, store.registry):
            folder = mlflow.artifacts.download_artifacts(
                artifact_uri=uri,
                tracking_uri=store.address,
                registry_uri=store.registry,
                dst_path=into,
            )
    except (OSError, mlflow.MlflowException) as e:
        # The disk that takes the files is full. MLflow tells of it in the text of another error.
        if os.strerror(errno.ENOSPC) in str(e):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), into) from e
        what = f"The files of {version} are not where MLflow keeps them: {one_line(e)}"
        # MLflow keeps absolute addresses: a store whose folder was moved names the old place.
        rule = "A run's folder that was moved cannot be read by MLflow"
        fix = "Move run.dir back, or train with another run.dir"
        if into is not None:
            rule = "They are in another place than this machine, which may be away for a while"
            fix = "Run the command again; if it stays so, look there whether they were deleted"
        raise Gone(what, got=str(version.uri), rule=rule, fix=fix) from e
    return Path(folder)


def _package(folder: Path, version: ModelVersion, is_catalog: bool) -> Package:
    """The package among the files of an MLflow model. Raises DataError; see `fetch`."""
    package = folder / "artifacts" / "package"
    # MLflow keeps the name of the folder that was logged.
    if not package.exists():
        package = next(folder.glob("artifacts/*"), package)
    if version.seal is None:
        seal = Package(package).seal
        tag = next(iter(catalog.written({SEAL: seal}))) if is_catalog else SEAL
        set_tag = (
            f"MlflowClient().set_model_version_tag({version.name!r}, '{version.version}', "
            f"'{tag}', '{seal}')"
        )
        raise DataError(
            f"The model version {version} has no seal, so its package cannot be checked",
            got=f"no tag {tag}: an earlier raypipe registered it",
            rule="raypipe loads a package only if its manifest has the sha256 "
            "that the registry keeps",
            fix="Train and register again; or, if you trust its files as they are, "
            f"give version {version.version} the tag: {set_tag}",
        )
    return Package(package, version.seal, str(version))


def _ensure_name(store: Store) -> None:
    """Create the registered model, unless it exists."""
    from mlflow.exceptions import MlflowException

    try:
        store.client.create_registered_model(store.model)
    except MlflowException as e:
        if e.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
