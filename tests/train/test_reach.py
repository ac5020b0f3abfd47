"""Parameters that no step reaches, or only some; and outputs that cannot serve as features."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from raypipe.config import replace
from raypipe.errors import ConfigError
from raypipe.models.zoo import ImageModel
from raypipe.train.job import TrainJob
from raypipe.train.parallel.reach import freeze_unreached
from raypipe.train.worker import train_rank

from . import odd_models, ranks
from .test_loop import Recorder, job, pixels

EXAMPLE = torch.empty((1, 3, 32, 32), device="meta")


def of(factory: str, strategy: str, **train: Any) -> TrainJob:
    named = {"model.name": f"file:odd_models:{factory}", "model.side_px": 32, "model.dropout": 0.0}
    return replace(
        job(strategy=strategy, epochs=2, batch_size=12, weight_decay=0.0, **train), named
    )


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.parametrize("factory", ["masked", "by_value"])
def test_what_no_pass_reaches_is_frozen_and_nothing_else_changes(factory: str) -> None:
    model = getattr(odd_models, factory)(False)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    generators = torch.get_rng_state(), random.getstate()
    assert freeze_unreached(model, EXAMPLE) == []
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["mask_token"]
    assert model.training and all(
        torch.equal(t, before[name]) for name, t in model.state_dict().items()
    )
    assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]
    assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())


def test_what_is_skipped_at_random_is_not_frozen() -> None:
    """In training mode alone, three passes may all skip a block: it would stay as it began."""
    random.seed(0)
    found = []
    for _ in range(20):
        model = odd_models.skipping(False)
        found += freeze_unreached(model, EXAMPLE)
        assert [name for name, p in model.named_parameters() if not p.requires_grad] == [
            "mask_token"
        ]
    assert {name.split(".")[0] for name in found} == {"blocks"}


def rank(me: int, folder: str, jobs: list[dict[str, Any]]) -> None:
    for i, told in enumerate(jobs):
        torch.manual_seed(0)
        random.seed(me)
        recorder = Recorder(Path(folder, f"{i}-{me}"))
        try:
            state = train_rank(
                TrainJob.model_validate(told), pixels(), None, recorder.save, recorder.report
            )
            said = {"loss": [line["train_loss"] for line in state.history]}
        except ConfigError as e:
            said = {"refused": str(e)}
        Path(folder, f"{i}-{me}.json").write_text(json.dumps(said))


def test_strategies_train_a_model_with_a_parameter_without_gradient(tmp_path: Path) -> None:
    """ddp failed in its second step. It also trains blocks skipped at random; fsdp refuses them."""
    alone = Recorder(tmp_path / "single")
    single = train_rank(of("masked", "single"), pixels(), None, alone.save, alone.report)
    jobs = [
        of("masked", "ddp"),
        of("masked", "fsdp"),
        of("skipping", "ddp"),
        of("skipping", "fsdp"),
    ]
    jobs = [replace(one, {"train.sync_bn": True}) for one in jobs]
    ranks.start(rank, (str(tmp_path), [one.model_dump(mode="json") for one in jobs]), 2)
    ddp, fsdp, skipping, refused = (
        json.loads((tmp_path / f"{i}-0.json").read_text()) for i in range(4)
    )
    expected = [line["train_loss"] for line in single.history]
    assert ddp["loss"] == pytest.approx(expected, rel=1e-3) and fsdp["loss"] == pytest.approx(
        expected, rel=1e-3
    )
    assert len(skipping["loss"]) == 2
    assert (
        "skips some at random" in refused["refused"]
        and "Set train.strategy=ddp" in refused["refused"]
    )


@pytest.mark.parametrize("factory", ["noise", "batched"])
def test_features_that_are_no_function_of_the_image_are_refused(factory: str) -> None:
    with pytest.raises(
        ConfigError, match=r"change from call to call.*the other images.*apart.*options"
    ):
        ImageModel(of(factory, "single").model, 2)


def test_an_output_that_is_a_tuple_in_training_alone_is_refused_by_name() -> None:
    model = ImageModel(of("two_outputs", "single").model, 2)
    images_BHWC = torch.zeros(2, 32, 32, 3, dtype=torch.uint8)
    assert model.eval()(images_BHWC).shape == (2, 2)
    with pytest.raises(
        ConfigError, match=r"features for each image.*'tuple'.*In training too.*aux_logits"
    ):
        model.train()(images_BHWC)
