"""What each commit of a Delta log says, and when it was made.

deltalake's `history()` counts down from the newest version over the commits that have a `commitInfo`. That action is optional,
so one commit without it gives every older entry a wrong number. Here a commit's number is its file's name.

When a commit was made: its in-commit timestamp where the table has those (`delta.enableInCommitTimestamps`), else the time of
its file, moved forward by a millisecond where it is not later than the one before, as the protocol says. `commitInfo.timestamp`
is the writer's own clock and proves nothing. A copy of a table has new file times; in-commit timestamps travel with it.
Source: the Delta protocol, sections "In-Commit Timestamps", "Commit Provenance Information"; Spark's DeltaHistoryManager.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from deltalake import DeltaTable
from pyarrow.fs import FileSelector

from raypipe.errors import DataError
from raypipe.tables import storage
from raypipe.tables.fragment import Options, local, remote

READERS = 8  # a commit is a small file: reading waits more than it computes
_COMMIT = re.compile(r"(\d{20})\.json")


def commits(
    delta: DeltaTable, uri: str, storage_options: Options, after: int = -1
) -> list[dict[str, Any]]:
    """One entry a commit after version `after` and up to this one, newest first: what its commitInfo says, and

    version, timestamp (ms), operation ("" when the writer did not say), changes (did rows come, go or change).
    """
    log = _Log(uri, storage_options)
    times = _monotonic({v: ms for v, ms in log.times().items() if v <= delta.version()})
    wanted = [v for v in times if v > after]
    with ThreadPoolExecutor(READERS) as pool:
        found = dict(zip(wanted, pool.map(log.commit, wanted), strict=True))
    entries = []
    for version in sorted(found, reverse=True):
        info, changes = found[version]
        own = {"version": version, "timestamp": times[version], "changes": changes}
        if _has_own_time(delta, version) and isinstance(ms := info.get("inCommitTimestamp"), int):
            own["timestamp"] = ms
        entries.append({"operation": "", **info, **own})
    return entries


def at(delta: DeltaTable, uri: str, storage_options: Options, moment: datetime) -> int:
    """The newest version that was made at `moment` or before. Raises DataError when the log names none."""
    entries = commits(delta, uri, storage_options)
    made = {e["version"]: e["timestamp"] for e in entries}
    told = delta.metadata().configuration
    first, since = (
        told.get(f"delta.inCommitTimestampEnablement{what}") for what in ("Version", "Timestamp")
    )
    ms = moment.timestamp() * 1000
    if (
        first is not None and since is not None
    ):  # two clocks: each is asked for its own part of the log
        made = {v: t for v, t in made.items() if (v >= int(first)) == (ms >= int(since))}
    before = [version for version, when in made.items() if when <= ms]
    if not before:
        oldest = min(made, default=None)
        raise DataError(
            f"{uri} has no version as old as that",
            got=moment.isoformat(),
            rule=""
            if oldest is None
            else f"The oldest that its log names is {oldest} of {shown(made[oldest])}",
            fix="raypipe table list shows versions and their times",
        )
    return max(before)


def shown(ms: int) -> str:
    return f"{datetime.fromtimestamp(ms / 1000, timezone.utc):%Y-%m-%dT%H:%M:%SZ}"


def _has_own_time(delta: DeltaTable, version: int) -> bool:
    told = delta.metadata().configuration
    if (told.get("delta.enableInCommitTimestamps") or "").lower() != "true":
        return False
    return version >= int(told.get("delta.inCommitTimestampEnablementVersion") or 0)


def _monotonic(times: dict[int, int]) -> dict[int, int]:
    found: dict[int, int] = {}
    last = -1
    for version in sorted(times):
        last = found[version] = max(times[version], last + 1)
    return found


class _Log:
    """The commit files of a table: their times (ms), and what one says."""

    def __init__(self, uri: str, storage_options: Options) -> None:
        self.uri = uri
        self.store: Any = remote(uri, tuple(sorted((storage_options or {}).items())))
        self.folder = Path(local(uri), "_delta_log") if self.store is None else "_delta_log"

    def times(self) -> dict[int, int]:
        try:
            if isinstance(self.folder, Path):
                listed = [(p.name, p.stat().st_mtime_ns) for p in self.folder.iterdir()]
            else:
                infos = self.store.get_file_info(FileSelector(self.folder))
                listed = [(i.base_name, i.mtime_ns or 0) for i in infos]
        except OSError as e:
            raise storage.refusal(e, self.uri, "The table's log cannot be listed") from None
        named = [(_COMMIT.fullmatch(name), ns) for name, ns in listed]
        return {int(match[1]): ns // 1_000_000 for match, ns in named if match}

    def commit(self, version: int) -> tuple[dict[str, Any], bool]:
        """Its commitInfo, and whether rows came, went or changed: a compaction moves rows and changes none."""
        name = f"{version:020d}.json"
        try:
            if isinstance(self.folder, Path):
                text = (self.folder / name).read_text(encoding="utf-8")
            else:
                with self.store.open_input_stream(f"{self.folder}/{name}") as stream:
                    text = stream.read().decode()
            actions = [json.loads(line) for line in text.splitlines() if line.strip()]
        except (OSError, ValueError) as e:
            raise storage.refusal(
                e, self.uri, f"Version {version} of the table's log cannot be read"
            ) from None
        info: dict[str, Any] = next((a["commitInfo"] for a in actions if a.get("commitInfo")), {})
        files = [a[kind] for a in actions for kind in ("add", "remove") if a.get(kind)]
        return info, any(f.get("dataChange", True) for f in files)
