"""`ingest.from.kind: feedback`: the request log becomes labelled rows, once each."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta, timezone
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from raypipe.config import validate
from raypipe.errors import DataError
from raypipe.tables import scan
from raypipe.tables.commits import append_once
from raypipe.tables.ingest import IngestConfig, IngestResult, ingest, understand
from raypipe.tables.provenance import commit_properties
from raypipe.tables.request_log import FEEDBACK, RequestLog, RequestTables
from raypipe.tables.table import ImageTable, TableConfig
from tests.conftest import encode, striped

START = datetime(2026, 11, 1, tzinfo=timezone.utc)
IMAGES = [encode(striped(seed, "a")) for seed in range(6)]


class Log:
    """A request log, filled as replicas fill it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = RequestLog(RequestTables.below(str(root)))

    def answer(self, request: str, image: bytes, says: str = "what the model says") -> None:
        name = sha256(image).hexdigest()
        answer = {"request_id": request, "time": START, "image_id": name, "label": says}
        self.log.add({name: {"image": image, "time": START}}, [answer])

    def label(self, request: str, label: str, minute: int = 0, task: str = "single_label") -> None:
        time = START + timedelta(minutes=minute)
        row = {"request_id": request, "label": label, "task": task, "time": time}
        self.log.add_feedback([row])


@pytest.fixture
def log(tmp_path: Path) -> Log:
    made = Log(tmp_path / "requests")
    for number, image in enumerate(IMAGES):
        made.answer(f"r{number}", image)
    return made


def taken(log: Log, table: Path, **source: Any) -> IngestResult:
    cfg = {
        "from": {"kind": "feedback", "images": str(log.root), **source},
        "name": "feedback",
        "splits": {"train": 1.0},
    }
    return ingest(TableConfig(uri=str(table)), validate(IngestConfig, cfg))


def labels(table: Path) -> dict[str, str | None]:
    """Label by image_id; every id once."""
    known = ImageTable(str(table))
    rows = scan.rows(known, known.pin(), ["image_id", "label"]).to_pylist()
    assert len({row["image_id"] for row in rows}) == len(rows)
    return {row["image_id"]: row["label"] for row in rows}


def name(number: int) -> str:
    return sha256(IMAGES[number]).hexdigest()


def test_images_with_a_label_become_rows_once(log: Log, tmp_path: Path) -> None:
    for number in range(4):
        log.label(f"r{number}", "good")
    log.label("r0", "good", 1)  # sent twice
    log.answer("again", IMAGES[1])  # the same image in another request
    log.label("again", "good", 1)
    done = taken(log, tmp_path / "t")
    assert (done.accepted, done.duplicates, done.quarantined) == (4, 0, 0)
    assert labels(tmp_path / "t") == {name(number): "good" for number in range(4)}

    again = taken(log, tmp_path / "t")
    assert (again.accepted, again.present, again.relabelled) == (0, 4, 0)
    assert again.version.version == done.version.version

    # What comes later is added, and nothing else.
    log.label("r5", "bad", 2)
    more = taken(log, tmp_path / "t")
    assert (more.accepted, more.present) == (1, 4)
    assert Counter(labels(tmp_path / "t").values()) == {"good": 4, "bad": 1}


def test_the_last_label_counts_and_a_later_one_changes_the_row(log: Log, tmp_path: Path) -> None:
    log.label("r0", "bad", 5)
    log.label("r0", "good", 2)  # written later, said earlier
    log.answer("again", IMAGES[0])
    log.label("again", "ugly", 4)
    log.label("r1", "good")
    said = understand(
        validate(IngestConfig, {"from": {"kind": "feedback", "images": str(log.root)}})
    )
    assert said[2]["understood as"] == (
        "4 labels that came back, for 2 images; 2 were replaced by a later one"
    )
    taken(log, tmp_path / "t")
    assert labels(tmp_path / "t") == {name(0): "bad", name(1): "good"}
    log.label("again", "good", 9)
    done = taken(log, tmp_path / "t")
    assert (done.accepted, done.relabelled) == (0, 1)
    assert labels(tmp_path / "t")[name(0)] == "good"


def test_labels_of_unknown_requests_are_counted(log: Log, tmp_path: Path) -> None:
    log.label("r0", "good")
    log.label("nobody", "good")
    cfg = validate(IngestConfig, {"from": {"kind": "feedback", "images": str(log.root)}})
    assert "1 are for requests that were not kept" in understand(cfg)[2]["understood as"]
    assert taken(log, tmp_path / "t").accepted == 1


def test_without_labels_it_is_all_that_was_sent(log: Log, tmp_path: Path) -> None:
    log.label("r0", "good")
    assert taken(log, tmp_path / "t", labelled=False).accepted == len(IMAGES)
    assert set(labels(tmp_path / "t").values()) == {None}


def test_labels_of_another_task_are_left_out_and_counted(log: Log, tmp_path: Path) -> None:
    log.label("r0", "0.5", task="regression")
    log.label("r1", "0.7")  # a class of this name
    log.label("r1", "0.9", 1, task="regression")
    done = taken(log, tmp_path / "t", task="regression")
    assert (done.accepted, done.quarantined) == (2, 0)
    assert labels(tmp_path / "t") == {name(0): "0.5", name(1): "0.9"}
    assert taken(log, tmp_path / "classes").accepted == 1
    assert labels(tmp_path / "classes") == {name(1): "0.7"}
    with pytest.raises(DataError, match="log of a model of another task") as refused:
        taken(log, tmp_path / "u", task="multi_label")
    assert "regression, single_label" in str(refused.value)
    assert not (tmp_path / "u").exists()


def test_a_log_of_before_labels_had_a_task_is_read_and_written(log: Log, tmp_path: Path) -> None:
    """Its labels are read as those of the task that is asked for."""
    old = {"request_id": ["r0", "r1"], "label": ["0.5", "good"], "time": [START, START]}
    schema = pa.schema([field for field in FEEDBACK if field.name != "task"])
    append_once(log.log.tables.feedback, pa.table(old, schema), None, commit_properties("feedback"))
    done = taken(log, tmp_path / "t", task="regression")
    assert (done.accepted, done.quarantined) == (1, 1)
    log.label("r2", "good")
    assert taken(log, tmp_path / "classes").accepted == 3


def test_a_label_replaces_one_of_another_source(log: Log, tmp_path: Path) -> None:
    """An image is its bytes: what users correct may be an image of the training table."""
    (tmp_path / "photos" / "bad").mkdir(parents=True)
    (tmp_path / "photos" / "bad" / "1.png").write_bytes(IMAGES[0])
    first = {"from": {"images": str(tmp_path / "photos")}, "splits": {"train": 1.0}}
    ingest(TableConfig(uri=str(tmp_path / "t")), validate(IngestConfig, first))
    log.label("r0", "good")
    done = taken(log, tmp_path / "t")
    assert (done.accepted, done.relabelled) == (0, 1)
    assert labels(tmp_path / "t") == {name(0): "good"}


def test_no_log_and_no_label_are_one_message(log: Log, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"There is nothing to ingest.*0 labels that came back"):
        taken(log, tmp_path / "t")
    for place in (str(tmp_path / "nowhere"), str(log.root / "images")):
        with pytest.raises(DataError, match="There is no request log here"):
            taken(log, tmp_path / "t", images=place)
    log.label("nobody", "good")
    with pytest.raises(DataError, match="1 are for requests that were not kept"):
        taken(log, tmp_path / "t")
    assert not (tmp_path / "t").exists()
