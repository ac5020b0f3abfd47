"""The fence of promotions, on SQLite, on `mlflow server` and on the double of Unity Catalog: real
processes and run folders."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import shutil
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED

from raypipe.config import RunConfig, validate
from raypipe.errors import DataError
from raypipe.job import Job
from raypipe.main import main
from raypipe.models.zoo import ImageModel
from raypipe.registry import catalog, follow, moves, promote, tracking, versions
from raypipe.registry.store import Store, open_store
from raypipe.registry.tracking import RegistryConfig
from raypipe.watch import retrained
from raypipe.watch.decide import Decision
from raypipe.work import training
from tests import forked
from tests.registry import handmade, mover, stores
from tests.registry.conftest import small_package
from tests.registry.stores import Address


@dataclass(frozen=True)
class Files:
    """Where the files of each version are, their seal, and the run whose files they are."""

    source: str
    seal: str
    run_id: str | None = None


@dataclass
class Place:
    """One MLflow store and its table of moves; each run folder opens it anew."""

    address: Address
    root: Path
    files: Files

    @property
    def model(self) -> str:
        return f"{self.address.before}m"

    @property
    def moves(self) -> str:
        return str(self.root / "moves")

    def open(self, run: str = "a", **changes: object) -> Store:
        given = self.address.settings | {"moves": self.moves, "model": self.model}
        cfg = RegistryConfig(**given, **changes)
        return open_store(RunConfig(dir=str(self.root / run)), cfg)

    def start(self, run: str, versions: list[int], **more: object) -> forked.Process:
        (self.root / run).mkdir(exist_ok=True)
        registry = self.address.settings | {"moves": self.moves, "model": self.model}
        given = {"registry": registry, "dir": str(self.root / run)}
        given |= {"versions": versions, "go": str(self.root / "go"), "expected": "any"} | more
        return forked.start(mover.PROGRAM, json.dumps(given))

    def config(self, **registry: object) -> Path:
        file = self.root / "mine.yaml"
        settings = self.address.settings | {"moves": self.moves, "model": self.model} | registry
        tree = {"table": {"uri": "/none"}, "run": {"dir": str(self.root / "a")}}
        file.write_text(json.dumps(tree | {"registry": settings}))
        return file


@pytest.fixture(scope="module")
def files(address: Address, model: ImageModel, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A package where the store's clients find it."""
    root = tmp_path_factory.mktemp("files")
    package = small_package(model, root / "package")
    folder = handmade.model(root / "model", package)
    if not address.uri.startswith("http"):
        return Files(str(folder), package.seal)
    # A server takes no folder of its clients.
    store = open_store(RunConfig(dir=str(root / "run")), RegistryConfig(**address.settings))
    run = store.client.create_run(store.experiment_id)
    store.client.log_artifacts(run.info.run_id, str(folder))
    return Files(run.info.artifact_uri, package.seal, run.info.run_id)


@pytest.fixture
def place(address: Address, files: Files, tmp_path: Path) -> Iterator[Place]:
    place = Place(address, tmp_path, files)
    store = place.open()
    store.client.create_registered_model(place.model)
    for _ in range(4):
        handmade.version(store, *astuple(files))
    yield place
    store.client.delete_registered_model(place.model)


def move(store: Store, to: int, **more: object) -> None:
    now = promote.champion(store)
    version = versions.require(store, to, "")
    promote.promote(store, version, now.version if now else None, **more)


def alias(store: Store) -> int:
    return int(store.client.get_model_version_by_alias(store.model, "champion").version)


def told(store: Store) -> list[tuple[int | None, int | None, str]]:
    return [(m.version_from, m.version_to, m.why) for m in moves.read(store).moves]


@stores.server_first
def test_of_two_processes_with_two_run_folders_one_wins(place: Place) -> None:
    store = place.open()
    move(store, 1)
    both = [place.start("a", [2], expected=1), place.start("b", [3], expected=1)]
    while not all((place.root / run / "ready").exists() for run in "ab"):
        assert all(process.poll() is None for process in both), both[0].communicate()
    (place.root / "go").touch()
    said = [json.loads(process.communicate(timeout=60)[0]) for process in both]
    won = [number for one in said for number in one["won"]]
    refused = [text for one in said for text in one["refused"]]
    assert len(won) == len(refused) == 1
    assert f"got 'version {won[0]}'" in refused[0]
    assert "The newest move: promotion by " in refused[0] and "retrain again" in refused[0]
    assert alias(store) == won[0]
    assert told(store) == [(None, 1, "promotion"), (1, won[0], "promotion")]


@stores.server_first
def test_two_promoters_in_a_loop_leave_one_chain(place: Place) -> None:
    store = place.open()
    (place.root / "go").touch()
    both = [place.start("a", [1, 2] * 3), place.start("b", [3, 4] * 3)]
    said = [json.loads(process.communicate(timeout=200)[0]) for process in both]
    found = moves.read(store).moves
    assert len(found) <= sum(len(one["won"]) for one in said)
    assert [m.number for m in found] == list(range(1, len(found) + 1))
    ends = [None, *(m.version_to for m in found)]
    assert [m.version_from for m in found] == ends[:-1], "each begins where the last one ended"
    assert {m.why for m in found} == {"promotion"}, "no promoter's alias looks moved by hand"
    assert alias(store) == found[-1].version_to


def test_a_promoter_killed_before_the_alias_is_finished_once(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    store = place.open("b")
    move(store, 1)
    (place.root / "go").touch()
    killed = place.start("a", [2], expected=1, dies=True)
    killed.communicate(timeout=60)
    assert killed.returncode == -9
    assert (alias(store), told(store)[-1]) == (1, (1, 2, "promotion")), "it died in between"
    with caplog.at_level(logging.WARNING, "raypipe"):
        assert promote.require_champion(store).version == alias(store) == 2
        assert promote.require_champion(store).version == 2
    assert f"says version 2 of {place.model}, the champion said 1: mended" in caplog.text
    assert caplog.text.count("mended") == 1 and len(told(store)) == 2


def test_a_table_of_moves_that_begins_again_is_no_later_part_of_the_one_before(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Its first move had the number of an applied one: after a kill it was undone, as by hand."""
    store = place.open("b")
    move(store, 2)
    move(store, 1)
    shutil.rmtree(place.moves)
    (place.root / "go").touch()
    killed = place.start("a", [2], expected=1, dies=True)
    _, said = killed.communicate(timeout=60)
    assert killed.returncode == -9 and "the table was deleted" in said
    assert (alias(store), told(store)) == (1, [(1, 2, "promotion")]), "it died in between"
    with caplog.at_level(logging.WARNING, "raypipe"):
        assert promote.require_champion(store).version == alias(store) == 2
    assert caplog.text.count("mended") == 1 and "by hand" not in caplog.text
    assert len(told(store)) == 1
    # A tag of an older raypipe is a number alone, beside that of the last move of a newer one.
    if place.address.catalog is None:
        store.client.set_model_version_tag(store.model, "2", f"raypipe.move.{store.alias}", "3")
        store.client.set_registered_model_alias(store.model, store.alias, "1")
        assert promote.require_champion(store).version == 1
        assert told(store)[-1] == (2, 1, "by hand")


def test_a_move_by_hand_in_mlflow_is_recorded_and_stays(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    store = place.open()
    move(store, 1)
    move(store, 2)
    # Back to where the newest move began: as after a crash, but that move was applied.
    store.client.set_registered_model_alias(store.model, "champion", "1")
    with caplog.at_level(logging.WARNING, "raypipe"):
        assert promote.require_champion(store).version == alias(store) == 1
    assert "moved by hand in MLflow from version 2 to 1: recorded" in caplog.text
    assert promote.require_champion(store).version == 1
    assert told(store)[-1] == (2, 1, "by hand") and len(told(store)) == 3
    store.client.delete_registered_model_alias(store.model, "champion")
    assert promote.champion(store) is None and told(store)[-1] == (1, None, "by hand")
    # There is a model: the way out was to train one.
    with pytest.raises(DataError, match=r"newest registered version is 4.*raypipe promote CONFIG"):
        promote.require_champion(store)
    move(store, 3)
    store.client.delete_model_version(store.model, "3")
    assert promote.champion(store) is None and told(store)[-1] == (3, None, "by hand")
    move(store, 2)
    assert alias(store) == 2


@stores.sqlite_first
@pytest.mark.parametrize("how", ["alias", "version", "alias, and the table of moves"])
def test_where_a_champion_was_taken_away_the_next_model_is_not_the_first(
    place: Place, how: str
) -> None:
    """The next `raypipe train` made its model champion, and nobody had compared it."""
    store = place.open()
    second, third = (versions.require(store, number, "") for number in (2, 3))
    blue = dataclasses.replace(store, alias="blue")
    assert training.crown_first(store, second) == second == training.crown_first(store, third)
    if how == "version":
        store.client.delete_model_version(store.model, "2")
    else:
        store.client.delete_registered_model_alias(store.model, "champion")
    if how.endswith("moves"):
        shutil.rmtree(place.moves)
    assert training.crown_first(store, third) is None and promote.champion(store) is None
    assert training.crown_first(blue, third) == third, "an alias of its own has its own first one"
    move(store, 3)
    assert training.crown_first(store, versions.require(store, 4, "")) == third


@stores.sqlite_first
def test_who_may_only_read_mlflow_has_a_champion_that_a_killed_promoter_left_without_a_tag(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = place.open()
    move(store, 1)
    for tag in (f"{follow.APPLIED}champion", f"{follow.MOVED_AT}champion"):
        name = next(iter(catalog.written({tag: ""}))) if store.is_catalog else tag
        store.client.delete_model_version_tag(store.model, "1", name)

    def refused(*given: object) -> None:
        raise MlflowException("not for you", error_code=PERMISSION_DENIED)

    with monkeypatch.context() as patched:
        patched.setattr(follow, "_set", refused)
        assert promote.require_champion(store).version == 1
    assert promote.require_champion(store).version == 1 and len(told(store)) == 1


@stores.sqlite_first
def test_who_may_only_read_mlflow_goes_on_where_a_promoter_was_killed_before_the_alias(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each command that only reads ended in MLflow's PERMISSION_DENIED, until a promoter came."""
    store = place.open()
    move(store, 1)
    moves.append(store, moves.read(store), (1, 2), "promotion")

    def refused(*given: object) -> None:
        raise MlflowException("not for you", error_code=PERMISSION_DENIED)

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "raypipe"):
        patched.setattr(follow, "_set", refused)
        for _ in range(2):  # a server asks every other second
            assert promote.require_champion(store).version == 1
    assert caplog.text.count("it stays") == 1 and "mended" not in caplog.text
    with caplog.at_level(logging.WARNING, "raypipe"):
        assert promote.require_champion(store).version == alias(store) == 2
    assert "the champion said 1: mended" in caplog.text
    assert told(store) == [(None, 1, "promotion"), (1, 2, "promotion")]


@stores.sqlite_first
def test_who_may_only_read_the_table_follows_a_move_by_hand(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a server does whose credentials only read."""
    store = place.open()
    move(store, 1)
    store.client.set_registered_model_alias(store.model, "champion", "2")

    def refused(*given: object, **more: object) -> None:
        raise DataError("The table cannot be written")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "raypipe"):
        patched.setattr(moves, "append_once", refused)
        for _ in range(2):  # a server asks every other second
            assert promote.require_champion(store).version == 2
    assert caplog.text.count("could not be recorded") == 1 and len(told(store)) == 1
    assert promote.require_champion(store).version == 2
    assert told(store)[-1] == (1, 2, "by hand")


def test_a_version_that_was_rolled_back_is_barred_until_said_otherwise(place: Place) -> None:
    store = place.open()
    for version in (1, 2, 3):
        move(store, version)
    assert promote.rollback(store, note="alarms") == (3, 2)
    assert promote.rollback(store) == (3, 2), "a second call changes nothing"
    assert alias(store) == 2 and len(told(store)) == 4
    with pytest.raises(
        promote.Barred, match=r"not promoted again.*rolled back: rollback by .*--unbar"
    ):
        move(store, 3)
    assert promote.rollback(store, to=1) == (2, 1)
    with pytest.raises(promote.Barred, match=r"Version 2 of '.*m' is not promoted again"):
        promote.rollback(store, to=2)
    with pytest.raises(DataError, match=r"Version 4 was never the champion of '.*m' .got '--to 4"):
        promote.rollback(store, to=4)
    move(store, 3, unbar=True)
    assert promote.rollback(store) == (3, 1), "version 2 is barred: the one before it counts"


def test_a_rollback_does_not_go_to_the_version_that_it_should_leave() -> None:
    """Where moves by hand went in a circle, it said that the alias was there already."""
    ends: list[tuple[int | None, int | None, str]] = [
        (None, 1, "promotion"),
        (1, 2, "promotion"),
        (2, 1, "by hand"),
        (1, 2, "rollback"),
    ]
    by_hand = [(2, None, "by hand"), (None, 2, "by hand")]

    def before(moved: list[tuple[int | None, int | None, str]]) -> int | None:
        at = datetime.now(UTC)
        made = [moves.Move(n, a, b, at, "me", why) for n, (a, b, why) in enumerate(moved, 1)]
        return moves.History(tuple(made), None).before(2)

    assert before([*ends, *by_hand]) is None, "1 is barred, and 2 is in use"
    assert before(ends[:2]) == 1 and before([*ends[:2], *by_hand]) == 1


def test_a_decision_that_was_carried_out_is_not_replayed(place: Place) -> None:
    """Neither over a rollback, nor over a move by hand in MLflow."""
    store = place.open()
    move(store, 1)
    champion, challenger = (versions.require(store, n, "") for n in (1, 2))

    def night(key: str) -> Decision:
        evidence = {"decision": key, "check": None}
        yes = Decision(True, "better")
        return retrained.carry_out(store, champion, challenger, yes, (), evidence)

    assert night("d1").act and night("d1").act and alias(store) == 2
    store.client.set_registered_model_alias(store.model, "champion", "1")
    again = night("d1")
    assert not again.act and "carried out before, and the alias was moved since" in again.reason
    assert alias(store) == 1
    assert night("d2").act and alias(store) == 2, "another decision counts"
    promote.rollback(store)
    for key in ("d1", "d2", "d3"):
        again = night(key)
        assert not again.act and "rolled back" in again.reason and "--unbar" in again.reason
    assert alias(store) == 1


def test_models_and_aliases_in_one_table_are_told_apart(place: Place) -> None:
    store = place.open()
    move(store, 1)
    other = dataclasses.replace(store, model=f"{place.address.before}other")
    store.client.create_registered_model(other.model)
    try:
        handmade.version(other, *astuple(place.files))
        blue = dataclasses.replace(store, alias="blue")
        assert promote.champion(other) is None and promote.champion(blue) is None
        promote.promote(other, versions.every(other)[0], None)
        move(blue, 3)
        assert (promote.require_champion(other).version, alias(store)) == (1, 1)
        assert [len(told(s)) for s in (store, other, blue)] == [1, 1, 1]
    finally:
        store.client.delete_registered_model(other.model)
    # A model of the same name, as in another MLflow store, has its own moves.
    store.client.delete_registered_model(store.model)
    assert promote.champion(store) is None
    store.client.create_registered_model(store.model)
    handmade.version(store, *astuple(place.files))
    assert told(store) == [] and promote.champion(store) is None


@stores.sqlite_first
@pytest.mark.parametrize("broken", ["something else", "lacks columns", "no log"])
def test_a_table_that_is_none_of_moves_is_one_message(place: Place, broken: str) -> None:
    if broken == "something else":
        write_deltalake(place.moves, pa.table({"image_id": ["a"]}))
        says = "is a table of something else.*image_id"
    elif broken == "lacks columns":
        write_deltalake(place.moves, pa.table({"model": ["m"], "alias": ["champion"]}))
        says = r"no table of moves.*no column number.*Set registry\.moves"
    else:
        move(place.open(), 1)
        for file in Path(place.moves, "_delta_log").glob("*.json"):
            file.write_text("{torn")
        says = "cannot be (opened|read)"
    with pytest.raises(DataError, match=says):
        promote.champion(place.open())
    if broken != "no log":
        assert DeltaTable(place.moves).version() == 0


@stores.sqlite_first
@pytest.mark.parametrize("changes", [{"number": None}, {"at": None}, {"evidence": "{"}])
def test_a_foreign_row_is_one_message(place: Place, changes: dict[str, object]) -> None:
    store = place.open()
    move(store, 1)
    rows = DeltaTable(place.moves).to_pyarrow_table().to_pylist()
    foreign = pa.Table.from_pylist([rows[0] | {"number": 2} | changes], moves.SCHEMA)
    write_deltalake(place.moves, foreign, mode="append")
    with pytest.raises(DataError, match="rows that raypipe did not write"):
        promote.champion(store)


def test_a_tag_by_hand_that_is_no_number_is_none(place: Place) -> None:
    store = place.open()
    move(store, 1)
    name = f"raypipe.move.{store.alias}"
    if place.address.catalog is None:
        store.client.set_model_version_tag(store.model, "1", name, "yes")
    found = promote.champion(store)
    assert found is not None and found.version == 1
    move(store, 2)
    assert alias(store) == 2


def test_the_verbs(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(place.config())

    def said(*arguments: str) -> dict:
        assert main([*arguments, "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    def planned(*arguments: str) -> tuple[int | None, int]:
        """Nothing is written by a dry run."""
        before = (
            sorted(place.root.rglob("*.json")),
            place.open().client.get_registered_model(place.model),
        )
        told = said(*arguments, "--dry-run")
        after = (
            sorted(place.root.rglob("*.json")),
            place.open().client.get_registered_model(place.model),
        )
        assert before[0] == after[0] and dict(before[1]) == dict(after[1]) and told["dry_run"]
        return told["before"], told["after"]

    assert planned("promote", config, "--version", "1") == (None, 1)
    for version in ("1", "2", "2"):
        done = said("promote", config, "--version", version, "--why", "looked at")
    assert (done["before"], done["after"], done["moves"][0]["note"]) == (2, 2, "looked at")
    assert planned("rollback", config) == (2, 1) == planned("rollback", config, "--to", "1")
    assert main(["rollback", config, "--to", "4", "--dry-run"]) == 2
    assert "Version 4 was never the champion" in capsys.readouterr().err
    assert said("rollback", config)["after"] == 1
    assert planned("rollback", config) == (1, 1), "a second one changes nothing"
    # Somebody moves it in MLflow: there is something to roll back again.
    store = place.open()
    store.client.set_registered_model_alias(store.model, "champion", "2")
    assert planned("rollback", config) == (2, 1)
    store.client.set_registered_model_alias(store.model, "champion", "1")
    assert said("rollback", config)["after"] == 1
    for more in ([], ["--dry-run"]):
        assert main(["promote", config, "--version", "2", *more]) == 2
        assert "--unbar" in capsys.readouterr().err
    assert planned("promote", config, "--version", "2", "--unbar") == (1, 2)
    assert main(["promote", config, "--version", "2"]) == 2
    assert "--unbar" in capsys.readouterr().err
    assert main(["promote", config, "--version", "9"]) == 2
    assert "has no version 9" in capsys.readouterr().err
    assert main(["promote", config]) == 2
    assert said("promote", config, "--version", "2", "--unbar")["after"] == 2
    listed = said("promote", config, "--history")["moves"]
    assert [m["why"] for m in listed] == ["by hand", "by hand", "rollback", "by hand"]
    for more in (["--why", "looked at"], ["--unbar"]):
        assert main(["promote", config, "--history", *more]) == 2
        said_of = capsys.readouterr().err
        assert more[0] in said_of and "nothing is promoted" in said_of
    assert main(["promote", config, "--history"]) == 0
    assert "rollback" in capsys.readouterr().out


def test_the_verbs_after_the_alias_was_deleted_in_mlflow(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """They said `champion m/None` and `from version None`, and no rollback led anywhere."""
    config, store = str(place.config()), place.open()
    for version in (1, 2):
        move(store, version)
    store.client.delete_registered_model_alias(store.model, "champion")
    assert main(["promote", config, "--history"]) == 0
    assert re.search(r"champion +none", capsys.readouterr().out)
    assert main(["rollback", config]) == 2
    assert "no version is in use" in capsys.readouterr().err
    assert main(["promote", config, "--version", "2"]) == 0
    assert re.search(r"moved +from nothing", capsys.readouterr().out)
    assert told(store)[-2:] == [(2, None, "by hand"), (None, 2, "by hand")]
    # Before it named nothing it named version 2, and before that version 1.
    assert promote.rollback(store) == (2, 1)
    store.client.delete_registered_model_alias(store.model, "champion")
    move(store, 3)
    assert told(store)[-1] == (None, 3, "promotion")
    assert promote.rollback(store) == (3, 1)


def test_where_the_table_is(tmp_path: Path) -> None:
    run = RunConfig(dir=str(tmp_path / "run"))

    def of(**sections: dict) -> tuple[str, dict | None, bool]:
        job = validate(Job, {"table": {"uri": "/t"}} | sections)
        found = tracking.moves_of(run, job.registry, job.artifacts)
        # Who knows the registry alone is given the same table.
        alone = tracking.moves_of(run, tracking.placed(run, job.registry, job.artifacts))
        assert alone == found
        return found.uri, found.options, found.is_shared

    # SQLite's own way to name a file: once a folder `file:` was made where the command ran.
    for named in (f"file:{tmp_path}/x%20y/a.db", f"file://{tmp_path}/x%20y/a.db"):
        place = str(tmp_path / "x y" / tracking.MOVES)
        assert of(registry={"uri": f"sqlite:///{named}?mode=rwc&uri=true"}) == (place, None, True)
    beside = {"uri": f"sqlite:///{tmp_path}/x/mlflow.db"}
    assert of(registry=beside) == (str(tmp_path / "x" / "raypipe-moves"), None, True)
    mine = str(tmp_path / "run/mlflow/raypipe-moves")
    assert of() == (mine, None, True)
    server = {"uri": "http://127.0.0.1:5000"}
    assert of(registry=server) == (mine, None, False)
    options = {"AWS_REGION": "eu-west-1"}
    artifacts = {"uri": "s3://bucket/a/", "storage_options": options}
    shared = ("s3://bucket/a/raypipe-moves", options, True)
    assert of(registry=server, artifacts=artifacts) == shared
    assert of(artifacts=artifacts) == (mine, None, True), "a store in a file has it beside"
    # Runs in a file of this host say nothing of hosts that share Unity Catalog.
    for registry in ({"registry_uri": "databricks-uc"}, {"uri": "databricks"}):
        unity = registry | {"model": "main.default.m", "experiment": "/Shared/m"}
        assert of(registry=unity) == (mine, None, False)
        assert of(registry=unity, artifacts=artifacts) == shared
        named = unity | {"moves": "abfss://c@a.dfs.core.windows.net/moves"}
        assert of(registry=named, artifacts=artifacts) == (named["moves"], None, True)


@stores.sqlite_first
def test_hosts_that_share_no_table_are_told_so(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    store = dataclasses.replace(place.open(), is_shared=False)
    with caplog.at_level(logging.WARNING, "raypipe"):
        move(store, 1)
    assert "not fenced" in caplog.text and "Set registry.moves" in caplog.text


@stores.sqlite_first
def test_a_copied_run_folder_and_a_clock_that_goes_back(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = place.open()
    move(store, 1)
    shutil.copytree(place.root / "a", place.root / "copy")

    class Earlier(moves.datetime):
        @classmethod
        def now(cls, tz: object = None) -> moves.datetime:
            return moves.datetime(2001, 1, 1, tzinfo=moves.UTC)

    with monkeypatch.context() as patched:
        patched.setattr(moves, "datetime", Earlier)
        move(place.open("copy"), 2)
    assert promote.require_champion(store).version == 2 and told(store)[-1] == (1, 2, "promotion")
    assert promote.rollback(store) == (2, 1), "the order is that of commits, not of clocks"
