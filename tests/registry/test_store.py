"""A store that cannot be opened, and names that MLflow would refuse, are one message each."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from sqlalchemy.engine import make_url

from raypipe.config import RunConfig
from raypipe.errors import ConfigError
from raypipe.failures import explain
from raypipe.registry.store import Store, answer_s, open_store
from raypipe.registry.tracking import (
    MOVES,
    RegistryConfig,
    address_of,
    file_of,
    for_mlflow,
    in_file,
    store_file,
)


def test_a_store_that_cannot_be_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(
        ConfigError, match=r"MLflow store cannot be opened.*got 'sqlite:///.*Check registry\.uri"
    ):
        open_store(
            RunConfig(dir=str(tmp_path)), RegistryConfig(uri=f"sqlite:///{tmp_path}/file/mlflow.db")
        )


@pytest.mark.parametrize(
    ("run", "registry", "says"),
    [
        ({"dir": "runs/a?b"}, {}, r"SQLite store cannot be in this folder .got .run.dir=.*a.b"),
        ({"dir": "runs/a%41b"}, {}, "SQLite store cannot be in this folder"),
        ({"name": "o'neil"}, {}, "cannot register a model under this name .got .o'neil"),
        ({"name": "a/b"}, {}, "cannot register a model under this name"),
        ({}, {"model": "a:b"}, "cannot register a model under this name"),
        ({"name": "..next"}, {}, "cannot register a model under this name"),
        ({}, {"model": "."}, "cannot register a model under this name"),
        ({}, {"alias": "latest"}, "cannot give a version this alias"),
        ({}, {"alias": "v1"}, "cannot give a version this alias"),
        ({}, {"alias": "the best"}, "cannot give a version this alias"),
    ],
)
def test_names_that_mlflow_refuses_are_refused_before_a_training(
    run: dict[str, str], registry: dict[str, str], says: str, tmp_path: Path
) -> None:
    named = RunConfig.model_validate(run | {"dir": str(tmp_path / run.get("dir", "run"))})
    with pytest.raises(ConfigError, match=says):
        open_store(named, RegistryConfig.model_validate(registry))
    assert not any(tmp_path.rglob("*.db"))


def test_a_deleted_experiment_is_named_before_a_training(
    shared_store: Store, tmp_path: Path
) -> None:
    """MLflow took no run into it when the training was over, and so each time."""
    run = RunConfig(dir=str(tmp_path))
    cfg = RegistryConfig(uri=shared_store.address, experiment="deleted")
    store = open_store(run, cfg)
    store.client.delete_experiment(store.experiment_id)
    with pytest.raises(ConfigError, match=r"experiment was deleted.*experiments restore -x \d+"):
        open_store(run, cfg)
    # Who only reads needs none.
    assert open_store(run, cfg, create=False).experiment_id == store.experiment_id
    store.client.restore_experiment(store.experiment_id)
    assert open_store(run, cfg).experiment_id == store.experiment_id


@pytest.mark.parametrize("uri", ["true", "1"])
def test_a_store_by_sqlites_own_address_makes_no_folder_of_that_name(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow made a folder `file:` in the current folder."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    named = f"sqlite:///file:{tmp_path}/x%20y/a.db?mode=rwc&uri={uri}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", named)
    run = RunConfig(dir=str(tmp_path / "run"))
    store = open_store(run, RegistryConfig(uri="env:MLFLOW_TRACKING_URI"))
    assert not list(here.iterdir()) and (tmp_path / "x y" / "a.db").is_file()
    assert store.uri == named and answer_s(store) == 0
    # The same file by its plain address.
    plain = open_store(run, RegistryConfig(uri=f"sqlite:///{tmp_path}/x y/a.db"))
    assert plain.experiment_id == store.experiment_id and plain.moves == store.moves


def test_an_escaped_address_is_the_file_that_mlflow_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow opened `x y`, and made a folder x%20y. There raypipe had its table of moves, which
    nobody shared who wrote `x y`; and the second command could not open the store."""
    monkeypatch.chdir(tmp_path)
    run = RunConfig(dir=str(tmp_path / "run"))
    escaped = RegistryConfig(uri=f"sqlite:///{tmp_path}/x%20y%2541/a.db")
    store = open_store(run, escaped)
    assert (tmp_path / "x y%41" / "a.db").is_file()
    assert {entry.name for entry in tmp_path.iterdir()} == {"x y%41", "run"}
    assert open_store(run, escaped).moves == store.moves == str(tmp_path / "x y%41" / MOVES)
    assert store_file(run, escaped) == tmp_path / "x y%41" / "a.db"


@pytest.mark.parametrize(
    ("address", "file"),
    [
        ("sqlite:////d/x%20y.db?timeout=5", "/d/x y.db"),
        # SQLAlchemy reads it, and then SQLite.
        ("sqlite:///file:/d/x%2520y.db?uri=true", "/d/x y.db"),
        ("sqlite:///file:/d/x%20y.db?uri=true", "/d/x y.db"),
        # Without file: it is no address of SQLite's.
        ("sqlite:////d/x%2520y.db?uri=true", "/d/x%20y.db"),
        ("sqlite:///rel%3F.db", "rel?.db"),
        ("sqlite+pysqlite:////d/a.db", "/d/a.db"),
    ],
)
def test_the_file_of_an_address_is_the_one_that_sqlite_opens(address: str, file: str) -> None:
    assert file_of(address_of(address)) == Path(file)
    assert file_of(in_file(Path(file))) == Path(file)
    # By SQLAlchemy's own reading, whichever address MLflow is given.
    url = make_url(for_mlflow(address_of(address)))
    (name, *_), given = url.get_dialect()().create_connect_args(url)
    if given.get("uri") and name.startswith("file:"):
        name = unquote(urlsplit(name).path)
    assert Path(name) == Path(file).absolute()


@pytest.mark.parametrize(
    "address",
    [
        *("sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite+pysqlite://"),
        *("sqlite:///file::memory:?uri=true", "sqlite:///file:m?mode=memory&uri=1"),
    ],
)
def test_a_store_in_memory_is_refused(address: str, tmp_path: Path) -> None:
    """A training was registered in it, and nobody ever found the model."""
    run, says = RunConfig(dir=str(tmp_path / "run")), "would be in memory.*ends with the process"
    with pytest.raises(ConfigError, match=says):
        open_store(run, RegistryConfig(uri=address))
    with pytest.raises(ConfigError, match=r"registry.registry_uri=sqlite.*ends with the process"):
        open_store(run, RegistryConfig(registry_uri=address))


@pytest.mark.parametrize("options", ["", "?mode=rwc", "?uri=false&mode=rwc"])
def test_a_store_in_a_folder_called_file_is_refused(
    options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    named = f"sqlite:///file:{tmp_path}/a.db{options}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", named)
    says = r"in a folder called file: .got .{}=.*only with \?uri=true.*Write sqlite:////FOLDER"
    run = RunConfig(dir=str(tmp_path / "run"))
    for of in ("uri", "registry_uri"):
        for value in (named, "env:MLFLOW_TRACKING_URI"):
            with pytest.raises(ConfigError, match=says.format(f"registry.{of}")):
                open_store(run, RegistryConfig.model_validate({of: value}))
    assert not any(tmp_path.rglob("*.db")) and not (tmp_path / "file:").exists()
    # The way out for those who mean such a folder.
    assert file_of(address_of("sqlite:///./file:/a.db")) == Path("file:/a.db")


def test_a_full_disk_is_no_wrong_address(small_disk: Path) -> None:
    """A new store needs more than this disk of 1 MB has left."""
    (small_disk / "fill").write_bytes(bytes(900 * 1024))
    with pytest.raises(Exception, match="disk") as raised:
        open_store(RunConfig(dir=str(small_disk / "run")), RegistryConfig())
    code, text = explain(raised.value)
    assert code == 1 and "The disk is full" in text and "registry.uri" not in text


def test_a_server_is_asked_how_fast_it_answers_and_a_file_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first question opens the connection: it says little about the next ones."""
    now, takes_s = [0.0], [3.0, 0.06, 0.08]

    def asked(experiment_id: str) -> None:
        now[0] += takes_s.pop(0)

    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("raypipe.registry.store.time", clock)
    client: Any = SimpleNamespace(get_experiment=asked)

    def at(address: str) -> Store:
        return Store(client, address, "7", "cells", "champion", tmp_path, address)

    assert answer_s(at("sqlite:////data/mlflow.db")) == 0 and len(takes_s) == 3
    assert answer_s(at("databricks")) == pytest.approx(0.08) and not takes_s
