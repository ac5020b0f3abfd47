"""The names of a table's versions: tags, and times.

A tag is a table property, `raypipe.tag.NAME = version`. It travels with the table and needs no
second store. A removed tag is an empty property.

Several processes may change tags at once. Each change goes like this:
1. Open the newest version and read its tags.
2. Ask the caller for the new value. The caller may raise, or answer that nothing has to change.
3. Commit the value directly after the opened version. deltalake must not rebase the commit
   (`max_commit_retries=0`).
4. If another commit came first, wait at random for up to 50 ms and start again at 1, for at most 60
   s.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from datetime import datetime, timezone

import yaml
from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import CommitFailedError

from raypipe.errors import DataError
from raypipe.tables import retries, storage
from raypipe.tables.provenance import commit_properties

PREFIX = "raypipe.tag."
REMOVED = ""  # the value of a removed tag
TIMEOUT_S = 60  # of one change: 32 processes that tag at once need 2 s
PAUSE_S = 0.05  # at most, before a change is attempted again

Tags = dict[str, int]  # name -> version


def read(delta: DeltaTable) -> Tags:
    """The tags that this version of the table carries."""
    properties = dict(delta.metadata().configuration)
    for column in delta.schema().fields:  # see `set_property`
        properties |= column.metadata
    tags = {}
    for key, value in properties.items():
        # A removed tag has the value "", which is no number.
        if key.startswith(PREFIX) and value is not None and str(value).isdigit():
            tags[key.removeprefix(PREFIX)] = int(value)
    return tags


def check_name(name: str) -> None:
    """Raise DataError unless this can be a tag: it must not read as a number or a time."""
    if name != name.strip() or not name.isprintable():
        rule = "A tag has no blanks around it and no control characters"
    elif not name or time_of(name) is not None or not _is_yaml_text(name):
        rule = "A number means a version, a date a time, and YAML reads words like null as no text"
    else:
        return
    raise DataError("This cannot be a tag", got=name, rule=rule, fix="Take a word, like golden")


def _is_yaml_text(name: str) -> bool:
    """Whether `table.version=NAME` means this text. `0x10`, `1_0` and `+1` are versions there, `~`
    is none, and `yes` may be true.
    """
    try:
        return bool(yaml.safe_load(name) == name)
    except yaml.YAMLError:
        return False


def time_of(text: str) -> datetime | None:
    """The time in an ISO 8601 text, UTC where it names no zone. None: the text does not begin with
    a date.

    Raises DataError for a text that begins with a date and is no time.
    """
    if not re.match(r"\d{4}-\d{2}-\d{2}", text):
        return None
    try:
        parsed = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        raise DataError(
            "This is no time", got=text, rule="ISO 8601, like 2026-11-01T12:00:00Z"
        ) from None
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=timezone.utc)


def change(
    open_newest: Callable[[], DeltaTable],
    uri: str,
    name: str,
    new_value: Callable[[Tags], str | None],
    why: str,
) -> None:
    """Set tag `name` to what `new_value` returns for the table's current tags (None: nothing has to
    change).

    `new_value` is called again after each lost race. Raises DataError when the table cannot be
    written, or when others keep writing for a minute.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        delta = open_newest()
        value = new_value(read(delta))
        if value is None:
            return
        try:
            set_property(delta, PREFIX + name, value, commit_properties(why))
            return
        except Exception as e:  # deltalake's errors share no base class
            raced = isinstance(e, CommitFailedError) and open_newest().version() != delta.version()
            if not raced:
                raise storage.refusal(e, uri, f"Tag {name!r} cannot be written") from None
            if time.monotonic() > deadline:
                raise retries.busy(uri, f"{TIMEOUT_S} s") from None
        # At random: otherwise the processes that lost this race would meet in the next one.
        time.sleep(random.uniform(0, PAUSE_S))


def set_property(delta: DeltaTable, key: str, value: str, why: CommitProperties) -> None:
    """Write one property in one commit directly after this version of the table."""
    why = CommitProperties(custom_metadata=why.custom_metadata, max_commit_retries=0)
    columns = delta.schema().fields
    # What columns hold is read last: also after the table has lost its reader features.
    has_some = any(name.startswith(PREFIX) for column in columns for name in column.metadata)
    if not delta.protocol().reader_features and not has_some:
        delta.alter.set_table_properties(
            {key: value}, raise_if_not_exists=False, commit_properties=why
        )
        return
    # On a table with reader features deltalake 1.6 adds `variantType` to the protocol whenever it
    # sets a table property. That shuts out older readers for good. The metadata of a column travels
    # with the table as well, so it is used instead.
    chosen = columns[0]
    for column in reversed(columns):
        # A column that has tags already keeps all of them.
        if any(name.startswith(PREFIX) for name in column.metadata):
            chosen = column
    delta.alter.set_column_metadata(chosen.name, {key: value}, commit_properties=why)
