"""predict.since=last where the table, or the predictions, are not what they were: restored from a
backup, with renamed columns, with rows of somebody else, or out of reach for a while.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from raypipe.config import RunConfig
from raypipe.errors import ClusterError, DataError, RaypipeError, Unreachable
from raypipe.serve import batch, pieces, since
from raypipe.serve.batch import Calls
from raypipe.tables import between, scan
from raypipe.tables.table import ImageTable, TableConfig, append
from tests.serve.conftest import Registered, flip_a_byte
from tests.serve.since_case import Case, predicted_once
from tests.tables import handmade as by_hand

pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.fixture
def case(registered: Registered, tmp_path: Path) -> Case:
    return predicted_once(registered, tmp_path)


def stopped(case: Case, after: int, **cfg: Any) -> None:
    """A prediction that is stopped after so many tasks."""
    asked = iter([False] * after)
    calls = Calls(stop=lambda: next(asked, True), say=case.said.append)
    run = RunConfig(name="mixed", dir=str(case.folder))
    settings = case.cfg.model_copy(update=cfg)
    source = TableConfig(uri=case.uri)
    with pytest.raises(batch.Stopped):
        batch.predict(
            case.registered.store, run, source, settings, case.registered.version, calls=calls
        )


def all_rows(place: Path) -> pa.Table:
    table = ImageTable(str(place))
    pinned = table.pin()
    return scan.rows(table, pinned, table.at(pinned).schema().to_arrow().names)


def restore(backup: Path, case: Case) -> None:
    shutil.rmtree(case.uri)
    shutil.copytree(backup, case.uri)


@pytest.mark.parametrize("versions_more", [0, 1])
def test_a_table_that_was_restored_from_a_backup(versions_more: int, case: Case) -> None:
    """It gets the number of a version again that was predicted, with other rows."""
    backup = case.folder / "backup"
    shutil.copytree(case.uri, backup)
    case.add(30, 5)
    case.check(case.predict())
    restore(backup, case)
    case.add(40, 5)
    for _ in range(versions_more):
        case.add(45, 5)
    done = case.predict()
    assert done.table.version == 3 + versions_more
    assert done.made == 5 + 5 * versions_more
    case.check(done)
    assert ("restored from a backup" in str(case.said)) == bool(versions_more)


def test_an_unfinished_version_that_the_table_lost(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version was begun, and the table restored to one before it."""
    monkeypatch.setattr(pieces, "PIECE_ROWS", 5)
    backup = case.folder / "backup"
    shutil.copytree(case.uri, backup)
    for start in (30, 35, 40):
        case.add(start, 5)
    stopped(case, 2)
    restore(backup, case)
    case.add(60, 5)
    done = case.predict()
    assert (done.made, done.table.version) == (5, 3)
    case.check(done)
    # It reaches the number of the version that was begun, and goes beyond it.
    for start in (65, 70, 75):
        case.add(start, 5)
        done = case.predict()
        case.check(done)
    assert done.made == 5 and not case.said


def mapped(case: Case, names: Sequence[str]) -> None:
    """Give these names to the columns c0 to c4 of the one file of the table."""
    table, images = Path(case.uri), case.registered.images
    kinds = ["string", "binary", "binary", "string", "string"]
    fields = [
        by_hand.column(name, kind, place + 1, f"c{place}")
        for place, (name, kind) in enumerate(zip(names, kinds, strict=True))
    ]
    metadata = by_hand.metadata(fields, **{"delta.columnMapping.mode": "name"})
    if (table / "_delta_log").exists():
        by_hand.commit(table, metadata)
        return
    columns = [
        pa.array([f"i{n}" for n in range(6)]),
        pa.array(images[:6], pa.binary()),
        pa.array(images[20:26], pa.binary()),
        pa.array(["a", "b"] * 3),
        pa.array(["b", "a"] * 3),
    ]
    rows = pa.table(columns, names=[f"c{n}" for n in range(5)])
    added = by_hand.add(table, rows, "f.parquet")
    by_hand.commit(table, by_hand.protocol("columnMapping"), metadata, added)


NAMES = ["image_id", "image", "old", "kind", "other"]


@pytest.mark.parametrize(
    ("renamed", "source", "made"),
    [
        (["image_id", "old", "image", "kind", "other"], {}, 6),
        (["other", "image", "old", "kind", "image_id"], {}, 6),
        (["image_id", "image", "old", "other", "kind"], {"where": {"kind": "a"}}, 3),
        # Columns that a prediction does not read.
        (["image_id", "image", "old", "other", "kind"], {}, 0),
    ],
)
def test_renamed_columns_of_the_same_files(
    renamed: list[str],
    source: dict[str, Any],
    made: int,
    registered: Registered,
    tmp_path: Path,
) -> None:
    case = Case(registered, tmp_path, [])
    mapped(case, NAMES)
    case.check(case.predict(**source), **source)
    mapped(case, renamed)
    done = case.predict(**source)
    assert done.made == made and bool(case.said) == bool(made)
    case.check(done, **source)
    # And back.
    mapped(case, NAMES)
    case.check(case.predict(**source), **source)


@pytest.mark.parametrize("later", [False, True])
def test_a_rival_that_was_killed_beside_a_finished_one(
    later: bool, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its half stays: of the version that is finished, or of one before."""
    monkeypatch.setattr(pieces, "PIECE_ROWS", 5)
    for start in (30, 35, 40):
        case.add(start, 5)
    stopped(case, 2, since=None, out=str(case.folder / "rival"))
    if later:
        case.add(45, 5)
    case.check(case.predict())
    append(str(case.folder / "out"), all_rows(case.folder / "rival"), "what the rival left")
    case.add(50, 5)
    done = case.predict()
    assert done.made == 5 and not case.said
    case.check(done)


def test_a_version_that_cannot_be_finished_is_said_once(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_ROWS", 5)
    for start in (30, 35, 40):
        case.add(start, 5)
    stopped(case, 2)
    DeltaTable(case.uri).optimize.compact()
    DeltaTable(case.uri).vacuum(0, dry_run=False, enforce_retention_duration=False)
    case.check(case.predict())
    assert "begun of v5 stays unfinished" in str(case.said)
    case.said.clear()
    case.add(50, 5)
    case.check(case.predict())
    assert not case.said


def test_a_version_that_is_out_of_reach_is_not_given_up(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its rows would be predicted twice."""
    monkeypatch.setattr(pieces, "PIECE_ROWS", 5)
    before = {*Path(case.uri).glob("*.parquet")}
    for start in (30, 35, 40):
        case.add(start, 5)
    stopped(case, 2)
    case.add(45, 5)
    file = min({*Path(case.uri).glob("*.parquet")} - before)
    file.rename(case.folder / "kept")
    # Not even root can open it.
    file.symlink_to(file)
    with pytest.raises(Unreachable, match="cannot be opened"):
        case.predict()
    assert not case.said
    (case.folder / "kept").rename(file)
    done = case.predict()
    case.check(done)
    assert len(case.raw()) == 50, "each row once"


FOREIGN: list[dict[str, Any]] = [
    {"part": None},
    {"part": "all"},
    {"rows": None},
    {"rows": 7},
    {"version": None},
    {"line": None},
]


@pytest.mark.parametrize("changed", FOREIGN, ids=str)
def test_rows_of_somebody_else_among_the_predictions(changed: dict[str, Any], case: Case) -> None:
    """A copy of a row, changed. It would be among the rows that are read."""
    out = case.folder / "out"
    row = all_rows(out).slice(0, 1)
    [(name, value)] = changed.items()
    place = row.schema.get_field_index(name)
    values = pa.array([value], row.schema.field(name).type)
    append(str(out), row.set_column(place, name, values), "by hand")
    with pytest.raises(DataError, match=r"rows that raypipe did not write.*Delete these rows"):
        case.predict()
    with pytest.raises(DataError, match="rows that raypipe did not write"):
        batch.read_rows(str(out), row["key"][0].as_py(), ["label"])


def test_a_row_of_the_predictions_that_is_there_twice(case: Case) -> None:
    out = case.folder / "out"
    append(str(out), all_rows(out).slice(0, 1), "by hand")
    with pytest.raises(DataError, match="has 31 rows instead of the 30 of a prediction"):
        case.predict()


def test_what_cannot_be_done_writes_nothing(
    registered: Registered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No claim either: a corrupt package, GPUs that nobody has."""
    case = Case(registered, tmp_path, [])
    case.add(0, 5)
    corrupt = registered.another("corrupt")
    flip_a_byte(registered.weights_of(corrupt))
    monkeypatch.setattr(batch, "_last_shared", [])
    run, source = RunConfig(name="mixed", dir=str(tmp_path)), TableConfig(uri=case.uri)

    def refused(kind: type[RaypipeError], says: str, version: Any, **cfg: Any) -> None:
        settings = case.cfg.model_copy(update=cfg)
        with pytest.raises(kind, match=says):
            batch.predict(registered.store, run, source, settings, version)
        assert not Path(settings.out or "").exists()

    refused(DataError, "does not match its sha256", corrupt)
    refused(ClusterError, "so many GPUs", registered.version, gpus=1)


def test_the_summary_is_of_the_rows_that_were_made(case: Case) -> None:
    """Whatever becomes of the predictions meanwhile."""
    case.add(30, 5)

    def gone(done: int, images: int) -> None:
        if done == images == 5 and len(case.raw()) == 35:
            DeltaTable(str(case.folder / "out")).delete()

    run, source = RunConfig(name="mixed", dir=str(case.folder)), TableConfig(uri=case.uri)
    given = (case.registered.store, run, source, case.cfg, case.registered.version)
    done = batch.predict(*given, progress=gone)
    assert not case.raw() and done.images == sum(done.labels.values()) == 35


def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many files each look was at, from now on."""
    sizes: list[int] = []
    plain = between.selected

    def counted(table: Any, pinned: Any, where: Any, only: Any = None) -> between.Rows:
        files = table.snapshot(pinned).paths(table.uri)
        sizes.append(len(files) if only is None else len(only))
        return plain(table, pinned, where, only)

    monkeypatch.setattr(between, "selected", counted)
    return sizes


@pytest.mark.parametrize("matches_at_first", [True, False])
def test_what_brought_nothing_is_not_looked_at_for_ever(
    matches_at_first: bool, registered: Registered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream with a rare `where`: each look is at the files that came since the last."""
    monkeypatch.setattr(since, "LOOK_AGAIN", 2)
    case = Case(registered, tmp_path, [])
    rare: dict[str, Any] = {"where": {"image_id": ["i3", "i33", "i43"]}}
    found = int(matches_at_first)
    case.add(0 if matches_at_first else 10, 10)
    if matches_at_first:
        assert case.predict(**rare).made == 1
    sizes = looked_at(monkeypatch)
    for start in range(50, 170, 10):
        case.add(start, 10)
        if matches_at_first:
            assert (case.predict(**rare).made, case.predict(**rare).images) == (0, 1)
        else:
            with pytest.raises(DataError, match="no images to predict"):
                case.predict(**rare)
    # Without a note the last of the twelve would be at all of them.
    assert max(sizes) <= 3, sizes

    # A match is found, whatever was noted; and what was noted is of no use to others.
    case.add(30, 5)
    done = case.predict(**rare)
    assert (done.made, done.images) == (1, found + 1)
    case.check(done, **rare)
    others: dict[str, Any] = {"where": {"image_id": ["i4", "i55"]}}
    case.check(case.predict(**others), **others)
    # Nor after the predictions that it was about are gone.
    DeltaTable(str(tmp_path / "out")).delete()
    done = case.predict(**rare)
    assert done.made == done.images == found + 1
    case.check(done, **rare)


def test_a_note_about_a_version_that_a_backup_replaced(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number that was noted has other rows now, and they are predicted."""
    monkeypatch.setattr(since, "LOOK_AGAIN", 0)
    rare: dict[str, Any] = {"where": {"image_id": ["i3", "i33"]}}
    assert case.predict(**rare).made == 1
    backup = case.folder / "backup"
    shutil.copytree(case.uri, backup)
    case.add(50, 5)
    assert case.predict(**rare).made == 0
    restore(backup, case)
    case.add(30, 5)
    case.add(60, 5)
    done = case.predict(**rare)
    assert (done.made, done.images) == (1, 2)
    case.check(done, **rare)


def test_images_are_compared_once_for_what_brought_nothing(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An UPDATE rewrites files; the next versions do not read their images again."""
    DeltaTable(case.uri).update({"split": "'val'"}, predicate="image_id = 'i4'")
    assert case.predict().made == 0
    sizes = looked_at(monkeypatch)
    DeltaTable(case.uri).update({"split": "'val'"}, predicate="image_id = 'i14'")
    assert case.predict().made == 0
    # The file that came, and the one that went.
    assert sizes == [1, 1]
    case.add(30, 5)
    done = case.predict()
    assert done.made == 5 and not case.said
    case.check(done)
