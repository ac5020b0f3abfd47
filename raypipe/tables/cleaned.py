"""Was a version cleaned, and of what? The log and the table of verdicts say so.

A version is cleaned if the last commit that changed its rows is one of `raypipe clean`. Whoever
adds a row afterwards has a version that nobody judged.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from raypipe.errors import one_line
from raypipe.tables import history, verdicts
from raypipe.tables.address import resolve
from raypipe.tables.table import ImageTable, TableVersion

LOOKED_AT = 100  # commits before the version; a log may have 100,000
CLEAN = re.compile(r"clean (\w+) of v(\d+)")  # what a commit of `raypipe clean` says
State = Literal["cleaned", "judged", "not cleaned", "unknown"]


@dataclass(frozen=True)
class Cleaning:
    """What cleaning says of a version.

    cleaned: it is the judged version without the dropped rows. judged: it was judged itself, and
    `dropped` of its rows were to be dropped; 0: there was nothing to drop. verdicts: images by
    verdict. judged: the version that was looked at. source: where this was found, or why it is
    unknown.
    """

    state: State
    judged: str = ""
    policy: str = ""
    images: int = 0
    dropped: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    source: str = ""

    def text(self) -> str:
        """In words."""
        counts = ", ".join(f"{n:,} {name}" for name, n in self.verdicts.items()) or "nothing"
        if self.state == "cleaned" and not self.images:
            return f"Cleaned by {self.policy}; how many images were dropped is not known"
        if self.state == "cleaned":
            return (
                f"Cleaned: of {self.images:,} images of {self.judged} {self.dropped:,} were "
                f"dropped. Found: {counts}"
            )
        if self.state == "judged" and self.dropped:
            return (
                f"Not cleaned, though it was judged: {self.dropped:,} of its {self.images:,} "
                f"images were to be dropped, and are in it. Found: {counts}"
            )
        if self.state == "judged":
            return f"Judged, and nothing was to be dropped of {self.images:,} images"
        return "Not cleaned" if self.state == "not cleaned" else "Not known"


def of(table: ImageTable, version: TableVersion, was: Cleaning | None = None) -> Cleaning:
    """The cleaning of a version; of a prepared table that of its source, unless it was cleaned
    itself. Never raises.

    was: what was found earlier. Then the answer differs from it only if it was wrong: a version
    that somebody has judged since, or by other limits, is what it was.
    """
    # What cannot be found out must not cost a training: its reason is the answer.
    try:
        # One that was cleaned itself, too, says what it is.
        is_own = not version.origin or _of(table, version).state in ("cleaned", "judged")
        if version.origin and was is not None and was.judged:
            # What was said of the source is compared with what is said of the source.
            is_own = was.judged.rpartition("@v")[0] == version.uri
        if not is_own:
            uri, _, number = version.origin.rpartition("@v")
            table = ImageTable(resolve(uri), storage_options=table.storage_options)
            version = table.pin(int(number))
        now = _of(table, version)
        if was is not None and was.state == "not cleaned" and now.state == "judged":
            return was
        if was is not None and was.state == now.state == "judged":
            at = replace(version, version=int(was.judged.rpartition("@v")[2]))
            return _counted("judged", table, at, was.policy, now.source)
        return now
    except Exception as e:
        return Cleaning("unknown", source=f"The log or the verdicts cannot be read: {one_line(e)}")


def _of(table: ImageTable, version: TableVersion) -> Cleaning:
    after = max(-1, version.version - LOOKED_AT)
    entries = history.commits(table.at(version), table.uri, table.storage_options, after)
    changing = [entry for entry in entries if entry["changes"]]
    # Commits that the log has forgotten may have been of anything.
    if not changing:
        why = f"The newest {LOOKED_AT} commits that the log still has changed no row"
        return Cleaning("unknown", source=why)
    last = changing[0]
    made = CLEAN.fullmatch(str(last.get("raypipe", "")))
    if made is not None:
        judged = replace(version, version=int(made[2]))
        where = f"{table.uri}, commit {last['version']}, and {verdicts.uri_of(table.uri)}"
        return _counted("cleaned", table, judged, made[1], where)
    found = _judged(table, version, last["version"])
    return found or Cleaning("not cleaned", source=f"The log of {table.uri}")


def _judged(table: ImageTable, version: TableVersion, same: int) -> Cleaning | None:
    """The version, or one since `same`, which has the same rows, was judged; None if none was."""
    names = [f"{table.uri}@v{number}" for number in range(same, version.version + 1)]
    rows = verdicts.about(table.uri, version.table_id, names, table.storage_options)
    judged = [row for row in rows if row["verdict"] == verdicts.JUDGED]
    if not judged:
        return None
    last = judged[-1]
    at = replace(version, version=int(last["table"].rpartition("@v")[2]))
    return _counted("judged", table, at, last["policy"], verdicts.uri_of(table.uri))


def _counted(
    state: State, table: ImageTable, judged: TableVersion, policy: str, source: str
) -> Cleaning:
    rows = verdicts.about(table.uri, judged.table_id, [str(judged)], table.storage_options)
    mine = [row for row in rows if row["policy"] == policy]
    if not mine:
        return Cleaning(state, str(judged), policy, source=f"{source}: the verdicts are not there")
    found = [row for row in mine if row["verdict"] != verdicts.JUDGED]
    images = sum(int(row["value"]) for row in mine if row["verdict"] == verdicts.JUDGED)
    counts = Counter(str(row["verdict"]) for row in found)
    dropped = {_place(row) for row in found if row["dropped"]}
    return Cleaning(
        state, str(judged), policy, images, len(dropped), dict(sorted(counts.items())), source
    )


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    """A row may have several verdicts, and an id several rows."""
    return row["file"], row["row"], row["image_id"]
