"""NaN is never a result: of an epoch, trial, soup, package or prediction, at any accuracy."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from raypipe.errors import DataError, RaypipeError
from raypipe.models.tasks import Task
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.registry import package, packing
from raypipe.registry.package import Package, Reference
from raypipe.search import leaderboard, soup, trial_files
from raypipe.search.leaderboard import Trial
from raypipe.search.trials import trial_checkpoints
from raypipe.train import checkpoint, trainer
from raypipe.train.checkpoint.saver import Saver, kept
from raypipe.train.loop import LoopState
from raypipe.train.objective import Objective, judge
from raypipe.train.parallel import Engine, Snapshot
from raypipe.train.parallel.snapshot import Piece
from raypipe.train.start import load_into
from raypipe.train.stopping import StoppingConfig, best_of, unusable
from raypipe.train.worker import Data, train_rank

from ..pixels import memory
from .conftest import Jobs
from .test_loop import Recorder, job

NAN = float("nan")
CFG = ModelConfig(name="small_cnn", pretrained=False, mode="finetune")


def uneven() -> Data:
    """80 of 100 images are of class 0: what argmax of NaN "predicts" is right for 80 %."""
    rng = np.random.default_rng(5)

    def source(rows: int) -> Any:
        labels = (np.arange(rows) % 5 == 0).astype(np.int64)
        return memory((rng.normal(size=(rows, 8)) + labels[:, None]).astype(np.float32), labels)

    return Data(("good", "bad"), True, source(50), source(50))


def strict(text: str) -> Any:
    """JSON as the standard has it: a bare NaN is an error."""

    def refuse(name: str) -> None:
        raise ValueError(f"a bare {name} in JSON")

    return json.loads(text, parse_constant=refuse)


def poison(state: LoopState, engine: Engine, epoch: int) -> None:
    """A NaN among the trained weights after this epoch, as a step that overflowed would leave."""
    if (state.epoch, state.step) == (epoch, 0):
        engine._stored()[0].fill_(torch.nan)  # type: ignore[attr-defined]


@pytest.mark.parametrize("guard", [True, False])
@pytest.mark.parametrize("result", ["best", "last"])
def test_no_epoch_of_nan_is_the_best(tmp_path: Path, guard: bool, result: str) -> None:
    told = Recorder(tmp_path)
    cfg = job(lr=1e30, epochs=6, result=result, stopping={"patience": None, "nan_guard": guard})
    state = train_rank(cfg, uneven(), None, told.save, told.report)
    lost = [epoch for epoch, metrics in enumerate(state.history) if unusable(metrics)]
    assert lost and state.best_epoch not in lost
    assert all(np.isnan(state.history[epoch]["val_accuracy"]) for epoch in lost)
    if guard:
        assert lost == [state.epoch - 1]
        assert str(state.stopped).startswith(f"epoch {state.epoch} is unusable: train_loss is ")
        assert "train.lr=1e+30" in str(state.stopped)
    else:
        assert state.epoch == 6 and state.stopped is None


def test_a_weight_alone_is_enough(tmp_path: Path) -> None:
    """No output of this epoch depends on the statistic: losses are finite, the weights unusable."""

    class Statistic(Recorder):
        def save(self, state: LoopState, engine: Engine) -> None:
            super().save(state, engine)
            head = engine._model  # type: ignore[attr-defined]
            head.register_buffer("unused", torch.tensor([NAN]))

    told = Statistic(tmp_path)
    state = train_rank(job(epochs=4), uneven(), None, told.save, told.report)
    assert state.best_epoch == 0 and state.epoch == 2
    assert "epoch 2 is unusable: the weights unused hold NaN or infinity" in str(state.stopped)


def test_what_is_written_is_json_and_reads_back(tmp_path: Path) -> None:
    told = Recorder(tmp_path)
    state = train_rank(job(lr=1e30), uneven(), None, told.save, told.report)
    written = sorted(tmp_path.glob("*/*.json"))
    assert written and all(strict(path.read_text()) for path in written)
    again = checkpoint.read(tmp_path / checkpoint.name(state.epoch)).state
    assert str(again) == str(state) and np.isnan(
        again.history[-1]["val_loss"]
    )  # NaN is not equal to itself


def test_a_run_keeps_its_last_good_epoch_and_says_so(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Poisoning(Saver):
        def __call__(self, state: LoopState, engine: Engine) -> None:
            super().__call__(state, engine)
            poison(state, engine, epoch=2)

    monkeypatch.setattr(trainer, "Saver", Poisoning)
    monkeypatch.setattr(logging.getLogger("raypipe"), "propagate", True)
    one = jobs(**{"train.epochs": 4, "cluster.address": "none", "train.result": "last"})
    with caplog.at_level(logging.WARNING):
        result = trainer.run(one)
    assert (
        result.best_epoch == 1
        and len(result.history) == 3
        and "epoch 3 is unusable" in str(result.stopped)
    )
    assert (
        "Epoch 3 is unusable: train_loss is nan" in caplog.text
        and "The result is epoch 2. Lower train.lr" in caplog.text
    )
    assert all(t.isfinite().all() for t in trainer.assemble(one, result).state_dict().values())
    assert strict((one.folder(result.key) / "result.json").read_text())["best_epoch"] == 1
    again = trainer.run(one)
    assert str(again.history) == str(result.history) and again.checkpoint == result.checkpoint


def test_a_run_without_a_good_epoch_says_what_epoch_rate_and_way_out(jobs: Jobs) -> None:
    one = jobs(**{"train.lr": 1e30, "train.weight_decay": 1.0, "cluster.address": "none"})
    says = (
        r"no epoch is usable.*epoch 1 is unusable.*is (nan|inf).*train\.lr=1e\+30.*Lower train\.lr"
    )
    for _ in range(2):  # the same command again says the same
        with pytest.raises(RaypipeError, match=says):
            trainer.run(one)


def test_a_metric_that_means_nothing_here_is_no_divergence(jobs: Jobs) -> None:
    state = LoopState(epoch=1, history=[{"train_loss": 0.1, "val_loss": 0.1, "val_r2": NAN}])
    one = jobs(**{"model.task": "regression", "train.stopping.metric": "val_r2"})
    with pytest.raises(
        RaypipeError,
        match=r"val_r2 was never a number.*labels that differ.*stopping\.metric=val_mae",
    ):
        trainer._require_usable(one, state)


def test_what_an_older_version_called_best_is_judged_again() -> None:
    """ba74455 wrote bare NaN, and took the share of class 0 for an accuracy."""
    good = {"train_loss": 0.6, "val_loss": 0.6, "val_accuracy": 0.7}
    lost = {"train_loss": NAN, "val_loss": NAN, "val_accuracy": 0.8}
    text = json.dumps(
        LoopState(3, history=[good, lost, lost], best=0.8, best_epoch=1).to_dict()
        | {"loss_sum": NAN}
    )
    read = json.loads(text)
    del read["problem"]  # it did not know that field
    state = LoopState.from_dict(read).with_usable_best(StoppingConfig(), last=False)
    assert (state.best_epoch, state.best) == (0, 0.7)
    assert kept(state, StoppingConfig(), 3) == {checkpoint.name(1)}
    assert (
        LoopState.from_dict(read | {"history": [lost], "best_epoch": 0})
        .with_usable_best(StoppingConfig(), True)
        .best_epoch
        == -1
    )
    assert best_of([good, good | {"val_accuracy": 0.6}, lost], StoppingConfig(), last=True) == 1


def test_an_older_result_of_nan_is_refused_with_the_way_out(tmp_path: Path) -> None:
    lost = {"train_loss": NAN, "val_loss": NAN, "val_accuracy": 0.8}
    (tmp_path / "result.json").write_text(
        json.dumps({"history": [lost], "best_epoch": 0, "checkpoint": "gone"})
    )
    with pytest.raises(
        RaypipeError, match=r"kept result is unusable: train_loss is nan.*Remove .* to train again"
    ):
        trainer._read_outcome(tmp_path / "result.json")


def test_scores_of_nan_are_not_judged() -> None:
    task = Task("single_label", ("a", "b"))
    scores_NC = torch.tensor([[0.9, 0.1], [NAN, NAN]])
    with pytest.raises(DataError, match=r"scores that are not finite.*1 of 2 images"):
        judge(task, scores_NC, torch.tensor([0, 0]))


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", ["single_label", "multi_label", "probability", "regression"])
def test_one_logit_that_is_not_finite_makes_every_metric_of_the_split_nan(
    kind: Any, value: float
) -> None:
    classes = ("a", "b") if kind in ("single_label", "multi_label") else ("value",)
    labels_N = (
        np.zeros(4, np.int64) if kind == "single_label" else np.zeros((4, len(classes)), np.float32)
    )
    objective = Objective.of(Task(kind, classes), labels_N)
    logits_BC = torch.zeros(4, len(classes))
    logits_BC[2, -1] = value
    assert all(
        np.isnan(v)
        for v in objective.metrics(objective.totals(logits_BC, torch.from_numpy(labels_N))).values()
    )


def test_features_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    data, told = uneven(), Recorder(tmp_path)
    data.train.inputs[3, 2] = NAN
    with pytest.raises(DataError, match=r"features that are not finite.*1 of 50 images"):
        train_rank(job(), data, None, told.save, told.report)


def test_nothing_starts_from_weights_that_are_not_finite(tmp_path: Path) -> None:
    weights = {"linear.weight": Piece.whole(torch.tensor([[1.0, NAN]]))}
    at = checkpoint.write(tmp_path / "epoch", Snapshot(weights), LoopState(epoch=1))
    with pytest.raises(DataError, match=r"linear\.weight holds NaN.*Set train\.start_from=null"):
        load_into(torch.nn.Linear(2, 1), at, job().model, ("a", "b"))


def packed(folder: Path) -> Package:
    torch.manual_seed(0)
    reference = Reference(np.zeros((1, 64)), np.full((1, 2), 0.5), ("a",))
    return Package(
        packing.build(
            folder, ImageModel(CFG, 2), CFG, ("a", "b"), reference, {"metrics": {"val_r2": NAN}}
        )
    )


def test_a_package_of_nan_is_neither_written_nor_loaded(tmp_path: Path) -> None:
    model, lost = ImageModel(CFG, 2), tmp_path / "lost"
    with torch.no_grad():
        model.head.linear.bias[1] = NAN
    reference = Reference(np.zeros((1, 64)), np.full((1, 2), 0.5), ("a",))
    with pytest.raises(
        DataError,
        match=r"head\.linear\.bias holds NaN.*Train and register again, with a lower train\.lr",
    ):
        packing.build(lost, model, CFG, ("a", "b"), reference, {})
    with pytest.raises(DataError, match=r"scores that are not finite.*1 of 1 images"):
        packing.build(
            lost,
            ImageModel(CFG, 2),
            CFG,
            ("a", "b"),
            Reference(np.zeros((1, 64)), np.full((1, 2), NAN), ("a",)),
            {},
        )
    assert not lost.exists()

    whole = packed(tmp_path / "package")
    assert strict((whole.folder / "package.json").read_text())["metrics"] == {"val_r2": None}
    weights = load_file(whole.folder / "weights.safetensors")
    save_file(
        weights | {"head.linear.bias": torch.tensor([0.0, NAN])},
        whole.folder / "weights.safetensors",
    )
    manifest = {
        name: package.sha256((whole.folder / name).read_bytes()) for name in package._FILES
    }  # as ba74455 would have packed it
    (whole.folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"head\.linear\.bias holds NaN.*Take another version"):
        _ = Package(whole.folder).model


def test_a_prediction_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    """Finite weights, and an image at which they overflow."""
    model = ImageModel(CFG, 2).eval()
    with torch.no_grad():
        model.head.linear.weight.fill_(3e38)
        model.head.mean.fill_(-9.0)
    with pytest.raises(
        DataError, match=r"scores that are not finite.*2 of 2 images.*Take another version"
    ):
        model.predict(np.zeros((2, 32, 32, 3), np.uint8))


def test_a_trial_of_nan_ranks_last_and_is_never_best(tmp_path: Path) -> None:
    trials = tmp_path / "trials"
    lines = []
    for name, lr in (("trial-000-a", 0.2), ("trial-001-b", 1e30)):
        with Saver(
            trial_checkpoints.prepare_folder(trials, name, {"train.lr": lr}, None), job().train
        ) as saver:
            train_rank(job(lr=lr, epochs=3), uneven(), None, saver, lambda *told: None)
        result = SimpleNamespace(
            path=str(tmp_path / name), checkpoint=None, config={"train.lr": lr}, error=None
        )
        lines.append(trial_files.trial_of(result, "val_accuracy", "max", job().train, trials))
    good, lost = lines
    assert good.checkpoint is not None and good.metric == max(
        line["val_accuracy"] for line in good.history
    )
    if (
        lost.checkpoint is not None
    ):  # an epoch before the overflow may count, the one of NaN does not
        at = checkpoint.read(Path(lost.checkpoint))
        assert unusable(at.state.history[at.state.epoch - 1]) is None
    trial_files.write(
        tmp_path / "result.json",
        leaderboard.ranked(reversed(lines), "val_accuracy", "max"),
        None,
        0,
    )
    strict((tmp_path / "result.json").read_text())
    read = trial_files.read(tmp_path / "result.json")[0]
    assert read[0].name == good.name


def test_an_older_ranking_by_nan_is_read_with_that_trial_last(tmp_path: Path) -> None:
    lost = {"train_loss": NAN, "val_loss": NAN, "val_accuracy": 0.8}
    good = {"train_loss": 0.5, "val_loss": 0.5, "val_accuracy": 0.7}
    trials = [
        Trial(name, {}, line["val_accuracy"], 1, False, (line,), "there")
        for name, line in (("a", lost), ("b", good))
    ]
    text = json.dumps({"trials": [t.__dict__ for t in trials], "stopped": None, "decoded": 0})
    (tmp_path / "result.json").write_text(text)
    first, second = trial_files.read(tmp_path / "result.json")[0]
    assert (first.name, second.name, second.checkpoint) == ("b", "a", None)


def test_no_soup_is_cooked_with_nan(tmp_path: Path) -> None:
    """An accuracy says nothing: judged by it, weights of NaN would join."""

    def of(name: str, weight: float) -> Trial:
        at = checkpoint.write(
            tmp_path / name,
            Snapshot({"w": Piece.whole(torch.tensor([weight]))}),
            LoopState(history=[{}]),
        )
        return Trial(name, {}, 0.8, 1, False, (), str(at))

    def accuracy(weights: Any) -> dict[str, float]:
        # The mean of 1 and 2 is better than either.
        return {"val_accuracy": 0.8, "val_loss": abs(float(weights["w"].sum()) - 1.5)}

    found = soup.make(
        [of("a", 1.0), of("b", NAN), of("c", 2.0)], accuracy, "val_accuracy", "max", tmp_path
    )
    assert found is not None and found.members == ("a", "c")
    shutil.rmtree(tmp_path / "a")
    assert (
        soup.make([of("a", NAN), of("c", 2.0)], accuracy, "val_accuracy", "max", tmp_path) is None
    )
