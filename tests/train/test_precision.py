"""What a step computes in: depthwise convolutions stay in float32 where a CPU autocasts."""

from copy import deepcopy

import torch
from torch import nn

from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.train.parallel.precision import autocast, keep_depthwise_float32


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 2, 1))


def seen_by(model: nn.Sequential) -> list[torch.dtype]:
    """What each convolution's kernel was given, layer by layer."""
    found = []

    class Spy(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.conv2d:
                found.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else args[0].dtype)
            return function(*args, **(kwargs or {}))

    with autocast(torch.device("cpu"), torch.bfloat16), Spy():
        model(torch.rand(1, 4, 8, 8))
    return found


def test_only_the_depthwise_convolution_computes_in_float32():
    model = net()
    assert seen_by(model) == [torch.bfloat16] * 3, "as autocast has it"
    keep_depthwise_float32(model)
    assert seen_by(model) == [torch.bfloat16, torch.float32, torch.bfloat16]


def test_what_follows_gets_the_type_that_came_in():
    model = net()
    keep_depthwise_float32(model)
    with autocast(torch.device("cpu"), torch.bfloat16):
        assert model[:2](torch.rand(1, 4, 8, 8)).dtype is torch.bfloat16
    assert model(torch.rand(1, 4, 8, 8)).dtype is torch.float32


def test_names_weights_and_float32_outputs_stay():
    model, images = net(), torch.rand(2, 4, 8, 8)
    before, names = model(images), list(model.state_dict())
    keep_depthwise_float32(model)
    keep_depthwise_float32(model)  # twice is once
    assert list(model.state_dict()) == names
    assert torch.equal(model(images), before)
    assert [type(m).__mro__.count(nn.Conv2d) for m in model] == [1, 1, 1]


def test_a_copy_uses_its_own_weights():
    model = net()
    keep_depthwise_float32(model)
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
        keep_depthwise_float32(model)
        images = torch.randint(0, 256, (4, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        with autocast(torch.device("cpu"), dtype):
            loss = model(images).float().logsumexp(1).sum()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.backbone.parameters() if p.grad is not None])

    exact, rounded = gradient(torch.float32), gradient(torch.bfloat16)
    assert torch.cosine_similarity(exact, rounded, dim=0) > 0.98
