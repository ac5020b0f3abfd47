"""Tables restored, renamed, vacuumed or overwritten between checks: no row twice, no lie."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from deltalake import DeltaTable, write_deltalake

from raypipe.models.zoo import ImageModel
from raypipe.registry import packing, promote, runs, versions
from raypipe.registry.package import Package, Reference
from raypipe.registry.store import open_store
from raypipe.registry.tracking import RegistryConfig
from raypipe.serve.batch import PredictConfig
from raypipe.tables.table import Columns, TableConfig
from raypipe.watch import check, examination
from raypipe.watch.detect import DriftConfig
from raypipe.watch.windows import Waiting
from tests.serve.conftest import CFG, CLASSES, Registered, registered
from tests.tables import handmade as by_hand
from tests.watch.test_spans import Nights
from tests.watch.test_windows import Night, night

__all__ = ["night", "registered"]  # the fixtures
pytestmark = pytest.mark.usefixtures("ray_session")


def test_rows_that_a_restore_brings_back_were_checked_before(night: Night) -> None:
    assert sum(night.check().values()) == 30  # type: ignore[union-attr]
    DeltaTable(night.case.uri).restore(0)
    night.case.add(40, 5)
    assert sum(night.check().values()) == 5  # type: ignore[union-attr]
    DeltaTable(night.case.uri).restore(2)
    assert night.check() == Counter(), "these 20 images were in window 1"
    assert any("was restored" in text for text in night.said)
    # What comes beside them is in a window, once; also after a kill.
    night.case.add(50, 5)
    night.windows().next()
    found = night.check()
    assert isinstance(found, Counter) and {i for i, _ in found} == {f"i{n}" for n in range(50, 55)}
    night.case.add(60, 4)
    found = night.check()
    assert isinstance(found, Counter) and {i for i, _ in found} == {f"i{n}" for n in range(60, 64)}


def mapped(uri: str, **renamed: str) -> None:
    """Map the table's columns by name, and give some of them new names."""
    log = sorted(Path(uri, "_delta_log").glob("*.json"))
    actions = [json.loads(line) for file in log for line in file.read_text().splitlines()]
    meta = [action["metaData"] for action in actions if "metaData" in action][-1]
    schema = json.loads(meta["schemaString"])
    for number, field in enumerate(schema["fields"], start=1):
        field["metadata"].setdefault("delta.columnMapping.id", number)
        field["metadata"].setdefault("delta.columnMapping.physicalName", field["name"])
        field["name"] = renamed.get(field["name"], field["name"])
    meta["schemaString"] = json.dumps(schema)
    meta["configuration"] = {
        "delta.columnMapping.mode": "name",
        "delta.columnMapping.maxColumnId": "9",
    }
    actions = [{"metaData": meta}]
    if not renamed:
        actions.insert(0, {"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}})
    by_hand.commit(Path(uri), *actions)


def test_a_column_that_was_renamed_begins_no_new_line(night: Night) -> None:
    night.source = TableConfig(uri=night.case.uri, where={"split": "train"})
    assert sum(night.check().values()) == 30  # type: ignore[union-attr]
    mapped(night.case.uri)
    assert night.check() == Counter()
    mapped(night.case.uri, image="picture", image_id="name", split="part")
    columns = Columns(image="picture", id="name", split="part")
    night.source = TableConfig(uri=night.case.uri, columns=columns, where={"part": "train"})
    found = night.check()
    assert isinstance(found, Waiting) and found.images == 0, "all 30 were checked"
    # A column that no window depends on may have any name.
    columns = columns.model_copy(update={"source": "elsewhere"})
    night.source = TableConfig(uri=night.case.uri, columns=columns, where={"part": "train"})
    assert isinstance(night.check(), Waiting)
    # Another column of images is another matter.
    assert [event for event, _ in night.events()] == ["opened", "checked"]


def test_a_quiet_night_after_a_vacuum_is_no_error(night: Night) -> None:
    night.check()
    DeltaTable(night.case.uri).optimize.compact()
    DeltaTable(night.case.uri).vacuum(0, dry_run=False, enforce_retention_duration=False)
    found = night.check()
    assert isinstance(found, Waiting) and (found.images, found.since) == (0, 2)
    assert "cannot be read any more" in night.said[-1]
    night.case.add(40, 5)
    assert sum(night.check().values()) == 5  # type: ignore[union-attr]


def one_night(nights: Nights) -> Any:
    cfg = DriftConfig(detectors=("mmd",))
    return check.check_window(
        *(nights.store, nights.run, nights.source, nights.watch, PredictConfig(), cfg, print)
    )


def champion(
    nights: Nights, model: ImageModel, folder: Path, groups: tuple[str, ...] | None = None
) -> None:
    """The next version of the nights' model, with its own reference; neighbours may be groups."""
    uri = nights.source.uri
    info = {
        "config": {"table": {"uri": uri}, "registry": {"group": "module"}},
        "table": {"uri": uri, "version": 0},
    }
    nothing = Reference(np.zeros((4, 64)), np.full((4, 3), 1 / 3), tuple("wxyz"))
    draft = Package(packing.build(folder / "draft", model, CFG, CLASSES, nothing, info))
    known = draft.predict(nights.images[:60])
    names = tuple(f"r{n}" for n in range(60))
    reference = Reference(known.features_ND, known.scores_NC, names, groups=groups)
    built = packing.build(folder / "package", model, CFG, CLASSES, reference, info)
    key = folder.name
    with runs.run(nights.store, key, "train", {}, None) as run_id:
        pass
    version = versions.register(nights.store, run_id, built, key, {})
    now = promote.champion(nights.store)
    promote.promote(nights.store, version, expected=now.version if now else None)


def test_a_registry_made_again_has_other_features_under_the_old_number(
    registered: Registered, tmp_path: Path
) -> None:
    nights = Nights(registered, tmp_path)
    for start in (60, 80):
        nights.add(start)
        before = one_night(nights)
    assert before.report.notes[-1].endswith("40 of 2 checks")
    new = {"uri": f"sqlite:///{tmp_path}/new.db", "moves": str(tmp_path / "moves")}
    nights.store = open_store(nights.run, RegistryConfig(model="spans", **new))
    torch.manual_seed(9)
    champion(nights, ImageModel(CFG, 3).eval(), tmp_path / "again")
    nights.add(100)
    found = one_night(nights)
    assert found.model == before.model, "it has the old name and number"
    assert [e.on for e in found.report.evidence] == ["embedding"]


def test_images_that_left_the_table_keep_their_groups_in_a_span(
    registered: Registered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights = Nights(registered, tmp_path)
    groups = tuple(f"g{n // 2}" for n in range(60))
    champion(nights, registered.package.model, tmp_path / "grouped", groups)
    seen: list[list[str]] = []
    real = examination.detect

    def detect(*args: Any) -> Any:
        seen.append(list(args[7].groups))
        return real(*args)

    monkeypatch.setattr(examination, "detect", detect)

    def staged(number: int, vacuum: bool = False) -> list[list[str]]:
        """A table that holds one night, and names its images anew each time."""
        images = nights.images[60 + 20 * number : 80 + 20 * number]
        rows = {
            "image_id": [f"i{n}" for n in range(20)],
            "image": pa.array(images, pa.binary()),
            "module": [f"night {number}, module {n // 2}" for n in range(20)],
        }
        write_deltalake(nights.source.uri, pa.table(rows), mode="overwrite")
        if vacuum:
            table = DeltaTable(nights.source.uri)
            table.vacuum(0, dry_run=False, enforce_retention_duration=False)
        seen.clear()
        one_night(nights)
        return sorted(seen, key=len)

    staged(0)
    _, of_two = staged(1)
    counts = Counter(of_two)
    assert len(counts) == 20 and set(counts.values()) == {2}, counts
    # Where nobody knows their groups any more, the look back ends.
    assert [len(one) for one in staged(2, vacuum=True)] == [20]
