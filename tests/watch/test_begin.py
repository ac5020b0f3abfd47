"""What a challenger begins with, and that no test row is one that either model has learned from."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from raypipe.config import replace, validate
from raypipe.errors import ConfigError, DataError
from raypipe.feed.dataset import Pinned, pin
from raypipe.feed.locate import locate
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.registry.package import MANIFEST, Package, Reference
from raypipe.registry.packing import build
from raypipe.registry.versions import ModelVersion
from raypipe.search.settings import SearchConfig
from raypipe.tables.table import append
from raypipe.train import learned
from raypipe.train.job import TrainJob
from raypipe.watch import begin, judging
from raypipe.watch.settings import WatchConfig

CHAMPION = ModelVersion("m", 1, "models:/m/1", {})


def test_shares_are_equal_and_what_one_lacks_is_the_others() -> None:
    assert begin.shares({"a": 90, "b": 5, "c": 90}, 45) == {"a": 20, "b": 5, "c": 20}
    assert begin.shares({"a": 3, "b": 2}, 100) == {"a": 3, "b": 2}
    assert begin.shares({}, 5) == {}
    found = begin.shares({"a": 10, "b": 10, "c": 10}, 10)
    assert sum(found.values()) == 10 and max(found.values()) <= 4


def test_replay_keeps_all_new_rows_and_a_seeded_share_of_old_ones() -> None:
    rng = np.random.default_rng(1)
    ids = [f"i{n}" for n in range(1000)]
    labels = ["a" if n % 10 else "b" for n in range(1000)]
    is_old_N = np.arange(1000) < 900
    kept_N = begin.chosen(ids, labels, is_old_N, 1.0, 7)
    assert kept_N[~is_old_N].all() and kept_N[is_old_N].sum() == 100
    counts = {x: sum(kept_N[n] and labels[n] == x for n in range(900)) for x in "ab"}
    assert counts == {"a": 50, "b": 50}, "a rare class is not drowned again"
    # How the table is stored does not matter; the seed does.
    order = rng.permutation(1000)
    again = begin.chosen([ids[n] for n in order], [labels[n] for n in order], is_old_N[order], 1, 7)
    assert {ids[n] for n in order[again]} == {i for i, k in zip(ids, kept_N, strict=True) if k}
    assert (begin.chosen(ids, labels, is_old_N, 1.0, 8) != kept_N).any()


@pytest.mark.parametrize(("old", "per_new"), [([True] * 4, 1.0), ([False] * 4, 1.0), ([], 2.0)])
def test_without_new_or_old_rows_all_are_trained_on(old: list[bool], per_new: float) -> None:
    ids = [str(n) for n in range(len(old))]
    assert begin.chosen(ids, ["a"] * len(old), np.array(old, bool), per_new, 1).all()


def test_a_row_without_an_id_is_kept() -> None:
    ids = [None, "1", "2", "3", "4", "5"]
    old_N = np.array([True] * 5 + [False])
    assert begin.chosen(ids, ["a"] * 6, old_N, 1.0, 1)[0]


def test_a_search_ends_within_the_budget() -> None:
    cfg = validate(SearchConfig, {"stopping": {"gpu_hours": 2.0}})
    assert begin.within_budget(cfg, 5.0).stopping.gpu_hours == 2.0
    assert begin.within_budget(cfg, 0.5).stopping.gpu_hours == 0.5
    assert begin.within_budget(SearchConfig(), 0.5).stopping.gpu_hours == 0.5
    assert begin.within_budget(cfg, None) is cfg


# --- on a real table ---


def sha(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def add(job: TrainJob, names: list[str], splits: list[str], hashes: bool = True) -> Pinned:
    columns: dict[str, Any] = {
        "image_id": names,
        "image": [b"x"] * len(names),
        "label": ["a", "b"] * (len(names) // 2),
        "split": splits,
    }
    if hashes:
        columns["sha256"] = [sha(name) for name in names]
    append(job.table.uri, pa.table(columns), "add")
    return pin(job.table, job.feed)


def job_at(tmp_path: Path, name: str = "t") -> TrainJob:
    given = {"table": {"uri": str(tmp_path / name)}, "run": {"dir": str(tmp_path / "run")}}
    return validate(TrainJob, given)


def of(rows_N2: np.ndarray | None, inherited_N2: np.ndarray = learned.NONE_N2) -> Package:
    """A package that says which rows its weights have learned from."""
    files = {} if rows_N2 is None else learned.files(rows_N2, inherited_N2)
    return cast(Package, SimpleNamespace(files=files, info={"table": {"uri": "-", "version": 0}}))


@pytest.mark.parametrize("left", ["a byte that changed", "half a file", "no manifest", "nothing"])
def test_what_an_earlier_retrain_has_left_of_the_champion_is_mended(
    left: str, tmp_path: Path
) -> None:
    """Every later retrain ended with a message about train.start_from, which nobody had set."""
    cfg = ModelConfig(name="small_cnn", pretrained=False, mode="finetune")
    nothing = Reference(np.zeros((4, 64)), np.full((4, 2), 0.5), tuple("wxyz"))
    made = build(tmp_path / "made", ImageModel(cfg, 2).eval(), cfg, ("a", "b"), nothing, {})
    package = Package(made)
    folder = begin._placed(package, tmp_path / "champions")
    weights = folder / "weights.safetensors"
    if left == "a byte that changed":
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
    elif left == "half a file":
        weights.write_bytes(weights.read_bytes()[:100])
    elif left == "no manifest":
        (folder / MANIFEST).unlink()
    before = weights.stat().st_mtime_ns
    assert begin._placed(package, tmp_path / "champions") == folder
    assert Package(folder, package.seal).seal == package.seal
    assert (weights.stat().st_mtime_ns == before) == (left == "nothing")


SPLITS = ["train"] * 4 + ["val"] * 2 + ["test"] * 4
NAMES = [f"i{n}" for n in range(10)]


def test_neither_model_is_judged_on_rows_that_the_other_has_learned_from(tmp_path: Path) -> None:
    """Rows that were for training and are for testing now; and the same image in another table."""
    job = job_at(tmp_path)
    champion = of(learned.of_training(job, add(job, NAMES, SPLITS)))
    later = job_at(tmp_path, "later")
    # i2 and i3 have moved to the test split of another table, under other ids: their images tell.
    moved = ["n0", "n1", "n2", "n3", "v0", "v1", "i2", "i3", "t0", "t1"]
    pinned = add(later, moved, SPLITS)
    where, said = pinned.rows_of("test"), list[str]()
    challenger = of(learned.of_training(later, pinned))
    known = judging.learned_ids([champion, challenger], pinned, where, said.append)
    assert known == {"i2", "i3"} and not said
    # A warm challenger knows what its parent knew, also when the parent is not compared any more.
    warm = of(learned.of_training(later, pinned), learned.by(champion))  # type: ignore[arg-type]
    fresh = of(learned.NONE_N2)
    assert judging.learned_ids([fresh, warm], pinned, where, said.append) == {"i2", "i3"}
    assert judging.learned_ids([fresh, challenger], pinned, where, said.append) == set()
    assert judging.learned_ids([of(None), challenger], pinned, where, said.append) == set()
    assert "cannot be told" in said[-1]


def npy(rows: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, rows)
    return out.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"xx",
        npy(np.zeros((3, 2)))[:-9],
        npy(np.zeros((3, 2))),
        npy(np.zeros(3, np.uint64)),
        npy(np.zeros((3, 3), np.uint64)),
        npy(np.array([["a", "b"]])),
        npy(np.array([{}], object)),
    ],
)
@pytest.mark.parametrize("name", [learned.OWN, learned.INHERITED])
def test_rows_that_raypipe_has_not_written_are_refused(name: str, data: bytes) -> None:
    """Floats matched no row: all test rows counted, known ones too."""
    files = {learned.OWN: npy(learned.NONE_N2), name: data}
    with pytest.raises(DataError, match=r"does not say which rows .*Restore the package"):
        learned.by(cast(Package, SimpleNamespace(files=files)))


def test_without_hashes_the_ids_of_one_table_tell(tmp_path: Path) -> None:
    job, other = job_at(tmp_path), job_at(tmp_path, "other")
    pinned = add(job, NAMES, SPLITS, hashes=False)
    champion = of(learned.of_training(job, pinned))
    swapped = replace(job, {"feed.test": "train", "feed.train": "test"})
    mine = pin(swapped.table, swapped.feed)
    ids = judging.learned_ids([champion], mine, mine.rows_of("train"), print)
    assert ids == {"i0", "i1", "i2", "i3"}
    same_names = add(other, NAMES, SPLITS, hashes=False)
    assert not judging.learned_ids([champion], same_names, same_names.rows_of("train"), print)


def test_replay_leaves_old_rows_out_of_training_and_of_nothing_else(tmp_path: Path) -> None:
    job = job_at(tmp_path)
    known_N2 = learned.of_training(job, add(job, NAMES, SPLITS))
    news = [f"n{n}" for n in range(4)]
    pinned = add(job, news, ["train", "train", "val", "test"])
    said: list[str] = []
    replayed, facts = begin._replayed(job, 1.0, known_N2, pinned, said.append)
    assert said == ["Training on 2 new rows and 2 of 4 old ones"]
    assert facts == facts | {"new": 2, "old": 4, "replayed": 2, "seed": job.run.seed}
    again = pin(replayed.table, replayed.feed, opened=pinned)
    assert (again.counts["train"], again.counts["val"], again.counts["test"]) == (4, 3, 5)
    rows = locate(again, "train", replayed.feed)
    ids = set(rows.ids_of(np.arange(len(rows))))
    assert len(rows) == 4 and {"n0", "n1"} <= ids
    # The package says exactly these rows.
    trained_N2 = learned.of_training(replayed, again)
    every, all_N2 = learned.rows_of(pinned, pinned.version, pinned.rows_of("train"))
    named = {
        name for name, row in zip(every, all_N2.tolist(), strict=True) if row in trained_N2.tolist()
    }
    assert named == ids
    # Elsewhere it is the same training: by content.
    elsewhere = replace(job, {"run.dir": str(tmp_path / "b")})
    other, _ = begin._replayed(elsewhere, 1.0, known_N2, pinned, said.append)
    assert other.feed.leave_out != replayed.feed.leave_out
    assert other.training_key(pinned.version) == replayed.training_key(pinned.version)
    assert job.training_key(pinned.version) != replayed.training_key(pinned.version)


def test_an_image_under_another_id_or_in_another_table_is_an_old_row(tmp_path: Path) -> None:
    """As for test rows. All of a table that was made again had counted as new."""
    job, later = job_at(tmp_path), job_at(tmp_path, "later")
    known_N2 = learned.of_training(job, add(job, NAMES, SPLITS))
    add(later, NAMES, SPLITS)
    pinned = add(later, ["n0", "n1"], ["train"] * 2)
    said: list[str] = []
    replayed, _ = begin._replayed(later, 1.0, known_N2, pinned, said.append)
    assert said == ["Training on 2 new rows and 2 of 4 old ones"]
    again = pin(replayed.table, replayed.feed, opened=pinned)
    assert again.counts["train"] == 4


def test_new_photographs_of_known_products_are_new_rows(tmp_path: Path) -> None:
    """Their ids were known, and so were they: a retrain had no new rows."""
    job = job_at(tmp_path)
    known_N2 = learned.of_training(job, add(job, NAMES, SPLITS))
    rows = {"image_id": ["i0", "i1"], "image": [b"x"] * 2, "label": ["a", "b"]}
    append(
        job.table.uri,
        pa.table(rows | {"split": ["train"] * 2, "sha256": [sha("n"), sha("m")]}),
        "add",
    )
    pinned = pin(job.table, job.feed)
    said: list[str] = []
    _, facts = begin._replayed(job, 1.0, known_N2, pinned, said.append)
    assert facts == facts | {"new": 2, "old": 4}
    also = "(2 of them have an id that the champion knows, and other bytes)"
    assert said == [f"Training on 2 new rows {also} and {facts['replayed']} of 4 old ones"]


def test_rows_that_were_encoded_anew_are_told_beside_new_ones(tmp_path: Path) -> None:
    """They may as well be new photographs: none is left out, and the numbers say what they are."""
    job = job_at(tmp_path)
    known_N2 = learned.of_training(job, add(job, NAMES, SPLITS))
    DeltaTable(job.table.uri).delete()
    names = [*NAMES, "n0", "n1"]
    rows = {"image_id": names, "image": [b"x"] * 12, "label": ["a", "b"] * 6}
    hashes = [sha(f"{name}, smaller") for name in names]
    splits = [*SPLITS, "train", "train"]
    append(job.table.uri, pa.table(rows | {"split": splits, "sha256": hashes}), "add")
    pinned = pin(job.table, job.feed)
    said: list[str] = []
    replayed, facts = begin._replayed(job, 1.0, known_N2, pinned, said.append)
    also = "(4 of them have an id that the champion knows, and other bytes)"
    assert said == [f"Training on 6 new rows {also} and all 0 old ones"]
    assert replayed == job and facts == facts | {"new": 6, "old": 0}


def test_new_photographs_of_known_products_may_validate(tmp_path: Path) -> None:
    """Validation images that shared their ids with training images counted as learned from: no
    challenger began with the champion's weights, and no temperature was fitted."""
    job = job_at(tmp_path)
    rows = {"image_id": ["i0", "i1"] * 2, "image": [b"x"] * 4, "label": ["a", "b"] * 2}
    hashes = [sha(name) for name in ("k", "l", "m", "n")]
    splits = ["train", "train", "val", "val"]
    append(job.table.uri, pa.table(rows | {"split": splits, "sha256": hashes}), "add")
    pinned = pin(job.table, job.feed)
    known_N2 = learned.of_training(job, pinned)
    assert not learned.decides(pinned, "val", known_N2)
    assert learned.decides(pinned, "train", known_N2)


def test_validation_images_that_were_encoded_anew_are_remembered(tmp_path: Path) -> None:
    """A champion that was refitted on validation knew none of their new bytes: a challenger started
    from its weights, and a temperature was fitted on what they remember."""
    job = job_at(tmp_path)
    pinned = add(job, NAMES, SPLITS)
    known_N2 = learned.united(
        learned.rows_of(pinned, pinned.version, pinned.rows_of("train+val"))[1]
    )
    DeltaTable(job.table.uri).delete()
    rows = {"image_id": NAMES, "image": [b"x"] * 10, "label": ["a", "b"] * 5, "split": SPLITS}
    smaller = pa.table(rows | {"sha256": [sha(f"{name}, smaller") for name in NAMES]})
    append(job.table.uri, smaller, "add")
    pinned = pin(job.table, job.feed)
    assert learned.decides(pinned, "val", known_N2)
    assert not learned.decides(pinned, "test", known_N2), "their ids were never learned"
    # Of another table the same ids say nothing.
    other = job_at(tmp_path, "other")
    append(other.table.uri, smaller, "add")
    assert not learned.decides(pin(other.table, other.feed), "val", known_N2)
    # With the known images beside them they are new photographs, in whatever split those are.
    add(job, NAMES[4:6], ["train"] * 2)
    assert not learned.decides(pin(job.table, job.feed), "val", known_N2)


def test_a_prepared_table_that_was_made_anew_is_no_new_photograph(tmp_path: Path) -> None:
    """Its source's images are still there: the images of a known product tell by them."""
    job = job_at(tmp_path)
    ids, splits = ["i0", "i1"] * 2, ["train"] * 2 + ["val"] * 2
    rows = {"image_id": ids, "image": [b"x"] * 4, "label": ["a", "b"] * 2, "split": splits}
    rows |= {"sha256": [sha(f"{n} at 128 px") for n in range(4)]}
    rows |= {"original_sha256": [sha(str(n)) for n in range(4)]}
    append(job.table.uri, pa.table(rows), "add")
    pinned = pin(job.table, job.feed)
    version = dataclasses.replace(pinned.version, origin="/source@v0", origin_id="source")
    pinned = dataclasses.replace(pinned, version=version)

    def known(photographs: list[int], *tables: str) -> np.ndarray:
        names = [ids[n] for n in photographs]
        hashes = {
            version.table_id: [sha(f"{n} at 256 px") for n in photographs],
            "source": [sha(str(n)) for n in photographs],
        }
        return learned.united(
            *(learned.identities(one, names, pa.chunked_array([hashes[one]])) for one in tables)
        )

    both = (version.table_id, "source")
    assert not learned.decides(pinned, "val", known([0, 1], *both))
    assert learned.decides(pinned, "val", known([2, 3], *both))
    # An older package does not list the rows of the source.
    assert learned.decides(pinned, "val", known([2, 3], version.table_id))


def test_a_new_row_stays_beside_an_old_one_of_the_same_id(tmp_path: Path) -> None:
    job, later = job_at(tmp_path), job_at(tmp_path, "later")
    known_N2 = learned.of_training(job, add(job, NAMES, SPLITS))
    # The images i0 to i3 under one id, which an unknown image has, too.
    ids = ["x"] * 5 + ["y", "v", "v2", "t", "t2"]
    images = ["i0", "i1", "i2", "i3", "new", "newer", "v", "v2", "t", "t2"]
    rows = pa.table(
        {
            "image_id": ids,
            "image": [b"x"] * 10,
            "label": ["a", "b"] * 5,
            "split": ["train"] * 6 + ["val"] * 2 + ["test"] * 2,
            "sha256": [sha(name) for name in images],
        }
    )
    append(later.table.uri, rows, "add")
    pinned = pin(later.table, later.feed)
    said: list[str] = []
    same, facts = begin._replayed(later, 0.5, known_N2, pinned, said.append)
    assert same.feed.leave_out is None and facts == facts | {"new": 2, "old": 4, "replayed": 4}
    assert said == ["Training on 2 new rows and all 4 old ones"]


def test_a_large_table_is_replayed_in_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took the square of the rows: a minute was not enough for 50,000."""
    rows = 50_000
    rows_N2 = np.arange(2 * rows, dtype=np.uint64).reshape(rows, 2) + np.uint64(1)
    ids: list[str | None] = [str(n) for n in range(rows)]
    monkeypatch.setattr(learned, "rows_of", lambda *given: (ids, rows_N2))
    monkeypatch.setattr(begin, "_labels", lambda *given: ["a"] * rows)
    pinned = cast(Pinned, SimpleNamespace(rows_of=lambda split: {}, version=None))
    began = time.monotonic()
    known_N2 = rows_N2[: rows - 100]
    _, facts = begin._replayed(job_at(tmp_path), 1.0, known_N2, pinned, lambda said: None)
    assert facts["replayed"] == 100 and time.monotonic() - began < 10


@pytest.mark.parametrize("text", ["{", '{"a": 1}', "[1]", None])
def test_a_list_of_rows_that_is_none_is_refused(tmp_path: Path, text: str | None) -> None:
    job = job_at(tmp_path)
    add(job, NAMES, SPLITS)
    file = tmp_path / "out.json"
    if text is not None:
        file.write_text(text)
    feed = job.feed.model_copy(update={"leave_out": str(file)})
    with pytest.raises(ConfigError, match=r"feed\.leave_out"):
        pin(job.table, feed)


def test_a_list_of_rows_that_was_altered_is_refused_and_one_of_all_rows_too(
    tmp_path: Path,
) -> None:
    job = job_at(tmp_path)
    add(job, NAMES, SPLITS)
    file = tmp_path / f"{'ab' * 32}.json"
    file.write_text('["i0"]')
    with pytest.raises(ConfigError, match=r"holds something else"):
        pin(job.table, job.feed.model_copy(update={"leave_out": str(file)}))
    plain = tmp_path / "all.json"
    plain.write_text(json.dumps(NAMES))
    with pytest.raises(DataError, match=r"no labelled rows in split 'train'"):
        pin(job.table, job.feed.model_copy(update={"leave_out": str(plain)}))


@pytest.mark.parametrize("watch", ["auto", "champion"])
@pytest.mark.parametrize("learned_from", ["train", "train+val"])
def test_weights_that_know_the_validation_images_are_no_start(
    tmp_path: Path, watch: str, learned_from: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a refit, validation would choose between trials that remember it. Who asks for these
    weights gets them."""
    monkeypatch.setattr(begin.start, "require_same", lambda *given: None)
    monkeypatch.setattr(begin, "_placed", lambda package, place: place)
    job = job_at(tmp_path)
    job = job.model_copy(update={"model": job.model.model_copy(update={"mode": "finetune"})})
    pinned = add(job, NAMES, SPLITS)
    known = learned.rows_of(pinned, pinned.version, pinned.rows_of(learned_from))[1]
    package = of(known)
    package.folder = tmp_path  # type: ignore[misc]
    said: list[str] = []
    cfg = WatchConfig(retrain_from=watch)  # type: ignore[arg-type]
    first, _ = begin.begin(job, cfg, CHAMPION, package, pinned, said.append)
    is_cold = watch == "auto" and learned_from == "train+val"
    assert (first.train.start_from is None) == is_cold, said
    assert (begin.REMEMBERS in said[0]) == is_cold


@pytest.mark.parametrize(
    ("watch", "why"),
    [
        ({"retrain_from": "pretrained"}, "watch.retrain_from=pretrained"),
        ({}, "a head on frozen features starts anew"),
        (
            {"retrain_from": "champion", "retrain_space": {"model.name": "choice(a, b)"}},
            "draws model.name",
        ),
        (
            {"retrain_from": "champion", "retrain_space": {"train.start_from": "choice(a, b)"}},
            "draws train.start_from",
        ),
    ],
)
def test_a_cold_start_is_said(tmp_path: Path, watch: dict[str, Any], why: str) -> None:
    job = job_at(tmp_path)
    pinned = add(job, NAMES, SPLITS)
    said: list[str] = []
    cfg = validate(WatchConfig, watch)
    same, start = begin.begin(job, cfg, CHAMPION, of(learned.NONE_N2), pinned, said.append)
    assert same.train.start_from is None and start.version is None and why in said[0]
    assert start.facts(same)["weights"] == "pretrained"


def test_a_class_that_was_renamed_is_told_before_it_decides(tmp_path: Path) -> None:
    """Any challenger won by all images of that class, and nothing said why."""
    job = job_at(tmp_path)
    pinned = add(job, NAMES, SPLITS)

    def said(*classes: str) -> str:
        return judging.unknown_to(cast(Package, SimpleNamespace(classes=classes)), pinned, "test")

    assert said("a", "b") == said("a", "b", "c") == ""
    assert "2 of the 4 labels in feed.test=test" in said("a", "B") and "as 'b'" in said("a", "B")
    assert "'B' has no test image any more: was a class renamed?" in said("a", "B")
    assert "renamed" not in said("a"), "a table grows"


def test_a_champion_that_knows_no_class_of_a_table_is_not_compared(tmp_path: Path) -> None:
    """The table of another model: any challenger was better, and took its place."""
    job = job_at(tmp_path)
    pinned = add(job, NAMES, SPLITS)

    def compared(*classes: str) -> None:
        champion = cast(Package, SimpleNamespace(classes=classes))
        judging.require_shared(champion, pinned, "test")

    compared("b", "c")
    with pytest.raises(DataError, match=r"none of the classes in feed.test=test.*a.*b.*A, B"):
        compared("A", "B")


def test_rows_without_an_id_are_known_by_their_image_alone(tmp_path: Path) -> None:
    """No id was one id: with one such row in training, all test rows without an id counted as
    learned from, and no challenger was ever compared."""
    job = job_at(tmp_path)
    columns = {
        "image_id": pa.array([None if n % 2 else f"i{n}" for n in range(10)], pa.string()),
        "image": [b"x"] * 10,
        "label": ["a", "b"] * 5,
        "split": SPLITS,
        # The last test row is a copy of the first training row.
        "sha256": [sha(str(n % 9)) for n in range(10)],
    }
    append(job.table.uri, pa.table(columns), "add")
    pinned = pin(job.table, job.feed)
    learned_N2, where = learned.of_training(job, pinned), pinned.rows_of("test")
    rows_N2 = learned.rows_of(pinned, pinned.version, where)[1]
    assert learned.is_among(rows_N2, learned_N2).tolist() == [False, False, False, True]
    champion = cast(Package, SimpleNamespace(files=learned.files(learned_N2, learned.NONE_N2)))
    assert judging.learned_ids([champion], pinned, where, print) == set()
    judged = pa.table({"id": ["i6", "", "i8", ""], "stored_sha256": columns["sha256"][6:]})
    is_known = judging._known_without_id(judged, [champion], pinned).to_pylist()
    assert is_known == [False, False, False, True], "one that was learned from is all, by its id"
    # In a prepared copy the bytes are others: those of the source are known.
    version = dataclasses.replace(pinned.version, origin="/source@v0", origin_id="source")
    copy = dataclasses.replace(pinned, version=version)
    smaller = pa.array([sha(f"{n}, smaller") for n in range(4)])
    stored = {"stored_sha256": smaller, "original_sha256": judged["stored_sha256"]}
    judged = pa.table({"id": judged["id"], **stored})
    is_known = judging._known_without_id(judged, [champion], copy).to_pylist()
    assert is_known == [False, False, False, True]
    # A package of an older raypipe has the hash of None among its ids.
    hashed = hashlib.blake2b(repr((pinned.version.table_id, None)).encode(), digest_size=8)
    older_N2 = np.array([[int.from_bytes(hashed.digest(), "little"), 1]], np.uint64)
    assert not learned.is_among(rows_N2, older_N2).any()


def test_what_the_job_leaves_out_stays_out_of_a_replay(tmp_path: Path) -> None:
    """The list of the replay replaced it, and its rows were trained on as new ones."""
    job = job_at(tmp_path)
    known_N2 = learned.of_training(job, add(job, NAMES, SPLITS))
    pinned = add(job, [f"n{n}" for n in range(4)], ["train"] * 4)
    mine = tmp_path / "mine.json"
    mine.write_text(json.dumps(["n0"]))
    own = replace(job, {"feed.leave_out": str(mine)})
    said: list[str] = []
    replayed, _ = begin._replayed(own, 0.5, known_N2, pinned, said.append)
    assert said == ["Training on 3 new rows and 2 of 4 old ones"]
    again = pin(replayed.table, replayed.feed, opened=pinned)
    rows = locate(again, "train", replayed.feed)
    ids = set(rows.ids_of(np.arange(len(rows))))
    assert {"n1", "n2", "n3"} <= ids and "n0" not in ids
