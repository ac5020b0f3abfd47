"""`by_epoch`: each stage has its own values, and continues the weights and the optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raypipe.config import load, replace, save, validate
from raypipe.errors import ConfigError
from raypipe.train import checkpoint, trainer
from raypipe.train.job import TrainJob, TrainResult

from .conftest import Jobs

LOCAL = {"cluster.address": "none", "train.result": "last", "train.ema": 0.9, "model.dropout": 0.2}
JOB = validate(TrainJob, {"table": {"uri": "unused"}, "train": {"epochs": 6}})


def tensors(result: TrainResult) -> dict[str, torch.Tensor]:
    found = checkpoint.read(Path(result.checkpoint))
    return {**found.weights, **{f"optimizer/{k}": v for k, v in found.optimizer.items()}}


def equal(a: TrainResult, b: TrainResult) -> bool:
    ours, theirs = tensors(a), tensors(b)
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


def test_a_stage_that_changes_nothing_changes_no_bit(jobs: Jobs, tmp_path: Path) -> None:
    plain = jobs(**LOCAL)
    staged = replace(
        plain, {"by_epoch": {2: {"train.lr": plain.train.lr}}, "run.dir": str(tmp_path / "b")}
    )
    whole, parts = trainer.run(plain), trainer.run(staged)
    assert whole.key != parts.key and equal(whole, parts) and len(parts.history) == 4


def test_a_stage_that_was_interrupted_goes_on_with_its_own_values(
    jobs: Jobs, tmp_path: Path
) -> None:
    """Stopped in every stage and at its boundaries. Another rate in a stage gives another model."""
    stages = {1: {"train.lr": 0.02, "train.batch_size": 8}, 3: {"train.weight_decay": 0.5}}
    job = jobs(**LOCAL, by_epoch=stages)
    undisturbed = trainer.run(job)
    again = replace(job, {"run.dir": str(tmp_path / "again")})

    def stop(metrics: dict[str, float], state: Any) -> None:
        raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            trainer.run(again, progress=stop)
    assert equal(trainer.run(again), undisturbed)
    other = replace(job, {"by_epoch": {1: stages[1]}, "run.dir": str(tmp_path / "other")})
    assert not equal(trainer.run(other), undisturbed)


def test_what_a_stage_does_not_name_stays() -> None:
    job = replace(
        JOB, {"by_epoch": {4: {"train.lr": 0.1}, 2: {"train.lr": 0.2, "model.dropout": 0.3}}}
    )
    found = [job.stage(epoch) for epoch in range(6)]
    assert [stage.train.lr for stage, _ in found] == [1e-3, 1e-3, 0.2, 0.2, 0.1, 0.1]
    assert [stage.model.dropout for stage, _ in found[2:]] == [0.3] * 4
    assert [until for _, until in found] == [2, 2, 4, 4, None, None]


def test_a_file_and_a_command_line_say_the_same(tmp_path: Path) -> None:
    job = replace(JOB, {"by_epoch": {2: {"train.lr": 1e-9}, 4: {"augment.brightness": 0.2}}})
    assert load(TrainJob, save(job, tmp_path / "job.yaml")) == job
    said = [
        "table.uri=unused",
        "train.epochs=6",
        "by_epoch.2.train.lr=1.0e-9",
        "by_epoch.4={augment.brightness: 0.2}",
    ]
    assert load(TrainJob, None, said).by_epoch == job.by_epoch
    assert load(TrainJob, tmp_path / "job.yaml", ["by_epoch.2.train.lr=0.5"]).by_epoch[2] == {
        "train.lr": 0.5
    }
    assert TrainJob.model_validate_json(job.model_dump_json()) == job, (
        "as MLflow and packages keep it"
    )


def test_a_task_with_its_own_metric_may_have_stages() -> None:
    job = replace(JOB, {"model.task": "regression", "train.stopping.metric": "val_mae"})
    plain = validate(
        TrainJob,
        {
            "table": {"uri": "x"},
            "model": {"task": "regression"},
            "train": {"epochs": 3},
            "by_epoch": {1: {"train.lr": 0.1}},
        },
    )
    assert plain.stage(1)[0].train.stopping.metric == plain.train.stopping.metric
    assert replace(job, {"by_epoch": {1: {"train.lr": 0.1}}}).stage(1)[0].train.lr == 0.1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"by_epoch": {0: {"train.lr": 0.1}}}, r"by_epoch\.0.*greater than or equal to 1"),
        ({"by_epoch": {6: {"train.lr": 0.1}}}, r"after epoch 6, and train\.epochs=6"),
        ({"by_epoch": {2: {"train.lr": -1}}}, r"by_epoch 2: .*train\.lr"),
        ({"by_epoch": {2: {"train.lr": "auto"}}}, r"train\.lr=auto is found once.*Give a number"),
        (
            {"by_epoch": {2: {"train.epochs": 9}}},
            r"train\.epochs cannot change under a training.*train\.lr.*augment\.\*",
        ),
        ({"by_epoch": {2: {"train.lrr": 0.1}}}, r"train\.lrr cannot change"),
        (
            {"by_epoch": {2: {"by_epoch": {3: {"train.lr": 0.1}}}}},
            r"by_epoch\.3\.train\.lr cannot change",
        ),
        ({"by_epoch": {2: 0.1}}, r"fields by epoch, as in \{4: \{train\.lr: 0\.001\}\}"),
        ({"by_epoch": {"two": {"train.lr": 0.1}}}, r"by_epoch\.two"),
        ({"by_epoch": {True: {"train.lr": 0.1}}}, r"fields by epoch, as in"),
        ({"by_epoch": {2: {"train.lr": float("inf")}}}, r"by_epoch 2: .*train\.lr"),
        ({"by_epoch": [1]}, r"by_epoch is wrong"),
        (
            {"by_epoch": {2: {"train.lr": 0.1}}, "train.strategy": "zero1"},
            r"DeepSpeed's cannot be.*ddp",
        ),
    ],
)
def test_what_no_training_could_do_is_one_message(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replace(JOB, changes)
