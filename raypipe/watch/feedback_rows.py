"""Labels of checked images that came since: each is compared once, and kept in `feedback`.

A check looks at its own images and at those of the last `watch.feedback` windows that the same
champion was checked on. Those with a label in watch.batch by now, which no earlier check compared,
are its feedback. With too few of them (LEAST) they wait for the next check.

An image is the same one by its id and its bytes: tables give ids to other images. Of copies, the
same bytes under several ids, one is compared: their errors are one error. Labels that cannot be
read are a note, and no reason for a check to fail: it needs none. Rows are kept
after the evidence that they led to, under the name of what was looked at. So a check that is killed
in between writes them when it is made again, and no label counts twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raypipe.config import RunConfig, key_of
from raypipe.errors import DataError, Unreachable, one_line
from raypipe.models import labels as meaning
from raypipe.models import outcomes
from raypipe.models.outcomes import Outcomes
from raypipe.models.tasks import NUMERIC, Task
from raypipe.registry.package import Package
from raypipe.serve import batch
from raypipe.tables import scan
from raypipe.tables.address import resolve
from raypipe.tables.commits import newest, require_columns_of, rows_named, rows_once
from raypipe.tables.table import ImageTable, TableConfig
from raypipe.train import belonging
from raypipe.watch import by_image, feedback
from raypipe.watch.chosen import Seen
from raypipe.watch.error_tests import LEAST
from raypipe.watch.evidence_row import now
from raypipe.watch.feedback import Feedback
from raypipe.watch.predicted import Batch
from raypipe.watch.settings import WatchConfig
from raypipe.watch.window_log import Entry

FORMAT = 1
ROW = pa.schema(
    [
        (name, pa.string())
        for name in (
            "key",
            "name",
            "model",
            # Of the champion's package: a registry that is made again gives its name to another.
            "seal",
            "image_id",
            "sha256",
            "label",
            "predicted",
            # "asked", "learned" or "copy": why it was not compared; null where it was.
            "left_out",
            "group",
            "judged_at",
        )
    ]
    + [("error", pa.float64()), ("sure", pa.float64()), ("format", pa.int32())]
)
ASKED = pa.schema([(name, pa.string()) for name in ("key", "name", "image_id", "sha256")])
COPY = "copy"
SHOWN, LONGEST = 3, 80  # unknown classes in a note, and characters of each
Image = tuple[str | None, str]  # id and sha256


@dataclass(frozen=True)
class Champion:
    """Who predicted. model: NAME/N. seal: of its package."""

    package: Package
    model: str
    seal: str | None


@dataclass(frozen=True)
class Came:
    """The feedback of a check: `rows` of the table, without key and time, and what they say."""

    rows: tuple[Mapping[str, Any], ...]
    says: Feedback


@dataclass(frozen=True)
class _Label:
    """What a table says of an image. group: "" where it has none. domain: None without a column."""

    text: str
    group: str
    domain: str | None


@dataclass(frozen=True)
class _Said:
    """What the champion said of some images: ids and sha256, scores_NC."""

    images: list[Image]
    scores_NC: np.ndarray


def gather(
    run: RunConfig,
    watch: WatchConfig,
    name: str,
    by: Champion,
    source: TableConfig,
    mine: Batch,
    earlier: Sequence[Entry],
    about: str = "",
) -> Came | None:
    """The labels that came for these images and for those of earlier windows; None: nothing to
    compare.

    name: of the check. earlier: checked windows of this champion (`before`). about: what is looked
    at, as in `keep`: another check of the same, with other settings, compares the same labels.
    Raises DataError for a package that raypipe cannot have written. Labels that cannot be read are
    a note.
    """
    known = by.package.outcomes()
    if not watch.feedback or known is None:
        return None
    try:
        return _gather(run, watch, name, by, source, mine, earlier, known, about)
    except Unreachable:
        raise
    except DataError as e:
        got = f": {e.got}" if e.got else ""
        note = one_line(f"labels: they cannot be compared: {e.what}{got}")
        return Came((), Feedback(notes=(note,)))


def _gather(
    run: RunConfig,
    watch: WatchConfig,
    name: str,
    by: Champion,
    source: TableConfig,
    mine: Batch,
    earlier: Sequence[Entry],
    known: Outcomes,
    about: str,
) -> Came | None:
    table = ImageTable.open(source)
    if not _has_labels(table, mine):
        return None
    said = list(_said(mine, earlier, source))
    judged, again = _judged(run, watch, name, by, _key(about, name, by))
    # A label is read of those that were not compared yet: their bytes are read, too.
    fresh_ones = {image for one in said for image in one.images} - judged
    notes: list[str] = []
    labels = _labels(by.package, table, mine, fresh_ones, notes)
    contents = {digest for _, digest in judged}
    rows: list[dict[str, Any]] = []
    others: list[Seen] = []
    windows: list[int] = []  # of the rows that are compared
    left_out = _left_out(run, watch, by, source, mine, labels)
    # Some may have been asked for since.
    left_out = {image: why for image, why in left_out.items() if image not in again}
    task = by.package.task
    for window, one in enumerate(said):
        fresh: list[int] = []
        for n, image in enumerate(one.images):
            if image not in labels or image in judged:
                continue
            judged.add(image)
            fresh.append(n)
            # Of copies the first one is compared; a row of the others says that they came.
            if image[1] in contents:
                left_out.setdefault(image, COPY)
            contents.add(image[1])
        compared_n = {n for n in fresh if one.images[n] not in left_out}
        # All others of the window, labelled earlier or not: what came is a draw of all of them.
        is_other_N = [
            n not in compared_n and image not in left_out for n, image in enumerate(one.images)
        ]
        sure_N = outcomes.sure(task, one.scores_NC)
        others.append(Seen(sure_N[is_other_N], np.full(sum(is_other_N), window)))
        windows += [window] * len(compared_n)
        rows += _as_rows(task, one, fresh, labels, left_out)
    compared = [row for row in rows if row["left_out"] is None]
    notes += _left_out_in_words(rows)
    if len(compared) < LEAST:
        return None
    notes += _unknown_in_words(task, compared)
    rest = Seen(
        np.concatenate([one.sure_N for one in others]),
        np.concatenate([one.window_N for one in others]),
    )
    came, is_share = _outcomes(compared, labels, known), task.kind not in NUMERIC
    says = feedback.judge(known, came, rest, is_share, run.seed, np.array(windows))
    says = feedback.with_notes(says, notes)
    # Of a group one image is tested. Where these are too few, they are told now and not used up:
    # they are tested when other groups have come.
    by_group = known.groups is not None
    units = {row["group"] if by_group and row["group"] else n for n, row in enumerate(compared)}
    return Came(tuple(rows) if len(units) >= LEAST else (), says)


def _as_rows(
    task: Task,
    said: _Said,
    fresh: Sequence[int],
    labels: Mapping[Image, _Label],
    left_out: Mapping[Image, str],
) -> list[dict[str, Any]]:
    """The rows of the table for these images of `said`, without key and time."""
    if not fresh:
        return []
    texts = [labels[said.images[n]].text for n in fresh]
    scores_nC = said.scores_NC[list(fresh)]
    error_n = outcomes.errors_of_texts(task, scores_nC, texts)
    sure_n = outcomes.sure(task, scores_nC)
    predicted = task.predictions(scores_nC)
    rows = []
    for place, image in enumerate(said.images[n] for n in fresh):
        rows.append(
            {
                "image_id": image[0],
                "sha256": image[1],
                "label": texts[place],
                "predicted": predicted[place],
                "left_out": left_out.get(image),
                "group": labels[image].group,
                "error": float(error_n[place]),
                "sure": None if np.isnan(sure_n[place]) else float(sure_n[place]),
            }
        )
    return rows


def _left_out_in_words(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    notes = []
    for why, text in (
        ("asked", "of images that raypipe asked for, the hardest ones"),
        ("learned", "of images that the champion has learned from"),
        (COPY, "of copies of other images"),
    ):
        count = sum(row["left_out"] == why for row in rows)
        if count:
            notes.append(f"labels: {count} {text}, are not compared")
    return notes


def _unknown_in_words(task: Task, compared: Sequence[Mapping[str, Any]]) -> list[str]:
    unknown = outcomes.unknown(task, [row["label"] for row in compared])
    if not unknown:
        return []
    names = ", ".join(repr(one_line(name, LONGEST)) for name in unknown[:SHOWN])
    more = f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else ""
    return [f"labels: the champion does not know {names}{more}: these count as wrong"]


def _outcomes(
    compared: Sequence[Mapping[str, Any]], labels: Mapping[Image, _Label], known: Outcomes
) -> Outcomes:
    domains = [labels[row["image_id"], row["sha256"]].domain for row in compared]
    has_groups = known.groups is not None and any(row["group"] for row in compared)
    return Outcomes(
        np.array([row["error"] for row in compared]),
        np.array([np.nan if row["sure"] is None else row["sure"] for row in compared]),
        tuple(domain for domain in domains if domain is not None),
        tuple(row["group"] or "" for row in compared) if has_groups else None,
    )


def before(
    log: Sequence[Entry], checks: Sequence[Mapping[str, Any]], by: Champion, window: int, most: int
) -> list[Entry]:
    """The checked windows of this champion before this one, newest first; at most `most`.

    log: of windows, in their order. checks: rows of the table of evidence.
    """
    mine = {row["key"] for row in checks if (row["model"], row.get("seal")) == (by.model, by.seal)}
    found = [
        entry
        for entry in reversed(log)
        if entry.event == "checked" and entry.window < window and entry.evidence in mine
    ]
    return found[:most]


def keep(
    run: RunConfig,
    watch: WatchConfig,
    about: str,
    name: str,
    by: Champion,
    gathered: Callable[[], Came | None],
) -> None:
    """Keep what was compared. about: what was looked at. Does nothing the second time.

    gathered: what `gather` says; asked for only if nothing is kept yet.
    """
    key = _key(about, name, by)
    place, options = watch.place(run, "feedback"), watch.storage_options
    if len(rows_named(place, {"key": key}, ["key"], options)):
        return
    came = gathered()
    if came is None or not came.rows:
        return
    same = {"key": key, "name": name, "model": by.model, "seal": by.seal or "", "format": FORMAT}
    same |= {"judged_at": now().isoformat()}
    rows = pa.Table.from_pylist([dict(row) | same for row in came.rows], ROW)
    why = f"labels of {len(rows)} checked images, {name}"
    rows_once(place, ROW, {"key": key}, lambda: rows, why, options)


def _key(about: str, name: str, by: Champion) -> str:
    return key_of("feedback", FORMAT, about, name, by.model, by.seal)


def keep_asked(
    run: RunConfig, watch: WatchConfig, key: str, name: str, images: Sequence[Image], of: int
) -> None:
    """Keep which of `of` different images a label was asked for: they are no random draw. key: of
    the evidence. All of them are no choice, and nothing is kept: nights of few images would never
    be compared again once they drift."""
    if len(images) >= of:
        return
    # With another watch.ask the same check asks for others: each list is kept.
    key = key_of("asked", key, [digest for _, digest in images])
    rows = [{"key": key, "name": name, "image_id": i, "sha256": digest} for i, digest in images]
    place, options = watch.place(run, "asked"), watch.storage_options
    why = f"labels were asked for, {name}"
    if rows:
        make = pa.Table.from_pylist(rows, ASKED)
        rows_once(place, ASKED, {"key": key}, lambda: make, why, options)


def labelled(package: Package, source: TableConfig, mine: Batch) -> set[str]:
    """sha256 of those images that had a label when they were checked. One that cannot be read is
    none."""
    wanted = set(zip(mine.ids, mine.sha256, strict=True))
    try:
        table = ImageTable.open(source)
        if not _has_labels(table, mine):
            return set()
        return {digest for _, digest in _labels(package, table, mine, wanted, [])}
    except Unreachable:
        raise
    except DataError:
        return set()


def _has_labels(table: ImageTable, mine: Batch) -> bool:
    """A column that is another one's, too, holds no labels."""
    columns = table.columns
    has = table.at(mine.version).schema().to_arrow().names
    return columns.label in has and columns.label not in (columns.id, columns.image)


def _said(mine: Batch, earlier: Sequence[Entry], source: TableConfig) -> Iterator[_Said]:
    """This batch, then earlier windows; one whose predictions are gone is passed over."""
    yield _Said(list(zip(mine.ids, mine.sha256, strict=True)), mine.scores_NC)
    for entry in earlier:
        columns = ["image_id", "sha256", "scores", "error"]
        options = source.storage_options
        try:
            rows = batch.read_rows(entry.predictions, entry.prediction, columns, options)
        except Unreachable:
            raise
        except DataError:
            continue
        rows = rows.filter(pc.is_null(rows["error"])) if len(rows) else rows
        if len(rows):
            images = zip(rows["image_id"].to_pylist(), rows["sha256"].to_pylist(), strict=True)
            yield _Said(list(images), np.stack(rows["scores"].to_numpy()))


def _labels(
    package: Package, table: ImageTable, mine: Batch, wanted: set[Image], notes: list[str]
) -> dict[Image, _Label]:
    """The label of each wanted image that has one in this version of the table.

    An image that has several different ones has none, and neither have its copies.
    """
    columns = table.columns
    has = set(table.at(mine.version).schema().to_arrow().names)
    read = scan.rows(table, mine.version, list(dict.fromkeys([columns.id, columns.label])))
    read = read.filter(pc.is_valid(read[columns.label]))
    ids = {image_id for image_id, _ in wanted if image_id is not None}
    labelled = sorted(ids.intersection(read[columns.id].cast(pa.string()).to_pylist()))
    if not labelled:
        return {}
    group = package.info["config"].get("registry", {}).get("group")
    group = group if group in has else None
    domain = package.info["config"].get("registry", {}).get("domain") or columns.source
    domain = domain if domain in has else None
    more = [name for name in (group, domain) if name]
    names = list(dict.fromkeys([columns.id, columns.label, columns.image, *more]))
    found: dict[Image, _Label] = {}
    of_content: dict[str, str] = {}
    several: set[str] = set()
    unread: dict[str, int] = {}
    for part in scan.each(table, mine.version, names, {columns.id: labelled}):
        for row in part.to_pylist():
            image = row[columns.image]
            if image is None:
                continue
            this = (str(row[columns.id]), hashlib.sha256(image).hexdigest())
            if this not in wanted:
                continue
            label = meaning.read(package.task.kind, row[columns.label])
            if label.why:
                unread[label.why] = unread.get(label.why, 0) + 1
            if label.text is None:
                continue
            of_group = "" if group is None else belonging.name_of(row[group])
            of_domain = None if domain is None else belonging.name_of(row[domain])
            found.setdefault(this, _Label(label.text, of_group, of_domain))
            if of_content.setdefault(this[1], label.text) != label.text:
                several.add(this[1])
    for why, count in list(unread.items())[:SHOWN]:
        notes.append(f"labels: {count} cannot be read: {why}")
    if several:
        notes.append(f"labels: {len(several)} images have two different ones, and count as none")
    return {image: said for image, said in found.items() if image[1] not in several}


def _place(run: RunConfig, watch: WatchConfig, name: str, schema: pa.Schema) -> str:
    """The table's address. Raises DataError for a table of something else, before there is evidence
    whose labels could not be kept."""
    place = watch.place(run, name)
    base = newest(resolve(place), watch.storage_options)
    if base is not None:
        require_columns_of(schema, base, place, "drift check")
    return place


def _judged(
    run: RunConfig, watch: WatchConfig, name: str, by: Champion, key: str
) -> tuple[set[Image], set[Image]]:
    """Images whose labels another check of this name and champion has compared; and those that a
    check of the same (key) has, with other settings."""
    place = _place(run, watch, "feedback", ROW)
    named = {"name": name, "model": by.model, "seal": by.seal or ""}
    columns = ["key", "image_id", "sha256", "left_out"]
    rows = rows_named(place, named, columns, watch.storage_options).to_pylist()
    others = {(row["image_id"], row["sha256"]) for row in rows if row["key"] != key}
    mine = [row for row in rows if row["key"] == key and row["left_out"] is None]
    return others, {(row["image_id"], row["sha256"]) for row in mine}


def _left_out(
    run: RunConfig,
    watch: WatchConfig,
    by: Champion,
    source: TableConfig,
    mine: Batch,
    labels: Mapping[Image, object],
) -> dict[Image, str]:
    """Why some of these images say nothing of the champion: `asked` or `learned`."""
    if not labels:
        return {}
    images = list(labels)
    found: dict[Image, str] = {}
    place = _place(run, watch, "asked", ASKED)
    rows = rows_named(place, {}, ["image_id", "sha256"], watch.storage_options)
    if len(rows):
        asked = set(rows["sha256"].to_pylist())
        found |= {image: "asked" for image in images if image[1] in asked}
    # An image with a label is in this version of the table, also one of an earlier window.
    is_known_N = by_image.learned_from(by.package, source, mine.version, images)
    if is_known_N is not None:
        known = zip(images, is_known_N.tolist(), strict=True)
        found |= {image: "learned" for image, is_known in known if is_known}
    return found
