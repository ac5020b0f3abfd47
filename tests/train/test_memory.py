"""`auto` counts all memory of training, and this process's limit instead of its host's memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.train.parallel.blocks import checkpoint_activations
from raypipe.train.parallel.memory import Need, activation_bytes, choose, need_of
from raypipe.train.parallel.norms import sync_batch_norms

from .parallel_ranks import tiny

IMAGE = torch.empty((1, 32, 32, 3), dtype=torch.uint8, device="meta")
ROOM = 0.8


@given(
    trained=st.integers(1, 2**40),
    frozen=st.integers(0, 2**40),
    activations=st.integers(0, 2**36),
    ema=st.booleans(),
    devices=st.integers(1, 64),
    memory=st.integers(2**30, 2**37),
)
def test_auto_shards_only_what_does_not_fit(
    trained: int, frozen: int, activations: int, ema: bool, devices: int, memory: int
) -> None:
    choice = choose(Need(trained, frozen, activations, ema), devices, memory)
    state = trained * (4 + ema) + frozen
    assert (choice.strategy in ("single", "ddp")) == (
        state + activations <= ROOM * memory or devices == 1
    )
    assert (choice.strategy == "single") == (devices == 1)
    if choice.strategy == "fsdp":
        assert choice.bytes_a_device == pytest.approx(state / devices + activations)
        assert choice.bytes_a_device <= ROOM * memory
    assert (choice.offload != "none") == (choice.strategy == "zero3")
    assert choice.strategy in choice.reason or "does not fit" in choice.reason
    if activations > ROOM * memory:
        assert "raise train.accumulate" in choice.reason


def test_auto_says_why() -> None:
    assert choose(Need(4 * 10**9, activations=2**30), 2, 16 * 2**30).reason == (
        "Parameters, gradients, optimizer take 14.9 GiB, "
        "the activations of a micro batch 1.0 GiB; a device has room for "
        "12.8 GiB: fsdp, sharded over 2 devices to 8.5 GiB each"
    )


@pytest.mark.parametrize(
    ("more", "bytes_more"),
    [({"ema": True}, 2**30), ({"frozen": 2**30}, 2**30), ({"activations": 2**30}, 2**30)],
    ids=["ema", "frozen", "activations"],
)
def test_what_an_estimate_of_trained_parameters_forgets_changes_the_choice(
    more: dict[str, int], bytes_more: int
) -> None:
    """ba74455 counted four times all parameters, and nothing else."""
    memory = int((4 * 2**30 + bytes_more / 2) / ROOM)
    assert choose(Need(2**30), 2, memory).strategy == "ddp"
    assert choose(Need(2**30, **more), 2, memory).strategy == "fsdp"  # type: ignore[arg-type]


def test_frozen_parameters_cost_themselves_alone() -> None:
    """EfficientNet with frozen blocks: no gradient, no moments."""
    cfg = ModelConfig(mode="finetune", frozen_blocks=8, side_px=64)
    model = ImageModel(cfg, 2)
    need = need_of(model, None, 8, torch.float32, ema=False, checkpointing=False)
    still = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert 0 < need.frozen == 4 * still and need.trained + need.frozen == 4 * sum(
        p.numel() for p in model.parameters()
    )
    assert need.state == 4 * need.trained + need.frozen


def test_activations_are_what_the_backward_pass_keeps() -> None:
    """Three layers of 1,000 by hand: inputs of each; ReLU's outputs are the next inputs."""
    layers = nn.Sequential(
        nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 10)
    )
    found = activation_bytes(layers, torch.empty(1, 1000))
    assert (
        found == 4 * 3000 and activation_bytes(layers, torch.empty(1, 1000)) == found
    )  # the input, and two outputs
    assert all(p.device.type == "cpu" and p.grad is None for p in layers.parameters())
    small, large = (
        activation_bytes(ImageModel(ModelConfig(mode="finetune", side_px=px), 2), _image(px))
        for px in (64, 128)
    )
    assert 3 < large / small < 5
    plain, half = (
        need_of(tiny(), _image(8), 16, dtype, False, False)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert 0 < half.activations == plain.activations // 2
    assert (
        need_of(tiny(), _image(8), 16, torch.float32, False, True).activations < plain.activations
    )


def _image(px: int) -> torch.Tensor:
    return torch.empty((1, px, px, 3), device="meta")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_frozen_norms_stay_as_they_were_under_sync_bn(device: str) -> None:
    """PyTorch's conversion also replaced frozen norms, whose statistics then moved."""
    model = ImageModel(ModelConfig(mode="finetune", frozen_blocks=3, side_px=64), 2)
    norms = {
        name
        for name, m in model.train().named_modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm)
    }
    still = {name for name in norms if not model.get_submodule(name).training}
    model = sync_batch_norms(model, torch.device(device), world=2).train()
    assert still and {name for name in norms if not model.get_submodule(name).training} == still
    changed = {name for name in norms if type(model.get_submodule(name)) is not nn.BatchNorm2d}
    assert changed == norms - still


def test_reentrant_checkpointing_counts_a_batch_once_and_trains_above_frozen_layers() -> None:
    """zero3's. Statistics moved twice a step, and a block above frozen layers got no gradient."""
    models = [tiny(batch_norm=True).train() for _ in range(2)]
    checkpoint_activations(models[1], reentrant=True)
    for frozen in (False, True):
        for model in models:
            for p in (
                *model.stem.parameters(),
                *model.norm.parameters(),
                *model.pointwise.parameters(),
            ):
                p.requires_grad_(not frozen)
            model.zero_grad(set_to_none=True)
            model(
                torch.arange(4 * 8 * 8 * 3).view(4, 8, 8, 3).float() % 7
            ).square().sum().backward()
        for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), name
            assert a.grad is None or torch.allclose(a.grad, b.grad, atol=1e-5)
    for (name, a), b in zip(models[0].named_buffers(), models[1].buffers(), strict=True):
        assert torch.allclose(a, b), name
