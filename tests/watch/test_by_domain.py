"""A drift check of a champion that knows several domains, from its report's point of view."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from raypipe.config import validate
from raypipe.errors import ConfigError, DataError
from raypipe.registry.package import Reference
from raypipe.tables import scan
from raypipe.tables.table import ImageTable, TableConfig, TableVersion
from raypipe.train import belonging
from raypipe.watch import by_image, evidence_row, examination
from raypipe.watch.detect import DriftConfig, DriftReport, detect
from raypipe.watch.predicted import Batch
from raypipe.watch.settings import WatchConfig
from raypipe.watch.sides import Seen

WIDTH = 30
MIX = np.random.default_rng(0).normal(size=(5, WIDTH))
NAMES = ["mono"] * 120 + ["poly"] * 120


def draw(rng: np.random.Generator, rows: int, domain: int) -> np.ndarray:
    factors = rng.normal(size=(rows, 5))
    factors[:, domain] += 3
    drawn: np.ndarray = np.maximum(factors @ MIX + rng.normal(size=(rows, WIDTH)), 0)
    return drawn


def night(
    domain: int,
    cfg: DriftConfig | None = None,
    names: list[str] | None = NAMES,
    groups: tuple[list[str], list[str]] | None = None,
) -> DriftReport:
    rng = np.random.default_rng(4)
    known = np.concatenate([draw(rng, 120, 0), draw(rng, 120, 1)])
    batch = draw(rng, 80, domain)
    scores = rng.dirichlet(np.ones(3), 320)
    of = groups or (None, None)
    reference, seen = Seen(domains=names, groups=of[0]), Seen(groups=of[1])
    cfg = cfg or DriftConfig()
    return detect(known, batch, scores[:240], scores[240:], cfg, 0, reference, seen)


def test_a_night_of_one_domain_is_no_drift_and_the_report_names_it() -> None:
    for domain, name in enumerate(("mono", "poly")):
        found = night(domain)
        assert not found.is_drift and found.engine == "exact"
        assert [(e.detector, e.on) for e in found.evidence] == [
            ("mixture", "embedding"),
            ("mixture", "scores"),
        ]
        assert name in found.evidence[0].detail and found.parts[0].domain == name
        assert found.parts[0].share > 0.9
        assert any(f"of the batch resemble {name}" in note for note in found.notes)
    third = night(2)
    assert third.is_drift and third.evidence[0].is_drift


def test_without_domains_the_usual_tests_run_and_call_it_drift() -> None:
    for names in (None, ["one"] * 240):
        found = night(0, names=names)
        assert {e.detector for e in found.evidence} == {"mmd", "ks"}
        assert found.is_drift, "the control: this is why domains are kept"
        assert found.parts == ()


def test_detectors_that_somebody_names_are_the_ones_that_run() -> None:
    found = night(0, DriftConfig(detectors=("mixture", "ks")))
    assert [e.detector for e in found.evidence] == ["ks", "ks", "mixture", "mixture"]
    assert [e.is_drift for e in found.evidence] == [True, False, False, False]
    alone = night(0, DriftConfig(detectors=("mixture",), engine="exact"), names=None)
    assert alone.parts[0].domain == "all" and alone.is_drift
    with pytest.raises(ConfigError, match="permutations must be at least 3000"):
        validate(DriftConfig, {"detectors": ["mixture"], "alpha": 0.001})


def test_whole_groups_are_compared_where_both_sides_have_them() -> None:
    groups = ([f"r{i // 10}" for i in range(240)], [f"w{i // 10}" for i in range(80)])
    found = night(0, groups=groups)
    assert not found.is_drift and any("whole groups" in note for note in found.notes)
    # 501 draws are no reason: more are drawn when needed.
    assert not any("groups are so few" in note for note in found.notes)
    few = night(2, groups=(["a"] * 120 + ["b"] * 120, ["w"] * 80))
    assert not few.is_drift and any("groups are so few" in note for note in few.notes)
    alone = night(0, names=None, groups=groups)
    assert {e.detector for e in alone.evidence} == {"mixture"}, "mmd and ks know no groups"
    one_side = night(0, groups=(groups[0], None))  # type: ignore[arg-type]
    assert not any("groups" in note for note in one_side.notes)
    with pytest.raises(DataError, match="batch_groups"):
        night(0, groups=(groups[0], ["w"] * 79))


def test_a_camera_that_hangs_is_found() -> None:
    rng = np.random.default_rng(5)
    known, batch = draw(rng, 120, 0), draw(rng, 80, 0)
    batch[30:] = batch[3]
    scores = np.full((200, 2), 0.5)
    cfg = DriftConfig(detectors=("mixture",))
    found = detect(known, batch, scores[:120], scores[120:], cfg, 0)
    assert [e.on for e in found.evidence if e.is_drift] == ["copies"]
    assert "one image comes 51 times" in found.evidence[-1].detail


def test_notes_show_any_name_on_one_line() -> None:
    """A domain may be named by any text of a column."""
    long = "a text\n" * 2000
    notes = night(1, names=["a"] * 120 + [long] * 120).notes
    assert notes and all(len(note) < 400 and "\n" not in note for note in notes)


def test_the_parts_come_back_from_the_table_of_evidence() -> None:
    found = night(0)
    row = evidence_row.as_row("key", "night", "cells/3", _version(), found)
    assert (
        evidence_row.of_row(pa.Table.from_pylist([row], evidence_row.ROW).to_pylist()[0]) == found
    )
    assert replace(found, parts=()) != found


def _version() -> TableVersion:
    return TableVersion("/night", 4)


def test_the_groups_of_a_batch_are_read_from_its_table(tmp_path: Path) -> None:
    uri = str(tmp_path / "night")
    rows = {"image_id": ["a", "b", "c"], "image": [b"1", b"2", b"3"], "module": [7, None, 8]}
    rows |= {"part": [1.0, float("nan"), float("nan")]}
    write_deltalake(uri, pa.table(rows))
    source = TableConfig(uri=uri)
    version = ImageTable.open(source).pin()
    empty = np.zeros((4, 1))
    digests = [sha256(b"%d" % n).hexdigest() for n in (3, 1, 2)]
    mine = Batch(version, ["c", "a", "b", None], [*digests, ""], empty, empty)
    reference = Reference(empty, empty, tuple("wxyz"), groups=("1", "1", "2", "2"))

    def groups(registry: dict[str, str], kept: Reference = reference) -> list[str] | None:
        package = SimpleNamespace(info={"config": {"registry": registry}})
        return by_image.groups(package, kept, source, mine)  # type: ignore[arg-type]

    assert groups({"group": "module"}) == ["8", "7", "", ""]
    # NaN was a name: all images without a group were one large group.
    assert groups({"group": "part"}) == ["", "1.0", "", ""]
    assert [belonging.name_of(one) for one in (None, float("nan"), 1.0)] == ["", "", "1.0"]
    # Images of one id, and images without any, are told apart by their bytes.
    both = ["a", "a", None, None, "b"]
    again = {"image_id": both, "image": [b"1", b"2", b"3", b"4", b"5"], "module": [1, 2, 3, 4, 5]}
    write_deltalake(str(tmp_path / "twice"), pa.table(again))
    other = TableConfig(uri=str(tmp_path / "twice"))
    hashes = [sha256(b"%d" % n).hexdigest() for n in (2, 1, 4, 3, 5)]
    names = ["a", "a", None, None, "b"]
    batch = Batch(ImageTable.open(other).pin(), names, hashes, empty, empty)
    package = SimpleNamespace(info={"config": {"registry": {"group": "module"}}})
    assert by_image.groups(package, reference, other, batch) == ["2", "1", "4", "3", "5"]  # type: ignore[arg-type]
    assert by_image.arrived("module", other, batch) == [2, 1, 4, 3, 5]
    assert groups({"group": "gone"}) is None and groups({}) is None
    assert groups({"group": "module"}, replace(reference, groups=None)) is None


def test_a_column_that_was_named_after_the_champion_is_told_to_have_no_effect() -> None:
    reference: Any = SimpleNamespace(groups=None)
    mine: Any = SimpleNamespace(broken=0, groups=None, ids=[], sha256=[], version=_version())
    source = TableConfig(uri="/night")

    def notes(registry: dict[str, str], **watch: str) -> list[str]:
        package: Any = SimpleNamespace(info={"config": {"registry": registry}}, files={})
        settings = validate(WatchConfig, watch)
        return examination._not_compared(package, reference, source, mine, settings)

    (said,) = notes({}, group="module")
    assert "watch.group=module has no effect" in said
    assert not notes({"group": "module"}, group="module") and not notes({})
    assert "watch.domain=camera" in notes({"group": "module"}, domain="camera")[0]


def test_only_rows_of_the_images_that_are_asked_for_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a part there are many photographs: to name 100 files, a check read every image of the
    table."""
    data = [b"1", b"2", b"3", b"4", b"5"]
    names = ["a", "a", "b", "b", None]
    files = [f"{n}.png" for n in range(5)]
    write_deltalake(
        str(tmp_path / "t"), pa.table({"image_id": names, "image": data, "path": files})
    )
    source, empty = TableConfig(uri=str(tmp_path / "t")), np.zeros((5, 1))
    hashes = [sha256(one).hexdigest() for one in data]
    batch = Batch(ImageTable.open(source).pin(), names, hashes, empty, empty)
    read: list[str | None] = []

    def each(*given: Any) -> Iterator[pa.Table]:
        for part in real(*given):
            read.extend(part["image_id"].to_pylist())
            yield part

    real = scan.each
    monkeypatch.setattr(scan, "each", each)
    assert by_image.paths(source, batch, [3]) == {3: "3.png"}
    assert read == ["b", "b"]
    # Nobody can ask for a row without an id.
    assert by_image.paths(source, batch, [4, 0]) == {4: "4.png", 0: "0.png"}
    assert read[2:] == names
