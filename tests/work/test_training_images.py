"""An evaluation says how many of its images the model knows, and reads the columns it should."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
from deltalake import DeltaTable

from raypipe.config import validate
from raypipe.feed.dataset import Pinned, pin
from raypipe.models.tasks import Task
from raypipe.registry.package import Package
from raypipe.tables.table import ImageTable, TableConfig, append
from raypipe.train import learned
from raypipe.train.job import TrainJob
from raypipe.work import evaluate

NAMES = [f"i{n}" for n in range(6)]
SPLITS = ["train", "train", "train", "train", "val", "test"]


def table(uri: Path, names: list[str], images: list[str], hashes: bool = True) -> Pinned:
    columns: dict[str, Any] = {"image_id": names, "image": [one.encode() for one in images]}
    columns |= {"label": ["a", "b"] * 3, "split": SPLITS}
    if hashes:
        columns["sha256"] = [hashlib.sha256(one.encode()).hexdigest() for one in images]
    append(str(uri), pa.table(columns), "add")
    job = validate(TrainJob, {"table": {"uri": str(uri)}})
    return pin(job.table, job.feed)


def trained_on(pinned: Pinned, is_old: bool = False, **info: Any) -> Package:
    job = validate(TrainJob, {"table": {"uri": pinned.table.uri}})
    files = {} if is_old else learned.files(learned.of_training(job, pinned), learned.NONE_N2)
    said = {
        "table": {"uri": pinned.version.uri},
        "made": {"table_id": pinned.version.table_id},
        "config": {"feed": {"train": "train"}},
    }
    fake = SimpleNamespace(files=files, info=said | info, task=Task("single_label", ("a", "b")))
    return cast(Package, fake)


def caution(pinned: Pinned, package: Package, **where: Any) -> str:
    return evaluate._of_training_images(pinned.table, pinned.version, where, package)


def test_copies_in_another_table_are_known_by_their_bytes(tmp_path: Path) -> None:
    """Only the address of a table was looked at, and the names of its splits."""
    mine = table(tmp_path / "mine", NAMES, NAMES)
    package = trained_on(mine)
    others = table(tmp_path / "others", [f"n{n}" for n in range(6)], ["i0", "i3", *"abcd"])
    said = "The model has learned from 2 of the 6 labelled images here, so the metrics are too good"
    assert caution(others, package) == said
    assert caution(others, package, split="test") == ""
    assert caution(table(tmp_path / "new", NAMES, [*"abcdef"]), package) == ""
    # In its own table there is a way out.
    way_out = "evaluate.table.where={split: test} leaves them out"
    assert caution(mine, package) == f"{said.replace('2 of', '4 of')}: {way_out}"
    for split, is_said in (("test", False), (["val", "test"], False), ("train", True)):
        assert ("has learned from" in caution(mine, package, split=split)) == is_said


def test_new_photographs_of_known_products_are_not_learned(tmp_path: Path) -> None:
    """Their ids were known, and so all of them were said to be."""
    package = trained_on(table(tmp_path / "mine", NAMES, NAMES))
    again = table(tmp_path / "mine", NAMES, [*"abcdef"])
    said = caution(again, package)
    assert "has learned from 4 of the 12 labelled images" in said
    # Nor are they said to be new: they may be the known images, encoded anew.
    assert "(4 more have an id that it has learned from, and other bytes)" in said


def test_a_table_whose_images_were_encoded_anew_may_be_the_one_that_was_learned(
    tmp_path: Path,
) -> None:
    """No image had known bytes, and so all of them were said to be new."""
    package = trained_on(table(tmp_path / "mine", NAMES, NAMES))
    DeltaTable(str(tmp_path / "mine")).delete()
    again = table(tmp_path / "mine", NAMES, [f"{name}, smaller" for name in NAMES])
    assert again.version.table_id == package.info["made"]["table_id"]
    said = "The model was trained on images of this table, and they may be evaluated too: "
    said += "evaluate.table.where={split: test} leaves them out"
    assert caution(again, package) == said
    assert caution(again, package, split="test") == ""
    # A prepared table that was made again at another side. An older package has no row of the
    # source.
    remade = replace(again.version, origin="/source@v0", origin_id="source")
    assert evaluate._of_training_images(again.table, remade, {}, package) == said


def test_rows_that_the_list_cannot_tell_are_told_by_their_split(tmp_path: Path) -> None:
    mine = table(tmp_path / "mine", NAMES, NAMES, hashes=False)
    may = (
        "was trained on images of this table, and they may be evaluated too: evaluate.table.where="
    )
    assert may in caution(mine, trained_on(mine, is_old=True))
    assert caution(mine, trained_on(mine, is_old=True), split="test") == ""


def test_an_older_package_does_not_list_the_source_of_its_table(tmp_path: Path) -> None:
    """Bytes and ids of a prepared table are others: all images were said to be new, or all but
    those that had kept their bytes."""
    source = table(tmp_path / "source", NAMES, NAMES)
    copy = table(tmp_path / "copy", NAMES, ["i0", *(f"{name}, smaller" for name in NAMES[1:])])
    prepared = {"uri": copy.version.uri, "prepared_from": f"{source.version.uri}@v0"}
    package = trained_on(copy, table=prepared)
    said = "The model was trained on images of this table, and they may be evaluated too: "
    assert caution(source, package) == f"{said}evaluate.table.where={{split: test}} leaves them out"
    assert caution(source, package, split="test") == ""
    assert "has learned from 1 of" in caution(source, trained_on(copy)), "another table"
    # A table that was made again has the address, and other images.
    package = trained_on(source)
    shutil.rmtree(tmp_path / "source")
    assert caution(table(tmp_path / "source", NAMES, [*"abcdef"]), package) == ""


def test_a_table_without_its_split_column_is_no_reason_for_silence(tmp_path: Path) -> None:
    mine = table(tmp_path / "mine", NAMES, NAMES)
    columns = mine.table.columns.model_copy(update={"split": "fold"})
    other = ImageTable(mine.table.uri, columns=columns)
    for is_old, says in ((True, "they may be evaluated too"), (False, "has learned from 4 of")):
        package = trained_on(mine, is_old)
        said = evaluate._of_training_images(other, mine.version, {}, package)
        assert says in said
        assert "no column 'fold' says which, evaluate.table.columns.split can name" in said


def test_a_column_that_is_named_leaves_the_others_as_the_model_has_them() -> None:
    """All others were the defaults again."""
    own = {"image": "photo", "label": "kind", "id": "cell", "split": "fold", "source": "line"}
    package = cast(Package, SimpleNamespace(info={"config": {"table": {"columns": own}}}))
    job_s = validate(TableConfig, {"uri": "/job", "columns": {"label": "job says"}})

    def columns(**given: Any) -> dict[str, str]:
        source = validate(TableConfig, {"uri": "/elsewhere"} | given)
        return evaluate.columns_of(source, package, job_s).model_dump()

    assert columns() == own
    assert columns(columns={"label": "checked"}) == own | {"label": "checked"}
    assert columns(uri="/job") == own | {"label": "job says"}
    here = columns(uri="/job", columns={"id": "image_id", "label": "checked"})
    assert here == own | {"id": "image_id", "label": "checked"}
