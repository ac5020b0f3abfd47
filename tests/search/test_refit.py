"""The best trial's job once more, on validation images too: what is registered then, and what is
said of it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from raypipe.cli.console import Console as Shown
from raypipe.config import load, replace, validate
from raypipe.errors import ConfigError, DataError, RaypipeError
from raypipe.feed.dataset import pin
from raypipe.job import Job
from raypipe.search import feasible, refit, refit_together, tuner
from raypipe.search.leaderboard import Trial
from raypipe.search.ledger import Ledger
from raypipe.search.result import SearchResult
from raypipe.search.schedulers import mutations
from raypipe.tables.ingest import IngestConfig, ingest
from raypipe.tables.table import TableConfig, TableVersion
from raypipe.train import checkpoint, trainer, unseen
from raypipe.train.job import TrainJob, TrainResult
from raypipe.train.loop import LoopState
from raypipe.train.parallel.snapshot import Piece, Snapshot
from raypipe.work import in_time, training

from ..conftest import Cli
from .test_tuner import Searches

REFIT = {"train.epochs": 3, "model.side_px": 48}


@pytest.fixture(scope="module")
def cells(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> TableConfig:
    """60 photos: half of them to train, the others to validate and test."""
    table = TableConfig(uri=str(tmp_path_factory.mktemp("refit") / "photos"))
    source = {"images": str(photos), "labels": str(photos / "labels.csv")}
    ingest(
        table,
        validate(IngestConfig, {"from": source, "splits": {"train": 0.5, "val": 0.3, "test": 0.2}}),
    )
    return table


@pytest.mark.usefixtures("ray_session")
def test_it_trains_on_both_splits_and_keeps_the_third_for_its_reference(
    cells: TableConfig, searches: Searches, tmp_path: Path
) -> None:
    job = searches(tmp_path, **{"table.uri": cells.uri, "search.refit": REFIT, "search.samples": 1})
    found = tuner.search(job.training, job.search)
    again = refit.job_of(job.training, job.search.refit or {}, found)
    assert (again.feed.train, again.model.pixels, again.train.epochs) == ("train+val", 48, 3)
    assert again.train.lr == found.job.train.lr
    assert (
        again.table.version == found.best.version.version
        and again.train.start_from == found.best.checkpoint
    )
    epochs: list[int] = []
    planned = refit.planned(again, found)
    done = refit.refit(
        planned, found, lambda metrics, state: epochs.append(state.epoch), lambda position: None
    )
    assert (
        epochs == [1, 2, 3] and done.refitted and done.job == again and done.trials == found.trials
    )
    assert done.key == found.key and done.full_epochs == found.full_epochs == 8
    assert done.best.key == planned.key == again.training_key(done.best.version), (
        "what raypipe train would call it"
    )
    assert done.best.best_epoch == 2 and not any(
        name.startswith("val_") for line in done.best.history for name in line
    )
    pinned = pin(again.table, again.feed)
    assert pinned.counts["train+val"] + pinned.counts["test"] == 60
    model = trainer.assemble(done.job, done.best)
    assert (
        len(unseen.reference(done.job, model, pinned, tmp_path / "both").reference.ids)
        == pinned.counts["test"]
    )
    once = json.loads((tmp_path / "both" / "test.json").read_text())
    assert unseen.test(done.plan, done.best) == once, (
        "and what it found of the test split is what test() says"
    )
    apart = replace(done.job, {"feed.train": "train"})
    assert (
        len(unseen.reference(apart, model, pin(apart.table, apart.feed), tmp_path).reference.ids)
        == pinned.counts["val"]
    )
    epochs.clear()
    assert refit.refit(
        planned, found, lambda metrics, state: epochs.append(1), lambda position: None
    ).best.checkpoint
    assert not epochs, "trained before, it is read again"

    # One bit of its weights costs its last epoch, and one of its optimizer nothing.
    for kind in ("optimizer", "weights"):
        file = next(Path(done.best.checkpoint).glob(f"{kind}-*"))
        file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
        if kind == "optimizer":
            assert refit.unfinished(done) is None and trainer.assemble(done.job, done.best)
    result = planned.folder / "result.json"
    with pytest.raises(DataError, match=rf"weights of a model are damaged.*Remove {result}"):
        trainer.assemble(done.job, done.best)
    result.unlink()
    mended = refit.refit(
        planned, found, lambda metrics, state: epochs.append(state.epoch), lambda position: None
    )
    assert epochs[-1] == 3 and trainer.assemble(mended.job, mended.best)


@pytest.mark.usefixtures("ray_session")
def test_the_command_registers_the_refit_and_its_file_gives_the_same_model(
    cells: TableConfig, searches: Searches, cli: Cli, tmp_path: Path
) -> None:
    from raypipe.config import save

    job = searches(tmp_path, **{"table.uri": cells.uri, "search.refit": REFIT, "search.samples": 1})
    where = save(validate(Job, job.model_dump()), tmp_path / "job.yaml")
    code, out, err = cli("tune", str(where), "--json")
    assert code == 0, err
    told = json.loads(out.splitlines()[-1])
    assert (
        told["refitted"]
        and told["test"]["test_accuracy"] >= 0
        and "on train+val" in err
        and "trained again" in err
    )
    assert not any(name.startswith("val_") for name in told["metrics"])
    best = load(Job, Path(told["best_config"]))
    assert best.feed.train == "train+val" and best.train.epochs == 3
    code, out, err = cli("train", told["best_config"], "--json")
    assert code == 0 and json.loads(out.splitlines()[-1])["model"] == told["model"], (
        "the version that is there"
    )
    code, _, err = cli("train", told["best_config"], f"run.dir={tmp_path / 'again'}", "--json")
    assert code == 0, err
    ours, theirs = (
        checkpoint.read(max(folder.glob("train/*/checkpoints/epoch-*"))).weights
        for folder in (tmp_path, tmp_path / "again")
    )
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )
    code, out, err = cli("tune", str(where), "search.refit.train.epochs=2", "--json")
    other = json.loads(out.splitlines()[-1])
    assert code == 0 and other["model"] != told["model"] and other["report"] == told["report"], (
        "the search is not repeated"
    )
    # Without a budget, too, the result and the page say what did not come.
    code, out, err = cli("tune", str(where), "search.refit.train.lr=1e30", "--json")
    lost = json.loads(out.splitlines()[-1])
    assert code == 0 and not lost["refitted"] and "No refit: " in lost["notes"][0]
    assert "Not made" in Path(lost["report"]).read_text() and told["notes"] == []
    shutil.rmtree(tmp_path / "search")
    small = ["watch.force=true", "watch.retrain_workers=1", "watch.retrain_samples=2"]
    small += ["run.seed=8"]  # with the champion's, the same rows may give the champion again
    code, out, err = cli("retrain", str(where), *small, "--json")
    assert code == 0 and json.loads(out.splitlines()[-1])["challenger"], (
        "which needs no checkpoint of a search long gone"
    )


def test_a_trial_whose_weights_are_lost_is_not_refitted(searches: Searches, tmp_path: Path) -> None:
    """Its metric may look like one, or its checkpoint be older than the check."""
    job = searches(tmp_path, **{"search.refit": {}})
    weights = {"w": Piece.whole(torch.tensor([float("nan")]))}
    history = [{"val_loss": 0.5, "val_accuracy": 0.8}]
    at = checkpoint.write(
        tmp_path / "epoch", Snapshot(weights), LoopState(epoch=1, history=history)
    )
    best = TrainResult(
        "key", TableVersion("table", 0), ("a", "b"), history[0], tuple(history), 0, str(at), 0.0
    )
    for metric, says in (
        (0.5, r"Weights are not finite: w holds NaN"),
        (float("nan"), r"has no usable epoch"),
    ):
        trial = Trial("t", {}, metric, 1, False, tuple(history), str(at))
        plain = job.training
        with pytest.raises(DataError, match=says):
            refit.job_of(
                job.training,
                job.search.refit or {},
                SearchResult("key", plain, best, (trial,), "val_loss", 0.0),
            )


@pytest.mark.parametrize("mode", ["finetune", "frozen"])
def test_a_refit_of_values_by_epoch(searches: Searches, tmp_path: Path, mode: str) -> None:
    """From the trial's weights on it has the last values; anew, those of the epochs that it comes
    to.
    """
    more = {
        "search.refit": {"train.epochs": 3},
        "model.mode": mode,
        "model.name": "efficientnet_lite0",
    }
    job = searches(tmp_path, **more, **{"model.pretrained": True, "train.epochs": 9})
    schedule = (
        {"epoch": 0, "train.lr": 0.1},
        {"epoch": 2, "train.lr": 0.2},
        {"epoch": 4, "train.lr": 0.3},
    )
    plain = job.training
    won = mutations.job_of(plain, {"train.lr": 0.3}, schedule)
    history = [{"val_loss": 0.5}]
    weights = {"w": Piece.whole(torch.tensor([1.0]))}
    at = checkpoint.write(
        tmp_path / "epoch", Snapshot(weights), LoopState(epoch=1, history=history)
    )
    best = TrainResult(
        "key", TableVersion("table", 0), ("a", "b"), history[0], tuple(history), 0, str(at), 0.0
    )
    trial = Trial("t", {"train.lr": 0.3}, 0.5, 1, False, tuple(history), str(at), schedule=schedule)
    again = refit.job_of(
        job.training,
        job.search.refit or {},
        SearchResult("key", won, best, (trial,), "val_loss", 0.0),
    )
    expected = (0.3, {}) if mode == "finetune" else (0.1, {2: {"train.lr": 0.2}})
    assert (again.train.lr, again.by_epoch) == expected


@pytest.mark.usefixtures("ray_session")
def test_test_images_are_never_trained_on(
    cells: TableConfig, searches: Searches, tmp_path: Path
) -> None:
    """Who has two splits may validate on the test split; a refit would train on it."""
    of_two = {"table.uri": cells.uri, "search.refit": REFIT, "search.samples": 1}
    for val, test in (("test", "test"), ("val+test", "test"), ("val", "val")):
        job = searches(tmp_path, **of_two, **{"feed.val": val, "feed.test": test})
        with pytest.raises(ConfigError, match=r"which is to test its model.*search\.refit=null"):
            tuner.search(job.training, job.search)
        pinned = pin(job.table, job.feed)
        for wanted in (None, {"feed.train": "train"}):
            search = job.search.model_copy(update={"refit": wanted})
            refit.check_splits(job.training, search, pinned)
    assert not (tmp_path / "search").exists()


def test_no_rule_that_judges_by_validation_ends_a_refit(searches: Searches, tmp_path: Path) -> None:
    rules = {"patience": 1, "target": 0.01, "plateau": 2}
    job = searches(tmp_path, **{f"train.stopping.{name}": value for name, value in rules.items()})
    both = replace(job.training, refit.splits(job.training)).train.stopping
    assert (both.patience, both.target, both.plateau) == (None, None, None)


def test_what_would_end_a_refit_early_is_refused_and_a_head_has_no_schedule(
    searches: Searches, tmp_path: Path
) -> None:
    job = searches(tmp_path, **{"search.refit": {"train.stopping.seconds": 60}})
    with pytest.raises(ConfigError, match=r"search\.refit\.train\.stopping\.seconds would end"):
        check(job)

    freed = {"train.stopping.seconds": None}
    check(searches(tmp_path, **{"search.refit": freed, "train.stopping.seconds": 60}))

    def unfinished(solver: str, epochs: int, best_epoch: int) -> str | None:
        train = SimpleNamespace(solver=solver, epochs=20, result="last", anneal_s=None)
        best = SimpleNamespace(history=({},) * epochs, best_epoch=best_epoch)
        done = SimpleNamespace(job=SimpleNamespace(train=train), best=best)
        return refit.unfinished(cast(SearchResult, done))

    assert unfinished("steps", 20, 19) is None
    assert "5%" in str(unfinished("steps", 1, 0)) and unfinished("closed", 1, 0) is None
    assert "20%" in str(unfinished("steps", 20, 3)), "its later epochs were NaN"


@pytest.mark.usefixtures("ray_session")
def test_a_refit_that_was_ended_before_its_last_epoch_is_no_model(
    cells: TableConfig, searches: Searches, tmp_path: Path
) -> None:
    """Its rate had not fallen yet: the best trial stays."""
    soon = {"train.epochs": 3}
    changes = {"table.uri": cells.uri, "search.refit": soon, "search.samples": 1}
    job = searches(tmp_path, **changes, **{"train.stopping.seconds": 1e-3})
    ledger = Ledger()
    found = training.search_and_refit(job, Shown(True), ledger=ledger)
    assert not found.refitted and found.best.metrics["val_loss"] > 0
    assert ledger.notes == [f"No refit: it came to 33% of its schedule, and {in_time.STAYS}"]

    def train(again: TrainJob, member: SearchResult) -> SearchResult:
        planned = refit.planned(again, member)
        return refit.refit(planned, member, lambda *given: None, lambda *given: None)

    # Nor is it a retrain's.
    same = refit_together.refitted(job.training, found, job.search, train)
    assert not same.refitted

    # One without a usable epoch costs itself alone, at first and on each rerun.
    nan = {"train.epochs": 3, "train.lr": 1e30, "train.stopping.seconds": None}
    job = replace(job, {"search.refit": nan})
    for _ in range(2):
        ledger = Ledger()
        again, version, _ = training.search_and_register(job, Shown(True), ledger=ledger)
        assert not again.refitted and again.best.key == found.best.key
        assert str(version).endswith("/1")
        assert "No refit: it diverged" in ledger.notes[0] and in_time.STAYS in ledger.notes[0]
        assert "search.refit.train.lr" in ledger.notes[0]
    assert not refit_together.refitted(job.training, found, job.search, train).refitted
    with pytest.raises(RaypipeError, match="a worker died"):
        refit.why_diverged(RaypipeError("a worker died"))


def check(job: Job) -> None:
    refit.check(job.training, job.search)


@pytest.mark.usefixtures("ray_session")
def test_what_the_job_refuses_is_said_before_the_search(searches: Searches, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"search\.refit: .*model\.side_px"):
        check(searches(tmp_path, **{"search.refit": {"model.side_px": 3}}))
    with pytest.raises(ConfigError, match=r"search\.refit: .*model\.side.*side_px"):
        check(searches(tmp_path, **{"search.refit": {"model.side": 300}}))
    with pytest.raises(ConfigError, match=r"checkpoint of train\.start_from is incomplete"):
        job = searches(tmp_path, **{"train.start_from": str(tmp_path)})
        feasible.check(job.training, job.search)
    with pytest.raises(ConfigError, match=r"search\.soup and search\.refit"):
        searches(tmp_path, **{"search.refit": {}, "search.soup": 3})
    check(searches(tmp_path))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("feed.val", "test"),
        ("feed.test", "val"),
        ("model.task", "regression"),
        ("train.result", "best"),
        ("train.stopping.metric", "val_loss"),
        ("table.uri", "elsewhere"),
        ("run.dir", "elsewhere"),
        ("registry.model", "another"),
    ],
)
def test_a_refit_changes_no_table_no_folder_and_no_judge(name: str, value: str) -> None:
    """Test images validated each epoch of a refit with feed.val=test, and nothing said so."""
    job = {"table": {"uri": "unused"}, "feed": {"test": "test"}}
    with pytest.raises(ConfigError, match=rf"search\.refit cannot change {name}.*Leave it out"):
        check(validate(Job, {**job, "search": {"refit": {name: value}}}))
    same = {"feed.val": "val", "feed.test": "test", "train.result": "last"}
    # So does what the job says of table, folder and registry; and a seed is no folder.
    same |= {"table.uri": "unused", "table.version": None, "registry.model": None, "run.seed": 7}
    check(validate(Job, {**job, "search": {"refit": same}}))


def test_a_refit_has_no_more_workers_than_images_of_a_batch() -> None:
    """Norms over all workers counted an image twice, without a word."""
    train = {"sync_bn": True, "batch_size": 4}
    for workers in (4, 8):
        search = {"refit": {"train.workers": workers}}
        job = validate(Job, {"table": {"uri": "unused"}, "train": train, "search": search})
        if workers == 4:
            check(job)
        else:
            with pytest.raises(
                ConfigError, match=r"batch_size=4 not each of 8 workers.*refit=null"
            ):
                check(job)


def test_a_refit_is_of_the_version_that_was_searched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it repeats the job's, which may be none, it would be of the newest one."""
    monkeypatch.setattr(refit, "_require_usable", lambda result: None)
    job = validate(Job, {"table": {"uri": "unused"}, "search": {"refit": {"table.version": None}}})
    searched: Any = SimpleNamespace(
        job=job.training, best=SimpleNamespace(version=SimpleNamespace(version=4))
    )
    wanted = job.search.refit or {}
    assert refit.job_of(job.training, wanted, searched).table.version == 4
    refit.check(replace(job.training, {"table.version": 4}), job.search)


def test_options_of_a_network_give_it_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dotted they are names of their own, and the trial's weights were loaded into another net."""
    monkeypatch.setattr(refit, "_require_usable", lambda result: None)
    model = {"name": "timm:resnet18", "mode": "finetune"}
    options = {"model.options": {"drop_path_rate": 0.2}}
    job = validate(Job, {"table": {"uri": "unused"}, "model": model, "search": {"refit": options}})
    best = SimpleNamespace(version=SimpleNamespace(version=4), checkpoint="a trial's")
    searched: Any = SimpleNamespace(job=job.training, best=best, trials=[])
    again = refit.job_of(job.training, job.search.refit or {}, searched)
    assert again.train.start_from is None and again.model.options == {"drop_path_rate": 0.2}


def test_a_side_of_null_is_the_backbones_own() -> None:
    """Within a budget it was the trial's."""
    tree = {"table": {"uri": "unused"}, "model": {"mode": "finetune", "side_px": 96}}
    job = validate(Job, tree).training
    assert refit.side_of(job, {}) == 96
    assert refit.side_of(job, {"model.side_px": None}) == 224
    assert refit.side_of(job, {"model.side_px": 128}) == 128


def test_a_refit_of_a_split_that_is_not_there_is_refused_before_the_search(
    cells: TableConfig,
) -> None:
    """It was found out when all trials had been trained."""
    tree = {"table": cells.model_dump(), "search": {"refit": {"feed.train": "train+vall"}}}
    job = validate(Job, tree)
    with pytest.raises(ConfigError, match=r"split 'vall'.*It has test, train, val"):
        refit.check_splits(job.training, job.search, pin(job.table, job.feed))


@pytest.mark.parametrize(
    ("model", "way_out"),
    [
        ({"calibrate": True}, r"model\.calibrate=false\. Or set search\.refit=null"),
        ({"mode": "finetune"}, r"model\.views=1, .*\. Or set search\.first_answer=false"),
    ],
)
def test_what_a_preset_has_set_is_named_as_a_way_out(model: dict[str, Any], way_out: str) -> None:
    asked = {"preset": "good"} | ({} if "calibrate" in model else {"refit": {"model.views": 2}})
    with pytest.raises(ConfigError, match=way_out):
        check(validate(Job, {"table": {"uri": "unused"}, "model": model, "search": asked}))


def test_on_the_command_line_it_is_nested_or_dotted_and_null_is_a_value() -> None:
    nested = load(
        Job,
        None,
        ["table.uri=x", "search.refit.train.epochs=3", "search.refit.train.clip_norm=null"],
    )
    dotted = load(
        Job, None, ["table.uri=x", "search.refit={train.epochs: 3, train.clip_norm: null}"]
    )
    assert (
        nested.search.refit == dotted.search.refit == {"train.epochs": 3, "train.clip_norm": None}
    )


def test_heads_of_a_calibrated_model_stay_as_they_are() -> None:
    """The preset was refused, by the name of a setting that nobody had set."""
    tree = {"table": {"uri": "unused"}, "model": {"calibrate": True}, "search": {"preset": "fast"}}
    job = validate(Job, tree)
    refit.check(job.training, job.search)
    pinned: Any = SimpleNamespace(counts={"test": 900, "val": 300}, common=lambda *of: [])
    assert "temperature" in refit.never(job.training, job.search, pinned)


def test_heads_learn_from_validation_if_test_images_are_left() -> None:
    job = validate(Job, {"table": {"uri": "unused"}, "search": {"refit": "heads"}})

    def why(val: int, test: int, common: list[str]) -> str:
        counts = {"val": val, "test": test}
        pinned: Any = SimpleNamespace(counts=counts, common=lambda *of: common)
        return refit.never(job.training, job.search, pinned)

    assert why(300, 100, []) == why(30, 30, []) == ""
    assert "99 labelled images, and 100 are needed" in why(300, 99, [])
    assert "29 labelled images, and 30 are needed" in why(30, 29, [])
    assert "would learn" in why(300, 300, ["val"])
