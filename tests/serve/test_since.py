"""predict.since=last: whatever happens to the table between two versions, the later prediction has
exactly the rows of its version, and what was predicted before is not predicted again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from raypipe.config import RunConfig
from raypipe.errors import DataError
from raypipe.serve import batch, links, pieces
from raypipe.serve.batch import Calls
from raypipe.tables import between, scan, versions
from raypipe.tables.table import ImageTable, TableConfig
from tests.serve.conftest import Registered
from tests.serve.since_case import Case, predicted_once
from tests.tables import handmade as by_hand

pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.fixture
def case(registered: Registered, tmp_path: Path) -> Case:
    return predicted_once(registered, tmp_path)


def appended(case: Case) -> None:
    case.add(30, 7)


def deleted(case: Case) -> None:
    DeltaTable(case.uri).delete("image_id in ('i3', 'i15')")


def emptied(case: Case) -> None:
    DeltaTable(case.uri).delete()


def relabelled(case: Case) -> None:
    """The row is rewritten, and the image is the same."""
    DeltaTable(case.uri).update({"split": "'val'"}, predicate="image_id = 'i4'")


def renamed(case: Case) -> None:
    DeltaTable(case.uri).update({"image_id": "'other'"}, predicate="image_id = 'i4'")


def overwritten(case: Case) -> None:
    rows = scan.rows(
        ImageTable(case.uri), ImageTable(case.uri).pin(), ["image_id", "split", "image"]
    )
    images = [case.registered.images[40], *rows["image"].to_pylist()[1:20]]
    rows = rows.slice(0, 20).set_column(2, "image", pa.array(images, pa.binary()))
    write_deltalake(case.uri, rows, mode="overwrite")


def optimized(case: Case) -> None:
    versions.optimize(ImageTable(case.uri))


def optimized_and_appended(case: Case) -> None:
    case.add(30, 7)
    optimized(case)
    case.add(37, 3)


def optimized_vacuumed_and_appended(case: Case) -> None:
    """The files of the version that was predicted are gone."""
    optimized(case)
    DeltaTable(case.uri).vacuum(0, dry_run=False, enforce_retention_duration=False)
    case.add(30, 7)


def twice(case: Case) -> None:
    """The same rows once more: they are as many rows more."""
    case.add(0, 10)


def deleted_and_back(case: Case) -> None:
    deleted(case)
    case.add(3, 1)


def restored(case: Case) -> None:
    deleted(case)
    DeltaTable(case.uri).restore(2)


def without_log(case: Case) -> None:
    """Only a checkpoint is left of the log."""
    case.add(30, 7)
    DeltaTable(case.uri).create_checkpoint()
    for number in range(3):
        (Path(case.uri) / "_delta_log" / f"{number:020d}.json").unlink()


def unnamed(case: Case) -> None:
    case.add(30, 4, [None, "x", None, "x"])


def tagged(case: Case) -> None:
    ImageTable(case.uri).tag("nothing-changed")


# What happens, how many rows are predicted then, and how many go.
HAPPENS: list[tuple[Callable[[Case], None], int, int]] = [
    (appended, 7, 0),
    (deleted, 0, 2),
    (emptied, 0, 30),
    (relabelled, 0, 0),
    (renamed, 1, 1),
    (overwritten, 1, 11),
    (optimized, 0, 0),
    (optimized_and_appended, 10, 0),
    (optimized_vacuumed_and_appended, 7, 0),
    (twice, 10, 0),
    (deleted_and_back, 0, 1),
    (restored, 0, 0),
    (without_log, 7, 0),
    (unnamed, 4, 0),
    (tagged, 0, 0),
]


@pytest.mark.parametrize(
    ("happens", "made", "gone"), HAPPENS, ids=[happens.__name__ for happens, *_ in HAPPENS]
)
def test_only_what_changed_is_predicted(
    happens: Callable[[Case], None], made: int, gone: int, case: Case
) -> None:
    happens(case)
    done = case.predict()
    assert done.made == made
    case.check(done)
    rows = case.raw()
    assert len([row for row in rows if row["gone"]]) == gone
    assert len(rows) == 30 + made + gone, "nothing is predicted, or said to be gone, twice"
    asked = happens.__name__ in ("without_log", "optimized_vacuumed_and_appended")
    assert bool(case.said) == asked, "it says so when the log does not answer"

    # Nothing is left to do, and the next step starts from here.
    assert case.predict() == done and len(case.raw()) == len(rows)
    case.add(50, 5)
    again = case.predict()
    assert again.made == 5
    case.check(again)


def test_a_long_chain_with_rows_that_come_go_and_come_back(case: Case) -> None:
    for step in range(4):
        DeltaTable(case.uri).delete(f"image_id = 'i{step}'")
        case.check(case.predict())
        case.add(step, 1)
        case.check(case.predict())
    assert len([row for row in case.raw() if not row["gone"]]) == 34


def test_an_optimized_predictions_table_tells_the_same(case: Case) -> None:
    appended(case)
    done = case.predict()
    out = ImageTable(str(case.folder / "out"))
    assert versions.optimize(out)["files_after"] == 1
    again = case.predict()
    assert (again.key, again.made, again.images) == (done.key, 0, 37)
    case.check(again)
    deleted(case)
    case.check(case.predict())


def test_a_deletion_vector_takes_rows_away_and_gives_them_back(
    registered: Registered, tmp_path: Path
) -> None:
    case = Case(registered, tmp_path, [])
    case.add(0, 10)
    table = Path(case.uri)
    added = json.loads((table / "_delta_log" / f"{0:020d}.json").read_text().splitlines()[-1])
    for line in (table / "_delta_log" / f"{0:020d}.json").read_text().splitlines():
        if "add" in json.loads(line):
            added = json.loads(line)
    case.check(case.predict())
    by_hand.commit(
        table,
        by_hand.protocol("deletionVectors"),
        {"remove": {"path": added["add"]["path"], "dataChange": True}},
        {"add": added["add"] | {"deletionVector": by_hand.inline([2, 5])}},
    )
    done = case.predict()
    assert (done.made, done.images) == (0, 8)
    case.check(done)
    by_hand.commit(
        table,
        {
            "remove": {
                "path": added["add"]["path"],
                "dataChange": True,
                "deletionVector": by_hand.inline([2, 5]),
            }
        },
        {"add": added["add"] | {"deletionVector": by_hand.inline([5])}},
    )
    done = case.predict()
    assert (done.made, done.images) == (1, 9)
    case.check(done)


def test_a_selection_is_a_line_of_its_own(case: Case) -> None:
    """where and sample: what the one has predicted says nothing about the other."""
    case.add(30, 7)
    relabelled(case)
    val = {"where": {"split": "val"}}
    done = case.predict(**val)
    assert (done.made, done.since) == (1, None)
    case.check(done, **val)
    DeltaTable(case.uri).update({"split": "'val'"}, predicate="image_id in ('i5', 'i31')")
    done = case.predict(**val)
    assert (done.made, done.images, done.since is None) == (2, 3, False)
    case.check(done, **val)
    half = case.predict(sample=0.5)
    case.add(40, 20)
    more = case.predict(sample=0.5)
    assert 0 < more.made < 20 and more.images == half.images + more.made
    case.check(more, sample=0.5)
    whole = case.predict()
    assert (whole.made, whole.images) == (27, 57)
    case.check(whole)


def test_an_earlier_version_is_no_later_one(case: Case) -> None:
    """Asked for version 1 after version 2: there is nothing to add to."""
    done = case.predict(version=1)
    assert (done.made, done.images, done.since) == (20, 20, None)
    case.check(done, version=1)


def test_what_was_begun_is_gone_on_with(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other rows in between, and by whoever asks for all rows."""
    monkeypatch.setattr(pieces, "PIECE_ROWS", 5)
    for start in (30, 35, 40):
        case.add(start, 5)
    stops = iter([False] * 2)
    calls = Calls(stop=lambda: next(stops, True))
    run = RunConfig(name="mixed", dir=str(case.folder))
    source = TableConfig(uri=case.uri)
    given = (case.registered.store, run, source, case.cfg)
    with pytest.raises(batch.Stopped):
        batch.predict(*given, case.registered.version, calls=calls)
    assert 30 < len(case.raw()) < 45
    begun = len(case.raw())

    cfg = case.cfg.model_copy(update={"since": None})
    done = batch.predict(*given[:3], cfg, case.registered.version)
    assert (done.made, done.images, len(case.raw())) == (45 - begun, 45, 45)
    case.check(done)


def test_rows_that_are_missing_in_the_predictions_are_said(case: Case) -> None:
    """Somebody deleted predictions: the prediction counts as unfinished, and is made whole."""
    DeltaTable(str(case.folder / "out")).delete("image_id = 'i1'")
    assert len(batch.read_rows(str(case.folder / "out"), "nothing", ["label"])) == 0
    with pytest.raises(DataError, match=r"lacks 1 of the 30 rows"):
        case.predict()


def test_a_chain_is_finished_if_each_link_is() -> None:
    def link(key: str, base: str | None, have: int) -> links.Link:
        return links.Link(key, "l", base, 1, "s", 2, have, ())

    known = {
        "a": link("a", None, 2),
        "b": link("b", "a", 2),
        "c": link("c", "b", 1),
        "d": link("d", "c", 2),
        "e": link("e", "nowhere", 2),
    }
    assert links.finished(known) == {"a", "b"}
    assert [one.key for one in links.chain(known, "b")] == ["b", "a"]
    assert not links.chain(known, "d") and not links.chain(known, "e")


def test_surplus_counts_rows_that_are_equal() -> None:
    mine = between.identity_of(["a", "b", "a", "a", None, "None"], ["1"] * 6)
    other = between.identity_of(["a", "c", None], ["1"] * 3)
    assert between.surplus(mine, other).tolist() == [False, True, True, True, False, True]
    assert between.surplus(mine, mine).tolist() == [False] * 6
    assert between.surplus(between.NOTHING_N2, mine).tolist() == []


def test_without_its_predictions_a_table_is_predicted_as_a_whole(case: Case) -> None:
    shutil.rmtree(case.folder / "out")
    done = case.predict()
    assert (done.made, done.since) == (30, None)
