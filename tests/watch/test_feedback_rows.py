"""Labels that come after their images were checked: each counts once, whatever happens between.

A champion, real tables of images, and labels that this test makes right or wrong on purpose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from deltalake import DeltaTable, write_deltalake

from raypipe.config import RunConfig, to_json
from raypipe.images.decode import decode_batch
from raypipe.models.outcomes import Outcomes
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.registry import packing, promote, runs, versions
from raypipe.registry.package import OUTCOMES, Package, Reference
from raypipe.registry.store import Store, open_store
from raypipe.registry.tracking import RegistryConfig
from raypipe.serve.batch import PredictConfig
from raypipe.tables.table import ImageTable, TableConfig
from raypipe.train import learned
from raypipe.watch import feedback_rows
from raypipe.watch.check import CheckResult, check_window
from raypipe.watch.detect import DriftConfig
from raypipe.watch.settings import WatchConfig, WatchHorizon
from tests.conftest import encode, striped

pytestmark = pytest.mark.usefixtures("ray_session")
CFG = ModelConfig(name="small_cnn", pretrained=False, mode="finetune")
CLASSES = ("cold", "warm")
KNOWN_RIGHT = 0.9


def image_of(number: int) -> bytes:
    return encode(striped(number, ("warm", "cold")[number % 2]))


@dataclass(frozen=True)
class Champion:
    store: Store
    run: RunConfig
    package: Package

    def label(self, number: int, right: bool) -> str:
        said = self.package.predict([image_of(number)]).labels[0]
        return said if right else CLASSES[said == CLASSES[0]]


@dataclass
class Nights:
    """A table of images that come, and labels that come later."""

    champion: Champion
    table: Path
    name: str

    def come(self, first: int, last: int, ids: list[str] | None = None, **more: Any) -> None:
        numbers = range(first, last)
        columns = {
            "image_id": ids or [f"i{n}" for n in numbers],
            "image": pa.array([image_of(n) for n in numbers], pa.binary()),
            "label": pa.array(more.pop("label", [None] * len(numbers)), pa.string()),
        }
        write_deltalake(str(self.table), pa.table(columns | more), mode="append")

    def labels_come(self, first: int, last: int, right: Callable[[int], bool]) -> None:
        """An UPDATE by key, as whoever labels does it."""
        numbers = list(range(first, last))
        texts = [self.champion.label(n, right(n)) for n in numbers]
        self.set_labels([f"i{n}" for n in numbers], texts)

    def set_labels(self, ids: list[str], texts: list[str | None]) -> None:
        source = pa.table({"image_id": ids, "label": pa.array(texts, pa.string())})
        merge = DeltaTable(str(self.table)).merge(
            source, "t.image_id = s.image_id", source_alias="s", target_alias="t"
        )
        merge.when_matched_update({"label": "s.label"}).execute()

    def check(self, **settings: Any) -> CheckResult:
        watch = WatchConfig(name=self.name, **settings)
        batch = TableConfig(uri=str(self.table))
        done = check_window(
            *(self.champion.store, self.champion.run, batch, watch),
            *(PredictConfig(), DriftConfig(detectors=("mmd",)), lambda text: None),
        )
        assert isinstance(done, CheckResult), done
        return done

    def kept(self) -> list[dict[str, Any]]:
        place = Path(WatchConfig().place(self.champion.run, "feedback"))
        if not place.exists():
            return []
        rows = DeltaTable(str(place)).to_pyarrow_table().to_pylist()
        return [row for row in rows if row["name"] == self.name]


@pytest.fixture(scope="module")
def champion(tmp_path_factory: pytest.TempPathFactory) -> Champion:
    folder = tmp_path_factory.mktemp("champion")
    torch.manual_seed(4)
    model = ImageModel(CFG, 2).eval()
    seen = [image_of(n) for n in range(200)]
    with torch.no_grad():
        features_BD = model.embed(torch.from_numpy(decode_batch(seen, CFG.pixels)))
        model.head.standardise_by(features_BD.mean(0), features_BD.std(0))
        torch.nn.init.normal_(model.head.linear.weight, std=0.3)

    def built(name: str, reference: Reference, info: dict[str, Any], **extra: bytes) -> Package:
        return Package(packing.build(folder / name, model, CFG, CLASSES, reference, info, extra))

    nothing = Reference(np.zeros((4, 64)), np.full((4, 2), 0.5), tuple("wxyz"))
    said = built("draft", nothing, {}).predict(seen)
    names = tuple(f"r{i}" for i in range(200))
    reference = Reference(said.features_ND, said.scores_NC, names)
    error_N = (np.arange(200) % 10 == 0).astype(float)
    outcomes = Outcomes(error_N, said.scores_NC.max(1), split="test")
    known = {OUTCOMES: outcomes.to_bytes()}
    # It has learned from the images 900 to 939, whatever they are called.
    hashes = pa.chunked_array([[_sha256(image_of(n)) for n in range(900, 940)]])
    rows_N2 = learned.identities("another table", [f"x{n}" for n in range(40)], hashes)
    known |= learned.files(np.unique(rows_N2, axis=0), learned.NONE_N2)
    info = {"config": {"table": {"uri": "gone"}}, "table": {"uri": "gone", "version": 0}}
    made = built("package", reference, info, **known)
    run = RunConfig(name="feedback", dir=str(folder / "run"))
    store = open_store(run, RegistryConfig())
    with runs.run(store, "feedback", "train", {}, None) as run_id:
        pass
    version = versions.register(store, run_id, Path(str(made.folder)), "feedback", {})
    promote.promote(store, version, expected=None)
    return Champion(store, run, made)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def nights(champion: Champion, tmp_path: Path) -> Nights:
    return Nights(champion, tmp_path / "incoming", tmp_path.name)


def mostly_right(n: int) -> bool:
    return n % 10 != 0


def test_labels_are_compared_when_they_come_and_once(nights: Nights) -> None:
    nights.come(200, 260)
    first = nights.check().report
    assert first.feedback.measured is None and not nights.kept()
    assert {e.detector for e in first.evidence} == {"mmd"}

    nights.labels_come(200, 260, mostly_right)
    nights.come(260, 300)
    done = nights.check()
    says = done.report.feedback
    assert (says.labelled, says.known) == (60, pytest.approx(KNOWN_RIGHT))
    assert says.measured == pytest.approx(0.9)
    assert {e.on for e in done.report.evidence if e.detector == "labels"} >= {"calibration"}
    assert not any(e.is_drift for e in done.report.evidence if e.detector == "labels")
    assert "measured accuracy 90 %" in Path(done.page).read_text()

    # The same labels say nothing more; new ones are wrong, and that is drift.
    nights.labels_come(260, 300, lambda n: n % 2 == 0)
    nights.come(300, 330)
    worse = nights.check().report
    assert (worse.feedback.labelled, worse.feedback.measured) == (40, 0.5)
    assert worse.is_drift
    assert any(e.is_drift for e in worse.evidence if e.detector == "labels")
    kept = nights.kept()
    assert len({row["image_id"] for row in kept}) == len(kept) == 100
    # The check again is the same check.
    assert to_json(nights.check().report) == to_json(worse) and len(nights.kept()) == 100


def test_few_labels_wait_for_more(nights: Nights) -> None:
    nights.come(200, 260)
    nights.check()
    for night, count in ((0, 0), (1, 20), (2, 0)):
        nights.labels_come(200 + 10 * night, 210 + 10 * night, mostly_right)
        nights.come(300 + 30 * night, 330 + 30 * night)
        assert nights.check().report.feedback.labelled == count


def test_a_kill_between_evidence_and_its_labels_counts_none_twice(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights.come(200, 260)
    nights.check()
    nights.labels_come(200, 260, mostly_right)
    nights.come(260, 300)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(feedback_rows, "keep", killed)
        with pytest.raises(KeyboardInterrupt):
            nights.check()
    assert not nights.kept()
    again = nights.check().report
    assert again.feedback.labelled == 60 and len(nights.kept()) == 60
    nights.come(300, 330)
    assert nights.check().report.feedback.labelled == 0


def test_an_id_that_was_given_to_another_image_has_no_label_of_it(nights: Nights) -> None:
    nights.come(200, 260)
    nights.check()
    DeltaTable(str(nights.table)).delete()
    ids = [f"i{n}" for n in range(200, 260)]
    wrong = [nights.champion.label(n, False) for n in range(400, 460)]
    nights.come(400, 460, ids, label=wrong)
    says = nights.check().report.feedback
    # These are of the images that came now, each once.
    assert (says.labelled, says.measured) == (60, 0)


def test_labels_that_are_none_and_classes_that_nobody_knows(nights: Nights) -> None:
    nights.come(200, 290)
    nights.check()
    nights.labels_come(200, 230, mostly_right)
    blank, odd = [f"i{n}" for n in range(230, 260)], [f"i{n}" for n in range(260, 270)]
    nights.set_labels(blank, [" "] * 30)
    nights.set_labels(odd, ["<b>lukewarm</b>"] * 10)
    nights.come(300, 330)
    done = nights.check()
    assert done.report.feedback.labelled == 40
    assert done.report.feedback.measured == pytest.approx(27 / 40)
    assert any("does not know '<b>lukewarm</b>'" in note for note in done.report.notes)
    assert "<b>lukewarm" not in Path(done.page).read_text()


def test_two_rows_of_one_image_with_two_labels_have_none(nights: Nights) -> None:
    nights.come(200, 260)
    nights.check()
    nights.labels_come(200, 260, mostly_right)
    nights.come(200, 230, label=["cold", "warm"] * 15)
    nights.come(300, 330)
    found = nights.check().report
    several = [note for note in found.notes if "two different ones" in note]
    assert several and found.feedback.labelled == 60 - int(several[0].split()[1])


def test_images_that_were_asked_for_or_learned_from_are_not_compared(nights: Nights) -> None:
    nights.come(200, 260)
    nights.come(900, 940)
    done = nights.check()
    asked = [(f"i{n}", _sha256(image_of(n))) for n in range(200, 230)]
    of = (nights.champion.run, WatchConfig(), done.key, nights.name, asked)
    feedback_rows.keep_asked(*of, of=100)
    nights.labels_come(200, 230, lambda n: False)
    nights.labels_come(230, 260, mostly_right)
    nights.labels_come(900, 940, lambda n: True)
    nights.come(300, 330)
    found = nights.check().report
    assert (found.feedback.labelled, found.feedback.measured) == (30, pytest.approx(0.9))
    assert any("30 of images that raypipe asked for" in note for note in found.notes)
    assert any("40 of images that the champion has learned from" in n for n in found.notes)
    left_out = [row["left_out"] for row in nights.kept()]
    assert sorted(map(str, left_out)) == ["None"] * 30 + ["asked"] * 30 + ["learned"] * 40


def test_a_new_photograph_under_a_known_id_is_not_learned(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its label was never compared, and the check said that the champion had learned from it."""
    nights.come(1000, 1060)
    version = ImageTable.open_pinned(TableConfig(uri=str(nights.table)))[1]
    others = pa.chunked_array([[_sha256(image_of(n)) for n in range(1100, 1160)]])
    ids = [f"i{n}" for n in range(1000, 1060)]
    known_N2 = learned.identities(version.table_id, ids, others)
    monkeypatch.setattr(learned, "by", lambda package: known_N2)
    assert not any("has learned from" in note for note in nights.check().report.notes)
    nights.labels_come(1000, 1060, mostly_right)
    nights.come(1060, 1100)
    assert nights.check().report.feedback.labelled == 60
    assert {row["left_out"] for row in nights.kept()} == {None}


def test_off_no_column_and_an_older_package(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights.come(200, 260)
    nights.labels_come(200, 260, mostly_right)
    assert nights.check(feedback=0).report.feedback.measured is None
    nights.name += " old"
    monkeypatch.setattr(Package, "outcomes", lambda self: None)
    assert nights.check().report.feedback.measured is None
    other = replace(nights, table=nights.table.with_name("bare"), name=nights.name + " bare")
    bare = {"image_id": [f"i{n}" for n in range(40)]}
    images = pa.array([image_of(n) for n in range(400, 440)], pa.binary())
    write_deltalake(str(other.table), pa.table(bare | {"image": images}))
    monkeypatch.undo()
    assert other.check().report.feedback.measured is None


def test_an_earlier_window_whose_predictions_are_gone_is_passed_over(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights.come(200, 260)
    nights.check()
    nights.labels_come(200, 260, mostly_right)
    labels = [nights.champion.label(n, mostly_right(n)) for n in range(260, 300)]
    nights.come(260, 300, label=labels)
    gone = SimpleNamespace(read_rows=lambda *_: pa.table({}))
    monkeypatch.setattr(feedback_rows, "batch", gone)
    assert nights.check().report.feedback.labelled == 40


def test_a_champion_that_comes_back_goes_on_with_its_own_windows(nights: Nights) -> None:
    """Labels of images that only another one has predicted say nothing of it, and none counts
    twice."""
    store = nights.champion.store
    first = promote.require_champion(store)
    nights.come(600, 640)
    nights.check()
    with runs.run(store, "feedback", "train", {}, None) as run_id:
        pass
    folder = Path(str(nights.champion.package.folder))
    second = versions.register(store, run_id, folder, f"second {nights.name}", {})
    promote.promote(store, second, expected=first.version)
    try:
        nights.come(640, 680)
        nights.labels_come(600, 680, mostly_right)
        theirs = nights.check()
        assert theirs.model == str(second) and theirs.report.feedback.labelled == 40
    finally:
        promote.promote(store, first, expected=second.version, unbar=True)
    nights.come(680, 710)
    mine = nights.check()
    assert mine.model == str(first) and mine.report.feedback.labelled == 40
    by_model = {(row["model"], row["image_id"]) for row in nights.kept()}
    assert by_model == {(str(second), f"i{n}") for n in range(640, 680)} | {
        (str(first), f"i{n}") for n in range(600, 640)
    }
    nights.come(710, 740)
    assert nights.check().report.feedback.labelled == 0


def test_labels_of_a_table_that_was_restored_or_vacuumed(nights: Nights) -> None:
    nights.come(750, 790)
    nights.check()
    version = DeltaTable(str(nights.table)).version()
    nights.labels_come(750, 790, mostly_right)
    DeltaTable(str(nights.table)).restore(version)
    nights.come(790, 830)
    assert nights.check().report.feedback.labelled == 0, "nobody has given any"
    nights.labels_come(750, 830, mostly_right)
    DeltaTable(str(nights.table)).vacuum(0, enforce_retention_duration=False, dry_run=False)
    nights.come(830, 860)
    assert nights.check().report.feedback.labelled == 80


def test_the_same_window_with_other_settings_has_the_same_labels(nights: Nights) -> None:
    """An alarm by labels was gone once any setting of the check was changed."""
    nights.come(200, 260)
    nights.check()
    nights.labels_come(200, 260, lambda n: n % 2 == 0)
    nights.come(260, 300)
    first = nights.check().report.feedback.labelled
    kept = nights.kept()
    again = nights.check(horizon=WatchHorizon(checks=1, false_alarm=0.01)).report
    assert again.feedback.labelled == first > 20 and nights.kept() == kept
    assert any(one.is_drift for one in again.evidence if one.detector == "labels")


def test_images_that_the_champion_has_learned_from_are_told(nights: Nights) -> None:
    nights.come(900, 940)
    assert any("has learned from 40 of these 40" in note for note in nights.check().report.notes)
