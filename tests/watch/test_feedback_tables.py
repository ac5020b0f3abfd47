"""Labels in tables of every kind: each is read as training reads it, or a note says why not.

A check needs no labels, so nothing in a label column may stop it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from deltalake import write_deltalake

from raypipe.config import RunConfig
from raypipe.errors import DataError
from raypipe.images.decode import decode_batch
from raypipe.models.outcomes import Outcomes
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.registry import packing
from raypipe.registry.package import OUTCOMES, Package, Reference
from raypipe.tables.table import ImageTable, TableConfig
from raypipe.watch import feedback, feedback_rows
from raypipe.watch.chosen import Seen
from raypipe.watch.feedback_rows import Came, Champion
from raypipe.watch.predicted import Batch
from raypipe.watch.settings import WatchConfig
from tests.conftest import encode, striped

CFG = ModelConfig(name="small_cnn", pretrained=False, mode="finetune")
IMAGES = [encode(striped(n, ("warm", "cold")[n % 2])) for n in range(40)]
IDS = [f"i{n}" for n in range(40)]


@dataclass(frozen=True)
class Night:
    """One table of images with labels, and the champion that has predicted them."""

    package: Package
    run: RunConfig
    table: Path

    def came(
        self,
        labels: Any,
        ids: Sequence[Any] | pa.Array = IDS,
        images: Sequence[bytes] = IMAGES,
        columns: dict[str, str] | None = None,
        keep: bool = False,
        predicted: slice = slice(None),
        **more: Any,
    ) -> Came | None:
        """What a check finds of these rows, the champion having predicted some of them."""
        rows = {"image_id": ids, "image": pa.array(images, pa.binary()), "label": labels} | more
        write_deltalake(str(self.table), pa.table(rows), mode="overwrite", schema_mode="overwrite")
        config = TableConfig(uri=str(self.table), columns=columns or {})
        said = self.package.predict(list(images[predicted]))
        names = [None if i is None else str(i) for i in pa.array(ids).to_pylist()[predicted]]
        mine = Batch(
            ImageTable.open(config).pin(),
            names,
            [_sha256(image) for image in images[predicted]],
            said.features_ND,
            said.scores_NC,
        )
        by = Champion(self.package, "m/1", "seal")
        watch = WatchConfig()
        args = (self.run, watch, "night", by, config, mine, ())
        found = feedback_rows.gather(*args)
        if keep:
            about = str(mine.version.version)
            feedback_rows.keep(self.run, watch, about, "night", by, lambda: found)
        return found

    def said(self, images: Sequence[bytes] = IMAGES) -> list[str]:
        return list(self.package.predict(list(images)).labels)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def packed(
    folder: Path, classes: tuple[str, ...], outcomes: Outcomes | None, group: str | None = None
) -> Package:
    torch.manual_seed(4)
    model = ImageModel(CFG, len(classes)).eval()
    with torch.no_grad():
        features_BD = model.embed(torch.from_numpy(decode_batch(IMAGES, CFG.pixels)))
        model.head.standardise_by(features_BD.mean(0), features_BD.std(0))
        torch.nn.init.normal_(model.head.linear.weight, std=0.3)
    nothing = Reference(np.zeros((4, 64)), np.full((4, len(classes)), 1 / 2), tuple("wxyz"))
    info = {"config": {"registry": {"group": group} if group else {}}}
    extra = {OUTCOMES: outcomes.to_bytes()} if outcomes is not None else {}
    return Package(packing.build(folder, model, CFG, classes, nothing, info, extra))


def known(images: int = 200) -> Outcomes:
    error_N = (np.arange(images) % 10 == 0).astype(float)
    return Outcomes(error_N, np.linspace(0.5, 1, images), split="test")


@pytest.fixture
def night(tmp_path: Path) -> Night:
    champion = packed(tmp_path / "package", ("cold", "warm"), known())
    return Night(champion, RunConfig(name="labels", dir=str(tmp_path)), tmp_path / "table")


def notes(came: Came | None) -> str:
    return "; ".join(came.says.notes) if came else ""


@pytest.mark.parametrize(
    "labels",
    [
        pa.array([{"a": 1}] * 40),
        pa.array([[{"a": 1}]] * 40),
        pa.array([[("a", 1)]] * 40, pa.map_(pa.string(), pa.int64())),
    ],
    ids=["struct", "list of structs", "map"],
)
def test_a_column_that_names_nothing_is_a_note_and_no_reason_to_fail(
    night: Night, labels: pa.Array
) -> None:
    came = night.came(labels)
    assert came is not None and not came.rows and not came.says.labelled
    assert "labels: they cannot be compared: Column 'label'" in notes(came)


@pytest.mark.parametrize("kind", ["text", "bytes", "dictionary", "one in a list"])
def test_a_label_means_what_it_means_to_training(night: Night, kind: str) -> None:
    texts = night.said()
    labels = {
        "text": pa.array(texts),
        "bytes": pa.array([text.encode() for text in texts]),
        "dictionary": pa.array(texts).dictionary_encode(),
        "one in a list": pa.array([[text] for text in texts]),
    }[kind]
    came = night.came(labels)
    assert came is not None and (came.says.labelled, came.says.measured) == (40, 1.0)


@pytest.mark.parametrize(
    ("classes", "labels"),
    [
        (("0", "1"), lambda said: pa.array([int(one) for one in said])),
        (("0", "1"), lambda said: pa.array([float(one) for one in said])),
        (("false", "true"), lambda said: pa.array([one == "true" for one in said])),
    ],
    ids=["int", "float", "bool"],
)
def test_numbers_and_truth_values_are_classes(
    tmp_path: Path, classes: tuple[str, ...], labels: Any
) -> None:
    champion = packed(tmp_path / "package", classes, known())
    night = Night(champion, RunConfig(name="labels", dir=str(tmp_path)), tmp_path / "table")
    came = night.came(labels(night.said()))
    assert came is not None and (came.says.labelled, came.says.measured) == (40, 1.0)


@pytest.mark.parametrize(
    "ids",
    [
        pa.array(range(40), pa.int64()),
        [f"o'\"%\n\\{n}é😀" for n in range(39)] + ["x" * 9000],
        [""] * 40,
    ],
    ids=["numbers", "odd characters", "blank"],
)
def test_an_id_may_be_anything(night: Night, ids: Any) -> None:
    came = night.came(night.said(), ids)
    assert came is not None and (came.says.labelled, came.says.measured) == (40, 1.0)


def test_an_image_without_an_id_has_no_label(night: Night) -> None:
    assert night.came(night.said(), pa.array([None] * 40, pa.string())) is None


@pytest.mark.parametrize("other", ["image_id", "image"])
def test_the_column_of_ids_or_images_holds_no_labels(night: Night, other: str) -> None:
    assert night.came(night.said(), columns={"label": other}) is None


def test_rows_that_are_there_three_times_are_one_image_each(night: Night) -> None:
    few = IMAGES[:30]
    came = night.came(night.said(few) * 3, IDS[:30] * 3, few * 3)
    assert came is not None and came.says.labelled == 30
    assert len(came.rows) == 30


def test_one_picture_under_many_ids_is_compared_once(night: Night) -> None:
    """A camera that stood still for a night says one thing, and not 200."""
    wrong = ["warm" if said == "cold" else "cold" for said in night.said()]
    images = [IMAGES[0]] * 15 + IMAGES[:25]
    labels = [wrong[0]] * 15 + night.said()[:25]
    labels[15] = wrong[0]
    came = night.came(labels, images=images, keep=True)
    assert came is not None and (came.says.labelled, came.says.measured) == (25, 24 / 25)
    assert "15 of copies of other images" in notes(came)
    # And not in the next night either, under other names.
    assert night.came(labels, [f"later {i}" for i in IDS], images) is None


def test_copies_with_different_labels_have_none(night: Night) -> None:
    images = [IMAGES[0]] * 2 + IMAGES[1:39]
    labels = ["warm", "cold", *night.said()[1:39]]
    came = night.came(labels, images=images)
    assert came is not None and (came.says.labelled, came.says.measured) == (38, 1.0)
    assert "two different ones" in notes(came)


def test_a_class_with_a_long_or_odd_name_is_one_short_line(night: Night) -> None:
    came = night.came(["\x1b[31mred\n" + "x" * 5000] * 40)
    assert came is not None and came.says.measured == 0
    assert "\n" not in notes(came) and "\x1b" not in notes(came) and len(notes(came)) < 400


def test_a_package_that_was_tampered_with_is_an_error_and_a_foreign_table_a_note(
    night: Night, tmp_path: Path
) -> None:
    bad = packed(tmp_path / "bad", ("cold", "warm"), None)
    bad.files[OUTCOMES] = b"no zip"
    with pytest.raises(DataError, match="outcomes of"):
        Night(bad, night.run, night.table).came(night.said())
    place = WatchConfig().place(night.run, "feedback")
    write_deltalake(place, pa.table({"x": [1]}))
    came = night.came(night.said())
    assert came is not None and not came.rows and "is a table of something else" in notes(came)


def test_images_that_were_labelled_earlier_are_among_the_others(
    night: Night, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the easy ones get a label, then all that are left: these are the hard ones."""
    seen: list[np.ndarray] = []
    judged = feedback.judge

    def noted(known: Outcomes, came: Outcomes, others: Seen, *rest: Any) -> Any:
        seen.append(others.sure_N)
        return judged(known, came, others, *rest)

    monkeypatch.setattr(feedback, "judge", noted)
    texts = night.said()
    night.came([*texts[:20], *[None] * 20], keep=True)
    came = night.came(texts)
    assert came is not None and came.says.labelled == 20
    assert [len(one) for one in seen] == [20, 20]


def test_the_table_says_of_which_domain_an_image_is(tmp_path: Path) -> None:
    """Half of the held-out images are of a domain where the champion is always wrong."""
    names = ("easy", "hard") * 100
    error_N = np.array([float(name == "hard") for name in names])
    held_out = Outcomes(error_N, np.linspace(0.5, 1, 200), names, split="test")
    champion = packed(tmp_path / "package", ("cold", "warm"), held_out)
    night = Night(champion, RunConfig(name="labels", dir=str(tmp_path)), tmp_path / "table")
    wrong = ["warm" if said == "cold" else "cold" for said in night.said()]
    came = night.came(wrong, source=["easy"] * 40)
    assert came is not None and came.says.known == 1
    assert min(one.p_value for one in came.says.found) < 1e-6
    # Who does not say it may have had a night of the hard one.
    for column in ({}, {"source": pa.array([None] * 40, pa.string())}, {"source": ["?"] * 40}):
        came = night.came(wrong, **column)
        assert came is not None and came.says.known == 0.5
        assert min(one.p_value for one in came.says.found) > 0.99


def test_a_whole_night_that_was_asked_for_is_no_choice(night: Night) -> None:
    """watch.ask is 100: of a night of 40 images that drifts, all are asked for."""
    texts = night.said()
    asked = [(name, _sha256(image)) for name, image in zip(IDS, IMAGES, strict=True)]
    feedback_rows.keep_asked(night.run, WatchConfig(), "k", "night", asked, of=40)
    came = night.came(texts)
    assert came is not None and came.says.labelled == 40
    feedback_rows.keep_asked(night.run, WatchConfig(), "k", "night", asked[:15], of=40)
    came = night.came(texts)
    assert came is not None and came.says.labelled == 25
    # The same check with a larger watch.ask: its list is another one.
    for _ in range(2):
        feedback_rows.keep_asked(night.run, WatchConfig(), "k", "night", asked[:18], of=40)
    came = night.came(texts)
    assert came is not None and came.says.labelled == 22


def test_labels_of_few_groups_wait_for_others(tmp_path: Path) -> None:
    """One image of a group is tested. With fewer groups all labels were used up, and never
    tested."""
    outcomes = known()
    held_out = replace(outcomes, groups=tuple(f"g{n}" for n in range(len(outcomes.error_N))))
    champion = packed(tmp_path / "package", ("cold", "warm"), held_out, group="module")
    night = Night(champion, RunConfig(name="labels", dir=str(tmp_path)), tmp_path / "table")
    texts = night.said()
    came = night.came(texts, module=[f"m{n // 8}" for n in range(40)])
    assert came is not None and came.rows == () and came.says.labelled == 40
    assert came.says.found == () and any("no test of 5" in note for note in came.says.notes)
    came = night.came(texts, module=[f"m{n}" for n in range(40)])
    assert came is not None and len(came.rows) == 40 and came.says.found
