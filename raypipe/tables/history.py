"""The commits of a Delta log: what each says, and when it was made.

deltalake's `history()` is not used: it counts down from the newest version over the commits that
have a `commitInfo`. That action is optional, so a single commit without it gives every older entry
a wrong number. Here the number of a commit is the name of its file.

Time of a commit: its in-commit timestamp where the table has those
(`delta.enableInCommitTimestamps`). Otherwise the time of its file; where that is not later than the
commit before, one millisecond after it, as the protocol says. `commitInfo.timestamp` is the
writer's own clock and proves nothing. A copied table has new file times; in-commit timestamps are
copied with it.
Source: the Delta protocol, sections "In-Commit Timestamps", "Commit Provenance Information";
Spark's DeltaHistoryManager.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from deltalake import DeltaTable
from pyarrow.fs import FileSelector

from raypipe.errors import DataError
from raypipe.stores import local
from raypipe.tables import storage
from raypipe.tables.fragment import Options, remote

READERS = 8  # a commit is a small file: reading waits more than it computes
_COMMIT_FILE = re.compile(r"(\d{20})\.json")


def commits(
    delta: DeltaTable,
    uri: str,
    storage_options: Options,
    after: int = -1,
    files: bool = False,
) -> list[dict[str, Any]]:
    """The commits after version `after` and up to this version, newest first.

    Each entry has the fields of its commitInfo and: version; timestamp (ms); operation ("" when the
    writer gave none); changes (True when rows were added, removed or changed). With `files` also
    added and removed: paths of files, as the log writes them. Raises DataError.
    """
    log = _Log(uri, storage_options)
    # Another writer may have committed since `delta` was opened.
    file_times = {}
    for version, ms in log.times().items():
        if version <= delta.version():
            file_times[version] = ms
    times = _strictly_rising(file_times)

    # `times` needs every earlier file; only the requested commits are read.
    versions = [version for version in times if version > after]
    with ThreadPoolExecutor(READERS) as pool:
        contents = dict(
            zip(versions, pool.map(log.commit, versions, [files] * len(versions)), strict=True)
        )

    entries = []
    for version in sorted(contents, reverse=True):
        info, changes, named = contents[version]
        timestamp = times[version]
        own_time = info.get("inCommitTimestamp")
        if _has_own_time(delta, version) and isinstance(own_time, int):
            timestamp = own_time
        # Computed values come last: the writer's own fields of these names prove nothing.
        computed = {
            "version": version,
            "timestamp": timestamp,
            "changes": changes,
            **(named if files else {}),
        }
        entries.append({"operation": "", **info, **computed})
    return entries


def at(delta: DeltaTable, uri: str, storage_options: Options, moment: datetime) -> int:
    """The newest version made at `moment` or earlier. Raises DataError when there is none."""
    times = {}
    for entry in commits(delta, uri, storage_options):
        times[entry["version"]] = entry["timestamp"]

    # Times may not rise with the versions across two clocks, so all are compared.
    ms = moment.timestamp() * 1000
    times = _on_one_clock(delta, times, ms)
    earlier = [version for version, made in times.items() if made <= ms]
    if earlier:
        return max(earlier)

    rule = ""
    if times:
        oldest = min(times)
        rule = f"The oldest that its log names is {oldest} of {shown(times[oldest])}"
    raise DataError(
        f"{uri} has no version as old as that",
        got=moment.isoformat(),
        rule=rule,
        fix="raypipe table list shows versions and their times",
    )


def _on_one_clock(delta: DeltaTable, times: dict[int, int], ms: float) -> dict[int, int]:
    """The commits whose times may be compared with `ms`.

    When in-commit timestamps were enabled later than the first commit, the log has two clocks: file
    times before that commit, in-commit timestamps from it on. Only the part on the side of `ms`
    counts.
    """
    properties = delta.metadata().configuration
    first = properties.get("delta.inCommitTimestampEnablementVersion")
    since = properties.get("delta.inCommitTimestampEnablementTimestamp")
    if first is None or since is None:
        return times

    wants_own_times = ms >= int(since)
    same_side = {}
    for version, made in times.items():
        if (version >= int(first)) == wants_own_times:
            same_side[version] = made
    return same_side


def shown(ms: int) -> str:
    """A time in milliseconds as 2026-11-01T00:00:00Z."""
    return f"{datetime.fromtimestamp(ms / 1000, timezone.utc):%Y-%m-%dT%H:%M:%SZ}"


def _has_own_time(delta: DeltaTable, version: int) -> bool:
    """Whether the table had in-commit timestamps when it wrote this version."""
    properties = delta.metadata().configuration
    enabled = properties.get("delta.enableInCommitTimestamps") or ""
    if enabled.lower() != "true":
        return False
    # Commits before the property was set have file times only.
    first = properties.get("delta.inCommitTimestampEnablementVersion") or 0
    return version >= int(first)


def _strictly_rising(times: dict[int, int]) -> dict[int, int]:
    """Each version's time, at least one millisecond after the version before."""
    rising: dict[int, int] = {}
    last = -1
    for version in sorted(times):
        last = max(times[version], last + 1)
        rising[version] = last
    return rising


class _Log:
    """The commit files of a table, local or in an object store."""

    def __init__(self, uri: str, storage_options: Options) -> None:
        self.uri = uri
        # A local folder is read with pathlib, a store through pyarrow.
        self.store: Any = remote(uri, tuple(sorted((storage_options or {}).items())))
        if self.store is None:
            self.folder: Path | str = Path(local(uri), "_delta_log")
        else:
            self.folder = "_delta_log"

    def times(self) -> dict[int, int]:
        """The modification time (ms) of each commit file, by version. Raises DataError."""
        try:
            listed = self._listed()
        except OSError as e:
            raise storage.refusal(e, self.uri, "The table's log cannot be listed") from None

        # The folder also holds checkpoints and checksums.
        times = {}
        for name, ns in listed:
            match = _COMMIT_FILE.fullmatch(name)
            if match:
                times[int(match[1])] = ns // 1_000_000
        return times

    def _listed(self) -> list[tuple[str, int]]:
        """Name and modification time (ns) of every file in the log's folder."""
        if isinstance(self.folder, Path):
            found = []
            for path in self.folder.iterdir():
                # A commit that is being written has another name for a moment.
                with suppress(FileNotFoundError):
                    found.append((path.name, path.stat().st_mtime_ns))
            return found

        entries = self.store.get_file_info(FileSelector(self.folder))
        # Not every store gives a time.
        return [(entry.base_name, entry.mtime_ns or 0) for entry in entries]

    def commit(
        self, version: int, files: bool
    ) -> tuple[dict[str, Any], bool, dict[str, list[str]]]:
        """The commitInfo of a version, whether rows were added, removed or changed, and the paths
        of the files that it added and removed, if `files` are wanted.

        A compaction moves rows and changes none. Raises DataError.
        """
        try:
            text = self._text(f"{version:020d}.json")
            # Not splitlines: a text may hold other line ends.
            actions = [json.loads(line) for line in text.split("\n") if line.strip()]
        except (OSError, ValueError) as e:
            what = f"Version {version} of the table's log cannot be read"
            raise storage.refusal(e, self.uri, what) from None

        # One action a line: the first commitInfo counts, and every added or removed file.
        info: dict[str, Any] = {}
        changes = False
        named: dict[str, list[str]] = {"added": [], "removed": []}
        for action in actions:
            if not info and action.get("commitInfo"):
                info = action["commitInfo"]
            for kind in ("add", "remove"):
                file = action.get(kind)
                if not file:
                    continue
                # A commit may name 100,000 files.
                if files:
                    path = str(file.get("path", ""))
                    named["added" if kind == "add" else "removed"].append(path)
                if file.get("dataChange", True):
                    changes = True
        return info, changes, named

    def _text(self, name: str) -> str:
        if isinstance(self.folder, Path):
            return (self.folder / name).read_text(encoding="utf-8")
        with self.store.open_input_stream(f"{self.folder}/{name}") as stream:
            text: str = stream.read().decode()
        return text
