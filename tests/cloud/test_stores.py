"""A table in a bucket is used as one in a folder: ingested, read, trained on and predicted, with
the same options throughout.

Every test runs against moto (S3) and Azurite (Azure). Credentials stand in `table.storage_options`
and nowhere else, not in the environment either: what reaches a Ray worker came from there.
"""

from __future__ import annotations

import json
import random
import shutil
import socket
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from raypipe.config import validate
from raypipe.errors import DataError
from raypipe.tables import fragment, rewrite, scan
from raypipe.tables import ingest as room
from raypipe.tables.ingest import IngestConfig, ingest, quarantine_uri
from raypipe.tables.objects import Objects
from raypipe.tables.table import ImageTable, TableConfig, append

from ..conftest import Cli, Draw
from ..tables import handmade as by_hand
from .conftest import Store, put, relayed

pytestmark = pytest.mark.cloud
SPLITS = {"train": 0.6, "val": 0.4}


@pytest.fixture(scope="module")
def folder(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """warm/ and cold/ with 30 images each, and one that is cut off. Read it, do not change it."""
    root = tmp_path_factory.mktemp("cloud") / "photos"
    for line in (photos / "labels.csv").read_text().splitlines()[1:]:
        file, label = line.split(",")
        (root / label).mkdir(parents=True, exist_ok=True)
        shutil.copy(photos / file, root / label / file)
    (root / "cold" / "broken.png").write_bytes((photos / "01.png").read_bytes()[:400])
    return root


def written(path: Path, store: Store, uri: str, folder: Path, **sections: Any) -> Path:
    """A configuration as a user writes it: `true` is a boolean there."""
    options = {k: v == "true" or v for k, v in store.options.items()}
    job = {
        "run": {"name": "photos", "dir": str(path.parent / "run")},
        "table": {"uri": uri, "storage_options": options},
        "ingest": {"from": {"images": str(folder)}, "splits": SPLITS},
        **sections,
    }
    path.write_text(yaml.safe_dump(job))
    return path


def said(cli: Cli, *arguments: object) -> dict[str, Any]:
    code, out, err = cli(*arguments, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def ids(uri: str, store: Store) -> list[str]:
    table = ImageTable(uri, storage_options=store.options)
    return scan.rows(table, table.pin(), ["image_id"])["image_id"].to_pylist()  # type: ignore[no-any-return]


def test_ingest_versions_and_export(
    store: Store, folder: Path, tmp_path: Path, cli: Cli, textured: Draw
) -> None:
    uri = store.uri("cells")
    job = written(tmp_path / "job.yaml", store, uri, folder)
    first = said(cli, "ingest", job)
    assert (first["seen"], first["accepted"], first["quarantined"]) == (61, 60, 1)
    assert len(ids(uri, store)) == 60
    assert len(ids(quarantine_uri(uri), store)) == 1
    again = said(cli, "ingest", job)
    assert (again["table"], again["accepted"], again["present"]) == (first["table"], 0, 60)
    assert len(ids(quarantine_uri(uri), store)) == 1

    assert said(cli, "table", "tag", job, "golden")["tags"] == {"golden": 0}
    more = tmp_path / "more"
    (more / "warm").mkdir(parents=True)
    (more / "warm" / "new.png").write_bytes(textured(7, side_px=32))
    assert said(cli, "ingest", job, f"ingest.from.images={more}")["accepted"] == 1
    history = said(cli, "table", "history", job)["versions"]
    assert [v["operation"] for v in history] == ["WRITE", "SET TBLPROPERTIES", "WRITE"]

    said(cli, "table", "export", job, tmp_path / "golden.parquet", "--tag", "golden")
    said(cli, "table", "export", job, tmp_path / "newest.parquet")
    golden, newest = (
        pq.read_table(tmp_path / "golden.parquet"),
        pq.read_table(tmp_path / "newest.parquet"),
    )
    assert (len(golden), len(newest)) == (60, 61)
    assert set(golden["image"].to_pylist()) == {p.read_bytes() for p in folder.rglob("[0-9]*.png")}


def test_two_ingests_at_once_lose_and_repeat_nothing(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both make the table, one commit a class: the second one looks again and goes on."""
    monkeypatch.setattr(room, "ROWS_PER_COMMIT", 30)
    table = TableConfig(uri=store.uri("raced"), storage_options=store.options)
    start, failed = threading.Barrier(2), []

    def one() -> None:
        start.wait()
        try:
            ingest(
                table,
                validate(
                    IngestConfig, {"from": {"images": str(folder)}, "workers": 0, "threads": 1}
                ),
            )
        except Exception as e:
            failed.append(e)

    both = [threading.Thread(target=one) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(60)
    assert not failed
    found = ids(table.uri, store)
    assert len(found) == len(set(found)) == 60
    assert len(ids(quarantine_uri(table.uri), store)) == 1


def test_rows_are_relabelled_and_dropped_there(store: Store, folder: Path, tmp_path: Path) -> None:
    """Files are written again in the store, and times come from its log."""
    uri = store.uri("changed")
    table = TableConfig(uri=uri, storage_options=store.options)
    files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("[0-9]*.png"))
    labels = tmp_path / "labels.csv"
    for label in ("a", "b"):
        labels.write_text("file,label\n" + "".join(f"{f},{label}\n" for f in files))
        cfg = {"from": {"images": str(folder), "labels": str(labels)}, "workers": 0}
        done = ingest(table, validate(IngestConfig, cfg))
    opened = ImageTable.open(table)
    assert (done.relabelled, done.version.version) == (60, 1)
    assert scan.rows(opened, done.version, ["label"])["label"].to_pylist() == ["b"] * 60
    rows = rewrite.places(opened, done.version, ["image_id"]).to_pylist()
    after = rewrite.drop(
        opened, done.version, [rewrite.Place(r["file"], r["place"]) for r in rows[:7]], "drop"
    )
    assert sorted(ids(uri, store)) == sorted(r["image_id"] for r in rows[7:])
    history = opened.history()
    assert [h["version"] for h in history] == [2, 1, 0]
    assert opened.pin(datetime.now(timezone.utc).isoformat()) == after
    opened.tag("golden", 1)
    assert opened.untag("golden") == 1


def test_files_of_one_path_in_two_buckets_are_two(s3: Store, tmp_path: Path) -> None:
    """As of a shallow clone of tables in two buckets: rows of the first file were read twice."""
    adds = []
    for bucket in ("one", "two"):
        put(f"{s3.options['AWS_ENDPOINT_URL']}/{bucket}", {})
        rows = pa.table({"image_id": [f"{bucket}-{i}" for i in range(3)]})
        logged = f"s3://{bucket}/t/p.parquet"
        adds.append(by_hand.add(tmp_path, rows, f"{bucket}.parquet", group=2, logged=logged))
        data = (tmp_path / f"{bucket}.parquet").read_bytes()
        Objects(f"s3://{bucket}/t", s3.options).write("p.parquet", data)
    fields = [by_hand.column("image_id", "string")]
    by_hand.commit(tmp_path, by_hand.protocol(reader=1, writer=2), by_hand.metadata(fields), *adds)
    uri, entry = s3.uri("clone"), "_delta_log/00000000000000000000.json"
    Objects(uri, s3.options).write(entry, (tmp_path / entry).read_bytes())

    table = ImageTable(uri, storage_options=s3.options)
    ids = [f"{bucket}-{i}" for bucket in ("one", "two") for i in range(3)]
    assert scan.rows(table, table.pin(), ["image_id"])["image_id"].to_pylist() == ids
    assert len(table.snapshot(table.pin()).paths(uri)) == 2
    after = by_hand.drop(table, table.pin(), ["two-2"], "clean")
    left = scan.rows(table, after, ["image_id"])["image_id"].to_pylist()
    assert sorted(left) == [name for name in ids if name != "two-2"]


def test_workers_read_and_write_with_the_options_alone(
    store: Store, folder: Path, tmp_path: Path, ray_session: str
) -> None:
    table = TableConfig(uri=store.uri("spread"), storage_options=store.options)
    done = ingest(table, validate(IngestConfig, {"from": {"images": str(folder)}, "workers": 2}))
    assert done.accepted == 60
    opened = ImageTable.open(table)
    read = scan.dataset(opened, done.version, ["image_id", "image"]).take_all()
    assert sorted(r["image_id"] for r in read) == sorted(ids(table.uri, store))
    assert {r["image"] for r in read} == {p.read_bytes() for p in folder.rglob("[0-9]*.png")}

    here = {"kind": "delta", "images": table.uri, "storage_options": store.options}
    copied = ingest(
        TableConfig(uri=str(tmp_path / "copy")),
        validate(IngestConfig, {"from": here, "workers": 2}),
    )
    assert copied.accepted == 60


def test_a_row_group_moves_little_more_than_itself(s3: Store, tmp_path: Path) -> None:
    rows = pa.table(
        {
            "image_id": [f"{i:04d}" for i in range(640)],
            "image": [random.randbytes(4096) for _ in range(640)],
        }
    )
    uri = append(s3.uri("groups"), rows, "test", s3.options).uri
    with relayed(s3.options["AWS_ENDPOINT_URL"], tmp_path) as (address, moved_bytes):
        options = s3.options | {"AWS_ENDPOINT_URL": address, "max_retries": "1"}
        table = ImageTable(uri, storage_options=options)
        groups, _ = scan.plan(table, table.pin())
        assert len(groups) == 5
        before = moved_bytes()
        images = fragment.binary(groups[2], "image", options)
        assert images.to_pylist() == rows["image"][256:384].to_pylist()
        assert (
            moved_bytes() - before < 128 * 4096 + 80_000
        )  # this thread opens the file too: its last 64 kB hold the footer
    with pytest.raises(
        DataError, match=r"cannot be read: the store cannot be reached.*got 's3://images/groups"
    ):
        fragment.binary(groups[3], "image", options)  # the file is open, the store is gone


@pytest.mark.slow
def test_train_and_predict_and_no_secret_is_kept(
    store: Store, folder: Path, tmp_path: Path, cli: Cli, ray_session: str
) -> None:
    uri, out = store.uri("trained"), store.uri("predictions")
    job = written(
        tmp_path / "job.yaml",
        store,
        uri,
        folder,
        model={"name": "small_cnn", "mode": "finetune", "pretrained": False},
        train={"epochs": 2, "batch_size": 16, "lr": 0.01, "precision": "fp32"},
        feed={"carrier": "threads"},
        predict={"out": out},
    )
    said(cli, "ingest", job)
    trained = said(cli, "train", job)
    assert (trained["epochs"], trained["table"]) == (2, f"{uri}@v0")
    predicted = said(cli, "predict", job)
    assert predicted["predictions"] == f"{out}@v0"
    assert sum(predicted["labels"].values()) == 60
    # Found there: no second commit.
    again = said(cli, "predict", job)
    assert (predicted.pop("made"), again.pop("made")) == (60, 0)
    assert again.pop("spent")["seconds"] > 0 and predicted.pop("spent")["device_s"] > 0
    assert again == predicted
    if store.root.startswith("s3"):  # 15 s, and the way to the store is the same
        assert said(cli, "train", job, "train.workers=2", "run.seed=8")["epochs"] == 2

    kept = [p for p in (tmp_path / "run").rglob("*") if p.is_file()]
    assert {"mlflow.db", "config.yaml", "package.json"} <= {p.name for p in kept}
    logs = [p for p in Path("/tmp/ray/session_latest/logs").rglob("*") if p.is_file()]
    assert logs
    assert [p for p in kept + logs if store.secret.encode() in p.read_bytes()] == []
    config = yaml.safe_load(next(p for p in kept if p.name == "config.yaml").read_text())
    assert store.endpoint_option in config["table"]["storage_options"]  # what is no secret is kept


def test_credentials_or_all_may_come_from_the_environment(
    store: Store, folder: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = store.uri("ambient")
    said(cli, "ingest", written(tmp_path / "job.yaml", store, uri, folder))
    keys = {name: value for name, value in store.options.items() if "key" in name.lower()}
    public = {
        "storage_options": {n: v for n, v in store.options.items() if n not in keys},
        "uri": uri,
    }
    job = written(tmp_path / "public.yaml", store, uri, folder, table=public)
    for name, value in keys.items():
        monkeypatch.setenv(name.upper(), value)
    assert said(cli, "ingest", job)["present"] == 60
    for name, value in store.options.items():
        monkeypatch.setenv(name.upper(), value)
    assert len(said(cli, "table", "list", uri)["versions"]) == 1


def refused(cli: Cli, store: Store, job: Path, *overrides: str) -> str:
    """The one message that a user sees, without the secret."""
    code, out, err = cli("ingest", job, *overrides)
    assert code == 2
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert store.secret not in out + err
    return err


def test_what_is_wrong_is_said_once_and_soon(
    store: Store, folder: Path, tmp_path: Path, cli: Cli
) -> None:
    job = written(tmp_path / "job.yaml", store, store.uri("wrong"), folder)
    began, endpoint = time.monotonic(), f"table.storage_options.{store.endpoint_option}="
    scheme = store.root.partition("://")[0]
    assert "there is no such bucket or container" in refused(
        cli, store, job, f"table.uri={scheme}://nowhere/cells"
    )
    assert "the store cannot be reached" in refused(
        cli, store, job, f"{endpoint}http://127.0.0.1:9"
    )
    http = next(name for name in store.options if name.lower().endswith("allow_http"))
    assert "plain http" in refused(cli, store, job, f"table.storage_options.{http}=false")
    assert time.monotonic() - began < 30
    code, _, err = cli("table", "list", job, f"table.uri={store.uri('missing')}")
    assert (code, "No Delta table here" in err) == (2, True)


def test_a_wrong_key_is_refused_by_the_store(
    azure: Store, folder: Path, tmp_path: Path, cli: Cli
) -> None:
    job = written(tmp_path / "job.yaml", azure, azure.uri("wrong"), folder)
    wrong = f"table.storage_options.azure_storage_account_key={azure.secret[::-1].strip('=')}=="
    assert "the store refuses the credentials" in refused(cli, azure, job, wrong)
    assert "the store refuses the credentials" in refused(
        cli, azure, job, "table.storage_options.azure_storage_account_key=x!"
    )


def test_a_server_that_never_answers_is_given_up(s3: Store) -> None:
    """object_store's own limits: three minutes for one that accepts and is silent, one for packets
    that vanish (measured).
    """
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        options = s3.options | {
            "AWS_ENDPOINT_URL": endpoint,
            "timeout": "1s",
            "retry_timeout": "2s",
        }
        began = time.monotonic()
        with pytest.raises(
            DataError, match=r"the store cannot be reached.*got 's3://images/x'.*retry_timeout"
        ):
            ImageTable.exists("s3://images/x", options)
        assert time.monotonic() - began < 10
