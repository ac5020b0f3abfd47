"""Depthwise convolutions under a CPU's autocast: float32, or our gradients, equal to torch's."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d

from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.train.parallel.depthwise import _Quick, _Same, speed_up_depthwise
from raypipe.train.parallel.precision import autocast


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 2, 1))


def seen_by(model: nn.Sequential) -> list[torch.dtype]:
    """What each convolution's kernel was given, layer by layer."""
    found = []

    class Spy(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.conv2d:
                found.append(
                    torch.get_autocast_dtype("cpu")
                    if torch.is_autocast_enabled("cpu")
                    else args[0].dtype
                )
            return function(*args, **(kwargs or {}))

    with autocast(torch.device("cpu"), torch.bfloat16), Spy():
        model(torch.rand(1, 4, 8, 8))
    return found


def test_only_the_depthwise_convolution_computes_in_float32():
    model = net()
    assert seen_by(model) == [torch.bfloat16] * 3, "as autocast has it"
    speed_up_depthwise(model)
    assert seen_by(model) == [torch.bfloat16, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("size", [(14, 14), (7, 9), (2, 3), (1, 1)])
@pytest.mark.parametrize("k", [3, 5])
def test_gradients_are_those_of_torch_to_the_edge_of_the_image(k: int, size: tuple[int, int]):
    torch.manual_seed(0)
    exact = (
        torch.randn(4, 8, *size, dtype=torch.float64),
        torch.randn(8, 1, k, k, dtype=torch.float64),
    )
    grad = torch.randn(4, 8, *size, dtype=torch.float64)

    def found(dtype: torch.dtype, conv) -> list[torch.Tensor]:
        inputs, weight = (t.to(dtype, copy=True).requires_grad_() for t in exact)
        outputs = conv(inputs, weight)
        outputs.backward(grad.to(dtype))
        return [outputs.detach().double(), inputs.grad.double(), weight.grad.double()]

    wanted = found(
        torch.float64, lambda inputs, weight: conv2d(inputs, weight, padding=k // 2, groups=8)
    )
    for ours, theirs in zip(found(torch.float32, _Same.apply), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_default_backbone_is_quick_where_the_size_stays():
    model = ImageModel(ModelConfig(mode="finetune", side_px=64), 2)
    speed_up_depthwise(model)
    depthwise = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.groups > 1]
    assert len(depthwise) == 16 and all(
        isinstance(m, _Quick) == (m.stride[0] == 1) for m in depthwise
    )
    assert sum(isinstance(m, _Quick) for m in depthwise) == 12
    with autocast(torch.device("cpu"), torch.bfloat16):
        outputs = depthwise[0](torch.rand(1, 32, 8, 8, requires_grad=True))
    assert outputs.dtype is torch.bfloat16
    outputs.sum().backward()
    assert depthwise[0].weight.grad.dtype is torch.float32
    still = depthwise[0].requires_grad_(False)
    with autocast(torch.device("cpu"), torch.bfloat16):
        assert still(torch.rand(1, 32, 8, 8)).grad_fn is None, "frozen"


def test_what_follows_gets_the_type_that_came_in():
    model = net()
    speed_up_depthwise(model)
    with autocast(torch.device("cpu"), torch.bfloat16):
        assert model[:2](torch.rand(1, 4, 8, 8)).dtype is torch.bfloat16
    assert model(torch.rand(1, 4, 8, 8)).dtype is torch.float32


def test_names_weights_and_float32_outputs_stay():
    model, images = net(), torch.rand(2, 4, 8, 8)
    before, names = model(images), list(model.state_dict())
    speed_up_depthwise(model)
    speed_up_depthwise(model)  # twice is once
    assert list(model.state_dict()) == names
    assert torch.equal(model(images), before)
    assert [type(m).__mro__.count(nn.Conv2d) for m in model] == [1, 1, 1]


def test_a_copy_uses_its_own_weights():
    model = net()
    speed_up_depthwise(model)
    copy = deepcopy(model)
    with torch.no_grad():
        copy[1].weight.zero_()
        copy[1].bias.zero_()
    assert not torch.equal(copy(torch.ones(1, 4, 8, 8)), model(torch.ones(1, 4, 8, 8)))


def test_bf16_gradients_of_the_default_backbone_are_near_float32s():
    def gradient(dtype: torch.dtype) -> torch.Tensor:
        torch.manual_seed(0)
        model = ImageModel(ModelConfig(mode="finetune", side_px=64, dropout=0.0), 2).eval()
        nn.init.normal_(model.head.linear.weight, generator=torch.Generator().manual_seed(0))
        speed_up_depthwise(model)
        images = torch.randint(
            0, 256, (4, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
        )
        with autocast(torch.device("cpu"), dtype):
            loss = model(images).float().logsumexp(1).sum()
        loss.backward()
        return torch.cat(
            [p.grad.flatten() for p in model.backbone.parameters() if p.grad is not None]
        )

    exact, rounded = gradient(torch.float32), gradient(torch.bfloat16)
    assert torch.cosine_similarity(exact, rounded, dim=0) > 0.98
