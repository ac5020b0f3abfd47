"""Faults of stores, planted for real: S3 with rights and signatures (moto), MLflow's databases."""

from __future__ import annotations

import json
import shutil
import socket
import sqlite3
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pytest

from raypipe.doctor import stores
from raypipe.doctor.finding import Asked, Finding, Settings
from raypipe.errors import ConfigError, RaypipeError
from raypipe.registry.store_check import _require_writable, examine, migrate
from raypipe.tables import storage
from raypipe.tables.store_check import FOLDER
from raypipe.tables.table import append
from tests.cloud.conftest import served
from tests.doctor.conftest import Doctor

TABLE = "s3://images/cells"


@dataclass(frozen=True)
class Guarded:
    """A bucket behind S3's own rights. keys: of each user, id and secret."""

    endpoint: str
    keys: dict[str, tuple[str, str]]

    def options(self, user: str, secret: str | None = None) -> list[str]:
        """Settings of a configuration."""
        key, own = self.keys[user]
        values = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": '"true"',
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret or own,
        }
        return [f"table.storage_options.{name}={value}" for name, value in values.items()]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    boto3 = pytest.importorskip("boto3", reason="moto is in the extra `dev`")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    ready = r"Running on (http://127\.0\.0\.1:\d+)"
    with served(command, ready, tmp_path_factory.mktemp("moto")) as endpoint:
        root = {"aws_access_key_id": "root", "aws_secret_access_key": "rootroot"}
        root |= {"endpoint_url": endpoint, "region_name": "us-east-1"}
        boto3.client("s3", **root).create_bucket(Bucket="images")
        iam = boto3.client("iam", **root)
        keys = {}
        for user, actions in {"writer": ["s3:*"], "reader": ["s3:Get*", "s3:List*"]}.items():
            rights = {"Effect": "Allow", "Action": actions, "Resource": "*"}
            policy = json.dumps({"Version": "2012-10-17", "Statement": [rights]})
            iam.create_user(UserName=user)
            iam.put_user_policy(UserName=user, PolicyName="own", PolicyDocument=policy)
            key = iam.create_access_key(UserName=user)["AccessKey"]
            keys[user] = key["AccessKeyId"], key["SecretAccessKey"]
        # From now on every signature and every right is checked.
        address, how = f"{endpoint}/moto-api/reset-auth", {"Content-Type": "text/plain"}
        asked = urllib.request.Request(address, b"0", how)
        with urllib.request.urlopen(asked, timeout=10):
            pass
        yield Guarded(endpoint, keys)


@pytest.mark.cloud
def test_credentials_that_do_not_work_or_may_only_read(
    guarded: Guarded, doctor: Doctor, tmp_path: Path
) -> None:
    words = (f"table.uri={TABLE}", f"run.dir={tmp_path}", "--only", "table,clock")
    secret = guarded.keys["writer"][1]
    options = dict(each.split("options.")[1].split("=", 1) for each in guarded.options("writer"))
    options["AWS_ALLOW_HTTP"] = "true"
    append(TABLE, pa.table({"image": pa.array([b"x"], pa.binary())}), "add", options)

    wrong = doctor(*guarded.options("writer", "w" * 40), *words)
    assert wrong.state("table") == wrong.state("store") == "fail"
    assert "refuses the credentials (SignatureDoesNotMatch" in wrong.findings["store"]["seen"]
    assert "table.storage_options" in wrong.findings["store"]["way_out"]
    assert "wwww" not in wrong.err + str(wrong.findings)

    reader = doctor(*guarded.options("reader"), *words)
    assert reader.state("table") == "ok" and reader.state("store") == "warn"
    assert "read-only" in reader.findings["store"]["seen"]

    writer = doctor(*guarded.options("writer"), *words)
    assert writer.state("table") == writer.state("store") == writer.state("clock") == "ok"
    assert secret not in writer.err + str(writer.findings)
    assert "the object store" in writer.findings["clock"]["seen"]
    # What was written is gone again.
    boto3 = pytest.importorskip("boto3")
    named = {"aws_access_key_id": guarded.keys["writer"][0], "aws_secret_access_key": secret}
    store = boto3.client("s3", endpoint_url=guarded.endpoint, region_name="us-east-1", **named)
    names = [each["Key"] for each in store.list_objects_v2(Bucket="images")["Contents"]]
    assert names and not any(FOLDER in name for name in names)


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that takes connections and never answers, like a network that swallows packets.

    Its port holds the digits of a refusal, which once were taken for one.
    """
    for port in range(40300, 40400):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            yield f"http://127.0.0.1:{port}"
            return
    pytest.fail("none of a hundred ports is free")


@pytest.fixture(params=[401, 403])
def refusing(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server that refuses everybody with this status, as a proxy does: without MLflow's JSON."""

    class Refusal(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_error(request.param)

        do_GET = do_POST

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusal) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_store_that_refuses_asks_for_credentials(
    refusing: str, doctor: Doctor, tmp_path: Path
) -> None:
    told = doctor(f"registry.uri={refusing}", f"run.dir={tmp_path}", "--only", "mlflow")
    assert told.state("mlflow") == "fail"
    assert "MLFLOW_TRACKING_TOKEN" in told.findings["mlflow"]["way_out"]


def test_stores_that_never_answer_are_named_in_time(
    silent: str, doctor: Doctor, tmp_path: Path
) -> None:
    options = {"AWS_ENDPOINT_URL": silent, "AWS_ALLOW_HTTP": '"true"', "AWS_REGION": "us-east-1"}
    options |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret-secret"}
    options["timeout"] = "2s"  # a user's own value wins over the doctor's 5 s
    given = [f"table.storage_options.{name}={value}" for name, value in options.items()]
    places = (f"table.uri={TABLE}", f"registry.uri={silent}", f"run.dir={tmp_path}")
    began = time.monotonic()
    told = doctor(*places, *given, "--only", "table,mlflow,clock")
    assert time.monotonic() - began < 25
    assert told.state("table") == told.state("store") == told.state("mlflow") == "fail"
    assert told.state("clock") == "ok"
    assert "cannot be reached" in told.findings["table"]["seen"]
    assert "registry.uri" in told.findings["mlflow"]["way_out"]


def test_a_local_table_leaves_no_trace(doctor: Doctor, tmp_path: Path) -> None:
    words = (f"run.dir={tmp_path / 'run'}", "--only", "table,run,mlflow")
    told = doctor(f"table.uri={tmp_path / 'a' / 'cells'}", *words)
    assert told.state("table") == "skipped" and told.state("store") == "ok" and told.code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["home"]


def test_a_store_of_mlflow_in_plain_files(doctor: Doctor, tmp_path: Path) -> None:
    words = (f"run.dir={tmp_path}", "--only", "mlflow")
    told = doctor(f"registry.uri={tmp_path}/mlruns", *words)
    finding = told.findings["mlflow"]
    assert finding["state"] == "fail" and "refuses file:" in finding["rule"]
    assert finding["way_out"].startswith("Set registry.uri=null")
    assert doctor("registry.uri=null", *words).state("mlflow") == "ok"


def test_a_store_in_a_folder_called_file(doctor: Doctor, tmp_path: Path) -> None:
    words = (f"run.dir={tmp_path}", "--only", "mlflow,registry")
    at = f"sqlite:///file:{tmp_path}/a.db"
    told = doctor("registry.registry_uri=env:MLFLOW_TRACKING_URI", *words, MLFLOW_TRACKING_URI=at)
    finding = told.findings["registry"]
    assert told.state("mlflow") == "ok" and finding["state"] == "fail"
    assert "folder called file:" in finding["seen"]
    assert "sqlite:////FOLDER/mlflow.db" in finding["way_out"]
    assert doctor(f"registry.uri={at}", *words).state("mlflow") == "fail"
    assert doctor(f"registry.uri={at}?uri=true", *words).state("mlflow") == "ok"
    assert not list(tmp_path.glob("*.db"))


def test_a_registry_that_is_another_store_is_looked_at(doctor: Doctor, tmp_path: Path) -> None:
    words = (f"run.dir={tmp_path}", "--only", "mlflow,registry")
    told = doctor(f"registry.registry_uri={tmp_path}/mlruns", *words)
    finding = told.findings["registry"]
    assert told.state("mlflow") == "ok" and finding["state"] == "fail"
    assert finding["way_out"].startswith("Set registry.registry_uri=null")
    told = doctor(f"registry.registry_uri=sqlite:///{tmp_path}/models.db", *words)
    assert told.state("registry") == "ok" and "models.db" in told.findings["registry"]["seen"]
    assert doctor(*words).findings["registry"]["seen"] == "models are in the store of runs"


def test_a_registry_that_is_silent_or_old_names_its_own_setting(
    refusing: str, old: tuple[Path, str], tmp_path: Path
) -> None:
    def told(uri: str) -> Finding:
        given = {"run": {"dir": str(tmp_path)}, "registry": {"registry_uri": uri}}
        (finding,) = stores.registry(Asked(settings=Settings.model_validate(given)))
        return finding

    with pytest.raises(RaypipeError, match=r"registered-models.*MLFLOW_TRACKING_TOKEN"):
        told(refusing)
    with closing(sqlite3.connect(shutil.copyfile(old[0], tmp_path / "m.db"))) as store:
        store.execute("update alembic_version set version_num = ?", ("f" * 12,))
        store.commit()
    finding = told(f"sqlite:///{tmp_path}/m.db")
    assert finding.name == "registry" and "set registry.registry_uri" in finding.way_out


def test_a_store_that_cannot_be_written_is_not_well(
    old: tuple[Path, str], alone: Doctor, tmp_path: Path
) -> None:
    """Each run ended in MLflow's traceback."""
    disk = "mount -t tmpfs none /mnt && cp '%s' /mnt/mlflow.db && mount -o remount,ro /mnt"
    words = (f"run.dir={tmp_path}", "--only", "mlflow")
    why = {"mlflow.db": "attempt to write a readonly", "new/mlflow.db": "/mnt may not be written"}
    for name, said in why.items():
        told = alone(f"registry.uri=sqlite:////mnt/{name}", *words, first=disk % old[0])
        finding = told.findings["mlflow"]
        assert finding["state"] == "fail", finding
        assert f"cannot be written: {said}" in finding["seen"], finding
        assert "set registry.uri to another store" in finding["way_out"]


def test_a_store_that_was_tried_is_as_it_was(old: tuple[Path, str], tmp_path: Path) -> None:
    file = tmp_path / "mlflow.db"
    shutil.copyfile(old[0], file)
    before = content(file)
    # Whoever writes just now shows that it can be written.
    with closing(sqlite3.connect(file, isolation_level=None)) as writer:
        writer.execute("begin immediate")
        _require_writable(file, "registry.uri")
    _require_writable(file, "registry.uri")
    assert content(file) == before and [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


def test_the_clock_of_a_server_named_by_a_variable_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_AT", "http://runs:5000")
    registry = {"uri": "env:MLFLOW_AT", "registry_uri": "https://models"}
    asked = Asked(settings=Settings.model_validate({"registry": registry}))
    servers = {"MLflow": "http://runs:5000", "the model registry": "https://models"}
    assert stores._servers(asked) == servers
    monkeypatch.delenv("MLFLOW_AT")
    assert stores._servers(asked) == {}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A SQLite store as the release before made it, one revision back; and that revision. Copy
    it."""
    file = tmp_path_factory.mktemp("old") / "mlflow.db"
    return file, make_old(file)


def make_old(file: Path) -> str:
    from alembic import command
    from alembic.script import ScriptDirectory
    from mlflow.store.db.utils import _get_alembic_config, create_sqlalchemy_engine
    from mlflow.store.tracking.dbmodels.initial_models import Base

    config = _get_alembic_config(f"sqlite:///{file}")
    newest, before, *_ = ScriptDirectory.from_config(config).walk_revisions()
    engine = create_sqlalchemy_engine(f"sqlite:///{file}")
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, before.revision)
    engine.dispose()
    assert newest.revision != before.revision
    return str(before.revision)


def test_a_store_of_an_older_mlflow(old: tuple[Path, str], doctor: Doctor, tmp_path: Path) -> None:
    file = tmp_path / "run" / "mlflow" / "mlflow.db"
    file.parent.mkdir(parents=True)
    shutil.copyfile(old[0], file)
    revision = old[1]
    finding = stores._of_other_release(None, examine(None, str(file.parent)))
    assert finding.state == "fail" and f"its schema is {revision}" in finding.seen
    assert f"mlflow db upgrade sqlite:///{file}" in finding.way_out and finding.mend is not None

    mended = doctor(f"run.dir={tmp_path / 'run'}", "--only", "mlflow", "--fix")
    assert mended.state("mlflow") == "ok" and mended.code == 0
    copy = file.with_name(f"{file.name}.before-{revision}")
    assert f"copies {file} to {copy}" in mended.err
    with closing(sqlite3.connect(copy)) as before:
        assert before.execute("select version_num from alembic_version").fetchall() == [(revision,)]


def test_a_migration_that_breaks_off_is_undone(old: tuple[Path, str], tmp_path: Path) -> None:
    """The store claims to be four releases older than it is: a step adds what is there already."""
    from alembic.script import ScriptDirectory
    from mlflow.store.db.utils import _get_alembic_config

    file = tmp_path / "mlflow.db"
    shutil.copyfile(old[0], file)
    revisions = list(ScriptDirectory.from_config(_get_alembic_config("")).walk_revisions())
    claimed = str(revisions[4].revision)
    with closing(sqlite3.connect(file)) as store:
        store.execute("update alembic_version set version_num = ?", (claimed,))
        store.commit()
    before = content(file)
    with pytest.raises(ConfigError, match="MLflow cannot migrate its store"):
        migrate(str(file), claimed)
    assert content(file) == before


def content(file: Path) -> list[str]:
    with closing(sqlite3.connect(file)) as store:
        return list(store.iterdump())


def test_a_store_of_a_newer_mlflow_is_left_alone(
    old: tuple[Path, str], doctor: Doctor, tmp_path: Path
) -> None:
    """--fix tried to migrate it, failed, and wrote the copy of some seconds ago over it."""
    file = tmp_path / "run" / "mlflow" / "mlflow.db"
    file.parent.mkdir(parents=True)
    shutil.copyfile(old[0], file)
    with closing(sqlite3.connect(file)) as store:
        store.execute("update alembic_version set version_num = ?", ("f" * 12,))
        store.commit()
    before = file.read_bytes()
    told = doctor(f"run.dir={tmp_path / 'run'}", "--only", "mlflow", "--fix")
    assert told.state("mlflow") == "fail" and file.read_bytes() == before
    assert "Install the MLflow that made it" in told.findings["mlflow"]["way_out"]
    assert [path.name for path in file.parent.iterdir()] == ["mlflow.db"]


def test_options_in_the_address_of_a_store_are_no_part_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "mlflow.db"
    make_old(file)
    assert examine(f"sqlite:///{file}?timeout=30", "")["kind"] == "database"


def test_only_a_misspelt_variable_is_called_so() -> None:
    """Azure's own AZURE_STORAGE_ACCOUNT was, and the way out wrote it over the account's key."""
    rights = ["AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_TOKEN", "AZURE_STORAGE_SAS_KEY"]
    rights += [name.upper() for name in storage._HARMLESS_ANYWHERE if "_" in name]
    assert stores.misspelt(dict.fromkeys(rights, "x")) == {}
    wrong = {"AWS_ENDPOINT_ULR": "x"}
    assert stores.misspelt(wrong) == {"AWS_ENDPOINT_ULR": "AWS_ENDPOINT_URL"}
    assert stores.misspelt(wrong | {"AWS_ENDPOINT_URL": "y"}) == {}
