"""What one run asks of the store, counted by the store: the driver, Ray's tasks and every trial
together.

A run plans once: it opens the log for the version, and reads each file's footer. Each request more
is a wait for the store, and a log may have thousands of commits.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from deltalake import write_deltalake

from raypipe.tables.schema import writer_properties
from raypipe.tables.table import ImageTable

from ..conftest import Cli
from .conftest import Store, logged
from .test_stores import said

pytestmark = [pytest.mark.cloud, pytest.mark.usefixtures("ray_session")]
LOG_READS = 2  # the newest version, to look at, and an older one that is pinned
FILES = 4
RATES = ", ".join(f"{1e-4 * 1.3**i:.2e}" for i in range(16))
JOB = {
    "model": {"name": "small_cnn", "mode": "finetune", "pretrained": False},
    "train": {"epochs": 2, "batch_size": 16, "lr": 0.01, "precision": "fp32"},
    "search": {"samples": 1, "scheduler": "none", "space": {"train.lr": f"grid({RATES})"}},
}


class Requests:
    """What the store was asked for since the last `clear`, by the relay before it."""

    def __init__(self, log: Path) -> None:
        self._log, self._from = log, 0

    def clear(self) -> None:
        self._from = self._log.stat().st_size

    def of(self, uri: str) -> list[dict[str, Any]]:
        """The requests for a table's objects and lists."""
        _, _, key = uri.removeprefix("s3://").partition("/")
        with self._log.open(encoding="utf-8") as log:
            log.seek(self._from)
            asked = [json.loads(line) for line in log]
        return [one for one in asked if key in one["path"]]

    def log_reads(self, uri: str) -> int:
        """How often the table was opened: deltalake then asks for the log's last checkpoint."""
        return sum(one["path"].endswith("_delta_log/_last_checkpoint") for one in self.of(uri))

    def footer_reads(self, uri: str) -> Counter[str]:
        """By data file: how often its end was read. Parquet keeps the footer there, no column."""
        return Counter(
            one["path"]
            for one in self.of(uri)
            if one["method"] == "GET"
            and one["path"].endswith(".parquet")
            and one["last"] == one["size"] - 1
        )


@pytest.fixture(scope="module")
def requests(
    s3: Store, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Store, Requests]]:
    """The store behind a relay that writes down what it is asked for."""
    folder = tmp_path_factory.mktemp("requests")
    with logged(s3.options["AWS_ENDPOINT_URL"], folder) as (address, log):
        options = s3.options | {"AWS_ENDPOINT_URL": address}
        yield Store(s3.root, options, s3.endpoint_option, s3.secret), Requests(log)


def cells(uri: str, store: Store, photos: Path, **how: Any) -> str:
    """60 photos in FILES files, each of one commit; version 1 has the tag `golden`."""
    lines = (photos / "labels.csv").read_text().splitlines()[1:]
    for part in range(FILES):
        rows: dict[str, list[Any]] = {"image_id": [], "image": [], "label": [], "split": []}
        for i, line in enumerate(lines[15 * part : 15 * (part + 1)]):
            file, label = line.split(",")
            rows["image_id"].append(file)
            rows["image"].append((photos / file).read_bytes())
            rows["label"].append(label)
            rows["split"].append(("train", "train", "train", "val", "test")[i % 5])
        write_deltalake(uri, pa.table(rows), mode="append", storage_options=store.options, **how)
    ImageTable(uri, storage_options=store.options).tag("golden", 1)
    return uri


@pytest.fixture(scope="module")
def table(requests: tuple[Store, Requests], photos: Path) -> str:
    """As raypipe writes it: images are read where they lie."""
    store, _ = requests
    return cells(store.uri("ours"), store, photos, writer_properties=writer_properties())


@pytest.fixture(scope="module")
def packed(requests: tuple[Store, Requests], photos: Path) -> str:
    """As others write it: compressed, so that pyarrow must read the images by the footer."""
    store, _ = requests
    return cells(store.uri("theirs"), store, photos)


def written(folder: Path, store: Store, uri: str, **changes: Any) -> Path:
    job = JOB | {
        "run": {"name": "photos", "dir": str(folder / "run")},
        "table": {"uri": uri, "storage_options": store.options},
        **changes,
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("table", ["feed.carrier=threads"]),
        ("table", ["feed.carrier=cache"]),
        ("table", ["feed.carrier=threads", "table.version=golden"]),
        ("packed", ["feed.carrier=threads"]),
        ("packed", ["feed.carrier=cache"]),
    ],
)
def test_a_training_opens_its_table_once_and_reads_each_footer_once(
    requests: tuple[Store, Requests],
    kind: str,
    overrides: list[str],
    tmp_path: Path,
    cli: Cli,
    request: pytest.FixtureRequest,
) -> None:
    store, seen = requests
    uri = request.getfixturevalue(kind)
    job = written(tmp_path, store, uri)
    seen.clear()
    trained = said(cli, "train", job, *overrides)
    assert trained["epochs"] == 2 and trained["test"]
    older = "table.version=golden" in overrides
    assert seen.log_reads(uri) == (LOG_READS if older else 1)
    assert list(seen.footer_reads(uri).values()) == [1] * (2 if older else FILES)


def test_a_search_of_16_trials_and_a_refit_ask_no_more(
    requests: tuple[Store, Requests], table: str, tmp_path: Path, cli: Cli
) -> None:
    store, seen = requests
    job = written(tmp_path, store, table)
    seen.clear()
    found = said(cli, "tune", job, "search.refit={}", "train.epochs=1")
    assert found["trials"] == 16 and found["refitted"] and found["test"]
    assert seen.log_reads(table) == 1
    assert list(seen.footer_reads(table).values()) == [1] * FILES
