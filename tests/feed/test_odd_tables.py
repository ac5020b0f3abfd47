"""Tables of odd shapes are read right, or refused in one message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from raypipe.config import RunConfig, validate
from raypipe.errors import ConfigError, DataError
from raypipe.feed import feed as feeds
from raypipe.feed.dataset import FeedConfig, parts, pin
from raypipe.feed.locate import locate
from raypipe.tables import scan
from raypipe.tables.table import ImageTable, TableConfig

FEED = FeedConfig(carrier="threads")


def made(folder: Path, mode: Any = "append", drop: str = "", **columns: Any) -> str:
    """20 rows; `columns` replace or add to id, image, label and split."""
    plain: dict[str, Any] = {
        "image_id": [str(i) for i in range(20)],
        "image": pa.array([b"picture"] * 20, pa.binary()),
        "label": ["a", "b"] * 10,
        "split": ["train", "train", "val", "val"] * 5,
    }
    kept = {name: values for name, values in (plain | columns).items() if name != drop}
    write_deltalake(str(folder), pa.table(kept), mode=mode, schema_mode="merge")
    return str(folder)


def config(uri: str, **columns: Any) -> TableConfig:
    version = columns.pop("version", None)
    return validate(TableConfig, {"uri": uri, "version": version, "columns": columns})


@pytest.mark.parametrize("role", ["label", "id", "split"])
def test_a_column_may_be_called_row(role: str, tmp_path: Path) -> None:
    """On ba74455 the rows' own numbers were found under that name."""
    values = {
        "label": ["x", "y"] * 10,
        "id": [f"n{i}" for i in range(20)],
        "split": ["train", "train", "val", "val"] * 5,
    }
    rows = locate(
        pin(config(made(tmp_path, row=values[role]), **{role: "row"}), FEED), "train", FEED
    )
    assert len(rows) == 10 and rows.row_N is not None
    assert rows.row_N.tolist() == [i for i in range(20) if i % 4 < 2]
    expected = [f"n{i}" if role == "id" else str(i) for i in rows.row_N.tolist()]
    assert rows.ids_of(range(len(rows))) == expected


def test_a_column_may_play_two_roles(tmp_path: Path) -> None:
    hashes = [f"{i:064x}" for i in range(20)]
    uri = made(tmp_path, sha256=hashes, label=["train", "val"] * 10)
    rows = locate(
        pin(config(uri, id="sha256", split="label"), FEED),
        "val",
        FEED.model_copy(update={"verify": False}),
    )
    assert rows.ids_of(range(len(rows))) == hashes[1::2]


def test_rows_written_before_the_image_column_are_named(tmp_path: Path) -> None:
    uri = made(tmp_path, drop="image")
    made(tmp_path)
    with pytest.raises(
        DataError, match=r"10 of the 20 labelled rows of split 'train' hold no image.*table\.where"
    ):
        feeds.prepare(pin(config(uri), FEED), ["train"], 16, FEED, 0)
    table = ImageTable.open(config(uri))
    fragments, _ = scan.plan(table, table.pin())
    assert sum(scan.binary(f, "image", None).null_count for f in fragments) == 20


@pytest.mark.parametrize("missing", ["label", "image"])
def test_a_column_that_the_pinned_version_lacks_is_named_with_the_version(
    missing: str, tmp_path: Path
) -> None:
    uri = made(tmp_path, drop=missing)
    made(tmp_path)
    with pytest.raises(DataError, match=rf"@v0 has no column '{missing}'"):
        pin(config(uri, version=0), FEED)
    assert pin(config(uri), FEED).classes == ("a", "b")


def test_a_column_that_only_the_pinned_version_has_is_read(tmp_path: Path) -> None:
    uri = made(tmp_path)
    write_deltalake(
        uri, pa.table({"image_id": ["1"], "other": [1]}), mode="overwrite", schema_mode="overwrite"
    )
    assert pin(config(uri, version=0), FEED).counts["train"] == 10
    with pytest.raises(DataError, match=r"@v1 has no column 'image'"):
        pin(config(uri), FEED)


def test_an_empty_split_has_no_rows(tmp_path: Path) -> None:
    pinned = pin(config(made(tmp_path)), FEED)
    rows = locate(pinned, "test", FEED)
    assert (len(rows), rows.ids_of([]), rows.fragments) == (0, [], ())


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, "x"])
def test_a_seed_that_no_generator_takes_is_refused(seed: Any) -> None:
    with pytest.raises(ConfigError, match=r"seed"):
        validate(RunConfig, {"seed": seed})
    assert validate(RunConfig, {"seed": 0}).seed == 0


def test_a_plus_is_part_of_a_splits_name_where_the_table_has_that_name(tmp_path: Path) -> None:
    known = {"line+2", "val", "a", "b"}
    assert parts("line+2", known) == ["line+2"]
    assert parts("line+2+val", known) == ["line+2", "val"]
    assert parts("a+b+a", known) == ["a", "b"]
    assert parts("train+val") == ["train", "val"]
    uri = made(tmp_path, split=["line+2", "line+2", "val", "b"] * 5)
    cfg = FeedConfig(train="line+2", val="val", test="line+2+b")
    pinned = pin(config(uri), cfg)
    assert pinned.counts == {"line+2": 10, "val": 5, "line+2+b": 15}
    assert len(locate(pinned, "line+2", cfg)) == 10 and len(locate(pinned, "line+2+b", cfg)) == 15


def test_a_part_of_a_split_that_no_row_has_is_named(tmp_path: Path) -> None:
    """It was left out in silence: train+vla trained on train alone."""
    uri = made(tmp_path)
    for settings in ({"train": "train+vla"}, {"test": "val+vla"}):
        with pytest.raises(DataError, match=r"no labelled rows in split 'vla'.*'val'"):
            pin(config(uri), FeedConfig(**settings))
    assert pin(config(uri), FeedConfig(test="none yet")).counts["none yet"] == 0


def test_names_of_ours_are_refused_as_columns(tmp_path: Path) -> None:
    uri = made(tmp_path, **{scan.ROW: ["a", "b"] * 10})
    with pytest.raises(DataError, match=r"Column 'raypipe\.row' .*cannot be read.*Rename it"):
        pin(config(uri, label=scan.ROW), FEED)


def test_weighted_sampling_without_a_column_is_refused_and_huge_weights_are_scaled(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"sampling=weighted draws by a column"):
        validate(FeedConfig, {"sampling": "weighted"})
    cfg = validate(FeedConfig, {"sampling": "weighted", "weights": "w"})
    rows = locate(pin(config(made(tmp_path, w=[1e308] * 20)), cfg), "train", cfg)
    assert rows.weights_N is not None and rows.weights_N.tolist() == [1.0] * 10


@pytest.mark.parametrize(
    "weights",
    [["much"] * 20, [None] * 20, [float("inf")] * 20, [-1.0] * 20, [0] * 20, [[1]] * 20],
    ids=["text", "null", "infinite", "negative", "zero", "list"],
)
def test_weights_that_are_none_are_refused(weights: Any, tmp_path: Path) -> None:
    cfg = FEED.model_copy(update={"sampling": "weighted", "weights": "w"})
    kind = pa.float64() if weights[0] is None else None
    uri = made(tmp_path, w=pa.array(weights, kind))
    with pytest.raises(DataError, match=r"Column 'w' (of .* )?cannot"):
        locate(pin(config(uri), cfg), "train", cfg)


def test_only_training_needs_weights(tmp_path: Path) -> None:
    """Nothing is drawn of the other splits, so their rows need none. Those of the test split were
    read when the training was over.
    """
    cfg = FEED.model_copy(update={"sampling": "weighted", "weights": "w"})
    pinned = pin(config(made(tmp_path, w=pa.array([1.0, 2.0, None, 0.0] * 5))), cfg)
    assert locate(pinned, "val", cfg).weights_N is None
    weights_N = locate(pinned, "train", cfg).weights_N
    assert weights_N is not None and weights_N.tolist() == [1.0, 2.0] * 5


def test_a_row_without_an_id_is_called_by_its_number(tmp_path: Path) -> None:
    """Messages spoke of an image called None."""
    rows = locate(pin(config(made(tmp_path, image_id=[None, "a"] * 10)), FEED), "train", FEED)
    assert [rows.name(0), rows.name(1)] == ["number 0", "a"]


def test_a_condition_on_the_split_column_holds_for_every_split_that_is_read(tmp_path: Path) -> None:
    """The split's own condition replaced it: rows that `where` leaves out were trained on."""
    uri = made(tmp_path, split=["train", "val", "test", "more"] * 5)
    cfg = config(uri).model_copy(update={"where": {"split": ["train", "val"]}})
    pinned = pin(cfg, FeedConfig(test="test"))
    assert pinned.counts == {"train": 5, "val": 5, "test": 0}
    assert len(locate(pinned, "test", FEED)) == 0
    assert len(locate(pinned, "train+more", FEED)) == 5
    with pytest.raises(DataError, match=r"no labelled rows in split 'more'"):
        pin(cfg, FeedConfig(train="train+more"))


def test_a_split_of_numbers_is_compared_as_numbers(tmp_path: Path) -> None:
    uri = made(tmp_path, split=[1, 2, 3, 4] * 5)
    cfg = config(uri).model_copy(update={"where": {"split": ["01", "2.0"]}})
    pinned = pin(cfg, FeedConfig(train="1", val="2", test="3"))
    assert [len(locate(pinned, name, FEED)) for name in "123"] == [5, 5, 0]


def test_a_class_without_training_images_is_named(tmp_path: Path) -> None:
    """Of 2,000 classes with an image each, a model knew none of those it was judged by."""
    labels = ["a", "b", "c", "a"] + ["a", "b", "b", "a"] * 4
    pinned = pin(config(made(tmp_path / "one", label=labels)), FEED)
    assert pinned.unlearned("train", "val") == {"c": 1}
    assert pinned.unlearned("train", "train") == {}
    several = ["a", "b", "b|c", "c|d"] + ["a", "b", "b", "a|c"] * 4
    pinned = pin(config(made(tmp_path / "several", label=several)), FEED, kind="multi_label")
    assert pinned.unlearned("train", "val") == {"c": 6, "d": 1}
    numbers = pin(config(made(tmp_path / "n", label=[0.5] * 20)), FEED, kind="regression")
    assert numbers.unlearned("train", "val") == {}
