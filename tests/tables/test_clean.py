"""fastdup finds what is planted among distinct images; verdicts carry their numbers; a rerun
changes nothing.
"""

from __future__ import annotations

import hashlib
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from deltalake import write_deltalake
from PIL import Image

from raypipe.config import key_of, validate
from raypipe.errors import ConfigError, DataError
from raypipe.job import Job
from raypipe.tables import clean as room
from raypipe.tables import scan, verdicts
from raypipe.tables.clean import EXACT, CleanConfig, CleanResult, clean, known_as, rules
from raypipe.tables.table import Columns, ImageTable, TableConfig, append
from raypipe.work.dry_run import predicting
from raypipe.work.dry_run.at import At

pytestmark = pytest.mark.usefixtures("ray_session")
Draw = Callable[..., bytes]
DISTINCT = 40
ROW = ["image_id", "split", "image"]


def png(image: Image.Image, **how: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG", **how)
    return out.getvalue()


def named(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make(uri: Path, images: list[bytes]) -> TableConfig:
    rows = {"image_id": list(map(named, images)), "split": ["train"] * len(images), "image": images}
    version = append(str(uri), pa.table(rows), "add").version
    return TableConfig(uri=str(uri), version=version)


@pytest.fixture(scope="module")
def planted(textured: Draw) -> dict[str, bytes]:
    """What the distinct images hide: one of them encoded anew, a black and a white one, and one
    that does not decode.
    """
    first = Image.open(io.BytesIO(textured(0, 160)))
    return {
        "original": textured(0, 160),
        "copy": png(first, compress_level=1),
        "black": png(Image.fromarray(np.zeros((160, 160, 3), np.uint8))),
        "white": png(Image.new("RGB", (160, 160), "white")),
        "broken": textured(3, 160, kind="JPEG")[:2000],
    }


@pytest.fixture(scope="module")
def cleaned(
    planted: dict[str, bytes], textured: Draw, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TableConfig, CleanResult, dict[str, str]]:
    images = [textured(seed, 160) for seed in range(1, DISTINCT)] + list(planted.values())
    source = make(tmp_path_factory.mktemp("clean") / "cells", images)
    return (
        source,
        clean(source, CleanConfig()),
        {name: named(data) for name, data in planted.items()},
    )


Cleaned = tuple[TableConfig, CleanResult, dict[str, str]]


def ids(uri: str, version: int | None = None) -> set[str]:
    table = ImageTable(uri)
    return set(scan.rows(table, table.pin(version), ["image_id"])["image_id"].to_pylist())


def rows_of(uri: str) -> list[dict[str, Any]]:
    table = ImageTable(verdicts.uri_of(uri))
    return scan.rows(table, table.pin(), verdicts.SCHEMA.names).to_pylist()


def test_what_is_planted_is_dropped_and_no_distinct_image_is(cleaned: Cleaned) -> None:
    source, done, planted = cleaned
    before, after = ids(source.uri, done.raw.version), ids(source.uri, done.clean.version)
    assert len(before) == done.images == DISTINCT + 4
    twins = {planted["original"], planted["copy"]}
    assert before - after == {
        max(twins),
        planted["black"],
        planted["white"],
        planted["broken"],
    }  # the first of twins stays
    assert done.dropped == 4


def test_a_verdict_names_value_limit_and_the_image_that_stays(cleaned: Cleaned) -> None:
    source, done, planted = cleaned
    found = {(r["verdict"], r["image_id"]): r for r in rows_of(source.uri)}
    twins = sorted({planted["original"], planted["copy"]})
    duplicate = found["exact_duplicate", twins[1]]
    assert (duplicate["partner"], duplicate["dropped"], duplicate["limit"]) == (
        twins[0],
        True,
        EXACT,
    )
    assert EXACT <= duplicate["value"] <= 1.001
    assert (
        found["dark", planted["black"]]["value"] < found["dark", planted["black"]]["limit"] == 8.0
    )
    assert (
        found["bright", planted["white"]]["value"]
        > found["bright", planted["white"]]["limit"]
        == 247.0
    )
    assert (
        found["blurred", planted["black"]]["value"]
        < found["blurred", planted["black"]]["limit"]
        == 10.0
    )
    assert found["broken", planted["broken"]]["dropped"]
    assert not any(r["dropped"] for (kind, _), r in found.items() if kind in ("blurred", "outlier"))
    assert all(r["table"] == str(done.raw) and r["policy"] for r in found.values())
    assert done.counts == {
        k: sum(kind == k for kind, _ in found) for k in {kind for kind, _ in found} - {"judged"}
    }


def test_the_new_version_is_tagged_and_says_why(cleaned: Cleaned) -> None:
    source, done, _ = cleaned
    table = ImageTable(source.uri)
    assert table.pin("clean") == done.clean
    entry = next(h for h in table.history() if h["version"] == done.clean.version)
    assert (entry["removed"], entry["tags"]) == (4, ["clean"])
    assert entry["why"].startswith("clean ") and entry["why"].endswith("of v0")


def test_a_rerun_gives_the_same_version_and_no_new_rows(cleaned: Cleaned) -> None:
    source, done, _ = cleaned
    newest, judged = ImageTable(source.uri).pin(), rows_of(source.uri)
    again = clean(source, CleanConfig())
    assert (again.clean, again.counts, again.dropped) == (done.clean, done.counts, done.dropped)
    assert ImageTable(source.uri).pin() == newest
    assert rows_of(source.uri) == judged


def test_dropped_images_are_remembered_for_the_next_ingest(cleaned: Cleaned) -> None:
    source, _, planted = cleaned
    twins = {planted["original"], planted["copy"]}
    assert verdicts.dropped_ids(source.uri, "", None) == {
        max(twins),
        *(planted[n] for n in ("black", "white", "broken")),
    }


def test_verdicts_on_some_rows_are_not_taken_for_verdicts_on_all(
    tmp_path: Path, textured: Draw
) -> None:
    source = make(tmp_path / "cells", [textured(seed) for seed in range(3)] + [b"no image"])
    nobody = source.model_copy(update={"where": {"split": "test"}})
    with pytest.raises(DataError, match=r"has no images to look at \(got \{'split': 'test'\}\)"):
        clean(nobody, CleanConfig())
    assert clean(source, CleanConfig()).counts == {"broken": 1}


def plan(source: TableConfig, cfg: CleanConfig) -> str:
    """A dry run of raypipe clean."""
    job = validate(Job, {"table": source.model_dump(), "clean": cfg.model_dump(mode="json")})
    return predicting.clean(At(job, cast(Any, None), {}, 1, "here", [])).verb


def test_a_table_that_gained_rows_since_is_refused(tmp_path: Path, textured: Draw) -> None:
    """Few images: fastdup is not asked below ten, and what does not decode is still found. A null
    is one of them.
    """
    source = make(tmp_path / "cells", [textured(1), textured(2), b"no image"])
    append(
        source.uri,
        pa.table(
            {"image_id": ["later", "null"], "split": ["train"] * 2, "image": [textured(3), None]}
        ),
        "later",
    )
    with pytest.raises(DataError, match=r"has changed since version 0 .*Pin the newest"):
        clean(source, CleanConfig())
    # The verdicts are kept. So a dry run knows it, too, and made a plan.
    with pytest.raises(DataError, match=r"has changed since version 0 .*Pin the newest"):
        plan(source, CleanConfig())
    done = clean(source.model_copy(update={"version": None}), CleanConfig())
    assert done.counts == {"broken": 2}
    assert ids(source.uri) == {named(textured(1)), named(textured(2)), "later"}


def test_a_version_that_was_cleaned_is_refused_before_it_is_judged(
    tmp_path: Path, textured: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour of looking at images, and then "OVERWRITE in version 1": it was our own commit."""
    source = make(tmp_path / "cells", [textured(1), textured(2), b"no image"])
    other = CleanConfig(dark=9.0)
    assert clean(source, other).dropped == 1
    says = r"@v0 was cleaned before, with other limits.*version 1.*Leave table\.version out"
    judged: list[object] = []
    with monkeypatch.context() as patched:
        patched.setattr(room, "_judge", judged.append)
        with pytest.raises(DataError, match=says):
            clean(source, CleanConfig())
    assert judged == []
    # A dry run made a plan of it.
    with pytest.raises(DataError, match=says):
        plan(source, CleanConfig())
    assert plan(source, other) == "clean"
    # Who drops nothing may look at any version, and what is done is done.
    assert clean(source, CleanConfig(drop=(), tag="seen")).counts == {"broken": 1}
    assert clean(source, other).dropped == 1
    assert clean(source.model_copy(update={"version": None}), CleanConfig()).dropped == 0


@pytest.mark.usefixtures("heard")
def test_a_version_with_nothing_to_drop_may_have_got_rows_since(
    tmp_path: Path, textured: Draw, caplog: pytest.LogCaptureFixture
) -> None:
    """A retrain on the tag `clean` was refused as soon as rows had come behind it."""
    source = make(tmp_path / "cells", [textured(1), textured(2)])
    table = ImageTable(source.uri)
    append(source.uri, scan.rows(table, table.pin(), ROW), "x")
    done = clean(source, CleanConfig())
    assert done.dropped == 0 and table.tags()["clean"] == done.raw.version == 0
    assert "has got or lost rows since version 0" in caplog.text


def test_a_table_whose_rows_may_not_be_dropped_is_named_before_it_is_judged(
    tmp_path: Path, textured: Draw
) -> None:
    rows = pa.table({"image_id": ["a"], "image": [b"no image"]})
    uri, only_new = str(tmp_path / "t"), {"delta.appendOnly": "true"}
    write_deltalake(uri, rows, configuration=only_new)
    with pytest.raises(DataError, match=r"may not be changed or dropped .*appendOnly"):
        clean(TableConfig(uri=uri), CleanConfig())
    assert not ImageTable.exists(verdicts.uri_of(uri))


def test_a_policy_that_would_leave_nothing_is_refused_and_drops_nothing(tmp_path: Path) -> None:
    source = make(tmp_path / "cells", [b"no image", b"nor this"])
    with pytest.raises(
        DataError, match=r"would drop all 2 images .*\(got \{'broken': 2\}\).*clean\.drop"
    ):
        clean(source, CleanConfig())
    assert len(ids(source.uri)) == 2
    assert ImageTable(source.uri).tags() == {}


def test_a_similarity_of_which_fastdup_lists_no_pairs_is_refused() -> None:
    """A limit of 0.8 found the pairs from 0.9 on, without a word."""
    with pytest.raises(ConfigError, match=r"near_duplicate is wrong \(got 0\.8\).*0\.9"):
        validate(CleanConfig, {"near_duplicate": 0.8})
    assert validate(CleanConfig, {"near_duplicate": 0.9}).near_duplicate == 0.9


def test_a_policy_may_keep_what_it_finds(tmp_path: Path, textured: Draw) -> None:
    source = make(tmp_path / "cells", [textured(1), b"no image"])
    done = clean(source, CleanConfig(drop=(), tag="judged"))
    assert (done.counts, done.dropped, done.clean) == ({"broken": 1}, 0, done.raw)
    assert ImageTable(source.uri).tags() == {"judged": 0}
    assert verdicts.dropped_ids(source.uri, "", None) == set()


ODD = Columns(id="image id", image='the "image"', label="class-name", split="part")


def test_rows_are_dropped_and_not_ids(tmp_path: Path, textured: Draw) -> None:
    """Three photographs of one product, one broken; a broken one without an id; ids and columns
    that need quotes.
    """
    good = [textured(seed) for seed in range(6)]
    content = {
        "n": list(range(8)),
        "image id": ["p 1", "p 1", "p 1", "it's", 'say "x"', None, None, "p 1"],
        'the "image"': [
            good[0],
            b"no image",
            good[1],
            b"nor this",
            good[2],
            b"broken too",
            good[3],
            good[4],
        ],
    }
    uri = str(tmp_path / "t")
    append(uri, pa.table(content), "add")
    done = clean(TableConfig(uri=uri, columns=ODD), CleanConfig())
    assert (done.images, done.dropped, done.counts) == (8, 3, {"broken": 3})
    table = ImageTable(uri, ODD)
    left = scan.rows(table, table.pin("clean"), ["n", "image id", 'the "image"']).to_pylist()
    assert left == [row for row in pa.table(content).to_pylist() if row["n"] not in (1, 3, 5)]
    found = {
        r["row"]: (r["image_id"], r["sha256"]) for r in rows_of(uri) if r["verdict"] == "broken"
    }
    assert found == {
        1: ("p 1", named(b"no image")),
        3: ("it's", named(b"nor this")),
        5: (None, named(b"broken too")),
    }


def test_two_copies_of_one_row_that_both_break_both_go_and_one_of_other_bytes_stays(
    tmp_path: Path, textured: Draw
) -> None:
    uri = str(tmp_path / "t")
    for _ in range(2):
        append(uri, pa.table({"image_id": ["a", "a"], "image": [b"no image", textured(1)]}), "add")
    done = clean(TableConfig(uri=uri), CleanConfig())
    table = ImageTable(uri)
    assert (done.dropped, scan.rows(table, done.clean, ["image"])["image"].to_pylist()) == (
        2,
        [textured(1)] * 2,
    )


@pytest.mark.parametrize("labelled", ["first", "second"])
def test_of_duplicates_the_labelled_one_stays(
    labelled: str, planted: dict[str, bytes], textured: Draw, tmp_path: Path
) -> None:
    """On fe2916f the first in id order stayed, and its twin's label was lost."""
    twins = [planted["original"], planted["copy"]]
    first, second = sorted(twins, key=named)
    label_of = {named(first if labelled == "first" else second): "a"}
    images = [textured(seed, 160) for seed in range(1, 12)] + twins
    rows = {
        "image_id": list(map(named, images)),
        "label": [label_of.get(named(image)) for image in images],
        "image": images,
    }
    append(str(tmp_path / "t"), pa.table(rows), "add")
    done = clean(TableConfig(uri=str(tmp_path / "t")), CleanConfig())
    left = ids(str(tmp_path / "t"), done.clean.version)
    assert (done.dropped, set(label_of) <= left) == (1, True)


@pytest.mark.parametrize("label", [None, "", "b", 3])
def test_images_come_in_the_order_in_which_they_stay(
    label: Any, tmp_path: Path, textured: Draw
) -> None:
    """A label before a blank, a blank before none; then by id."""
    kind = pa.int64() if label == 3 else pa.string()
    rows = {
        "image_id": ["a", "b", None, "d"],
        "label": pa.array([None, label, label, None], kind),
        "image": [textured(seed) for seed in range(4)],
    }
    append(str(tmp_path / "t"), pa.table(rows), "add")
    table = ImageTable(str(tmp_path / "t"))
    source = TableConfig(uri=table.uri)
    found = room._recoded_images(table, table.pin(), source, CleanConfig())
    expected = ["a", "b", "d", None] if label is None else ["b", None, "a", "d"]
    assert [seen.image_id for seen, _ in found] == expected


def test_other_rules_are_another_policy_and_what_the_old_ones_dropped_is_known() -> None:
    cfg = CleanConfig()
    old = key_of("clean 2", cfg.model_dump(mode="json", exclude={"tag"}))
    assert rules(cfg) != old and {rules(cfg), old} <= known_as(cfg)


def test_a_tag_that_cannot_be_is_refused_before_anything_is_dropped(
    tmp_path: Path, textured: Draw
) -> None:
    table = TableConfig(uri=str(tmp_path / "t"))
    with pytest.raises(DataError, match=r"This cannot be a tag .*got '12'"):
        clean(table, CleanConfig(tag="12"))


def test_what_was_judged_is_part_of_the_policy(tmp_path: Path, textured: Draw) -> None:
    """A share of the rows, some of the rows, another image column, a table made anew: none is taken
    for the whole.
    """
    images = [textured(seed) for seed in range(8)] + [b"no image"] * 8
    source = make(tmp_path / "cells", images)
    sampled = clean(source.model_copy(update={"sample": 0.4}), CleanConfig(drop=()))
    assert 0 < sampled.images < 16
    whole = clean(source, CleanConfig(drop=()))
    assert (whole.images, whole.counts) == (16, {"broken": 8})
    shutil.rmtree(source.uri)
    again = make(tmp_path / "cells", [*images[:7], b"nor this"])
    assert clean(again, CleanConfig(drop=())).counts == {"broken": 1}


def test_two_tags_of_one_policy_are_one_judgement_and_one_version(
    tmp_path: Path, textured: Draw
) -> None:
    source = make(tmp_path / "cells", [textured(1), b"no image"])
    first, second = (clean(source, CleanConfig(tag=tag)) for tag in ("clean", "golden"))
    assert first == second
    assert ImageTable(source.uri).tags() == {"clean": 1, "golden": 1}


def test_a_row_that_comes_between_reading_and_dropping_is_never_under_the_tag(
    tmp_path: Path, textured: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody appends after the log was looked at and before the rows are dropped."""
    source = make(tmp_path / "cells", [textured(1), b"no image"])
    # The first look is before the images are judged.
    looked, late = ImageTable.commits, iter([None, b"unjudged"])

    def commits(table: ImageTable, after: int = -1) -> Any:
        found = looked(table, after)
        if table.uri == source.uri and (image := next(late, None)):
            append(
                source.uri,
                pa.table({"image_id": ["late"], "split": ["train"], "image": [image]}),
                "late",
            )
        return found

    monkeypatch.setattr(ImageTable, "commits", commits)
    with pytest.raises(DataError, match=r"has changed since version 0 .*not judged.*run again"):
        clean(source, CleanConfig())
    assert ImageTable(source.uri).tags() == {}
    assert len(ids(source.uri)) == 3
    assert list(Path(source.uri).glob("*.parquet")) != []
    done = clean(source.model_copy(update={"version": None}), CleanConfig())
    assert (done.counts, ids(source.uri)) == ({"broken": 2}, {named(textured(1))})


def test_a_tag_that_comes_in_between_stops_nothing(
    tmp_path: Path, textured: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make(tmp_path / "cells", [textured(1), b"no image"])
    looked, late = ImageTable.commits, iter([None, "theirs"])

    def commits(table: ImageTable, after: int = -1) -> Any:
        found = looked(table, after)
        if table.uri == source.uri and (name := next(late, None)):
            ImageTable(source.uri).tag(name, 0)
        return found

    monkeypatch.setattr(ImageTable, "commits", commits)
    done = clean(source, CleanConfig())
    assert ImageTable(source.uri).tags() == {"theirs": 0, "clean": 2}
    assert (done.clean.version, ids(source.uri, 2)) == (2, {named(textured(1))})


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ConfigError, match=r"drop\.0 is wrong \(got 'ugly'\).*'exact_duplicate'"):
        validate(CleanConfig, {"drop": ["ugly"]})
    with pytest.raises(ConfigError, match=r"dark is wrong \(got 300\)"):
        validate(CleanConfig, {"dark": 300})


@pytest.mark.parametrize("lacks", ["image_id", "image"])
def test_a_column_of_nulls_is_of_nulls(lacks: str, tmp_path: Path, textured: Draw) -> None:
    """Ray gives NaN for them, and no verdict could be kept."""
    columns = {
        "image_id": pa.array(["a", "b", "c"]),
        "image": pa.array([textured(1), textured(2), b"no image"]),
    }
    columns[lacks] = pa.nulls(3, columns[lacks].type)
    uri = str(tmp_path / "t")
    append(uri, pa.table({"n": [1, 2, 3], **columns}), "add")
    if lacks == "image":
        with pytest.raises(DataError, match=r"would drop all 3 images"):
            clean(TableConfig(uri=uri), CleanConfig())
    else:
        assert clean(TableConfig(uri=uri), CleanConfig()).counts == {"broken": 1}
    (broken, *_) = [row for row in rows_of(uri) if row["verdict"] == "broken"]
    assert (broken["image_id"], broken["sha256"]) == (
        (None, named(b"no image")) if lacks == "image_id" else ("a", None)
    )


def test_of_many_copies_one_stays() -> None:
    """fastdup names the five nearest of an image: of more copies, some had no pair with it."""
    seen = [verdicts.Seen(f"i{n}", "f", n, "h") for n in range(43)]
    pngs = [b"x"] * 40 + [b"y", b"z", b"y"]
    nothing = {name: np.array([], np.int64) for name in ("pair_a", "pair_b")}
    nothing["pair_similarity"] = np.array([], np.float32)
    found = room._duplicates(seen, room._with_copies(nothing, pngs), CleanConfig())
    assert {row["image_id"]: row["partner"] for row in found} == {
        **{f"i{n}": "i0" for n in range(1, 40)},
        "i42": "i40",
    }
    assert {row["verdict"] for row in found} == {"exact_duplicate"}
